//! The error every answer of csid carries: a name of the contract (`org.csid1.Error.*`), a message for a person, and the
//! details map. The rooms have error types of their own, which keep their source; they become this one where a request ends.
//! Messages never hold secrets, context values or mount flags.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

/// The names under `org.csid1.Error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// No server of this host's cluster can be asked now.
    Unavailable,
    Internal,
}

impl Kind {
    const ALL: [Kind; 19] = [
        Kind::InvalidArgument,
        Kind::NotFound,
        Kind::AlreadyExists,
        Kind::Busy,
        Kind::ClaimConflict,
        Kind::PluginUnavailable,
        Kind::PluginShutdown,
        Kind::PluginError,
        Kind::NotSupported,
        Kind::NotAuthorized,
        Kind::Cancelled,
        Kind::TimedOut,
        Kind::Uncertain,
        Kind::RateLimited,
        Kind::SecretRequired,
        Kind::ShuttingDown,
        Kind::StateCorrupt,
        Kind::Unavailable,
        Kind::Internal,
    ];

    /// Returns the kind of this name. `None`: the contract has no such name.
    pub fn read(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::InvalidArgument => "InvalidArgument",
            Kind::NotFound => "NotFound",
            Kind::AlreadyExists => "AlreadyExists",
            Kind::Busy => "Busy",
            Kind::ClaimConflict => "ClaimConflict",
            Kind::PluginUnavailable => "PluginUnavailable",
            Kind::PluginShutdown => "PluginShutdown",
            Kind::PluginError => "PluginError",
            Kind::NotSupported => "NotSupported",
            Kind::NotAuthorized => "NotAuthorized",
            Kind::Cancelled => "Cancelled",
            Kind::TimedOut => "TimedOut",
            Kind::Uncertain => "Uncertain",
            Kind::RateLimited => "RateLimited",
            Kind::SecretRequired => "SecretRequired",
            Kind::ShuttingDown => "ShuttingDown",
            Kind::StateCorrupt => "StateCorrupt",
            Kind::Unavailable => "Unavailable",
            Kind::Internal => "Internal",
        }
    }
}

/// A step of an operation, of the contract's detail `step` and of ListOperations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The operation has not begun.
    Queued,
    WaitingForPlugin,
    WaitingForClaims,
    /// The plugin takes no more volumes on this node.
    WaitingForAnotherVolume,
    /// An OFFLINE expansion waits until the volume is not in use.
    WaitingUntilUnused,
    WaitingForSnapshot,
    /// The comparison of the volume's topologies with the node's.
    Topology,
    /// The count of the plugin's volumes on this node.
    VolumeLimit,
    /// The check whether csid.toml allows commands in plugins. csictl's hint depends on it.
    Configuration,
    Claim,
    Release,
    Verify,
    Stage,
    Publish,
    Bind,
    Unbind,
    Unpublish,
    Unstage,
    Commit,
    Attach,
    Detach,
    Create,
    Delete,
    Validate,
    Snapshot,
    Expand,
    Forget,
    /// The stop of a plugin's process.
    Stop,
}

impl Step {
    pub fn name(self) -> &'static str {
        match self {
            Step::Queued => "queued",
            Step::WaitingForPlugin => "waiting for plugin",
            Step::WaitingForClaims => "waiting for claims",
            Step::WaitingForAnotherVolume => "waiting for another volume's claims",
            Step::WaitingUntilUnused => "waiting until nobody has it",
            Step::WaitingForSnapshot => "waiting for the snapshot",
            Step::Topology => "look at the topology",
            Step::VolumeLimit => "count the plugin's volumes",
            Step::Configuration => "read the configuration",
            Step::Claim => "claim",
            Step::Release => "release",
            Step::Verify => "verify",
            Step::Stage => "stage",
            Step::Publish => "publish",
            Step::Bind => "bind",
            Step::Unbind => "unbind",
            Step::Unpublish => "unpublish",
            Step::Unstage => "unstage",
            Step::Commit => "commit",
            Step::Attach => "attach",
            Step::Detach => "detach",
            Step::Create => "create",
            Step::Delete => "delete",
            Step::Validate => "validate",
            Step::Snapshot => "snapshot",
            Step::Expand => "expand",
            Step::Forget => "forget",
            Step::Stop => "stop",
        }
    }

    /// Returns whether the operation waits for something other than its turn.
    pub fn waits(self) -> bool {
        matches!(
            self,
            Step::WaitingForPlugin
                | Step::WaitingForClaims
                | Step::WaitingForAnotherVolume
                | Step::WaitingUntilUnused
                | Step::WaitingForSnapshot
        )
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The limit of a caller's text in an error.
pub const SHOWN: usize = 256;

/// Returns a caller's text as an error shows it, at most [`SHOWN`] bytes of it.
pub fn shortened(text: &str) -> Cow<'_, str> {
    cut(text, SHOWN)
}

