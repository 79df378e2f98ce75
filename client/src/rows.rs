//! The contract's answers as structs. A key that is absent is the type's default, one that is unknown is left
//! out; one of the wrong type is an error. `Serialize` gives the contract's own names back, in kebab-case.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use zbus::{OwnedObjectPath, OwnedVariant, Type, Variant};

macro_rules! row {
    ($case:literal, $(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Type)]
        #[zbus(signature = "dict")]
        #[serde(rename_all(deserialize = $case, serialize = "kebab-case"), default)]
        pub struct $name {
            $(
                $(#[$field_meta])*
                #[serde(deserialize_with = "zbus::as_variant::deserialize")]
                pub $field: $ty,
            )*
        }
    };
}

row! { "PascalCase",
    /// The properties of csid itself.
    Manager {
        /// csid's version.
        version: String,
        /// The features of this csid. Check these, not the version.
        features: Vec<String>,
        /// `starting`, `restoring`, `ready`, `degraded` or `stopping`.
        state: String,
        /// The sequence number of the last event.
        event_sequence: u64,
        /// The index of the last change of a row.
        modify_index: u64,
        /// The ID of the journal. If it changes, cursors into events are void.
        journal_id: String,
    }
}

row! { "PascalCase",
    /// This host as a node of a cluster.
    Cluster {
        /// The cluster's name. Empty: the host has no cluster.
        name: String,
        /// The node's name. Empty: the host has no cluster.
        node: String,
        /// `alone`, `joining`, `joined`, `cut-off`, `fenced`, `recovering` or `refused`.
        state: String,
        /// HOST:PORT of the server that csid has a session with. Empty: none.
        server: String,
        /// Why there is no session. Empty: there is one, or none was tried yet.
        reason: String,
        /// When the state has begun, in microseconds since 1970. 0: the host has no cluster.
        since: u64,
        /// The greatest generation of the cluster that csid has seen since its start. 0: none.
        generation: u64,
        /// The greatest revision of the cluster's volumes that csid has seen since its start. 0: none.
        revision: u64,
        /// The number of claims that have ended on this host, which no server has learned yet.
        owed: u32,
    }
}

impl Cluster {
    /// Returns whether the host has a cluster.
    pub fn is_clustered(&self) -> bool {
        !self.name.is_empty()
    }
}

row! { "PascalCase",
    /// The properties of a plugin. Capabilities have CSI's own names.
    Plugin {
        /// The plugin's ID.
        id: String,
        /// `stopped`, `starting`, `probing`, `ready`, `unhealthy`, `failed` or `stopping`.
        state: String,
        /// Whether the plugin can be used.
        healthy: bool,
        /// Why it cannot be used.
        health_message: String,
        /// `managed`, `unit` or `external`.
        supervision: String,
        /// The systemd unit in which it runs. Empty: none that csid knows.
        unit: String,
        /// The path of its socket.
        socket: String,
        /// The instances, the newest first. The first is active.
        instances: Vec<String>,
        /// The plugin's own name.
        provider: String,
        /// The plugin's own version.
        provider_version: String,
        /// The services that it offers: `node`, `controller`, `group-controller`.
        services: Vec<String>,
        /// The capabilities of the plugin.
        plugin_capabilities: Vec<String>,
        /// The capabilities of its node service.
        node_capabilities: Vec<String>,
        /// The capabilities of its controller service.
        controller_capabilities: Vec<String>,
        /// The plugin's name of this node.
        node_id: String,
        /// The number of volumes that this node can have. 0: the plugin gives no limit.
        max_volumes: i64,
        /// Where this node is.
        topology: HashMap<String, String>,
        /// How often csid restarted it.
        restarts: u32,
        /// `journal` or `none`.
        log: String,
        /// The user ID that registered it.
        owner: u32,
    }
}

row! { "kebab-case",
    /// csid's measurements of a plugin.
    PluginStats {
        /// The RPCs of all instances together.
        rpcs: Vec<RpcStats>,
        /// The instances, the newest first.
        instances: Vec<InstanceStats>,
    }
}

