//! org.csid1.Plugin: the properties and members of a plugin's object.

use std::collections::HashMap;
use std::sync::Arc;

use zbus::{Fd, OwnedVariant};

use super::call::{Answer, Call, within};
use super::contract::{Map, Object};
use super::failure::Failure;
use super::options::Options;
use crate::error::{Step, shortened};
use crate::names;
use crate::plugin::{InstanceStats, Lines, PluginView, RpcCount, code_name};
use crate::volume::OperationKind;

pub(super) fn view(call: &Call, id: &str) -> Result<PluginView, Failure> {
    let view = call.server.rooms.plugins.view(id);
    view.ok_or_else(|| Failure::Bus("UnknownObject", format!("no plugin {:?} is registered", shortened(id))))
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

/// Returns the id of the plugin that the call names, which is registered.
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
    let volumes = &call.server.rooms.volumes;
    let listed = Arc::new(volumes.list_of_plugin(OperationKind::Restart, &id, call.permit.uid(), &wait)?);
    listed.set(Step::Stop);
    let (stopping, of, held) = (plugins.clone(), id.clone(), listed.clone());
    within(&call.slot, wait.deadline, "restarting the plugin", async move {
        let stopped = stopping.restart(&of).await;
        drop(held);
        stopped
    })
    .await?;
    listed.set(Step::WaitingForPlugin);
    let ready = plugins.ready_again(&id);
    match wait.deadline {
        None => ready.await?,
        Some(deadline) => {
            let in_time = tokio::time::timeout_at(deadline.into(), ready).await;
            in_time.unwrap_or_else(|_| Err(plugins.not_back(&id)))?;
        }
    }
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

/// Returns a row of GetStats. Times are rounded to their bucket of the histogram.
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

/// Returns a row of GetStats. A value that is not counted has no key.
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
