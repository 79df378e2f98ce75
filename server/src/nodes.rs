//! Nodes as operators see and change them. A change is a transaction on the revision of the node's row.

use std::collections::HashMap;

use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    Accept, Ahead, Attaches, Block, BlockAsk, Fence, FenceAsk, Machine, NodeChange, NodePage,
    NodeRow as Shown, NodeSession, PluginReport,
};
use csi_proto::identity::{Identity, Role, is_member_name};
use csid::error::shortened;
use csid::{Error, Kind};
use csid_etcd::{EtcdError, Guard, Pages, RowKey, Rows, Write, Written};
use tokio::time::Instant;

use crate::cluster::{Cluster, node_guard, not_joined};
use crate::drive::FRESH;
use crate::edges;
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::node_rules::{
    accepted, blocked, check, drained, fenced, grant_of, is_as_seen, is_fenced, is_of_machine, undrained,
};
use crate::rows::{self, NodeRow, NodeState, Read, RowError, ServerRow, SessionRow};

/// Tries of a change that others are faster with.
const TRIES: usize = 16;

/// The sessions of nodes by the node's name, as operators see them.
type Sessions = HashMap<String, Vec<NodeSession>>;

/// A node with its row, or why the row cannot be read.
pub type NodeOfPage = (String, std::result::Result<Read<NodeRow>, RowError>);

/// The place of a list of nodes.
pub struct NodeList {
    pages: Pages,
    sessions: Sessions,
}

/// A node as a server has found it.
pub struct SeenNode {
    pub node: String,
    pub row: Read<NodeRow>,
    pub has_session: bool,
    /// It has claims that its machine may use. With a session: claims, whatever their state.
    pub holds: bool,
}

impl Cluster {
    /// Begins a list of the nodes after one. An empty name is before all nodes.
    pub async fn list_nodes(&self, after: String) -> Result<NodeList> {
        if !after.is_empty() {
            check_node(&after)?;
        }
        let sessions = self.while_here(self.all_sessions()).await?;
        Ok(NodeList { pages: self.rows.pages(&Rows::Nodes { after }), sessions })
    }

    /// Returns the next page of a list. `None`: there are no more nodes.
    pub async fn next_nodes(&self, list: &mut NodeList) -> Result<Option<NodePage>> {
        let page = self.while_here(self.next_of_nodes(&mut list.pages)).await?;
        let Some(page) = page else { return Ok(None) };
        let mut nodes = Vec::new();
        for (node, row) in page {
            let row = row?;
            let sessions = list.sessions.remove(&node).unwrap_or_default();
            let claims = self.while_here(self.count_claims(&node)).await?;
            let drained = self.while_here(self.drained(&node, &row, 0)).await?;
            nodes.push(Shown { drained, ..shown(&node, &row, sessions, claims) });
        }
        Ok(Some(NodePage { nodes }))
    }

    /// Returns one node.
    pub async fn show_node(&self, node: &str) -> Result<Shown> {
        check_node(node)?;
        self.while_here(async {
            let row = self.node_now(node).await?.ok_or_else(|| not_joined(node))?;
            let addresses = self.addresses().await?;
            let of = Rows::Sessions { node: node.to_owned() };
            let mut sessions = Sessions::new();
            for (key, row) in self.rows.all(&of).await? {
                add_session(&mut sessions, &addresses, &key, &rows::read(&key, &row)?);
            }
            let sessions = sessions.remove(node).unwrap_or_default();
            let drained = self.drained(node, &row, usize::MAX).await?;
            Ok(Shown { drained, ..shown(node, &row, sessions, self.count_claims(node).await?) })
        })
        .await
    }

    /// Changes a node's row, unless it is as wanted already.
    pub async fn set_node(&self, caller: &Identity, ask: NodeChange) -> Result<()> {
        let NodeChange { node, change } = ask;
        self.require_operator(caller, change.as_ref().map_or(May::Admit, grant_of))?;
        check_node(&node)?;
        let unknown = || Error::new(Kind::NotSupported, "this server does not know the change");
        self.change_node(caller, &node, &change.ok_or_else(unknown)?).await
    }

    /// Changes a node's row for an operator who may, or for this server.
    pub async fn change_node(&self, caller: &Identity, node: &str, change: &Change) -> Result<()> {
        check(change)?;
        let off = match change {
            Change::Fence(ask) => self.switch_off(caller, node, ask).await?,
            _ => None,
        };
        let mut open = false;
        for _ in 0..TRIES {
            match self.try_set_node(caller, node, change, off.as_ref()).await {
                Ok(Tried::Done) => return Ok(()),
                Ok(Tried::Again { open: now }) => open |= now,
                Err(error) if open && error.is_unavailable() => return Err(uncertain(node)),
                Err(error) => return Err(error),
            }
        }
        match open {
            true => Err(uncertain(node)),
            false => {
                let text = format!("the row of node {node} changed {TRIES} times meanwhile");
                Err(Error::new(Kind::Busy, text).into())
            }
        }
    }

