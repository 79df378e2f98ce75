//! What does not fit in etcd. An audit reads all rows at one revision, and changes nothing. A finding has keys and names, and nothing of a value.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use csi_proto::cluster::v1::Finding;
use csid::store::registry::{Claim, ClaimState, Registry, VolumeName};
use csid::store::rows::Leg;
use csid::volume::rules;
use csid_etcd::{RowKey, Rows, Walked, WalkedVolume};
use serde::de::DeserializeOwned;

use crate::by_call::half_done;
use crate::cluster::Cluster;
use crate::excluded::why_waits;
use crate::failure::Result;
use crate::rows::{
    DrainedRow, HeardRow, MetaRow, Mode, NodeRow, PluginRow, RefusedClaimRow, ServerRow, SessionRow, UsedRow,
};

/// The most findings of an audit.
pub const FINDINGS: usize = 10_000;
/// How long another server has to go on for one that is gone. It looks for such volumes more often.
const TAKEOVER: Duration = Duration::from_secs(15);

/// What an audit has seen. Keys come in etcd's order, so nodes and servers are known before volumes.
#[derive(Default)]
struct Seen {
    nodes: BTreeSet<String>,
    /// The nodes that may have volumes mounted for refused claims.
    with_refused_mounts: BTreeSet<String>,
    /// The keys of servers, and digests of their grants, by their IDs. `None`: the row cannot be read.
    servers: HashMap<String, (String, Option<String>)>,
    /// The rows of plugins' volumes that no volume has claimed yet, by their keys.
    external: HashMap<String, VolumeName>,
    /// Volumes that cannot be read. They are not judged by what is missing of them.
    unread: HashSet<VolumeName>,
    /// The rows that count volumes: key, node, plugin, count.
    used: Vec<(String, String, String, u64)>,
    /// How many volumes nodes have, by node and plugin.
    claimed: HashMap<(String, String), u64>,
    /// Volumes whose driver is a server without a row: the key, and the server.
    driven: Vec<(VolumeName, String, String)>,
    /// The nodes that have said all that they hold after a restore of etcd, with the generation.
    heard: HashSet<(String, u64)>,
    /// The cluster's generation.
    generation: u64,
    /// The key of the cluster's row, and the generation in which it recovers. `None`: it does not.
    recovers: Option<(String, u64)>,
    findings: Vec<Finding>,
}

fn is<T: DeserializeOwned>(value: &[u8]) -> bool {
    serde_json::from_slice::<T>(value).is_ok()
}

impl Seen {
    fn find(&mut self, kind: &str, key: impl Into<String>, text: impl Into<String>) {
        if self.findings.len() <= FINDINGS {
            self.findings.push(Finding { kind: kind.into(), key: key.into(), text: text.into() });
        }
    }

    fn unreadable(&mut self, key: impl Into<String>) {
        self.find("unreadable-value", key, "the value cannot be read");
    }

    fn see(&mut self, walked: Walked) {
        match walked {
            Walked::Row { key, name, row } => self.row(key, &name, &row.value),
            Walked::External { name, of: Some(of) } => drop(self.external.insert(name, of)),
            Walked::External { name, of: None } => self.unreadable(name),
            Walked::Used { name, node, plugin, row } => match serde_json::from_slice::<UsedRow>(&row.value) {
                Ok(UsedRow { volumes: Some(volumes), .. }) => self.used.push((name, node, plugin, volumes)),
                // A server counts them.
                Ok(UsedRow { volumes: None, .. }) => {}
                Err(_) => self.unreadable(name),
            },
            Walked::Volume(volume) => self.volume(&volume),
        }
    }

