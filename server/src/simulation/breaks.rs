//! Faults of the product that a scene may have on purpose.

use crate::folding::broken;

/// A fault of the product that a scene has on purpose. The judge has to see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Break {
    /// A node says Detached before it unmounts: as a detach that does not wait for the node.
    EarlyDetached,
    /// An operator forces releases of nodes that have the volume: as a server that detaches by itself.
    ForcedRelease,
    /// etcd compares nothing: as a claim that ignores the compare.
    NoCompare,
    /// A host makes each call at once, whatever its epoch.
    StaleCalls,
    /// A plugin goes on after its deadline: as a takeover that does not wait.
    SlowPlugin,
    /// Claims that share a transaction.
    Fold(broken::FoldFault),
}
