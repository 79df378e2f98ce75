//! The contract's `a{sv}` arguments as structs. A field is a key of the same name in kebab-case; `None` sends
//! nothing, so that an absent map and an empty one stay two things. No Debug where a volume's context or
//! mount flags are: they may hold credentials.

use std::{collections::BTreeMap, str::FromStr};

use serde::{Deserialize, Serialize};
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
                /// From now, in microseconds. It ends this caller's waiting; absent: none.
                deadline_usec: u64,
                /// The caller's name for this call, unique for its uid: what `CancelOperation` takes.
                operation_id: String,
                secrets: SealedSecrets,
                /// Instead of secrets: a systemd credential that csid can load again after a reboot.
                credential: String,
                $($(#[$field_meta])* $field: $ty,)*
            }
        }

        impl $name {
            /// The same, with the contract's common keys as they are in `common`.
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
                plugin: String,
                external_id: String,
                volume_context: BTreeMap<String, String>,
                capabilities: Vec<Capability>,
                fs_type: String,
                mount_flags: Vec<String>,
                $($(#[$field_meta])* $field: $ty,)*
            }
        }
    };
}

options! {
    /// For calls that take the common keys only.
    CallOptions {}
}

volume_options! {
    /// Mount. For a volume given inline `plugin` and `external_id` are needed.
    MountOptions {
        publish_context: BTreeMap<String, String>,
        mount_group: String,
        access_mode: AccessMode,
        attachment_mode: AttachmentMode,
        read_only: bool,
        /// Tells several mounts by one consumer apart.
        tag: String,
        /// A path of the consumer's own, where the published volume is bound too.
        target: String,
        propagation: Propagation,
        suid: bool,
        dev: bool,
        restore: Restore,
        /// Of a registered volume: what ends its claim, and with it the mount: `unit:NAME`, or `caller`, this connection.
        bind: String,
        /// How long after that; absent: at once.
        grace_usec: u64,
    }
}

options! {
    UnmountOptions {
        tag: String,
        /// Detach a dead mount lazily.
        force: bool,
    }
}

options! {
    OpenOptions {
        tag: String,
        /// A directory or file on the volume; absent: all of it.
        subpath: String,
        read_only: bool,
    }
}

options! {
    /// RegisterVolume's spec: `plugin`, `external_id` and at least one capability are needed.
    RegisterVolume {
        plugin: String,
        external_id: String,
        /// For people.
        name: String,
        capabilities: Vec<Capability>,
        fs_type: String,
        mount_flags: Vec<String>,
        mount_group: String,
        context: BTreeMap<String, String>,
        parameters: BTreeMap<String, String>,
        topologies: Vec<BTreeMap<String, String>>,
        heal: Heal,
        suid: bool,
        dev: bool,
    }
}

options! {
    /// CreateVolume's spec: `plugin` and at least one capability are needed.
    CreateVolume {
        plugin: String,
        /// What the plugin is told to call it; csid makes a name when there is none.
        name: String,
        capabilities: Vec<Capability>,
        fs_type: String,
        mount_flags: Vec<String>,
        mount_group: String,
        parameters: BTreeMap<String, String>,
        topologies: Vec<BTreeMap<String, String>>,
        heal: Heal,
        suid: bool,
        dev: bool,
        /// Bytes.
        capacity_min: u64,
        capacity_max: u64,
        /// The volume whose clone it shall be.
        clone: String,
        /// The plugin's id of the snapshot that it begins with.
        snapshot: String,
        /// False: only create; the caller keeps the row.
        register: bool,
    }
}

volume_options! {
    ValidateOptions {
        access_mode: AccessMode,
        attachment_mode: AttachmentMode,
    }
}

volume_options! {
    /// DeleteVolume and DetachVolume.
    VolumeOptions {}
}

volume_options! {
    ExpandOptions {
        part: Part,
    }
}

volume_options! {
    SnapshotOptions {
        parameters: BTreeMap<String, String>,
    }
}

volume_options! {
    AttachOptions {
        read_only: bool,
        access_mode: AccessMode,
        attachment_mode: AttachmentMode,
    }
}

options! {
    /// GetCapacity: of volumes that are used so, made with these parameters, there.
    CapacityOptions {
        capabilities: Vec<Capability>,
        parameters: BTreeMap<String, String>,
        /// The segments of one place; sent only to a plugin that has topologies.
        topology: BTreeMap<String, String>,
    }
}

options! {
    /// ListSnapshots: only those that are these, and where the list goes on.
    SnapshotFilter {
        /// The plugin's id for the snapshot.
        snapshot: String,
        /// The plugin's id for the volume.
        volume: String,
        /// What the page before answered; absent: from the beginning.
        token: String,
        /// Absent: as many as the plugin likes.
        max: u32,
    }
}

options! {
    DeregisterOptions {
        force: bool,
    }
}

options! {
    ClaimOptions {
        mode: ClaimMode,
        access_mode: AccessMode,
        attachment_mode: AttachmentMode,
        /// Absent: csid's own.
        node: String,
        /// How long to wait for the claims that are in the way; absent: not at all.
        wait_usec: u64,
        /// What ends it in place of Release: `unit:NAME`, or `caller`, this connection.
        bind: String,
        /// How long after that; absent: at once.
        grace_usec: u64,
    }
}

