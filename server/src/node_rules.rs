//! What an operator's change makes of the row of a node. These rules read and write nothing: `nodes` does.

use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{Accept, BlockAsk, FenceAsk};
use csi_proto::identity::Identity;
use csid::error::shortened;
use csid::{Error, Kind};

use crate::cluster::is_in_state;
use crate::failure::Result;
use crate::grants::May;
use crate::rows::{self, BlockRow, FenceRow, MetaRow, Mode, NodeRow, NodeState, Read};
use crate::time::now_usec;

/// The limit of a reason, in bytes.
const REASON: usize = 256;

/// Checks what a change says.
pub fn check(change: &Change) -> Result<()> {
    match change {
        Change::Accept(accept) => {
            csid::volume::rules::check_name("machine-id", &accept.machine_id)?;
            csid::volume::rules::check_name("journal-id", &accept.journal_id)?;
            if accept.forget && !accept.names.is_empty() {
                return Err(Error::invalid("an acceptance has both forget and names").into());
            }
            for (plugin, name) in &accept.names {
                csid::volume::rules::check_name("plugin", plugin)?;
                csid::volume::rules::check_node_id(name)?;
            }
        }
        Change::Block(BlockAsk { reason }) | Change::Fence(FenceAsk { reason, .. })
            if reason.len() > REASON || reason.contains(char::is_control) =>
        {
            let size = reason.len();
            let text =
                format!("reason has {size} bytes or a control character, and the limit is {REASON} bytes");
            return Err(Error::invalid(text).into());
        }
        Change::Fence(FenceAsk { revision: 0, .. }) => {
            return Err(Error::invalid("a fence names the revision of the node's row").into());
        }
        Change::Block(_) | Change::Fence(_) | Change::Drain(_) | Change::Undrain(_) | Change::Forget(_) => {}
    }
    Ok(())
}

/// Returns the grant that a change needs.
pub fn grant_of(change: &Change) -> May {
    match change {
        Change::Accept(_) | Change::Block(_) | Change::Forget(_) => May::Admit,
        Change::Fence(_) => May::Fence,
        Change::Drain(_) | Change::Undrain(_) => May::Drain,
    }
}

/// Returns whether a node is fenced. While the cluster recovers, a fence of the backup is none: the node may have joined again since.
pub fn is_fenced(row: &NodeRow, meta: &MetaRow) -> bool {
    match meta.mode {
        Mode::Recovering => row.is_fenced_in(meta.generation),
        Mode::Normal | Mode::Restored => row.is_fenced(),
    }
}

/// Returns the row of a node whose machine is off, by an operator's word. `None`: it is fenced.
pub fn fenced(
    node: &str,
    present: &Read<NodeRow>,
    ask: &FenceAsk,
    caller: &Identity,
    meta: &MetaRow,
) -> Result<Option<NodeRow>> {
    let row = &present.value;
    if is_fenced(row, meta) {
        return Ok(None);
    }
    // The node may have rebooted since the operator has looked.
    is_as_seen(node, present, ask.revision)?;
    let before = match row.is_fenced() {
        true => row.state_after_fence(),
        false => row.block.as_ref().map_or(row.state, |block| block.before),
    };
    let fence = FenceRow {
        number: row.fence.as_ref().map_or(0, |fence| fence.number) + 1,
        boot: row.boot.clone(),
        by: caller.to_string(),
        reason: ask.reason.clone(),
        since_usec: now_usec(),
        before,
        generation: meta.generation,
        rest: Default::default(),
    };
    let mut after = NodeRow { fence: Some(fence), ..row.clone() };
    match &mut after.block {
        // A block stays. Its end leaves the node fenced.
        Some(block) if row.state == NodeState::Blocked => block.before = NodeState::Fenced,
        _ => after.state = NodeState::Fenced,
    }
    Ok(Some(after))
}

