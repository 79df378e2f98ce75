//! Rule 36: what is not sent again. A person may undo a refused call and ask for the same once more, so a negation for the volume
//! ends a refusal. INVALID_ARGUMENT does not depend on the plugin's state: no other call ends it. ALREADY_EXISTS and OUT_OF_RANGE
//! do, so any call that may change that state ends them. Only calls of the same process of the CO count.

use std::collections::BTreeMap;

use super::{Call, Kind, Outcome, Peers, Verdict, kind};

#[derive(Default)]
pub(super) struct Errors {
    /// By host and volume (or name): the calls that were refused for what they say, and with which code.
    refused: BTreeMap<(usize, String), Vec<(Call, String)>>,
    /// The RPCs that the plugin does not have, by caller, plugin, RPC and volume.
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
        if let Some(refused) = self.refused.get_mut(&(call.host(), subject.clone())) {
            refused.retain(|(earlier, _)| earlier.peers.co == call.peers.co);
            let is_same = |earlier: &Call| earlier.rpc == call.rpc && earlier.request == call.request;
            if let Some(at) = refused.iter().position(|(earlier, _)| is_same(earlier)) {
                let (earlier, code) = refused.remove(at);
                verdict.check(36, false, &[earlier.id, call.id], || {
                    format!("{} again as it was, which the plugin answered with {code}", call.rpc)
                });
            } else if !refused.is_empty() {
                verdict.looked(36);
            }
        }
        self.change(&subject, call);
    }

    /// Drops the refusals that `call` may end.
    fn change(&mut self, subject: &str, call: &Call) {
        let is_negation = kind(&call.rpc) == Kind::Negate;
        // A delete names an id: which name was created is not known.
        let ends = |key: &str| key == subject || call.rpc.starts_with("Delete");
        self.refused.retain(|(_, key), refused| {
            if ends(key) {
                refused.retain(|(_, code)| code == "INVALID_ARGUMENT" && !(is_negation && key == subject));
            }
            !refused.is_empty()
        });
    }

    pub(super) fn end(&mut self, call: &Call, outcome: &Outcome) {
        if call.request.is_null() {
            return;
        }
        let subject = subject(call).to_owned();
        match outcome {
            // The capabilities were queried again.
            Outcome::Ok(_) if asks_who(&call.rpc) => {
                self.unimplemented.retain(|(peers, ..), _| *peers != call.peers);
            }
            // Whatever the volume: the plugin has this RPC.
            Outcome::Ok(_) => {
                self.unimplemented.retain(|(peers, rpc, _), _| *peers != call.peers || *rpc != call.rpc);
            }
            Outcome::Refused("UNIMPLEMENTED") if !asks_who(&call.rpc) => {
                self.unimplemented.insert((call.peers, call.rpc.clone(), subject), call.id);
            }
            // The negation is repeated until it is acknowledged, whatever the plugin has against it.
            Outcome::Refused(code @ ("INVALID_ARGUMENT" | "ALREADY_EXISTS" | "OUT_OF_RANGE"))
                if kind(&call.rpc) == Kind::Make =>
            {
                self.refused
                    .entry((call.host(), subject))
                    .or_default()
                    .push((call.clone(), (*code).to_owned()));
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
