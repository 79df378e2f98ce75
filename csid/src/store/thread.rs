//! The thread that owns the journal. Requests that wait together are committed together and synced once. Reads come after the
//! commits they waited with.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use tokio::sync::watch;

use crate::store::change::Durability;
use crate::store::error::StoreError;
use crate::store::held::HeldIndex;
use crate::store::journal::{Done, Journal};
use crate::store::records;
use crate::store::registry::Conflict;
use crate::store::request::{Ask, Commit, StoreReply, StoreRequest, Work};
use crate::store::rows::Event;
use crate::store::shared::{Health, Published};
use crate::store::tables;

/// Commits in one transaction at most; a bound on how long the first of them waits.
const GROUP: usize = 512;

/// Serves until `Close`, or until the last handle is gone. An answer that nobody waits for any more is
/// dropped: the commit stands. `registry` is the index of the newest change of the registry; it ends with the thread.
pub(super) fn run(
    mut journal: Journal,
    requests: Receiver<StoreRequest>,
    shared: &Published,
    registry: &watch::Sender<u64>,
) {
    // Read when it is first asked for, and kept from then on.
    let mut held: Option<HeldIndex> = None;
    while let Ok(first) = requests.recv() {
        let (mut group, mut asks, mut unsynced) = (Vec::new(), Vec::new(), Unsynced::default());
        let mut next = Some(first);
        while let Some(request) = next {
            match request {
                StoreRequest::Commit(commit) => group.push(commit),
                StoreRequest::Sync(answer) => unsynced.add(Unanswered::Sync(answer), Instant::now()),
                StoreRequest::Ask(ask) => asks.push(ask),
            }
            next = if group.len() < GROUP { requests.try_recv().ok() } else { None };
        }
        if !group.is_empty() {
            settle(&mut journal, group, shared, (registry, &mut held), &mut unsynced);
        }
        unsynced.settle(&mut journal, shared);
        for ask in asks {
            match ask {
                Ask::Mounts(filter, answer) => {
                    read(&mut journal, shared, answer, |from| from.mounts(&filter))
                }
                Ask::Phases(answer) => read(&mut journal, shared, answer, Journal::phases),
                Ask::ClaimStates(answer) => read(&mut journal, shared, answer, |from| {
                    from.ask("count the claims", records::claim_states)
                }),
                Ask::Events(since, max, answer) => {
                    read(&mut journal, shared, answer, |from| from.events(since, max));
                }
                Ask::Record(name, answer) => read(&mut journal, shared, answer, |from| from.record(&name)),
                Ask::Records(filter, answer) => read(&mut journal, shared, answer, |from| {
                    let found = from.ask("read the registry", |db| records::read_records(db, &filter))?;
                    Ok((found, from.counters.modify_index))
                }),
                Ask::Claims(filter, answer) => read(&mut journal, shared, answer, |from| {
                    let found = from.ask("read the claims", |db| records::read_claims(db, &filter))?;
                    Ok((found, from.counters.modify_index))
                }),
                Ask::Held(plugin, node, most, answer) => {
                    if held.is_none() {
                        held = read_held(&mut journal, shared);
                    }
                    let of = |from: &Journal| match &held {
                        Some(held) => Ok(held.of(&plugin, &node, most)),
                        None => from
                            .ask("count the volumes", HeldIndex::read)
                            .map(|held| held.of(&plugin, &node, most)),
                    };
                    read(&mut journal, shared, answer, of);
                }
                Ask::Rows(answer) => read(&mut journal, shared, answer, Journal::rows),
                Ask::Plugins(answer) => {
                    read(&mut journal, shared, answer, |from| from.ask("read the plugins", tables::plugins));
                }
                Ask::Show(changes, answer) => drop(answer.send(journal.show(changes))),
                Ask::Replace(changes, answer) => {
                    held = None;
                    let replaced = journal.replace(changes);
                    if replaced.is_ok() {
                        shared.health.send_replace(Health::Replaced);
                    }
                    drop(answer.send(replaced));
                }
                Ask::Ping(answer) => read(&mut journal, shared, answer, Journal::ping),
                Ask::Close(answer) => {
                    drop(answer.send(journal.close()));
                    return;
                }
            }
        }
    }
    if let Err(error) = journal.close() {
        tracing::error!(%error, "the journal was not closed in order");
    }
}

/// Read; where the file turns out to be damaged, of what is left of it.
fn read<T>(
    journal: &mut Journal,
    shared: &Published,
    answer: StoreReply<T>,
    read: impl Fn(&Journal) -> Result<T, StoreError>,
) {
    let mut found = read(journal);
    if let Err(error) = &found
        && is_new_damage(journal, error, shared)
    {
        found = read(journal);
    }
    drop(answer.send(found));
}

/// Reads the volumes that each node holds. `None`: the file is damaged.
fn read_held(journal: &mut Journal, shared: &Published) -> Option<HeldIndex> {
    let found = journal.ask("count the volumes", HeldIndex::read);
    if let Err(error) = &found {
        is_new_damage(journal, error, shared);
    }
    found.ok().filter(|_| journal.damage().is_none())
}

