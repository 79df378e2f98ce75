//! The judge of what is in etcd, change by change: who has a volume, and who waits for it. It has rules of its own, and not csid's.

use std::collections::{BTreeMap, BTreeSet};

use csi_proto::cluster::v1::Failure;
use csid::store::registry::{Claim, ClaimState};
use csid_etcd::api::Event;
use csid_etcd::api::event::EventType;
use csid_etcd::double::Double;

use super::faults::{Fault, Faults};
use super::modes::{is_shared, is_single};

const NODES: &str = "/csid/v1/node/";
const VOLUMES: &str = "/csid/v1/vol/default/";

/// A node and a consumer.
type Holder = (String, String);

/// What has been in etcd up to a revision.
pub struct History {
    /// The first revision that was not looked at.
    next: i64,
    /// What each node's row says of it.
    nodes: BTreeMap<String, Node>,
    volumes: BTreeMap<String, Volume>,
    /// The names of claims that were taken at some time.
    taken: BTreeSet<String>,
}

/// A node's boot and state, as its row has them.
struct Node {
    boot: String,
    /// The revision from which on the node is not blocked. `None`: it is.
    ready: Option<i64>,
}

#[derive(Default)]
struct Volume {
    claims: BTreeMap<Holder, Claim>,
    /// By their places.
    queue: BTreeMap<u64, Claim>,
    /// Who has had the volume or has waited for it, and when.
    spans: Vec<Span>,
}

struct Span {
    holder: Holder,
    from: i64,
    /// `None`: it goes on.
    to: Option<i64>,
}

/// A call for a claim that was refused.
pub struct RefusedClaim<'a> {
    pub volume: &'a str,
    pub node: &'a str,
    pub consumer: &'a str,
    /// The caller's identity and its name of the call.
    pub call: String,
    /// etcd's revision when the call began.
    pub since: i64,
    /// Whether nothing but this message may have had the claim granted.
    pub is_only: bool,
}

/// Returns whether two claims of a volume exclude each other.
fn exclude(volume: &str, one: &Holder, other: &Holder) -> bool {
    match one == other || !is_single(volume) {
        true => false,
        false => one.0 != other.0 || !is_shared(volume),
    }
}

/// Returns whether the call of a claim is of the boot that its node's row has.
fn is_of_boot(nodes: &BTreeMap<String, Node>, claim: &Claim) -> bool {
    let boot = nodes.get(&claim.node).and_then(|node| node.boot.strip_prefix("boot ")?.split(' ').next());
    boot.is_some_and(|boot| claim.call.starts_with(&format!("node/{0}/{0}-{boot}.", claim.node)))
}

/// Returns whether the node of a claim is not blocked.
fn is_ready(nodes: &BTreeMap<String, Node>, claim: &Claim) -> bool {
    nodes.get(&claim.node).is_some_and(|node| node.ready.is_some())
}

fn holder(claim: &Claim) -> Holder {
    (claim.node.clone(), claim.consumer.clone())
}

impl Volume {
    fn holds(&self, of: &Holder) -> bool {
        self.claims.contains_key(of) || self.queue.values().any(|claim| holder(claim) == *of)
    }

    /// Reads a change. Returns whether it is one of a claim or of the queue.
    fn apply(&mut self, part: &str, event: &Event) -> bool {
        let kv = event.kv.as_ref().unwrap();
        let is_put = event.r#type() == EventType::Put;
        let claim = || serde_json::from_slice::<Claim>(&kv.value).unwrap();
        match part.split_once('/') {
            Some(("claim", of)) => {
                let (node, consumer) = of.split_once('/').unwrap();
                let of = (node.to_owned(), consumer.to_owned());
                match is_put {
                    true => drop(self.claims.insert(of, claim())),
                    false => drop(self.claims.remove(&of)),
                }
            }
            Some(("queue", place)) => {
                let place = u64::from_str_radix(place, 16).unwrap();
                match is_put {
                    true => drop(self.queue.insert(place, claim())),
                    false => drop(self.queue.remove(&place)),
                }
            }
            _ => return false,
        }
        true
    }

    /// Notes who has or waits for the volume since this revision, and who does not any more.
    fn note(&mut self, revision: i64) {
        let mut spans = std::mem::take(&mut self.spans);
        for span in spans.iter_mut().filter(|span| span.to.is_none()) {
            if !self.holds(&span.holder) {
                span.to = Some(revision);
            }
        }
        let present: BTreeSet<Holder> =
            self.claims.keys().cloned().chain(self.queue.values().map(holder)).collect();
        for holder in present {
            if !spans.iter().any(|span| span.to.is_none() && span.holder == holder) {
                spans.push(Span { holder, from: revision, to: None });
            }
        }
        self.spans = spans;
    }
}

impl History {
    pub fn new() -> History {
        History { next: 1, nodes: BTreeMap::new(), volumes: BTreeMap::new(), taken: BTreeSet::new() }
    }

