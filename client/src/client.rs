//! The connection and the contract's calls. State: one connection and the count of its unanswered calls.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::Semaphore;
use zbus::{
    Address, Connection, DynamicType, OwnedObjectPath, Type,
    address::{
        Transport,
        transport::{Unix, UnixSocket},
    },
    connection::Builder,
};

#[cfg(doc)]
use crate::error::Kind;
use crate::{
    environment,
    error::{Connecting, Error, Result},
    options::{
        AttachOptions, CallOptions, CapacityOptions, ClaimFilter, ClaimOptions, CreateVolume,
        DeregisterOptions, DetachOptions, ExecOptions, ExpandOptions, JoinOptions, LogOptions, MountFilter,
        MountOptions, OpenOptions, PluginService, PluginSpec, ReconcileOptions, RegisterVolume,
        ReleaseOptions, SnapshotFilter, SnapshotOptions, UnmountOptions, UnregisterOptions, UpgradeOptions,
        ValidateOptions, VolumeFilter, VolumeOptions,
    },
    rows::{
        ClaimRow, Claimed, Cluster, DrainReport, Event, Exit, Expanded, Explanation, ExternalRow, Manager,
        MountRow, Mounted, OperationRow, Plugin, PluginRow, PluginStats, ReconcileReport, SnapshotRow,
        Validated, VolumeRow, VolumeStats,
    },
    transport,
};

/// The path of csid's private socket.
pub const SOCKET: &str = "/run/csid/csid.sock";

pub(crate) const NAME: &str = "org.csid1";
pub(crate) const PATH: &str = "/org/csid1";
pub(crate) const MANAGER: &str = "org.csid1.Manager";
const PLUGIN: &str = "org.csid1.Plugin";
const CLUSTER: &str = "org.csid1.Cluster";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";

/// dbus-daemon drops the 129th unanswered call of a connection. Some are kept back for calls that never wait,
/// so that an operation can be cancelled while all the others hang.
const WAITING_CALLS: usize = 112;
const SHORT_CALLS: usize = 12;

/// How to connect to csid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The private socket at its usual place, else the system bus.
    Auto,
    /// This private socket and nothing else.
    Socket(PathBuf),
    /// The system bus: `$DBUS_SYSTEM_BUS_ADDRESS`, except in a program with more rights than its caller.
    SystemBus,
}

impl Target {
    /// Returns the socket that `$CSID_SOCKET` names, else `Auto`. A named socket has no fallback, so no other
    /// csid answers. A program with more rights than its caller, such as a set-uid one, ignores the
    /// environment.
    pub fn from_env() -> Self {
        match environment::secure_var("CSID_SOCKET") {
            Some(path) if !path.is_empty() => Self::Socket(path.into()),
            _ => Self::Auto,
        }
    }
}

/// Connects to a Unix socket over this crate's own transport. Another address is zbus' affair: no descriptor comes from it.
async fn connection(
    address: Address,
    with: impl FnOnce(Builder<'static>) -> Builder<'static>,
) -> zbus::Result<Connection> {
    let builder = match transport::connect(&address).await {
        Some(stream) => Builder::socket(
            stream.map_err(|error| zbus::Error::Connection(Arc::new(error), Box::new(address.clone())))?,
        ),
        None => Builder::address(address),
    };
    with(builder).build().await
}

/// How a client is connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Via {
    /// Over the private socket at this path.
    Socket(PathBuf),
    /// Over the system bus.
    SystemBus,
}

/// A connection to csid. Clones share it, and its bound on unanswered calls.
///
/// ```no_run
/// use csid_client::{Client, Target};
///
/// # async fn example() -> csid_client::Result<()> {
/// let client = Client::connect(&Target::from_env()).await?;
/// println!("csid {}", client.manager().await?.version);
/// for plugin in client.list_plugins().await? {
///     println!("{} {}", plugin.id, plugin.state);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(crate) connection: Connection,
    via: Via,
    waiting: Arc<Semaphore>,
    short: Arc<Semaphore>,
    /// Whether calls that are not sent yet must not be sent.
    withdrawn: Arc<AtomicBool>,
}

