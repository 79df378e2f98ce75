//! The steps of the walk: what follows a state. The servers do what csid-server does between two writes.

use std::cell::RefCell;
use std::collections::HashMap;

use super::super::*;
use super::state::{
    At, CALLS, Call, Driver, Event, Held, LEGS, NODES, NONE, Next, Outcome, SENT, STATES, Site, Small, State,
    Then, Write, wanted,
};
use super::{Bounds, Broken};

type Stepped = Option<(Small, Next)>;

/// A step, and the state after it. An error: a rule is broken.
pub(super) struct Step {
    pub(super) name: &'static str,
    /// Whether the step need not come: a fault, a late message, or an operator's wish.
    pub(super) is_chance: bool,
    pub(super) next: Result<State, String>,
}

impl Step {
    fn new(name: &'static str, next: Result<State, String>) -> Step {
        Step { name, is_chance: false, next }
    }

    fn by_chance(name: &'static str, next: State) -> Step {
        Step { name, is_chance: true, next: Ok(next) }
    }
}

pub(super) struct Walk {
    broken: Broken,
    bounds: Bounds,
    /// What `step` has answered.
    known: RefCell<HashMap<(Small, usize, u8, Event), Stepped>>,
}

impl Walk {
    pub(super) fn new(broken: Broken, bounds: Bounds) -> Walk {
        Walk { broken, bounds, known: RefCell::default() }
    }

    /// Asks the rules.
    fn step(&self, record: &Small, node: usize, boot: u8, event: Event) -> Stepped {
        let key = (*record, node, boot, event);
        if let Some(known) = self.known.borrow().get(&key) {
            return *known;
        }
        let consumer = "a".to_owned();
        let asked = match event {
            Event::Claim(call) => ClaimEvent::Claim(wanted(node, call)),
            Event::Release => ClaimEvent::Release { consumer },
            Event::Continue => ClaimEvent::Continue { consumer },
            Event::Detached => ClaimEvent::Detached { consumer },
            Event::Forget => ClaimEvent::Forget { consumer },
            Event::Ended(is_attach, from, outcome) => ClaimEvent::Ended {
                effect: ClaimEffect {
                    action: if is_attach { ClaimAction::Attach } else { ClaimAction::Detach },
                    consumer,
                    node: NODES[node].to_owned(),
                    from: from.map(|at| Box::new(at.attachment(node))),
                    grant: None,
                },
                outcome: outcome.into(),
            },
        };
        let stepped = step(&record.claims(node, boot), asked).ok().map(|(after, next)| {
            let small = Small::of(&after);
            let mut again = small.claims(node, boot);
            // Their order says nothing.
            again.attachments.sort_by_key(|at| after.attachments.iter().position(|of| of.node == at.node));
            assert_eq!(again, after, "the walk does not know all of a record");
            let next = match next {
                ClaimNext::Run(effect) if effect.action == ClaimAction::NodeDetach => Next::Nothing,
                ClaimNext::Run(effect) => Next::Call {
                    is_attach: effect.action == ClaimAction::Attach,
                    from: effect.from.as_deref().map(At::of),
                },
                ClaimNext::Taken => Next::Taken,
                ClaimNext::Free | ClaimNext::Rest => Next::Nothing,
                ClaimNext::Unseen => panic!("the plugin is known"),
            };
            (small, next)
        });
        self.known.borrow_mut().insert(key, stepped);
        stepped
    }

