use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::error::{Error, Kind};

/// Why the kernel, or csid before it asked, refused.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Whether it was done is not known: look again.
    #[error("the kernel did not answer in time for {}; what serves its file system does not answer", .0.display())]
    Hung(PathBuf),
    /// Each holder is `PID COMMAND`, or `mount PATH` for one below.
    #[error("{} is in use{}", path.display(), list(holders))]
    Busy { path: PathBuf, holders: Vec<String> },
    #[error("something else is mounted at {}; unmount that first", .0.display())]
    Occupied(PathBuf),
    #[error("{} is not {wanted}", path.display())]
    WrongKind { path: PathBuf, wanted: &'static str },
    #[error("{} is not below {}", path.display(), root.display())]
    Outside { path: PathBuf, root: PathBuf },
    #[error("a symbolic link, or somebody renaming, is in the way to {}; name the directory itself", .0.display())]
    Link(PathBuf),
    #[error(
        "nothing is mounted at {} any more, so what is mounted at {} cannot be shown to be from there; \
         unmount it by hand, or by force",
        source_path.display(), path.display()
    )]
    Unproven { path: PathBuf, source_path: PathBuf },
    #[error("{} belongs to uid {uid}, not to csid", path.display())]
    Foreign { path: PathBuf, uid: u32 },
    #[error("cannot {step} {}", path.display())]
    Os { step: &'static str, path: PathBuf, source: std::io::Error },
}

fn list(holders: &[String]) -> String {
    if holders.is_empty() { String::new() } else { format!(" by {}", holders.join(", ")) }
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
            HostError::Busy { .. } | HostError::Occupied(_) | HostError::Unproven { .. } => Kind::Busy,
            HostError::WrongKind { .. } | HostError::Outside { .. } | HostError::Link(_) => {
                Kind::InvalidArgument
            }
            HostError::Os { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Kind::InvalidArgument
            }
            HostError::Hung(_) | HostError::Foreign { .. } | HostError::Os { .. } => Kind::Internal,
        };
        let text = match &error {
            HostError::Os { source, .. } => format!("{error}: {source}"),
            _ => error.to_string(),
        };
        let holders = match error {
            HostError::Busy { holders, .. } => holders,
            _ => Vec::new(),
        };
        Error::new(kind, text).with(|details| details.holders = holders)
    }
}

/// For `map_err`: which step failed, on which path.
pub(super) fn at(step: &'static str, path: &Path) -> impl FnOnce(Errno) -> HostError {
    move |error| match error {
        Errno::LOOP | Errno::AGAIN => HostError::Link(path.into()),
        error => HostError::Os { step, path: path.into(), source: error.into() },
    }
}