row! { "kebab-case",
    /// How often an RPC ended with a code, and how long it took.
    RpcStats {
        /// The name of the RPC.
        rpc: String,
        /// gRPC's name of the code, such as `UNAVAILABLE`.
        code: String,
        /// How many calls ended with this code.
        count: u64,
        /// Their time in total, in microseconds.
        total_usec: u64,
        /// The median, in microseconds, rounded to its bucket.
        p50_usec: u64,
        /// The 99th percentile, in microseconds, rounded to its bucket.
        p99_usec: u64,
        /// The longest, in microseconds.
        max_usec: u64,
    }
}

/// A row with fields that may be unknown.
macro_rules! measured {
    ($(#[$meta:meta])* $name:ident {
        $($(#[$field_meta:meta])* $field:ident: $ty:ty,)*
        ? $($(#[$known_meta:meta])* $known:ident: $known_ty:ty,)*
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Type)]
        #[zbus(signature = "dict")]
        #[serde(rename_all = "kebab-case", default)]
        pub struct $name {
            $(
                $(#[$field_meta])*
                #[serde(deserialize_with = "zbus::as_variant::deserialize")]
                pub $field: $ty,
            )*
            $(
                $(#[$known_meta])*
                #[serde(
                    deserialize_with = "zbus::as_variant::optional::deserialize",
                    skip_serializing_if = "Option::is_none"
                )]
                pub $known: Option<$known_ty>,
            )*
        }
    };
}

measured! {
    /// The resource usage of an instance's processes. `None`: this host does not measure it, or csid does not run the
    /// instance.
    InstanceStats {
        /// The name of the instance.
        instance: String,
        /// Its systemd unit. Empty: csid does not run it.
        unit: String,
        ?
        /// CPU time, in nanoseconds.
        cpu_usage_nsec: u64,
        /// Memory in use, in bytes.
        memory_current: u64,
        /// The most memory that was in use, in bytes.
        memory_peak: u64,
        /// Bytes read from disks.
        io_read_bytes: u64,
        /// Bytes written to disks.
        io_write_bytes: u64,
        /// Read operations on disks.
        io_read_operations: u64,
        /// Write operations on disks.
        io_write_operations: u64,
        /// The number of tasks.
        tasks_current: u64,
        /// Percent of the last ten seconds in which some tasks waited for a CPU.
        cpu_pressure_some_avg10: f64,
        /// The time in which some tasks waited for a CPU, in microseconds.
        cpu_pressure_some_usec: u64,
        /// Percent of the last ten seconds in which all tasks waited for a CPU.
        cpu_pressure_full_avg10: f64,
        /// The time in which all tasks waited for a CPU, in microseconds.
        cpu_pressure_full_usec: u64,
        /// Percent of the last ten seconds in which some tasks waited for memory.
        memory_pressure_some_avg10: f64,
        /// The time in which some tasks waited for memory, in microseconds.
        memory_pressure_some_usec: u64,
        /// Percent of the last ten seconds in which all tasks waited for memory.
        memory_pressure_full_avg10: f64,
        /// The time in which all tasks waited for memory, in microseconds.
        memory_pressure_full_usec: u64,
        /// Percent of the last ten seconds in which some tasks waited for disks.
        io_pressure_some_avg10: f64,
        /// The time in which some tasks waited for disks, in microseconds.
        io_pressure_some_usec: u64,
        /// Percent of the last ten seconds in which all tasks waited for disks.
        io_pressure_full_avg10: f64,
        /// The time in which all tasks waited for disks, in microseconds.
        io_pressure_full_usec: u64,
    }
}

row! { "kebab-case",
    /// A mount, as [`crate::Client::list_mounts`] returns it.
    MountRow {
        /// The namespace of the volume.
        namespace: String,
        /// The name of the volume.
        volume: String,
        /// The consumer.
        consumer: String,
        /// The tag. It may be empty.
        tag: String,
        /// The plugin's ID.
        plugin: String,
        /// `mounting`, `mounted`, `unmounting`, `uncertain`, `lost` or `waiting`.
        state: String,
        /// The user who made the mount.
        uid: u32,
        /// The plugin's ID of the volume.
        external_id: String,
        /// The published path.
        source: String,
        /// The staging path. Empty: the plugin does not stage.
        staging: String,
        /// The consumer's path. Empty: none.
        target: String,
        /// Whether `source` is a device node.
        is_device: bool,
        /// Whether the mount is read-only.
        read_only: bool,
        /// The access mode.
        access_mode: String,
        /// The attachment mode.
        attachment_mode: String,
        /// The requested file system. Empty: the plugin's default.
        fs_type: String,
        /// The group that the plugin was given. Empty: none.
        mount_group: String,
        /// `auto` or `hold`.
        restore: String,
        /// Whether the kernel shows the mount as it should be.
        healthy: bool,
        /// Why the mount is not in state `mounted` or not healthy. Empty: none.
        error: String,
        /// The ID of the operation in progress. Empty: none.
        operation: String,
        /// When the state was reached, in microseconds since 1970.
        since: u64,
        /// The index of the last change of the row.
        modify_index: u64,
        /// Where a list continues after this row. Empty: csid has no pages.
        cursor: String,
    }
}

row! { "kebab-case",
    /// An operation in progress.
    OperationRow {
        /// The ID of the operation.
        id: String,
        /// The kind, such as `mount`.
        kind: String,
        /// The subject of the operation.
        subject: String,
        /// The current step.
        step: String,
        /// When it began, in microseconds since 1970.
        since: u64,
        /// Its deadline, in microseconds since 1970. 0: none.
        deadline: u64,
        /// The user who requested it.
        uid: u32,
    }
}

row! { "kebab-case",
    /// The result of [`crate::Client::reconcile`].
    ReconcileReport {
        /// Mounts that are as their rows say.
        adopted: Vec<String>,
        /// Mounts that were made again.
        remounted: Vec<String>,
        /// Mounts that were undone.
        undone: Vec<String>,
        /// Paths that no row explains: removed ones with `remove_orphans`.
        orphans: Vec<String>,
        /// The failures with their reasons.
        failed: Vec<String>,
        /// Where the damaged journal is kept that a new one replaced. Empty without `new_journal`.
        kept: String,
    }
}

row! { "kebab-case",
    /// The result of [`crate::Client::drain_plugin`]. Each entry is `NAMESPACE/VOLUME CONSUMER`.
    DrainReport {
        /// The mounts that were unmounted.
        unmounted: Vec<String>,
        /// The mounts that could not be unmounted, each with the reason.
        failed: Vec<String>,
        /// Volumes that stay claimed or attached.
        claimed: Vec<String>,
    }
}

row! { "kebab-case",
    /// A capability of a volume.
    CapabilityRow {
        /// The access mode.
        access_mode: String,
        /// The attachment mode.
        attachment_mode: String,
    }
}

/// A `row` of a volume, with further fields.
macro_rules! volume {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $ty:ty,)* }) => {
        row! { "kebab-case",
            $(#[$meta])* $name {
                /// The namespace.
                namespace: String,
                /// The name of the volume in the namespace.
                id: String,
                /// The name for people. Empty: none.
                name: String,
                /// The plugin's ID of the volume.
                external_id: String,
                /// The plugin's ID.
                plugin: String,
                /// The plugin's own name.
                provider: String,
                /// The plugin's own version.
                provider_version: String,
                /// The volume context. Missing in a list.
                context: BTreeMap<String, String>,
                /// The ways in which the volume can be used.
                capabilities: Vec<CapabilityRow>,
                /// The parameters of the registration. Missing in a list.
                parameters: BTreeMap<String, String>,
                /// The segments of the places where the volume can be used.
                topologies: Vec<BTreeMap<String, String>>,
                /// The name of the systemd credential with the volume's secrets. Empty: none.
                credential: String,
                /// The file system. Empty: the plugin's default.
                fs_type: String,
                /// The group that the plugin gives the volume to. Empty: none.
                mount_group: String,
                /// `report` or `remount`.
                heal: String,
                /// Whether the plugin has to attach the volume.
                controller_required: bool,
                /// Whether the plugin offers the services that the volume needs.
                schedulable: bool,
                /// The size in bytes. 0: not known.
                capacity: u64,
                /// The access mode of the claims. Empty: there are none.
                access_mode: String,
                /// The attachment mode of the claims. Empty: there are none.
                attachment_mode: String,
                /// The consumers that read.
                read_claims: Vec<String>,
                /// The consumers that write.
                write_claims: Vec<String>,
                /// The consumers whose claims ended.
                past_claims: Vec<String>,
                /// The user who registered or created the volume. 0 is also the answer of a csid that does not say it.
                uid: u32,
                /// `creating`, `registered` or `deleting`; `declared` only in a list with declared volumes.
                standing: String,
                /// The size in bytes to which a node still has to expand the volume. 0: none.
                pending_expand: u64,
                /// The index of the last change of the volume's record.
                modify_index: u64,
                /// Where a list continues after this row. Empty: the row is not from a list, or csid has no pages.
                cursor: String,
                $($(#[$field_meta])* $field: $ty,)*
            }
        }
    };
}

volume! {
    /// A registered volume.
    VolumeRow {}
}

volume! {
    /// A claimed volume, with the data that its node needs to use it.
    Claimed {
        /// The plugin's answer to the attachment. Empty: it attaches nothing.
        publish_context: BTreeMap<String, String>,
        /// The plugin's name of the node.
        external_node_id: String,
        /// The state of the claim, as in [`ClaimRow::state`].
        state: String,
    }
}

row! { "kebab-case",
    /// A claim, as [`crate::Client::list_claims`] returns it.
    ClaimRow {
        /// The namespace of the volume.
        namespace: String,
        /// The name of the volume.
        volume: String,
        /// The consumer.
        consumer: String,
        /// The node where the consumer runs.
        node: String,
        /// The user who made the claim.
        uid: u32,
        /// `read` or `write`.
        mode: String,
        /// The access mode.
        access_mode: String,
        /// The attachment mode.
        attachment_mode: String,
        /// `pending`, `taken`, `node-detached`, `controller-detached`, `free` or `parked`.
        state: String,
        /// Whether the claim is being released.
        releasing: bool,
        /// Whether a Mount made the claim. The last Unmount of the consumer then releases it.
        by_mount: bool,
        /// The lifetime that the claim is bound to. Empty: until Release.
        bind: String,
        /// Why the claim is not in its wanted state. Empty: none.
        error: String,
        /// When the state was reached, in microseconds since 1970.
        since: u64,
        /// The index of the last change of the volume's record.
        modify_index: u64,
        /// Where a list continues after this row. Empty: csid has no pages.
        cursor: String,
    }
}

row! { "kebab-case",
    /// Why a volume is not in the wanted state.
    Explanation {
        /// The cause of the wait. Empty: it does not wait.
        waiting_for: String,
        /// The holders of the volume.
        holders: Vec<String>,
        /// The last error. Empty: none.
        last_error: String,
        /// When csid tries again, in microseconds since 1970. 0: nothing is to be tried.
        next_try: u64,
        /// csid's steps for the volume, and other facts, for people.
        steps: Vec<String>,
        /// The steps of the last mount, each with its duration in microseconds. Empty: csid knows none.
        timings: Vec<(String, u64)>,
    }
}

row! { "kebab-case",
    /// A snapshot of a volume.
    SnapshotRow {
        /// The plugin's ID of the snapshot.
        id: String,
        /// The plugin's ID of the volume.
        external_id: String,
        /// The size in bytes. 0: the plugin does not say.
        size: u64,
        /// When it was made, in microseconds since 1970. 0: the plugin does not say.
        created: u64,
        /// Whether it can be used.
        ready: bool,
    }
}

row! { "kebab-case",
    /// A volume as the plugin lists it, registered with csid or not.
    ExternalRow {
        /// The plugin's ID of the volume.
        external_id: String,
        /// The size in bytes. 0: the plugin does not say.
        capacity: u64,
        /// The plugin's names of the nodes to which it is attached. Empty: none, or the plugin does not say.
        published_node_ids: Vec<String>,
        /// Whether the plugin reports it as abnormal.
        abnormal: bool,
        /// The plugin's explanation.
        message: String,
    }
}

/// The result of [`crate::Client::volume_stats`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Type)]
pub struct VolumeStats {
    /// The measures of the volume.
    pub usage: Vec<Usage>,
    /// Whether the plugin reports the volume as abnormal.
    pub abnormal: bool,
    /// The plugin's explanation.
    pub message: String,
}

/// A measure of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Type)]
pub struct Usage {
    /// `BYTES` or `INODES`.
    pub unit: String,
    /// How many are available.
    pub available: u64,
    /// How many there are in total.
    pub total: u64,
    /// How many are used.
    pub used: u64,
}

/// The result of [`crate::Client::validate_volume`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Type)]
pub struct Validated {
    /// Whether the volume can be used so.
    pub confirmed: bool,
    /// Why not, in the plugin's words.
    pub message: String,
}

/// The result of [`crate::Client::expand_volume`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Type)]
#[serde(rename_all = "kebab-case")]
pub struct Expanded {
    /// The size of the volume.
    pub capacity_bytes: u64,
    /// Whether a node still has to expand the volume when it mounts it next.
    pub node_expansion_required: bool,
}

/// A plugin, as [`crate::Client::list_plugins`] returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Type)]
pub struct PluginRow {
    /// The plugin's ID.
    pub id: String,
    /// The state, as in [`Plugin::state`].
    pub state: String,
    /// The plugin's own name.
    pub provider: String,
    /// `managed`, `unit` or `external`.
    pub supervision: String,
    /// The path of the plugin's D-Bus object.
    pub path: OwnedObjectPath,
}

/// The result of [`crate::Client::mount`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Type)]
#[serde(rename_all = "kebab-case")]
pub struct Mounted {
    /// The published path, whatever `target` is.
    pub source: String,
    /// Whether it is a device node.
    pub is_device: bool,
}

/// How a command in a plugin ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Type)]
pub struct Exit {
    /// Whether it exited by itself. False: a signal ended it.
    pub exited: bool,
    /// The exit status, or the number of the signal.
    pub status: i32,
}

/// An event of csid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Type)]
pub struct Event {
    /// Its number in csid's journal.
    pub sequence: u64,
    /// When it happened, in microseconds since 1970.
    pub realtime_usec: u64,
    /// The type, such as `mount` or `plugin-health`. More may come.
    #[serde(rename = "type")]
    pub kind: String,
    /// A plugin's ID, `NAMESPACE/VOLUME`, an operation's ID, or empty.
    pub subject: String,
    /// The details, as the type has them.
    pub details: HashMap<String, OwnedVariant>,
}

/// Converts the value of an event's detail to JSON.
pub fn json(value: &Variant<'_>) -> Value {
    match value {
        Variant::Bool(b) => json!(b),
        Variant::U8(n) => json!(n),
        Variant::I16(n) => json!(n),
        Variant::U16(n) => json!(n),
        Variant::I32(n) => json!(n),
        Variant::U32(n) => json!(n),
        Variant::I64(n) => json!(n),
        Variant::U64(n) => json!(n),
        Variant::F64(n) => json!(n),
        Variant::Str(s) => json!(s.as_str()),
        Variant::ObjectPath(path) => json!(path.as_str()),
        Variant::Variant(inner) => json(inner),
        Variant::Array(array) => array.inner().iter().map(json).collect(),
        Variant::Dict(dict) => {
            let key = |key: &Variant<'_>| match json(key) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            dict.iter().map(|(k, v)| (key(k), json(v))).collect::<Map<_, _>>().into()
        }
        other => json!(other.to_string()),
    }
}
