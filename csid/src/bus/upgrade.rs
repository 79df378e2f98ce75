//! org.csid1.Plugin: Drain.

use super::dispatch::{Answer, Call, Map};
use super::manager::within;
use super::options::Options;
use super::plugin;

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
