//! The rules for COs, as a fold over the events of a log, or of the logs of several hosts: no clock, no I/O. A rule accuses only where no
//! correct CO could have sent the call, given the answers that it had; what cannot be known (what became of a call without an answer, what
//! happens on a host without a log) speaks for the CO. Digests compare within one log alone. README.md says of each rule what is looked at.

mod capabilities;
mod errors;
mod fields;
mod flight;
mod legs;
mod names;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

use crate::record::{Event, Mark};
use capabilities::Capabilities;

/// The rules that can be seen on the wire.
pub const RULES: &[(u8, &str)] = &[
    (3, "Identity calls come before all others"),
    (11, "strings, maps and mount flags keep to CSI's sizes"),
    (12, "required lists and maps are not empty"),
    (13, "names hold no control characters"),
    (14, "capacity bounds are not negative, at least one is set"),
    (15, "topology: keys unique ignoring case, preferred among requisite, sent with its capability only"),
    (16, "mutable_parameters only with MODIFY_VOLUME"),
    (17, "secret keys are [A-Za-z0-9._-]"),
    (18, "one call in flight per volume"),
    (19, "an optional RPC only with its capability"),
    (20, "ControllerPublishVolume succeeds before stage and publish"),
    (21, "NodeStageVolume succeeds before publish"),
    (22, "every NodeUnpublishVolume succeeds before NodeUnstageVolume"),
    (23, "unpublish and unstage succeed before ControllerUnpublishVolume"),
    (24, "what was published, staged, attached is taken down again"),
    (25, "only the negation ends a call whose outcome is unknown"),
    (26, "offline expansion waits until the volume is down; NodeExpandVolume comes after stage"),
    (27, "ControllerPublishVolume gets the node_id of NodeGetInfo"),
    (28, "one staging path per volume, absolute"),
    (29, "one target_path per publish, absolute"),
    (31, "publish_context if and only if the plugin attaches; contexts unchanged"),
    (32, "readonly in ControllerPublishVolume only with PUBLISH_READONLY"),
    (33, "stats and expand get the staging path, ControllerUnpublishVolume the publish secrets"),
    (
        34,
        "no second publish with another capability, second targets in multi-writer or multi-node modes only, second nodes in multi-node modes only",
    ),
    (35, "a capability that ValidateVolumeCapabilities did not confirm is not used"),
    (36, "a refused call is not sent again as it is"),
    (39, "a CreateVolume without an answer is sent again as it was, before its volume is deleted"),
];

/// The verdict of the rules on a log.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verdict {
    /// How often each rule had something to look at.
    pub checked: BTreeMap<u8, u64>,
    pub breaches: Vec<Breach>,
}

/// A rule that was broken, and the calls that prove it: the last one broke it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Breach {
    pub rule: u8,
    pub what: String,
    pub calls: Vec<u64>,
}

impl Verdict {
    fn looked(&mut self, rule: u8) {
        *self.checked.entry(rule).or_default() += 1;
    }

    fn check(&mut self, rule: u8, holds: bool, calls: &[u64], what: impl FnOnce() -> String) {
        debug_assert!(RULES.iter().any(|(number, _)| *number == rule));
        self.looked(rule);
        if !holds {
            let calls: BTreeSet<u64> = calls.iter().copied().collect();
            self.breaches.push(Breach { rule, what: what(), calls: calls.into_iter().collect() });
        }
    }
}

/// A call as the rules see it.
#[derive(Clone, Debug)]
struct Call {
    id: u64,
    connection: u64,
    peers: Peers,
    rpc: String,
    request: Value,
}

/// A process of the CO, a process of the plugin, and the plugin's socket between them, on a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Peers {
    host: usize,
    co: i32,
    plugin: i32,
    socket: usize,
}

impl Call {
    fn host(&self) -> usize {
        self.peers.host
    }

    /// A string field; empty where it is not set.
    fn text(&self, field: &str) -> &str {
        self.request[field].as_str().unwrap_or_default()
    }

    /// The volume that the call is about, `None` where it is about none.
    fn volume(&self) -> Option<&str> {
        let id = self.text("volume_id");
        (!id.is_empty()).then_some(id)
    }
}

/// The effect of an RPC on the object that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Make,
    /// The RPC removes the object of a `Make`.
    Negate,
    Read,
}

fn kind(rpc: &str) -> Kind {
    match rpc {
        "CreateVolume"
        | "ControllerPublishVolume"
        | "NodeStageVolume"
        | "NodePublishVolume"
        | "ControllerExpandVolume"
        | "NodeExpandVolume"
        | "ControllerModifyVolume"
        | "CreateSnapshot"
        | "CreateVolumeGroupSnapshot" => Kind::Make,
        "DeleteVolume"
        | "ControllerUnpublishVolume"
        | "NodeUnstageVolume"
        | "NodeUnpublishVolume"
        | "DeleteSnapshot"
        | "DeleteVolumeGroupSnapshot" => Kind::Negate,
        _ => Kind::Read,
    }
}

