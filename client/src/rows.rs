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
    /// The properties of the Manager.
    Manager {
        version: String,
        /// What this csid can do: ask here, never parse the version.
        features: Vec<String>,
        state: String,
        event_sequence: u64,
        modify_index: u64,
        /// Another one: cursors into events are void.
        journal_id: String,
    }
}

row! { "PascalCase",
    /// The properties of a plugin.
    Plugin {
        id: String,
        state: String,
        healthy: bool,
        health_message: String,
        supervision: String,
        unit: String,
        socket: String,
        /// Newest first; the first is active.
        instances: Vec<String>,
        provider: String,
        provider_version: String,
        services: Vec<String>,
        plugin_capabilities: Vec<String>,
        node_capabilities: Vec<String>,
        controller_capabilities: Vec<String>,
        node_id: String,
        /// 0: the plugin gives no limit.
        max_volumes: i64,
        topology: HashMap<String, String>,
        restarts: u32,
        log: String,
        /// The uid that registered it.
        owner: u32,
    }
}

row! { "kebab-case",
    /// What is measured of a plugin.
    PluginStats {
        /// Of all its instances together.
        rpcs: Vec<RpcStats>,
        /// The newest first.
        instances: Vec<InstanceStats>,
    }
}

row! { "kebab-case",
    /// How often an RPC ended with a code, and how long that took.
    RpcStats {
        rpc: String,
        /// gRPC's name, such as `UNAVAILABLE`.
        code: String,
        count: u64,
        total_usec: u64,
        /// Half of the calls took at most so long, and 99 of 100; known to the bucket.
        p50_usec: u64,
        p99_usec: u64,
        max_usec: u64,
    }
}

/// A row of what may not be known.
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
    /// What the processes of an instance use. `None`: this host does not count it, or csid does not run the instance.
    InstanceStats {
        instance: String,
        /// Empty: csid does not run it.
        unit: String,
        ?
        cpu_usage_nsec: u64,
        memory_current: u64,
        memory_peak: u64,
        io_read_bytes: u64,
        io_write_bytes: u64,
        io_read_operations: u64,
        io_write_operations: u64,
        tasks_current: u64,
        /// Percent of the last ten seconds in which some, or all, of its tasks were stalled, and how long in all.
        cpu_pressure_some_avg10: f64,
        cpu_pressure_some_usec: u64,
        cpu_pressure_full_avg10: f64,
        cpu_pressure_full_usec: u64,
        memory_pressure_some_avg10: f64,
        memory_pressure_some_usec: u64,
        memory_pressure_full_avg10: f64,
        memory_pressure_full_usec: u64,
        io_pressure_some_avg10: f64,
        io_pressure_some_usec: u64,
        io_pressure_full_avg10: f64,
        io_pressure_full_usec: u64,
    }
}

row! { "kebab-case",
    MountRow {
        namespace: String,
        volume: String,
        consumer: String,
        tag: String,
        plugin: String,
        /// mounting mounted unmounting uncertain lost waiting
        state: String,
        uid: u32,
        external_id: String,
        /// The published path.
        source: String,
        staging: String,
        target: String,
        is_device: bool,
        read_only: bool,
        access_mode: String,
        attachment_mode: String,
        fs_type: String,
        mount_group: String,
        restore: String,
        healthy: bool,
        error: String,
        operation: String,
        /// Microseconds since 1970.
        since: u64,
        modify_index: u64,
    }
}

row! { "kebab-case",
    OperationRow {
        id: String,
        kind: String,
        subject: String,
        step: String,
        /// Microseconds since 1970.
        since: u64,
        /// Microseconds since 1970; 0: none.
        deadline: u64,
        uid: u32,
    }
}

row! { "kebab-case",
    ReconcileReport {
        adopted: Vec<String>,
        remounted: Vec<String>,
        undone: Vec<String>,
        orphans: Vec<String>,
        failed: Vec<String>,
        /// Where the damaged journal is kept that a new one has replaced; empty without `new-journal`.
        kept: String,
    }
}

row! { "kebab-case",
    /// Of Drain; each entry is `NAMESPACE/VOLUME CONSUMER`, one that failed with why.
    DrainReport {
        unmounted: Vec<String>,
        failed: Vec<String>,
        /// What is claimed or attached by itself, and stays so.
        claimed: Vec<String>,
    }
}

row! { "kebab-case",
    /// One of a volume's capabilities.
    CapabilityRow {
        access_mode: String,
        attachment_mode: String,
    }
}

