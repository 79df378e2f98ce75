//! Rule 36: what is not sent again. A person may ask for the same once more, so only a call that follows its own refusal
//! with nothing for the volume in between counts, and only of the same process of the CO.

use std::collections::BTreeMap;

use super::{Call, Kind, Outcome, Peers, Verdict, kind};

#[derive(Default)]
pub(super) struct Errors {
    /// The last call about a volume (or by a name), when it was refused for what it says.
    refused: BTreeMap<String, (Call, String)>,
    /// What the plugin does not have: by who asked whom, the RPC, the volume.
    unimplemented: BTreeMap<(Peers, String, String), u64>,
}

impl Errors {
    pub(super) fn begin(&mut self, call: &Call, verdict: &mut Verdict) {
        let subject = subject(call).to_owned();
        if asks_who(&call.rpc) {
            return;
        }
        if let Some(earlier) = self.unimplemented.get(&(call.peers, call.rpc.clone(), subject.clone())) {
            verdict.check(36, false, &[*earlier, call.id], || {
                format!("{} again, which the plugin answered with UNIMPLEMENTED", call.rpc)
            });
        }
        if kind(&call.rpc) == Kind::Read {
            return;
        }
        if let Some((earlier, code)) = self.refused.remove(&subject)
            && earlier.peers.co == call.peers.co
        {
            let is_same = earlier.rpc == call.rpc && earlier.request == call.request;
            verdict.check(36, !is_same, &[earlier.id, call.id], || {
                format!("{} again as it was, which the plugin answered with {code}", call.rpc)
            });
        }
    }

    pub(super) fn end(&mut self, call: &Call, outcome: &Outcome) {
        if call.request.is_null() {
            return;
        }
        let subject = subject(call).to_owned();
        match outcome {
            // What the plugin has is read anew.
            Outcome::Ok(_) if asks_who(&call.rpc) => {
                self.unimplemented.retain(|(peers, ..), _| *peers != call.peers);
            }
            Outcome::Refused("UNIMPLEMENTED") if !asks_who(&call.rpc) => {
                self.unimplemented.insert((call.peers, call.rpc.clone(), subject), call.id);
            }
            // The negation is repeated until it is acknowledged, whatever the plugin has against it.
            Outcome::Refused(code @ ("INVALID_ARGUMENT" | "ALREADY_EXISTS" | "OUT_OF_RANGE"))
                if kind(&call.rpc) == Kind::Make =>
            {
                self.refused.insert(subject, (call.clone(), (*code).to_owned()));
            }
            _ => {}
        }
    }
}

/// Calls by which a CO gets to know the plugin are sent as often as it likes.
fn asks_who(rpc: &str) -> bool {
    matches!(
        rpc,
        "GetPluginInfo"
            | "GetPluginCapabilities"
            | "Probe"
            | "ControllerGetCapabilities"
            | "GroupControllerGetCapabilities"
            | "NodeGetCapabilities"
            | "NodeGetInfo"
    )
}

fn subject(call: &Call) -> &str {
    call.volume().unwrap_or_else(|| call.text("name"))
}