options! {
    ReleaseOptions {
        /// An operator knows that it is gone: the claim is dropped as it is.
        force: bool,
        node: String,
    }
}

options! {
    ReconcileOptions {
        dry_run: bool,
        remove_orphans: bool,
        /// After `StateCorrupt`: begin a new journal with what is mounted.
        new_journal: bool,
    }
}

options! {
    LogOptions {
        /// Also what is still to come.
        follow: bool,
        /// Nothing older, in microseconds since the epoch.
        since: u64,
        /// At most so many lines, the newest.
        lines: u32,
    }
}

options! {
    ExecOptions {
        /// Run it on a terminal: its standard input, output and error are one then.
        tty: bool,
        /// Of the terminal, in characters.
        rows: u16,
        columns: u16,
        /// As the plugin sees it; absent: `/`.
        directory: String,
    }
}

options! {
    UnregisterOptions {
        instance: String,
        force: bool,
    }
}

options! {
    UpgradeOptions {
        /// The instance to replace, of a plugin with several.
        instance: String,
    }
}

options! {
    /// RegisterPlugin's spec: a managed plugin has argv, one in a unit its name and a socket, an
    /// external one a socket.
    PluginSpec {
        supervision: Supervision,
        argv: Vec<String>,
        /// Stored and public: no secrets here.
        environment: BTreeMap<String, String>,
        /// `LoadCredential=` of the plugin. Named `credentials` in the contract, not the common key.
        credentials: Vec<String>,
        /// The service that the plugin runs in, which somebody else has defined.
        unit: String,
        socket: String,
        instance: String,
        /// The host directory that the plugin sees as `plugin_view`.
        plugin_root: String,
        plugin_view: String,
        log: String,
        /// What kind of driver a managed one is: `node-block`, `node-fuse`, `node-net`, `controller`.
        profile: String,
        /// Of a managed one. Absent: `bidirectional`, it is in the host's mount namespace.
        propagation: Propagation,
        /// Of a managed one: `host`, `none`, `netns:NAME`.
        network: String,
    }
}

dict! {
    /// ListMounts: only rows that have all of these.
    #[derive(Debug)]
    MountFilter {
        namespace: String,
        volume: String,
        consumer: String,
        tag: String,
        plugin: String,
        state: String,
        uid: u32,
    }
}

dict! {
    /// ListVolumes: only rows that have all of these.
    #[derive(Debug)]
    VolumeFilter {
        namespace: String,
        plugin: String,
        /// With a claim of this node.
        node: String,
        /// What the volume's id begins with.
        prefix: String,
        /// Also what files declare and is not registered yet, as it is to be: its `standing` is `declared`.
        declared: bool,
    }
}

dict! {
    /// ListClaims: only rows that have all of these.
    #[derive(Debug)]
    ClaimFilter {
        namespace: String,
        volume: String,
        consumer: String,
        node: String,
        /// Those that ended, instead of those that are.
        past: bool,
    }
}

/// What a volume can be used as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Type)]
#[zbus(signature = "dict")]
#[serde(rename_all = "kebab-case")]
pub struct Capability {
    #[serde(serialize_with = "zbus::as_variant::serialize")]
    pub access_mode: AccessMode,
    #[serde(serialize_with = "zbus::as_variant::serialize")]
    pub attachment_mode: AttachmentMode,
}

/// An enum of the contract's words.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Type)]
        #[zbus(signature = "s")]
        pub enum $name {
            $(#[serde(rename = $word)] $variant,)*
        }

        impl $name {
            /// The contract's words, in its order.
            pub const WORDS: &'static [&'static str] = &[$($word),*];

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
    AccessMode {
        SingleNodeWriter = "single-node-writer",
        SingleNodeReaderOnly = "single-node-reader-only",
        SingleNodeSingleWriter = "single-node-single-writer",
        SingleNodeMultiWriter = "single-node-multi-writer",
        MultiNodeReaderOnly = "multi-node-reader-only",
        MultiNodeSingleWriter = "multi-node-single-writer",
        MultiNodeMultiWriter = "multi-node-multi-writer",
    }
}

words! {
    AttachmentMode {
        FileSystem = "file-system",
        BlockDevice = "block-device",
    }
}

words! {
    /// How a mount made inside a consumer's target reaches the host, and back.
    Propagation {
        Private = "private",
        HostToTask = "host-to-task",
        Bidirectional = "bidirectional",
    }
}

words! {
    /// What a reboot does to a mount: it comes back, or its row stays `lost` until Mount or Unmount is asked.
    Restore {
        Auto = "auto",
        Hold = "hold",
    }
}

words! {
    /// What is done about a mount that died.
    Heal {
        Report = "report",
        Remount = "remount",
    }
}

words! {
    ClaimMode {
        Read = "read",
        Write = "write",
    }
}

words! {
    /// Whom an expansion concerns.
    Part {
        All = "all",
        Controller = "controller",
        Node = "node",
    }
}

words! {
    /// Who runs a plugin: csid, a unit that csid starts, or somebody else.
    Supervision {
        Managed = "managed",
        Unit = "unit",
        External = "external",
    }
}

words! {
    PluginService {
        Node = "node",
        Controller = "controller",
    }
}
