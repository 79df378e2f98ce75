//! The kinds of operations.

use std::fmt;

/// The kind of an operation, in ListOperations and in the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OperationKind {
    Mount,
    Adopt,
    Unmount,
    Settle,
    Restore,
    Heal,
    Claim,
    Release,
    Unbind,
    Enlarge,
    Continue,
    Create,
    Validate,
    Stats,
    Expand,
    Snapshot,
    Attach,
    Detach,
    Delete,
    Deregister,
    /// The restart of a plugin.
    Restart,
}

impl OperationKind {
    pub fn name(self) -> &'static str {
        match self {
            OperationKind::Mount => "mount",
            OperationKind::Adopt => "adopt",
            OperationKind::Unmount => "unmount",
            OperationKind::Settle => "settle",
            OperationKind::Restore => "restore",
            OperationKind::Heal => "heal",
            OperationKind::Claim => "claim",
            OperationKind::Release => "release",
            OperationKind::Unbind => "unbind",
            OperationKind::Enlarge => "enlarge",
            OperationKind::Continue => "continue",
            OperationKind::Create => "create",
            OperationKind::Validate => "validate",
            OperationKind::Stats => "stats",
            OperationKind::Expand => "expand",
            OperationKind::Snapshot => "snapshot",
            OperationKind::Attach => "attach",
            OperationKind::Detach => "detach",
            OperationKind::Delete => "delete",
            OperationKind::Deregister => "deregister",
            OperationKind::Restart => "restart",
        }
    }

    /// Returns whether csid begins such operations by itself.
    pub(in crate::volume) fn is_own(self) -> bool {
        matches!(
            self,
            OperationKind::Settle
                | OperationKind::Restore
                | OperationKind::Heal
                | OperationKind::Continue
                | OperationKind::Unbind
                | OperationKind::Enlarge
        )
    }

    /// Returns whether such operations leave a volume in use.
    pub(in crate::volume) fn takes(self) -> bool {
        self.mounts() || matches!(self, OperationKind::Claim | OperationKind::Attach)
    }

    /// Returns whether such operations make a mount for a caller.
    pub(in crate::volume) fn mounts(self) -> bool {
        matches!(self, OperationKind::Mount | OperationKind::Adopt)
    }
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
