use std::borrow::Cow;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Obstacle, shown};

/// Why the kernel, or csid before it asked, refused.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum HostError {
    /// Whether it was done is not known: look again.
    #[error("the kernel did not answer in time for {}; what serves its file system does not answer", shown(.0))]
    Hung(PathBuf),
    /// Likewise.
    #[error("csid's helper did not answer for {}: {source}", shown(path))]
    Helper {
        path: PathBuf,
        #[serde(with = "number")]
        source: std::io::Error,
    },
    /// Each holder is `PID COMMAND`, or `mount PATH` for one below.
    #[error("{} is in use{}", shown(path), list(holders))]
    Busy { path: PathBuf, holders: Vec<String> },
    #[error("something else is mounted at {}", shown(.0))]
    Occupied(PathBuf),
    #[error("{} is not {wanted}", shown(path))]
    WrongKind { path: PathBuf, wanted: Cow<'static, str> },
    #[error("{} is not below {}", shown(path), shown(root))]
    Outside { path: PathBuf, root: PathBuf },
    #[error("a symbolic link or a rename is in the way to {}", shown(.0))]
    Link(PathBuf),
    #[error(
        "nothing is mounted at {} any more, so what is mounted at {} cannot be shown to be from there",
        shown(source_path),
        shown(path)
    )]
    Unproven { path: PathBuf, source_path: PathBuf },
    /// The tmpfs in which csid makes the directories of mounts has no room.
    #[error("cannot create {}: the tmpfs at {} has no free space or no free inode", shown(path), shown(live))]
    LiveFull { path: PathBuf, live: PathBuf },
    #[error("{} belongs to uid {uid}, not to csid", shown(path))]
    Foreign { path: PathBuf, uid: u32 },
    #[error("{} is an automount point, which waits for the mount that it asked for", shown(.0))]
    Automount(PathBuf),
    /// Nothing was done, since a walk to the path waits until the automount's daemon has mounted or unmounted.
    #[error("an automount is under way at {}; csid cannot go there before it ends", shown(.0))]
    AutomountPending(PathBuf),
    #[error("target-fd is no descriptor of {}: {why}", shown(path))]
    NotTarget { path: PathBuf, why: Cow<'static, str> },
    #[error("userns is no descriptor of a user namespace to map owners by: {why}")]
    NotUserNamespace { why: Cow<'static, str> },
    /// The kernel has one error number for both.
    #[error(
        "the kernel cannot map the owners of files at {}: its file system does not support it, or the user namespace of \
         userns maps no uid or no gid",
        shown(.0)
    )]
    NotIdMapped(PathBuf),
    #[error(
        "the owners of files at {} cannot be mapped: its mount is ID-mapped already, or csid has no right in the user \
         namespace of userns or that of its file system",
        shown(.0)
    )]
    NotIdMappable(PathBuf),
    /// A `target-fd` has to be of the directory that the volume covered.
    #[error("the volume is still mounted at {}", shown(.0))]
    StillBound(PathBuf),
    /// A target, or a directory on the way to it, that uid `uid` may not have covered. `owner`: whose it is, where that is why;
    /// `None`: others may write there.
    #[error("{} {} uid {uid} and root", shown(path), others(*owner))]
    Others { path: PathBuf, owner: Option<u32>, uid: u32 },
    /// Nothing was changed, and the next search may succeed.
    #[error("cannot search other mount namespaces: {0}")]
    Search(Cow<'static, str>),
    #[error("cannot {step} {}: {source}", shown(path))]
    Os {
        step: Cow<'static, str>,
        path: PathBuf,
        #[serde(with = "number")]
        source: std::io::Error,
    },
}

fn list(holders: &[String]) -> String {
    if holders.is_empty() { String::new() } else { format!(" by {}", holders.join(", ")) }
}

fn others(owner: Option<u32>) -> String {
    match owner {
        Some(owner) => format!("belongs to uid {owner}; a target and the way to it have to be of"),
        None => "can be written by others than".to_owned(),
    }
}

