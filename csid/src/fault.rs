//! Named edges of the mount path at which the crash tests end the process (feature `fault`): `CSID_FAULT=NAME[:N]` is
//! SIGKILL at the N-th time the edge is passed. Without the feature nothing of it is compiled.

use crate::volume::state::Action;

/// Every edge there is; an edge that no test hits fails the run.
pub fn points() -> Vec<String> {
    let actions = Action::ALL.iter().map(|action| action.name());
    actions
        .chain(["intent", "outcome", "answer"])
        .flat_map(|n| [format!("{n}.before"), format!("{n}.after")])
        .collect()
}

/// Whatever runs `f` runs it between two edges.
#[cfg(not(feature = "fault"))]
pub(crate) async fn around<T>(_name: &str, f: impl Future<Output = T>) -> T {
    f.await
}

#[cfg(feature = "fault")]
pub(crate) async fn around<T>(name: &str, f: impl Future<Output = T>) -> T {
    armed::point(name, "before");
    let value = f.await;
    armed::point(name, "after");
    value
}

#[cfg(feature = "fault")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static FAULT: OnceLock<Option<(String, u32)>> = OnceLock::new();
    static HITS: AtomicU32 = AtomicU32::new(0);

    fn fault() -> Option<(String, u32)> {
        let text = std::env::var("CSID_FAULT").ok()?;
        Some(match text.rsplit_once(':') {
            Some((name, count)) => (name.to_owned(), count.parse().unwrap_or(1)),
            None => (text, 1),
        })
    }

    pub(super) fn point(name: &str, edge: &str) {
        let Some((wanted, count)) = FAULT.get_or_init(fault) else { return };
        if wanted.split_once('.') == Some((name, edge)) && HITS.fetch_add(1, Ordering::SeqCst) + 1 == *count {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            // SIGKILL to oneself is delivered before the call returns to user space; nothing more is run.
        }
    }
}
