//! The judge of what the plugins of all hosts have recorded. It asks no csid and no server: two hosts never use a volume of one writer at
//! the same time, and no volume is detached from a host that uses it.

use csid_tests::plugin::Recorded;

use crate::host::node_id;
use crate::load::Volume;

/// gRPC's code of a call that is not allowed in this state. A plugin answers it if a call comes before its turn.
const FAILED_PRECONDITION: i32 = 9;

/// A volume that is attached to a host, and neither etcd nor a journal knows it since a restore of etcd. Its call had no end, or its claim had ended.
#[derive(Clone, Debug)]
pub struct Stray {
    pub volume: &'static str,
    /// The plugin's name of the host.
    pub node: String,
    /// When it was seen, by the clock of the records.
    pub at: u64,
}

/// A volume at a host, from the begin of a call to the end of the one that takes it away.
#[derive(Clone, Copy, Debug)]
struct Span<'r> {
    /// The plugin's name of the host.
    node: &'r str,
    from: u64,
    /// `u64::MAX`: nothing has taken it away.
    until: u64,
}

impl Span<'_> {
    fn is_at(&self, time: u64) -> bool {
        (self.from..self.until).contains(&time)
    }
}

/// A call of a record, with the plugin's name of the host that it is for.
struct Of<'r> {
    node: String,
    recorded: &'r Recorded,
}

impl Of<'_> {
    /// Whether the call may have done its work.
    fn may_be_done(&self) -> bool {
        self.recorded.code.is_none_or(|code| code == 0)
    }
}

/// Returns the spans of the calls `begin`, each of which `end` ends.
fn spans<'r>(calls: &'r [Of<'r>], begin: &[&str], end: &str) -> Vec<Span<'r>> {
    let begins = calls.iter().filter(|of| begin.contains(&of.recorded.call.rpc.as_str()) && of.may_be_done());
    begins
        .map(|of| {
            let from = of.recorded.call.at;
            let is_end = |other: &&Of<'_>| {
                let Recorded { call, code, .. } = other.recorded;
                other.node == of.node && call.rpc == end && call.at > from && *code == Some(0)
            };
            let ends = calls.iter().filter(is_end).filter_map(|other| other.recorded.ended);
            Span { node: &of.node, from, until: ends.min().unwrap_or(u64::MAX) }
        })
        .collect()
}

/// Returns what the plugins have to hold against csid and the servers, for one volume. `records`: what each plugin has recorded, by its host.
/// An attach elsewhere is no fault while only a stray is in its way.
pub fn faults(volume: Volume, records: &[(String, Vec<Recorded>)], strays: &[Stray]) -> Vec<String> {
    let of_volume = records.iter().flat_map(|(host, calls)| calls.iter().map(move |call| (host, call)));
    let calls: Vec<Of<'_>> = of_volume
        .filter(|(_, recorded)| recorded.call.volume == volume.external_id())
        .map(|(host, recorded)| {
            let is_controllers = recorded.call.rpc.starts_with("Controller");
            let node = if is_controllers { recorded.call.node.clone() } else { node_id(host) };
            Of { node, recorded }
        })
        .collect();
    let used = spans(&calls, &["NodeStageVolume", "NodePublishVolume"], "NodeUnstageVolume");
    let attached = spans(&calls, &["ControllerPublishVolume"], "ControllerUnpublishVolume");
    let is_stray = |span: &Span<'_>| {
        strays
            .iter()
            .any(|stray| stray.volume == volume.name && stray.node == span.node && span.is_at(stray.at))
    };
    let (strays, attached): (Vec<_>, Vec<_>) = attached.into_iter().partition(is_stray);
    let mut faults = Vec::new();
    for of in &calls {
        let Recorded { call, code, .. } = of.recorded;
        let elsewhere = |spans: &[Span<'_>]| {
            spans.iter().any(|span| volume.is_single() && span.node != of.node && span.is_at(call.at))
        };
        let what = match call.rpc.as_str() {
            "NodeStageVolume" | "NodePublishVolume" if elsewhere(&used) => "another node uses it",
            "ControllerPublishVolume" if elsewhere(&attached) => "it is attached to another node",
            "ControllerUnpublishVolume"
                if used.iter().any(|span| span.node == of.node && span.is_at(call.at)) =>
            {
                "the node uses it"
            }
            "ControllerPublishVolume" if elsewhere(&strays) => continue,
            _ if *code == Some(FAILED_PRECONDITION) => "the plugin does not allow it",
            _ => continue,
        };
        faults.push(format!("{what}: {} for {}", of.recorded, of.node));
    }
    faults
}

