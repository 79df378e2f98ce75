//! What a change requires of rows that it does not write.

use crate::keys::{Keys, RowKey};
use crate::operations::{has_revision, is_absent, touch};
use crate::wire::compare::{CompareTarget, TargetUnion};
use crate::wire::{Compare, KeyValue, RequestOp};

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
    /// The same, and the change writes the row again with its value. So it fails each change of the row that was begun before.
    Touched(u64),
}

impl Guard {
    pub(crate) fn compare(&self, keys: &Keys) -> Compare {
        let key = keys.row(&self.key);
        match self.is {
            Expected::Absent => is_absent(key),
            Expected::Revision(revision) | Expected::Touched(revision) => has_revision(key, revision),
            Expected::Created(revision) => Compare {
                target: CompareTarget::Create.into(),
                key,
                // No key has the greatest revision.
                target_union: Some(TargetUnion::CreateRevision(i64::try_from(revision).unwrap_or(i64::MAX))),
                ..Compare::default()
            },
        }
    }

    /// Returns what the change writes for the guard. `None`: nothing.
    pub(crate) fn write(&self, keys: &Keys) -> Option<RequestOp> {
        matches!(self.is, Expected::Touched(_)).then(|| touch(keys.row(&self.key)))
    }

    /// Returns whether the row is as expected. `None` for `kv`: there is no such row.
    pub(crate) fn holds(&self, kv: Option<&KeyValue>) -> bool {
        let is = |revision: i64, expected: u64| u64::try_from(revision) == Ok(expected);
        match (self.is, kv) {
            (Expected::Absent, kv) => kv.is_none(),
            (_, None) => false,
            (Expected::Created(revision), Some(kv)) => is(kv.create_revision, revision),
            (Expected::Revision(revision) | Expected::Touched(revision), Some(kv)) => {
                is(kv.mod_revision, revision)
            }
        }
    }
}
