//! Why a volume is not where it is wanted: who has it, who acts for it, and what each claim waits for. It reads, and changes nothing.
//!
//! A caller that sees the volume sees the claims' nodes and their states. Which server acts, and on which host, is for operators that may list
//! nodes and servers.

use csi_proto::cluster::v1::{
    Acting, AttachmentExplained, AttachmentRow, ClaimExplained, Explanation, NodeExplained, QueueExplained,
    VolumeAsk, WaitExplained,
};
use csi_proto::identity::{Identity, Role};
use csid::cluster::rpcs;
use csid::store::registry::{Attachment, Claim, ClaimState, DrivenRpc, Driver, Queued, Record};
use csid::store::rows::Leg;
use csid::volume::rules::{self, ClaimRefusal};
use csid_etcd::{ClaimInList, RowKey};

use crate::by_call::{is_forgotten, is_of_backup};
use crate::cluster::Cluster;
use crate::excluded::{excluding, why_waits};
use crate::failure::Result;
use crate::grants::May;
use crate::queue::{admit, ahead};
use crate::rows::{self, Mode, NodeRow, NodeState, PluginRow, Read, ServerRow};
use crate::view;
use crate::volume_calls::{rpc_of_volume, word};

/// The limit of holders that a wait names, and of consumers that an attachment names.
const NAMES: usize = 16;
/// The limit of nodes in an explanation, for operators and for others. The rows of each are read.
const OPERATORS_NODES: usize = 64;
const NODES: usize = 16;

/// Nodes that an explanation names, in the order of their importance.
#[derive(Default)]
struct Named(Vec<NodeExplained>);

impl Named {
    /// Adds a node, unless it is there or there are enough.
    fn add(&mut self, node: &str, most: usize) {
        let is_there = self.0.iter().any(|of| of.node == node);
        if !is_there && self.0.len() < most && !node.is_empty() {
            self.0.push(NodeExplained { node: node.to_owned(), ..NodeExplained::default() });
        }
    }
}

impl Cluster {
    /// Explains a volume to a caller that sees its namespace.
    pub async fn explain(&self, caller: &Identity, ask: VolumeAsk) -> Result<Explanation> {
        let record = self.seen_record(caller, &ask).await?;
        self.while_here(self.explained(caller, &record)).await
    }

    async fn explained(&self, caller: &Identity, record: &Record) -> Result<Explanation> {
        let volume = view::row(record, caller);
        let sees_all = self.require_operator(caller, May::Read).is_ok();
        let plugin = self.plugin_now(&record.volume.plugin).await?;
        let has_controller = self.has_controller(record, plugin.as_ref()).await?;
        let acting = match &record.driver {
            Some(driver) => Some(self.acting(driver, caller, sees_all).await?),
            None => None,
        };
        let shown = volume.claims.iter().filter_map(|of| record.claim_at(&of.consumer, &of.node));
        let mut claims = Vec::new();
        for claim in shown {
            let of = ClaimInList {
                name: record.name.clone(),
                plugin: volume.plugin.clone(),
                claim: claim.clone(),
            };
            // Who waits for a claim may know since when others hold the volume.
            let mut claim_row = view::claim_in_list(&of, caller);
            claim_row.since_usec = claim.since_usec;
            let node = self.node(&claim.node).await?;
            let has_refused_mounts = node.is_some_and(|row| row.value.has_refused_mounts());
            let wait = wait_of(record, claim, (has_controller, has_refused_mounts), &claim_row.error);
            let wait = wait.map(|wait| WaitExplained { since_usec: waits_since(claim), ..wait });
            claims.push(ClaimExplained { claim: Some(claim_row), wait });
        }
        let mut queue = Vec::new();
        for (entry, queued) in volume.queue.iter().zip(&record.queue) {
            let wait = self.wait_in_queue(record, queued).await?;
            let wait = Some(WaitExplained { since_usec: queued.claim.since_usec, ..wait });
            queue.push(QueueExplained { entry: Some(entry.clone()), wait });
        }
        let wait = rpc_of_volume(record).map(|rpc| {
            let why = if volume.error.is_empty() { String::new() } else { format!(" ({})", volume.error) };
            let is_parked = record.registration.as_ref().is_some_and(|of| of.blocked.is_some());
            let (kind, text) = match is_parked {
                true => ("parked", format!("an operator, for the plugin refuses {}{why}", rpc_name(rpc))),
                false => (word(rpc), format!("{} by the plugin's controller{why}", rpc_name(rpc))),
            };
            WaitExplained { kind: kind.to_owned(), text, ..WaitExplained::default() }
        });
        let generation = self.meta().await?.value.generation;
        let attachments: Vec<AttachmentExplained> = record
            .attachments
            .iter()
            .map(|at| {
                let is_of = |row: &&AttachmentRow| at.is_by_call(&row.node_id);
                let row = volume.attachments.iter().find(is_of);
                let why = row.map(|row| row.error.as_str()).unwrap_or_default();
                attachment(record, at, has_controller, (why, generation))
            })
            .collect();
        let acting = acting.filter(|of| Acting { since_usec: 0, ..of.clone() } != Acting::default());
        let waits = claims
            .iter()
            .filter_map(|of| of.wait.as_ref())
            .chain(queue.iter().filter_map(|of| of.wait.as_ref()));
        let most = if caller.role == Role::Operator { OPERATORS_NODES } else { NODES };
        let mut named = Named::default();
        waits.for_each(|wait| named.add(&wait.node, most));
        acting.iter().for_each(|of| named.add(&of.host, most));
        volume.claims.iter().for_each(|of| named.add(&of.node, most));
        volume.queue.iter().for_each(|of| named.add(&of.node, most));
        volume.attachments.iter().for_each(|of| named.add(&of.node, most));
        let nodes = self.nodes_explained(record, named).await?;
        Ok(Explanation { volume: Some(volume), claims, attachments, acting, queue, nodes, wait })
    }

