//! The calls that are under way, by the names their callers gave them: what ListOperations shows and CancelOperation finds.
//! Owns nothing of a volume: an entry only says which task to ask.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::Notify;

use crate::error::{Error, Kind, Result};
use crate::store::registry::VolumeName;
use crate::store::rows::{MountKey, VolumeKey};
use crate::volume::{Authority, OperationView, Volumes};

/// What csid does without being asked.
const OWN: [&str; 5] = ["settle", "restore", "heal", "continue", "unbind"];

/// What leaves a volume used.
pub(crate) const TAKES: [&str; 3] = ["mount", "claim", "attach"];

/// What an operation is doing now, written by the task and read by listings.
#[derive(Clone)]
pub(crate) struct Step {
    name: Arc<Mutex<&'static str>>,
    decided: Arc<AtomicBool>,
    said: Arc<Mutex<String>>,
}

impl Step {
    pub(crate) fn new() -> Self {
        Step { name: Arc::new(Mutex::new("queued")), decided: Arc::default(), said: Arc::default() }
    }

    pub(crate) fn set(&self, step: &'static str) {
        *self.name.lock().unwrap_or_else(PoisonError::into_inner) = step;
    }

    pub(crate) fn get(&self) -> &'static str {
        *self.name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The plugin has answered so, and is asked again.
    pub(crate) fn say(&self, answer: String) {
        *self.said.lock().unwrap_or_else(PoisonError::into_inner) = answer;
    }

    /// The plugin's last answer that was no success; empty: none.
    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What is made goes into the journal now as its callers'. A csid that is killed from here on may find it there and
    /// keep it, so nobody can be told any more that it is undone: who would leave is told the outcome.
    pub(crate) fn decide(&self) {
        self.set("commit");
        self.decided.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_decided(&self) -> bool {
        self.decided.load(Ordering::Relaxed)
    }
}

struct Entry {
    id: String,
    kind: &'static str,
    key: MountKey,
    volume: VolumeKey,
    uid: u32,
    step: Step,
    since_usec: u64,
    deadline_usec: Option<u64>,
    is_waited_for: bool,
}

impl Entry {
    fn view(&self) -> OperationView {
        OperationView {
            id: self.id.clone(),
            kind: self.kind,
            subject: format!("{}/{}", self.key.namespace, self.key.volume),
            step: self.step.get(),
            said: self.step.said(),
            since_usec: self.since_usec,
            deadline_usec: self.deadline_usec,
            uid: self.uid,
        }
    }
}

#[derive(Default)]
struct Table {
    last: u64,
    entries: BTreeMap<u64, Entry>,
    /// How many were begun of each kind.
    begun: BTreeMap<&'static str, u64>,
    news: Arc<Notify>,
}

#[derive(Clone, Default)]
pub(crate) struct Operations(Arc<Mutex<Table>>);

/// One entry; dropping it ends it.
pub(crate) struct Ticket {
    pub(crate) number: u64,
    pub(crate) id: String,
    /// The caller named it: its name is kept across csid's restart.
    pub(crate) named: bool,
    table: Operations,
}

impl Ticket {
    /// Its caller waits no more; what he asked for goes on.
    pub(crate) fn left(&self) {
        if let Some(entry) = self.table.lock().entries.get_mut(&self.number) {
            entry.is_waited_for = false;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        table.entries.remove(&self.number);
        table.news.notify_one();
    }
}

pub(crate) struct Begin<'a> {
    pub(crate) kind: &'static str,
    pub(crate) key: &'a MountKey,
    pub(crate) volume: &'a VolumeKey,
    pub(crate) uid: u32,
    pub(crate) id: Option<String>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) step: Step,
}