    /// Returns all states that follow one.
    pub(super) fn following(&self, from: &State) -> Vec<Step> {
        let mut all = Vec::new();
        for node in 0..2 {
            self.node(from, node, &mut all);
        }
        for server in 0..2 {
            match &from.servers[server] {
                Some(write) => {
                    let mut next = *from;
                    next.servers[server] = None;
                    if self.broken != Broken::NoCompare {
                        // The record of the others has changed.
                        next.servers = [None; 2];
                    }
                    next.commit(write);
                    all.push(Step::new("a write is committed", Ok(next)));
                }
                // Both servers may do what is asked for. If both are free, one of them does.
                None if server == 1 && from.servers[0].is_none() && from.driver.is_none() => {}
                None => self.server(from, server, &mut all),
            }
            let is_driver = from.driver.is_some_and(|driver| usize::from(driver.server) == server);
            if is_driver || from.servers[server].is_some() {
                let mut next = *from;
                next.servers[server] = None;
                if is_driver {
                    // The answer to its call reaches nobody. The record has the driver still.
                    next.end_driver();
                    next.driver = from.driver.map(|driver| Driver { server: NONE, ..driver });
                }
                all.push(Step::by_chance("a server dies, and its lease ends", next));
            }
        }
        self.host(from, &mut all);
        all
    }

    fn node(&self, from: &State, at: usize, all: &mut Vec<Step>) {
        let mut to = |name, is_chance, change: &dyn Fn(&mut State, usize)| {
            let mut next = *from;
            change(&mut next, at);
            all.push(Step { name, is_chance, next: Ok(next) });
        };
        let node = &from.nodes[at];
        if node.is_off {
            if !node.is_fenced {
                to("a node is fenced", true, &|next, at| {
                    next.nodes[at].is_fenced = true;
                    next.refuse(at);
                });
            }
            return to("a node joins in another boot", false, &|next, at| {
                next.refuse(at);
                let node = &mut next.nodes[at];
                (node.is_off, node.is_fenced, node.joined) = (false, false, node.boot);
                (node.asked, node.detached) = (0, 0);
                match node.site {
                    Site::Asks => node.ask(),
                    Site::Owes => node.owe(),
                    Site::Idle | Site::Has => {}
                }
            });
        }
        if node.boot + 1 < self.bounds.boots[at] {
            let mut off = |site| {
                to("a node is switched off", true, &|next, at| {
                    let node = &mut next.nodes[at];
                    node.boot();
                    node.site = site;
                    // It asks again by a name of this boot.
                    if site == Site::Asks && self.broken != Broken::OldName {
                        node.name_call();
                    }
                });
            };
            match node.site {
                // It has written the grant, or has mounted the volume, which is mounted again.
                Site::Has => [Site::Owes, Site::Asks].into_iter().for_each(&mut off),
                Site::Asks | Site::Owes => off(Site::Owes),
                Site::Idle => off(Site::Idle),
            }
        }
        match node.site {
            Site::Idle => {
                if node.wishes < self.bounds.calls[at] {
                    to("a node asks", false, &|next, at| {
                        let node = &mut next.nodes[at];
                        (node.wishes, node.is_same) = (node.wishes + 1, false);
                        node.name_call();
                        node.ask();
                    });
                }
                let late = from.record.claims[at].filter(|held| {
                    STATES[usize::from(held.state)] == ClaimState::Taken && held.call >= node.first
                });
                if let Some(late) = late.filter(|_| self.broken != Broken::NoComparison) {
                    to("a node ends a claim that it does not hold", false, &|next, at| {
                        let node = &mut next.nodes[at];
                        (node.row, node.is_same) = (late.call, true);
                        node.owe();
                    });
                }
            }
            Site::Asks => {
                to("a node gives a call up", false, &|next, at| next.nodes[at].owe());
                for is_present in [false, true] {
                    if node.granted[usize::from(is_present)] {
                        let mut next = *from;
                        (next.nodes[at].site, next.nodes[at].is_same) = (Site::Has, is_present);
                        let broken = match () {
                            () if from.nodes[1 - at].site == Site::Has && !from.nodes[1 - at].is_off => {
                                Some("two writers")
                            }
                            () if !from.attached[at] => Some("granted without an attachment"),
                            () => None,
                        };
                        let next = broken.map_or(Ok(next), |why| Err(format!("{why}: {next:?}")));
                        all.push(Step::new("a node is granted the volume", next));
                    }
                }
            }
            Site::Has => to("a node unmounts the volume", false, &|next, at| next.nodes[at].owe()),
            Site::Owes if node.accepted => {
                to("a node owes no more", false, &|next, at| next.nodes[at].site = Site::Idle)
            }
            Site::Owes => {}
        }
    }