#[cfg(test)]
mod tests {
    use csid_tests::script::Call;

    use super::*;
    use crate::load::VOLUMES;

    /// Returns what the judge says of calls `HOST RPC NODE`, each of which ends before the next one begins. `held`: the place of a call without an
    /// end.
    fn judged(volume: &str, held: Option<usize>, calls: &[&str], strays: &[Stray]) -> Vec<String> {
        let volume = VOLUMES.into_iter().find(|is| is.name == volume).unwrap();
        let recorded = (0..).zip(calls).map(|(n, text)| {
            let mut words = text.split(' ');
            let [host, rpc, node] = [(); 3].map(|()| words.next().unwrap_or_default());
            let call = Call {
                rpc: rpc.into(),
                volume: volume.external_id(),
                node: node_id(node),
                at: 10 * n,
                ..Call::default()
            };
            let is_open = held == Some(n as usize);
            let (code, ended) = if is_open { (None, None) } else { (Some(0), Some(10 * n + 5)) };
            (host.to_owned(), vec![Recorded { call, code, ended, cancelled: false }])
        });
        let said = faults(volume, &recorded.collect::<Vec<_>>(), strays);
        said.into_iter().map(|text| text.split(": ").next().unwrap().to_owned()).collect()
    }

    const MOVED: [&str; 6] = [
        "c1 ControllerPublishVolume n1",
        "n1 NodeStageVolume",
        "n1 NodeUnstageVolume",
        "c1 ControllerUnpublishVolume n1",
        "c1 ControllerPublishVolume n2",
        "n2 NodeStageVolume",
    ];

    #[test]
    fn volume_that_moves_between_hosts_is_right() {
        assert_eq!(judged("attached", None, &MOVED, &[]), [""; 0]);
    }

    #[test]
    fn unstage_without_an_end_is_seen() {
        assert_eq!(judged("attached", Some(2), &MOVED, &[]), ["the node uses it", "another node uses it"]);
    }

    #[test]
    fn detach_without_an_end_is_seen() {
        assert_eq!(judged("attached", Some(3), &MOVED, &[]), ["it is attached to another node"]);
    }

    #[test]
    fn only_a_stray_is_no_fault() {
        let stray = |node: &str, at| Stray { volume: "attached", node: node_id(node), at };
        for (stray, due) in [
            (stray("n1", 35), &[][..]),
            (stray("n1", 45), &[]),
            (stray("n2", 35), &["it is attached to another node"]),
        ] {
            assert_eq!(judged("attached", Some(3), &MOVED, std::slice::from_ref(&stray)), due, "{stray:?}");
        }
        assert_eq!(judged("attached", Some(2), &MOVED, &[stray("n1", 15)]).len(), 2);
    }

    #[test]
    fn stage_without_an_end_counts_as_done() {
        let calls = ["n1 NodeStageVolume", "n2 NodeStageVolume"];
        assert_eq!(judged("one", Some(0), &calls, &[]), ["another node uses it"]);
    }

    #[test]
    fn volume_of_many_writers_is_on_two_hosts() {
        assert_eq!(judged("many", None, &["n1 NodeStageVolume", "n2 NodeStageVolume"], &[]), [""; 0]);
    }
}
