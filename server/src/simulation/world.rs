//! The storage, and the judge of what was done to it. It sees what nodes have mounted, and not what servers believe.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csi_proto::cluster::v1::Failure;
use csid_etcd::double::Double;
use tokio::time::Instant;

use super::breaks::{Break, Broken, EARLY_DETACH, TWO_WRITERS};
use super::dice::Dice;
use super::faults::{Fault, Faults};
use super::history::{History, RefusedClaim};
use super::modes::{is_shared, is_single};
use super::server::CONTROLLER;

/// A node's hold of a volume: the volume, the node and the consumer.
type Hold = (String, String, String);

/// How a plugin ended a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The device, for a publish.
    Done(String),
    /// No answer came in time. The plugin may have done it.
    Unknown,
    /// The plugin does something else for the volume.
    Again,
    Refused,
    NotSent,
}

#[derive(Default)]
struct Storage {
    /// Where each volume is attached, and as which device.
    attached: BTreeMap<String, BTreeMap<String, String>>,
    devices: u64,
    /// What nodes were granted and have not given back, with the claims' names.
    granted: BTreeMap<Hold, String>,
    mounted: BTreeSet<Hold>,
    /// Calls that plugins make: the host and the volume.
    running: BTreeSet<(usize, String)>,
    /// The greatest epoch of a call that a plugin has begun for each volume.
    epochs: BTreeMap<String, u64>,
    /// Whether plugins do what they are asked for, at once.
    is_calm: bool,
    violation: Option<String>,
    log: Vec<String>,
    grants: u64,
    calls: u64,
    begun: Option<Instant>,
}

/// The storage and its judge. Copies share it.
#[derive(Clone)]
pub struct World {
    storage: Arc<Mutex<Storage>>,
    double: Double,
    history: Arc<Mutex<History>>,
    dice: Dice,
    seen: Arc<Faults>,
    is_shown: bool,
    /// Whether what happens is kept.
    keeps_log: bool,
    /// Whether plugins go on for longer than they may.
    is_slow: bool,
    /// The words of the only rule that counts. Empty: all count.
    rule: &'static str,
}

impl World {
    pub fn new(
        double: Double,
        dice: Dice,
        seen: Arc<Faults>,
        broken: Option<Broken>,
        keeps_log: bool,
    ) -> World {
        let is_slow = broken.is_some_and(|broken| broken.of == Break::SlowPlugin);
        let rule = broken.map_or("", |broken| broken.rule);
        let is_shown = std::env::var_os("CSID_SIM_LOG").is_some();
        let storage = Storage { begun: Some(Instant::now()), ..Storage::default() };
        let (storage, history) = (Arc::new(Mutex::new(storage)), Arc::new(Mutex::new(History::new())));
        World { storage, double, history, dice, seen, is_shown, keeps_log, is_slow, rule }
    }

    fn lock(&self) -> MutexGuard<'_, Storage> {
        self.storage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what happened, for the reader of a failure.
    pub fn note(&self, text: impl FnOnce() -> String) {
        if !self.keeps_log && !self.is_shown {
            return;
        }
        let mut storage = self.lock();
        let at = storage.begun.map(|begun| begun.elapsed()).unwrap_or_default();
        let line = format!("{:9.3} {}", at.as_secs_f64(), text());
        if self.is_shown {
            println!("{line}");
        }
        storage.log.push(line);
    }

    /// Says that a rule was broken. The first one counts, or the first one of the only rule that counts.
    pub fn fail(&self, text: String) {
        self.note(|| format!("VIOLATION: {text}"));
        if text.contains(self.rule) {
            self.lock().violation.get_or_insert(text);
        }
    }

    pub fn violation(&self) -> Option<String> {
        self.lock().violation.clone()
    }

    pub fn log(&self) -> Vec<String> {
        self.lock().log.clone()
    }

    /// Returns how many grants and how many controller calls there were.
    pub fn counts(&self) -> (u64, u64) {
        let storage = self.lock();
        (storage.grants, storage.calls)
    }

    /// Returns etcd's revision.
    pub fn revision(&self) -> i64 {
        self.double.revision()
    }

    /// Judges what has changed in etcd.
    pub fn follow(&self) {
        self.judge(|_| None);
    }

    /// Judges what has changed in etcd, and something that depends on it.
    fn judge(&self, what: impl FnOnce(&History) -> Option<String>) {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let mut broken = history.follow(&self.double, &self.seen);
        broken.extend(what(&history));
        drop(history);
        broken.into_iter().for_each(|text| self.fail(text));
    }

    /// Judges a grant when its server gives it to the caller.
    pub fn answered(&self, volume: &str, claim: &str) {
        self.judge(|history| history.judge_grant(volume, claim));
    }

