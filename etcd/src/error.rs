//! What goes wrong with etcd.

use std::time::Duration;

use csid::store::registry::RegistryError;

#[derive(Clone, Debug, thiserror::Error)]
pub enum EtcdError {
    #[error("{endpoint:?} is not an endpoint of etcd: {why}")]
    Endpoint { endpoint: String, why: String },
    #[error("{prefix:?} is not a prefix of keys: it does not begin and end with a slash")]
    Prefix { prefix: String },
    #[error("/dev/urandom cannot be read: {why}")]
    Random { why: String },
    /// No member gave an answer that decides the request.
    #[error("etcd gave no answer to \"{step}\" within {} s: {last}", waited.as_secs())]
    Unreachable { step: &'static str, waited: Duration, last: String },
    /// etcd refused the request, and would refuse it again.
    #[error("etcd at {member} refused to {step}: {why}")]
    Refused { step: &'static str, member: String, why: String },
    #[error("etcd's database has reached its quota; nothing was changed")]
    Full,
    /// The change may be made, or a member may still make it.
    #[error("{why}, and an earlier try of the change has not ended")]
    Open { why: &'static str },
    #[error("etcd at {member} found its data damaged: {why}")]
    Corrupt { member: String, why: String },
    /// The revision that a read or a watch needs is compacted.
    #[error("etcd has compacted the revision {revision}")]
    Compacted { revision: u64 },
    /// etcd has other data than this process has seen. What this process remembers is worth nothing.
    #[error("etcd was restored from a backup: {why}")]
    Restored { why: String },
    #[error("the cache of etcd's volumes has ended")]
    Ended,
    #[error("{what} has {size} {unit}, and the limit is {limit}")]
    TooLarge { what: String, size: usize, unit: &'static str, limit: usize },
    #[error("{what} has two attachments with the key {key}")]
    Twice { what: String, key: String },
    /// `why` may have a part of the value, and is not for logs.
    #[error("the value of etcd's key {key} is not csid's")]
    Unreadable { key: String, why: String },
}

impl EtcdError {
    /// Returns the key that cannot be read.
    pub(crate) fn key(self) -> Option<String> {
        match self {
            EtcdError::Unreadable { key, .. } => Some(key),
            _ => None,
        }
    }
}

impl From<EtcdError> for RegistryError {
    fn from(error: EtcdError) -> Self {
        let variant = match error {
            EtcdError::Full => RegistryError::Full,
            EtcdError::Unreachable { .. } | EtcdError::Open { .. } | EtcdError::Restored { .. } => {
                RegistryError::Unreachable
            }
            EtcdError::Ended => RegistryError::Ended,
            EtcdError::Corrupt { .. } => RegistryError::Damaged,
            _ => RegistryError::Failed,
        };
        variant(error.into())
    }
}