    /// Returns whether a node that may be sent the plugin's calls for the volume has joined a server.
    async fn has_controller(&self, record: &Record, plugin: Option<&Read<PluginRow>>) -> Result<bool> {
        let controllers =
            plugin.map(|row| row.value.controllers.iter().cloned().collect()).unwrap_or_default();
        for host in self.hosts(record, controllers) {
            if self.has_sessions(&host).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn acting(&self, driver: &Driver, caller: &Identity, sees_all: bool) -> Result<Acting> {
        let (mut server, mut gone) = (String::new(), false);
        if !driver.server.is_empty() {
            let key = RowKey::Server(driver.server.clone());
            match self.rows.read(&key).await? {
                Some(row) => server = rows::read::<ServerRow>(&key, &row)?.value.name,
                None => gone = true,
            }
        }
        let is_own = caller.role == Role::Node && caller.name == driver.host;
        let call = driver.call.as_ref();
        Ok(Acting {
            server: if sees_all { server } else { String::new() },
            gone,
            rpc: call.map(|call| rpc_name(call.rpc).to_owned()).unwrap_or_default(),
            host: if sees_all || is_own { driver.host.clone() } else { String::new() },
            node: call.map(|call| call.node.clone()).unwrap_or_default(),
            consumer: call.map(|call| call.consumer.clone()).unwrap_or_default(),
            since_usec: driver.sent_usec,
        })
    }

    /// Returns what an entry of the queue waits for. The causes come in the order in which the queue is granted.
    async fn wait_in_queue(&self, record: &Record, queued: &Queued) -> Result<WaitExplained> {
        let node = &queued.claim.node;
        let wait =
            |kind: &str, text: String| WaitExplained { kind: kind.into(), text, ..WaitExplained::default() };
        let of_node = |kind: &str, text: String| WaitExplained { node: node.clone(), ..wait(kind, text) };
        match self.meta_now().await?.value.mode {
            Mode::Normal => {}
            Mode::Recovering => return Ok(wait("recovering", "the end of the cluster's recovery".into())),
            Mode::Restored => {
                return Ok(wait("recovering", "an operator's word that etcd was restored".into()));
            }
        }
        if rules::registered(record).is_err() {
            return Ok(wait("volume", "the volume, which is created or deleted, or not registered".into()));
        }
        let before = self.in_the_way(record, ahead(record, Some(queued), &queued.claim)).await;
        match admit(record, &before, &queued.claim) {
            Ok(()) => {}
            Err(ClaimRefusal::Conflict { what, mut holders }) => {
                let count = holders.len();
                holders.truncate(NAMES);
                let more = if count > NAMES { format!(" and {} more", count - NAMES) } else { String::new() };
                let text = match holders.is_empty() {
                    true => what.to_owned(),
                    false => format!("the end of {}{more}", holders.join(", ")),
                };
                return Ok(WaitExplained { holders, ..wait("claims", text) });
            }
            Err(refusal) => {
                let error = rules::refused(refusal, &record.name, &queued.claim.consumer);
                return Ok(wait("refused", format!("its end: {}", error.message)));
            }
        }
        let row = self.node_now(node).await?;
        match row.as_ref().map(|row| row.value.state) {
            Some(NodeState::Ready) => {}
            Some(state) => {
                return Ok(of_node("node-state", format!("node {node}, which is {}", state.word())));
            }
            None => return Ok(of_node("node-state", format!("node {node}, which has never joined"))),
        }
        if !self.has_sessions(node).await? {
            return Ok(of_node("away", format!("node {node}, which is away")));
        }
        if self.is_limited(record, node).await {
            let plugin = &record.volume.plugin;
            let text = format!(
                "another volume of plugin {plugin} on node {node}, which has as many as the plugin takes"
            );
            return Ok(wait("limit", text));
        }
        if rules::refuse_expanding(record).is_err() {
            return Ok(wait("expansion", "the end of the volume's expansion".into()));
        }
        Ok(wait("turn", "its turn, which has come".into()))
    }

    /// Returns the states of nodes, as etcd has them now.
    async fn nodes_explained(&self, record: &Record, named: Named) -> Result<Vec<NodeExplained>> {
        let mut nodes = Vec::new();
        for mut of in named.0 {
            let row: Option<Read<NodeRow>> = self.node_now(&of.node).await?;
            of.state = row.map(|row| row.value.state.word().to_owned()).unwrap_or_default();
            of.away = !self.has_sessions(&of.node).await?;
            let owed = record.claims.iter().filter(|claim| claim.node == of.node && owes(claim));
            of.owes = u64::try_from(owed.count()).unwrap_or(u64::MAX);
            nodes.push(of);
        }
        Ok(nodes)
    }
}

/// Returns whether a claim's node has to end it: it is being released, and the node may have the volume mounted.
pub fn owes(claim: &Claim) -> bool {
    claim.releasing && claim.state == ClaimState::Taken
}

/// Returns since when a claim waits, in microseconds since 1970. 0: this is not known.
fn waits_since(claim: &Claim) -> u64 {
    match (claim.releasing, claim.state) {
        (true, _) => claim.released_usec,
        (false, ClaimState::Pending) => claim.since_usec,
        (false, _) => 0,
    }
}

/// Returns what a claim waits for. `None`: nothing. `error`: why the claim does not go on, as the caller may see it.
fn wait_of(
    record: &Record,
    claim: &Claim,
    (has_controller, has_refused_mounts): (bool, bool),
    error: &str,
) -> Option<WaitExplained> {
    let node = &claim.node;
    let leg = record.attachment(node).map_or(Leg::Absent, |at| at.leg);
    let wait =
        |kind: &str, text: String| WaitExplained { kind: kind.into(), text, ..WaitExplained::default() };
    let why = if error.is_empty() { String::new() } else { format!(" ({error})") };
    if owes(claim) {
        let text = format!("node {node} to unmount the volume");
        return Some(WaitExplained { node: node.clone(), ..wait("node", text) });
    }
    if claim.blocked.is_some() {
        return Some(wait("parked", format!("an operator, for the plugin refuses it{why}")));
    }
    if claim.state == ClaimState::NodeDetached
        && let Some(why) = why_waits(record, claim, has_refused_mounts)
    {
        return Some(wait("word", format!("the word of an operator: {why}")));
    }
    let others: Vec<String> =
        excluding(record, claim).map(|of| format!("{}/{}", of.node, of.consumer)).collect();
    if !claim.releasing && !others.is_empty() {
        let holders: Vec<String> = others.iter().take(NAMES).cloned().collect();
        let more = match others.len().saturating_sub(NAMES) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let text =
            format!("the end of {}{more}: they exclude it since etcd was restored", holders.join(", "));
        return Some(WaitExplained { holders, ..wait("claims", text) });
    }
    let is_attach = match (claim.state, claim.releasing) {
        (ClaimState::Taken, false) if matches!(leg, Leg::Absent | Leg::Present) => return None,
        (ClaimState::Taken, _) => true,
        (ClaimState::Pending, false) => leg != Leg::Removing,
        _ => false,
    };
    let of = |word: &str| format!("{word} node {node} by the plugin's controller{why}");
    match is_attach {
        _ if record.driver.is_none() && !has_controller && leg != Leg::Absent => {
            let text = format!("a host with the controller of plugin {}{why}", record.volume.plugin);
            Some(wait("controller", text))
        }
        true => Some(wait("attach", of("the attach to"))),
        false => Some(wait("detach", of("the detach from"))),
    }
}

/// Returns an attachment as it is explained. `why`: why one by AttachVolume does not go on, as the caller may see it.
fn attachment(
    record: &Record,
    at: &Attachment,
    has_controller: bool,
    why: (&str, u64),
) -> AttachmentExplained {
    let by_call = at.by_call.as_ref().and(at.node_id.as_deref());
    let consumers = record.claims.iter().filter(|claim| claim.node == at.node);
    AttachmentExplained {
        node: at.node.clone(),
        state: view::leg(at.leg).to_owned(),
        consumers: consumers.take(NAMES).map(|claim| claim.consumer.clone()).collect(),
        node_id: by_call.unwrap_or_default().to_owned(),
        wait: by_call.and_then(|node_id| wait_of_call(record, at, node_id, has_controller, why)),
    }
}

/// Returns what an attachment by AttachVolume waits for. `why`: its last error. `generation`: the cluster's. `None`: it waits for nothing.
fn wait_of_call(
    record: &Record,
    at: &Attachment,
    node_id: &str,
    has_controller: bool,
    (why, generation): (&str, u64),
) -> Option<WaitExplained> {
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    let is_blocked = at.asked.as_ref().is_some_and(|asked| asked.blocked.is_some());
    let (kind, text) = match at.leg {
        Leg::Present => return None,
        _ if is_forgotten(at) => {
            ("detach", format!("the end of a controller's call, which may attach the volume to {node_id}"))
        }
        Leg::Making if is_blocked => {
            ("parked", format!("an operator, for the plugin refuses the attach{why}"))
        }
        _ if is_blocked => ("parked", format!("an operator, for the plugin refuses the detach{why}")),
        Leg::Removing if is_of_backup(at, generation) => {
            let text = format!("an operator, for a backup of etcd has the failed attach to {node_id}");
            ("parked", format!("{text}, and the volume may have been attached since"))
        }
        _ if record.driver.is_none() && !has_controller => {
            ("controller", format!("a host with the controller of plugin {}{why}", record.volume.plugin))
        }
        Leg::Making => ("attach", format!("the attach to {node_id} by the plugin's controller{why}")),
        Leg::Removing | Leg::Absent => {
            ("detach", format!("the detach from {node_id} by the plugin's controller{why}"))
        }
    };
    Some(WaitExplained { kind: kind.to_owned(), text, ..WaitExplained::default() })
}

fn rpc_name(rpc: DrivenRpc) -> &'static str {
    match rpc {
        DrivenRpc::Publish => rpcs::PUBLISH,
        DrivenRpc::Unpublish => rpcs::UNPUBLISH,
        DrivenRpc::Create => rpcs::CREATE,
        DrivenRpc::Delete => rpcs::DELETE,
        DrivenRpc::Expand => rpcs::EXPAND,
        DrivenRpc::Snapshot => rpcs::SNAPSHOT,
        DrivenRpc::DeleteSnapshot => rpcs::DELETE_SNAPSHOT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use csid::store::registry::{Blocked, Capability, ClaimMode, Use, VolumeName};
    use csid::store::rows::{AccessMode, AttachmentMode};

    fn record(state: ClaimState, releasing: bool, leg: Leg) -> Record {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        let capability = Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        };
        let used = Use { mode: ClaimMode::Write, capability };
        let mut claim = rules::new_claim("web", "n1", 7, used);
        (claim.state, claim.releasing) = (state, releasing);
        let mut record = Record::none(name);
        record.claims.insert(claim);
        if leg != Leg::Absent {
            let at: Attachment =
                serde_json::from_value(serde_json::json!({ "node": "n1", "leg": leg })).unwrap();
            record.attachments.push(at);
        }
        record
    }

    /// Returns the kind of what the claim of a record waits for.
    fn kind(record: &Record, has_controller: bool) -> String {
        let claim = record.claims.iter().next().unwrap();
        wait_of(record, claim, (has_controller, false), "").map(|wait| wait.kind).unwrap_or_default()
    }

    #[test]
    fn claim_waits_for_what_ends_its_state() {
        use ClaimState::{NodeDetached, Pending, Taken};
        for (state, releasing, leg, has_controller, due) in [
            (Taken, false, Leg::Present, true, ""),
            (Taken, false, Leg::Absent, false, ""),
            (Taken, false, Leg::Making, true, "attach"),
            (Taken, true, Leg::Present, true, "node"),
            (Pending, false, Leg::Making, true, "attach"),
            (Pending, false, Leg::Making, false, "controller"),
            (Pending, false, Leg::Removing, true, "detach"),
            (Pending, true, Leg::Removing, true, "detach"),
            (NodeDetached, true, Leg::Present, true, "detach"),
            (NodeDetached, true, Leg::Present, false, "controller"),
        ] {
            let record = record(state, releasing, leg);
            assert_eq!(kind(&record, has_controller), due, "{state:?} {releasing} {leg:?}");
        }
        let mut parked = record(NodeDetached, true, Leg::Present);
        let mut claim = parked.claims.iter().next().unwrap().clone();
        claim.blocked = Some(Blocked { reason: "no".into() });
        parked.claims.insert(claim);
        assert_eq!(kind(&parked, true), "parked");
    }

    #[test]
    fn excluded_claim_waits_for_the_end_of_the_other() {
        for (adopted, due) in [(false, ""), (true, "claims")] {
            let mut record = record(ClaimState::Taken, false, Leg::Present);
            let mut other = record.claims.iter().next().unwrap().clone();
            (other.node, other.adopted) = ("n2".into(), adopted);
            record.claims.insert(other);
            assert_eq!(kind(&record, true), due);
        }
    }
}
