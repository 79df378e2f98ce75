//! The commands that ask a plugin's controller through the cluster's servers, for an operator. Each prints what the same command prints on a
//! host. A server whose nodes have no controller of the plugin refuses the call, and csictl asks the next one.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::inventory_ask::What as Asked;
use csi_proto::cluster::v1::inventory_page::Is;
use csi_proto::cluster::v1::{
    Capability, ChangeAsk, DeleteSnapshotAsk, ExternalSnapshot, InventoryAsk, ListExternal, Listed,
    MeasureCapacity, SnapshotAsk, Topology, ValidateAsk,
};
use csid_client::{AccessMode, AttachmentMode, ExternalRow, SnapshotRow, Validated};
use serde_json::json;

use super::common::{confirmed, done};
use super::operated::{changed_within, limit_of};
use super::plugin::pages;
use crate::{
    args::{self, OneVolume, Plugin, Snapshot, Snapshots},
    hints::Tried,
    operator::Servers,
    output::{self, print, print_json},
    shell::quoted,
};

/// How long a server may take. It waits for a plugin for a few seconds.
const ANSWER: Duration = Duration::from_secs(20);
/// Rows of a page, and of a list at most.
const PAGE: u32 = 100;
const ROWS: usize = 100_000;

fn capabilities(modes: Vec<AccessMode>, block: bool) -> Vec<Capability> {
    let attachment_mode = if block { AttachmentMode::BlockDevice } else { AttachmentMode::FileSystem };
    let capability = |mode: AccessMode| Capability {
        access_mode: mode.as_str().to_owned(),
        attachment_mode: attachment_mode.as_str().to_owned(),
    };
    modes.into_iter().map(capability).collect()
}