impl Operations {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enter a call. Its caller's name is unique for its uid while the call is under way; the same call may be repeated
    /// under the same name.
    pub(crate) fn begin(&self, begin: Begin<'_>) -> Result<Ticket> {
        let mut table = self.lock();
        if let Some(id) = &begin.id {
            // What csid itself does for an earlier call of that name is no other call.
            let own = |kind| OWN.contains(&kind);
            let same = |entry: &Entry| {
                entry.key == *begin.key && (entry.kind == begin.kind || own(entry.kind) || own(begin.kind))
            };
            let other = |entry: &&Entry| entry.uid == begin.uid && entry.id == *id && !same(entry);
            if let Some(entry) = table.entries.values().find(other) {
                let text = format!(
                    "operation-id `{id}` names another call that is under way ({} of {}/{}); give this one another name",
                    entry.kind, entry.key.namespace, entry.key.volume
                );
                return Err(Error::new(Kind::AlreadyExists, text));
            }
        }
        table.last += 1;
        *table.begun.entry(begin.kind).or_default() += 1;
        let number = table.last;
        let named = begin.id.is_some();
        let id = begin.id.unwrap_or_else(|| format!("csid-{number}"));
        let entry = Entry {
            id: id.clone(),
            kind: begin.kind,
            key: begin.key.clone(),
            volume: begin.volume.clone(),
            uid: begin.uid,
            step: begin.step,
            since_usec: now_usec(),
            deadline_usec: begin.deadline.map(|at| {
                now_usec()
                    + u64::try_from(at.saturating_duration_since(Instant::now()).as_micros()).unwrap_or(0)
            }),
            is_waited_for: true,
        };
        table.entries.insert(number, entry);
        Ok(Ticket { number, id, named, table: self.clone() })
    }

    /// The step that a waiter's operation shows is its operation's, once it is known which one it joined.
    pub(crate) fn follow(&self, ticket: &Ticket, step: &Step) {
        if let Some(entry) = self.lock().entries.get_mut(&ticket.number) {
            entry.step = step.clone();
        }
    }

    /// Whose calls carry this name, and the tasks to tell. Another uid's name is not found, unless by authority.
    pub(crate) fn find(&self, id: &str, authority: Authority) -> Vec<(VolumeKey, u64)> {
        let table = self.lock();
        let mine = |entry: &Entry| match authority {
            Authority::Own(uid) => entry.uid == uid,
            Authority::Any(_) => true,
        };
        let found = table.entries.iter().filter(|(_, entry)| entry.id == id && mine(entry));
        found.map(|(number, entry)| (entry.volume.clone(), *number)).collect()
    }

    pub(crate) fn list(&self) -> Vec<OperationView> {
        self.lock().entries.values().map(Entry::view).collect()
    }

    fn begun(&self) -> BTreeMap<&'static str, u64> {
        self.lock().begun.clone()
    }

    /// What the status tells of may have changed, with or without an event, since this was answered last. One waits for it.
    pub(crate) async fn news(&self) {
        let news = Arc::clone(&self.lock().news);
        news.notified().await;
    }

    pub(crate) fn tell_news(&self) {
        self.lock().news.notify_one();
    }

    /// The CreateVolume of this volume that somebody waits for.
    pub(crate) fn creating(&self, name: &VolumeName) -> Option<OperationView> {
        let of_volume = |entry: &&Entry| {
            entry.kind == "create" && entry.is_waited_for && VolumeName::of(&entry.key) == *name
        };
        self.lock().entries.values().find(of_volume).map(Entry::view)
    }

    /// The plugins of the Mounts, Claims and AttachVolumes under way.
    pub(crate) fn taking(&self) -> BTreeSet<String> {
        let table = self.lock();
        let taking = table.entries.values().filter(|entry| TAKES.contains(&entry.kind));
        taking.map(|entry| entry.volume.plugin.clone()).collect()
    }

    /// The Mounts of a plugin's volumes that are under way.
    pub(crate) fn mounting(&self, plugin: &str) -> Vec<(MountKey, VolumeKey)> {
        let table = self.lock();
        let of_plugin = |entry: &&Entry| entry.kind == "mount" && entry.volume.plugin == plugin;
        table
            .entries
            .values()
            .filter(of_plugin)
            .map(|entry| (entry.key.clone(), entry.volume.clone()))
            .collect()
    }

    /// Whether callers wait, not only csid itself.
    pub(crate) fn are_waited_for(&self) -> bool {
        let table = self.lock();
        table.entries.values().any(|entry| entry.is_waited_for && !OWN.contains(&entry.kind))
    }
}

impl Volumes {
    /// How many operations of each kind were begun since csid's start.
    pub fn operations_begun(&self) -> BTreeMap<&'static str, u64> {
        self.shared.operations.begun()
    }
}

pub(crate) fn now_usec() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
