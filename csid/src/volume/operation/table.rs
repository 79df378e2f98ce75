//! The operations under way, by the names that callers gave them, for ListOperations and CancelOperation. An entry only says which
//! actor to ask.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::Notify;

use crate::error::{Details, Error, Kind, Result, Step};
use crate::histogram::{Durations, Histogram};
use crate::store::registry::VolumeName;
use crate::store::rows::{MountKey, VolumeKey};
use crate::volume::api::operation_kind::OperationKind;
use crate::volume::api::requests::{Authority, Wait};
use crate::volume::api::views::OperationView;
use crate::volume::model::subject::Subject;
use crate::volume::operation::timeline::Timeline;

/// The current step of an operation, written by its executor and read by listings.
#[derive(Clone)]
pub(in crate::volume) struct Progress {
    timeline: Arc<Mutex<Timeline>>,
    decided: Arc<AtomicBool>,
    unasked: Arc<AtomicBool>,
    yielded: Arc<AtomicBool>,
    /// What is in the way of a claim that waits at the servers of a cluster. `None`: it does not wait there.
    queued: Arc<Mutex<Option<Vec<String>>>>,
    said: Arc<Mutex<String>>,
    /// The details of the plugin's last error. `None`: there was none.
    failed: Arc<Mutex<Option<Box<Details>>>>,
}

impl Progress {
    pub(in crate::volume) fn new() -> Self {
        Progress {
            timeline: Arc::new(Mutex::new(Timeline::new(Step::Queued))),
            decided: Arc::default(),
            unasked: Arc::default(),
            yielded: Arc::default(),
            queued: Arc::default(),
            said: Arc::default(),
            failed: Arc::default(),
        }
    }

    /// Notes when csid read the call of the first caller.
    pub(in crate::volume) fn note_arrival(&self, arrived: Instant) {
        self.timeline().note_arrival(arrived);
    }

    fn timeline(&self) -> MutexGuard<'_, Timeline> {
        self.timeline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::volume) fn set(&self, step: Step) {
        self.timeline().set(step);
    }

    pub(in crate::volume) fn get(&self) -> Step {
        self.timeline().step()
    }

    /// Begins a part of the current step that is timed by itself.
    pub(in crate::volume) fn set_part(&self, part: &'static str) {
        self.timeline().set_part(part);
    }

    /// Returns how long each step has taken, in the order of the steps.
    pub(in crate::volume) fn timings(&self) -> Vec<(&'static str, Duration)> {
        self.timeline().timings()
    }

    /// Notes the last error of the plugin, which is called again.
    pub(in crate::volume) fn say(&self, answer: String) {
        *self.said.lock().unwrap_or_else(PoisonError::into_inner) = answer;
    }

    /// Notes an error for callers that leave before the end. An error without an RPC, such as csid's own, is ignored.
    pub(in crate::volume) fn note(&self, error: &Error) {
        if error.details.rpc.is_none() {
            return;
        }
        self.say(error.message.clone());
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.details.clone());
    }

    /// Returns `error` with the details of the plugin's last error, if there was one.
    pub(in crate::volume) fn explained(&self, error: Error) -> Error {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(failed) = failed else { return error };
        error.with(|details| {
            details.rpc = failed.rpc;
            details.grpc_code = failed.grpc_code;
            details.plugin_message = failed.plugin_message;
        })
    }

    /// Returns the plugin's last error. Empty: there was none.
    pub(in crate::volume) fn said(&self) -> String {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Marks the commit point. If csid dies after this, recovery may keep the mount. So a caller that times out or cancels still
    /// gets the real outcome.
    pub(in crate::volume) fn decide(&self) {
        self.set(Step::Commit);
        self.decided.store(true, Ordering::Relaxed);
    }

    /// Sets whether the operation waits for a plugin that was never asked to create the volume.
    pub(in crate::volume) fn set_unasked(&self, unasked: bool) {
        self.unasked.store(unasked, Ordering::Relaxed);
    }

    /// Returns whether the operation can end without a trace: the plugin was never asked.
    pub(in crate::volume) fn is_unasked(&self) -> bool {
        self.unasked.load(Ordering::Relaxed)
    }

    /// Notes whether the operation's claim waits at the servers of a cluster, and what is in its way: NODE/CONSUMER.
    pub(in crate::volume) fn set_queued(&self, holders: Option<Vec<String>>) {
        *self.queued.lock().unwrap_or_else(PoisonError::into_inner) = holders;
    }

    /// Returns what is in the way of the operation's claim at the servers. `None`: the claim does not wait there.
    pub(in crate::volume) fn queued(&self) -> Option<Vec<String>> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that the operation ends before its time because it was preempted.
    pub(in crate::volume) fn note_yield(&self) {
        self.yielded.store(true, Ordering::Relaxed);
    }

    /// Returns whether the operation ends because it was preempted, so that its error is no answer of the plugin.
    pub(in crate::volume) fn has_yielded(&self) -> bool {
        self.yielded.load(Ordering::Relaxed)
    }

    /// Returns whether the operation was preempted since the last call of this function.
    pub(in crate::volume) fn take_yield(&self) -> bool {
        self.yielded.swap(false, Ordering::Relaxed)
    }

    pub(in crate::volume) fn is_decided(&self) -> bool {
        self.decided.load(Ordering::Relaxed)
    }
}

