//! How often each RPC was made to a plugin, with which end, and how long it took. It holds the counts of all instances of
//! the plugin, as long as it has one. No lock: it is on the way of every mount.

use std::sync::OnceLock;
use std::time::Instant;

use tonic::Code;

use crate::histogram::{Durations, Histogram};

/// More than there are RPCs that csid makes. Names are csid's own, so no plugin makes this grow.
const RPCS: usize = 32;
/// gRPC's, 0 to 16.
const CODES: usize = 17;

#[derive(Default)]
pub(super) struct Tally([OnceLock<Box<Rpc>>; RPCS]);

struct Rpc {
    name: &'static str,
    codes: [OnceLock<Box<Histogram>>; CODES],
}

/// How often an RPC ended with a code, and how long that took.
#[derive(Clone, Debug)]
pub struct RpcCount {
    pub rpc: &'static str,
    pub code: Code,
    pub took: Durations,
}

/// An RPC under way. It is counted when this is dropped.
pub(super) struct Counted<'a> {
    tally: &'a Tally,
    rpc: &'static str,
    start: Instant,
    /// Until another is known: who waited for it has left, which cancels it.
    pub code: Code,
}

impl Tally {
    pub fn begin(&self, rpc: &'static str, start: Instant) -> Counted<'_> {
        Counted { tally: self, rpc, start, code: Code::Cancelled }
    }

    /// Returns the counts, in the order in which each RPC was first made.
    pub fn read(&self) -> Vec<RpcCount> {
        let rpcs = self.0.iter().filter_map(OnceLock::get);
        let counts = rpcs.flat_map(|rpc| {
            let codes = rpc.codes.iter().enumerate().filter_map(|(code, took)| Some((code, took.get()?)));
            codes.map(|(code, took)| RpcCount {
                rpc: rpc.name,
                code: Code::from(code as i32),
                took: took.read(),
            })
        });
        counts.collect()
    }

    fn of(&self, name: &'static str, code: Code) -> Option<&Histogram> {
        let new = || Box::new(Rpc { name, codes: Default::default() });
        // The first that is free becomes this one's.
        let rpc = self.0.iter().map(|slot| slot.get_or_init(new)).find(|rpc| rpc.name == name)?;
        Some(rpc.codes.get(code as usize)?.get_or_init(Box::default))
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if let Some(histogram) = self.tally.of(self.rpc, self.code) {
            histogram.record(self.start.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rpc_and_code_is_counted_apart() {
        let tally = Tally::default();
        for (rpc, code) in [
            ("Probe", Code::Ok),
            ("NodeStageVolume", Code::Internal),
            ("Probe", Code::Ok),
            ("Probe", Code::Unavailable),
        ] {
            tally.begin(rpc, Instant::now()).code = code;
        }
        drop(tally.begin("NodeStageVolume", Instant::now()));
        let counts: Vec<_> =
            tally.read().into_iter().map(|count| (count.rpc, count.code, count.took.count())).collect();
        assert_eq!(
            counts,
            [
                ("Probe", Code::Ok, 2),
                ("Probe", Code::Unavailable, 1),
                ("NodeStageVolume", Code::Cancelled, 1),
                ("NodeStageVolume", Code::Internal, 1),
            ]
        );
    }
}