impl Client {
    /// Connects to csid.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] if none of the target's ways leads to csid.
    pub async fn connect(target: &Target) -> Result<Self> {
        let mut failed = Connecting { socket: None, bus: None };
        let socket = match target {
            Target::Auto => Some(PathBuf::from(SOCKET)),
            Target::Socket(path) => Some(path.clone()),
            Target::SystemBus => None,
        };
        if let Some(path) = socket {
            let address = Address::from(Transport::Unix(Unix::new(UnixSocket::File(path.clone()))));
            match connection(address, Builder::p2p).await {
                Ok(connection) => return Ok(Self::on(connection, Via::Socket(path))),
                Err(error) => failed.socket = Some((path, error)),
            }
        }
        if !matches!(target, Target::Socket(_)) {
            let address = environment::system_bus().parse::<Address>();
            let connected = match address {
                Ok(address) => connection(address, |builder| builder).await,
                Err(error) => Err(error),
            };
            match connected {
                Ok(connection) => return Ok(Self::on(connection, Via::SystemBus)),
                Err(error) => failed.bus = Some(error),
            }
        }
        Err(Error::Connect(failed))
    }

    fn on(connection: Connection, via: Via) -> Self {
        let waiting = Arc::new(Semaphore::new(WAITING_CALLS));
        let short = Arc::new(Semaphore::new(SHORT_CALLS));
        Self { connection, via, waiting, short, withdrawn: Arc::default() }
    }

    /// Returns the same client for a call that is not sent if `withdrawn` becomes true while it waits for its
    /// turn.
    pub fn unless(self, withdrawn: Arc<AtomicBool>) -> Self {
        Self { withdrawn, ..self }
    }

    /// Returns how the client is connected.
    pub fn via(&self) -> &Via {
        &self.via
    }

