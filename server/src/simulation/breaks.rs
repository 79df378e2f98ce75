//! Faults of the product that a scene may have on purpose.

use crate::folding::broken;

/// The rule that no two consumers write to a volume of one writer.
pub const TWO_WRITERS: &str = "two writers:";
/// The rule that no volume is detached from a node that has not given it back.
pub const EARLY_DETACH: &str = "is unpublished from";

/// A break of a scene, and the rule by which the judge has to see it.
#[derive(Clone, Copy, Debug)]
pub struct Broken {
    pub of: Break,
    /// Words of the rule's message. Empty: any rule.
    pub rule: &'static str,
}

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