struct Entry {
    id: String,
    kind: OperationKind,
    /// `None`: the operation is of the plugin.
    subject: Option<Subject>,
    volume: VolumeKey,
    uid: u32,
    step: Progress,
    since_usec: u64,
    deadline_usec: Option<u64>,
    is_waited_for: bool,
}

impl Entry {
    /// Returns the subject's text in a listing: `NAMESPACE/VOLUME`, or the id of a plugin.
    fn title(&self) -> String {
        match &self.subject {
            Some(subject) => subject.volume().to_string(),
            None => self.volume.plugin.clone(),
        }
    }

    fn view(&self) -> OperationView {
        OperationView {
            id: self.id.clone(),
            kind: self.kind,
            subject: self.title(),
            step: self.step.get(),
            said: self.step.said(),
            holders: self.step.queued().unwrap_or_default(),
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
    /// The number of operations begun of each kind.
    begun: BTreeMap<OperationKind, u64>,
    /// How long the steps of ended operations took.
    steps: BTreeMap<(OperationKind, &'static str), Histogram>,
    news: Arc<Notify>,
    /// A counter, one more than there are [`Recovering`]s.
    recovering: Arc<()>,
}

/// The marker of an actor with rows loaded at csid's start, until its first operation is listed or it ends.
pub(in crate::volume) struct Recovering {
    one: Option<Arc<()>>,
    news: Arc<Notify>,
}

impl Drop for Recovering {
    fn drop(&mut self) {
        // The reader of the news must no longer count this one.
        self.one = None;
        self.news.notify_one();
    }
}

#[derive(Clone, Default)]
pub(in crate::volume) struct OperationTable(Arc<Mutex<Table>>);

/// The handle of one entry. Dropping it removes the entry.
pub(in crate::volume) struct Ticket {
    pub(in crate::volume) number: u64,
    pub(in crate::volume) id: String,
    /// Whether the caller gave the name, which is then kept across csid's restart.
    pub(in crate::volume) named: bool,
    table: OperationTable,
}

impl Ticket {
    /// Notes that the caller has left. The operation goes on.
    pub(in crate::volume) fn left(&self) {
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

pub(in crate::volume) struct Begin<'a> {
    pub(in crate::volume) kind: OperationKind,
    /// `None`: the operation is of the plugin.
    pub(in crate::volume) subject: Option<Subject>,
    pub(in crate::volume) volume: &'a VolumeKey,
    pub(in crate::volume) uid: u32,
    pub(in crate::volume) id: Option<String>,
    pub(in crate::volume) deadline: Option<Instant>,
    pub(in crate::volume) step: Progress,
}

impl OperationTable {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a call. Its caller's name is unique for its uid while the call is under way. The same call may be repeated under
    /// the same name.
    pub(in crate::volume) fn begin(&self, begin: Begin<'_>) -> Result<Ticket> {
        let mut table = self.lock();
        if let Some(id) = &begin.id {
            // An operation that csid begins for an earlier call of that name counts as the same call.
            let same = |entry: &Entry| {
                entry.subject == begin.subject
                    && entry.volume.plugin == begin.volume.plugin
                    && (entry.kind == begin.kind || entry.kind.is_own() || begin.kind.is_own())
            };
            let other = |entry: &&Entry| entry.uid == begin.uid && entry.id == *id && !same(entry);
            if let Some(entry) = table.entries.values().find(other) {
                let text = format!(
                    "operation-id `{id}` names another call that is under way ({} of {}); give this one another name",
                    entry.kind,
                    entry.title()
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
            subject: begin.subject,
            volume: begin.volume.clone(),
            uid: begin.uid,
            step: begin.step,
            since_usec: now_usec(),
            deadline_usec: begin.deadline.map(|at| {
                let left = at.saturating_duration_since(Instant::now()).as_micros();
                now_usec().saturating_add(u64::try_from(left).unwrap_or(u64::MAX))
            }),
            is_waited_for: true,
        };
        table.entries.insert(number, entry);
        Ok(Ticket { number, id, named, table: self.clone() })
    }

    /// Makes a caller's entry show the step of the operation that it joined.
    pub(in crate::volume) fn follow(&self, ticket: &Ticket, step: &Progress) {
        if let Some(entry) = self.lock().entries.get_mut(&ticket.number) {
            entry.step = step.clone();
        }
    }

    /// Returns the volumes and numbers of the calls with this name. Calls of other uids are found only with that authority.
    pub(in crate::volume) fn find(&self, id: &str, authority: Authority) -> Vec<(VolumeKey, u64)> {
        let table = self.lock();
        let mine = |entry: &Entry| match authority {
            Authority::Own(uid) => entry.uid == uid,
            Authority::Any(_) => true,
        };
        let found = table.entries.iter();
        let found = found.filter(|(_, entry)| entry.id == id && mine(entry) && entry.subject.is_some());
        found.map(|(number, entry)| (entry.volume.clone(), *number)).collect()
    }

    pub(in crate::volume) fn list(&self) -> Vec<OperationView> {
        self.lock().entries.values().map(Entry::view).collect()
    }

    pub(in crate::volume) fn begun(&self) -> BTreeMap<OperationKind, u64> {
        self.lock().begun.clone()
    }

    /// Counts the steps of an operation that has ended.
    pub(in crate::volume) fn count_steps(&self, kind: OperationKind, step: &Progress) {
        let timings = step.timings();
        let mut table = self.lock();
        for (name, took) in timings {
            table.steps.entry((kind, name)).or_default().record(took);
        }
    }

    pub(in crate::volume) fn steps(&self) -> BTreeMap<(OperationKind, &'static str), Durations> {
        self.lock().steps.iter().map(|(key, steps)| (*key, steps.read())).collect()
    }

    /// Waits until the status may have changed since the last return, with or without an event. It has one caller.
    pub(in crate::volume) async fn news(&self) {
        let news = Arc::clone(&self.lock().news);
        news.notified().await;
    }

    pub(in crate::volume) fn recovering(&self) -> Recovering {
        let table = self.lock();
        Recovering { one: Some(Arc::clone(&table.recovering)), news: Arc::clone(&table.news) }
    }

    /// Returns whether some operations of csid's recovery are not listed yet.
    pub(in crate::volume) fn is_recovering(&self) -> bool {
        Arc::strong_count(&self.lock().recovering) > 1
    }

    pub(in crate::volume) fn tell_news(&self) {
        self.lock().news.notify_one();
    }

    /// Returns the CreateVolume of this volume that a caller waits for.
    pub(in crate::volume) fn creating(&self, name: &VolumeName) -> Option<OperationView> {
        let subject = Some(Subject::Volume(name.clone()));
        let of_volume = |entry: &&Entry| {
            entry.kind == OperationKind::Create && entry.is_waited_for && entry.subject == subject
        };
        self.lock().entries.values().find(of_volume).map(Entry::view)
    }

    /// Returns the plugins of the Mounts, Claims and AttachVolumes under way.
    pub(in crate::volume) fn taking(&self) -> BTreeSet<String> {
        let table = self.lock();
        let taking = table.entries.values().filter(|entry| entry.kind.takes());
        taking.map(|entry| entry.volume.plugin.clone()).collect()
    }

    /// Returns the Mounts of a plugin's volumes that are under way.
    pub(in crate::volume) fn mounting(&self, plugin: &str) -> Vec<(MountKey, VolumeKey)> {
        let table = self.lock();
        let of_plugin = |entry: &&Entry| entry.kind.mounts() && entry.volume.plugin == plugin;
        table
            .entries
            .values()
            .filter(of_plugin)
            .filter_map(|entry| Some((entry.subject.as_ref()?.mount()?.clone(), entry.volume.clone())))
            .collect()
    }

    /// Returns the Mounts under way that are meant, with the uids of their callers.
    pub(in crate::volume) fn mounting_where(
        &self,
        is_meant: impl Fn(&MountKey) -> bool,
    ) -> Vec<(MountKey, u32)> {
        let table = self.lock();
        let mounts = table.entries.values().filter(|entry| entry.kind.mounts());
        let of_entry = |entry: &Entry| Some((entry.subject.as_ref()?.mount()?.clone(), entry.uid));
        mounts.filter_map(of_entry).filter(|(key, _)| is_meant(key)).collect()
    }

    /// Returns whether callers wait, other than csid itself.
    pub(in crate::volume) fn are_waited_for(&self) -> bool {
        let table = self.lock();
        table.entries.values().any(|entry| entry.is_waited_for && !entry.kind.is_own())
    }
}

impl OperationTable {
    pub(in crate::volume) fn of_plugin(
        &self,
        kind: OperationKind,
        plugin: &str,
        uid: u32,
        wait: &Wait,
    ) -> Result<OfPlugin> {
        let step = Progress::new();
        let begin = Begin {
            kind,
            subject: None,
            volume: &VolumeKey::new(plugin, "x"),
            uid,
            id: wait.operation.clone(),
            deadline: wait.deadline,
            step: step.clone(),
        };
        let ticket = self.begin(begin)?;
        ticket.left();
        Ok(OfPlugin { step, _ticket: ticket })
    }
}

/// An operation on a plugin, listed until this is dropped. A stop of csid does not wait for it, and no call cancels it.
pub struct OfPlugin {
    step: Progress,
    _ticket: Ticket,
}

impl OfPlugin {
    pub fn set(&self, step: Step) {
        self.step.set(step);
    }
}

pub(in crate::volume) fn now_usec() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_on_a_plugin_is_listed_until_it_ends() {
        let operations = OperationTable::default();
        let wait = Wait { operation: Some("mine".to_owned()), ..Wait::default() };
        let restart = operations.of_plugin(OperationKind::Restart, "nfs", 7, &wait).unwrap();
        restart.set(Step::WaitingForPlugin);
        let listed = operations.list();
        assert_eq!(
            (listed[0].id.as_str(), listed[0].kind, listed[0].subject.as_str()),
            ("mine", OperationKind::Restart, "nfs")
        );
        assert_eq!((listed[0].step, listed[0].uid), (Step::WaitingForPlugin, 7));
        assert!(operations.find("mine", Authority::Any(0)).is_empty(), "no volume's task is asked to end it");
        assert!(!operations.are_waited_for(), "csid's end does not wait for it");
        drop(restart);
        assert!(operations.list().is_empty());
    }
}
