//! What can go wrong, by the step that failed, and the gRPC code that says so to the caller.

use std::io;
use std::path::{Path, PathBuf};

use tonic::{Code, Status};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Invalid(String),
    #[error("there is no volume {0:?}; `csi-local list` shows those that are")]
    NoVolume(String),
    #[error("there is no snapshot {0:?}; `csi-local list` shows those that are")]
    NoSnapshot(String),
    #[error("there is no node {0:?}: volumes of this driver are attached only where it runs, on {1:?}")]
    NoNode(String, String),
    #[error("volume {id} is not at {path}")]
    NotThere { id: String, path: PathBuf },
    #[error("{0}")]
    Exists(String),
    #[error("{0}")]
    OutOfRange(String),
    #[error("{0}")]
    NotOnThisNode(String),
    #[error("{0}")]
    Full(String),
    #[error("{0}")]
    Precondition(String),
    #[error("another call for volume {0} is still at work; try again when it has ended")]
    Busy(String),
    #[error("the list token is not one of ours; start again with an empty one")]
    Token,
    #[error("{step} {path}: {source}")]
    Io { step: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} cannot be read: {source}; restore it, or the volume cannot be used")]
    Meta { path: PathBuf, source: serde_json::Error },
    #[error("{tool} cannot be run: {source}; install {package}")]
    NoTool { tool: &'static str, package: &'static str, source: io::Error },
    #[error("{tool} failed ({status}): {output}")]
    Tool { tool: &'static str, status: std::process::ExitStatus, output: String },
}

impl Error {
    fn code(&self) -> Code {
        match self {
            Error::Invalid(_) => Code::InvalidArgument,
            Error::NoVolume(_) | Error::NoSnapshot(_) | Error::NoNode(..) | Error::NotThere { .. } => {
                Code::NotFound
            }
            Error::Exists(_) => Code::AlreadyExists,
            Error::OutOfRange(_) => Code::OutOfRange,
            Error::NotOnThisNode(_) | Error::Full(_) => Code::ResourceExhausted,
            Error::Precondition(_) | Error::NoTool { .. } => Code::FailedPrecondition,
            Error::Busy(_) | Error::Token => Code::Aborted,
            Error::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Code::ResourceExhausted
            }
            Error::Io { .. } | Error::Meta { .. } | Error::Tool { .. } => Code::Internal,
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Status::new(error.code(), error.to_string())
    }
}

/// Names the step and the path of an I/O error.
pub trait At<T> {
    fn at(self, step: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, step: &'static str, path: &Path) -> Result<T> {
        self.map_err(|e| Error::Io { step, path: path.to_owned(), source: e.into() })
    }
}
