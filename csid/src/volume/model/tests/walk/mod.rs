//! An exhaustive walk over the rules of claims: two servers, two nodes and one controller host have one volume of a single writer. The walk
//! goes to every state that any order of their steps leads to, breadth first. Faults are not counted. A message is never taken out of the
//! state, so it may be late, lost, or come more than once, at any time. A server may die between any two writes. A node may be switched off
//! between any two steps, as often as it has boots.
//!
//! In no state is the volume detached from a node that has it and is not off, or is it with two nodes. From every state a way leads to rest
//! that needs no fault and no late message.
//!
//! Bounds: a node has so many calls and boots as [`Bounds`] says. Of the controller calls that the host has not begun, the last two are
//! kept. There is one controller host, and no clock: how long a call may run on another host is tested by the simulation (csid-server).
//!
//! `state` is what the walk knows, and `steps` what follows it.

mod state;
mod steps;

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

use state::State;
use steps::Walk;

/// What a walk has, and how far it goes.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Calls and boots of each node.
    calls: [u8; 2],
    boots: [u8; 2],
    /// Whether an operator asks for releases.
    releases: bool,
}

/// A fault of the rules' user that the walk has to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    No,
    /// Servers write without the compare.
    NoCompare,
    /// Servers end a claim of another node that is in the way.
    NoDetached,
    /// The host makes stale calls.
    Stale,
    /// A node does not look for claims that were taken too late.
    NoComparison,
    /// A claim keeps the name of the call that has made it.
    FirstName,
    /// A claim gets the name of each call that asks for it, of an earlier one, too.
    LastName,
    /// A node asks again after a boot by the name of the earlier boot.
    OldName,
}

/// A hasher that is fast without optimisation.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u8(*byte));
    }

    fn write_u8(&mut self, byte: u8) {
        self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 29;
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u8(number as u8);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u8(number as u8);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// What a walk has found.
struct Found {
    states: usize,
    depth: usize,
    took: Duration,
    /// The way to the first state that breaks a rule.
    broken: Option<String>,
    /// The way to a state from which none leads to rest.
    stuck: Option<String>,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Found { states, depth, took, .. } = self;
        write!(f, "{states} states, depth {depth}, {} ms", took.as_millis())
    }
}

/// Walks over all states. Ends at the first that breaks a rule.
fn walk(broken: Broken, bounds: Bounds) -> Found {
    let walk = Walk::new(broken, bounds);
    let begun = Instant::now();
    let hasher = BuildHasherDefault::<Mix>::default();
    let mut states = vec![State::first()];
    let mut numbers: HashMap<u64, u32> = HashMap::from([(hasher.hash_one(states[0]), 0)]);
    // From where each state was first found, by which step, and how deep it is.
    let mut found: Vec<(u32, &'static str, u32)> = vec![(0, "at first", 0)];
    // Steps that need no fault.
    let mut ways: Vec<(u32, u32)> = Vec::new();
    let mut is_broken = None;
    let mut at = 0;
    'all: while at < states.len() {
        for step in walk.following(&states[at]) {
            let next = match step.next {
                Ok(next) => walk.settled(next),
                Err(why) => {
                    is_broken = Some(format!("{}\n{}\n{why}", way(&states, &found, at), step.name));
                    break 'all;
                }
            };
            let count = states.len() as u32;
            let number = *numbers.entry(hasher.hash_one(next)).or_insert(count);
            assert!(number == count || states[number as usize] == next, "two states have one hash");
            if number == count {
                states.push(next);
                found.push((at as u32, step.name, found[at].2 + 1));
            }
            if !step.is_chance && number != at as u32 {
                ways.push((at as u32, number));
            }
        }
        at += 1;
    }
    let mut into: Vec<Vec<u32>> = vec![Vec::new(); states.len()];
    ways.iter().for_each(|(from, to)| into[*to as usize].push(*from));
    let mut leads = vec![false; states.len()];
    let mut rest: Vec<u32> =
        (0..states.len() as u32).filter(|at| walk.is_at_rest(&states[*at as usize])).collect();
    while let Some(state) = rest.pop() {
        if !std::mem::replace(&mut leads[state as usize], true) {
            rest.extend(&into[state as usize]);
        }
    }
    let stuck = leads.iter().position(|leads| !leads).filter(|_| is_broken.is_none());
    Found {
        states: states.len(),
        depth: found.iter().map(|(_, _, depth)| *depth as usize).max().unwrap_or(0),
        took: begun.elapsed(),
        broken: is_broken,
        stuck: stuck.map(|at| format!("stuck\n{}", way(&states, &found, at))),
    }
}

/// Returns the steps that lead to a state, and the state.
fn way(states: &[State], found: &[(u32, &'static str, u32)], last: usize) -> String {
    let mut names = vec![format!("{:?}", states[last])];
    let mut at = last;
    while at != 0 {
        names.push(found[at].1.to_owned());
        at = found[at].0 as usize;
    }
    names.reverse();
    names.join("\n")
}

impl Found {
    /// Returns what is wrong. "": nothing.
    fn wrong(&self) -> &str {
        self.broken.as_deref().or(self.stuck.as_deref()).unwrap_or_default()
    }
}

fn hold(bounds: Bounds) {
    let found = walk(Broken::No, bounds);
    println!("{bounds:?}: {found}");
    assert!(found.wrong().is_empty(), "{bounds:?}:\n{}", found.wrong());
    assert!(found.states > 1000, "the walk is too short: {found}");
}

const ONE_CALL: Bounds = Bounds { calls: [1, 1], boots: [1, 1], releases: true };

/// The other node asks once, so that it may have the volume in between.
const TWO_CALLS: Bounds = Bounds { calls: [2, 1], releases: false, ..ONE_CALL };
const TWO_CALLS_AND_A_REBOOT: Bounds = Bounds { calls: [2, 0], boots: [2, 1], ..TWO_CALLS };

#[test]
fn rules_hold_in_all_orders_of_a_call_of_each_node() {
    hold(ONE_CALL);
}

#[test]
fn rules_hold_in_all_orders_of_a_reboot() {
    hold(Bounds { boots: [2, 1], calls: [1, 1], releases: false });
}

#[test]
fn rules_hold_in_all_orders_of_two_calls() {
    hold(TWO_CALLS);
}

#[test]
fn rules_hold_in_all_orders_of_two_calls_and_a_reboot() {
    hold(TWO_CALLS_AND_A_REBOOT);
}

/// A node's late words for its first call end the claim that its second call has.
#[test]
fn claim_of_a_call_is_lost_without_the_last_name() {
    let breaks = [
        (Broken::FirstName, TWO_CALLS),
        (Broken::LastName, TWO_CALLS),
        (Broken::OldName, TWO_CALLS_AND_A_REBOOT),
    ];
    for (broken, bounds) in breaks {
        let found = walk(broken, bounds);
        println!("{broken:?}: {found}");
        let wrong = found.wrong();
        assert!(wrong.contains("detached before Detached"), "{broken:?}: {found}: {wrong}");
    }
}

/// Each fault of the rules' user is found.
#[test]
fn walk_finds_each_break() {
    let breaks = [
        (Broken::NoCompare, "attached to two nodes"),
        (Broken::NoDetached, "detached before Detached"),
        (Broken::Stale, "attached to two nodes"),
        (Broken::NoComparison, "stuck"),
    ];
    for (broken, wrong) in breaks {
        let found = walk(broken, Bounds { releases: false, ..ONE_CALL });
        println!("{broken:?}: {found}");
        assert!(found.wrong().contains(wrong), "{broken:?}: {found}: {}", found.wrong());
    }
}