/// Returns whether the row is of the same machine in the same boot, and nobody has fenced or blocked it meanwhile.
pub fn is_of_machine(row: &NodeRow, before: &NodeRow) -> bool {
    let of = |row: &NodeRow| {
        let fence = row.fence.as_ref().map(|fence| fence.number);
        (row.machine_id.clone(), row.journal_id.clone(), row.boot.clone(), row.state, fence)
    };
    of(row) == of(before)
}

/// Refuses an operator that has seen another revision of the row.
pub fn is_as_seen(node: &str, present: &Read<NodeRow>, seen: u64) -> Result<()> {
    if seen == present.revision {
        return Ok(());
    }
    let text = format!(
        "the row of node {node} has changed: the operator has seen revision {seen}, and etcd has {}",
        present.revision
    );
    Err(Error::new(Kind::Busy, text).into())
}

/// Returns the row of a node that gets no more claims. `None`: it gets none.
pub fn drained(node: &str, present: &NodeRow) -> Result<Option<NodeRow>> {
    match present.state {
        NodeState::Ready => {
            let drains = present.drains.saturating_add(1);
            Ok(Some(NodeRow { state: NodeState::Draining, drains, ..present.clone() }))
        }
        NodeState::Draining => Ok(None),
        state @ (NodeState::Fenced | NodeState::Blocked) => Err(is_in_state(node, state)),
    }
}

/// Returns the row of a node that drains no more. `None`: it does not drain.
pub fn undrained(node: &str, present: &NodeRow) -> Result<Option<NodeRow>> {
    match present.state {
        NodeState::Draining => Ok(Some(NodeRow { state: NodeState::Ready, ..present.clone() })),
        NodeState::Ready => Ok(None),
        state @ (NodeState::Fenced | NodeState::Blocked) => Err(is_in_state(node, state)),
    }
}

/// Returns the row of a node that an operator blocks. `None`: it is blocked.
pub fn blocked(present: &NodeRow, ask: &BlockAsk, caller: &Identity) -> Option<NodeRow> {
    if present.state == NodeState::Blocked {
        return None;
    }
    let block = BlockRow {
        by: caller.to_string(),
        reason: ask.reason.clone(),
        since_usec: now_usec(),
        before: present.state,
        rest: Default::default(),
    };
    // What has asked to join until now is not what an operator accepts later.
    let mut row = NodeRow { state: NodeState::Blocked, block: Some(block), other: None, ..present.clone() };
    row.plugins.values_mut().for_each(|plugin| plugin.other_node_id = None);
    Some(row)
}

