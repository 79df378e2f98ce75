//! Limits of what a change may write. They are checked before etcd is asked, and are below etcd's own: 128 operations and 1.5 MiB.

use crate::error::EtcdError;

const KIB: usize = 1024;
/// The limit of a value that has only names.
pub(crate) const HEAD: usize = 32 * KIB;
/// The limit of a row that is not a volume's.
pub(crate) const ROW: usize = 64 * KIB;
pub(crate) const REGISTRATION: usize = 64 * KIB;
pub(crate) const ATTACHMENT: usize = 32 * KIB;
/// A claim of csid may have a plugin's message of 2,048 bytes twice. JSON doubles its quotes.
pub(crate) const CLAIM: usize = 16 * KIB;
pub(crate) const OPERATIONS: usize = 100;
pub(crate) const TRANSACTION: usize = 512 * KIB;

/// Returns an error if a size is above its limit. `what` is called for the error alone.
pub(crate) fn check(
    what: impl FnOnce() -> String,
    size: usize,
    unit: &'static str,
    limit: usize,
) -> Result<(), EtcdError> {
    match size > limit {
        true => Err(EtcdError::TooLarge { what: what(), size, unit, limit }),
        false => Ok(()),
    }
}
