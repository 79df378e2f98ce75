//! What can go wrong with a call, and csid's own errors with their details.

use std::{collections::HashMap, fmt, path::PathBuf};

use serde::Serialize;
use zbus::{OwnedVariant, fdo};

pub type Result<T> = std::result::Result<T, Error>;

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// csid answered with an error of the contract.
    #[error(transparent)]
    Csid(Box<CsidError>),
    /// Neither the private socket nor the bus could be reached.
    #[error("cannot reach csid: {0}")]
    Connect(Connecting),
    /// The bus is there, csid is not and could not be started.
    #[error("csid is not running: {0}")]
    NotRunning(String),
    /// The bus itself refused the call before csid saw it.
    #[error("the bus refused the call: {0}")]
    Refused(String),
    /// The connection ended before the answer. The operation, if csid has it, goes on.
    #[error("the connection to csid ended before its answer: {0}")]
    Disconnected(String),
    /// A [`crate::Session`] could not have an answer before the call's deadline. The operation, if csid has it, goes on.
    #[error("no answer from csid before the deadline{}", last.as_ref().map(|last| format!("; last: {last}")).unwrap_or_default())]
    NoAnswer { last: Option<Box<Error>> },
    /// Nobody waits for it any more, and csid has never heard of it.
    #[error("the call was withdrawn before it was sent")]
    Withdrawn,
    /// This csid does not serve the member; its `Features` say what it serves.
    #[error("this csid does not serve {member}: {message}")]
    NotServed { member: String, message: String },
    /// Something on the way that is no answer of csid's: a wrong type, a broken message.
    #[error("{member} failed on D-Bus")]
    Bus { member: String, source: zbus::Error },
}

/// How each way to csid failed, in the order tried.
#[derive(Debug)]
pub struct Connecting {
    pub socket: Option<(PathBuf, zbus::Error)>,
    pub bus: Option<zbus::Error>,
}

impl fmt::Display for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        if let Some((path, error)) = &self.socket {
            write!(f, "{}: {}", path.display(), reason(error))?;
            between = "; ";
        }
        if let Some(error) = &self.bus {
            write!(f, "{between}system bus: {}", reason(error))?;
        }
        Ok(())
    }
}

/// zbus' own text repeats the address, which stands before it already.
fn reason(error: &zbus::Error) -> String {
    match error {
        zbus::Error::Connection(io, _) | zbus::Error::InputOutput(io) => io.to_string(),
        other => other.to_string(),
    }
}

/// `org.csid1.Error.*`, without the prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    InvalidArgument,
    NotFound,
    AlreadyExists,
    Busy,
    ClaimConflict,
    PluginUnavailable,
    PluginShutdown,
    PluginError,
    NotSupported,
    NotAuthorized,
    Cancelled,
    TimedOut,
    Uncertain,
    RateLimited,
    SecretRequired,
    ShuttingDown,
    StateCorrupt,
    Internal,
    /// A name that this version of the client does not know.
    Other(String),
}

const KINDS: [(&str, Kind); 18] = [
    ("InvalidArgument", Kind::InvalidArgument),
    ("NotFound", Kind::NotFound),
    ("AlreadyExists", Kind::AlreadyExists),
    ("Busy", Kind::Busy),
    ("ClaimConflict", Kind::ClaimConflict),
    ("PluginUnavailable", Kind::PluginUnavailable),
    ("PluginShutdown", Kind::PluginShutdown),
    ("PluginError", Kind::PluginError),
    ("NotSupported", Kind::NotSupported),
    ("NotAuthorized", Kind::NotAuthorized),
    ("Cancelled", Kind::Cancelled),
    ("TimedOut", Kind::TimedOut),
    ("Uncertain", Kind::Uncertain),
    ("RateLimited", Kind::RateLimited),
    ("SecretRequired", Kind::SecretRequired),
    ("ShuttingDown", Kind::ShuttingDown),
    ("StateCorrupt", Kind::StateCorrupt),
    ("Internal", Kind::Internal),
];

impl Kind {
    pub fn name(&self) -> &str {
        match self {
            Self::Other(name) => name,
            known => KINDS.iter().find(|(_, kind)| kind == known).map_or("Internal", |(name, _)| name),
        }
    }

