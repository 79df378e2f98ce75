//! The contract's `a{sv}` arguments as structs. A field is a key of the same name in kebab-case. `None` sends
//! nothing, so that an absent map differs from an empty one. Structs with a volume's context or mount flags
//! have no Debug, because these may contain credentials.

use std::{collections::BTreeMap, os::fd::OwnedFd, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize, Serializer};
use zbus::Type;

use crate::secrets::SealedSecrets;

macro_rules! dict {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Default, Clone, Serialize, Type)]
        #[zbus(signature = "dict")]
        #[serde(rename_all = "kebab-case")]
        pub struct $name {
            $(
                $(#[$field_meta])*
                #[serde(with = "zbus::as_variant::optional", skip_serializing_if = "Option::is_none")]
                pub $field: Option<$ty>,
            )*
        }
    };
}

/// A `dict` with the contract's common keys.
macro_rules! options {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $ty:ty,)* }) => {
        dict! {
            $(#[$meta])* $name {
                /// Time from now until the caller stops waiting, in microseconds. `None`: no deadline.
                deadline_usec: u64,
                /// The caller's name for the operation, unique for its user ID: what
                /// [`crate::Client::cancel_operation`] takes. `None`: csid chooses one.
                operation_id: String,
                /// The volume's secrets. `None`: none.
                secrets: SealedSecrets,
                /// Used instead of secrets: the name of a systemd credential, which csid can load again after a
                /// reboot. `None`: none.
                credential: String,
                $($(#[$field_meta])* $field: $ty,)*
            }
        }

        impl $name {
            /// Returns the same options, with the common keys of `common`.
            pub fn with(self, common: CallOptions) -> Self {
                let CallOptions { deadline_usec, operation_id, secrets, credential } = common;
                #[allow(clippy::needless_update)] // CallOptions has no more than these
                Self { deadline_usec, operation_id, secrets, credential, ..self }
            }
        }
    };
}

/// `options` of a call that takes a volume inline too; for a registered one all of these are absent.
macro_rules! volume_options {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $ty:ty,)* }) => {
        options! {
            $(#[$meta])* $name {
                /// The plugin's ID, for a volume given inline. `None`: the volume is registered.
                plugin: String,
                /// The plugin's ID of the volume, for a volume given inline. `None`: the volume is registered.
                external_id: String,
                /// The volume context of a volume given inline. `None`: none.
                volume_context: BTreeMap<String, String>,
                /// How the volume can be used. `None`: not given.
                capabilities: Vec<Capability>,
                /// The file system, such as `xfs`. `None`: as registered, else the plugin's default.
                fs_type: String,
                /// Mount flags for the plugin. `None`: as registered, else none.
                mount_flags: Vec<String>,
                $($(#[$field_meta])* $field: $ty,)*
            }
        }
    };
}

options! {
    /// Options of the calls that take the common keys only.
    CallOptions {}
}

options! {
    /// Options of [`crate::Client::join`].
    JoinOptions {
        /// Moves this host's own registrations to the servers first. `None`: false.
        import: bool,
    }
}

volume_options! {
    /// Options of [`crate::Client::mount`] and [`crate::Client::adopt_mount`]. A volume given inline needs
    /// `plugin` and `external_id`.
    MountOptions {
        /// The publish context of an inline volume that was attached. `None`: none.
        publish_context: BTreeMap<String, String>,
        /// The group that the plugin gives the volume to. `None`: as registered, else none.
        mount_group: String,
        /// The access mode. `None`: that in which a registered volume is used, else its first capability that fits;
        /// `SingleNodeWriter` for an inline one.
        access_mode: AccessMode,
        /// The attachment mode. `None`: as for `access_mode`; `FileSystem` for an inline volume.
        attachment_mode: AttachmentMode,
        /// Mounts read-only. `None`: false.
        read_only: bool,
        /// Distinguishes several mounts by one consumer. `None`: the empty tag.
        tag: String,
        /// An absolute path of the consumer, where csid binds the published volume. `None`: none.
        target: String,
        /// How mounts propagate between `target` and the host. `None`: `Private`.
        propagation: Propagation,
        /// Honours set-user-ID programs. Root only. `None`: as registered, else false.
        suid: bool,
        /// Honours device nodes. Root only. `None`: as registered, else false.
        dev: bool,
        /// The action after a reboot. `None`: `Auto` for a registered volume, `Hold` for an inline one.
        restore: Restore,
        /// The end of the claim of a registered volume, and of the mount with it: `unit:NAME`, or `caller`, this
        /// connection. `None`: Unmount.
        bind: String,
        /// How long after that the claim lasts, in microseconds. Needs `bind`. `None`: it ends at once.
        grace_usec: u64,
        /// How long to wait while a claim, mount or expansion is in the way, or the plugin takes no more volumes
        /// on this node, in microseconds. `None`: not at all.
        wait_usec: u64,
        /// A descriptor of `target` that the caller opened with O_PATH. csid never walks to the target then, so an
        /// automount there may wait for this mount. Root only, on the private socket; not for AdoptMount. Feature
        /// `target-fd`. `None`: csid opens the target.
        target_fd: Descriptor,
        /// AdoptMount only: where another manager staged the volume. `None`: its plugin does not stage.
        staging_path: String,
        /// AdoptMount only, required there: where another manager published the volume.
        published_path: String,
    }
}

options! {
    /// Options of [`crate::Client::unmount`].
    UnmountOptions {
        /// The tag of the mount. `None`: the empty tag.
        tag: String,
        /// Unmounts every mount of the consumer. Excludes `tag`. `None`: false.
        all_tags: bool,
        /// Makes a missing mount `NotFound`. The details have the consumer's existing tags, and `mount PATH` among the
        /// holders for each mount of the volume that is not csid's. csid sees those only while it has the volume staged or
        /// published. `None`: false, it is success.
        must_exist: bool,
        /// Detaches a dead mount lazily. `None`: false.
        force: bool,
        /// Also detaches a mount whose server does not answer a probe made now. Root only. `None`: false.
        force_hung: bool,
        /// False: return after the first try, with its error if it failed; csid keeps trying. `None`: true.
        wait: bool,
        /// Last resort, root only: drops the row though the plugin never acknowledged. The error is `Busy`
        /// while any mount namespace shows a mount of it. `None`: false.
        forget: bool,
        /// The mount's target, which the caller has unmounted already. Needs `target_fd`. `None`: csid unmounts it.
        target: String,
        /// A descriptor, with O_PATH, of the directory that the unmounted target shows. csid never walks to the
        /// target then. Root only, on the private socket. Feature `target-fd`. `None`: csid opens the target.
        target_fd: Descriptor,
    }
}

/// A descriptor that is sent with a call. It is closed when its last clone is dropped.
#[derive(Clone, Type)]
#[zbus(signature = "h")]
pub struct Descriptor(Arc<zbus::OwnedFd>);

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Descriptor(Arc::new(fd.into()))
    }
}

