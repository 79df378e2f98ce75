//! The seam between the engine of claims and the servers of a cluster. A csid that is alone has none.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;

use crate::error::{Error, Result};
use crate::store::registry::{Attachment, Capability, Claim, MadeSnapshot, Record, VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;

/// The servers of a cluster, which have the registrations and the claims of all nodes.
pub trait Servers: Send + Sync {
    /// Returns the name of the cluster.
    fn cluster(&self) -> &str;

    /// Returns why nothing may be mounted here: the servers have fenced this node. `None`: they have not, as far as csid knows.
    fn fence(&self) -> Option<Error>;

    /// Returns why nothing more may be mounted here: this node drains. `None`: it does not, as far as csid knows.
    fn drain(&self) -> Option<Error>;

    /// Returns a name for a call that takes a claim. No other call has it. Its beginning is that of this journal and boot. Of two
    /// calls for one claim the later one has the later name.
    fn name_call(&self) -> String;

    /// Returns whether a call has a name of this journal and boot.
    fn is_of_boot(&self, call: &str) -> bool;

    /// Claims a volume for a consumer of this node. `claim.call` names the call: when it is repeated, the same claim is granted.
    /// `claim.secrets_given`: the call has secrets for a controller, or a credential that no other host loads. `wait`:
    /// how long the claim waits at the servers while others are in its way. Zero: it does not wait there any more. `mark`: that of the remembered
    /// registration by which the claim was chosen. `None`: a server was asked for the volume.
    fn claim(
        &self,
        name: VolumeName,
        claim: Claim,
        wait: Duration,
        mark: Option<RegistrationMark>,
    ) -> BoxFuture<'_, Result<Granted, ServerFailure>>;

    /// Says that this node has nothing of a claim any more. A claim without an id is named by its call, which is withdrawn. `still_staged`:
    /// other claims of this node keep the volume staged.
    fn detached(
        &self,
        name: VolumeName,
        claim: Claim,
        still_staged: bool,
    ) -> BoxFuture<'_, Result<(), ServerFailure>>;

    /// Returns a volume without its claims, at revision 0. Waits a few seconds for a server. Fails with NotFound if the volume is not
    /// registered.
    fn volume(&self, name: VolumeName) -> BoxFuture<'_, Result<Record>>;

    /// Returns the volume that the servers know under this name, or else the plugin's volume under another one. Waits a few seconds for a server.
    /// `None`: they know neither.
    fn known(&self, name: VolumeName, volume: VolumeKey) -> BoxFuture<'_, Result<Option<KnownVolume>>>;

    /// Returns a volume as the server of this session has answered it last, with its mark. `None`: it was not asked, or does not compare marks.
    fn remembered(&self, name: &VolumeName) -> Option<(Record, RegistrationMark)>;

    /// Returns what the servers know of a volume, and other nodes' claims of it. Does not wait for a server. Fails with NotFound if the volume
    /// is not registered.
    fn explain(&self, name: VolumeName) -> BoxFuture<'_, Result<ServersExplanation>>;

    /// Registers a volume, or changes its registration. Returns it without its claims, at revision 0.
    fn register(
        &self,
        name: VolumeName,
        volume: VolumeKey,
        spec: VolumeSpec,
    ) -> BoxFuture<'_, Result<Record>>;

    /// Registers a volume as [`Servers::register`] does, before this host has joined.
    fn register_before_join(
        &self,
        name: VolumeName,
        volume: VolumeKey,
        spec: VolumeSpec,
    ) -> BoxFuture<'_, Result<Record>>;

    /// Has a plugin create a volume, and registers it. Returns it without its claims, at revision 0. The servers go on after `until`.
    fn create(
        &self,
        name: VolumeName,
        creation: ServerCreation,
        until: Instant,
    ) -> BoxFuture<'_, Result<Record>>;

    /// Has a volume's controller expand it. Returns it as `create` does. `bounds`: the least capacity and the limit in bytes; 0: none.
    fn expand(&self, name: VolumeName, bounds: (u64, u64), until: Instant) -> BoxFuture<'_, Result<Record>>;

    /// Asks a volume's plugin whether the volume can be used so. Empty `capabilities`: all that it was registered with. Returns the plugin's
    /// reason if it does not confirm that.
    fn validate(
        &self,
        name: VolumeName,
        capabilities: Vec<Capability>,
    ) -> BoxFuture<'_, Result<Result<(), String>>>;

    /// Has a volume's plugin make a snapshot. The servers go on after `until`.
    fn snapshot(
        &self,
        name: VolumeName,
        snapshot: ServerSnapshot,
        until: Instant,
    ) -> BoxFuture<'_, Result<MadeSnapshot>>;

    /// Has what this node has done of its parts of expansions reported to the servers soon.
    fn has_expanded(&self);

    /// Has a volume's controller attach it to a node. Returns the publish context. The servers go on after `until`.
    fn attach(
        &self,
        name: VolumeName,
        attach: ServerAttach,
        until: Instant,
    ) -> BoxFuture<'_, Result<BTreeMap<String, String>>>;

    /// Has a volume's controller detach it from a node that [`Servers::attach`] names. `forget`: the servers forget the attachment. They go on after
    /// `until`.
    fn detach(
        &self,
        name: VolumeName,
        node_id: String,
        forget: bool,
        until: Instant,
    ) -> BoxFuture<'_, Result<()>>;

    /// Ends a registration of this host's. The plugin keeps the volume. Fails with Busy while the volume is in use, and with NotAuthorized if another
    /// identity has registered it. A volume that is not registered is deregistered already. After `until` no server is asked again.
    fn deregister(&self, name: VolumeName, until: Instant) -> BoxFuture<'_, Result<()>>;

    /// Has a volume's plugin delete it. The servers go on after `until`.
    fn delete(&self, name: VolumeName, until: Instant) -> BoxFuture<'_, Result<()>>;
}

/// A volume that the servers know.
pub struct KnownVolume {
    pub name: VolumeName,
    pub volume: VolumeKey,
    /// `false`: it is only claimed or attached.
    pub is_registered: bool,
}

/// The mark of a registration as a server has answered it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrationMark {
    pub digest: Vec<u8>,
    /// The number of the session. A server of another one may not compare marks.
    pub session: u64,
}