/// Returns a text from another program on one line, of at most `most` bytes. It goes to a terminal, a log, systemd and D-Bus, which takes no
/// NUL.
pub fn presentable(text: &str, most: usize) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    cut(&line, most).into_owned()
}

/// Returns a path as an error shows it, which a caller may have chosen.
pub fn shown(path: impl AsRef<Path>) -> String {
    shortened(&path.as_ref().to_string_lossy()).into_owned()
}

/// Returns the text, or as much of its beginning as fits in `most` bytes with a mark.
pub fn cut(text: &str, most: usize) -> Cow<'_, str> {
    const CUT: &str = "…";
    match text.len() <= most {
        true => text.into(),
        false => format!("{}{CUT}", &text[..text.floor_char_boundary(most - CUT.len())]).into(),
    }
}

/// The contract's details map; a field that does not apply is absent from the map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// The CSI RPC that failed, e.g. `NodeStageVolume`.
    pub rpc: Option<&'static str>,
    /// The gRPC status code of that RPC.
    pub grpc_code: Option<u32>,
    /// The plugin's own message, without the secrets of the call.
    pub plugin_message: Option<String>,
    /// The same call may succeed later without any change by the caller.
    pub retryable: bool,
    pub operation: Option<String>,
    pub namespace: Option<String>,
    pub volume: Option<String>,
    pub plugin: Option<String>,
    /// Consumers, units or processes that hold what was asked for.
    pub holders: Vec<String>,
    /// The tags of the consumer's mounts that exist, where the requested one does not.
    pub tags: Vec<String>,
    /// The step that failed, e.g. `stage`, `publish`, `waiting for plugin`.
    pub step: Option<Step>,
    pub obstacle: Option<Obstacle>,
}

/// The obstacle of a call, where kind and step do not name it. Clients choose their advice by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The plugin has another name for this node than before.
    NodeId,
    UnknownPlugin,
    UnregisteredVolume,
    /// A file declares the volume, which is not registered yet.
    DeclaredVolume,
    /// A call has registered the volume that a file declares.
    RegisteredByCall,
    /// The volume was not registered with the capability.
    Capability,
    /// A mount that no row explains.
    UnknownMount,
    /// A claim or mount on another node.
    OtherNode,
    /// An expansion that waits until the volume is not in use.
    Expansion,
    /// A creation of the volume, for another caller.
    Creation,
    /// The plugin does not confirm the source of the created volume.
    UnconfirmedSource,
    /// The created volume has another capacity than was asked for.
    UnfitCapacity,
    /// A claim or mount of another user, with the same names.
    OtherUser,
    /// The same claim, with other options.
    ClaimedOtherwise,
    /// The same mount, with other options.
    MountedOtherwise,
    /// The unit or connection of a claim, which does not run.
    NotRunning,
    NotMounted,
    /// A file declares the volume.
    DeclaredByFile,
    /// The plugin has made a volume whose name means another one now.
    SpareVolume,
    /// csid's own stop.
    Stopping,
    /// Several instances of a plugin, where the call has to name one.
    SeveralInstances,
    /// An upgrade has replaced the instance.
    ReplacedInstance,
    /// A key of a plugin's spec that an upgrade cannot change.
    FixedKey,
    /// The socket of another instance of the plugin.
    InstanceSocket,
    /// An upgrade of the plugin that is under way.
    Upgrade,
    /// A file of plugins.d defines the plugin.
    PluginOfFile,
    /// The instance registered itself.
    SelfRegistered,
    /// csid does not run the plugin, or does not collect its log.
    ExternalPlugin,
    /// The main process of the plugin's unit is on the host, perhaps as the manager of a container.
    Container,
    /// Another mount at the target.
    Target,
    /// The volume has a name already, and a call gives its plugin and external ID.
    KnownVolume,
    /// The volume's external ID was lost with the damaged journal.
    UnidentifiedVolume,
    /// A mount of the volume at a path that no row has.
    UnknownTarget,
    /// A symbolic link on the way to a path, or a directory there that was renamed meanwhile.
    SymbolicLink,
    /// The volume's own mount at the target, which the caller has to have unmounted.
    BoundTarget,
    /// A setting of the plugin's unit, which hides the plugin's mounts from the host.
    Hidden,
    /// A systemd credential that cannot be loaded.
    Credential,
}

