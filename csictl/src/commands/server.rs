//! The commands about a cluster's servers.

use std::process::ExitCode;
use std::time::Duration;

use csi_proto::cluster::v1::admin_client::AdminClient;
use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{
    AuditAsk, RestoredAsk, ResumeAsk, ServerRows, ServersAsk, StatusAsk, UpgradeAsk,
};

use super::common::confirmed_by;
use super::node::{FENCE, show};
use crate::{
    args::{self, Server, ServerUpgrade},
    hints::{self, Tried},
    operator::Servers,
    output::{self, plain, print, print_json},
};

/// How long a server may take for an audit. It reads all of etcd.
const AUDIT: Duration = Duration::from_secs(300);
/// The servers' word for a cluster that recovers from a backup.
const RECOVERING: &str = "recovering";
/// The state of a node that is fenced.
const FENCED: &str = "fenced";

pub async fn server(
    servers: &Servers,
    command: Server,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<ExitCode> {
    match command {
        Server::List => {
            tried.command = "server list";
            let rows = list(servers).await?;
            if !json {
                print(&output::servers(&rows))?;
            }
            noted(&rows, json)?;
            Ok(ExitCode::SUCCESS)
        }
        Server::Restored(args) => {
            restored(servers, args, json, tried).await?;
            Ok(ExitCode::SUCCESS)
        }
        Server::Resume(args) => {
            resume(servers, args, json, tried).await?;
            Ok(ExitCode::SUCCESS)
        }
        Server::Audit => {
            tried.command = "server audit";
            let ask = async |channel| {
                let mut found = AdminClient::new(channel).audit(AuditAsk {}).await?.into_inner();
                let mut findings = Vec::new();
                while let Some(finding) = found.message().await? {
                    findings.push(finding);
                }
                Ok(findings)
            };
            let findings = servers.call_within(AUDIT, None, ask).await?;
            if json {
                print_json(&findings.iter().map(output::finding_json).collect::<Vec<_>>())?;
            } else if findings.is_empty() {
                eprintln!("No findings.");
            } else {
                print(&output::findings(&findings))?;
            }
            Ok(ExitCode::from(u8::from(!findings.is_empty())))
        }
        Server::Upgrade(ServerUpgrade { confirm }) => {
            tried.command = "server upgrade";
            let rows = list(servers).await?;
            let schema = rows.servers.iter().map(|row| row.schema_max).max().unwrap_or_default();
            let rows = if schema > rows.schema {
                let what = format!(
                    "The values in etcd get version {schema} instead of {}. No server of an earlier release serves them again.",
                    rows.schema
                );
                confirmed_by("--confirm", &rows.cluster, &confirm, &what)?;
                let what = format!("raise the version of the values to {schema}");
                let ask = async |channel| {
                    let ask = UpgradeAsk { schema };
                    Ok(AdminClient::new(channel).upgrade(ask).await?.into_inner())
                };
                servers.call(Some(&what), ask).await?
            } else {
                if !json {
                    eprintln!("The values have version {} already.", rows.schema);
                }
                rows
            };
            if json {
                print_json(&output::servers_json(&rows))?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn list(servers: &Servers) -> anyhow::Result<ServerRows> {
    let ask = async |channel| Ok(AdminClient::new(channel).servers(ServersAsk {}).await?.into_inner());
    servers.call(None, ask).await
}

/// Shows the whole cluster on one screen.
pub async fn cluster_status(servers: &Servers, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "cluster status";
    let ask = async |channel| Ok(AdminClient::new(channel).status(StatusAsk {}).await?.into_inner());
    let status = servers.call(None, ask).await?;
    let due = hints::attention(&status);
    match json {
        true => print_json(&output::whole_cluster_json(&status, &due))?,
        false => print(output::whole_cluster(&status, &due).trim_end())?,
    }
    Ok(())
}

/// Prints the servers for programs, or what is to be seen to about them.
fn noted(rows: &ServerRows, json: bool) -> std::io::Result<()> {
    if json {
        return print_json(&output::servers_json(rows));
    }
    for note in output::notes_of_servers(rows) {
        eprintln!("{note}");
    }
    Ok(())
}

/// Has the cluster recover, unless it does.
async fn restored(
    servers: &Servers,
    args: args::Restored,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    tried.command = "server restored";
    let rows = list(servers).await?;
    if rows.mode == RECOVERING && args.past < rows.generation {
        return Ok(noted(&rows, json)?);
    }
    let what = format!(
        "Cluster {} is in generation {}. It grants, attaches and detaches nothing from now on, until you say that all nodes are there: csictl server resume.",
        rows.cluster, rows.generation
    );
    confirmed_by("--confirm", &rows.cluster, &args.confirm, &plain(&what))?;
    // The same again changes nothing, so the next server may be asked for it.
    let ask = RestoredAsk { generation: rows.generation, past: args.past };
    let rows = servers
        .call(Some("have the cluster recover"), async |channel| {
            Ok(AdminClient::new(channel).restored(ask).await?.into_inner())
        })
        .await?;
    Ok(noted(&rows, json)?)
}

/// Fences the nodes that do not come back, forgets refused claims, and ends the recovery. Nothing is done if more is missing.
async fn resume(servers: &Servers, args: args::Resume, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    tried.command = "server resume";
    let args::Resume { without, forget, without_command, confirm } = args;
    let rows = list(servers).await?;
    let asks = steps(servers, &rows, (&without, &forget), without_command).await?;
    if !without.is_empty() {
        let what = format!(
            "The claims of {} nodes end when the cluster is normal: other nodes get the volumes. Their machines have to be off, or two machines may \
             write to a volume.",
            without.len()
        );
        confirmed_by("--confirm", &without.join(","), &confirm, &plain(&what))?;
    }
    let mut rows = rows;
    for ask in asks {
        let what = match ask.step() {
            Step::Fence => format!("fence node {}", ask.node),
            Step::Forget => format!("forget the refused claims of node {}", ask.node),
            Step::End | Step::Unknown => "end the recovery".to_owned(),
        };
        tried.node = Some(ask.node.clone()).filter(|node| !node.is_empty());
        rows = servers
            .call_within(FENCE, Some(&what), async |channel| {
                Ok(AdminClient::new(channel).resume(ask.clone()).await?.into_inner())
            })
            .await?;
    }
    Ok(noted(&rows, json)?)
}

/// Returns the steps to the end of a recovery, the end last. They name the rows that are there now.
async fn steps(
    servers: &Servers,
    rows: &ServerRows,
    (without, forget): (&[String], &[String]),
    by_hand: bool,
) -> anyhow::Result<Vec<ResumeAsk>> {
    let of =
        |step: Step| ResumeAsk { generation: rows.generation, step: step.into(), ..ResumeAsk::default() };
    let mut asks = Vec::new();
    for node in without {
        let row = show(servers, node).await?;
        match (rows.awaited.contains(node), row.state.as_str()) {
            (true, _) => {}
            // An earlier try of the command was interrupted.
            (false, FENCED) => continue,
            (false, _) => {
                anyhow::bail!("the cluster does not wait for a node {}: nothing was done", plain(node))
            }
        }
        if !row.sessions.is_empty() {
            anyhow::bail!("node {node} has a session, so its machine is not off: nothing was done");
        }
        asks.push(ResumeAsk { node: node.clone(), revision: row.revision, by_hand, ..of(Step::Fence) });
    }
    for node in forget {
        // An earlier try of the command may have forgotten them.
        show(servers, node).await?;
        let revision = rows.refused.iter().find(|of| of.node == *node).map_or(0, |of| of.revision);
        asks.push(ResumeAsk { node: node.clone(), revision, ..of(Step::Forget) });
    }
    let awaited = rows.awaited.iter().filter(|node| !without.contains(node));
    let refused = rows.refused.iter().map(|of| &of.node);
    let refused = refused.filter(|node| !forget.contains(node) && !without.contains(node));
    let (awaited, refused) = (output::named(awaited), output::named(refused));
    match (awaited.as_str(), refused.as_str()) {
        ("", "") => {}
        ("", refused) => anyhow::bail!("claims of {refused} were not brought back: nothing was done"),
        (awaited, _) => anyhow::bail!("the cluster waits for {awaited}: nothing was done"),
    }
    asks.push(of(Step::End));
    Ok(asks)
}