/// Returns the row of a node whose machine an operator accepts. `None`: it is accepted.
pub fn accepted(node: &str, present: &Read<NodeRow>, accept: &Accept) -> Result<Option<NodeRow>> {
    let row = &present.value;
    let is_own = (&row.machine_id, &row.journal_id) == (&accept.machine_id, &accept.journal_id);
    let is_blocked = row.state == NodeState::Blocked;
    if row.state == NodeState::Fenced && is_own {
        return Err(is_in_state(node, row.state));
    }
    // An operator who names plugins has looked at these alone.
    let is_meant = |plugin: &str| accept.names.is_empty() || accept.names.contains_key(plugin);
    let mut waiting = row.plugins.iter().filter(|(_, of)| of.other_node_id.is_some());
    let has_other_name = waiting.any(|(plugin, _)| is_meant(plugin));
    let is_ahead = row.ahead.as_ref().is_some_and(|ahead| !ahead.accepted);
    let forgets = accept.forget && is_own && is_ahead;
    let has_names = accept.names.iter().all(|(plugin, name)| row.accepted_ids.get(plugin) == Some(name));
    if is_own && !is_blocked && !forgets && has_names && (accept.forget || !has_other_name) {
        return Ok(None);
    }
    if !is_own && !accept.names.is_empty() {
        let text = format!(
            "node {node}: an acceptance of another machine has names by plugins, which it has not reported"
        );
        return Err(Error::invalid(text).into());
    }
    for (plugin, name) in &accept.names {
        let of = row.plugins.get(plugin);
        let reported = of.and_then(|of| of.other_node_id.as_ref().or(of.node_id.as_ref()));
        // The plugin of an accepted name may be gone. Another name in its place is the one to accept.
        let is_kept =
            of.is_none_or(|of| of.other_node_id.is_none()) && row.accepted_ids.get(plugin) == Some(name);
        if reported != Some(name) && !is_kept {
            let text = format!(
                "node {node} has not reported the name {:?} by plugin {}",
                shortened(name),
                shortened(plugin)
            );
            return Err(Error::not_found(text).into());
        }
    }
    if (is_blocked || accept.forget) && accept.revision == 0 {
        let why = if is_blocked { "is blocked" } else { "has seen more than etcd has" };
        let text = format!("node {node} {why}: an acceptance that ends this names the row's revision");
        return Err(Error::invalid(text).into());
    }
    if accept.revision != 0 {
        is_as_seen(node, present, accept.revision)?;
    }
    let state = match &row.block {
        Some(block) if is_blocked => block.before,
        None if is_blocked => NodeState::Ready,
        _ => row.state,
    };
    if is_own {
        let mut after = NodeRow { state, block: None, ..row.clone() };
        if forgets && let Some(ahead) = &mut after.ahead {
            ahead.accepted = true;
        }
        for (plugin, of) in after.plugins.iter_mut().filter(|(plugin, _)| !accept.forget && is_meant(plugin))
        {
            if let Some(id) = of.other_node_id.take() {
                after.node_ids.insert(plugin.clone(), id.clone());
                after.accepted_ids.insert(plugin.clone(), id.clone());
                of.node_id = Some(id);
            }
        }
        after.accepted_ids.extend(accept.names.clone());
        return Ok(Some(after));
    }
    let is_asked = |other: &&rows::OtherMachine| {
        (&other.machine_id, &other.journal_id) == (&accept.machine_id, &accept.journal_id)
    };
    let Some(other) = row.other.as_ref().filter(is_asked) else {
        let text = format!(
            "node {node}: no machine {} with the journal {} has asked to join",
            shortened(&accept.machine_id),
            shortened(&accept.journal_id)
        );
        return Err(Error::not_found(text).into());
    };
    Ok(Some(NodeRow {
        machine_id: other.machine_id.clone(),
        journal_id: other.journal_id.clone(),
        // Calls of the earlier machine name another boot, and are refused.
        boot: other.boot.clone(),
        // The other machine is not the one that is off.
        state: if state == NodeState::Fenced { row.state_after_fence() } else { state },
        plugins: Default::default(),
        node_ids: Default::default(),
        accepted_ids: Default::default(),
        other: None,
        block: None,
        drains: row.drains,
        fence: row.fence.clone(),
        ahead: None,
        // A new journal may be of the same boot.
        refused_boot: row.refused_boot.clone(),
        rest: row.rest.clone(),
    }))
}

#[cfg(test)]
mod tests {
    use csi_proto::identity::Role;

    use super::*;
    use crate::failure::ServerError;
    use crate::rows::OtherMachine;

    fn row(state: NodeState) -> Read<NodeRow> {
        let plugins = [("p".to_owned(), Default::default())].into();
        Read { value: NodeRow { state, plugins, ..NodeRow::new("j1", "m1", "b1") }, revision: 7 }
    }

    fn asked(state: NodeState) -> Read<NodeRow> {
        let other = OtherMachine {
            journal_id: "j2".into(),
            machine_id: "m2".into(),
            boot: "b2".into(),
            since_usec: 1,
            rest: Default::default(),
        };
        let Read { value, revision } = row(state);
        Read { value: NodeRow { other: Some(other), ..value }, revision }
    }

    fn accept(n: u32, revision: u64) -> Accept {
        Accept {
            machine_id: format!("m{n}"),
            journal_id: format!("j{n}"),
            revision,
            forget: false,
            names: Default::default(),
        }
    }

    fn operator() -> Identity {
        Identity { cluster: "prod".into(), role: Role::Operator, name: "a".into() }
    }