    /// Has the administrators' command switch the machine of a node off before the node is fenced. Nothing is fenced without its success.
    /// Returns the node's row as it was before. `None`: no command has run.
    async fn switch_off(&self, caller: &Identity, node: &str, ask: &FenceAsk) -> Result<Option<NodeRow>> {
        let (begun, here) = (Instant::now(), self.presence.here()?);
        let present = self.while_here(self.node_now(node)).await?.ok_or_else(|| not_joined(node))?;
        if is_fenced(&present.value, &self.while_here(self.meta_now()).await?.value) {
            return Ok(None);
        }
        is_as_seen(node, &present, ask.revision)?;
        let fence = self.config.fence();
        if caller.role == Role::Server && (fence.after.is_none() || fence.command.is_none()) {
            // A reload has come since the node was looked at.
            return Err(ServerError::denied("the configuration has no node fenced after a time any more"));
        }
        let Some(command) = fence.command.as_ref().filter(|_| !ask.by_hand) else {
            return Ok(None);
        };
        // A server that has stood still since then does not know what the node does.
        if self.presence.here()? != here || begun.elapsed() >= FRESH {
            return Err(ServerError::cut_off());
        }
        // etcd would refuse the fence, and the machine would be off for nothing.
        if self.presence.is_full() {
            return Err(EtcdError::Full.into());
        }
        tracing::warn!(%caller, node, "the command that fences begins");
        // Another server may reach the machine's power.
        let failed = |why| ServerError::Unavailable(format!("node {node} is not fenced: {why}"));
        command.run(node).await.map_err(failed)?;
        Ok(Some(present.value))
    }

    /// Returns the nodes that may have a session now, with the number of each one's drain. A node whose row cannot be read is not among them.
    pub async fn nodes_with_sessions(&self) -> Result<HashMap<String, u64>> {
        let mut may = HashMap::new();
        let mut pages = self.pages_of_nodes();
        while let Some(page) = self.next_of_nodes(&mut pages).await? {
            let read = page.into_iter().filter_map(|(node, row)| Some((node, row.ok()?.value)));
            may.extend(
                read.filter(|(_, row)| row.may_have_sessions()).map(|(node, row)| (node, row.drain())),
            );
        }
        Ok(may)
    }

    /// Begins a list of all nodes, as etcd has them.
    pub fn pages_of_nodes(&self) -> Pages {
        self.rows.pages(&Rows::Nodes { after: String::new() })
    }

    /// Reads the next page of a list of nodes. `None`: all were read. A row that cannot be read has its error.
    pub async fn next_of_nodes(&self, pages: &mut Pages) -> Result<Option<Vec<NodeOfPage>>> {
        let page = self.rows.next(pages).await?;
        let read = |(key, row)| match &key {
            RowKey::Node(node) => Some((node.clone(), rows::read(&key, &row))),
            _ => None,
        };
        Ok(page.map(|page| page.into_iter().filter_map(read).collect()))
    }

    /// Returns all nodes, as they are now.
    pub async fn seen_nodes(&self) -> Result<Vec<SeenNode>> {
        let sessions = self.all_sessions().await?;
        let mut seen = Vec::new();
        let mut pages = self.pages_of_nodes();
        while let Some(page) = self.next_of_nodes(&mut pages).await? {
            for (node, row) in page {
                let row = row?;
                let has_session = sessions.contains_key(&node);
                let holds = match has_session {
                    true => self.count_claims(&node).await? > 0,
                    // A node that has nothing mounted may be off.
                    false => self.has_held_claims(&node, &row).await?,
                };
                seen.push(SeenNode { node, row, has_session, holds });
            }
        }
        Ok(seen)
    }