    /// Has a server that is free do something.
    fn server(&self, from: &State, server: usize, all: &mut Vec<Step>) {
        for at in 0..2 {
            self.answer(from, server, at, all);
            self.operate(from, server, at, all);
        }
        let mut to = |name, write: Write| {
            let mut next = *from;
            next.servers[server] = Some(write);
            all.push(Step::new(name, Ok(next)));
        };
        if let Some(driver) = from.driver {
            let node = usize::from(driver.node);
            let write = |boot, outcome| {
                let after = self.ended(from, &driver, boot, outcome);
                Write { after, ends_driver: true, node: driver.node, is_guarded: false, then: Then::Nothing }
            };
            if usize::from(driver.server) == server {
                if let Some(outcome) = from.ended {
                    to("a call has ended", Write { is_guarded: true, ..write(driver.boot, outcome) });
                }
                to(
                    "a call has no answer",
                    Write { is_guarded: true, ..write(driver.boot, Outcome::Unknown) },
                );
            } else if driver.server == NONE {
                to("a call's server is gone", write(from.nodes[node].joined, Outcome::Unknown));
            }
            return;
        }
        for at in 0..2 {
            self.go_on(from, server, at, all);
        }
    }

    /// Has a server take the next step of a claim.
    fn go_on(&self, from: &State, server: usize, at: usize, all: &mut Vec<Step>) {
        let Some(held) = from.record.claims[at] else { return };
        let is_between = from.record.at[at]
            .is_some_and(|at| matches!(LEGS[usize::from(at.leg)], Leg::Making | Leg::Removing));
        let node = &from.nodes[at];
        let is_asked_for = node.site == Site::Asks && node.row == held.call;
        let events: &[(Event, bool)] = match STATES[usize::from(held.state)] {
            ClaimState::Taken if held.releasing || !is_between => &[],
            ClaimState::Pending if node.is_fenced => &[(Event::Release, false)],
            // Its node may have had no session for too long.
            ClaimState::Pending => {
                if is_asked_for {
                    &[(Event::Continue, false), (Event::Release, true)]
                } else {
                    &[(Event::Continue, false), (Event::Release, false)]
                }
            }
            _ => &[(Event::Continue, false)],
        };
        for (event, is_chance) in events {
            let Some((mut after, next)) = self.step(&from.record, at, node.joined, *event) else { continue };
            let mut then = Then::Nothing;
            if let Next::Call { is_attach, from } = next {
                after.at[at].iter_mut().for_each(|at| at.uncalled = false);
                let (server, node, boot) = (server as u8, at as u8, node.joined);
                then = Then::Call(Driver { server, is_attach, node, from, boot });
            } else if after == from.record {
                continue;
            }
            let (mut next, node) = (*from, at as u8);
            next.servers[server] = Some(Write { after, ends_driver: false, node, is_guarded: true, then });
            all.push(Step { name: "a claim goes on", is_chance: *is_chance, next: Ok(next) });
        }
    }

