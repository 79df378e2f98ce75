//! Why a call of an operator has no result.

use std::path::PathBuf;

use csi_proto::cluster::TRAILER;
use csi_proto::cluster::v1::Failure;
use prost::Message;
use serde::Serialize;
use tonic::{Code, Status};

use crate::output::plain;

/// A server that did not decide a call.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    /// HOST:PORT
    pub server: String,
    pub why: String,
}

/// Why an operator's call failed.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    #[error("{} cannot be read", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("key {} can be read by others than its owner: its mode is {mode:04o}, and 0600 is the limit", path.display())]
    OpenKey { path: PathBuf, mode: u32 },
    #[error("{} belongs to another user, or others can write to it", path.display())]
    Foreign { path: PathBuf },
    /// A server has decided the call.
    #[error("{message}")]
    Refused {
        /// A name of org.csid1.Error.
        kind: String,
        message: String,
        retryable: bool,
        /// Who has what was asked for: NODE/CONSUMER.
        holders: Vec<String>,
    },
    /// Nothing was changed.
    #[error("no server of the cluster {cluster} has done it{}", listed(skipped))]
    NoServer { cluster: String, skipped: Vec<Skipped> },
    /// A server may have done it.
    #[error("no server said whether it was done: {what}{}", listed(skipped))]
    Unknown { what: String, skipped: Vec<Skipped> },
}

fn listed(skipped: &[Skipped]) -> String {
    skipped.iter().map(|Skipped { server, why }| format!("\n{server}: {why}")).collect()
}

impl OperatorError {
    /// Returns the error's name for programs.
    pub fn name(&self) -> &str {
        match self {
            OperatorError::File { .. } | OperatorError::OpenKey { .. } | OperatorError::Foreign { .. } => {
                "InvalidArgument"
            }
            OperatorError::Refused { kind, .. } => kind,
            OperatorError::NoServer { .. } => "Unreachable",
            OperatorError::Unknown { .. } => "Uncertain",
        }
    }

    /// Returns who has what was asked for. Empty: nobody, or it is not known.
    pub fn holders(&self) -> &[String] {
        match self {
            OperatorError::Refused { holders, .. } => holders,
            _ => &[],
        }
    }

    /// Returns the servers that did not decide the call.
    pub fn skipped(&self) -> &[Skipped] {
        match self {
            OperatorError::NoServer { skipped, .. } | OperatorError::Unknown { skipped, .. } => skipped,
            _ => &[],
        }
    }

    /// Returns whether the same call may succeed later. `None`: it is not known.
    pub fn is_retryable(&self) -> Option<bool> {
        match self {
            OperatorError::Refused { retryable, .. } => Some(*retryable),
            OperatorError::NoServer { .. } | OperatorError::Unknown { .. } => Some(true),
            OperatorError::File { .. } | OperatorError::OpenKey { .. } | OperatorError::Foreign { .. } => {
                None
            }
        }
    }
}

/// What a call that failed says of its effect.
#[derive(Debug)]
pub enum Failed {
    /// The server has decided it.
    Refused(OperatorError),
    /// The server has done nothing.
    NotDone(String),
    /// The server may have done it.
    Unknown(String),
}

/// Reads a call's failure. `broken`: the first error of the connection, if it has one.
pub fn read(status: &Status, broken: Option<&str>) -> Failed {
    let trailer = status.metadata().get_bin(TRAILER).and_then(|value| value.to_bytes().ok());
    if let Some(Failure { kind, message, retryable, holders, .. }) =
        trailer.and_then(|bytes| Failure::decode(bytes).ok())
    {
        // A line break could make lines that look like those of csictl.
        let message = plain(&message);
        return match kind.as_str() {
            // Places are each server's own.
            "Unavailable" | "RateLimited" => Failed::NotDone(message),
            "Uncertain" => Failed::Unknown(message),
            _ => Failed::Refused(OperatorError::Refused { kind, message, retryable, holders }),
        };
    }
    match (status.code(), broken) {
        (Code::Unimplemented, _) => Failed::NotDone("the server is of an earlier version".to_owned()),
        // TLS 1.3 refuses a client's certificate after the client's half of the handshake. The server has read nothing then.
        (_, Some(broken)) if broken.contains("received fatal alert") => {
            Failed::NotDone(format!("the server refused the connection: {broken}"))
        }
        (_, Some(broken)) => Failed::Unknown(format!("the answer was lost: {broken}")),
        (_, None) => Failed::Unknown(format!(
            "the answer was lost: {}",
            with_sources(status.message().to_owned(), status)
        )),
    }
}

/// Returns the message of an error with those of its sources, without repetitions.
pub fn with_sources(mut text: String, error: &dyn std::error::Error) -> String {
    let mut source = error.source();
    while let Some(error) = source {
        let message = error.to_string();
        if !text.contains(&message) {
            text += &format!(": {message}");
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use tonic::metadata::{MetadataMap, MetadataValue};

    use super::*;

    fn status(kind: &str) -> Status {
        let failure = Failure { kind: kind.into(), message: "text".into(), ..Failure::default() };
        let mut metadata = MetadataMap::new();
        metadata.insert_bin(TRAILER, MetadataValue::from_bytes(&failure.encode_to_vec()));
        Status::with_metadata(Code::Aborted, "text", metadata)
    }

    #[test]
    fn failure_says_whether_the_call_was_done() {
        assert!(matches!(read(&status("Unavailable"), None), Failed::NotDone(_)));
        assert!(matches!(read(&status("Uncertain"), None), Failed::Unknown(_)));
        let Failed::Refused(error) = read(&status("Busy"), Some("broken pipe")) else { panic!() };
        assert_eq!((error.name(), error.to_string().as_str()), ("Busy", "text"));
        assert!(matches!(read(&Status::unimplemented(""), None), Failed::NotDone(_)));
        for lost in [Code::Unavailable, Code::Unknown, Code::Cancelled, Code::DeadlineExceeded] {
            let status = Status::new(lost, "the connection ended");
            assert!(matches!(read(&status, None), Failed::Unknown(_)), "{lost:?}");
            assert!(matches!(read(&status, Some("broken pipe")), Failed::Unknown(_)), "{lost:?}");
            let refused = read(&status, Some("received fatal alert: CertificateExpired"));
            assert!(matches!(refused, Failed::NotDone(_)), "{lost:?}");
        }
    }
}
