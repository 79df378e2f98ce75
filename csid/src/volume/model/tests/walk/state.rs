//! Everything that the walk knows: the record, the nodes' journals, the servers, and the controller's host.

use super::super::tests::{claim, volume};
use super::super::*;
use crate::store::registry::ClaimMode;
use crate::store::rows::AccessMode;
use crate::volume::model::call_name::name_call;

pub(super) const NODES: [&str; 2] = ["n0", "n1"];
pub(super) const STATES: [ClaimState; 4] =
    [ClaimState::Pending, ClaimState::Taken, ClaimState::NodeDetached, ClaimState::ControllerDetached];
pub(super) const LEGS: [Leg; 4] = [Leg::Absent, Leg::Making, Leg::Present, Leg::Removing];
/// Calls that a host may still get.
pub(super) const SENT: usize = 2;
/// The calls of a boot that have names, and those of a node: it has two boots at most.
const OF_BOOT: u8 = 2;
pub(super) const CALLS: u8 = 2 * OF_BOOT;
/// The place of a server that is gone.
pub(super) const NONE: u8 = 2;

/// A claim in the record. Its consumer is the same on both nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Held {
    pub(super) state: u8,
    pub(super) releasing: bool,
    pub(super) kept: bool,
    pub(super) blocked: bool,
    /// The number of the node's call.
    pub(super) call: u8,
}

/// An attachment in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct At {
    pub(super) leg: u8,
    pub(super) is_named: bool,
    pub(super) uncalled: bool,
    pub(super) boot: Option<u8>,
}

/// The record, as small numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Small {
    pub(super) claims: [Option<Held>; 2],
    pub(super) at: [Option<At>; 2],
}

impl Held {
    /// Returns whether the node may use the volume, or be granted it.
    pub(super) fn is_live(&self) -> bool {
        matches!(STATES[usize::from(self.state)], ClaimState::Pending | ClaimState::Taken)
    }
}

impl At {
    pub(super) fn attachment(self, node: usize) -> Attachment {
        Attachment {
            node_id: self.is_named.then(|| format!("id of {}", NODES[node])),
            uncalled: self.uncalled,
            boot: self.boot.map(|boot| boot.to_string()),
            ..Attachment::new(NODES[node], LEGS[usize::from(self.leg)])
        }
    }

    pub(super) fn of(at: &Attachment) -> At {
        At {
            leg: LEGS.iter().position(|leg| *leg == at.leg).unwrap() as u8,
            is_named: at.node_id.is_some(),
            uncalled: at.uncalled,
            boot: at.boot.as_ref().map(|boot| boot.parse().unwrap()),
        }
    }
}

impl Small {
    /// Returns the record as the rules take it for an event of a node.
    pub(super) fn claims(&self, node: usize, boot: u8) -> Claims {
        let mut all = Claims {
            node: Some(NODES[node].to_owned()),
            node_id: Some(format!("id of {}", NODES[node])),
            boot: boot.to_string(),
            ..volume(true)
        };
        for (node, held) in self.claims.iter().enumerate() {
            let Some(held) = held else { continue };
            all.claims.insert(Claim {
                state: STATES[usize::from(held.state)],
                releasing: held.releasing,
                kept: held.kept,
                blocked: held.blocked.then(|| Blocked { reason: "no".to_owned() }),
                ..wanted(node, held.call)
            });
        }
        let at = self.at.iter().enumerate();
        all.attachments = at.filter_map(|(node, at)| Some((*at)?.attachment(node))).collect();
        all
    }

    pub(super) fn of(claims: &Claims) -> Small {
        let mut small = Small::default();
        for (node, node_name) in NODES.iter().enumerate() {
            small.claims[node] = claims.claims.get_at("a", node_name).map(|claim| Held {
                state: STATES.iter().position(|state| *state == claim.state).unwrap() as u8,
                releasing: claim.releasing,
                kept: claim.kept,
                blocked: claim.blocked.is_some(),
                call: (0..CALLS).find(|call| claim.call == name(node, *call)).unwrap(),
            });
            small.at[node] = claims.attachments.iter().find(|at| at.node == *node_name).map(At::of);
        }
        small
    }
}

/// Returns the name of a node's call. Each boot has names of its own.
fn name(node: usize, call: u8) -> String {
    name_call(&format!("node/{}/{}", NODES[node], call / OF_BOOT), u64::from(call % OF_BOOT), "r")
}