/// A `row` of a volume, with what else there is to tell.
macro_rules! volume {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $ty:ty,)* }) => {
        row! { "kebab-case",
            $(#[$meta])* $name {
                namespace: String,
                id: String,
                name: String,
                external_id: String,
                plugin: String,
                provider: String,
                provider_version: String,
                /// Absent from a list.
                context: BTreeMap<String, String>,
                capabilities: Vec<CapabilityRow>,
                /// Absent from a list.
                parameters: BTreeMap<String, String>,
                topologies: Vec<BTreeMap<String, String>>,
                credential: String,
                fs_type: String,
                mount_group: String,
                heal: String,
                controller_required: bool,
                schedulable: bool,
                /// Bytes; 0: not known.
                capacity: u64,
                /// Empty: it has no claims.
                access_mode: String,
                attachment_mode: String,
                read_claims: Vec<String>,
                write_claims: Vec<String>,
                past_claims: Vec<String>,
                /// creating registered deleting; declared: only where that was asked for
                standing: String,
                /// Bytes that a node still has to make of it; 0: none.
                pending_expand: u64,
                modify_index: u64,
                $($(#[$field_meta])* $field: $ty,)*
            }
        }
    };
}

volume! {
    /// A registered volume: GetVolume's answer, and a row of ListVolumes.
    VolumeRow {}
}

volume! {
    /// What Claim answers: the volume, and what a node needs to use it.
    Claimed {
        publish_context: BTreeMap<String, String>,
        external_node_id: String,
        state: String,
    }
}

row! { "kebab-case",
    ClaimRow {
        namespace: String,
        volume: String,
        consumer: String,
        node: String,
        uid: u32,
        mode: String,
        access_mode: String,
        attachment_mode: String,
        /// pending taken node-detached controller-detached free parked
        state: String,
        /// It is let go.
        releasing: bool,
        /// A Mount took it, and the last Unmount gives it back.
        by_mount: bool,
        /// What it ends with; empty: with its release.
        bind: String,
        error: String,
        /// Microseconds since 1970.
        since: u64,
        modify_index: u64,
    }
}

row! { "kebab-case",
    /// Why a volume is not where it is wanted.
    Explanation {
        /// Empty: nothing.
        waiting_for: String,
        holders: Vec<String>,
        last_error: String,
        /// Microseconds since 1970; 0: nothing is to be tried.
        next_try: u64,
        steps: Vec<String>,
    }
}

row! { "kebab-case",
    SnapshotRow {
        /// The plugin's id for it.
        id: String,
        /// The volume's.
        external_id: String,
        /// Bytes; 0: the plugin does not say.
        size: u64,
        /// Microseconds since 1970; 0: the plugin does not say.
        created: u64,
        ready: bool,
    }
}

row! { "kebab-case",
    /// A volume as the plugin lists it, whether or not it is registered here.
    ExternalRow {
        external_id: String,
        /// Bytes; 0: the plugin does not say.
        capacity: u64,
        /// Where it is attached, by the plugin's names; empty where the plugin does not say.
        published_node_ids: Vec<String>,
        abnormal: bool,
        /// The plugin's words for it.
        message: String,
    }
}

/// What GetVolumeStats answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Type)]
pub struct VolumeStats {
    pub usage: Vec<Usage>,
    pub abnormal: bool,
    /// The plugin's words for it.
    pub message: String,
}

/// One measure of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Type)]
pub struct Usage {
    /// BYTES or INODES
    pub unit: String,
    pub available: u64,
    pub total: u64,
    pub used: u64,
}

/// What ValidateVolume answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Type)]
pub struct Validated {
    pub confirmed: bool,
    /// Why not, in the plugin's words.
    pub message: String,
}

/// What ExpandVolume answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Type)]
#[serde(rename_all = "kebab-case")]
pub struct Expanded {
    pub capacity_bytes: u64,
    /// A node still has to expand it, when it has the volume next.
    pub node_expansion_required: bool,
}

/// A line of ListPlugins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Type)]
pub struct PluginRow {
    pub id: String,
    pub state: String,
    pub provider: String,
    pub supervision: String,
    pub path: OwnedObjectPath,
}

/// What Mount answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Type)]
#[serde(rename_all = "kebab-case")]
pub struct Mounted {
    /// The published path, whatever `target` was.
    pub source: String,
    pub is_device: bool,
}

/// How a command in a plugin ended: by its exit status, or by a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Type)]
pub struct Exit {
    pub exited: bool,
    pub status: i32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Type)]
pub struct Event {
    pub sequence: u64,
    pub realtime_usec: u64,
    #[serde(rename = "type")]
    pub kind: String,
    /// A plugin's id, `NAMESPACE/VOLUME`, an operation's id, or empty.
    pub subject: String,
    pub details: HashMap<String, OwnedVariant>,
}

/// The value of an event's detail, for whoever prints it or hands it on.
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
