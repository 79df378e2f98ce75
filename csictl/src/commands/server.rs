//! The commands about a cluster's servers.

use std::process::ExitCode;
use std::time::Duration;

use csi_proto::cluster::v1::admin_client::AdminClient;
use csi_proto::cluster::v1::{AuditAsk, ServerRows, ServersAsk, StatusAsk, UpgradeAsk};

use super::common::confirmed_by;
use crate::{
    args::{Server, ServerUpgrade},
    hints::{self, Tried},
    operator::Servers,
    output::{self, print, print_json},
};

/// How long a server may take for an audit. It reads all of etcd.
const AUDIT: Duration = Duration::from_secs(300);

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
            if json {
                print_json(&output::servers_json(&rows))?;
                return Ok(ExitCode::SUCCESS);
            }
            print(&output::servers(&rows))?;
            for note in output::notes_of_servers(&rows) {
                eprintln!("{note}");
            }
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