pub(super) fn wanted(node: usize, call: u8) -> Claim {
    Claim {
        call: name(node, call),
        ..claim("a", NODES[node], ClaimMode::Write, AccessMode::SingleNodeWriter)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Outcome {
    Done,
    Unknown,
    Again,
    NotSent,
    Withheld,
    Hopeless,
}

impl From<Outcome> for ClaimOutcome {
    fn from(outcome: Outcome) -> ClaimOutcome {
        match outcome {
            Outcome::Done => ClaimOutcome::Done,
            Outcome::Unknown => ClaimOutcome::Unknown,
            Outcome::Again => ClaimOutcome::Again,
            Outcome::NotSent => ClaimOutcome::NotSent(None),
            Outcome::Withheld => ClaimOutcome::NotSent(Some("no".to_owned())),
            Outcome::Hopeless => ClaimOutcome::Hopeless("no".to_owned()),
        }
    }
}

/// A controller call: an attach or a detach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Call {
    pub(super) is_attach: bool,
    pub(super) node: u8,
    /// Whether the record's driver made it.
    pub(super) is_driven: bool,
}

/// What a server wrote before it made a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Driver {
    /// [`NONE`]: the server is gone.
    pub(super) server: u8,
    pub(super) is_attach: bool,
    pub(super) node: u8,
    pub(super) from: Option<At>,
    pub(super) boot: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Event {
    Claim(u8),
    Release,
    Continue,
    Detached,
    Forget,
    Ended(bool, Option<At>, Outcome),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Next {
    Call { is_attach: bool, from: Option<At> },
    Taken,
    Nothing,
}

/// What a server sends when its write is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Then {
    Nothing,
    /// To a node's call of this number.
    Granted(u8),
    Accepted(u8),
    Call(Driver),
}

/// A write that a server is about to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Write {
    pub(super) after: Small,
    /// Whether the record has no driver after it.
    pub(super) ends_driver: bool,
    /// The node of the claim.
    pub(super) node: u8,
    /// Whether the write compares the node's row.
    pub(super) is_guarded: bool,
    pub(super) then: Then,
}

