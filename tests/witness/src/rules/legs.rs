//! The legs that a Make makes and its Negate removes: an attachment, a staging, a publish. Between the two the state of a leg follows
//! from the answers. Without an answer it is not known (CO rule 25).

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Call, Outcome};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Asked for, not answered.
    Making,
    Present,
    /// Asked away, not acknowledged.
    Removing,
}

#[derive(Clone, Debug)]
pub(super) struct Leg {
    pub(super) state: State,
    /// The host of the call that made it.
    pub(super) host: usize,
    /// The call that made it.
    pub(super) made: u64,
    /// The last call about it.
    pub(super) last: u64,
    /// The request of the call that made the leg.
    pub(super) request: Value,
    /// Every publish_context that the plugin answered on this host since it was made.
    pub(super) contexts: Vec<Value>,
}

/// Legs of one kind of one volume, by what distinguishes them: node id, path.
#[derive(Clone, Debug, Default)]
pub(super) struct Legs {
    legs: BTreeMap<String, Leg>,
    /// The states before each call in flight. They return when the call is refused.
    before: BTreeMap<u64, Vec<(String, Option<Leg>)>>,
}

impl Legs {
    pub(super) fn get(&self, name: &str) -> Option<&Leg> {
        self.legs.get(name)
    }

    /// All that are there, or may be.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Leg)> {
        self.legs.iter().map(|(name, leg)| (name.as_str(), leg))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.legs.is_empty() && self.before.is_empty()
    }

    pub(super) fn clear(&mut self) {
        *self = Legs::default();
    }

    pub(super) fn make(&mut self, name: &str, call: &Call) {
        let before = self.legs.get(name).cloned();
        let leg = match before.clone() {
            // The same again changes nothing, however it ends.
            Some(leg) if leg.state == State::Present => Leg { last: call.id, ..leg },
            leg => Leg {
                state: State::Making,
                host: call.host(),
                made: call.id,
                last: call.id,
                request: call.request.clone(),
                contexts: leg
                    .filter(|leg| leg.host == call.host())
                    .map(|leg| leg.contexts)
                    .unwrap_or_default(),
            },
        };
        self.legs.insert(name.to_owned(), leg);
        self.before.insert(call.id, vec![(name.to_owned(), before)]);
    }

    pub(super) fn made(&mut self, call: &Call, outcome: &Outcome) {
        for (name, before) in self.before.remove(&call.id).unwrap_or_default() {
            match (outcome, self.legs.get_mut(&name)) {
                (Outcome::Ok(answer), Some(leg)) => {
                    let mut contexts = std::mem::take(&mut leg.contexts);
                    if leg.host != call.host() {
                        contexts.clear();
                    }
                    *leg = Leg {
                        state: State::Present,
                        host: call.host(),
                        made: call.id,
                        last: call.id,
                        request: call.request.clone(),
                        contexts,
                    };
                    leg.contexts.push(answer["publish_context"].clone());
                }
                (Outcome::Refused(_), Some(_)) => self.restore(name, before, call),
                _ => {}
            }
        }
    }

    /// Take away what is named so; what nobody made is taken away without a trace.
    pub(super) fn negate(&mut self, names: impl Fn(&str) -> bool, call: &Call) {
        let mut before = Vec::new();
        for (name, leg) in self.legs.iter_mut().filter(|(name, _)| names(name)) {
            before.push((name.clone(), Some(leg.clone())));
            leg.state = State::Removing;
            leg.last = call.id;
        }
        self.before.insert(call.id, before);
    }

    pub(super) fn negated(&mut self, call: &Call, outcome: &Outcome) {
        for (name, before) in self.before.remove(&call.id).unwrap_or_default() {
            if outcome.took_away() {
                self.legs.remove(&name);
            } else if matches!(outcome, Outcome::Refused(_)) {
                self.restore(name, before, call);
            }
        }
    }

    /// Forgets what is there, or may be.
    pub(super) fn forget(&mut self, name: &str) {
        self.legs.remove(name);
    }

    fn restore(&mut self, name: String, before: Option<Leg>, call: &Call) {
        match before {
            Some(leg) => self.legs.insert(name, Leg { last: call.id, ..leg }),
            None => self.legs.remove(&name),
        };
    }
}