    /// Has a server answer a message of a node. The node sends what its journal has until it is answered. Anything else is late.
    fn answer(&self, from: &State, server: usize, at: usize, all: &mut Vec<Step>) {
        let node = &from.nodes[at];
        let present = from.record.claims[at];
        let write = |after, of: usize, then| {
            let mut next = *from;
            let node = of as u8;
            next.servers[server] = Some(Write { after, ends_driver: false, node, is_guarded: true, then });
            next
        };
        for call in (0..CALLS).filter(|call| node.asked & (1 << call) != 0 && !node.is_fenced) {
            let is_chance = node.site != Site::Asks || node.row != call || node.is_off;
            let mut to = |name, next| all.push(Step { name, is_chance, next: Ok(next) });
            let mut stepped = self.step(&from.record, at, node.joined, Event::Claim(call));
            if let (Some((after, _)), Some(present)) = (&mut stepped, present) {
                after.claims[at].iter_mut().for_each(|held| match self.broken {
                    Broken::FirstName => held.call = present.call,
                    Broken::LastName => held.call = call,
                    _ => {}
                });
            }
            match stepped {
                Some((after, Next::Taken)) if after == from.record => {
                    let mut next = *from;
                    next.nodes[at].answer_claim(call);
                    to("a claim is there already", next);
                }
                Some((after, Next::Taken)) => to("a claim is taken", write(after, at, Then::Granted(call))),
                Some((after, _)) if after != from.record => {
                    to("a claim is pending", write(after, at, Then::Nothing));
                }
                None if self.broken == Broken::NoDetached => {
                    if let Some((after, _)) = self.step(&from.record, 1 - at, 0, Event::Detached) {
                        to("another claim is ended", write(after, 1 - at, Then::Nothing));
                    }
                }
                Some(_) | None => {}
            }
        }
        for (call, is_named) in (0..CALLS).flat_map(|call| [(call, false), (call, true)]) {
            if node.detached & (1 << (2 * call + u8::from(is_named))) == 0 {
                continue;
            }
            let is_owed =
                node.site == Site::Owes && (node.row, node.is_same) == (call, is_named) && !node.is_off;
            let mut to = |name, next| all.push(Step { name, is_chance: !is_owed, next: Ok(next) });
            let is_meant = |held: &Held| (is_named || held.call == call) && held.is_live();
            match present.filter(is_meant) {
                Some(_) => {
                    if let Some((after, _)) = self.step(&from.record, at, node.joined, Event::Detached) {
                        to("a node's word ends a claim", write(after, at, Then::Accepted(call)));
                    }
                }
                None => {
                    let mut next = *from;
                    next.nodes[at].accepted |= is_owed;
                    to("a claim has ended already", next);
                }
            }
        }
    }

    /// Has a server do what an operator asks for.
    fn operate(&self, from: &State, server: usize, at: usize, all: &mut Vec<Step>) {
        let Some(held) = from.record.claims[at] else { return };
        let node = &from.nodes[at];
        let mut to = |name, is_chance, event| {
            let Some((after, _)) = self.step(&from.record, at, node.joined, event) else { return };
            if after != from.record {
                let (mut next, node) = (*from, at as u8);
                let write = Write { after, ends_driver: false, node, is_guarded: false, then: Then::Nothing };
                next.servers[server] = Some(write);
                all.push(Step { name, is_chance, next: Ok(next) });
            }
        };
        // The node is off, or the claim is of an earlier boot and nobody uses it, or will ask for it: an operator's word stands for the node's.
        let is_unused = node.site == Site::Idle && node.wishes == self.bounds.calls[at];
        if node.is_off || (is_unused && held.call < node.first) {
            let has_attachment = from.record.at[at].is_some();
            let event = if has_attachment { Event::Detached } else { Event::Forget };
            to("an operator ends a claim", false, event);
        }
        if self.bounds.releases && !held.releasing {
            to("an operator asks for a release", true, Event::Release);
        }
    }

    /// Returns the record after a driver's call, as a server writes it.
    fn ended(&self, from: &State, driver: &Driver, boot: u8, outcome: Outcome) -> Small {
        let at = usize::from(driver.node);
        let event = Event::Ended(driver.is_attach, driver.from, outcome);
        let Some((after, _)) = self.step(&from.record, at, boot, event) else { return from.record };
        let is_waiting = from.record.claims[at]
            .is_some_and(|held| STATES[usize::from(held.state)] == ClaimState::Pending && !held.releasing);
        if !from.nodes[at].is_fenced || !is_waiting || outcome != Outcome::Done || !driver.is_attach {
            return after;
        }
        // Nothing is granted to the node any more.
        let before = Small { at: after.at, ..from.record };
        self.step(&before, at, boot, Event::Release).map_or(from.record, |(after, _)| after)
    }

