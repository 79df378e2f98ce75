//! The kinds of faults, and how often each has occurred.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    EtcdRefused,
    EtcdLost,
    EtcdFailed,
    EtcdSilent,
    EtcdLate,
    EtcdTwice,
    MessageSlow,
    WatchEnded,
    WatchesEnded,
    Compacted,
    LeaseEnded,
    Parted,
    PartedOneWay,
    ServerKilled,
    NodeKilled,
    NodeRebooted,
    HostKilled,
    HostRebooted,
    Released,
    Forced,
    CallLost,
    CallLate,
    CallTwice,
    AnswerLost,
    SessionLingers,
    ControllerCallTwice,
    PluginSlow,
    PluginSilent,
    PluginFails,
    PluginBusy,
    PluginRefuses,
    PluginRefusesLate,
    PluginNotSent,
    Folded,
    KilledInFold,
    KilledInCall,
    Scheduled,
    Blocked,
    Queued,
    QueueGranted,
    Outrun,
}

/// What each kind is, in their order.
const WORDS: [&str; Fault::Outrun as usize + 1] = [
    "etcd refuses a call",
    "a call to etcd is lost",
    "etcd does a call and says that it failed",
    "etcd does a call and does not answer",
    "etcd does a call that its server has given up",
    "etcd does a call twice",
    "a message is slow",
    "a watch ends",
    "all watches end",
    "etcd's history is compacted",
    "a lease ends early",
    "two places are parted",
    "two places are parted in one direction",
    "a server is killed",
    "csid of a node is killed",
    "a node is switched off",
    "csid of a controller's host is killed",
    "a controller's host is switched off",
    "an operator asks for a release",
    "an operator ends a claim of a node that is off",
    "a node's call is lost",
    "a node's call is late",
    "a node's call comes twice",
    "the answer to a node's call is lost",
    "a server does not notice the end of a session",
    "a controller call comes twice",
    "a plugin is slow",
    "a plugin does a call and does not answer",
    "a plugin does nothing and does not answer",
    "a plugin is busy",
    "a plugin refuses a call",
    "a plugin does a call and refuses it",
    "a plugin is not sent a call",
    "claims share a transaction",
    "a server is killed while claims share a transaction",
    "a server is killed in a call that was written with its claim",
    "a scheduler attaches a volume",
    "a node is blocked",
    "a claim waits in the queue",
    "a claim of the queue is granted",
    "a claim is refused because of one that came meanwhile",
];

/// How often each kind has occurred.
#[derive(Debug)]
pub struct Faults([AtomicU64; WORDS.len()]);

impl Default for Faults {
    fn default() -> Self {
        Faults([const { AtomicU64::new(0) }; WORDS.len()])
    }
}

impl Faults {
    pub fn count(&self, fault: Fault) {
        self.0[fault as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Adds those of a scene.
    pub fn add(&self, other: &Faults) {
        for (sum, more) in self.0.iter().zip(&other.0) {
            sum.fetch_add(more.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Returns the kinds that have not occurred.
    pub fn missing(&self) -> Vec<&'static str> {
        let is_none = |(_, count): &(&&str, &AtomicU64)| count.load(Ordering::Relaxed) == 0;
        WORDS.iter().zip(&self.0).filter(is_none).map(|(words, _)| *words).collect()
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (words, count) in WORDS.iter().zip(&self.0) {
            writeln!(f, "{:10} {words}", count.load(Ordering::Relaxed))?;
        }
        Ok(())
    }
}
