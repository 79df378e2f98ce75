//! Members of org.csid1.Plugin that the plugin's controller answers: its capacity, volumes and snapshots.

use std::collections::HashMap;

use zbus::OwnedVariant;

use super::arguments;
use super::call::{Answer, Call, until, within};
use super::contract::Map;
use super::options::{Keys, Options};
use super::plugin;
use super::rows::Rows;
use crate::names;
use crate::plugin::{External, Snapshot};
use crate::volume::api::requests::{DeleteSnapshot, ListSnapshots, Page};

const CAPACITY: Keys = &[("capabilities", "aa{sv}"), ("parameters", "a{ss}"), ("topology", "a{ss}")];
const SNAPSHOTS: Keys = &[("snapshot", "s"), ("volume", "s"), ("token", "s"), ("max", "u")];

pub(super) async fn get_capacity(call: Call) -> Answer {
    let id = plugin::id(&call)?;
    let mut options = Options::check(call.arguments()?, CAPACITY)?;
    let wait = options.wait(call.arrived)?;
    let capabilities = arguments::capabilities(&mut options)?.unwrap_or_default();
    let parameters = arguments::map(&mut options, "parameters")?;
    let topology = options.map("topology");
    names::topologies(topology.as_slice())?;
    let topology = topology.unwrap_or_default();
    let asking = call.server.rooms.volumes.capacity(id, capabilities, parameters, topology);
    let available = until(wait.deadline, asking).await?;
    call.reply(&available)
}

pub(super) async fn list_external_volumes(call: Call) -> Answer {
    let id = plugin::id(&call)?;
    let (token, max): (String, u32) = call.arguments()?;
    names::token(&token)?;
    let (volumes, next) = call.server.rooms.volumes.external_volumes(id, Page { token, max }).await?;
    call.reply(&(Rows::of(volumes.into_iter().map(external)), next))
}

pub(super) async fn list_snapshots(call: Call) -> Answer {
    let id = plugin::id(&call)?;
    let mut options = Options::check(call.arguments()?, SNAPSHOTS)?;
    let wait = options.wait(call.arrived)?;
    let page = Page {
        token: options.checked("token", |_, text| names::token(text))?.unwrap_or_default(),
        max: options.uint("max").unwrap_or(0),
    };
    let snapshot = options.checked("snapshot", names::external_id)?.unwrap_or_default();
    let external_id = options.checked("volume", names::external_id)?.unwrap_or_default();
    let credential = arguments::credential_without_namespace(&mut options, &call.permit)?;
    let secrets = arguments::secrets(&mut options, &credential).await?;
    let uid = call.permit.uid();
    let request = ListSnapshots { snapshot, external_id, page, uid, secrets, credential };
    let (snapshots, next) = until(wait.deadline, call.server.rooms.volumes.snapshots(id, request)).await?;
    call.reply(&(Rows::of(snapshots.into_iter().map(row)), next))
}

pub(super) async fn delete_snapshot(call: Call) -> Answer {
    let id = plugin::id(&call)?.to_owned();
    let (snapshot, map): (String, HashMap<String, OwnedVariant>) = call.arguments()?;
    names::external_id("snapshot", &snapshot)?;
    let mut options = Options::check(map, &[])?;
    let wait = options.wait(call.arrived)?;
    let credential = arguments::credential_without_namespace(&mut options, &call.permit)?;
    let secrets = arguments::secrets(&mut options, &credential).await?;
    let request = DeleteSnapshot { snapshot, uid: call.permit.uid(), secrets, credential };
    let volumes = call.server.rooms.volumes.clone();
    within(&call.slot, wait.deadline, "deleting the snapshot", async move {
        volumes.delete_snapshot(&id, request).await
    })
    .await?;
    call.reply(&())
}

fn external(volume: External) -> Map {
    // A plugin without volume conditions reports nothing abnormal.
    let (abnormal, message) = volume.abnormal.unwrap_or_default();
    Map::from([
        ("external-id", volume.external_id.into()),
        ("capacity", volume.capacity.into()),
        ("published-node-ids", volume.published_node_ids.into()),
        ("abnormal", abnormal.into()),
        ("message", message.into()),
    ])
}

/// Returns the row of a snapshot, in CreateSnapshot's answer too.
pub(super) fn row(snapshot: Snapshot) -> Map {
    Map::from([
        ("id", snapshot.id.into()),
        ("external-id", snapshot.external_id.into()),
        ("size", snapshot.size.into()),
        ("created", snapshot.created_usec.into()),
        ("ready", snapshot.ready.into()),
    ])
}