    /// Judges a refusal when its server gives it to the caller.
    pub fn refused(&self, of: &RefusedClaim<'_>, failure: &Failure) {
        self.judge(|history| history.judge_refusal(of, failure, &self.seen));
    }

    /// Says that a node has written a grant into its journal.
    pub fn granted(&self, hold: &Hold, claim: &str) {
        let mut storage = self.lock();
        storage.grants += 1;
        storage.granted.insert(hold.clone(), claim.to_owned());
    }

    /// Says that a node mounts a volume. `device`: what the grant named; empty where nothing is attached.
    pub fn mount(&self, hold: &Hold, device: &str) {
        self.note(|| format!("{hold:?} mounts {device:?}"));
        let (volume, node, _) = hold;
        let mut storage = self.lock();
        let is_other =
            |other: &&Hold| other.0 == *volume && *other != hold && (other.1 != *node || !is_shared(volume));
        let other = storage.mounted.iter().find(is_other).cloned();
        let at = storage.attached.get(volume).and_then(|at| at.get(node)).cloned();
        storage.mounted.insert(hold.clone());
        drop(storage);
        if let Some(other) = other.filter(|_| is_single(volume)) {
            self.fail(format!("{TWO_WRITERS} {hold:?} and {other:?}"));
        }
        if !device.is_empty() && at.as_deref() != Some(device) {
            self.fail(format!("{hold:?} was granted {device}, and has {at:?}"));
        }
    }

    pub fn unmount(&self, hold: &Hold) {
        self.note(|| format!("{hold:?} unmounts"));
        self.lock().mounted.remove(hold);
    }

    /// Says that a node gives a claim back, before its Detached is sent.
    pub fn give_back(&self, hold: &Hold) {
        self.lock().granted.remove(hold);
    }

    /// Has plugins do what they are asked for from now on.
    pub fn calm(&self) {
        self.lock().is_calm = true;
    }

    /// Says that a node has rebooted: nothing is mounted there.
    pub fn reboot(&self, node: &str) {
        self.note(|| format!("{node} reboots"));
        let mut storage = self.lock();
        storage.mounted.retain(|(_, at, _)| at != node);
        storage.granted.retain(|(_, at, _), _| at != node);
    }

    /// Makes a controller call at a host's plugin. It goes on without its caller.
    pub async fn call(&self, host: usize, volume: &str, node: &str, is_publish: bool, epoch: u64) -> Ending {
        let what = if is_publish { "publish" } else { "unpublish" };
        self.note(|| format!("c{host} {what} {volume} for {node}, epoch {epoch}"));
        {
            let mut storage = self.lock();
            storage.calls += 1;
            if !storage.running.insert((host, volume.to_owned())) {
                return Ending::Again;
            }
            let seen = storage.epochs.get(volume).copied().unwrap_or(0);
            storage.epochs.insert(volume.to_owned(), seen.max(epoch));
            let holds = |(of, at, _): &&Hold| of == volume && at == node;
            let user = storage.mounted.iter().chain(storage.granted.keys()).find(holds).cloned();
            drop(storage);
            if epoch <= seen {
                self.fail(format!("a stale call was made: epoch {epoch} after {seen} for {volume}"));
            }
            if let Some(user) = user.filter(|_| !is_publish) {
                self.fail(format!("{volume} {EARLY_DETACH} {node}, and {user:?} has not given it back"));
            }
        }
        let world = self.clone();
        let (volume, node) = (volume.to_owned(), node.to_owned());
        // The plugin is another process.
        let made = tokio::spawn(async move {
            let ending = world.make(&volume, &node, is_publish).await;
            world.lock().running.remove(&(host, volume));
            ending
        });
        made.await.unwrap_or(Ending::Unknown)
    }

