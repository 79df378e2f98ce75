//! Rules 3 and 18: what may be sent now.

use std::collections::{BTreeMap, BTreeSet};

use super::{Call, Outcome, Peers, Verdict};

const IDENTITY: [&str; 3] = ["GetPluginInfo", "GetPluginCapabilities", "Probe"];

#[derive(Default)]
pub(super) struct Flight {
    /// Processes of the CO that had an answer to an Identity call, and at which socket. The plugin's process is 0.
    acquainted: BTreeSet<Peers>,
    /// The call in flight, by its place.
    flying: BTreeMap<Place, u64>,
}

/// Where one call may be in flight: a volume at a host, and a volume for the controller calls of all hosts. A volume without an id yet goes by
/// its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// `None`: all.
    host: Option<usize>,
    volume: String,
}

impl Flight {
    pub(super) fn begin(&mut self, call: &Call, verdict: &mut Verdict) {
        if !IDENTITY.contains(&call.rpc.as_str()) {
            verdict.check(3, self.acquainted.contains(&who(call)), &[call.id], || {
                format!("{} before any Identity call of this CO was answered", call.rpc)
            });
        }
        let places = places(call);
        if !places.is_empty() {
            let mut other = None;
            for place in places {
                other = self.flying.insert(place, call.id).or(other);
            }
            verdict.check(18, other.is_none(), &[other.unwrap_or(call.id), call.id], || {
                format!("{} while another call for the volume has no answer yet", call.rpc)
            });
        }
    }

    pub(super) fn end(&mut self, call: &Call, outcome: &Outcome) {
        if IDENTITY.contains(&call.rpc.as_str()) && matches!(outcome, Outcome::Ok(_)) {
            self.acquainted.insert(who(call));
        }
        for place in places(call) {
            if self.flying.get(&place) == Some(&call.id) {
                self.flying.remove(&place);
            }
        }
    }
}

fn who(call: &Call) -> Peers {
    Peers { plugin: 0, ..call.peers }
}

fn places(call: &Call) -> Vec<Place> {
    let volume = match call.rpc.as_str() {
        "CreateVolume" => Some(format!("name {}", call.text("name"))),
        _ => call.volume().map(|volume| format!("id {volume}")),
    };
    let hosts = [Some(call.host()), None];
    let hosts = &hosts[..if call.rpc.starts_with("Node") { 1 } else { 2 }];
    let places =
        volume.map(|volume| hosts.iter().map(move |host| Place { host: *host, volume: volume.clone() }));
    places.into_iter().flatten().collect()
}