impl Serialize for Descriptor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

options! {
    /// Options of [`crate::Client::open_mount`].
    OpenOptions {
        /// The tag of the mount. `None`: the empty tag.
        tag: String,
        /// A directory or file on the volume. `None`: all of it.
        subpath: String,
        /// Opens it read-only. `None`: false.
        read_only: bool,
        /// A user namespace that maps the owners of files. Root only. Feature `open-mount-idmap`. `None`: owners are as they are.
        userns: Descriptor,
    }
}

options! {
    /// The specification for [`crate::Client::register_volume`]. `plugin`, `external_id` and at least one
    /// capability are required.
    RegisterVolume {
        /// The plugin's ID. Required.
        plugin: String,
        /// The plugin's ID of the volume. Required.
        external_id: String,
        /// A name for people. `None`: none.
        name: String,
        /// How the volume can be used. Required.
        capabilities: Vec<Capability>,
        /// The file system, such as `xfs`. `None`: the plugin's default.
        fs_type: String,
        /// Mount flags for the plugin. `None`: none.
        mount_flags: Vec<String>,
        /// The group that the plugin gives the volume to at each mount. `None`: none.
        mount_group: String,
        /// The volume context. `None`: none.
        context: BTreeMap<String, String>,
        /// Parameters for the plugin. `None`: none.
        parameters: BTreeMap<String, String>,
        /// The segments of the places where the volume can be used. `None`: anywhere.
        topologies: Vec<BTreeMap<String, String>>,
        /// The action for a dead mount. `None`: `Report`.
        heal: Heal,
        /// Honours set-user-ID programs on the volume. Root only. `None`: false.
        suid: bool,
        /// Honours device nodes on the volume. Root only. `None`: false.
        dev: bool,
    }
}

