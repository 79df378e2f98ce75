//! Errors of calls, and csid's own errors with their details.

use std::{collections::HashMap, fmt, io, path::PathBuf};

use serde::Serialize;
use zbus::{OwnedVariant, fdo};

/// The result of a call.
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
    /// The bus is there, but csid is not and could not be started.
    #[error("csid is not running: {message}")]
    NotRunning {
        /// The message of the bus.
        message: String,
        /// Whether csid's unit is masked, so that the bus cannot start it.
        masked: bool,
    },
    /// The bus refused the call before it reached csid.
    #[error("the bus refused the call: {0}")]
    Refused(String),
    /// The connection ended before the answer. If csid received the operation, it continues.
    #[error("the connection to csid ended before its answer: {0}")]
    Disconnected(String),
    /// A [`crate::Session`] had no answer before the call's deadline. If csid received the operation, it continues.
    #[error("no answer from csid before the deadline{}", last.as_ref().map(|last| format!("; last: {last}")).unwrap_or_default())]
    NoAnswer {
        /// The last error on the way. `None`: csid did not answer the first try.
        last: Option<Box<Error>>,
    },
    /// The call was withdrawn before it was sent: see [`crate::Client::unless`].
    #[error("the call was withdrawn before it was sent")]
    Withdrawn,
    /// This csid does not serve the member. [`crate::Manager::features`] says what it serves.
    #[error("this csid does not serve {member}: {message}")]
    NotServed {
        /// The member of the contract.
        member: String,
        /// The message of D-Bus.
        message: String,
    },
    /// Something on the way is not an answer of csid: a wrong type, a broken message.
    #[error("{member} failed on D-Bus")]
    Bus {
        /// The member of the contract.
        member: String,
        /// The error of D-Bus.
        source: zbus::Error,
    },
}

/// How each way to csid failed, in the order tried.
#[derive(Debug)]
pub struct Connecting {
    /// The path of the private socket, and why it failed. `None`: it was not tried.
    pub socket: Option<(PathBuf, zbus::Error)>,
    /// Why the system bus failed. `None`: it was not tried.
    pub bus: Option<zbus::Error>,
}

impl Connecting {
    /// Returns whether the private socket refused the caller for want of permission.
    pub fn socket_denied(&self) -> bool {
        match &self.socket {
            Some((_, zbus::Error::Connection(io, _) | zbus::Error::InputOutput(io))) => {
                io.kind() == io::ErrorKind::PermissionDenied
            }
            _ => false,
        }
    }
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

/// Returns an error's text without the address, which the message has already.
fn reason(error: &zbus::Error) -> String {
    match error {
        zbus::Error::Connection(io, _) | zbus::Error::InputOutput(io) => io.to_string(),
        other => other.to_string(),
    }
}

/// The kind of an error: `org.csid1.Error.*`, without the prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// An argument is wrong. Nothing was started.
    InvalidArgument,
    /// The object does not exist.
    NotFound,
    /// The same identity exists with other options, or the name or path belongs to something else.
    AlreadyExists,
    /// Something is in use; [`Details::holders`] lists the users.
    Busy,
    /// Another consumer's claim or mount is in the way, the plugin takes no more volumes on this node, or this
    /// node cannot reach the volume.
    ClaimConflict,
    /// The plugin did not become ready before the deadline, or it is not connected.
    PluginUnavailable,
    /// The plugin stopped during the call, or it is stopping.
    PluginShutdown,
    /// The plugin answered with an error; see [`Details::rpc`], [`Details::grpc_code`] and
    /// [`Details::plugin_message`].
    PluginError,
    /// The plugin or this csid cannot do this.
    NotSupported,
    /// The caller is not allowed to do this.
    NotAuthorized,
    /// The operation was cancelled, or another call ended it, as Unmount ends a Mount in progress.
    Cancelled,
    /// The deadline passed.
    TimedOut,
    /// The effect of an earlier plugin call is not known yet. Repeat the call, or undo it.
    Uncertain,
    /// The caller has as many operations, mounts or claims as one user may have.
    RateLimited,
    /// The plugin needs the volume's secrets again.
    SecretRequired,
    /// csid is stopping. The next csid takes the same call.
    ShuttingDown,
    /// csid's journal is damaged. csid makes no change until an administrator starts a new journal.
    StateCorrupt,
    /// This host is in a cluster, and no server of the cluster can be asked now. The same call may succeed later.
    Unavailable,
    /// A defect or a lack of resources in csid.
    Internal,
    /// A name that this version of the client does not know.
    Other(String),
}

