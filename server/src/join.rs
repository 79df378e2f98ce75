//! A node joins: what its Hello says is compared with its row, and the row and the session are written together.

use csi_proto::cluster::v1::{Attaches, Hello, PluginReport, Plugins, Refused, Welcome};
use csi_proto::identity::Identity;
use csid::error::shortened;
use csid::volume::rules::{check_name, check_node_id};
use csid::{Error, Kind};
use csid_etcd::{Expected, Guard, RowKey, Rows, Write, Written};

use crate::cluster::{Cluster, Phase, RESTORED, meta_guard, node_guard};
use crate::edges;
use crate::failure::{Result, ServerError};
use crate::joins::{JoinUnderWay, OpenJoin, Parted};
use crate::names::NodeNames;
use crate::presence::Here;
use crate::rows::{
    self, AheadRow, Mode, NodePlugin, NodeRow, NodeState, OtherMachine, Read, ServerRow, SessionRow,
};
use crate::time::now_usec;

/// The protocol of sessions.
const PROTOCOL: u32 = 1;
const PLUGINS: usize = 64;
/// The limit of plugins whose names of a node are kept.
const NODE_IDS: usize = 128;
/// The limit of a node's row after a report of the node, in bytes. etcd takes 64 KiB: the rest is for what operators and servers write of the node.
const REPORTED: usize = 48 * 1024;
/// Tries of a change that others are faster with.
const TRIES: usize = 16;

/// A session that a server has written.
pub struct Joining {
    pub here: Here,
    /// The revision of the session's row. A later join of the node has a greater one.
    pub revision: u64,
    /// The session ends with it.
    pub phase: Phase,
}

/// The answer to a Hello.
pub enum Joined {
    Welcome(Box<Welcome>, Joining),
    Refused(Refused),
}

fn refused(reason: &str, message: String) -> Joined {
    Joined::Refused(Refused { reason: reason.to_owned(), message, fence: 0 })
}

impl Cluster {
    /// Joins a node, whose certificate says who it is. The caller ends `under_way` after it has entered the session.
    pub async fn join(
        &self,
        node: &Identity,
        hello: &Hello,
        under_way: &mut JoinUnderWay<'_>,
    ) -> Result<Joined> {
        for (what, text) in [
            ("cluster", &hello.cluster),
            ("journal-id", &hello.journal_id),
            ("machine-id", &hello.machine_id),
            ("boot", &hello.boot),
            ("version", &hello.version),
        ] {
            check_name(what, text)?;
        }
        if hello.cluster != self.config.cluster {
            let text =
                format!("this is the cluster {}, not {}", self.config.cluster, shortened(&hello.cluster));
            return Ok(refused("wrong-cluster", text));
        }
        if hello.protocol_max < PROTOCOL || hello.protocol_min > hello.protocol_max {
            return Ok(refused("too-old", format!("this server speaks protocol {PROTOCOL}")));
        }
        if hello.protocol_min > PROTOCOL {
            return Ok(refused("too-new", format!("this server speaks protocol {PROTOCOL}")));
        }
        // The node may join another server when this one does not follow etcd.
        self.while_here(async {
            for _ in 0..TRIES {
                if let Some(joined) = self.try_join(&node.name, hello, under_way).await? {
                    return Ok(joined);
                }
            }
            Err(Error::new(Kind::Busy, format!("the row of node {} changes too often", node.name)).into())
        })
        .await
    }

