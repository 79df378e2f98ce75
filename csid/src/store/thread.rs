//! The thread that owns the journal. What waits together is committed together; reads come after the commits
//! they waited with.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;

use tokio::sync::oneshot;

use super::journal::Journal;
use super::rows::{Event, MountRow, Phase};
use super::{Change, Durability, Health, Loaded, MountFilter, Shared, StoreError};

/// Commits in one transaction at most; a bound on how long the first of them waits.
const GROUP: usize = 512;

pub(super) type Answer<T> = oneshot::Sender<Result<T, StoreError>>;

pub(super) enum Request {
    Commit(Commit),
    Ask(Ask),
}

pub(super) struct Commit {
    pub changes: Vec<Change>,
    pub durability: Durability,
    pub answer: Answer<()>,
}

pub(super) enum Ask {
    Mounts(MountFilter, Answer<Vec<(MountRow, String)>>),
    Phases(Answer<BTreeMap<Phase, u64>>),
    Events(u64, u32, Answer<(Vec<Event>, bool)>),
    Rows(Answer<Loaded>),
    Show(Vec<Change>, Answer<()>),
    Replace(Vec<Change>, Answer<PathBuf>),
    Ping(Answer<()>),
    Close(Answer<()>),
}

/// Serve until `Close`, or until the last handle is gone. An answer that nobody waits for any more is
/// dropped: the commit stands.
pub(super) fn run(mut journal: Journal, requests: Receiver<Request>, shared: &Shared) {
    while let Ok(first) = requests.recv() {
        let (mut group, mut asks) = (Vec::new(), Vec::new());
        let mut next = Some(first);
        while let Some(request) = next {
            match request {
                Request::Commit(commit) => group.push(commit),
                Request::Ask(ask) => asks.push(ask),
            }
            next = if group.len() < GROUP { requests.try_recv().ok() } else { None };
        }
        if !group.is_empty() {
            settle(&mut journal, group, shared);
        }
        for ask in asks {
            match ask {
                Ask::Mounts(filter, answer) => {
                    read(&mut journal, shared, answer, |from| from.mounts(&filter))
                }
                Ask::Phases(answer) => read(&mut journal, shared, answer, Journal::phases),
                Ask::Events(since, max, answer) => {
                    read(&mut journal, shared, answer, |from| from.events(since, max));
                }
                Ask::Rows(answer) => read(&mut journal, shared, answer, Journal::rows),
                Ask::Show(changes, answer) => drop(answer.send(journal.show(&changes))),
                Ask::Replace(changes, answer) => {
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
    shared: &Shared,
    answer: Answer<T>,
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

/// Whether this error is the first that says that the file is damaged; then it is not used any more.
fn is_new_damage(journal: &mut Journal, error: &StoreError, shared: &Shared) -> bool {
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

pub(super) fn tell_health(journal: &Journal, shared: &Shared) {
    if let Some(damage) = journal.damage() {
        tracing::error!("{damage}");
        shared.health.send_replace(Health::Damaged(damage.to_string()));
    }
}

fn settle(journal: &mut Journal, group: Vec<Commit>, shared: &Shared) {
    let disk = group.iter().any(|commit| commit.durability == Durability::Disk);
    let durability = if disk { Durability::Disk } else { Durability::Process };
    let changes: Vec<&[Change]> = group.iter().map(|commit| commit.changes.as_slice()).collect();
    match journal.commit(&changes, durability) {
        Ok(events) => {
            shared.modify_index.store(journal.counters.modify_index, Ordering::Release);
            shared.sequence.store(journal.counters.sequence, Ordering::Release);
            for commit in group {
                drop(commit.answer.send(Ok(())));
            }
            for event in events {
                // Nobody listening is no error.
                drop(shared.events.send(Arc::clone(&event)));
            }
        }
        Err(error) => match <[Commit; 1]>::try_from(group) {
            Ok([alone]) => {
                is_new_damage(journal, &error, shared);
                drop(alone.answer.send(Err(error)));
            }
            // One bad request must not fail its neighbours.
            Err(group) => group.into_iter().for_each(|commit| settle(journal, vec![commit], shared)),
        },
    }
}