options! {
    /// The specification for [`crate::Client::create_volume`]. `plugin` and at least one capability are
    /// required.
    CreateVolume {
        /// The plugin's ID. Required.
        plugin: String,
        /// The name that the plugin is given for the volume. `None`: csid makes one.
        name: String,
        /// How the volume can be used. Required.
        capabilities: Vec<Capability>,
        /// The file system, such as `xfs`. `None`: the plugin's default.
        fs_type: String,
        /// Mount flags for the plugin. `None`: none.
        mount_flags: Vec<String>,
        /// The group that the plugin gives the volume to at each mount. `None`: none.
        mount_group: String,
        /// Parameters for the plugin. `None`: none.
        parameters: BTreeMap<String, String>,
        /// The segments of the places where the volume can be used. `None`: anywhere.
        topologies: Vec<BTreeMap<String, String>>,
        /// The action for a dead mount. `None`: `Report`.
        heal: Heal,
        /// Honours set-user-ID programs on the volume. Root only. `None`: false.
        suid: bool,
        /// Honours device nodes on the volume. Root only. `None`: false.
        dev: bool,
        /// The least size, in bytes. `None` or 0: the plugin's choice.
        capacity_min: u64,
        /// The largest size, in bytes. `None` or 0: no limit.
        capacity_max: u64,
        /// The name of a volume in the same namespace, whose content the new volume has. `None`: none.
        clone: String,
        /// The plugin's ID of the snapshot whose content the new volume has. `None`: none.
        snapshot: String,
        /// False: csid does not register the volume; the caller keeps the result. `None`: true.
        register: bool,
    }
}

volume_options! {
    /// Options of [`crate::Client::validate_volume`]. Without a mode: all capabilities of the volume.
    ValidateOptions {
        /// The access mode. `None`: not given.
        access_mode: AccessMode,
        /// The attachment mode. `None`: not given.
        attachment_mode: AttachmentMode,
    }
}

volume_options! {
    /// Options of [`crate::Client::delete_volume`].
    VolumeOptions {}
}

volume_options! {
    /// Options of [`crate::Client::detach_volume`].
    DetachOptions {
        /// The last resort: drops the record of the attachment although the plugin has not acknowledged the detach. Root
        /// only; not together with inline options. `None`: false.
        forget: bool,
    }
}

volume_options! {
    /// Options of [`crate::Client::expand_volume`].
    ExpandOptions {
        /// The part of the expansion. `None`: `All`.
        part: Part,
    }
}

volume_options! {
    /// Options of [`crate::Client::create_snapshot`].
    SnapshotOptions {
        /// Parameters for the plugin. `None`: none.
        parameters: BTreeMap<String, String>,
        /// False: return as soon as the plugin has answered, with `ready` false if the snapshot cannot be used
        /// yet. `None`: true.
        wait: bool,
    }
}

volume_options! {
    /// Options of [`crate::Client::attach_volume`].
    AttachOptions {
        /// Attaches read-only. `None`: false.
        read_only: bool,
        /// The access mode. `None`: that in which the volume is used, else its first capability that fits.
        access_mode: AccessMode,
        /// The attachment mode. `None`: as for `access_mode`.
        attachment_mode: AttachmentMode,
    }
}