    /// Has the controller's host do something.
    fn host(&self, from: &State, all: &mut Vec<Step>) {
        let calls: Vec<Call> = from.sent.into_iter().flatten().collect();
        let is_free = from.runs.is_none_or(|(_, is_orphan)| is_orphan);
        for (n, call) in calls.iter().enumerate().filter(|_| is_free) {
            let mut next = *from;
            let mut left = calls.clone();
            match self.broken {
                // Calls before it stay, and so may come later.
                Broken::Stale => {
                    left.remove(n);
                }
                _ => drop(left.drain(..=n)),
            }
            next.set_sent(left);
            if call.is_driven {
                let mut unmade = next;
                unmade.ended = Some(Outcome::NotSent);
                all.push(Step::by_chance("a host does not begin a call", unmade));
            }
            match from.runs {
                Some(_) if call.is_driven => {
                    next.ended = Some(Outcome::Again);
                    all.push(Step::by_chance("a plugin is busy", next));
                }
                Some(_) => {}
                None => {
                    next.runs = Some((*call, false));
                    all.push(Step::new("a plugin begins a call", self.judge(next, call)));
                }
            }
        }
        if let Some((call, _)) = from.runs {
            let at = usize::from(call.node);
            let outcomes = [
                (true, Outcome::Done),
                (true, Outcome::Unknown),
                (false, Outcome::Unknown),
                (false, Outcome::Again),
                (false, Outcome::NotSent),
                (false, Outcome::Withheld),
                (true, Outcome::Hopeless),
                (false, Outcome::Hopeless),
            ];
            // Without a driver it matters whether the call is done, and nothing else.
            for (is_done, outcome) in outcomes.into_iter().take(if call.is_driven { 8 } else { 3 }) {
                let is_chance = outcome != Outcome::Done;
                let mut next = *from;
                next.runs = None;
                if call.is_driven {
                    next.ended = Some(outcome);
                }
                if is_done {
                    next.attached[at] = call.is_attach;
                    let next = self.judge(next, &call);
                    all.push(Step { name: "a plugin has done a call", is_chance, next });
                } else {
                    all.push(Step { name: "a plugin has not done a call", is_chance, next: Ok(next) });
                }
            }
        }
        if !calls.is_empty() || from.runs.is_some_and(|(_, is_orphan)| !is_orphan) {
            let mut next = *from;
            next.sent = [None; SENT];
            next.runs = next.runs.map(|(call, _)| (Call { is_driven: false, ..call }, true));
            all.push(Step::by_chance("the host's csid is started again", next));
        }
    }

    /// Checks what a plugin does.
    fn judge(&self, next: State, call: &Call) -> Result<State, String> {
        let node = &next.nodes[usize::from(call.node)];
        match () {
            () if !call.is_attach && node.site == Site::Has && !node.is_off => {
                Err(format!("detached before Detached: {next:?}"))
            }
            () if next.attached == [true; 2] => Err(format!("attached to two nodes: {next:?}")),
            () => Ok(next),
        }
    }

    pub(super) fn is_at_rest(&self, state: &State) -> bool {
        let is_done = |at: usize| {
            let node = &state.nodes[at];
            node.site == Site::Idle && node.wishes == self.bounds.calls[at] && !node.is_off
        };
        state.record == Small::default()
            && state.driver.is_none()
            && state.runs.is_none()
            && state.servers == [None; 2]
            && state.attached == [false; 2]
            && (0..2).all(is_done)
    }

    /// Returns the one state that stands for all that differ by the places of servers, or of nodes that do the same.
    pub(super) fn settled(&self, state: State) -> State {
        let state = state.min(state.swapped(false));
        let Bounds { calls, boots, .. } = self.bounds;
        if calls[0] != calls[1] || boots[0] != boots[1] {
            return state;
        }
        let other = state.swapped(true);
        state.min(other.min(other.swapped(false)))
    }
}
