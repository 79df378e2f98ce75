//! What a server remembers of a volume between two calls, and how many calls of one plugin it makes at the same time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csid::store::registry::{Attachment, Claim};
use csid::store::rows::Leg;
use tokio::time::Instant;

/// The first and the longest pause between two tries.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// The pause before another try for a claim that was given up, as csid alone has it.
pub const BLOCKED: Duration = Duration::from_secs(300);
/// The beginning of a volume's wish, which no ID of a claim has.
const OF_VOLUME: &str = "volume: ";
/// The same of the wish of an attachment by AttachVolume.
const OF_ATTACHMENT: &str = "attachment: ";
/// Calls of one plugin at the same time. A plugin that hangs leaves places to other plugins.
const CALLS: usize = 250;
/// Those of them that create, expand or delete a volume. Attaches and detaches have the others.
const CALLS_FOR_VOLUMES: usize = 64;

/// What this server remembers of a volume between its turns.
#[derive(Default)]
pub struct Memory {
    /// The revision of the record at the last turn. A later one has something new.
    pub seen: u64,
    /// The call without an answer whose time this server waits for.
    pub awaited: Option<Awaited>,
    /// Claims whose last call has failed.
    pub failed: HashMap<Wish, Failed>,
}

/// What a claim, an attachment by AttachVolume or a volume wants: the claim's ID, the node's name, or the call for the volume. Then whether the claim ends, and whether it was given up.
/// What it wants next has no failure yet.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Wish {
    claim: String,
    is_releasing: bool,
    pub is_blocked: bool,
}

/// A wish whose last call has failed.
pub struct Failed {
    tries: u32,
    /// The time of the next try.
    next: Instant,
}

/// A call without an answer. Its host was not there when this server saw it first.
pub struct Awaited {
    pub host: String,
    pub call: String,
    pub since: Instant,
}

impl Memory {
    /// Returns how long a claim is left alone, because its last call has failed. `None`: it is not. One that was given up is left alone from
    /// the first look on.
    pub fn pause(&mut self, wish: &Wish) -> Option<Duration> {
        if wish.is_blocked && !self.failed.contains_key(wish) {
            self.has_failed(wish.clone(), BLOCKED);
        }
        let left = self.failed.get(wish)?.next.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Leaves a claim alone for a while that grows with each failure. `least`: at least for so long.
    pub fn has_failed(&mut self, wish: Wish, least: Duration) {
        let (first, longest) = PAUSE;
        let failed = self.failed.entry(wish).or_insert(Failed { tries: 0, next: Instant::now() });
        let pause = first.saturating_mul(2_u32.saturating_pow(failed.tries)).min(longest);
        failed.tries = failed.tries.saturating_add(1);
        failed.next = Instant::now() + pause.max(least);
    }
}

impl Wish {
    pub fn of(claim: &Claim) -> Wish {
        let is_blocked = claim.blocked.is_some();
        Wish { claim: claim.id.clone(), is_releasing: claim.releasing, is_blocked }
    }

    /// Makes the wish of a volume itself: its creation, for example.
    pub fn of_volume(call: &str, is_blocked: bool) -> Wish {
        Wish { claim: format!("{OF_VOLUME}{call}"), is_releasing: false, is_blocked }
    }

    /// Makes the wish of an attachment by AttachVolume.
    pub fn of_attachment(at: &Attachment) -> Wish {
        let is_blocked = at.asked.as_ref().is_some_and(|asked| asked.blocked.is_some());
        let claim = format!("{OF_ATTACHMENT}{}", at.node_id.as_deref().unwrap_or_default());
        Wish { claim, is_releasing: at.leg == Leg::Removing, is_blocked }
    }

    pub fn is_of_volume(&self) -> bool {
        self.claim.starts_with(OF_VOLUME)
    }
}

/// The calls that this server makes now, by plugin. Copies share them.
#[derive(Clone, Default)]
pub struct Calls(Arc<Mutex<HashMap<String, usize>>>);

/// A call that is made. Its drop ends it.
pub struct Calling {
    calls: Calls,
    plugin: String,
}

impl Calls {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one call more. `None`: the plugin has as many as it may.
    pub fn begin(&self, plugin: &str) -> Option<Calling> {
        self.begin_of(plugin.to_owned(), CALLS)
    }

    /// Does the same for a call that creates, expands or deletes a volume.
    pub fn begin_for_volume(&self, plugin: &str) -> Option<Calling> {
        self.begin_of(format!("{OF_VOLUME}{plugin}"), CALLS_FOR_VOLUMES)
    }

    fn begin_of(&self, plugin: String, most: usize) -> Option<Calling> {
        let mut calls = self.lock();
        let count = calls.entry(plugin.clone()).or_insert(0);
        (*count < most).then(|| {
            *count += 1;
            Calling { calls: self.clone(), plugin }
        })
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        let mut calls = self.calls.lock();
        if let Some(count) = calls.get_mut(&self.plugin) {
            *count -= 1;
            if *count == 0 {
                calls.remove(&self.plugin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(claim: &str) -> Wish {
        Wish { claim: claim.to_owned(), is_releasing: false, is_blocked: false }
    }

    #[test]
    fn hanging_plugin_leaves_places_to_others() {
        let calls = Calls::default();
        let mut of_one: Vec<_> = (0..CALLS).map(|_| calls.begin("one").unwrap()).collect();
        assert!(calls.begin("one").is_none(), "one call too many");
        let of_two = calls.begin("two").unwrap();
        let for_volume = calls.begin_for_volume("one").unwrap();
        drop(for_volume);
        of_one.pop();
        of_one.push(calls.begin("one").unwrap());
        drop((of_one, of_two));
        assert!(calls.lock().is_empty());
    }

    #[test]
    fn pause_is_of_one_claim_and_grows() {
        let mut memory = Memory::default();
        let mut last = Duration::ZERO;
        for _ in 0..20 {
            memory.has_failed(wish("a"), Duration::ZERO);
            let failed = memory.failed.get_mut(&wish("a")).unwrap();
            let pause = failed.next.duration_since(Instant::now());
            assert!(pause > last && pause <= PAUSE.1, "{pause:?} after {last:?}");
            assert!(memory.pause(&wish("a")).is_some() && memory.pause(&wish("b")).is_none());
            last = pause.min(PAUSE.1 / 2);
            memory.failed.get_mut(&wish("a")).unwrap().next = Instant::now();
            assert_eq!(memory.pause(&wish("a")), None);
        }
        memory.has_failed(wish("a"), Duration::from_secs(300));
        assert!(memory.pause(&wish("a")).unwrap() > Duration::from_secs(299));
    }
}
