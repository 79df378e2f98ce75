//! The messages to the journal's thread.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio::sync::oneshot;

use crate::store::change::{Change, Durability};
use crate::store::error::StoreError;
use crate::store::held::HeldVolumes;
use crate::store::loaded::{Loaded, MountFilter};
use crate::store::record::{Record, VolumeName};
use crate::store::registry::{ClaimFilter, Conflict, ListedClaim, RecordFilter, Swap};
use crate::store::rows::{Event, MountRow, NewEvent, Phase, PluginRow};

pub(super) type StoreReply<T> = oneshot::Sender<Result<T, StoreError>>;

pub(super) enum StoreRequest {
    Commit(Commit),
    /// Makes all earlier commits durable, and those that are committed along with it.
    Sync(StoreReply<()>),
    Ask(Ask),
}

/// Answered with the index of the commit it was part of.
pub(super) struct Commit {
    pub work: Work,
    pub durability: Durability,
    pub answer: StoreReply<Result<u64, Conflict>>,
}

/// A change that is done whole or not at all.
pub(super) enum Work {
    Changes(Vec<Change>),
    /// A change of a record that only a [`Conflict`] refuses, with its events.
    Swap(Box<Swap>, Vec<NewEvent>),
}

pub(super) enum Ask {
    Mounts(Box<MountFilter>, StoreReply<Vec<(MountRow, String)>>),
    Phases(StoreReply<BTreeMap<Phase, u64>>),
    ClaimStates(StoreReply<BTreeMap<String, u64>>),
    Events(u64, u32, StoreReply<(Vec<Event>, bool)>),
    Record(VolumeName, StoreReply<Record>),
    Records(Box<RecordFilter>, StoreReply<(Vec<Record>, u64)>),
    Claims(Box<ClaimFilter>, StoreReply<(Vec<ListedClaim>, u64)>),
    /// Plugin, node, and how many names are wanted.
    Held(String, String, usize, StoreReply<HeldVolumes>),
    Rows(StoreReply<Loaded>),
    Plugins(StoreReply<Vec<PluginRow>>),
    Show(Vec<Change>, StoreReply<()>),
    Replace(Vec<Change>, StoreReply<PathBuf>),
    Ping(StoreReply<()>),
    Close(StoreReply<()>),
}