    /// Returns `None` if a row has changed since it was read.
    async fn try_join(
        &self,
        node: &str,
        hello: &Hello,
        under_way: &mut JoinUnderWay<'_>,
    ) -> Result<Option<Joined>> {
        let here = self.presence.here()?;
        let meta = self.meta().await?;
        if meta.value.mode == Mode::Restored {
            self.forget(&RowKey::Meta);
            return match self.meta().await?.value.mode {
                Mode::Restored => Ok(Some(refused("etcd-restored", RESTORED.to_owned()))),
                Mode::Normal | Mode::Recovering => Ok(None),
            };
        }
        // The row comes before the sessions: each join writes it, so a join between the two reads is noticed.
        let present = self.node_now(node).await?;
        let was_known = present.is_some();
        let guard = match &present {
            Some(row) => node_guard(node, row),
            None => Guard { key: RowKey::Node(node.to_owned()), is: Expected::Absent },
        };
        let row = match present {
            Some(Read { value, .. }) => value,
            None => NodeRow::new(&hello.journal_id, &hello.machine_id, &hello.boot),
        };
        let is_other_boot = row.boot != hello.boot;
        match row.state {
            NodeState::Ready | NodeState::Draining | NodeState::Fenced => {}
            NodeState::Blocked => return Ok(Some(refused("blocked", format!("node {node} is blocked")))),
        }
        let is_same = (&row.journal_id, &row.machine_id) == (&hello.journal_id, &hello.machine_id);
        if !is_same {
            self.keep_other(node, &row, &guard, hello).await?;
            let text = format!("the node that is known as {node} has another journal or machine id");
            return Ok(Some(refused("another-machine", text)));
        }
        if is_other_boot && self.has_sessions(node).await? {
            let text = format!("node {node} has a session of another boot");
            return Ok(Some(refused("twice", text)));
        }
        // A Hello that comes late may be clean of an earlier fence.
        let number = row.fence.as_ref().map_or(0, |fence| fence.number);
        let state = match row.state {
            NodeState::Fenced if is_other_boot || (number > 0 && hello.clean == number) => {
                row.state_after_fence()
            }
            NodeState::Fenced => {
                let message = format!("node {node} is fenced");
                return Ok(Some(Joined::Refused(Refused {
                    reason: "fenced".to_owned(),
                    message,
                    fence: number,
                })));
            }
            state => state,
        };
        let ahead = match self.behind(hello, &meta.value).await? {
            None => None,
            Some(_) if row.accepts(hello) => row.ahead.clone(),
            Some((generation, revision)) => {
                if was_known {
                    self.keep_ahead(node, &row, guard, hello).await?;
                }
                let Hello { generation: seen, seen_revision, .. } = hello;
                let text = format!(
                    "node {node} has seen generation {seen} and revision {seen_revision}, and etcd has generation {generation} and revision \
                     {revision}: was etcd restored from a backup? No operator has said so"
                );
                return Ok(Some(refused("ahead-of-etcd", text)));
            }
        };
        let forget = ahead.is_some();
        // The node has its former journal again.
        let other = row.other.clone().filter(|other| !other.is_machine(&hello.machine_id, &hello.boot));
        let row = NodeRow { boot: hello.boot.clone(), state, ahead, other, ..row };
        let drain = row.drain();
        let session = SessionRow { since_usec: now_usec(), boot: hello.boot.clone() };
        let (of_node, of_session) = (
            RowKey::Node(node.to_owned()),
            RowKey::Session { node: node.to_owned(), server: here.id.clone() },
        );
        let writes = vec![
            Write { value: Some(rows::write(&of_session, &session)?), key: of_session, lease: here.lease },
            Write { value: Some(rows::write(&of_node, &row)?), key: of_node, lease: 0 },
        ];
        let this = OpenJoin { node: guard.clone(), server: here.id.clone() };
        let was_open = under_way.open.replace(this);
        let revision =
            match edges::write(&self.rows, &[guard, meta_guard(&meta), here.guard()], writes).await? {
                Written::Done { revision } => revision,
                Written::Refused(key) => {
                    under_way.open = was_open;
                    self.forget(&key);
                    return Ok(None);
                }
                Written::Unknown => return Ok(None),
            };
        under_way.joins.close(node);
        let joining = Joining { here, revision, phase: Phase::of(&meta) };
        self.node_now(node).await?;
        let welcome = Welcome {
            generation: meta.value.generation,
            mode: meta.value.mode.word().to_owned(),
            servers: self.servers().await?,
            protocol: PROTOCOL,
            server: joining.here.id.clone(),
            node: node.to_owned(),
            revision,
            drain,
            forget,
        };
        under_way.open = None;
        Ok(Some(Joined::Welcome(Box::new(welcome), joining)))
    }