    /// Tries a change once. `off`: the row of the machine that was switched off for it.
    async fn try_set_node(
        &self,
        caller: &Identity,
        node: &str,
        change: &Change,
        off: Option<&NodeRow>,
    ) -> Result<Tried> {
        let present = self.while_here(self.node_now(node)).await?;
        if let (Change::Forget(_), None) = (change, &present) {
            return Ok(Tried::Done);
        }
        let present = present.ok_or_else(|| not_joined(node))?;
        let after = match change {
            Change::Accept(accept) => accepted(node, &present, accept)?,
            Change::Block(ask) => blocked(&present.value, ask, caller),
            Change::Fence(ask) if off.is_some_and(|off| is_of_machine(&present.value, off)) => {
                // Another machine that wants to be the node changes the row, too.
                let ask = FenceAsk { revision: present.revision, ..ask.clone() };
                fenced(node, &present, &ask, caller, &self.while_here(self.meta_now()).await?.value)?
            }
            Change::Fence(ask) => {
                fenced(node, &present, ask, caller, &self.while_here(self.meta_now()).await?.value)?
            }
            Change::Drain(_) => drained(node, &present.value)?,
            Change::Undrain(_) => undrained(node, &present.value)?,
            Change::Forget(_) => return self.try_forget(caller, node, &present).await,
        };
        let Some(after) = after else { return Ok(Tried::Done) };
        let is_other =
            after.machine_id != present.value.machine_id || after.journal_id != present.value.journal_id;
        // A session that begins meanwhile writes the node's row.
        if is_other && self.while_here(self.has_sessions(node)).await? {
            let text = format!("node {node} has a session of the machine that has joined");
            return Err(Error::new(Kind::Busy, text).into());
        }
        if is_other && present.value.is_fenced() {
            // The claims that have yet to end would be the new machine's.
            let held = self.while_here(self.held_claims(node, &present)).await?;
            if held > 0 {
                let text = format!("node {node} is fenced, and {held} of its claims have not ended yet");
                return Err(Error::new(Kind::Busy, text).into());
            }
        }
        let others = match change {
            Change::Accept(_) => {
                self.while_here(self.refuse_accepted_names(node, &present.value, &after)).await?
            }
            _ => Vec::new(),
        };
        let tried = self.write_node(node, &present, Some(&after), others).await?;
        if let Tried::Done = tried {
            match change {
                Change::Accept(Accept { machine_id, .. }) => {
                    tracing::warn!(%caller, node, machine_id, "a node was accepted");
                }
                Change::Block(BlockAsk { reason }) => {
                    tracing::warn!(%caller, node, reason, "a node was blocked");
                }
                Change::Fence(FenceAsk { reason, .. }) => {
                    tracing::warn!(%caller, node, reason, "a node was fenced");
                }
                Change::Drain(_) => tracing::info!(%caller, node, "a node drains"),
                Change::Undrain(_) => tracing::info!(%caller, node, "a node drains no more"),
                Change::Forget(_) => {}
            }
        }
        Ok(tried)
    }

    /// Removes the row of a node that has nothing. It is granted nothing while it drains or is fenced, so the count is the last one.
    async fn try_forget(&self, caller: &Identity, node: &str, present: &Read<NodeRow>) -> Result<Tried> {
        let busy = |text: String| Err(Error::new(Kind::Busy, text).into());
        if present.value.state != NodeState::Draining && !present.value.is_fenced() {
            let state = present.value.state.word();
            return busy(format!("node {node} is {state}, and a node that is forgotten drains or is fenced"));
        }
        // While the cluster recovers, the node may have claims that etcd does not have yet.
        self.normal().await?;
        if self.while_here(self.has_sessions(node)).await? {
            return busy(format!("node {node} has a session"));
        }
        self.while_here(async { Ok(self.registry.reached(present.revision).await?) }).await?;
        let claims = self.while_here(self.count_claims(node)).await?;
        if claims > 0 {
            return busy(format!("node {node} has {claims} claims that have not ended yet"));
        }
        let attached = self.while_here(self.attached_to(node, &present.value)).await?;
        if attached > 0 {
            return busy(format!("AttachVolume has attached {attached} volumes to node {node}"));
        }
        self.while_here(self.drop_controllers(node, present)).await?;
        self.while_here(self.drop_used(node, present)).await?;
        let tried = self.write_node(node, present, None, Vec::new()).await?;
        if let Tried::Done = tried {
            tracing::warn!(%caller, node, "a node was forgotten");
        }
        Ok(tried)
    }

    /// Writes a node's row, unless a row of `others` has changed. `None`: removes it, and what the node has reported.
    async fn write_node(
        &self,
        node: &str,
        before: &Read<NodeRow>,
        after: Option<&NodeRow>,
        others: Vec<Guard>,
    ) -> Result<Tried> {
        let here = self.presence.here()?;
        let key = RowKey::Node(node.to_owned());
        let value = after.map(|after| rows::write(&key, after)).transpose()?;
        let mut writes = vec![Write { value, key: key.clone(), lease: 0 }];
        if after.is_none() {
            for key in [RowKey::Report(node.to_owned()), RowKey::Heard(node.to_owned())] {
                writes.push(Write { key, value: None, lease: 0 });
            }
        }
        let guards = [vec![node_guard(node, before), here.guard()], others].concat();
        let written = self.while_here(async { Ok(edges::write(&self.rows, &guards, writes).await?) }).await;
        self.forget(&key);
        match written {
            Ok(Written::Done { .. }) => Ok(Tried::Done),
            Ok(Written::Refused(RowKey::Server(_))) => {
                Err(ServerError::Unavailable("this server's row in etcd is gone".into()))
            }
            Ok(Written::Refused(_)) => Ok(Tried::Again { open: false }),
            Ok(Written::Unknown) => Ok(Tried::Again { open: true }),
            Err(error @ ServerError::Etcd(EtcdError::Full)) => Err(error),
            // etcd may have the change, or get it yet.
            Err(error) if error.is_unavailable() => Err(uncertain(node)),
            Err(error) => Err(error),
        }
    }