/// What the servers know of a volume, for people.
#[derive(Clone, Debug, Default)]
pub struct ServersExplanation {
    /// What this node's claim or the volume waits for. Empty: nothing.
    pub waiting_for: String,
    /// The claims of other nodes: NODE/CONSUMER.
    pub holders: Vec<String>,
    pub steps: Vec<String>,
}

/// A volume that the servers are to have created.
pub struct ServerCreation {
    pub plugin: String,
    pub spec: VolumeSpec,
    /// Bytes. 0: no limit.
    pub capacity_min: u64,
    pub capacity_max: u64,
}

/// A snapshot that the servers are to have made.
pub struct ServerSnapshot {
    pub name: String,
    pub parameters: BTreeMap<String, String>,
    /// Whether the call is answered when the snapshot can be used.
    pub until_ready: bool,
}

/// A volume that the servers are to have attached.
pub struct ServerAttach {
    /// The plugin's name of the node.
    pub node_id: String,
    pub read_only: bool,
    /// Words of the contract. Empty: any that the volume is registered with.
    pub access_mode: String,
    pub attachment_mode: String,
}

/// A claim that a server has granted.
#[derive(Clone)]
pub struct Granted {
    /// The claim's random name.
    pub id: String,
    /// The volume without its claims, at revision 0.
    pub record: Record,
    /// `None`: the plugin attaches nothing.
    pub attached: Option<Attached>,
    /// The generation of the cluster and the revision of its etcd that have the claim.
    pub generation: u64,
    pub revision: u64,
}

/// A claim of this node with its volume, and with what the servers have attached for it.
#[derive(Clone)]
pub struct HeldVolume {
    pub name: VolumeName,
    pub volume: VolumeKey,
    pub claim: Claim,
    pub attachment: Option<Attachment>,
    /// The name of the credential of the volume's registration.
    pub credential: Option<String>,
}

/// The attachment of a volume to this node, which the servers have made.
#[derive(Clone)]
pub struct Attached {
    /// The plugin's name of this node.
    pub node_id: String,
    pub publish_context: BTreeMap<String, String>,
}

impl From<ServerFailure> for Error {
    fn from(failure: ServerFailure) -> Self {
        match failure {
            ServerFailure::NotSent(error)
            | ServerFailure::Refused(error)
            | ServerFailure::Queued(error)
            | ServerFailure::Changed(error)
            | ServerFailure::Unknown(error) => error,
        }
    }
}

/// Why a server did not do what it was asked for.
pub enum ServerFailure {
    /// No server can be asked now.
    NotSent(Error),
    /// The server has refused the call, and has done nothing.
    Refused(Error),
    /// The claim waits at the servers. The same call asks for it again.
    Queued(Error),
    /// The volume's registration is another one than that of the claim's mark. The server has done nothing.
    Changed(Error),
    /// It is not known what the server has done.
    Unknown(Error),
}