    #[test]
    fn each_drain_has_another_number() {
        let again = |row: NodeRow| undrained("n", &row).unwrap().unwrap();
        let first = drained("n", &row(NodeState::Ready).value).unwrap().unwrap();
        assert_eq!((first.drain(), drained("n", &first).unwrap().is_none()), (1, true));
        let ready = again(first);
        assert_eq!((ready.drain(), drained("n", &ready).unwrap().unwrap().drain()), (0, 2));
        // A server of an earlier version has drained it.
        assert_eq!(row(NodeState::Draining).value.drain(), 1);
    }

    #[test]
    fn accepted_node_has_its_state_of_before_the_block() {
        for state in [NodeState::Ready, NodeState::Draining, NodeState::Fenced] {
            let ask = BlockAsk { reason: "stolen".into() };
            let after = blocked(&asked(state).value, &ask, &operator()).unwrap();
            assert_eq!((after.state, after.other.is_none()), (NodeState::Blocked, true));
            assert_eq!(after.block.as_ref().unwrap().by, "operator/a");
            assert!(blocked(&after, &ask, &operator()).is_none(), "the first block stays");
            let after = accepted("n", &Read { value: after, revision: 8 }, &accept(1, 8)).unwrap().unwrap();
            assert_eq!((after.state, after.block), (state, None));
        }
        let by_hand = accepted("n", &row(NodeState::Blocked), &accept(1, 7)).unwrap().unwrap();
        assert_eq!(by_hand.state, NodeState::Ready);
    }

    #[test]
    fn accepted_machine_is_the_node_with_its_boot() {
        let after = accepted("n", &asked(NodeState::Ready), &accept(2, 7)).unwrap().unwrap();
        assert_eq!([&*after.machine_id, &after.journal_id, &after.boot], ["m2", "j2", "b2"]);
        assert!(after.other.is_none() && after.plugins.is_empty());
        let again = accepted("n", &Read { value: after, revision: 8 }, &accept(2, 7)).unwrap();
        assert!(again.is_none(), "the same acceptance again changes nothing");
    }

    #[test]
    fn accepted_node_has_its_other_name_by_a_plugin() {
        let mut present = row(NodeState::Ready);
        present.value.node_ids.insert("p".into(), "i-1".into());
        present.value.plugins.get_mut("p").unwrap().other_node_id = Some("i-2".into());
        assert!(matches!(accepted("n", &present, &accept(1, 6)), Err(ServerError::Refused(_))));
        let after = accepted("n", &present, &accept(1, 7)).unwrap().unwrap();
        assert_eq!(
            (after.node_ids["p"].as_str(), after.plugins["p"].node_id.as_deref()),
            ("i-2", Some("i-2"))
        );
        assert!(accepted("n", &Read { value: after, revision: 8 }, &accept(1, 8)).unwrap().is_none());
        let ask = BlockAsk { reason: "stolen".into() };
        let blocked = blocked(&present.value, &ask, &operator()).unwrap();
        let after = accepted("n", &Read { value: blocked, revision: 8 }, &accept(1, 8)).unwrap().unwrap();
        assert_eq!((after.node_ids["p"].as_str(), after.plugins["p"].node_id.as_deref()), ("i-1", None));
    }

    #[test]
    fn name_counts_for_fences_when_it_is_accepted() {
        let mut present = row(NodeState::Ready);
        present.value.plugins.get_mut("p").unwrap().node_id = Some("i-1".into());
        let named = |n, name: &str| Accept { names: [("p".into(), name.into())].into(), ..accept(n, 7) };
        assert!(accepted("n", &present, &accept(1, 7)).unwrap().is_none(), "no name was accepted");
        let after = accepted("n", &present, &named(1, "i-1")).unwrap().unwrap();
        assert_eq!(after.accepted_ids["p"], "i-1");
        for of in [named(1, "i-2"), named(2, "i-1")] {
            assert!(matches!(accepted("n", &present, &of), Err(ServerError::Refused(_))), "{of:?}");
        }
        // The revision is that of the row that the operator has seen, with this name.
        let mut other = Read { value: after, revision: 7 };
        other.value.plugins.get_mut("p").unwrap().other_node_id = Some("i-2".into());
        for of in [accept(1, 7), named(1, "i-2")] {
            assert_eq!(accepted("n", &other, &of).unwrap().unwrap().accepted_ids["p"], "i-2", "{of:?}");
        }
        for of in [named(1, "i-1"), named(1, "i-3")] {
            assert!(
                accepted("n", &other, &of).is_err_and(|error| matches!(error, ServerError::Refused(_))),
                "{of:?}"
            );
        }
    }

