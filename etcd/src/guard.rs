//! What a change requires of rows that it does not write.

use crate::keys::{Keys, RowKey};
use crate::operations::{has_revision, is_absent};
use crate::wire::compare::{CompareTarget, TargetUnion};
use crate::wire::{Compare, KeyValue};

/// A row has to be as the caller read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    pub key: RowKey,
    pub is: Expected,
}

/// The state of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    Absent,
    /// The row was created at this revision. It may have been written since.
    Created(u64),
    /// The row was written last at this revision.
    Revision(u64),
}

impl Guard {
    pub(crate) fn compare(&self, keys: &Keys) -> Compare {
        let key = keys.row(&self.key);
        match self.is {
            Expected::Absent => is_absent(key),
            Expected::Revision(revision) => has_revision(key, revision),
            Expected::Created(revision) => Compare {
                target: CompareTarget::Create.into(),
                key,
                // No key has the greatest revision.
                target_union: Some(TargetUnion::CreateRevision(i64::try_from(revision).unwrap_or(i64::MAX))),
                ..Compare::default()
            },
        }
    }

    /// Returns whether the row is as expected. `None` for `kv`: there is no such row.
    pub(crate) fn holds(&self, kv: Option<&KeyValue>) -> bool {
        let is = |revision: i64, expected: u64| u64::try_from(revision) == Ok(expected);
        match (self.is, kv) {
            (Expected::Absent, kv) => kv.is_none(),
            (_, None) => false,
            (Expected::Created(revision), Some(kv)) => is(kv.create_revision, revision),
            (Expected::Revision(revision), Some(kv)) => is(kv.mod_revision, revision),
        }
    }
}