/// Returns whether this error is the first to show damage of the file, which is then not used any more.
fn is_new_damage(journal: &mut Journal, error: &StoreError, shared: &Published) -> bool {
    let StoreError::Corrupt { why, .. } = error else { return false };
    if journal.damage().is_some() {
        return false;
    }
    if let Err(error) = journal.leave(why.clone()) {
        tracing::error!(%error, "the damaged journal could not be left");
        return false;
    }
    tell_health(journal, shared);
    true
}

pub(super) fn tell_health(journal: &Journal, shared: &Published) {
    if let Some(damage) = journal.damage() {
        tracing::error!("{damage}");
        shared.health.send_replace(Health::Damaged(damage.to_string()));
    }
}

/// Commits `group`. What need not survive a power cut is answered, the rest goes to `unsynced`.
fn settle(
    journal: &mut Journal,
    group: Vec<Commit>,
    shared: &Published,
    (registry, held): (&watch::Sender<u64>, &mut Option<HeldIndex>),
    unsynced: &mut Unsynced,
) {
    let work: Vec<&Work> = group.iter().map(|commit| &commit.work).collect();
    let begun = Instant::now();
    match journal.commit(&work) {
        Ok(Done { events, answers, reserves }) => {
            let syncs = reserves || group.iter().any(|commit| commit.durability == Durability::Disk);
            match syncs {
                true => _ = unsynced.since.get_or_insert(begun),
                false => shared.counts.record(Durability::Process, begun.elapsed()),
            }
            shared.counts.count(&events);
            let index = journal.counters.modify_index;
            shared.modify_index.store(index, Ordering::Release);
            if !reserves {
                shared.sequence.store(journal.counters.sequence, Ordering::Release);
            }
            let mut swapped = false;
            for (commit, done) in group.into_iter().zip(answers) {
                if let (Ok(()), Work::Swap(swap, _)) = (&done, &commit.work) {
                    swapped = true;
                    if let Some(held) = held {
                        held.change(&swap.after.name.clone().into(), &swap.before, &swap.after);
                    }
                }
                shared.has_records.fetch_or(swapped, Ordering::AcqRel);
                let done = done.map(|()| index);
                match commit.durability {
                    Durability::Process if !reserves => drop(commit.answer.send(Ok(done))),
                    _ => unsynced.add(Unanswered::Commit(commit.answer, done), begun),
                }
            }
            if swapped {
                registry.send_replace(index);
            }
            unsynced.events.extend(events);
        }
        Err(error) => match <[Commit; 1]>::try_from(group) {
            Ok([alone]) => {
                is_new_damage(journal, &error, shared);
                drop(alone.answer.send(Err(error)));
            }
            // One bad request must not fail its neighbours.
            Err(group) => {
                for commit in group {
                    settle(journal, vec![commit], shared, (registry, held), unsynced);
                }
            }
        },
    }
}

/// A request whose commits are written, and not known to be on the disk.
enum Unanswered {
    Commit(StoreReply<Result<u64, Conflict>>, Result<u64, Conflict>),
    Sync(StoreReply<()>),
}

/// What waits for the next sync.
#[derive(Default)]
struct Unsynced {
    answers: Vec<Unanswered>,
    events: Vec<Arc<Event>>,
    /// The begin of the first commit that has to be synced. `None`: nothing needs a sync.
    since: Option<Instant>,
}

impl Unsynced {
    fn add(&mut self, answer: Unanswered, since: Instant) {
        self.answers.push(answer);
        self.since.get_or_insert(since);
    }

    /// Syncs the log if a request or an event needs that. Answers the requests, and publishes the events in the order of their commits.
    fn settle(self, journal: &mut Journal, shared: &Published) {
        let Unsynced { answers, events, since } = self;
        let synced = since.map_or(Ok(()), |since| {
            let synced = journal.sync();
            shared.counts.record(Durability::Disk, since.elapsed());
            synced
        });
        match &synced {
            // Before the answers, so that a caller with an answer sees the numbers of its events.
            Ok(()) => shared.sequence.store(journal.counters.sequence, Ordering::Release),
            Err(error) => _ = is_new_damage(journal, error, shared),
        }
        for answer in answers {
            let synced = synced.as_ref().map_err(copied).copied();
            match answer {
                Unanswered::Commit(answer, done) => drop(answer.send(synced.map(|()| done))),
                Unanswered::Sync(answer) => drop(answer.send(synced)),
            }
        }
        if synced.is_err() {
            return;
        }
        for event in events {
            // It is no error if there is no listener.
            drop(shared.events.send(event));
        }
        if let Err(error) = journal.checkpoint() {
            is_new_damage(journal, &error, shared);
        }
    }
}

/// Returns a failed sync's error for one more request.
fn copied(error: &StoreError) -> StoreError {
    match error {
        StoreError::Corrupt { path, why } => StoreError::Corrupt { path: path.clone(), why: why.clone() },
        _ => StoreError::Gone,
    }
}
