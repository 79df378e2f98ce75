use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

/// Why the journal did not do what was asked. Whatever it says, nothing of the request is kept.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the journal's thread has ended")]
    Gone,
    #[error(
        "the journal {} is damaged: {why}. What is mounted stays, and csid refuses every change",
        path.display()
    )]
    Corrupt { path: PathBuf, why: String },
    #[error(
        "the journal {} is of schema version {found}, and this csid knows up to {known}: csid leaves it as it is",
        path.display()
    )]
    Newer { path: PathBuf, found: u32, known: u32 },
    #[error("{} is not safe to keep the journal in: {why}", path.display())]
    Unsafe { path: PathBuf, why: String },
    #[error("another process holds the journal {}", path.display())]
    Held { path: PathBuf },
    #[error("no space is left on the disk of csid's journal; nothing was changed")]
    Full,
    #[error("cannot {step} {}: {source}", path.display())]
    File { step: &'static str, path: PathBuf, source: std::io::Error },
    #[error("the journal could not {step}: {source}")]
    Sql { step: &'static str, source: rusqlite::Error },
}

impl StoreError {
    /// The same request may succeed later without a change by the caller.
    pub fn is_retryable(&self) -> bool {
        matches!(self, StoreError::Full)
    }

    /// Name the file in an error that only the file's owner can tell apart: SQLite's codes for a damaged
    /// file, and a row that cannot be read as what it is.
    pub(super) fn of(self, path: &Path) -> Self {
        use rusqlite::Error::{FromSqlConversionFailure, IntegralValueOutOfRange, InvalidColumnType};
        let StoreError::Sql { step, source } = self else { return self };
        let corrupt = match &source {
            FromSqlConversionFailure(..) | IntegralValueOutOfRange(..) | InvalidColumnType(..) => true,
            other => {
                matches!(
                    other.sqlite_error_code(),
                    Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
                ) || other.sqlite_extended_error_code() == Some(SHORT_READ)
            }
        };
        match source.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy) => StoreError::Held { path: path.into() },
            _ if corrupt => {
                StoreError::Corrupt { path: path.into(), why: format!("cannot {step}: {source}") }
            }
            _ => StoreError::Sql { step, source },
        }
    }

    /// The same of a file that has not been found sound yet: what does not answer csid's own questions as a
    /// journal does is none. What the disk or the machine refuses says nothing about it.
    pub(super) fn of_unknown(self, path: &Path) -> Self {
        use ErrorCode::{CannotOpen, DiskFull, OutOfMemory, PermissionDenied, ReadOnly, SystemIoFailure};
        match self.of(path) {
            StoreError::Sql { step, source }
                if !matches!(
                    source.sqlite_error_code(),
                    Some(CannotOpen | DiskFull | OutOfMemory | PermissionDenied | ReadOnly | SystemIoFailure)
                ) =>
            {
                StoreError::Corrupt { path: path.into(), why: format!("cannot {step}: {source}") }
            }
            other => other,
        }
    }
}

/// SQLITE_IOERR_SHORT_READ: the file is shorter than it says.
const SHORT_READ: i32 = 522;

/// For `map_err`: which step of the journal's failed.
pub(super) fn at(step: &'static str) -> impl FnOnce(rusqlite::Error) -> StoreError {
    move |source| match source.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => StoreError::Full,
        _ => StoreError::Sql { step, source },
    }
}

/// For `map_err`: which step on which file failed.
pub(super) fn file(step: &'static str, path: &Path) -> impl FnOnce(rustix::io::Errno) -> StoreError {
    move |source| match source {
        rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT => StoreError::Full,
        _ => StoreError::File { step, path: path.into(), source: source.into() },
    }
}

impl From<StoreError> for crate::Error {
    fn from(error: StoreError) -> Self {
        use crate::{Error, Kind};
        let kind = match error {
            StoreError::Corrupt { .. } => Kind::StateCorrupt,
            StoreError::Gone => Kind::ShuttingDown,
            _ => Kind::Internal,
        };
        let retryable = error.is_retryable();
        Error::new(kind, error.to_string()).with(|details| details.retryable |= retryable)
    }
}

#[cfg(test)]
mod tests {
    use crate::Error;
    use crate::store::registry::RegistryError;

    use super::*;

    #[test]
    fn answer_names_the_cause_of_a_store_error() {
        let file = || StoreError::File {
            step: "open",
            path: "/var/lib/csid".into(),
            source: std::io::Error::from_raw_os_error(libc::EMFILE),
        };
        let sql = || at("write a mount")(rusqlite::Error::ExecuteReturnedResults);
        for answer in [Error::from(file()), Error::from(RegistryError::from(file()))] {
            assert!(answer.message.starts_with("cannot open /var/lib/csid: Too many open files"), "{answer}");
        }
        for answer in [Error::from(sql()), Error::from(RegistryError::from(sql()))] {
            let cause = rusqlite::Error::ExecuteReturnedResults;
            assert_eq!(answer.message, format!("the journal could not write a mount: {cause}"));
        }
    }
}
