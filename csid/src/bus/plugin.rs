//! org.csid1.Plugin: a plugin's object, its path, its properties.

use std::collections::HashMap;

use zbus::{Fd, ObjectPath, OwnedVariant};

use super::dispatch::{Answer, Call, Failure, Map, Object, PLUGINS};
use super::inventory::until;
use super::manager::within;
use super::options::Options;
use crate::names;
use crate::plugin::{InstanceStats, Lines, PluginView, RpcCount, code_name};

/// The id as an element of a path, as sd_bus_path_encode does it: everything but letters and digits, and a digit in front, is
/// `_` and two hex digits.
pub(super) fn label(id: &str) -> String {
    let mut label = String::with_capacity(id.len());
    for (place, byte) in id.bytes().enumerate() {
        match byte.is_ascii_alphabetic() || (place > 0 && byte.is_ascii_digit()) {
            true => label.push(byte.into()),
            false => label.push_str(&format!("_{byte:02x}")),
        }
    }
    match label.is_empty() {
        true => "_".to_owned(),
        false => label,
    }
}

/// The id of a path's element; `None` where none has that element.
pub(super) fn id_of_label(text: &str) -> Option<String> {
    let mut id = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'_' {
            let hex = rest.get(..2)?;
            id.push(u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?);
            rest = &rest[2..];
        } else {
            id.push(*first);
        }
    }
    let id = String::from_utf8(id).ok()?;
    (label(&id) == text).then_some(id)
}

pub(super) fn path(id: &str) -> ObjectPath<'static> {
    // Letters, digits, `_` and `/` alone: always a path.
    ObjectPath::from_string_unchecked(format!("{PLUGINS}/{}", label(id)))
}

pub(super) fn view(call: &Call, id: &str) -> Result<PluginView, Failure> {
    let view = call.server.rooms.plugins.view(id);
    view.ok_or_else(|| Failure::Bus("UnknownObject", format!("no plugin {id:?} is registered")))
}

pub(super) fn properties(view: PluginView) -> Map {
    Map::from([
        ("Id", view.id.into()),
        ("State", view.state.into()),
        ("Healthy", view.healthy.into()),
        ("HealthMessage", view.health_message.into()),
        ("Supervision", view.supervision.into()),
        ("Unit", view.unit.into()),
        ("Socket", view.socket.into()),
        ("Instances", view.instances.into()),
        ("Provider", view.provider.into()),
        ("ProviderVersion", view.provider_version.into()),
        ("Services", view.services.into()),
        ("PluginCapabilities", view.plugin_capabilities.into()),
        ("NodeCapabilities", view.node_capabilities.into()),
        ("ControllerCapabilities", view.controller_capabilities.into()),
        ("NodeId", view.node_id.into()),
        ("MaxVolumes", view.max_volumes.into()),
        ("Topology", view.topology.into()),
        ("Restarts", view.restarts.into()),
        ("Log", view.log.into()),
        ("Owner", view.owner.into()),
    ])
}

/// The plugin that is called, which is there.
pub(super) fn id(call: &Call) -> Result<&str, Failure> {
    let Object::Plugin(id) = &call.object else {
        return Err(Failure::Bus("UnknownObject", "no plugin here".to_owned()));
    };
    view(call, id).map(|_| id.as_str())
}

pub(super) async fn probe(call: Call) -> Answer {
    let id = id(&call)?;
    let mut options = Options::check(call.arguments()?, &[])?;
    let wait = options.wait(call.arrived)?;
    let ready = call.server.rooms.plugins.probe(id, wait.deadline).await?;
    call.reply(&ready)
}

pub(super) async fn restart(call: Call) -> Answer {
    let id = id(&call)?.to_owned();
    let mut options = Options::check(call.arguments()?, &[])?;
    let wait = options.wait(call.arrived)?;
    let plugins = call.server.rooms.plugins.clone();
    let (stopping, of) = (plugins.clone(), id.clone());
    within(&call.slot, wait.deadline, "restarting the plugin", async move { stopping.restart(&of).await })
        .await?;
    until(wait.deadline, async { plugins.ready_again(&id).await }).await?;
    call.reply(&())
}