options! {
    /// Options of [`crate::Client::capacity`]: the properties of new volumes.
    CapacityOptions {
        /// How they would be used. `None`: any way.
        capabilities: Vec<Capability>,
        /// Parameters of the volumes. `None`: none.
        parameters: BTreeMap<String, String>,
        /// The segments of one place. Sent only to a plugin that has topologies. `None`: any place.
        topology: BTreeMap<String, String>,
    }
}

options! {
    /// Options of [`crate::Client::list_snapshots`]: which snapshots, and which page.
    SnapshotFilter {
        /// The plugin's ID of a snapshot. `None`: all.
        snapshot: String,
        /// The plugin's ID of a volume. `None`: all.
        volume: String,
        /// The token that the page before returned. `None`: the first page.
        token: String,
        /// The most snapshots of the page. `None` or 0: the plugin's choice.
        max: u32,
    }
}

options! {
    /// Options of [`crate::Client::deregister_volume`].
    DeregisterOptions {
        /// Deregisters also a claimed volume; its claims are dropped as they are. `None`: false.
        force: bool,
        /// Gives up a creation or deletion that never ends. Root only. `None`: false.
        forget: bool,
    }
}

options! {
    /// Options of [`crate::Client::claim`].
    ClaimOptions {
        /// Read or write. `None`: read with a reader-only access mode, else write.
        mode: ClaimMode,
        /// The access mode. `None`: that in which the volume is used, else its first capability that fits.
        access_mode: AccessMode,
        /// The attachment mode. `None`: as for `access_mode`.
        attachment_mode: AttachmentMode,
        /// The node that claims. csid refuses any other than its own. `None`: csid's own.
        node: String,
        /// How long to wait while a claim or an expansion is in the way, or the plugin takes no more volumes on
        /// this node, in microseconds. `None`: not at all.
        wait_usec: u64,
        /// The end of the claim: `unit:NAME`, or `caller`, this connection. `None`: Release.
        bind: String,
        /// How long after that the claim lasts, in microseconds. Needs `bind`. `None`: it ends at once.
        grace_usec: u64,
    }
}

options! {
    /// Options of [`crate::Client::release`].
    ReleaseOptions {
        /// Drops the claim as it is, because an operator knows that its consumer is gone. `None`: false.
        force: bool,
        /// Last resort, root only: drops the claim and the consumer's mounts though the plugin never
        /// acknowledged. The error is `Busy` while any mount namespace shows one of them. `None`: false.
        forget: bool,
        /// The node that the claim has to be on. `None`: any node.
        node: String,
    }
}

options! {
    /// Options of [`crate::Client::reconcile`].
    ReconcileOptions {
        /// Only reports what would be done. `None`: false.
        dry_run: bool,
        /// Removes paths of csid without a row, and unmounts mounts there, unless they are in use. `None`: false, they are only
        /// reported.
        remove_orphans: bool,
        /// After `StateCorrupt`: starts a new journal with the present mounts. `None`: false.
        new_journal: bool,
    }
}

options! {
    /// Options of [`crate::Client::open_plugin_log`].
    LogOptions {
        /// Continues with new lines. `None`: false.
        follow: bool,
        /// Nothing older than this, in microseconds since 1970. `None`: as far back as the journal goes.
        since: u64,
        /// At most so many lines, the newest. `None`: all, or with `follow` and without `since` the last ten.
        lines: u32,
    }
}

options! {
    /// Options of [`crate::Client::exec_plugin`].
    ExecOptions {
        /// Runs the command on a terminal, which is its standard input, output and error. `None`: false.
        tty: bool,
        /// The height of the terminal, in characters. Needs `tty`. `None`: 24.
        rows: u16,
        /// The width of the terminal, in characters. Needs `tty`. `None`: 80.
        columns: u16,
        /// The working directory, as the plugin sees it. `None`: `/`.
        directory: String,
    }
}