    fn row(&mut self, key: RowKey, name: &str, value: &[u8]) {
        let is_readable = match key {
            RowKey::Meta => match serde_json::from_slice::<MetaRow>(value) {
                Ok(row) => {
                    self.generation = row.generation;
                    self.recovers = (row.mode == Mode::Recovering).then(|| (name.to_owned(), row.generation));
                    true
                }
                Err(_) => false,
            },
            RowKey::Used { .. } => is::<UsedRow>(value),
            RowKey::Node(node) => {
                let row = serde_json::from_slice::<NodeRow>(value).ok();
                let ahead = row.as_ref().and_then(|row| row.ahead.as_ref());
                if let Some(ahead) = ahead.filter(|ahead| !ahead.accepted) {
                    let text = format!(
                        "node {node} has seen generation {} and revision {} of it, which etcd does not have, and is refused",
                        ahead.generation, ahead.revision
                    );
                    self.find("node-ahead-of-etcd", name, text);
                }
                let is_fenced_in = |generation| row.as_ref().is_some_and(|row| row.is_fenced_in(generation));
                if let Some((_, generation)) = &self.recovers
                    && !is_fenced_in(*generation)
                    && !self.heard.contains(&(node.clone(), *generation))
                {
                    let text =
                        format!("the recovery of the cluster waits for node {node} to say what it holds");
                    self.find("recovery-awaits-node", name, text);
                }
                if row.as_ref().is_some_and(NodeRow::has_refused_mounts) {
                    self.with_refused_mounts.insert(node.clone());
                }
                self.nodes.insert(node);
                row.is_some()
            }
            RowKey::Server(id) => {
                let grants = serde_json::from_slice::<ServerRow>(value).ok().map(|row| row.grants);
                let is_readable = grants.is_some();
                self.servers.insert(id, (name.to_owned(), grants));
                is_readable
            }
            RowKey::Session { node, .. } => {
                if !self.nodes.contains(&node) {
                    self.find(
                        "session-without-node",
                        name,
                        format!("node {node} has a session, and has no row"),
                    );
                }
                is::<SessionRow>(value)
            }
            RowKey::Report(node) => {
                if !self.nodes.contains(&node) {
                    let text = format!("node {node} has reported what its drain leaves, and has no row");
                    self.find("report-without-node", name, text);
                }
                is::<DrainedRow>(value)
            }
            RowKey::Heard(node) => match serde_json::from_slice::<HeardRow>(value) {
                Ok(row) => {
                    self.refused(&node, name, &row);
                    if row.complete {
                        self.heard.insert((node, row.generation));
                    }
                    true
                }
                Err(_) => false,
            },
            RowKey::Plugin(plugin) => match serde_json::from_slice::<PluginRow>(value) {
                Ok(row) => {
                    let gone: Vec<_> = row.controllers.difference(&self.nodes).cloned().collect();
                    for node in gone {
                        let text =
                            format!("plugin {plugin} has a controller on node {node}, which has no row");
                        self.find("controller-without-node", name, text);
                    }
                    true
                }
                Err(_) => false,
            },
            // The walk has volumes apart from rows.
            RowKey::Volume(_) => true,
        };
        if !is_readable {
            self.unreadable(name);
        }
    }

    /// Finds the claims of a node that were not brought back after a restore of etcd.
    fn refused(&mut self, node: &str, name: &str, row: &HeardRow) {
        for RefusedClaimRow { claim: _, namespace, volume, consumer, why } in &row.claims {
            let text = format!(
                "the claim of {consumer} on node {node} was not brought back for {namespace}/{volume}: {why}"
            );
            self.find("held-claim-refused", name, text);
        }
        if row.more {
            let text = format!("more claims of node {node} were not brought back");
            self.find("held-claim-refused", name, text);
        }
    }

    fn volume(&mut self, volume: &WalkedVolume) {
        let record = &volume.record;
        for key in &volume.unreadable {
            self.unreadable(key);
        }
        let of_attachments = record.attachments.iter().map(|at| &at.node);
        let nodes: BTreeSet<&String> =
            record.claims.iter().map(|of| &of.node).chain(of_attachments).collect();
        for node in nodes {
            *self.claimed.entry((node.clone(), record.volume.plugin.clone())).or_default() += 1;
        }
        for claim in record.claims.iter() {
            if !self.nodes.contains(&claim.node) {
                let text = format!("the claim is of node {}, which has no row", claim.node);
                self.find("claim-without-node", volume.claim(claim), text);
            }
        }
        if !volume.unreadable.is_empty() {
            self.unread.insert(record.name.clone());
            return;
        }
        if !volume.has_head {
            self.find("volume-without-head", volume.head(), "the volume has other keys, but not this one");
            return;
        }
        match self.external.remove(&volume.external()) {
            Some(of) if of == record.name => {}
            Some(of) => {
                let text = format!("the row of the volume of {} names {of}", record.name);
                self.find("volume-without-external-id", volume.external(), text);
            }
            None => {
                let text = format!("the volume of {} has no row that keeps it to one name", record.name);
                self.find("volume-without-external-id", volume.external(), text);
            }
        }
        let owner = record.registration.as_ref().map(|of| of.owner.as_str());
        let node = owner.and_then(|owner| owner.strip_prefix("node/"));
        if let Some(node) = node.filter(|node| !self.nodes.contains(*node)) {
            let text = format!("node {node} owns the volume {}, and has no row", record.name);
            self.find("volume-without-owner", volume.registration(), text);
        }
        self.excluding(volume);
        for claim in record.claims.iter().filter(|of| of.state == ClaimState::NodeDetached) {
            if let Some(why) = why_waits(record, claim, self.with_refused_mounts.contains(&claim.node)) {
                let text = format!(
                    "{why}, so it stays attached for node {}, whose claim of {} has ended",
                    claim.node, claim.consumer
                );
                self.find("detach-waits-for-operator", volume.claim(claim), text);
            }
        }
        for attachment in record.attachments.iter().filter(|at| at.by_call.is_none()) {
            if !record.claims.iter().any(|claim| claim.node == attachment.node) {
                let text =
                    format!("the volume is attached for node {}, which has no claim of it", attachment.node);
                self.find("attachment-without-claim", volume.attachment(attachment), text);
            }
        }
        for at in half_done(record, self.generation) {
            let node_id = at.node_id.as_deref().unwrap_or_default();
            let what =
                if at.leg == Leg::Making { "being attached" } else { "being detached after a failure" };
            let text = format!(
                "the backup has the volume as {what} by AttachVolume at {node_id}, and it may have been attached since: nothing detaches it without a word"
            );
            self.find("attachment-of-backup", volume.attachment(at), text);
        }
        if let Some(driver) = &record.driver
            && !driver.server.is_empty()
            && !self.servers.contains_key(&driver.server)
        {
            self.driven.push((record.name.clone(), volume.head(), driver.server.clone()));
        }
    }

