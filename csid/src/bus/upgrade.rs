//! org.csid1.Plugin: Drain and Upgrade.

use std::collections::HashMap;

use zbus::OwnedVariant;

use super::call::{Answer, Call, within};
use super::contract::Map;
use super::manager::{self, SPEC};
use super::options::Options;
use super::plugin;
use crate::names;
use crate::plugin::PluginSpec;

pub(super) async fn drain(call: Call) -> Answer {
    let id = plugin::id(&call)?.to_owned();
    let mut options = Options::check(call.arguments()?, &[])?;
    let wait = options.wait(call.arrived)?;
    let (volumes, uid) = (call.server.rooms.volumes.clone(), call.permit.uid());
    let draining = async move { volumes.drain(&id, uid).await };
    let drained = within(&call.slot, wait.deadline, "draining the plugin", draining).await?;
    let report = Map::from([
        ("unmounted", drained.unmounted.into()),
        ("failed", drained.failed.into()),
        ("claimed", drained.claimed.into()),
    ]);
    call.reply(&(report,))
}

pub(super) async fn upgrade(call: Call) -> Answer {
    let id = plugin::id(&call)?.to_owned();
    let (spec, options): (HashMap<String, OwnedVariant>, HashMap<String, OwnedVariant>) = call.arguments()?;
    let mut spec = Options::check_spec(spec, SPEC)?;
    let mut options = Options::check(options, &[("instance", "s")])?;
    let wait = options.wait(call.arrived)?;
    let replaced = options.checked("instance", |_, text| names::instance(text))?;
    let plugins = call.server.rooms.plugins.clone();
    let before = plugins.upgradable(&id, replaced.as_deref())?;
    let old = before.instance().to_owned();
    // The new instance gets a name of its own.
    let spec = manager::spec(&mut spec, Some(PluginSpec { instance: None, ..before }))?;
    let uid = call.permit.uid();
    let upgrading = async move { plugins.upgrade(&id, &old, spec, uid).await };
    let instance = within(&call.slot, wait.deadline, "the upgrade", upgrading).await?;
    call.reply(&instance)
}
