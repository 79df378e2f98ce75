//! csid's D-Bus contract (`org.csid1`) as typed Rust: for csictl, libcsi and the tests.
//!
//! A [`Client`] owns one connection, to csid's private socket or to the system bus, and nothing else: no cache, no
//! state file, no retries. A [`Session`] is for callers that live longer than a csid: it reconnects and repeats a
//! call that was not answered. Invariants:
//! - A call waits until csid answers. A `deadline_usec` ends it earlier, and csid does that. Without one csid tries an
//!   operation as long as its configuration says (`[deadlines] operation` of csid.toml, by default 2 min).
//! - Dropping a call's future, or losing the connection, ends the wait but not the operation.
//! - A connection to the system bus has no more unanswered calls than dbus-daemon allows, dropped ones included.
//! - Secrets are sent in a sealed memfd, never in a message.
//!
//! Calls need a tokio runtime.
//!
//! # Errors
//!
//! Every call may fail with:
//! - [`Error::Disconnected`], [`Error::NotRunning`] or [`Error::Refused`] if csid cannot be reached over the
//!   connection, and [`Error::NotServed`] if this csid does not serve the member;
//! - [`Error::Csid`] with [`Kind::InvalidArgument`], [`Kind::NotAuthorized`], [`Kind::RateLimited`],
//!   [`Kind::TimedOut`], [`Kind::Cancelled`], [`Kind::ShuttingDown`], [`Kind::Unavailable`] (this host is in
//!   a cluster, and no server of the cluster can be asked now) or [`Kind::Internal`], and if it changes something
//!   [`Kind::StateCorrupt`].
//!
//! A call that asks a plugin may also fail with [`Kind::PluginError`] (gRPC code 12, UNIMPLEMENTED: the plugin does
//! not offer the call), [`Kind::PluginUnavailable`], [`Kind::PluginShutdown`], [`Kind::Uncertain`] or
//! [`Kind::SecretRequired`].

#![deny(missing_docs, clippy::missing_errors_doc)]

mod client;
mod environment;
mod error;
mod events;
mod options;
mod pages;
mod rows;
mod secrets;
mod session;
mod transport;

pub use client::{Client, Running, SOCKET, Target, Via};
pub use error::{Connecting, CsidError, Details, Error, Kind, Result};
pub use events::{Follower, News};
pub use options::{
    AccessMode, AttachOptions, AttachmentMode, CallOptions, Capability, CapacityOptions, ClaimFilter,
    ClaimMode, ClaimOptions, CreateVolume, DeregisterOptions, Descriptor, DetachOptions, ExecOptions,
    ExpandOptions, Heal, JoinOptions, LogOptions, MountFilter, MountOptions, OpenOptions, Part,
    PluginService, PluginSpec, Propagation, ReconcileOptions, RegisterVolume, ReleaseOptions, Restore,
    SnapshotFilter, SnapshotOptions, Supervision, UnmountOptions, UnregisterOptions, UpgradeOptions,
    ValidateOptions, VolumeFilter, VolumeOptions,
};
pub use pages::Pages;
pub use rows::{
    CapabilityRow, ClaimRow, Claimed, Cluster, DrainReport, Event, Exit, Expanded, Explanation, ExternalRow,
    InstanceStats, Manager, MountRow, Mounted, OperationRow, Plugin, PluginRow, PluginStats, ReconcileReport,
    RpcStats, SnapshotRow, Usage, Validated, VolumeRow, VolumeStats, json,
};
pub use secrets::{BadSecrets, SealedSecrets, Secrets};
pub use session::{Session, operation_id};
/// The value of an event's detail.
pub use zbus::OwnedVariant;