    /// Returns whether both share one connection.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.waiting, &other.waiting)
    }

    /// Waits until the connection has ended, from either side.
    pub async fn closed(&self) {
        self.connection.closed().await;
    }

    /// Returns the properties of csid itself.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn manager(&self) -> Result<Manager> {
        self.call(PATH, PROPERTIES, "GetAll", (MANAGER,)).await
    }

    /// Returns this host as a node of a cluster. Feature `cluster`.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). [`Error::NotServed`] of a csid without the feature.
    pub async fn cluster(&self) -> Result<Cluster> {
        self.call(PATH, PROPERTIES, "GetAll", (CLUSTER,)).await
    }

    /// Waits until this host has joined its cluster. Feature `cluster`.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). [`crate::Kind::Busy`] if `import` is set and volumes are in use,
    /// [`crate::Kind::Unavailable`] if no server lets the host join.
    pub async fn join(&self, options: JoinOptions) -> Result<()> {
        self.call(PATH, CLUSTER, "Join", (options,)).await
    }

    /// Mounts a volume for a consumer and returns the published path. A registered volume is claimed too. The
    /// same call again returns the same mount.
    ///
    /// ```no_run
    /// use csid_client::{Client, MountOptions};
    ///
    /// # async fn example(client: Client) -> csid_client::Result<()> {
    /// let options = MountOptions {
    ///     plugin: Some("local".to_owned()),
    ///     external_id: Some("vol-1".to_owned()),
    ///     read_only: Some(true),
    ///     ..Default::default()
    /// };
    /// let mounted = client.mount("prod", "data", "alloc-7", options).await?;
    /// println!("{}", mounted.source);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if the volume is not registered and not given inline, or the plugin is unknown;
    /// [`Kind::AlreadyExists`] if the consumer has the mount with other options; [`Kind::ClaimConflict`] if
    /// others' claims or mounts are in the way; [`Kind::Busy`] if the volume is being created or deleted or, in a cluster, the host
    /// drains.
    pub async fn mount(
        &self,
        namespace: &str,
        volume: &str,
        consumer: &str,
        options: MountOptions,
    ) -> Result<Mounted> {
        let body = (namespace.to_owned(), volume.to_owned(), consumer.to_owned(), options);
        self.call(PATH, MANAGER, "Mount", body).await
    }

    /// Unmounts a volume from a consumer and returns when the mount is gone. A missing mount is success.
    ///
    /// ```no_run
    /// use csid_client::{Client, Kind, UnmountOptions};
    ///
    /// # async fn example(client: Client) -> csid_client::Result<()> {
    /// match client.unmount("prod", "data", "alloc-7", UnmountOptions::default()).await {
    ///     Err(error) if error.csid().is_some_and(|error| error.kind == Kind::Busy) => {
    ///         println!("in use: {error}");
    ///     }
    ///     done => done?,
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::Busy`] while processes or other mount namespaces use the mount; [`Kind::NotFound`] only with
    /// `must_exist`.
    pub async fn unmount(
        &self,
        namespace: &str,
        volume: &str,
        consumer: &str,
        options: UnmountOptions,
    ) -> Result<()> {
        let body = (namespace.to_owned(), volume.to_owned(), consumer.to_owned(), options);
        self.call(PATH, MANAGER, "Unmount", body).await
    }

    /// Takes over a mount that another manager made. Root only. No plugin is called. `options` needs
    /// `published_path`, and `staging_path` if the plugin stages. The same call again returns the same mount.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Each error changes nothing. Also
    /// [`Kind::NotFound`] or [`Kind::InvalidArgument`] if the kernel does not show the mount at a path;
    /// [`Kind::AlreadyExists`] if a path belongs to another mount; [`Kind::ClaimConflict`] if others' claims
    /// are in the way.
    pub async fn adopt_mount(
        &self,
        namespace: &str,
        volume: &str,
        consumer: &str,
        options: MountOptions,
    ) -> Result<Mounted> {
        let body = (namespace.to_owned(), volume.to_owned(), consumer.to_owned(), options);
        self.call(PATH, MANAGER, "AdoptMount", body).await
    }

    /// Opens a consumer's mount, or `subpath` in it, as a descriptor for move_mount(2) in another mount
    /// namespace. It is attached nowhere. The kernel keeps the file system until the descriptor is closed and
    /// all mounts made from it are gone.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if there is no such
    /// mount; [`Kind::NotAuthorized`] if it is another user's, or for a caller other than root if the mount has
    /// flags that the receiver could clear.
    pub async fn open_mount(
        &self,
        namespace: &str,
        volume: &str,
        consumer: &str,
        options: OpenOptions,
    ) -> Result<OwnedFd> {
        let body = (namespace.to_owned(), volume.to_owned(), consumer.to_owned(), options);
        let tree: zbus::OwnedFd = self.call(PATH, MANAGER, "OpenMount", body).await?;
        Ok(tree.into())
    }

    /// Asks the kernel whether `source`, a published path, is mounted. A missing path is not.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn has_mount(&self, source: &str) -> Result<bool> {
        self.call(PATH, MANAGER, "HasMount", source.to_owned()).await
    }

    /// Returns the mounts that match the filter.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn list_mounts(&self, filter: MountFilter) -> Result<Vec<MountRow>> {
        self.call(PATH, MANAGER, "ListMounts", (filter,)).await
    }

    /// Registers a volume that the plugin has, or changes the registration.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::InvalidArgument`] if the plugin does not confirm the volume; [`Kind::NotFound`] if the plugin or
    /// the volume is unknown; [`Kind::AlreadyExists`] if the name belongs to another volume or the volume to
    /// another name; [`Kind::Busy`] if the volume is in use and that prevents the change;
    /// [`Kind::NotSupported`] if a file declares it.
    pub async fn register_volume(
        &self,
        namespace: &str,
        id: &str,
        spec: RegisterVolume,
    ) -> Result<VolumeRow> {
        self.call(PATH, MANAGER, "RegisterVolume", (namespace.to_owned(), id.to_owned(), spec)).await
    }

    /// Has the plugin create a volume. Repeating a call whose answer was lost creates no second one.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::AlreadyExists`] if the volume exists with other options; [`Kind::NotFound`] if the plugin or the
    /// volume to clone is unknown; [`Kind::NotSupported`] if the plugin cannot create volumes so.
    pub async fn create_volume(&self, namespace: &str, id: &str, spec: CreateVolume) -> Result<VolumeRow> {
        self.call(PATH, MANAGER, "CreateVolume", (namespace.to_owned(), id.to_owned(), spec)).await
    }

    /// Returns the registered volumes that match the filter, without context and parameters, which
    /// [`Self::volume`] has.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn list_volumes(&self, filter: VolumeFilter) -> Result<Vec<VolumeRow>> {
        self.call(PATH, MANAGER, "ListVolumes", (filter,)).await
    }

    /// Returns a registered volume.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if it is not
    /// registered.
    pub async fn volume(&self, namespace: &str, volume: &str) -> Result<VolumeRow> {
        self.call(PATH, MANAGER, "GetVolume", (namespace.to_owned(), volume.to_owned())).await
    }

    /// Asks the plugin whether the volume can be used in the given way.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if the volume or its plugin is unknown.
    pub async fn validate_volume(
        &self,
        namespace: &str,
        volume: &str,
        options: ValidateOptions,
    ) -> Result<Validated> {
        let body = (namespace.to_owned(), volume.to_owned(), options);
        self.call(PATH, MANAGER, "ValidateVolume", body).await
    }

    /// Deregisters a volume, which the plugin keeps. A missing one is success.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::Busy`] while the volume is
    /// mounted, or claimed without `force`; [`Kind::NotSupported`] if a file declares it.
    pub async fn deregister_volume(
        &self,
        namespace: &str,
        volume: &str,
        options: DeregisterOptions,
    ) -> Result<()> {
        let body = (namespace.to_owned(), volume.to_owned(), options);
        self.call(PATH, MANAGER, "DeregisterVolume", body).await
    }

    /// Has the plugin delete a volume with its content. A missing one is success.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::Busy`] while the volume is mounted, claimed, attached or being created; [`Kind::NotSupported`]
    /// if a file declares it.
    pub async fn delete_volume(&self, namespace: &str, volume: &str, options: VolumeOptions) -> Result<()> {
        let body = (namespace.to_owned(), volume.to_owned(), options);
        self.call(PATH, MANAGER, "DeleteVolume", body).await
    }

    /// Expands a volume to at least `required` bytes and, unless that is 0, at most `limit`.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::InvalidArgument`] if `limit` is less than the volume's size; [`Kind::NotSupported`] if the
    /// plugin cannot expand that part.
    pub async fn expand_volume(
        &self,
        namespace: &str,
        volume: &str,
        required: u64,
        limit: u64,
        options: ExpandOptions,
    ) -> Result<Expanded> {
        let body = (namespace.to_owned(), volume.to_owned(), required, limit, options);
        self.call(PATH, MANAGER, "ExpandVolume", body).await
    }

    /// Has the plugin create a snapshot and returns when it is ready, unless `wait` is false. The same name
    /// again is the same snapshot.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if the volume or its plugin is unknown.
    pub async fn create_snapshot(
        &self,
        namespace: &str,
        volume: &str,
        name: &str,
        options: SnapshotOptions,
    ) -> Result<SnapshotRow> {
        let body = (namespace.to_owned(), volume.to_owned(), name.to_owned(), options);
        self.call(PATH, MANAGER, "CreateSnapshot", body).await
    }

    /// Returns the usage of a volume that is mounted here.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if the volume is not mounted here.
    pub async fn volume_stats(
        &self,
        namespace: &str,
        volume: &str,
        options: CallOptions,
    ) -> Result<VolumeStats> {
        let body = (namespace.to_owned(), volume.to_owned(), options);
        self.call(PATH, MANAGER, "GetVolumeStats", body).await
    }

    /// Attaches a volume to a node, for a scheduler that keeps its own claims, and returns the publish context.
    /// `node_id` is the plugin's name of the node.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::ClaimConflict`] if the volume is claimed; [`Kind::AlreadyExists`] if it is attached with other
    /// options; [`Kind::NotSupported`] if the plugin attaches nothing.
    pub async fn attach_volume(
        &self,
        namespace: &str,
        volume: &str,
        node_id: &str,
        options: AttachOptions,
    ) -> Result<BTreeMap<String, String>> {
        let body = (namespace.to_owned(), volume.to_owned(), node_id.to_owned(), options);
        self.call(PATH, MANAGER, "AttachVolume", body).await
    }

    /// Detaches a volume from a node. A volume that is not attached is success.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::Busy`] while the volume is staged on this host under that node ID; [`Kind::ClaimConflict`] if
    /// the attachment belongs to a claim; [`Kind::NotAuthorized`] for `forget` by a caller other than root.
    pub async fn detach_volume(
        &self,
        namespace: &str,
        volume: &str,
        node_id: &str,
        options: DetachOptions,
    ) -> Result<()> {
        let body = (namespace.to_owned(), volume.to_owned(), node_id.to_owned(), options);
        self.call(PATH, MANAGER, "DetachVolume", body).await
    }

    /// Explains what the volume waits for, its holders, the last error and the next try.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if csid does not
    /// know the volume.
    pub async fn explain(&self, namespace: &str, volume: &str, options: CallOptions) -> Result<Explanation> {
        self.call(PATH, MANAGER, "Explain", (namespace.to_owned(), volume.to_owned(), options)).await
    }

    /// Claims a registered volume for a consumer, attaches it where its plugin attaches, and returns what a
    /// node needs to use it. The same call again returns the same claim.
    ///
    /// ```no_run
    /// use csid_client::{ClaimMode, ClaimOptions, Client, ReleaseOptions};
    ///
    /// # async fn example(client: Client) -> csid_client::Result<()> {
    /// let options = ClaimOptions {
    ///     mode: Some(ClaimMode::Read),
    ///     wait_usec: Some(60_000_000),
    ///     ..Default::default()
    /// };
    /// let claimed = client.claim("prod", "pg", "nightly-backup", options).await?;
    /// println!("{} {}", claimed.state, claimed.external_node_id);
    /// client.release("prod", "pg", "nightly-backup", ReleaseOptions::default()).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if the volume is not registered; [`Kind::AlreadyExists`] if the consumer has claimed
    /// it with other options; [`Kind::ClaimConflict`] if others' claims are in the way; [`Kind::Busy`] if the
    /// volume is being created or deleted or, in a cluster, the host drains.
    pub async fn claim(
        &self,
        namespace: &str,
        volume: &str,
        consumer: &str,
        options: ClaimOptions,
    ) -> Result<Claimed> {
        let body = (namespace.to_owned(), volume.to_owned(), consumer.to_owned(), options);
        self.call(PATH, MANAGER, "Claim", body).await
    }

    /// Releases a claim: unmounts what the consumer has mounted here and detaches the volume. A missing claim
    /// is success.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::Busy`] while processes use a mount of the consumer.
    pub async fn release(
        &self,
        namespace: &str,
        volume: &str,
        consumer: &str,
        options: ReleaseOptions,
    ) -> Result<()> {
        let body = (namespace.to_owned(), volume.to_owned(), consumer.to_owned(), options);
        self.call(PATH, MANAGER, "Release", body).await
    }

    /// Returns the claims that match the filter.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn list_claims(&self, filter: ClaimFilter) -> Result<Vec<ClaimRow>> {
        self.call(PATH, MANAGER, "ListClaims", (filter,)).await
    }

    /// Compares csid's rows with the kernel's mounts and repairs the differences.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::Busy`] if a new journal is not
    /// possible now.
    pub async fn reconcile(&self, options: ReconcileOptions) -> Result<ReconcileReport> {
        self.call(PATH, MANAGER, "Reconcile", (options,)).await
    }

    /// Returns the operations in progress.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn list_operations(&self) -> Result<Vec<OperationRow>> {
        self.call(PATH, MANAGER, "ListOperations", ()).await
    }

    /// Cancels an operation of the caller. csid rolls back a mount, a claim or an attachment, and goes on with
    /// anything else.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if there is no such
    /// operation.
    pub async fn cancel_operation(&self, id: &str) -> Result<()> {
        self.call(PATH, MANAGER, "CancelOperation", id.to_owned()).await
    }

    /// Returns events after sequence number `since`, at most `max`, and whether some before them are lost.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn get_events(&self, since: u64, max: u32) -> Result<(Vec<Event>, bool)> {
        self.call(PATH, MANAGER, "GetEvents", (since, max)).await
    }

    /// Reloads csid's configuration.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). An error in the configuration changes
    /// nothing.
    pub async fn reload(&self, options: CallOptions) -> Result<()> {
        self.call(PATH, MANAGER, "Reload", (options,)).await
    }

    /// Registers a plugin, or another instance of one, and returns its object path. The same call again changes
    /// nothing.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::AlreadyExists`] if the
    /// instance has another specification, or the socket belongs to another plugin; [`Kind::PluginShutdown`] if
    /// csid is stopping.
    pub async fn register_plugin(&self, id: &str, spec: PluginSpec) -> Result<OwnedObjectPath> {
        self.call(PATH, MANAGER, "RegisterPlugin", (id.to_owned(), spec)).await
    }

    /// Unregisters a plugin, or one instance of it. A missing one is success.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::Busy`] while volumes of the
    /// plugin are mounted, claimed or attached here, without `force`; [`Kind::NotSupported`] if a file defines
    /// the plugin.
    pub async fn unregister_plugin(&self, id: &str, options: UnregisterOptions) -> Result<()> {
        self.call(PATH, MANAGER, "UnregisterPlugin", (id.to_owned(), options)).await
    }

    /// Returns the registered plugins.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors).
    pub async fn list_plugins(&self) -> Result<Vec<PluginRow>> {
        self.call(PATH, MANAGER, "ListPlugins", ()).await
    }

    /// Waits until a service of the plugin is ready, also if the plugin is not registered yet, and returns its
    /// object path.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::TimedOut`] if it is not ready
    /// before the deadline; without one, after csid's own (`[deadlines] operation` of csid.toml).
    pub async fn wait_for_plugin(
        &self,
        id: &str,
        service: PluginService,
        options: CallOptions,
    ) -> Result<OwnedObjectPath> {
        self.call(PATH, MANAGER, "WaitForPlugin", (id.to_owned(), service, options)).await
    }

    /// Returns the properties of a plugin.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if no such plugin
    /// is registered.
    pub async fn plugin(&self, id: &str) -> Result<Plugin> {
        self.call(&plugin_path(id), PROPERTIES, "GetAll", (PLUGIN,)).await
    }

    /// Asks the plugin itself whether it is ready.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if no such plugin is registered.
    pub async fn probe_plugin(&self, id: &str, options: CallOptions) -> Result<bool> {
        self.call(&plugin_path(id), PLUGIN, "Probe", (options,)).await
    }

    /// Returns csid's measurements of the plugin.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if no such plugin
    /// is registered.
    pub async fn plugin_stats(&self, id: &str) -> Result<PluginStats> {
        self.call(&plugin_path(id), PLUGIN, "GetStats", ()).await
    }

    /// Restarts the plugin's unit and returns when the plugin is ready. Its mounts stay.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if no such plugin
    /// is registered; [`Kind::NotSupported`] if csid does not run it; [`Kind::TimedOut`] if it is not ready in
    /// time.
    pub async fn restart_plugin(&self, id: &str, options: CallOptions) -> Result<()> {
        self.call(&plugin_path(id), PLUGIN, "Restart", (options,)).await
    }

    /// Accepts a changed node ID of the plugin: from now on volumes are attached under `node_id`.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::InvalidArgument`] if `node_id`
    /// is not the current one; [`Kind::PluginUnavailable`] if that is not known; [`Kind::NotFound`] if no such
    /// plugin is registered.
    pub async fn accept_node_id(&self, id: &str, node_id: &str, options: CallOptions) -> Result<()> {
        self.call(&plugin_path(id), PLUGIN, "AcceptNodeId", (node_id.to_owned(), options)).await
    }

    /// Unmounts every mount of the plugin on this host. New ones are refused until it returns. The plugin goes
    /// on.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if no such plugin
    /// is registered. Mounts that cannot be unmounted are in the report.
    pub async fn drain_plugin(&self, id: &str, options: CallOptions) -> Result<DrainReport> {
        self.call(&plugin_path(id), PLUGIN, "Drain", (options,)).await
    }

    /// Replaces an instance of the plugin, under its mounts, by one with this specification. Absent fields stay
    /// as they were. Returns the name of the new instance, once the old one is gone.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). After an error the old instance stays in use.
    /// Also [`Kind::NotFound`] if there is no such instance; [`Kind::NotSupported`] if csid does not run it;
    /// [`Kind::AlreadyExists`] if the new one's place is taken; [`Kind::PluginUnavailable`] if the new one does
    /// not become ready.
    pub async fn upgrade_plugin(
        &self,
        id: &str,
        spec: PluginSpec,
        options: UpgradeOptions,
    ) -> Result<String> {
        self.call(&plugin_path(id), PLUGIN, "Upgrade", (spec, options)).await
    }

    /// Opens the plugin's log in the journal, as a stream to read to its end. Closing it ends a log that
    /// is followed.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if no such plugin
    /// is registered; [`Kind::NotSupported`] if csid has no log of it; [`Kind::RateLimited`] if too many logs
    /// are open.
    pub async fn open_plugin_log(&self, id: &str, options: LogOptions) -> Result<OwnedFd> {
        let log: zbus::OwnedFd = self.call(&plugin_path(id), PLUGIN, "OpenLog", (options,)).await?;
        Ok(log.into())
    }

    /// Runs a command in the plugin's namespaces and control group, as root, and returns when it has started.
    /// The command continues when its streams are closed, unless it needs them.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if no such plugin
    /// is registered; [`Kind::NotSupported`] if csid does not run it, or csid.toml does not allow commands;
    /// [`Kind::PluginUnavailable`] if the plugin has no process; [`Kind::RateLimited`] if too many commands
    /// run.
    pub async fn exec_plugin(&self, id: &str, argv: Vec<String>, options: ExecOptions) -> Result<Running> {
        let body = (argv, options);
        let answer = self.call(&plugin_path(id), PLUGIN, "Exec", body).await?;
        let (stdin, stdout, stderr, operation): (zbus::OwnedFd, zbus::OwnedFd, zbus::OwnedFd, String) =
            answer;
        Ok(Running { stdin: stdin.into(), stdout: stdout.into(), stderr: stderr.into(), operation })
    }

    /// Sets the size of a command's terminal, in characters.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if there is no such
    /// command, or it has ended; [`Kind::NotAuthorized`] if it is another user's.
    pub async fn resize_exec(&self, id: &str, operation: &str, rows: u16, columns: u16) -> Result<()> {
        let body = (operation.to_owned(), rows, columns);
        self.call(&plugin_path(id), PLUGIN, "ResizeExec", body).await
    }

    /// Waits until a command in the plugin has ended. It may have ended a while ago.
    ///
    /// # Errors
    ///
    /// Those of every call: see the [crate's errors](crate#errors). Also [`Kind::NotFound`] if there is no such
    /// command, or it ended long ago; [`Kind::NotAuthorized`] if it is another user's.
    pub async fn wait_exec(&self, id: &str, operation: &str, options: CallOptions) -> Result<Exit> {
        self.call(&plugin_path(id), PLUGIN, "WaitExec", (operation.to_owned(), options)).await
    }

    /// Returns the bytes available to new volumes of a plugin.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if no such plugin is registered; [`Kind::NotSupported`] if it has no controller.
    pub async fn capacity(&self, plugin: &str, options: CapacityOptions) -> Result<u64> {
        self.call(&plugin_path(plugin), PLUGIN, "GetCapacity", (options,)).await
    }

    /// Returns a page of the volumes that the plugin has, and the token of the next page, empty after the last.
    /// `token` is empty for the first page. `max` 0 is the plugin's choice. The pages are not one consistent
    /// view.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if no such plugin is registered; [`Kind::NotSupported`] if it has no controller. After
    /// gRPC's ABORTED, begin again without a token.
    pub async fn list_external_volumes(
        &self,
        plugin: &str,
        token: &str,
        max: u32,
    ) -> Result<(Vec<ExternalRow>, String)> {
        self.call(&plugin_path(plugin), PLUGIN, "ListExternalVolumes", (token.to_owned(), max)).await
    }

    /// Returns a page of the snapshots that the plugin has, and the token of the next page, empty after the
    /// last. The pages are not one consistent view.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if no such plugin is registered; [`Kind::NotSupported`] if it has no controller. After
    /// gRPC's ABORTED, begin again without a token.
    pub async fn list_snapshots(
        &self,
        plugin: &str,
        filter: SnapshotFilter,
    ) -> Result<(Vec<SnapshotRow>, String)> {
        self.call(&plugin_path(plugin), PLUGIN, "ListSnapshots", (filter,)).await
    }

    /// Has the plugin delete a snapshot. A missing one is success.
    ///
    /// # Errors
    ///
    /// Those of every call and of every plugin call: see the [crate's errors](crate#errors). Also
    /// [`Kind::NotFound`] if no such plugin is registered; [`Kind::NotSupported`] if it has no controller;
    /// [`Kind::NotAuthorized`] if the snapshot is of no volume that the caller registered.
    pub async fn delete_snapshot(&self, plugin: &str, snapshot: &str, options: CallOptions) -> Result<()> {
        self.call(&plugin_path(plugin), PLUGIN, "DeleteSnapshot", (snapshot.to_owned(), options)).await
    }

    /// One call. It runs in a task of its own: when the caller no longer waits, the daemon still counts it as
    /// unanswered, and so must the bound.
    async fn call<B, R>(
        &self,
        path: &str,
        interface: &'static str,
        member: &'static str,
        body: B,
    ) -> Result<R>
    where
        B: Serialize + DynamicType + Send + Sync + 'static,
        R: DeserializeOwned + Type,
    {
        // These look into memory or the journal; all else may wait for a plugin or a kernel that hangs.
        let short = matches!(
            member,
            "GetAll" | "ListPlugins" | "ListOperations" | "CancelOperation" | "GetEvents" | "GetVolume"
        );
        let bound = if short { &self.short } else { &self.waiting };
        let closed = || Error::Disconnected("the client was closed".to_owned());
        let permit = bound.clone().acquire_owned().await.map_err(|_| closed())?;
        if self.withdrawn.load(Ordering::Relaxed) {
            return Err(Error::Withdrawn);
        }
        let connection = self.connection.clone();
        let path = path.to_owned();
        let call = tokio::spawn(async move {
            let reply =
                connection.call_method(Some(NAME), path.as_str(), Some(interface), member, &body).await;
            drop(permit);
            reply
        });
        let reply = call.await.map_err(|_| closed())?.map_err(|error| Error::from_call(member, error))?;
        reply.body().deserialize().map_err(|source| Error::Bus { member: member.to_owned(), source })
    }
}