    async fn make(&self, volume: &str, node: &str, is_publish: bool) -> Ending {
        let (dice, is_calm) = (&self.dice, self.lock().is_calm);
        let longest = u64::try_from(CONTROLLER.as_millis()).unwrap_or(u64::MAX) - 1;
        let time = match dice.roll(10) {
            _ if is_calm => Duration::from_millis(5),
            0..5 if self.is_slow => dice.time(longest, 9 * longest),
            0 => {
                self.seen.count(Fault::PluginSlow);
                dice.time(0, longest)
            }
            1 | 2 => dice.time(0, 1000),
            _ => dice.time(0, 50),
        };
        let early = dice.once_in(2);
        if !early {
            tokio::time::sleep(time).await;
        }
        let (is_done, ending) = match dice.roll(20) {
            _ if is_calm => (true, None),
            0 => (true, Some(Ending::Unknown)),
            1 => (false, Some(Ending::Unknown)),
            2 => (false, Some(Ending::Again)),
            3 if is_publish => (dice.once_in(2), Some(Ending::Refused)),
            4 if dice.once_in(8) => (false, Some(Ending::Refused)),
            5 => (false, Some(Ending::NotSent)),
            _ => (true, None),
        };
        let fault = match (&ending, is_done) {
            (None, _) => None,
            (Some(Ending::Unknown), true) => Some(Fault::PluginSilent),
            (Some(Ending::Unknown), false) => Some(Fault::PluginFails),
            (Some(Ending::Again), _) => Some(Fault::PluginBusy),
            (Some(Ending::Refused), true) => Some(Fault::PluginRefusesLate),
            (Some(Ending::Refused), false) => Some(Fault::PluginRefuses),
            (Some(Ending::NotSent | Ending::Done(_)), _) => Some(Fault::PluginNotSent),
        };
        fault.into_iter().for_each(|fault| self.seen.count(fault));
        let device = match is_done {
            true => self.apply(volume, node, is_publish),
            false => String::new(),
        };
        if early {
            tokio::time::sleep(time).await;
        }
        ending.unwrap_or(Ending::Done(device))
    }

    /// Attaches or detaches. Returns the device.
    fn apply(&self, volume: &str, node: &str, is_publish: bool) -> String {
        let mut storage = self.lock();
        if !is_publish {
            let holds = |(of, at, _): &&Hold| of == volume && at == node;
            let user = storage.mounted.iter().chain(storage.granted.keys()).find(holds).cloned();
            let detached = storage.attached.get_mut(volume).and_then(|at| at.remove(node));
            drop(storage);
            self.note(|| format!("{volume} is detached from {node}: {detached:?}"));
            if let Some(user) = user {
                self.fail(format!("{volume} is detached from {node} too late, and {user:?} has it"));
            }
            return String::new();
        }
        let present = storage.attached.entry(volume.to_owned()).or_default();
        let other = present.keys().find(|at| *at != node).cloned();
        let is_there = present.get(node).cloned();
        storage.devices += 1;
        // The same call again has the same answer.
        let device = is_there.unwrap_or_else(|| format!("/dev/{}", storage.devices));
        storage.attached.entry(volume.to_owned()).or_default().insert(node.to_owned(), device.clone());
        drop(storage);
        self.note(|| format!("{volume} is attached to {node} as {device}"));
        if let Some(other) = other.filter(|_| is_single(volume)) {
            self.fail(format!("{volume} of one node was attached to {node}, and {other} has it"));
        }
        device
    }

    /// Compares what nodes were granted with what etcd has.
    pub fn compare(&self) {
        self.follow();
        let double = &self.double;
        let claims = double.below("/csid/v1/vol/default/").into_iter();
        let claims = claims.filter(|kv| String::from_utf8_lossy(&kv.key).contains("/claim/"));
        let mut created = BTreeSet::new();
        if claims.into_iter().any(|kv| !created.insert(kv.create_revision)) {
            self.seen.count(Fault::Folded);
        }
        let granted = self.lock().granted.clone();
        for ((volume, node, consumer), claim) in granted {
            let hold = (volume, node, consumer);
            let (volume, node, consumer) = &hold;
            let key = format!("/csid/v1/vol/default/{volume}/claim/{node}/{consumer}");
            let found = double.below(&key).into_iter().find(|kv| kv.key == key.as_bytes());
            let value = found.map(|kv| String::from_utf8_lossy(&kv.value).into_owned()).unwrap_or_default();
            let is_kept =
                value.contains(&format!("\"id\":\"{claim}\"")) && value.contains("\"state\":\"taken\"");
            if !is_kept {
                self.fail(format!("the claim {claim} of {hold:?} was granted, and etcd has {value:?}"));
            }
        }
    }

    /// Returns what is not at rest. `None`: all is.
    pub fn restless(&self) -> Option<String> {
        for kv in self.double.below("/csid/v1/vol/") {
            let (key, value) = (String::from_utf8_lossy(&kv.key), String::from_utf8_lossy(&kv.value));
            let is_used = ["/claim/", "/at/", "/queue/"].iter().any(|part| key.contains(part));
            if is_used || value.contains("\"driver\"") {
                return Some(format!("etcd has {key}: {value}"));
            }
        }
        let storage = self.lock();
        let attached = storage.attached.iter().find(|(_, at)| !at.is_empty());
        attached.map(|of| format!("attached: {of:?}")).or(storage.mounted.first().map(|of| format!("{of:?}")))
    }
}
