//! The connection and the contract's calls. State: one connection and the count of its unanswered calls.

use std::{
    collections::BTreeMap,
    env,
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
    Address, Connection, DynamicType, OwnedObjectPath, Type, address::Transport, connection::Builder,
};

use crate::{
    error::{Connecting, Error, Result},
    options::{
        AttachOptions, CallOptions, CapacityOptions, ClaimFilter, ClaimOptions, CreateVolume,
        DeregisterOptions, ExecOptions, ExpandOptions, LogOptions, MountFilter, MountOptions, OpenOptions,
        PluginService, PluginSpec, ReconcileOptions, RegisterVolume, ReleaseOptions, SnapshotFilter,
        SnapshotOptions, UnmountOptions, UnregisterOptions, UpgradeOptions, ValidateOptions, VolumeFilter,
        VolumeOptions,
    },
    rows::{
        ClaimRow, Claimed, DrainReport, Event, Exit, Expanded, Explanation, ExternalRow, Manager, MountRow,
        Mounted, OperationRow, Plugin, PluginRow, PluginStats, ReconcileReport, SnapshotRow, Validated,
        VolumeRow, VolumeStats,
    },
};

/// csid's private socket.
pub const SOCKET: &str = "/run/csid/csid.sock";

pub(crate) const NAME: &str = "org.csid1";
pub(crate) const PATH: &str = "/org/csid1";
pub(crate) const MANAGER: &str = "org.csid1.Manager";
const PLUGIN: &str = "org.csid1.Plugin";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";

/// dbus-daemon drops the 129th unanswered call of a connection. Some are kept back for calls that never wait,
/// so that an operation can be cancelled while all the others hang.
const WAITING_CALLS: usize = 112;
const SHORT_CALLS: usize = 12;

/// Which way to csid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The private socket at its usual place, else the system bus.
    Auto,
    /// This private socket and nothing else.
    Socket(PathBuf),
    /// The system bus, `$DBUS_SYSTEM_BUS_ADDRESS` included.
    SystemBus,
}

impl Target {
    /// `$CSID_SOCKET` when it is set, else `Auto`. A socket that was named has no fall-back: another csid
    /// than the one asked for must not answer.
    pub fn from_env() -> Self {
        match env::var_os("CSID_SOCKET") {
            Some(path) if !path.is_empty() => Self::Socket(path.into()),
            _ => Self::Auto,
        }
    }
}

/// Which way it became.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Via {
    Socket(PathBuf),
    SystemBus,
}

/// A connection to csid. Clones share it, and its bound on unanswered calls.
#[derive(Clone)]
pub struct Client {
    pub(crate) connection: Connection,
    via: Via,
    waiting: Arc<Semaphore>,
    short: Arc<Semaphore>,
    /// Set: what is not sent yet, never is.
    withdrawn: Arc<AtomicBool>,
}