/// The CO's knowledge when a call has ended.
#[derive(Debug)]
enum Outcome<'a> {
    Ok(&'a Value),
    /// The plugin's definite no.
    Refused(&'a str),
    /// The call may have had its effect, or have it yet (CO rule 36).
    Unknown,
}

impl<'a> Outcome<'a> {
    fn new(code: Option<&'a str>, response: &'a Value) -> Self {
        match code {
            Some("OK") => Outcome::Ok(response),
            None | Some("CANCELLED" | "UNKNOWN" | "DEADLINE_EXCEEDED" | "INTERNAL" | "DATA_LOSS") => {
                Outcome::Unknown
            }
            Some(code) => Outcome::Refused(code),
        }
    }

    /// Returns whether a Negate with this outcome has removed its object. NOT_FOUND means that, too (CO rule 36).
    fn took_away(&self) -> bool {
        matches!(self, Outcome::Ok(_) | Outcome::Refused("NOT_FOUND"))
    }
}

/// The fold.
#[derive(Default)]
pub struct Checker {
    verdict: Verdict,
    connections: BTreeMap<u64, Peers>,
    calls: BTreeMap<u64, Call>,
    capabilities: Capabilities,
    fields: fields::Fields,
    flight: flight::Flight,
    volumes: volumes::Volumes,
    names: names::Names,
    errors: errors::Errors,
}

impl Checker {
    /// Takes the next event of a host. The numbers of connections and calls are unique over all hosts.
    pub fn feed(&mut self, host: usize, event: &Event) {
        match event {
            Event::Connected { connection, socket, co, plugin } => {
                // A peer in another pid namespace has none: each of its connections may be another process.
                let seen =
                    |pid: &i32| if *pid > 0 { *pid } else { -i32::try_from(*connection).unwrap_or(i32::MAX) };
                let peers = Peers { host, co: seen(co), plugin: seen(plugin), socket: *socket };
                self.connections.insert(*connection, peers);
            }
            Event::Closed { connection } => {
                self.connections.remove(connection);
                self.lose(|call| call.connection == *connection);
            }
            Event::Called { call, connection, rpc, request } => {
                let peers = self.connections.get(connection).copied();
                let peers = peers.unwrap_or(Peers { host, ..Peers::default() });
                let call = Call {
                    id: *call,
                    connection: *connection,
                    peers,
                    rpc: rpc.clone(),
                    request: request.clone(),
                };
                self.begin(call);
            }
            Event::Ended { call, code, response, .. } => {
                self.end(*call, &Outcome::new(code.as_deref(), response))
            }
            Event::Marked { mark: Mark::Reboot } => {
                self.lose(|call| call.host() == host);
                self.volumes.reboot(host);
            }
            Event::Marked { mark: Mark::Rest } => {
                self.volumes.rest(host, &self.capabilities, &mut self.verdict);
            }
            Event::Marked { mark: Mark::Forgotten { volume, node } } => self.volumes.forget(volume, node),
        }
    }

    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    fn begin(&mut self, call: Call) {
        let verdict = &mut self.verdict;
        self.flight.begin(&call, verdict);
        self.capabilities.begin(&call, verdict);
        // Nothing more is known of a stream, or of a request that the witness cannot read.
        if !call.request.is_null() {
            self.fields.begin(&call, verdict);
            self.errors.begin(&call, verdict);
            self.names.begin(&call, verdict);
            self.volumes.begin(&call, &self.capabilities, verdict);
        }
        self.calls.insert(call.id, call);
    }

    /// Ends the calls in flight there without an answer.
    fn lose(&mut self, there: impl Fn(&Call) -> bool) {
        let lost: Vec<u64> = self.calls.values().filter(|call| there(call)).map(|call| call.id).collect();
        lost.into_iter().for_each(|call| self.end(call, &Outcome::Unknown));
    }

    /// A call that a reboot or a broken connection ended may be reported as ended once more.
    fn end(&mut self, call: u64, outcome: &Outcome) {
        let Some(call) = self.calls.remove(&call) else { return };
        self.flight.end(&call, outcome);
        self.fields.end(outcome);
        self.capabilities.end(&call, outcome);
        self.errors.end(&call, outcome);
        self.volumes.end(&call, outcome, &mut self.verdict);
        self.names.end(&call, outcome, &mut self.verdict);
    }
}
