//! Rules 3 and 18: what may be sent now.

use std::collections::{BTreeMap, BTreeSet};

use super::{Call, Outcome, Verdict};

const IDENTITY: [&str; 3] = ["GetPluginInfo", "GetPluginCapabilities", "Probe"];

#[derive(Default)]
pub(super) struct Flight {
    /// Processes of the CO that had an answer to an Identity call, and at which socket.
    acquainted: BTreeSet<(i32, usize)>,
    /// The call in flight, by volume; a volume without an id yet goes by its name.
    flying: BTreeMap<String, u64>,
}

impl Flight {
    pub(super) fn begin(&mut self, call: &Call, verdict: &mut Verdict) {
        if !IDENTITY.contains(&call.rpc.as_str()) {
            verdict.check(3, self.acquainted.contains(&who(call)), &[call.id], || {
                format!("{} before any Identity call of this CO was answered", call.rpc)
            });
        }
        if let Some(volume) = key(call) {
            let other = self.flying.insert(volume, call.id);
            verdict.check(18, other.is_none(), &[other.unwrap_or(call.id), call.id], || {
                format!("{} while another call for the volume has no answer yet", call.rpc)
            });
        }
    }

    pub(super) fn end(&mut self, call: &Call, outcome: &Outcome) {
        if IDENTITY.contains(&call.rpc.as_str()) && matches!(outcome, Outcome::Ok(_)) {
            self.acquainted.insert(who(call));
        }
        if let Some(volume) = key(call).filter(|volume| self.flying.get(volume) == Some(&call.id)) {
            self.flying.remove(&volume);
        }
    }
}

fn who(call: &Call) -> (i32, usize) {
    (call.peers.co, call.peers.socket)
}

fn key(call: &Call) -> Option<String> {
    match call.rpc.as_str() {
        "CreateVolume" => Some(format!("name {}", call.text("name"))),
        _ => call.volume().map(|volume| format!("id {volume}")),
    }
}