options! {
    /// Options of [`crate::Client::unregister_plugin`].
    UnregisterOptions {
        /// The instance. `None`: all.
        instance: String,
        /// Unregisters also a plugin whose volumes are in use. `None`: false.
        force: bool,
    }
}

options! {
    /// Options of [`crate::Client::upgrade_plugin`].
    UpgradeOptions {
        /// The instance to replace, of a plugin with several. `None`: its only one.
        instance: String,
    }
}

options! {
    /// The specification for [`crate::Client::register_plugin`]. A managed plugin has `argv`, one in a systemd
    /// unit `unit` and `socket`, an external one `socket`.
    PluginSpec {
        /// The supervisor of the plugin. Required.
        supervision: Supervision,
        /// Program (absolute path) and arguments of a managed plugin. Root only. `None`: none.
        argv: Vec<String>,
        /// The environment of a managed plugin. It is stored and public: no secrets here. Root only. `None`:
        /// none.
        environment: BTreeMap<String, String>,
        /// Systemd credentials of a managed plugin, each as `LoadCredential=` has it. Not the common key
        /// `credential`. `None`: none.
        credentials: Vec<String>,
        /// The service in which the plugin runs, with supervision `Unit`. Root only. `None`: none.
        unit: String,
        /// The path where an external plugin or a unit listens. `None` for a managed one.
        socket: String,
        /// One of several processes of the plugin. `None`: `default`.
        instance: String,
        /// The host directory for the volumes' paths, which the plugin sees as `plugin_view`. Root only.
        /// `None`: csid's own.
        plugin_root: String,
        /// The same directory as the plugin sees it. Root only. `None`: `plugin_root`.
        plugin_view: String,
        /// `journal` or `none`. `None`: `journal`.
        log: String,
        /// Of a managed plugin: `node-block`, `node-fuse`, `node-net` or `controller`. Root only. `None`: all
        /// devices and capabilities.
        profile: String,
        /// Of a managed plugin's mounts. Root only. `None`: `Bidirectional`, it is in the host's mount
        /// namespace.
        propagation: Propagation,
        /// Of a managed plugin: `host`, `none` or `netns:NAME`. Root only. `None`: `host`.
        network: String,
    }
}

dict! {
    /// The filter of [`crate::Client::list_mounts`]: only mounts that match all fields. `None` matches any.
    #[derive(Debug)]
    MountFilter {
        /// The namespace of the volume.
        namespace: String,
        /// The name of the volume.
        volume: String,
        /// The consumer.
        consumer: String,
        /// The tag.
        tag: String,
        /// The plugin's ID.
        plugin: String,
        /// A state as in [`crate::MountRow::state`].
        state: String,
        /// The user who made the mount.
        uid: u32,
        /// The exact path of the target.
        target: String,
        /// Only rows after the one with this cursor, which a call with the same filter returned. `None`: from the first.
        after: String,
        /// The most rows. `None` or 0: all.
        max: u32,
    }
}

dict! {
    /// The filter of [`crate::Client::list_volumes`]: only volumes that match all fields. `None` matches any.
    #[derive(Debug)]
    VolumeFilter {
        /// The namespace.
        namespace: String,
        /// The plugin's ID.
        plugin: String,
        /// A node that has claimed the volume.
        node: String,
        /// The beginning of the volume's name.
        prefix: String,
        /// Also lists volumes that files declare and that are not registered yet; their `standing` is
        /// `declared`. `None`: false.
        declared: bool,
        /// Only rows after the one with this cursor, which a call with the same filter returned. `None`: from the first.
        after: String,
        /// The most rows. `None` or 0: all.
        max: u32,
    }
}

