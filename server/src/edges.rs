//! Named edges at which the crash tests kill a server (feature `fault`, `csid::fault`): before and after each write to etcd, each sending of a
//! controller call, and each answer to a call that changes something, but those of Upgrade and Expanded.

use csid::fault;
use csid::store::registry::Record;
use csid_etcd::{EtcdError, Guard, RowKey, RowStore, Write, Written};

/// Makes [`Edge`] and the names from one table, so that no edge is in one of them alone.
macro_rules! edges {
    ($($edge:ident = $name:literal,)*) => {
        /// What two edges are around.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Edge {
            $($edge,)*
        }

        impl Edge {
            const NAMES: &[&str] = &[$($name,)*];

            fn name(self) -> &'static str {
                match self {
                    $(Edge::$edge => $name,)*
                }
            }
        }
    };
}

edges! {
    // Writes of rows.
    Meta = "meta",
    Server = "server",
    Node = "node",
    Session = "session",
    Report = "report",
    Heard = "heard",
    Plugin = "plugin",
    Used = "used",
    // Writes of a volume's record.
    Claims = "claims",
    Intent = "intent",
    Outcome = "outcome",
    Registration = "registration",
    Record = "record",
    // A controller call is put into the stream to its host.
    Send = "send",
    // Answers to nodes.
    AnswerClaim = "Claim",
    AnswerWithdraw = "Withdraw",
    AnswerDetached = "Detached",
    AnswerHold = "Hold",
    // Answers to operators, and to nodes that do as operators.
    AnswerRelease = "Release",
    AnswerChange = "Change",
    AnswerSetNode = "SetNode",
    AnswerRestored = "Restored",
    AnswerResume = "Resume",
}

impl Edge {
    /// Returns the edge of the change of a record.
    pub(crate) fn of_record(before: &Record, after: &Record) -> Edge {
        match (call(before), call(after)) {
            (had, Some(has)) if had != Some(has) => Edge::Intent,
            (Some(_), None) => Edge::Outcome,
            _ if before.claims != after.claims || before.queue != after.queue => Edge::Claims,
            _ if before.registration != after.registration => Edge::Registration,
            _ => Edge::Record,
        }
    }

    /// Returns the edge of the write of a row.
    fn of_row(key: &RowKey) -> Edge {
        match key {
            RowKey::Meta => Edge::Meta,
            RowKey::Server(_) => Edge::Server,
            RowKey::Node(_) => Edge::Node,
            RowKey::Session { .. } => Edge::Session,
            RowKey::Report(_) => Edge::Report,
            RowKey::Heard(_) => Edge::Heard,
            RowKey::Plugin(_) => Edge::Plugin,
            RowKey::Used { .. } => Edge::Used,
            RowKey::Volume(_) => Edge::Record,
        }
    }
}

/// Returns the ID of the controller call that waits for an answer. `None`: none does.
fn call(record: &Record) -> Option<&str> {
    Some(record.driver.as_ref()?.call.as_ref()?.id.as_str())
}

/// Returns the names of all edges, as `CSID_FAULT` takes them. An edge that no test hits fails the cluster suite.
pub fn points() -> Vec<String> {
    Edge::NAMES.iter().flat_map(|name| fault::edges_of(name)).collect()
}

/// Runs `f` between the two edges of this name.
pub(crate) fn around<T>(edge: Edge, f: impl Future<Output = T>) -> impl Future<Output = T> {
    fault::around(edge.name(), f)
}

/// Writes rows in one transaction between the two edges of the first row, if all guards hold.
pub(crate) async fn write(
    store: &RowStore,
    guards: &[Guard],
    writes: Vec<Write>,
) -> Result<Written, EtcdError> {
    match writes.first().map(|first| Edge::of_row(&first.key)) {
        Some(edge) => around(edge, store.write(guards, writes)).await,
        // It compares alone.
        None => store.write(guards, writes).await,
    }
}