    /// Looks at what has changed. Returns the rules that were broken.
    pub fn follow(&mut self, double: &Double, seen: &Faults) -> Vec<String> {
        let mut broken = Vec::new();
        for (revision, events) in double.events("/csid/v1/", self.next) {
            self.next = revision + 1;
            let mut changed: BTreeMap<String, Vec<(String, Event)>> = BTreeMap::new();
            for event in events {
                let Some(kv) = &event.kv else { continue };
                let key = String::from_utf8_lossy(&kv.key).into_owned();
                if let Some(node) = key.strip_prefix(NODES) {
                    let row: serde_json::Value = serde_json::from_slice(&kv.value).unwrap_or_default();
                    let boot = row["boot"].as_str().unwrap_or_default().to_owned();
                    let before = self.nodes.get(node).and_then(|before| before.ready);
                    let ready = (row["state"] == "ready").then(|| before.unwrap_or(revision));
                    if ready.is_none() && before.is_some() {
                        seen.count(Fault::Blocked);
                    }
                    self.nodes.insert(node.to_owned(), Node { boot, ready });
                } else if let Some((volume, part)) =
                    key.strip_prefix(VOLUMES).and_then(|rest| rest.split_once('/'))
                {
                    changed.entry(volume.to_owned()).or_default().push((part.to_owned(), event));
                }
            }
            for (name, events) in changed {
                self.change(&name, &events, revision, seen, &mut broken);
            }
        }
        broken
    }

    /// Judges a change of one volume.
    fn change(
        &mut self,
        name: &str,
        events: &[(String, Event)],
        revision: i64,
        seen: &Faults,
        broken: &mut Vec<String>,
    ) {
        let volume = self.volumes.entry(name.to_owned()).or_default();
        let (claims, queue) = (volume.claims.clone(), volume.queue.clone());
        if events.iter().filter(|(part, event)| volume.apply(part, event)).count() == 0 {
            return;
        }
        volume.note(revision);
        for (_, entry) in volume.queue.iter().filter(|(place, _)| !queue.contains_key(place)) {
            seen.count(Fault::Queued);
            if !is_ready(&self.nodes, entry) || !is_of_boot(&self.nodes, entry) {
                let text =
                    format!("revision {revision} has {} wait, of a blocked node or another boot", entry.call);
                broken.push(text);
            }
        }
        for (of, claim) in &volume.claims {
            if claim.state == ClaimState::Taken {
                self.taken.insert(claim.id.clone());
            }
            if let Some(other) = volume.claims.keys().find(|other| exclude(name, of, other)) {
                broken.push(format!("revision {revision} has two claims of {name}: {of:?} and {other:?}"));
            }
            let before = claims.get(of);
            if before.is_some_and(|before| before.call == claim.call) {
                continue;
            }
            let place = queue.iter().find(|(_, entry)| entry.call == claim.call).map(|(place, _)| *place);
            if !is_ready(&self.nodes, claim) {
                let text = format!("revision {revision} grants {name} to {}, a blocked node's", claim.call);
                broken.push(text);
            }
            // What waits is granted to the node, whatever its boot.
            if place.is_none() && !is_of_boot(&self.nodes, claim) {
                let text =
                    format!("revision {revision} grants {name} to {}, a call of another boot", claim.call);
                broken.push(text);
            }
            if before.is_some() {
                continue;
            }
            if place.is_some() {
                seen.count(Fault::QueueGranted);
            }
            let is_earlier = |(at, entry): &(&u64, &Claim)| {
                let is_before = queue.contains_key(at) && place.is_none_or(|place| **at < place);
                is_before && exclude(name, of, &holder(entry))
            };
            if let Some((at, entry)) = volume.queue.iter().find(is_earlier) {
                broken.push(format!(
                    "revision {revision} grants {name} to {} at place {place:?}, and {} waits at {at}",
                    claim.call, entry.call
                ));
            }
        }
    }

    /// Judges a grant that a caller was given.
    pub fn judge_grant(&self, volume: &str, claim: &str) -> Option<String> {
        let is_known = self.taken.contains(claim);
        (!is_known).then(|| format!("{claim} of {volume} was granted, and etcd has never had it as taken"))
    }

    /// Judges a refusal that a caller was given.
    pub fn judge_refusal(&self, of: &RefusedClaim<'_>, failure: &Failure, seen: &Faults) -> Option<String> {
        let RefusedClaim { volume: name, node, consumer, call, since, is_only } = of;
        let volume = self.volumes.get(*name)?;
        let own = ((*node).to_owned(), (*consumer).to_owned());
        let text = &failure.message;
        if let Some(claim) = volume.claims.get(&own).filter(|claim| *is_only && claim.call == *call)
            && claim.state == ClaimState::Taken
            && !claim.releasing
            // A call of an earlier boot is refused what it had then.
            && is_of_boot(&self.nodes, claim)
            // A call of a blocked node is refused, too.
            && self.nodes[&claim.node].ready.is_some_and(|ready| ready <= *since)
        {
            return Some(format!("the call {call} has the claim {}, and was refused: {text}", claim.id));
        }
        let was_there = |span: &&Span| span.to.is_none_or(|to| to > *since);
        for shown in &failure.holders {
            let other = shown.split_once('/').map(|(node, consumer)| (node.to_owned(), consumer.to_owned()));
            let span = other
                .and_then(|other| volume.spans.iter().filter(was_there).find(|span| span.holder == other));
            match span.filter(|span| exclude(name, &own, &span.holder)) {
                Some(span) if span.from > *since => seen.count(Fault::Outrun),
                Some(_) => {}
                None => return Some(format!("{own:?} was refused {name} because of {shown}: {text}")),
            }
        }
        None
    }
}