dict! {
    /// The filter of [`crate::Client::list_claims`]: only claims that match all fields. `None` matches any.
    #[derive(Debug)]
    ClaimFilter {
        /// The namespace of the volume.
        namespace: String,
        /// The name of the volume.
        volume: String,
        /// The consumer.
        consumer: String,
        /// The node.
        node: String,
        /// Lists claims that ended, instead of current ones. `None`: false.
        past: bool,
        /// Only rows after the one with this cursor, which a call with the same filter returned. `None`: from the first.
        after: String,
        /// The most rows. `None` or 0: all.
        max: u32,
    }
}

/// A way in which a volume can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Type)]
#[zbus(signature = "dict")]
#[serde(rename_all = "kebab-case")]
pub struct Capability {
    /// The users of a volume at the same time.
    #[serde(serialize_with = "zbus::as_variant::serialize")]
    pub access_mode: AccessMode,
    /// The way of use: file system or block device.
    #[serde(serialize_with = "zbus::as_variant::serialize")]
    pub attachment_mode: AttachmentMode,
}

/// An enum of the contract's words.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Type)]
        #[zbus(signature = "s")]
        pub enum $name {
            $($(#[$variant_meta])* #[serde(rename = $word)] $variant,)*
        }

        impl $name {
            /// The words of the contract, in its order.
            pub const WORDS: &'static [&'static str] = &[$($word),*];

            /// Returns the word of the contract.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(word: &str) -> Result<Self, String> {
                match word {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(format!("`{word}` is none of {}", Self::WORDS.join(", "))),
                }
            }
        }
    };
}

words! {
    /// The users of a volume at the same time, and their rights.
    AccessMode {
        /// One consumer, which reads and writes.
        SingleNodeWriter = "single-node-writer",
        /// One consumer, which reads.
        SingleNodeReaderOnly = "single-node-reader-only",
        /// One consumer, which reads and writes.
        SingleNodeSingleWriter = "single-node-single-writer",
        /// Any number of consumers on one node.
        SingleNodeMultiWriter = "single-node-multi-writer",
        /// Any number of consumers, which read.
        MultiNodeReaderOnly = "multi-node-reader-only",
        /// One consumer that writes, and any number that read.
        MultiNodeSingleWriter = "multi-node-single-writer",
        /// Any number of consumers, which read and write.
        MultiNodeMultiWriter = "multi-node-multi-writer",
    }
}

words! {
    /// The way to use a volume.
    AttachmentMode {
        /// The file system of the volume is mounted.
        FileSystem = "file-system",
        /// The volume is a device node.
        BlockDevice = "block-device",
    }
}

words! {
    /// How a mount made inside a consumer's target reaches the host, and back.
    Propagation {
        /// Neither way.
        Private = "private",
        /// Mounts of the host reach the consumer.
        HostToTask = "host-to-task",
        /// Both ways. Root only.
        Bidirectional = "bidirectional",
    }
}

words! {
    /// The action for a mount after a reboot.
    Restore {
        /// Mounts it again.
        Auto = "auto",
        /// Keeps its row as `lost` until Mount or Unmount.
        Hold = "hold",
    }
}

words! {
    /// The action for a dead mount.
    Heal {
        /// Reports it.
        Report = "report",
        /// Mounts it again at the same paths.
        Remount = "remount",
    }
}

words! {
    /// The use of a claimed volume by its consumer.
    ClaimMode {
        /// Reads only.
        Read = "read",
        /// Reads and writes.
        Write = "write",
    }
}

words! {
    /// A part of an expansion.
    Part {
        /// Both parts.
        All = "all",
        /// The plugin's controller service.
        Controller = "controller",
        /// The plugin's node service.
        Node = "node",
    }
}

words! {
    /// The supervisor of a plugin.
    Supervision {
        /// csid.
        Managed = "managed",
        /// An existing systemd unit, which csid starts.
        Unit = "unit",
        /// Anything else.
        External = "external",
    }
}

words! {
    /// A service of a plugin.
    PluginService {
        /// Mounts volumes on this node.
        Node = "node",
        /// Creates, attaches and deletes volumes.
        Controller = "controller",
    }
}
