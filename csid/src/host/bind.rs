//! How targets are bound and unbound.

use serde::{Deserialize, Serialize};

use crate::store::rows::Propagation;

/// Flags to add to a mount. None is removed.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Restrict {
    pub nosuid: bool,
    pub nodev: bool,
    pub read_only: bool,
}

/// How a consumer's target is bound.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bind {
    /// Whose target it is: [`Host::check_target`].
    pub uid: u32,
    /// A dead mount at the target is replaced if it has one of these device numbers, which were at the source before.
    pub replaces_dead: Vec<u64>,
    pub nosuid: bool,
    /// This has no effect on a block device, whose node could not be opened then.
    pub nodev: bool,
    /// Without effect on what is written to a block device.
    pub read_only: bool,
    pub propagation: Propagation,
}

/// How a consumer's target is unbound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unbind {
    /// Only an unused target.
    Unused,
    /// Also a dead mount that is in use, and a dead mount that was at the source before.
    Dead,
    /// Also a target that is in use. Where the earlier source is unknown and gone, any mount.
    Forced,
}