impl HostError {
    /// The system's error number, where that is what failed.
    pub fn errno(&self) -> Option<i32> {
        match self {
            HostError::Os { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

impl From<HostError> for Error {
    fn from(error: HostError) -> Self {
        let kind = match &error {
            HostError::Busy { .. }
            | HostError::Occupied(_)
            | HostError::Unproven { .. }
            | HostError::AutomountPending(_)
            | HostError::StillBound(_) => Kind::Busy,
            HostError::WrongKind { .. }
            | HostError::Outside { .. }
            | HostError::Link(_)
            | HostError::Automount(_)
            | HostError::NotTarget { .. }
            | HostError::NotUserNamespace { .. } => Kind::InvalidArgument,
            HostError::NotIdMapped(_) | HostError::NotIdMappable(_) => Kind::NotSupported,
            HostError::Others { .. } => Kind::NotAuthorized,
            HostError::Os { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Kind::InvalidArgument
            }
            HostError::Hung(_)
            | HostError::Helper { .. }
            | HostError::Search(_)
            | HostError::Foreign { .. }
            | HostError::LiveFull { .. }
            | HostError::Os { .. } => Kind::Internal,
        };
        let obstacle = match &error {
            HostError::Link(_) => Some(Obstacle::SymbolicLink),
            HostError::StillBound(_) => Some(Obstacle::BoundTarget),
            _ => None,
        };
        let (text, is_search) = (error.to_string(), matches!(error, HostError::Search(_)));
        let holders = match error {
            HostError::Busy { holders, .. } => holders,
            _ => Vec::new(),
        };
        Error::new(kind, text).with(|details| {
            details.holders = holders;
            details.obstacle = obstacle;
            details.retryable |= is_search;
        })
    }
}

/// For `map_err`: which step failed, on which path.
pub(super) fn at(step: &'static str, path: &Path) -> impl FnOnce(Errno) -> HostError {
    move |error| match error {
        Errno::LOOP | Errno::AGAIN => HostError::Link(path.into()),
        error => HostError::Os { step: step.into(), path: path.into(), source: error.into() },
    }
}

/// A system error as its number.
mod number {
    use std::io::Error;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(error: &Error, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_i32(error.raw_os_error().unwrap_or(libc::EIO))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Error, D::Error> {
        i32::deserialize(from).map(Error::from_raw_os_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_that_cannot_be_used_has_an_obstacle() {
        let obstacle = |error: HostError| Error::from(error).details.obstacle;
        assert_eq!(obstacle(HostError::Link("/srv".into())), Some(Obstacle::SymbolicLink));
        assert_eq!(obstacle(HostError::StillBound("/srv".into())), Some(Obstacle::BoundTarget));
        assert_eq!(obstacle(HostError::Hung("/srv".into())), None);
    }

    #[test]
    fn log_and_answer_name_the_cause_of_a_host_error() {
        let source = || std::io::Error::from_raw_os_error(libc::EMFILE);
        let path = || PathBuf::from("/srv");
        for (error, text) in [
            (HostError::Os { step: "open".into(), path: path(), source: source() }, "cannot open /srv"),
            (HostError::Helper { path: path(), source: source() }, "csid's helper did not answer for /srv"),
        ] {
            let logged = error.to_string();
            assert_eq!(logged, format!("{text}: {}", source()));
            assert_eq!(Error::from(error).message, logged);
        }
    }

    #[test]
    fn error_echoes_256_bytes_of_a_path() {
        let path = PathBuf::from(format!("/srv{}", "/a b".repeat(1000)));
        let errors = [
            HostError::Hung(path.clone()),
            HostError::Busy { path: path.clone(), holders: Vec::new() },
            HostError::Occupied(path.clone()),
            HostError::Outside { path: path.clone(), root: "/r".into() },
            HostError::Link(path.clone()),
            HostError::Others { path: path.clone(), owner: Some(7), uid: 8 },
            HostError::Os { step: "open".into(), path, source: std::io::ErrorKind::NotFound.into() },
        ];
        for error in errors {
            let text = Error::from(error).message;
            assert!(text.matches("/a b").count() * 4 <= 256 && text.len() < 512, "{text:.512}");
        }
    }
}