impl Client {
    pub async fn connect(target: &Target) -> Result<Self> {
        let mut failed = Connecting { socket: None, bus: None };
        let socket = match target {
            Target::Auto => Some(PathBuf::from(SOCKET)),
            Target::Socket(path) => Some(path.clone()),
            Target::SystemBus => None,
        };
        if let Some(path) = socket {
            let address = Address::from(Transport::Unix(zbus::address::transport::Unix::new(
                zbus::address::transport::UnixSocket::File(path.clone()),
            )));
            match Builder::address(address).p2p().build().await {
                Ok(connection) => return Ok(Self::on(connection, Via::Socket(path))),
                Err(error) => failed.socket = Some((path, error)),
            }
        }
        if !matches!(target, Target::Socket(_)) {
            match Builder::system().build().await {
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

    /// The same, for a call that `withdrawn` ends while it waits for its turn.
    pub fn unless(self, withdrawn: Arc<AtomicBool>) -> Self {
        Self { withdrawn, ..self }
    }

    pub fn via(&self) -> &Via {
        &self.via
    }

    /// Whether they share one connection.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.waiting, &other.waiting)
    }

    /// When the connection has ended, from either side.
    pub async fn closed(&self) {
        self.connection.closed().await;
    }

    /// The Manager's properties.
    pub async fn manager(&self) -> Result<Manager> {
        self.call(PATH, PROPERTIES, "GetAll", (MANAGER,)).await
    }

    /// Answers when the volume is mounted. Repeating a call whose answer was lost is safe.
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

    /// Answers when the mount is gone; one that is not there is gone already.
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

    /// A mount of the consumer's, or of what is at `subpath` in it, that is attached nowhere: for move_mount(2) in another mount
    /// namespace. The file system is not let go of before it is closed.
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

    /// Whether `source`, a published path, is mounted. A path that is missing is not.
    pub async fn has_mount(&self, source: &str) -> Result<bool> {
        self.call(PATH, MANAGER, "HasMount", source.to_owned()).await
    }

    pub async fn list_mounts(&self, filter: MountFilter) -> Result<Vec<MountRow>> {
        self.call(PATH, MANAGER, "ListMounts", (filter,)).await
    }

    /// Registers a volume that the plugin has, or changes what may change of one that is registered.
    pub async fn register_volume(
        &self,
        namespace: &str,
        id: &str,
        spec: RegisterVolume,
    ) -> Result<VolumeRow> {
        self.call(PATH, MANAGER, "RegisterVolume", (namespace.to_owned(), id.to_owned(), spec)).await
    }

    /// Has the plugin make a volume. Repeating a call whose answer was lost makes no second one.
    pub async fn create_volume(&self, namespace: &str, id: &str, spec: CreateVolume) -> Result<VolumeRow> {
        self.call(PATH, MANAGER, "CreateVolume", (namespace.to_owned(), id.to_owned(), spec)).await
    }

    /// Rows without context and parameters, which [`Self::volume`] has.
    pub async fn list_volumes(&self, filter: VolumeFilter) -> Result<Vec<VolumeRow>> {
        self.call(PATH, MANAGER, "ListVolumes", (filter,)).await
    }

    pub async fn volume(&self, namespace: &str, volume: &str) -> Result<VolumeRow> {
        self.call(PATH, MANAGER, "GetVolume", (namespace.to_owned(), volume.to_owned())).await
    }

    /// Asks the plugin whether the volume can be used so.
    pub async fn validate_volume(
        &self,
        namespace: &str,
        volume: &str,
        options: ValidateOptions,
    ) -> Result<Validated> {
        let body = (namespace.to_owned(), volume.to_owned(), options);
        self.call(PATH, MANAGER, "ValidateVolume", body).await
    }

    /// Forgets the volume; the plugin keeps it.
    pub async fn deregister_volume(
        &self,
        namespace: &str,
        volume: &str,
        options: DeregisterOptions,
    ) -> Result<()> {
        let body = (namespace.to_owned(), volume.to_owned(), options);
        self.call(PATH, MANAGER, "DeregisterVolume", body).await
    }

    /// Has the plugin delete the volume, and what is on it.
    pub async fn delete_volume(&self, namespace: &str, volume: &str, options: VolumeOptions) -> Result<()> {
        let body = (namespace.to_owned(), volume.to_owned(), options);
        self.call(PATH, MANAGER, "DeleteVolume", body).await
    }

    /// To at least `required` bytes and, unless that is 0, at most `limit`.
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

    /// Answers when the snapshot can be used. Repeating a call whose answer was lost makes no second one.
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

    /// Of a volume that is mounted here.
    pub async fn volume_stats(
        &self,
        namespace: &str,
        volume: &str,
        options: CallOptions,
    ) -> Result<VolumeStats> {
        let body = (namespace.to_owned(), volume.to_owned(), options);
        self.call(PATH, MANAGER, "GetVolumeStats", body).await
    }

    /// For a scheduler that keeps its own claims; `node_id` is the plugin's name of the node. The publish context.
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

    pub async fn detach_volume(
        &self,
        namespace: &str,
        volume: &str,
        node_id: &str,
        options: VolumeOptions,
    ) -> Result<()> {
        let body = (namespace.to_owned(), volume.to_owned(), node_id.to_owned(), options);
        self.call(PATH, MANAGER, "DetachVolume", body).await
    }

    /// What the volume waits for, who has it, what failed last and when it is tried again.
    pub async fn explain(&self, namespace: &str, volume: &str, options: CallOptions) -> Result<Explanation> {
        self.call(PATH, MANAGER, "Explain", (namespace.to_owned(), volume.to_owned(), options)).await
    }

    /// Answers when the consumer has the volume; the answer has all that a node needs to use it.
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

    /// Answers when the claim is free; one that is not there is free already.
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

    pub async fn list_claims(&self, filter: ClaimFilter) -> Result<Vec<ClaimRow>> {
        self.call(PATH, MANAGER, "ListClaims", (filter,)).await
    }

    pub async fn reconcile(&self, options: ReconcileOptions) -> Result<ReconcileReport> {
        self.call(PATH, MANAGER, "Reconcile", (options,)).await
    }

    pub async fn list_operations(&self) -> Result<Vec<OperationRow>> {
        self.call(PATH, MANAGER, "ListOperations", ()).await
    }

    pub async fn cancel_operation(&self, id: &str) -> Result<()> {
        self.call(PATH, MANAGER, "CancelOperation", id.to_owned()).await
    }

    /// Events after `since`, at most `max`; and whether some before them are lost.
    pub async fn get_events(&self, since: u64, max: u32) -> Result<(Vec<Event>, bool)> {
        self.call(PATH, MANAGER, "GetEvents", (since, max)).await
    }

    /// Reads the configuration again. With an error in it nothing changes.
    pub async fn reload(&self, options: CallOptions) -> Result<()> {
        self.call(PATH, MANAGER, "Reload", (options,)).await
    }

    pub async fn register_plugin(&self, id: &str, spec: PluginSpec) -> Result<OwnedObjectPath> {
        self.call(PATH, MANAGER, "RegisterPlugin", (id.to_owned(), spec)).await
    }

    pub async fn unregister_plugin(&self, id: &str, options: UnregisterOptions) -> Result<()> {
        self.call(PATH, MANAGER, "UnregisterPlugin", (id.to_owned(), options)).await
    }

    pub async fn list_plugins(&self) -> Result<Vec<PluginRow>> {
        self.call(PATH, MANAGER, "ListPlugins", ()).await
    }

    /// Answers when the plugin's service is ready. Without a deadline it waits for ever.
    pub async fn wait_for_plugin(
        &self,
        id: &str,
        service: PluginService,
        options: CallOptions,
    ) -> Result<OwnedObjectPath> {
        self.call(PATH, MANAGER, "WaitForPlugin", (id.to_owned(), service, options)).await
    }

    /// A plugin's properties.
    pub async fn plugin(&self, id: &str) -> Result<Plugin> {
        self.call(&plugin_path(id), PROPERTIES, "GetAll", (PLUGIN,)).await
    }

    /// Asks the plugin itself whether it is ready.
    pub async fn probe_plugin(&self, id: &str, options: CallOptions) -> Result<bool> {
        self.call(&plugin_path(id), PLUGIN, "Probe", (options,)).await
    }

    /// What is measured of the plugin.
    pub async fn plugin_stats(&self, id: &str) -> Result<PluginStats> {
        self.call(&plugin_path(id), PLUGIN, "GetStats", ()).await
    }

    /// Stops the plugin's unit, starts it again, and answers when it is ready. Its mounts stay.
    pub async fn restart_plugin(&self, id: &str, options: CallOptions) -> Result<()> {
        self.call(&plugin_path(id), PLUGIN, "Restart", (options,)).await
    }

    /// Attach volumes under the name that the plugin has for this node now, which is `node_id`.
    pub async fn accept_node_id(&self, id: &str, node_id: &str, options: CallOptions) -> Result<()> {
        self.call(&plugin_path(id), PLUGIN, "AcceptNodeId", (node_id.to_owned(), options)).await
    }

    /// Unmounts every mount of the plugin on this host; new ones are refused until it answers. The plugin goes on.
    pub async fn drain_plugin(&self, id: &str, options: CallOptions) -> Result<DrainReport> {
        self.call(&plugin_path(id), PLUGIN, "Drain", (options,)).await
    }

    /// Has an instance of this spec take the place of the plugin's, under its mounts; what is absent stays as it was. The new
    /// instance's name, once the other one is gone. With an error the other one goes on.
    pub async fn upgrade_plugin(
        &self,
        id: &str,
        spec: PluginSpec,
        options: UpgradeOptions,
    ) -> Result<String> {
        self.call(&plugin_path(id), PLUGIN, "Upgrade", (spec, options)).await
    }

    /// What the plugin wrote to the journal, to be read to its end; who closes it is followed no longer.
    pub async fn open_plugin_log(&self, id: &str, options: LogOptions) -> Result<OwnedFd> {
        let log: zbus::OwnedFd = self.call(&plugin_path(id), PLUGIN, "OpenLog", (options,)).await?;
        Ok(log.into())
    }

    /// Runs a command in the plugin's namespaces and control group, as root; answers when it is begun. It goes on when its
    /// streams are closed, as far as it does without.
    pub async fn exec_plugin(&self, id: &str, argv: Vec<String>, options: ExecOptions) -> Result<Running> {
        let body = (argv, options);
        let answer = self.call(&plugin_path(id), PLUGIN, "Exec", body).await?;
        let (stdin, stdout, stderr, operation): (zbus::OwnedFd, zbus::OwnedFd, zbus::OwnedFd, String) =
            answer;
        Ok(Running { stdin: stdin.into(), stdout: stdout.into(), stderr: stderr.into(), operation })
    }

    /// Sets the size of a command's terminal.
    pub async fn resize_exec(&self, id: &str, operation: &str, rows: u16, columns: u16) -> Result<()> {
        let body = (operation.to_owned(), rows, columns);
        self.call(&plugin_path(id), PLUGIN, "ResizeExec", body).await
    }

    /// Answers when a command in the plugin has ended, also when that was a while ago.
    pub async fn wait_exec(&self, id: &str, operation: &str, options: CallOptions) -> Result<Exit> {
        self.call(&plugin_path(id), PLUGIN, "WaitExec", (operation.to_owned(), options)).await
    }

    /// How many bytes volumes could have that the plugin makes now.
    pub async fn capacity(&self, plugin: &str, options: CapacityOptions) -> Result<u64> {
        self.call(&plugin_path(plugin), PLUGIN, "GetCapacity", (options,)).await
    }

    /// A page of the volumes that the plugin has, and the token of the next, empty after the last. 0 is as many as the
    /// plugin likes. Pages are no consistent view; with ABORTED the list begins anew, without a token.
    pub async fn list_external_volumes(
        &self,
        plugin: &str,
        token: &str,
        max: u32,
    ) -> Result<(Vec<ExternalRow>, String)> {
        self.call(&plugin_path(plugin), PLUGIN, "ListExternalVolumes", (token.to_owned(), max)).await
    }

    /// The same of the snapshots that the plugin has.
    pub async fn list_snapshots(
        &self,
        plugin: &str,
        filter: SnapshotFilter,
    ) -> Result<(Vec<SnapshotRow>, String)> {
        self.call(&plugin_path(plugin), PLUGIN, "ListSnapshots", (filter,)).await
    }

    /// Has the plugin delete the snapshot; one that is not there is deleted.
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

/// A command that runs in a plugin. On a terminal all three are its master's end.
#[derive(Debug)]
pub struct Running {
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
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
