//! org.csid1.Cluster: this host as a node of a cluster.

use std::time::Duration;

use super::call::{Answer, Call, within};
use super::contract::Map;
use super::options::Options;
use super::rooms::Rooms;
use crate::cluster::NodeView;
use crate::error::{Error, Kind};

/// How long csid waits for a server that lets this host join.
const JOIN: Duration = Duration::from_secs(15);

/// Waits until this host has joined. With `import` the host's own registrations are moved to the servers first.
pub(super) async fn join(call: Call) -> Answer {
    let mut options = Options::check(call.arguments()?, &[("import", "b")])?;
    let import = options.flag("import");
    let wait = options.wait(call.arrived)?;
    let Rooms { node, volumes, .. } = call.server.rooms.clone();
    within(&call.slot, wait.deadline, "the join", async move {
        let none = || Error::new(Kind::NotSupported, "this host has no cluster: csid.toml names none");
        let node = node.ok_or_else(none)?;
        if import && !node.is_joined() {
            volumes.import().await?;
            node.look_again();
        }
        node.wait_joined(JOIN).await
    })
    .await?;
    call.reply(&())
}

/// Returns what the node shows now.
pub(super) fn view(rooms: &Rooms) -> NodeView {
    rooms.node.as_ref().map_or_else(NodeView::alone, |node| node.view())
}

pub(super) fn properties(view: &NodeView) -> Map {
    let NodeView { cluster, node, state, server, reason, since_usec, generation, revision, owed } =
        view.clone();
    Map::from([
        ("Name", cluster.into()),
        ("Node", node.into()),
        ("State", state.into()),
        ("Server", server.into()),
        ("Reason", reason.into()),
        ("Since", since_usec.into()),
        ("Generation", generation.into()),
        (REVISION, revision.into()),
        ("Owed", owed.into()),
    ])
}

/// Returns the properties that a signal names: those that have changed. Each claim changes the revision, so no signal has it.
pub(super) fn changes(before: &NodeView, now: &NodeView) -> Map {
    let before = properties(before);
    let now = properties(now).into_iter();
    now.filter(|(name, value)| *name != REVISION && before.get(name) != Some(value)).collect()
}

/// A property without a signal.
const REVISION: &str = "Revision";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_has_what_has_changed_but_no_revision() {
        let joined = NodeView { state: "joined", owed: 2, revision: 7, ..NodeView::alone() };
        let changed = changes(&NodeView::alone(), &joined);
        assert_eq!(changed.keys().copied().collect::<Vec<_>>(), ["Owed", "State"]);
        assert!(changes(&joined, &NodeView { revision: 8, ..joined.clone() }).is_empty());
    }
}