impl Obstacle {
    pub fn name(self) -> &'static str {
        match self {
            Obstacle::NodeId => "node-id",
            Obstacle::UnknownPlugin => "unknown-plugin",
            Obstacle::UnregisteredVolume => "unregistered-volume",
            Obstacle::DeclaredVolume => "declared-volume",
            Obstacle::RegisteredByCall => "registered-by-call",
            Obstacle::Capability => "capability",
            Obstacle::UnknownMount => "unknown-mount",
            Obstacle::OtherNode => "other-node",
            Obstacle::Expansion => "expansion",
            Obstacle::Creation => "creation",
            Obstacle::UnconfirmedSource => "unconfirmed-source",
            Obstacle::UnfitCapacity => "unfit-capacity",
            Obstacle::OtherUser => "other-user",
            Obstacle::ClaimedOtherwise => "claimed-otherwise",
            Obstacle::MountedOtherwise => "mounted-otherwise",
            Obstacle::NotRunning => "not-running",
            Obstacle::NotMounted => "not-mounted",
            Obstacle::DeclaredByFile => "declared-by-file",
            Obstacle::SpareVolume => "spare-volume",
            Obstacle::Stopping => "csid-stopping",
            Obstacle::SeveralInstances => "several-instances",
            Obstacle::ReplacedInstance => "replaced-instance",
            Obstacle::FixedKey => "fixed-key",
            Obstacle::InstanceSocket => "instance-socket",
            Obstacle::Upgrade => "upgrade",
            Obstacle::PluginOfFile => "plugin-of-file",
            Obstacle::SelfRegistered => "self-registered",
            Obstacle::ExternalPlugin => "external-plugin",
            Obstacle::Container => "container",
            Obstacle::Target => "target",
            Obstacle::KnownVolume => "known-volume",
            Obstacle::UnidentifiedVolume => "unidentified-volume",
            Obstacle::UnknownTarget => "unknown-target",
            Obstacle::SymbolicLink => "symbolic-link",
            Obstacle::BoundTarget => "bound-target",
            Obstacle::Hidden => "hidden",
            Obstacle::Credential => "credential",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub kind: Kind,
    pub message: String,
    pub details: Box<Details>,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        let retryable = matches!(
            kind,
            Kind::Busy
                | Kind::ClaimConflict
                | Kind::PluginUnavailable
                | Kind::PluginShutdown
                | Kind::TimedOut
                | Kind::Uncertain
                | Kind::RateLimited
                | Kind::ShuttingDown
                | Kind::Unavailable
        );
        Error {
            kind,
            message: message.into(),
            details: Box::new(Details { retryable, ..Details::default() }),
        }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Error::new(Kind::InvalidArgument, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Error::new(Kind::NotFound, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Error::new(Kind::Internal, message)
    }

    pub fn obstructed_by(self, obstacle: Obstacle) -> Self {
        self.with(|details| details.obstacle = Some(obstacle))
    }

    pub fn with(mut self, set: impl FnOnce(&mut Details)) -> Self {
        set(&mut self.details);
        self
    }
}

/// Returns an error's text with the texts of its causes. A cause that the text ends with already is not repeated.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| match text.ends_with(&cause) {
        true => text,
        false => format!("{text}: {cause}"),
    })
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Link {
        text: &'static str,
        source: Option<Box<Link>>,
    }

    #[test]
    fn causes_are_named_once() {
        let chain = |texts: &[&'static str]| {
            let links = texts.iter().rev().fold(None, |source, text| Some(Box::new(Link { text, source })));
            with_causes(links.unwrap().as_ref())
        };
        assert_eq!(chain(&["a", "b", "c"]), "a: b: c");
        assert_eq!(chain(&["a: b", "b", "c"]), "a: b: c");
        assert_eq!(chain(&["a"]), "a");
    }
}