/// What a node's journal has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Site {
    Idle,
    Asks,
    /// It was granted the claim, and has the volume mounted.
    Has,
    /// It has unmounted the volume, and says so until that is accepted.
    Owes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Node {
    pub(super) site: Site,
    pub(super) is_off: bool,
    pub(super) boot: u8,
    /// The boot that has joined.
    pub(super) joined: u8,
    pub(super) is_fenced: bool,
    /// How often it has wanted the volume.
    pub(super) wishes: u8,
    /// The number of the next call, and the first one of this boot.
    pub(super) next: u8,
    pub(super) first: u8,
    /// The call in the journal, and whether the record's claim is the one that the journal names.
    pub(super) row: u8,
    pub(super) is_same: bool,
    /// Calls of Claim that were sent, a bit for each.
    pub(super) asked: u8,
    /// Calls of Detached that were sent: two bits for each call, the second for one that names the record's claim.
    pub(super) detached: u8,
    /// Answers on their way: granted an earlier claim, granted the record's claim, accepted.
    pub(super) granted: [bool; 2],
    pub(super) accepted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct State {
    pub(super) record: Small,
    pub(super) driver: Option<Driver>,
    pub(super) nodes: [Node; 2],
    pub(super) servers: [Option<Write>; 2],
    /// Calls that the host has not begun, the oldest first.
    pub(super) sent: [Option<Call>; SENT],
    /// What the plugin does, and whether its caller is gone.
    pub(super) runs: Option<(Call, bool)>,
    /// The host's answer to the driver's call.
    pub(super) ended: Option<Outcome>,
    pub(super) attached: [bool; 2],
}

impl State {
    pub(super) fn first() -> State {
        let node = Node {
            site: Site::Idle,
            is_off: false,
            boot: 0,
            joined: 0,
            is_fenced: false,
            wishes: 0,
            next: 0,
            first: 0,
            row: 0,
            is_same: false,
            asked: 0,
            detached: 0,
            granted: [false; 2],
            accepted: false,
        };
        State {
            record: Small::default(),
            driver: None,
            nodes: [node; 2],
            servers: [None; 2],
            sent: [None; SENT],
            runs: None,
            ended: None,
            attached: [false; 2],
        }
    }

    /// Ends the driver. What its call does reaches nobody.
    pub(super) fn end_driver(&mut self) {
        self.driver = None;
        self.ended = None;
        self.sent.iter_mut().flatten().for_each(|call| call.is_driven = false);
        if let Some((call, _)) = &mut self.runs {
            call.is_driven = false;
        }
    }

    /// Drops the writes that compare a node's row: it has changed.
    pub(super) fn refuse(&mut self, node: usize) {
        for server in &mut self.servers {
            server.take_if(|write| write.is_guarded && usize::from(write.node) == node);
        }
    }

    /// Makes a write.
    pub(super) fn commit(&mut self, write: &Write) {
        let before = std::mem::replace(&mut self.record, write.after);
        let call = |record: &Small, node: usize| record.claims[node].map(|held| held.call);
        for node in 0..2 {
            if call(&before, node) != call(&self.record, node) {
                // No message names the claim that is there now.
                self.nodes[node].forget_claim();
            }
        }
        if write.ends_driver {
            self.end_driver();
        }
        let node = &mut self.nodes[usize::from(write.node)];
        match write.then {
            Then::Nothing => {}
            Then::Granted(call) => node.answer_claim(call),
            Then::Accepted(call) => {
                node.accepted |= node.site == Site::Owes && node.row == call && !node.is_off
            }
            Then::Call(driver) => {
                self.end_driver();
                self.driver = Some(driver);
                let Driver { is_attach, node, .. } = driver;
                let call = Call { is_attach, node, is_driven: true };
                // The oldest call is lost if there are too many.
                let mut sent: Vec<Call> = self.sent.into_iter().flatten().chain([call]).collect();
                if sent.len() > SENT {
                    sent.remove(0);
                }
                self.set_sent(sent);
            }
        }
    }

    pub(super) fn set_sent(&mut self, calls: impl IntoIterator<Item = Call>) {
        let mut calls = calls.into_iter();
        self.sent = std::array::from_fn(|_| calls.next());
    }

    /// Returns the same state with the two servers, or the two nodes, in each other's place.
    pub(super) fn swapped(mut self, of_nodes: bool) -> State {
        let turn = |number: &mut u8| *number = if *number < NONE { 1 - *number } else { *number };
        let mut drivers: Vec<&mut Driver> = self.driver.iter_mut().collect();
        for write in self.servers.iter_mut().flatten() {
            if of_nodes {
                turn(&mut write.node);
                write.after.claims.swap(0, 1);
                write.after.at.swap(0, 1);
            }
            if let Then::Call(driver) = &mut write.then {
                drivers.push(driver);
            }
        }
        for driver in drivers {
            turn(if of_nodes { &mut driver.node } else { &mut driver.server });
        }
        if !of_nodes {
            self.servers.swap(0, 1);
            return self;
        }
        self.record.claims.swap(0, 1);
        self.record.at.swap(0, 1);
        self.nodes.swap(0, 1);
        self.attached.swap(0, 1);
        self.sent.iter_mut().flatten().for_each(|call| turn(&mut call.node));
        self.runs.iter_mut().for_each(|(call, _)| turn(&mut call.node));
        self
    }
}

impl Node {
    fn forget_claim(&mut self) {
        self.is_same = false;
        let named = self.detached & 0b1010_1010;
        self.detached = (self.detached & 0b0101_0101) | (named >> 1);
        self.granted = [self.granted[0] || self.granted[1], false];
    }

    /// Begins the next boot.
    pub(super) fn boot(&mut self) {
        (self.is_off, self.boot) = (true, self.boot + 1);
        (self.first, self.next) = (self.boot * OF_BOOT, self.boot * OF_BOOT);
        (self.granted, self.accepted) = ([false; 2], false);
    }

    /// Names the call in the journal.
    pub(super) fn name_call(&mut self) {
        (self.row, self.next) = (self.next, self.next + 1);
    }

    /// Answers a call of Claim, if the node still waits for it.
    pub(super) fn answer_claim(&mut self, call: u8) {
        self.granted[1] |= self.site == Site::Asks && self.row == call && !self.is_off;
    }

    pub(super) fn ask(&mut self) {
        (self.site, self.granted) = (Site::Asks, [false; 2]);
        self.asked |= 1 << self.row;
    }

    pub(super) fn owe(&mut self) {
        (self.site, self.accepted) = (Site::Owes, false);
        self.detached |= 1 << (2 * self.row + u8::from(self.is_same));
    }
}
