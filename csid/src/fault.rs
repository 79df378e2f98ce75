//! Named edges at which the crash tests end the process, csid or csid-server (feature `fault`): before and after each effect, each RPC, each
//! commit and each answer. `CSID_FAULT` names a file; while `NAME:N` is in it, the process is killed at the N-th passing of the
//! edge NAME since, `any:N` being the N-th of all. What it was killed at then stands in the file. While `NAME.held` is in
//! it, what is between the edges NAME does not begin, and NAME stands in the file of the same name with `.held` once something
//! waits there. `NAME:N:panic` panics there instead of the kill. `CSID_BREAK` names a fault of csid that a test of a judge wants.
//! Without the feature nothing of it is compiled.

const RPCS: [&str; 12] = [
    "NodeStageVolume",
    "NodePublishVolume",
    "NodeUnpublishVolume",
    "NodeUnstageVolume",
    "NodeExpandVolume",
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "ControllerExpandVolume",
    "ValidateVolumeCapabilities",
    "CreateSnapshot",
    "CreateVolume",
    "DeleteVolume",
];

/// What csid does as a node of a cluster alone. Servers have a controller host delete snapshots.
const OF_CLUSTER: [&str; 9] =
    ["Claim", "Detached", "CallEnded", "DeleteSnapshot", "Hold", "Withdraw", "Drained", "Fence", "Register"];

/// Returns the edges that csid has as a node of a cluster, more than those of [`points`]. An edge that no test hits fails the tests of hosts.
pub fn points_of_cluster() -> Vec<String> {
    OF_CLUSTER.into_iter().flat_map(edges_of).collect()
}

/// Returns every edge of a csid that is alone, those of the `actions` of a mount among them. An edge that no test hits fails the run.
pub fn points(actions: impl IntoIterator<Item = &'static str>) -> Vec<String> {
    actions
        .into_iter()
        .chain(RPCS)
        .chain([
            "live",
            "deliver",
            "withdraw",
            "intent",
            "outcome",
            "claim",
            "registration",
            "answer",
            "recovery",
        ])
        .flat_map(edges_of)
        .collect()
}

/// Returns the two edges of what has this name.
pub fn edges_of(name: &str) -> [String; 2] {
    ["before", "after"].map(|edge| format!("{name}.{edge}"))
}

/// Runs `f` between the two edges of this name. Without the feature it is `f` itself: an `async fn` would hold `f` twice, and deep calls would overflow
/// their stack.
#[cfg(not(feature = "fault"))]
pub fn around<T>(_name: &str, f: impl Future<Output = T>) -> impl Future<Output = T> {
    f
}

#[cfg(feature = "fault")]
pub fn around<T>(name: &str, f: impl Future<Output = T>) -> impl Future<Output = T> {
    let f = Box::pin(f);
    async move {
        armed::point(name, "before");
        armed::held(name).await;
        let value = f.await;
        armed::point(name, "after");
        value
    }
}

/// Returns whether this csid has the fault on purpose. A judge of its cluster has to see it.
#[cfg(not(feature = "fault"))]
pub(crate) fn breaks(_name: &str) -> bool {
    false
}

#[cfg(feature = "fault")]
pub(crate) fn breaks(name: &str) -> bool {
    std::env::var_os("CSID_BREAK").is_some_and(|broken| broken == name)
}

#[cfg(feature = "fault")]
mod armed {
    use std::ffi::OsString;
    use std::sync::{LazyLock, Mutex, PoisonError};
    use std::time::Duration;

    static FILE: LazyLock<Option<OsString>> = LazyLock::new(|| std::env::var_os("CSID_FAULT"));
    /// The request in the file when it was last read, and how often its point was passed.
    static PASSED: Mutex<(String, u32)> = Mutex::new((String::new(), 0));

    pub(super) async fn held(name: &str) {
        let Some(file) = &*FILE else { return };
        let is_held = || std::fs::read_to_string(file).is_ok_and(|asked| asked == format!("{name}.held"));
        if is_held() {
            let mut here = file.clone();
            here.push(".held");
            let _ = std::fs::write(here, name);
        }
        while is_held() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub(super) fn point(name: &str, edge: &str) {
        let Some(file) = &*FILE else { return };
        let mut passed = PASSED.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = std::fs::read_to_string(file).unwrap_or_default();
        if passed.0 != asked {
            *passed = (asked, 0);
        }
        let (asked, panics) = match passed.0.strip_suffix(":panic") {
            Some(asked) => (asked, true),
            None => (passed.0.as_str(), false),
        };
        let Some((wanted, count)) = asked.rsplit_once(':') else { return };
        let here = format!("{name}.{edge}");
        if wanted != "any" && wanted != here {
            return;
        }
        let count = count.parse::<u32>().unwrap_or(1);
        passed.1 += 1;
        if passed.1 == count {
            let _ = std::fs::write(file, &here);
            if panics {
                drop(passed);
                panic!("the fault point {here}");
            }
            // SIGKILL to oneself is delivered before the call returns to user space; nothing more is run.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}