    fn from_name(name: &str) -> Self {
        KINDS
            .iter()
            .find(|(known, _)| *known == name)
            .map_or_else(|| Self::Other(name.to_owned()), |(_, kind)| kind.clone())
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An error of csid's: which, in words, and the facts.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{kind}: {message}")]
pub struct CsidError {
    pub kind: Kind,
    pub message: String,
    pub details: Details,
}

/// The contract's details; a fact that does not apply is absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Details {
    /// The CSI call, `NodeStageVolume`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rpc: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grpc_code: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin_message: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retryable: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin: Option<String>,
    /// Who is in the way: consumers, units or processes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<String>,
    /// What csid was doing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

impl Details {
    /// A value of the wrong type is left out: an error must not be hidden by an error about it.
    fn from_map(mut map: HashMap<String, OwnedVariant>) -> Self {
        fn take<T: TryFrom<OwnedVariant>>(map: &mut HashMap<String, OwnedVariant>, key: &str) -> Option<T> {
            map.remove(key).and_then(|value| T::try_from(value).ok())
        }
        Self {
            rpc: take(&mut map, "rpc"),
            grpc_code: take(&mut map, "grpc-code"),
            plugin_message: take(&mut map, "plugin-message"),
            retryable: take(&mut map, "retryable"),
            operation: take(&mut map, "operation"),
            namespace: take(&mut map, "namespace"),
            volume: take(&mut map, "volume"),
            plugin: take(&mut map, "plugin"),
            holders: take(&mut map, "holders").unwrap_or_default(),
            step: take(&mut map, "step"),
        }
    }
}

impl Error {
    /// csid's error, when it is one.
    pub fn csid(&self) -> Option<&CsidError> {
        match self {
            Self::Csid(error) => Some(error),
            _ => None,
        }
    }

    /// Whether csid went away, so that the same call can be asked of the next: repeating one is safe.
    pub fn lost(&self) -> bool {
        match self {
            Self::Connect(_) | Self::NotRunning(_) | Self::Disconnected(_) => true,
            Self::Csid(error) => error.kind == Kind::ShuttingDown,
            _ => false,
        }
    }

    pub(crate) fn from_call(member: &str, error: zbus::Error) -> Self {
        let member = member.to_owned();
        match error {
            // The bus had systemd start it: UnitMasked, NoSuchUnit.
            zbus::Error::MethodError(name, description, _)
                if name.as_str().starts_with("org.freedesktop.systemd1.") =>
            {
                Self::NotRunning(description.unwrap_or_else(|| name.to_string()))
            }
            zbus::Error::MethodError(name, description, reply) => {
                let Some(kind) = name.as_str().strip_prefix("org.csid1.Error.") else {
                    return Self::Bus { member, source: zbus::Error::MethodError(name, description, reply) };
                };
                let body = reply.body();
                let (message, details) = match body.deserialize::<(String, HashMap<String, OwnedVariant>)>() {
                    Ok((message, details)) => (message, Details::from_map(details)),
                    Err(_) => (description.unwrap_or_default(), Details::default()),
                };
                Self::Csid(Box::new(CsidError { kind: Kind::from_name(kind), message, details }))
            }
            zbus::Error::FDO(error) => match *error {
                fdo::Error::ServiceUnknown(message)
                | fdo::Error::NameHasNoOwner(message)
                | fdo::Error::SpawnChildExited(message)
                | fdo::Error::SpawnFailed(message)
                | fdo::Error::TimedOut(message) => Self::NotRunning(message),
                fdo::Error::AccessDenied(message)
                | fdo::Error::AuthFailed(message)
                | fdo::Error::LimitsExceeded(message) => Self::Refused(message),
                fdo::Error::NoReply(message) | fdo::Error::Disconnected(message) => {
                    Self::Disconnected(message)
                }
                fdo::Error::UnknownMethod(message)
                | fdo::Error::UnknownInterface(message)
                | fdo::Error::UnknownProperty(message) => Self::NotServed { member, message },
                // The only object that may be missing is a plugin's.
                fdo::Error::UnknownObject(message) => Self::Csid(Box::new(CsidError {
                    kind: Kind::NotFound,
                    message,
                    details: Details::default(),
                })),
                other => Self::Bus { member, source: other.into() },
            },
            zbus::Error::InputOutput(io) => Self::Disconnected(io.to_string()),
            source => Self::Bus { member, source },
        }
    }
}