    /// Keeps which other machine wants to be a node, for the operator who accepts it.
    async fn keep_other(&self, node: &str, row: &NodeRow, guard: &Guard, hello: &Hello) -> Result<()> {
        let Hello { journal_id, machine_id, boot, .. } = hello;
        let is_kept = row.other.as_ref().is_some_and(|other| {
            (&other.journal_id, &other.machine_id, &other.boot) == (journal_id, machine_id, boot)
        });
        if is_kept || !self.may_note(node) {
            return Ok(());
        }
        let other = OtherMachine {
            journal_id: journal_id.clone(),
            machine_id: machine_id.clone(),
            boot: boot.clone(),
            since_usec: now_usec(),
            rest: Default::default(),
        };
        let row = NodeRow { other: Some(other), ..row.clone() };
        let key = RowKey::Node(node.to_owned());
        let write = Write { value: Some(rows::write(&key, &row)?), key: key.clone(), lease: 0 };
        // If the row has changed meanwhile, a later Hello of the machine is kept.
        edges::write(&self.rows, &[guard.clone(), self.presence.here()?.guard()], vec![write]).await?;
        self.forget(&key);
        Ok(())
    }

    /// Keeps what a node has seen that etcd does not have, for the operators. The first such Hello is kept until the node has joined, or an operator has
    /// accepted it.
    async fn keep_ahead(&self, node: &str, row: &NodeRow, guard: Guard, hello: &Hello) -> Result<()> {
        if row.ahead.as_ref().is_some_and(|ahead| !ahead.accepted) {
            return Ok(());
        }
        let ahead = AheadRow {
            generation: hello.generation,
            revision: hello.seen_revision,
            since_usec: now_usec(),
            accepted: false,
            rest: Default::default(),
        };
        let row = NodeRow { ahead: Some(ahead), ..row.clone() };
        let key = RowKey::Node(node.to_owned());
        let write = Write { value: Some(rows::write(&key, &row)?), key: key.clone(), lease: 0 };
        // If the row has changed meanwhile, a later Hello is kept.
        edges::write(&self.rows, &[guard, self.presence.here()?.guard()], vec![write]).await?;
        self.forget(&key);
        Ok(())
    }

    /// Returns the addresses of the servers that run.
    async fn servers(&self) -> Result<Vec<String>> {
        let mut addresses = Vec::new();
        for (key, row) in self.rows.all(&Rows::Servers).await? {
            addresses.push(rows::read::<ServerRow>(&key, &row)?.value.address);
        }
        addresses.sort();
        addresses.dedup();
        Ok(addresses)
    }

    /// Removes the row of a session that has ended. A newer session's row stays.
    pub async fn part(&self, node: &str, joining: &Joining) -> Result<()> {
        let parted =
            Parted { node: node.to_owned(), server: joining.here.id.clone(), revision: joining.revision };
        let removed = self.remove_session(&parted).await;
        if removed.is_err() {
            self.joins.keep_parted([parted]);
        }
        removed
    }

    /// Removes the rows of sessions that have ended while etcd gave no answer. etcd may keep their lease for as long as this server runs. Stops at
    /// the first row that is not removed.
    pub async fn part_again(&self) {
        let mut left = self.joins.take_parted().into_iter();
        while let Some(parted) = left.next() {
            if self.while_here(self.remove_session(&parted)).await.is_err() {
                self.joins.keep_parted(std::iter::once(parted).chain(left));
                return;
            }
        }
    }

    /// Removes the row of a session, unless the node has joined again. Fails if etcd gives no answer that decides.
    async fn remove_session(&self, Parted { node, server, revision }: &Parted) -> Result<()> {
        let key = RowKey::Session { node: node.clone(), server: server.clone() };
        let guard = Guard { key: key.clone(), is: Expected::Revision(*revision) };
        let write = Write { key, value: None, lease: 0 };
        match edges::write(&self.rows, &[guard], vec![write]).await? {
            Written::Done { .. } | Written::Refused(_) => Ok(()),
            Written::Unknown => Err(ServerError::Away("etcd has not decided a write".into())),
        }
    }

    /// Removes the rows of sessions that have not begun: their joins have ended without an outcome. Such a row would keep out the node's next boot.
    /// `has_session`: whether a node has a session with this server.
    pub async fn end_unbegun(&self, has_session: impl Fn(&str) -> bool) -> Result<()> {
        let here = self.presence.here()?;
        for (node, join) in self.joins.open() {
            // What the join compares is read before the row that it writes.
            let may_write = join.server == here.id && self.holds(&join.node).await?;
            let key = RowKey::Session { node: node.clone(), server: join.server.clone() };
            let row = self.rows.read(&key).await?;
            // Another join may have written the row meanwhile. A session's row may be the open join's, and stay when the session has ended.
            if has_session(&node) || !self.joins.is_open(&node, &join) {
                continue;
            }
            if let Some(row) = row {
                let guard = Guard { key: key.clone(), is: Expected::Revision(row.revision) };
                let write = Write { key, value: None, lease: 0 };
                if let Written::Done { .. } = edges::write(&self.rows, &[guard], vec![write]).await? {
                    tracing::info!(node, "the row of a session that has not begun was removed");
                }
                // The row may have been an earlier session's.
                continue;
            }
            if !may_write {
                self.joins.close(&node);
            }
        }
        Ok(())
    }

