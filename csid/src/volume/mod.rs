//! Volumes: their mounts on this node, their claims, and the calls to their controllers.
//!
//! `manager` and `volumes` accept requests, and `submit` puts each into the queue of its volume. The `actor` of the volume runs
//! one operation at a time, by an `executor`. `mounts` has the operations of this node, `control` those of claims and
//! controllers. They reach each other through the traits of `seam` only. `model` has the rules and is pure. `reconcile` repairs and monitors; `explain` returns why a volume is not in its
//! desired state.
//!
//! An actor owns the rows of its volume while the volume has work. `operation::directory` keeps the rows of volumes without work.
//! All imports point one way; csid/tests/rooms.rs has the table.

mod actor;
pub mod api;
mod context;
mod control;
mod errors;
mod events;
mod executor;
mod explain;
mod lifecycle;
mod manager;
pub mod model;
mod mounts;
mod operation;
mod plugins;
mod probe;
mod reconcile;
#[cfg(test)]
mod rpc_outcome_tests;
pub mod rules;
mod seam;
pub mod servers;
mod submit;
mod tables;
mod transitions;
mod volumes;
mod waits;

pub use crate::host::{Sifted, TargetFd, Tree};
pub use api::mount_options::MountOptions;
pub use api::operation_kind::OperationKind;
pub use api::requests::{
    Authority, Force, ForgetRequest, MountRequest, ReconcileOptions, Uncovered, UnmountRequest, Unmounting,
    Wait,
};
pub use api::views::{
    Drained, LeftByDrain, MountView, Mounted, NodeDrained, OperationView, Recovered, Report,
};
pub use executor::secrets::earlier_secrets;
pub use lifecycle::refuse_nonsense;
pub use manager::Volumes;
pub use model::volume::Paths;
pub use volumes::clustered::{AskedExpansion, RefusedExpansion};
pub use volumes::{forwarded, volumes_d};
