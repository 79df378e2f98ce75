//! csid's D-Bus contract (`org.csid1`) as typed Rust: for csictl, libcsi and the tests.
//!
//! A [`Client`] owns one connection, to csid's private socket or to the system bus, and nothing else: no cache, no
//! state file, no retries. A [`Session`] is for callers that live longer than a csid: it makes the connection anew and
//! asks again what was not answered. What always holds:
//! - a call waits until csid answers; only a `deadline-usec` given by the caller ends it earlier, and csid
//!   does that;
//! - dropping a call's future, or losing the connection, ends the waiting and never the operation;
//! - on the system bus never more calls are unanswered than dbus-daemon allows one connection, dropped ones
//!   counted;
//! - secrets travel in a sealed memfd, never in a message.
//!
//! Calls need a tokio runtime.

mod client;
mod error;
mod events;
mod options;
mod rows;
mod secrets;
mod session;

pub use client::{Client, Running, SOCKET, Target, Via};
pub use error::{Connecting, CsidError, Details, Error, Kind, Result};
pub use events::{Follower, News};
pub use options::{
    AccessMode, AttachOptions, AttachmentMode, CallOptions, Capability, CapacityOptions, ClaimFilter,
    ClaimMode, ClaimOptions, CreateVolume, DeregisterOptions, ExecOptions, ExpandOptions, Heal, LogOptions,
    MountFilter, MountOptions, OpenOptions, Part, PluginService, PluginSpec, Propagation, ReconcileOptions,
    RegisterVolume, ReleaseOptions, Restore, SnapshotFilter, SnapshotOptions, Supervision, UnmountOptions,
    UnregisterOptions, UpgradeOptions, ValidateOptions, VolumeFilter, VolumeOptions,
};
pub use rows::{
    CapabilityRow, ClaimRow, Claimed, DrainReport, Event, Exit, Expanded, Explanation, ExternalRow,
    InstanceStats, Manager, MountRow, Mounted, OperationRow, Plugin, PluginRow, PluginStats, ReconcileReport,
    RpcStats, SnapshotRow, Usage, Validated, VolumeRow, VolumeStats, json,
};
pub use secrets::{BadSecrets, SealedSecrets, Secrets};
pub use session::Session;
/// The value of an event's detail.
pub use zbus::OwnedVariant;