    pub async fn has_sessions(&self, node: &str) -> Result<bool> {
        Ok(self.rows.has_any(&Rows::Sessions { node: node.to_owned() }).await?)
    }

    async fn count_claims(&self, node: &str) -> Result<u64> {
        Ok(u64::try_from(self.registry.claims_of(node).await?).unwrap_or(u64::MAX))
    }

    /// Returns the addresses of the servers that run, by their IDs.
    async fn addresses(&self) -> Result<HashMap<String, String>> {
        let mut addresses = HashMap::new();
        for (key, row) in self.rows.all(&Rows::Servers).await? {
            if let RowKey::Server(id) = &key {
                addresses.insert(id.clone(), rows::read::<ServerRow>(&key, &row)?.value.address);
            }
        }
        Ok(addresses)
    }

    async fn all_sessions(&self) -> Result<Sessions> {
        let addresses = self.addresses().await?;
        let mut sessions = Sessions::new();
        for (key, row) in self.rows.all(&Rows::AllSessions).await? {
            add_session(&mut sessions, &addresses, &key, &rows::read(&key, &row)?);
        }
        Ok(sessions)
    }
}

fn add_session(
    sessions: &mut Sessions,
    addresses: &HashMap<String, String>,
    key: &RowKey,
    row: &Read<SessionRow>,
) {
    if let RowKey::Session { node, server } = key {
        sessions.entry(node.clone()).or_default().push(NodeSession {
            server: server.clone(),
            address: addresses.get(server).cloned().unwrap_or_default(),
            since_usec: row.value.since_usec,
        });
    }
}

/// Returns a node's row as operators see it, without the report of its drain.
fn shown(node: &str, row: &Read<NodeRow>, sessions: Vec<NodeSession>, claims: u64) -> Shown {
    let NodeRow {
        journal_id,
        machine_id,
        boot,
        state,
        plugins,
        other,
        block,
        fence,
        ahead,
        node_ids: _,
        accepted_ids,
        drains: _,
        refused_boot: _,
        rest: _,
    } = &row.value;
    let plugins = plugins.iter().map(|(plugin, of)| {
        let attaches = match of.attaches {
            None => Attaches::Unknown,
            Some(true) => Attaches::Yes,
            Some(false) => Attaches::No,
        };
        let node_id = of.node_id.clone().unwrap_or_default();
        let (plugin, attaches) = (plugin.clone(), attaches.into());
        PluginReport { plugin, attaches, node_id, controller: false, calls: 0, max_volumes: of.max_volumes }
    });
    Shown {
        node: node.to_owned(),
        state: state.word().to_owned(),
        machine: Some(Machine {
            machine_id: machine_id.clone(),
            journal_id: journal_id.clone(),
            boot: boot.clone(),
            refused_usec: 0,
        }),
        sessions,
        plugins: plugins.collect(),
        claims,
        other: other.as_ref().map(|other| Machine {
            machine_id: other.machine_id.clone(),
            journal_id: other.journal_id.clone(),
            boot: other.boot.clone(),
            refused_usec: other.since_usec,
        }),
        block: block.as_ref().map(|block| Block {
            by: block.by.clone(),
            reason: block.reason.clone(),
            since_usec: block.since_usec,
        }),
        revision: row.revision,
        fence: fence.as_ref().map(|fence| Fence {
            by: fence.by.clone(),
            reason: fence.reason.clone(),
            since_usec: fence.since_usec,
            number: fence.number,
            boot: fence.boot.clone(),
        }),
        drained: None,
        ahead: ahead.as_ref().map(|ahead| Ahead {
            generation: ahead.generation,
            revision: ahead.revision,
            since_usec: ahead.since_usec,
            accepted: ahead.accepted,
        }),
        accepted_ids: accepted_ids.clone().into_iter().collect(),
        left: Vec::new(),
        left_count: 0,
    }
}

/// What a try of a change has done.
enum Tried {
    /// The row is as wanted.
    Done,
    /// The row has to be read again. `open`: this try may have changed it.
    Again { open: bool },
}

fn uncertain(node: &str) -> ServerError {
    let text = format!("etcd did not answer whether the row of node {node} was changed");
    Error::new(Kind::Uncertain, text).into()
}

/// Checks the name of a node.
fn check_node(node: &str) -> Result<()> {
    match is_member_name(node) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{:?} is not the name of a node", shortened(node))).into()),
    }
}