    #[test]
    fn acceptance_of_a_name_is_of_its_plugin_alone() {
        let mut present = row(NodeState::Ready);
        for (plugin, name) in [("p", "i-1"), ("q", "i-9")] {
            present.value.plugins.entry(plugin.into()).or_default().other_node_id = Some(name.into());
        }
        let named = Accept { names: [("p".into(), "i-1".into())].into(), ..accept(1, 7) };
        let after = accepted("n", &present, &named).unwrap().unwrap();
        assert_eq!((after.accepted_ids["p"].as_str(), after.accepted_ids.len()), ("i-1", 1));
        assert_eq!(after.node_ids.get("q"), None);
        let of = &after.plugins["q"];
        assert_eq!((of.node_id.as_deref(), of.other_node_id.as_deref()), (None, Some("i-9")));
        let after = Read { value: after, revision: 8 };
        assert!(accepted("n", &after, &Accept { revision: 8, ..named }).unwrap().is_none());
        let all = accepted("n", &after, &accept(1, 8)).unwrap().unwrap();
        assert_eq!(all.accepted_ids["q"], "i-9");
    }

    /// The names would be missing in the row, though the answer is success.
    #[test]
    fn acceptance_of_another_machine_takes_no_names() {
        let mut present = asked(NodeState::Ready);
        present.value.accepted_ids.insert("p".into(), "i-1".into());
        present.value.plugins.clear();
        let named = Accept { names: [("p".into(), "i-1".into())].into(), ..accept(2, 7) };
        let refused = accepted("n", &present, &named);
        assert!(matches!(refused, Err(ServerError::Refused(error)) if error.kind == Kind::InvalidArgument));
        assert!(accepted("n", &present, &accept(2, 7)).unwrap().unwrap().accepted_ids.is_empty());
    }