    /// Returns whether a row is as a guard has it.
    async fn holds(&self, guard: &Guard) -> Result<bool> {
        let row = self.rows.read(&guard.key).await?;
        Ok(match guard.is {
            Expected::Absent => row.is_none(),
            Expected::Revision(revision) => row.is_some_and(|row| row.revision == revision),
            // No join compares that.
            Expected::Created(_) | Expected::Touched(_) => true,
        })
    }

    /// Keeps what a node reports of its plugins.
    pub async fn report(&self, node: &str, boot: &str, report: Plugins) -> Result<()> {
        if report.plugins.len() > PLUGINS {
            let text =
                format!("node {node} reports {} plugins, and the limit is {PLUGINS}", report.plugins.len());
            return Err(Error::invalid(text).into());
        }
        for plugin in &report.plugins {
            check_name("plugin", &plugin.plugin)?;
            if !plugin.node_id.is_empty() {
                check_node_id(&plugin.node_id)?;
            }
        }
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let Some(present) = self.node_now(node).await? else { break };
            if present.value.boot != boot || present.value.state == NodeState::Blocked {
                break;
            }
            let row =
                reported(&present.value, &report, &self.taken_names(node, &present.value, &report).await?);
            if (&row.plugins, &row.node_ids) == (&present.value.plugins, &present.value.node_ids) {
                return Ok(());
            }
            if row.node_ids.len() > NODE_IDS {
                let text = format!("node {node} has had names by {NODE_IDS} plugins, the limit");
                return Err(Error::new(Kind::RateLimited, text).into());
            }
            for (plugin, of) in &row.plugins {
                let before = present.value.plugins.get(plugin).and_then(|of| of.other_node_id.as_ref());
                if let Some(id) = of.other_node_id.as_ref().filter(|id| Some(*id) != before) {
                    match row.node_ids.get(plugin) {
                        Some(first) => tracing::warn!(
                            node,
                            plugin,
                            first,
                            id,
                            "a node reports another name of itself by a plugin, which is refused"
                        ),
                        None => tracing::warn!(
                            node,
                            plugin,
                            id,
                            "a node reports a name by a plugin that another node has, which is refused"
                        ),
                    }
                }
            }
            let key = RowKey::Node(node.to_owned());
            let value = rows::write(&key, &row)?;
            if value.len() > REPORTED {
                let size = value.len();
                let text = format!(
                    "node {node} reports plugins for a row of {size} bytes, and the limit is {REPORTED}"
                );
                return Err(Error::new(Kind::RateLimited, text).into());
            }
            let write = Write { value: Some(value), key, lease: 0 };
            match edges::write(&self.rows, &[node_guard(node, &present), here.guard()], vec![write]).await? {
                Written::Done { .. } => {
                    self.node_now(node).await?;
                    return Ok(());
                }
                Written::Refused(_) | Written::Unknown => {}
            }
        }
        Err(Error::new(Kind::Busy, format!("the row of node {node} has changed")).into())
    }

    /// Returns those of the first names that a node reports which other nodes have.
    async fn taken_names(&self, node: &str, present: &NodeRow, report: &Plugins) -> Result<NodeNames> {
        let is_first =
            |of: &&PluginReport| !of.node_id.is_empty() && !present.node_ids.contains_key(&of.plugin);
        let first = report.plugins.iter().filter(is_first);
        let first = first.map(|of| (of.plugin.clone(), of.node_id.clone())).collect();
        self.names_of_others(node, first, |_| true).await
    }
}