/// Asks whether a registered volume can be used in these ways. The exit status says whether the plugin confirms it.
pub async fn validate(
    servers: &Servers,
    OneVolume { namespace, volume }: OneVolume,
    (modes, block): (Vec<AccessMode>, bool),
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<ExitCode> {
    tried.command = "volume validate";
    tried.volume = Some(format!("{} {}", quoted(&namespace), quoted(&volume)));
    let validate = ValidateAsk { namespace, volume, capabilities: capabilities(modes, block) };
    let ask = ChangeAsk { what: Some(What::Validate(validate)) };
    let row = servers.call_within(ANSWER, None, async |channel| {
        Ok(ClusterClient::new(channel).change(ask.clone()).await?.into_inner())
    });
    let Some(answer) = row.await?.validated else { bail!("the server answered with another answer") };
    let validated = Validated { confirmed: answer.confirmed, message: answer.message };
    if json {
        print_json(&validated)?;
    } else if !validated.confirmed {
        print(&format!("not confirmed: {}", output::plain(&validated.message)))?;
    }
    Ok(ExitCode::from(u8::from(!validated.confirmed)))
}

async fn ask(servers: &Servers, plugin: &str, what: Asked) -> anyhow::Result<Is> {
    let ask = InventoryAsk { plugin: plugin.to_owned(), what: Some(what) };
    let page = servers.call_within(ANSWER, None, async |channel| {
        Ok(ClusterClient::new(channel).inventory(ask.clone()).await?.into_inner())
    });
    match page.await?.is {
        Some(is) => Ok(is),
        None => bail!("the server answered with another answer"),
    }
}

/// Returns all rows of a list. `rows`: the rows of a page.
async fn listed<T>(
    servers: &Servers,
    plugin: &str,
    list: ListExternal,
    rows: impl Fn(Listed) -> Vec<T>,
) -> anyhow::Result<Vec<T>> {
    let count = std::cell::Cell::new(0);
    let page = async |token: String| {
        let list = ListExternal { token, max: PAGE, ..list.clone() };
        let Is::Listed(mut page) = ask(servers, plugin, Asked::List(list)).await? else {
            bail!("the server answered with another answer")
        };
        let next = std::mem::take(&mut page.next);
        let page = rows(page);
        count.set(count.get() + page.len());
        if count.get() > ROWS {
            bail!("the plugin lists more than {ROWS} rows, the limit");
        }
        Ok((page, next))
    };
    pages(&format!("ask {plugin} for what it has"), page).await
}

fn about(command: &'static str, plugin: &str, tried: &mut Tried) {
    tried.command = command;
    tried.plugin = Some(plugin.to_owned());
}

/// Asks for a plugin's volumes or its capacity.
pub async fn plugin(servers: &Servers, command: Plugin, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    match command {
        Plugin::Volumes { plugin } => {
            about("plugin volumes", &plugin, tried);
            let volumes = listed(servers, &plugin, ListExternal::default(), |page| {
                let row = |of: csi_proto::cluster::v1::ExternalVolume| ExternalRow {
                    external_id: of.external_id,
                    capacity: of.capacity,
                    published_node_ids: of.published_node_ids,
                    abnormal: of.abnormal,
                    ..ExternalRow::default()
                };
                page.volumes.into_iter().map(row).collect()
            });
            let volumes = volumes.await?;
            if json {
                print_json(&volumes)?;
            } else if volumes.is_empty() {
                eprintln!("The plugin has no volumes.");
            } else {
                print(&output::external_volumes(&volumes))?;
            }
        }
        Plugin::Capacity(args) => {
            about("plugin capacity", &args.plugin, tried);
            let topology = args.topology.map(|args::Topology(segments)| Topology {
                segments: segments.into_iter().map(|args::Pair(key, value)| (key, value)).collect(),
            });
            let parameters = args.parameter.into_iter().map(|args::Pair(key, value)| (key, value)).collect();
            let capabilities = capabilities(args.access_mode, args.block);
            let measure = MeasureCapacity { capabilities, parameters, topology };
            let Is::Available(available) = ask(servers, &args.plugin, Asked::Capacity(measure)).await? else {
                bail!("the server answered with another answer")
            };
            match json {
                true => print_json(&json!({ "available": available.bytes }))?,
                false => print(&output::size(available.bytes))?,
            }
        }
        Plugin::DeleteSnapshot(args) => {
            about("plugin delete-snapshot", &args.plugin, tried);
            confirmed(&args.snapshot, &args.yes, "The plugin deletes the snapshot and its data.")?;
            let what = format!("delete snapshot {}", args.snapshot);
            let call = csid_client::operation_id("csictl")?;
            let delete = DeleteSnapshotAsk { plugin: args.plugin, snapshot: args.snapshot, call };
            changed_within(servers, &what, What::DeleteSnapshot(delete), limit_of(args.deadline.usec()))
                .await?;
            done(json)?;
        }
        // The command line refuses others.
        _ => bail!("an operator cannot do this"),
    }
    Ok(())
}

/// Has a plugin make a snapshot, and prints the plugin's ID of it.
pub async fn snapshot(
    servers: &Servers,
    args: Snapshot,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    let OneVolume { namespace, volume } = args.volume;
    tried.command = "volume snapshot";
    tried.volume = Some(format!("{} {}", quoted(&namespace), quoted(&volume)));
    let what = format!("make the snapshot {} of volume {namespace}/{volume}", args.name);
    let parameters = args.parameter.into_iter().map(|args::Pair(key, value)| (key, value)).collect();
    let (name, no_wait, call) = (args.name, args.no_wait, csid_client::operation_id("csictl")?);
    let ask = SnapshotAsk { namespace, volume, name, parameters, call, no_wait };
    let limit = limit_of(args.wait.deadline.usec());
    let row = changed_within(servers, &what, What::Snapshot(ask), limit).await?;
    let Some(made) = row.snapshot.map(snapshot_row) else { bail!("the server answered with another answer") };
    if json {
        print_json(&made)?
    } else {
        print(&output::plain(&made.id))?
    }
    Ok(())
}

/// Returns a snapshot as csid's rows have it.
fn snapshot_row(of: ExternalSnapshot) -> SnapshotRow {
    SnapshotRow {
        id: of.id,
        external_id: of.external_id,
        size: of.size,
        created: of.created_usec,
        ready: of.ready,
    }
}

pub async fn snapshots(
    servers: &Servers,
    args: Snapshots,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    about("snapshots", &args.plugin, tried);
    let list = ListExternal {
        snapshots: true,
        external_id: args.external_id.unwrap_or_default(),
        ..ListExternal::default()
    };
    let rows = |page: Listed| page.snapshots.into_iter().map(snapshot_row).collect::<Vec<_>>();
    let snapshots = listed(servers, &args.plugin, list, rows).await?;
    if json {
        print_json(&snapshots)?;
    } else if snapshots.is_empty() {
        eprintln!("No snapshots.");
    } else {
        print(&output::snapshots(&snapshots))?;
    }
    Ok(())
}