    #[test]
    fn acceptance_of_an_old_row_is_refused() {
        let kind = |present: &Read<NodeRow>, accept: Accept| match accepted("n", present, &accept) {
            Err(ServerError::Refused(error)) => error.kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(kind(&asked(NodeState::Ready), accept(2, 6)), Kind::Busy);
        assert_eq!(kind(&row(NodeState::Blocked), accept(1, 6)), Kind::Busy);
        assert_eq!(kind(&row(NodeState::Blocked), accept(1, 0)), Kind::InvalidArgument);
        assert_eq!(kind(&asked(NodeState::Ready), accept(3, 7)), Kind::NotFound);
        assert_eq!(kind(&row(NodeState::Ready), accept(2, 0)), Kind::NotFound);
        assert_eq!(kind(&row(NodeState::Fenced), accept(1, 7)), Kind::Busy);
        let mixed = Accept { journal_id: "j1".into(), ..accept(2, 7) };
        assert_eq!(kind(&asked(NodeState::Ready), mixed), Kind::NotFound);
    }

    fn meta(generation: u64, mode: Mode) -> MetaRow {
        MetaRow { generation, mode, ..MetaRow::new("prod", rows::SCHEMAS, 1) }
    }

    #[test]
    fn fence_of_a_backup_is_written_again() {
        let ask = |revision| FenceAsk { reason: "dead".into(), revision, by_hand: false };
        let first = fenced("n", &row(NodeState::Draining), &ask(7), &operator(), &meta(1, Mode::Normal));
        let first = Read { value: first.unwrap().unwrap(), revision: 8 };
        let recovering = meta(2, Mode::Recovering);
        let after = fenced("n", &first, &ask(8), &operator(), &recovering).unwrap().unwrap();
        assert_eq!((after.state, after.fence.as_ref().unwrap().number), (NodeState::Fenced, 2));
        assert_eq!((after.is_fenced_in(2), after.state_after_fence()), (true, NodeState::Draining));
        let again = Read { value: after, revision: 9 };
        assert!(fenced("n", &again, &ask(9), &operator(), &recovering).unwrap().is_none());
        assert!(fenced("n", &first, &ask(8), &operator(), &meta(2, Mode::Normal)).unwrap().is_none());
    }

    #[test]
    fn fence_of_an_old_row_is_refused() {
        let ask = |revision| FenceAsk { reason: "dead".into(), revision, by_hand: false };
        let old = fenced("n", &row(NodeState::Ready), &ask(6), &operator(), &meta(1, Mode::Normal));
        assert!(matches!(old, Err(ServerError::Refused(error)) if error.kind == Kind::Busy));
        assert!(check(&Change::Fence(ask(0))).is_err() && check(&Change::Fence(ask(1))).is_ok());
        for state in [NodeState::Ready, NodeState::Draining] {
            let after =
                fenced("n", &row(state), &ask(7), &operator(), &meta(1, Mode::Normal)).unwrap().unwrap();
            let fence = after.fence.as_ref().unwrap();
            assert_eq!((after.state, fence.number, fence.boot.as_str()), (NodeState::Fenced, 1, "b1"));
            assert_eq!((after.is_fenced(), after.state_after_fence()), (true, state));
            let again = fenced(
                "n",
                &Read { value: after, revision: 8 },
                &ask(7),
                &operator(),
                &meta(1, Mode::Normal),
            )
            .unwrap();
            assert!(again.is_none(), "the first fence stays");
        }
    }

    #[test]
    fn switched_off_machine_is_known_by_its_boot() {
        let before = row(NodeState::Ready).value;
        let asked = asked(NodeState::Ready).value;
        assert!(is_of_machine(&NodeRow { plugins: Default::default(), ..asked }, &before));
        let others = [
            NodeRow { boot: "b2".into(), ..before.clone() },
            NodeRow { machine_id: "m2".into(), ..before.clone() },
            NodeRow { journal_id: "j2".into(), ..before.clone() },
            NodeRow { state: NodeState::Blocked, ..before.clone() },
        ];
        assert!(others.iter().all(|other| !is_of_machine(other, &before)));
    }

    #[test]
    fn fence_of_a_blocked_node_keeps_the_block() {
        let block = blocked(&row(NodeState::Draining).value, &BlockAsk::default(), &operator()).unwrap();
        let ask = FenceAsk { revision: 8, ..FenceAsk::default() };
        let after =
            fenced("n", &Read { value: block, revision: 8 }, &ask, &operator(), &meta(1, Mode::Normal))
                .unwrap()
                .unwrap();
        assert_eq!((after.state, after.is_fenced()), (NodeState::Blocked, true));
        let after = accepted("n", &Read { value: after, revision: 9 }, &accept(1, 9)).unwrap().unwrap();
        assert_eq!((after.state, after.is_fenced()), (NodeState::Fenced, true));
        assert_eq!(after.state_after_fence(), NodeState::Draining);
    }

    #[test]
    fn machine_in_place_of_a_fenced_one_is_ready() {
        let ask = FenceAsk { revision: 7, ..FenceAsk::default() };
        let after = fenced("n", &asked(NodeState::Ready), &ask, &operator(), &meta(1, Mode::Normal))
            .unwrap()
            .unwrap();
        let after = accepted("n", &Read { value: after, revision: 8 }, &accept(2, 8)).unwrap().unwrap();
        assert_eq!(
            (after.state, after.boot.as_str(), after.fence.unwrap().number),
            (NodeState::Ready, "b2", 1)
        );
    }

    #[test]
    fn long_or_strange_reason_is_refused() {
        let is_good = |reason: &str| check(&Change::Block(BlockAsk { reason: reason.into() })).is_ok();
        assert!(is_good("") && is_good(&"a".repeat(REASON)));
        assert!(!is_good(&"a".repeat(REASON + 1)) && !is_good("a\u{1b}[2J"));
    }
}