/// Returns the row of a node after its report. The first name of the node by a plugin stays: under another one, another node could be attached
/// or detached. So a name of `taken`, which other nodes have, is no first one.
fn reported(present: &NodeRow, report: &Plugins, taken: &NodeNames) -> NodeRow {
    let mut row = present.clone();
    row.plugins.clear();
    for of in &report.plugins {
        let known = present.plugins.get(&of.plugin).cloned().unwrap_or_default();
        let attaches = match of.attaches() {
            Attaches::Unknown => None,
            Attaches::Yes => Some(true),
            Attaches::No => Some(false),
        };
        let max_volumes = of.max_volumes.or(known.max_volumes);
        let mut after = NodePlugin { attaches, max_volumes, ..known };
        if !of.node_id.is_empty() {
            if !taken.contains(&(of.plugin.clone(), of.node_id.clone())) {
                row.node_ids.entry(of.plugin.clone()).or_insert_with(|| of.node_id.clone());
            }
            let is_first = row.node_ids.get(&of.plugin) == Some(&of.node_id);
            after.node_id = is_first.then(|| of.node_id.clone());
            after.other_node_id = (!is_first).then(|| of.node_id.clone());
        }
        row.plugins.insert(of.plugin.clone(), after);
    }
    row
}

impl NodeRow {
    /// Returns whether an operator has accepted what a Hello has seen that etcd does not have.
    fn accepts(&self, hello: &Hello) -> bool {
        let is_below =
            |ahead: &AheadRow| (hello.generation, hello.seen_revision) <= (ahead.generation, ahead.revision);
        self.ahead.as_ref().is_some_and(|ahead| ahead.accepted && is_below(ahead))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> NodeRow {
        NodeRow::new("j", "m", "b")
    }

    fn report(plugins: &[(&str, &str)]) -> Plugins {
        let one = |(plugin, node_id): &(&str, &str)| PluginReport {
            plugin: (*plugin).to_owned(),
            attaches: Attaches::No.into(),
            node_id: (*node_id).to_owned(),
            controller: false,
            max_volumes: None,
            calls: 0,
        };
        Plugins { plugins: plugins.iter().map(one).collect() }
    }

    #[test]
    fn first_name_of_a_node_by_a_plugin_stays() {
        let ids = |row: &NodeRow| {
            let of = row.plugins.get("p").cloned().unwrap_or_default();
            (of.node_id, of.other_node_id)
        };
        let id = |id: &str| Some(id.to_owned());
        let first = reported(&row(), &report(&[("p", "i-1")]), &NodeNames::new());
        assert_eq!(ids(&first), (id("i-1"), None));
        let silent = reported(&first, &report(&[("p", "")]), &NodeNames::new());
        assert_eq!(ids(&silent), (id("i-1"), None), "a plugin that stops is known");
        let other = reported(&silent, &report(&[("p", "i-2")]), &NodeNames::new());
        assert_eq!(ids(&other), (None, id("i-2")));
        let silent = reported(&other, &report(&[("p", "")]), &NodeNames::new());
        assert_eq!(ids(&silent), (None, id("i-2")));
        assert_eq!(ids(&reported(&other, &report(&[("p", "i-1")]), &NodeNames::new())), (id("i-1"), None));
        // The plugin was deregistered meanwhile.
        let gone = reported(&first, &report(&[("q", "x")]), &NodeNames::new());
        assert_eq!(ids(&gone), (None, None));
        assert_eq!(
            ids(&reported(&gone, &report(&[("p", "i-2"), ("q", "x")]), &NodeNames::new())),
            (None, id("i-2"))
        );
    }

    #[test]
    fn name_of_another_node_is_no_first_name() {
        let of = |row: &NodeRow| {
            let of = row.plugins["p"].clone();
            (of.node_id, of.other_node_id, row.node_ids.contains_key("p"))
        };
        let taken = NodeNames::from([("p".to_owned(), "i-1".to_owned())]);
        let thief = reported(&row(), &report(&[("p", "i-1")]), &taken);
        assert_eq!(of(&thief), (None, Some("i-1".to_owned()), false));
        let own = reported(&thief, &report(&[("p", "i-2")]), &taken);
        assert_eq!(of(&own), (Some("i-2".to_owned()), None, true));
        // The same word of another plugin is another name.
        let other = reported(&row(), &report(&[("p", "i-1")]), &[("q".to_owned(), "i-1".to_owned())].into());
        assert_eq!(of(&other), (Some("i-1".to_owned()), None, true));
    }
}