/// A command that runs in a plugin. On a terminal all three streams are the terminal's master side.
#[derive(Debug)]
pub struct Running {
    /// The command's standard input, to write to.
    pub stdin: OwnedFd,
    /// The command's standard output, to read from.
    pub stdout: OwnedFd,
    /// The command's standard error, to read from.
    pub stderr: OwnedFd,
    /// The ID of the command, for [`Client::wait_exec`] and [`Client::cancel_operation`].
    pub operation: String,
}

/// A plugin's object: the id escaped as sd_bus_path_encode does, everything but letters and digits, and a
/// digit in front, as `_` and two hex digits.
fn plugin_path(id: &str) -> String {
    use std::fmt::Write;

    let mut path = format!("{PATH}/plugin/");
    if id.is_empty() {
        path.push('_');
    }
    for (place, byte) in id.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || (place > 0 && byte.is_ascii_digit()) {
            path.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(path, "_{byte:02x}");
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_paths_are_escaped_as_sd_bus_does() {
        assert_eq!(plugin_path("local"), "/org/csid1/plugin/local");
        assert_eq!(plugin_path("ebs.csi-1_x"), "/org/csid1/plugin/ebs_2ecsi_2d1_5fx");
        assert_eq!(plugin_path("9p"), "/org/csid1/plugin/_39p");
    }
}