    /// Finds claims that exclude another one of their volume. Nodes have brought them back after a restore of etcd.
    fn excluding(&mut self, volume: &WalkedVolume) {
        // Of many claims for the same use, two of different nodes stand for all.
        let mut others: Vec<&Claim> = Vec::new();
        for claim in volume.record.claims.iter() {
            if let Some(other) = others.iter().find(|other| rules::exclude_each_other(other, claim)) {
                let text = format!(
                    "the claim of {} on node {} and the one of {} on node {} exclude each other",
                    claim.consumer, claim.node, other.consumer, other.node
                );
                self.find("claims-exclude-each-other", volume.claim(claim), text);
            }
            let mut same = others.iter().filter(|other| other.usage == claim.usage);
            let is_more = match (same.next(), same.next()) {
                (None, _) => true,
                (Some(one), None) => one.node != claim.node,
                (Some(_), Some(_)) => false,
            };
            if is_more {
                others.push(claim);
            }
        }
    }

    /// Finds what only the end of the walk shows. `own`: the server that answers.
    fn finish(&mut self, own: &str) {
        let is_missing =
            |of: &Finding| ["recovery-awaits-node", "held-claim-refused"].contains(&of.kind.as_str());
        if let Some((key, _)) = self.recovers.take()
            && !self.findings.iter().any(is_missing)
        {
            let text =
                "the cluster recovers, and all its nodes have said what they hold: an operator ends that";
            self.find("recovery-awaits-operator", key, text);
        }
        for (key, of) in std::mem::take(&mut self.external) {
            if self.unread.contains(&of) {
                continue;
            }
            let text = format!(
                "the row names the volume {of}, which has another one at the plugin, or is not there"
            );
            self.find("external-id-without-volume", key, text);
        }
        for (key, node, plugin, count) in std::mem::take(&mut self.used) {
            match self.claimed.get(&(node.clone(), plugin.clone())).copied().unwrap_or(0) {
                has if has == count => {}
                0 => {
                    let text = format!("node {node} has no claim of a volume of plugin {plugin}");
                    self.find("used-without-claim", key, text);
                }
                // What cannot be read may be a node's volume.
                _ if !self.unread.is_empty() => {}
                has => {
                    let text =
                        format!("node {node} has {has} volumes of plugin {plugin}, and the row has {count}");
                    self.find("used-differs", key, text);
                }
            }
        }
        let servers = std::mem::take(&mut self.servers);
        let own_grants = servers.get(own).and_then(|(_, grants)| grants.as_ref());
        for (id, (key, grants)) in &servers {
            if let (Some(own_grants), Some(grants)) = (own_grants, grants)
                && own_grants != grants
            {
                let text = format!("server {id} has other grants than server {own}, which answers");
                self.find("grants-differ", key, text);
            }
        }
    }
}

impl Cluster {
    /// Returns what does not fit in etcd, ordered by kind and key.
    pub async fn audit(&self) -> Result<Vec<Finding>> {
        let here = self.presence.here()?;
        let mut seen = Seen::default();
        let mut walk = self.registry.walk();
        while let Some(walked) = self.while_here(async { Ok(walk.next().await?) }).await? {
            seen.see(walked);
        }
        seen.finish(&here.id);
        if !seen.driven.is_empty() {
            self.wait_for_drivers(&mut seen).await?;
        }
        let mut findings = seen.findings;
        findings.sort_by(|a, b| (&a.kind, &a.key).cmp(&(&b.kind, &b.key)));
        if findings.len() > FINDINGS {
            findings.truncate(FINDINGS);
            let text = format!("there are more findings than the limit, which is {FINDINGS}");
            findings.push(Finding { kind: "more".into(), key: String::new(), text });
        }
        Ok(findings)
    }

    /// Finds the volumes that are still of a server that is gone, after another one had the time to go on.
    async fn wait_for_drivers(&self, seen: &mut Seen) -> Result<()> {
        tokio::time::sleep(TAKEOVER).await;
        let rows = self.while_here(async { Ok(self.rows.all(&Rows::Servers).await?) }).await?;
        let is_there = |id: &str| rows.iter().any(|(key, _)| *key == RowKey::Server(id.to_owned()));
        for (name, key, server) in std::mem::take(&mut seen.driven).into_iter().take(FINDINGS) {
            let record = self.while_here(async { Ok(self.registry.record(name).await?) }).await?;
            if record.driver.is_some_and(|now| now.server == server && !is_there(&server)) {
                let text = format!("server {server} acts for the volume, and is gone. No server has gone on");
                seen.find("driver-without-server", key, text);
            }
        }
        Ok(())
    }
}