pub(super) async fn accept_node_id(call: Call) -> Answer {
    let id = id(&call)?.to_owned();
    let (node_id, options): (String, HashMap<String, OwnedVariant>) = call.arguments()?;
    names::node_id(&node_id)?;
    let mut options = Options::check(options, &[])?;
    let wait = options.wait(call.arrived)?;
    let (plugins, uid) = (call.server.rooms.plugins.clone(), call.permit.uid());
    within(&call.slot, wait.deadline, "accepting the node id", async move {
        plugins.accept_node_id(&id, &node_id, uid).await
    })
    .await?;
    call.reply(&())
}

pub(super) async fn open_log(call: Call) -> Answer {
    let id = id(&call)?.to_owned();
    let mut options = Options::check(call.arguments()?, &[("follow", "b"), ("since", "t"), ("lines", "u")])?;
    let wait = options.wait(call.arrived)?;
    let lines = Lines {
        follow: options.flag("follow"),
        since_usec: options.number("since"),
        most: options.uint("lines"),
    };
    let plugins = call.server.rooms.plugins.clone();
    let opened =
        within(&call.slot, wait.deadline, "opening the log", async move { plugins.log(&id, lines).await });
    call.reply(&Fd::from(opened.await?))
}

pub(super) async fn get_stats(call: Call) -> Answer {
    let id = id(&call)?.to_owned();
    let stats = call.server.rooms.plugins.stats(&id).await?;
    let rpcs: Vec<_> = stats.rpcs.iter().map(rpc).collect();
    let instances: Vec<_> = stats.instances.into_iter().map(instance).collect();
    call.reply(&Map::from([("rpcs", rpcs.into()), ("instances", instances.into())]))
}

/// Times are known to the bucket that they fall into.
fn rpc(count: &RpcCount) -> Map {
    Map::from([
        ("rpc", count.rpc.into()),
        ("code", code_name(count.code).into()),
        ("count", count.took.count().into()),
        ("total-usec", count.took.total_usec.into()),
        ("p50-usec", count.took.quantile_usec(50).into()),
        ("p99-usec", count.took.quantile_usec(99).into()),
        ("max-usec", count.took.longest_usec.into()),
    ])
}

/// What is not counted has no key.
fn instance(stats: InstanceStats) -> Map {
    let mut map = Map::from([("instance", stats.instance.into())]);
    if !stats.unit.is_empty() {
        map.insert("unit", stats.unit.into());
    }
    let of = &stats.resources;
    let counts = [
        ("cpu-usage-nsec", of.cpu_usage_nsec),
        ("memory-current", of.memory_current),
        ("memory-peak", of.memory_peak),
        ("io-read-bytes", of.io_read_bytes),
        ("io-write-bytes", of.io_write_bytes),
        ("io-read-operations", of.io_read_operations),
        ("io-write-operations", of.io_write_operations),
        ("tasks-current", of.tasks_current),
    ];
    map.extend(counts.into_iter().filter_map(|(key, count)| Some((key, count?.into()))));
    let stalls = [
        ("cpu-pressure-some-avg10", "cpu-pressure-some-usec", of.cpu_pressure.some),
        ("cpu-pressure-full-avg10", "cpu-pressure-full-usec", of.cpu_pressure.full),
        ("memory-pressure-some-avg10", "memory-pressure-some-usec", of.memory_pressure.some),
        ("memory-pressure-full-avg10", "memory-pressure-full-usec", of.memory_pressure.full),
        ("io-pressure-some-avg10", "io-pressure-some-usec", of.io_pressure.some),
        ("io-pressure-full-avg10", "io-pressure-full-usec", of.io_pressure.full),
    ];
    for (avg10, usec, stall) in stalls {
        if let Some(stall) = stall {
            map.extend([(avg10, stall.avg10.into()), (usec, stall.total_usec.into())]);
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_as_sd_bus_does() {
        for (id, escaped) in
            [("local", "local"), ("ebs.csi-1_x", "ebs_2ecsi_2d1_5fx"), ("9p", "_39p"), ("", "_")]
        {
            assert_eq!(label(id), escaped);
            if !id.is_empty() {
                assert_eq!(id_of_label(escaped).as_deref(), Some(id));
            }
        }
    }

    #[test]
    fn one_id_has_one_label() {
        for wrong in ["", "_", "_6", "_6c", "_2E", "a_61", "_ff", "9p", "a.b", "_+1"] {
            assert_eq!(id_of_label(wrong), None, "{wrong:?}");
        }
    }
}