const KINDS: [(&str, Kind); 19] = [
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
    ("Unavailable", Kind::Unavailable),
    ("Internal", Kind::Internal),
];

impl Kind {
    /// Returns the name of the kind in the contract.
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

/// An error of csid: its kind, a message and the facts.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{kind}: {message}")]
pub struct CsidError {
    /// The kind of the error.
    pub kind: Kind,
    /// The failure, for people.
    pub message: String,
    /// The facts.
    pub details: Details,
}

/// The details of an error. A fact that does not apply is absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Details {
    /// The CSI call that failed, such as `NodeStageVolume`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rpc: Option<String>,
    /// The gRPC code that the plugin answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grpc_code: Option<u32>,
    /// The plugin's own message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin_message: Option<String>,
    /// Whether the same call may succeed later without any other change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retryable: Option<bool>,
    /// The ID of the operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// The namespace of the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The name of the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The plugin's ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin: Option<String>,
    /// The consumers, units, processes or paths in the way.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<String>,
    /// The tags of the consumer's existing mounts, if the requested one does not exist.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// The step that csid was carrying out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// The obstacle, where kind and step do not name it: a word of the contract, such as `unknown-plugin`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub obstacle: Option<String>,
}

impl Details {
    /// Reads the details. A value of the wrong type is left out, so that it does not hide the error.
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
            tags: take(&mut map, "tags").unwrap_or_default(),
            step: take(&mut map, "step"),
            obstacle: take(&mut map, "obstacle"),
        }
    }
}

impl Error {
    /// Returns csid's error, if it is one.
    pub fn csid(&self) -> Option<&CsidError> {
        match self {
            Self::Csid(error) => Some(error),
            _ => None,
        }
    }

    /// Returns whether csid went away, so that the same call can be repeated to the next csid. Repeating it is
    /// safe.
    pub fn lost(&self) -> bool {
        match self {
            Self::Connect(_) | Self::NotRunning { .. } | Self::Disconnected(_) => true,
            Self::Csid(error) => error.kind == Kind::ShuttingDown,
            _ => false,
        }
    }

    /// Returns whether no csid is on the bus, or csid stops.
    pub(crate) fn is_of_a_stop(&self) -> bool {
        match self {
            Self::NotRunning { .. } => true,
            Self::Csid(error) => error.kind == Kind::ShuttingDown,
            _ => false,
        }
    }

    pub(crate) fn from_call(member: &str, error: zbus::Error) -> Self {
        let member = member.to_owned();
        match error {
            // An error of systemd, which the bus asked to start csid: UnitMasked, NoSuchUnit.
            zbus::Error::MethodError(name, description, _)
                if name.as_str().starts_with("org.freedesktop.systemd1.") =>
            {
                let masked = name.as_str() == "org.freedesktop.systemd1.UnitMasked";
                Self::NotRunning { message: description.unwrap_or_else(|| name.to_string()), masked }
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
                | fdo::Error::TimedOut(message) => {
                    // dbus-broker has no error name of its own for it.
                    let masked = message.contains("unit is masked");
                    Self::NotRunning { message, masked }
                }
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

#[cfg(test)]
mod tests {
    use zbus::Message;

    use super::*;

    /// dbus-daemon passes systemd's own error on, dbus-broker has only a text.
    #[test]
    fn masked_unit_is_known_on_both_buses() {
        let call = Message::method_call("/", "M").build(&()).unwrap();
        let systemd = |name: &str| {
            let name = zbus::names::OwnedErrorName::try_from(name.to_owned()).unwrap();
            zbus::Error::MethodError(name, Some("text".to_owned()), call.clone())
        };
        let broker = |text: &str| zbus::Error::FDO(Box::new(fdo::Error::NameHasNoOwner(text.to_owned())));
        for (error, is_masked) in [
            (systemd("org.freedesktop.systemd1.UnitMasked"), true),
            (systemd("org.freedesktop.systemd1.NoSuchUnit"), false),
            (
                broker(
                    "Could not activate remote peer 'org.csid1': activation request failed: unit is masked",
                ),
                true,
            ),
            (broker("Could not activate remote peer 'org.csid1': startup job failed"), false),
        ] {
            let error = Error::from_call("M", error);
            assert!(matches!(error, Error::NotRunning { masked, .. } if masked == is_masked), "{error:?}");
        }
    }
}
