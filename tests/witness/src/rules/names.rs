//! Rule 39: after a CreateVolume whose outcome is not known there is a volume, or there is none, or there will be one; only the
//! same call again shows, and gives its id.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Call, Outcome, Verdict};

#[derive(Default)]
pub(super) struct Names {
    /// By name, the first call of which nobody knows what it made.
    open: BTreeMap<String, Call>,
    /// Ids that the plugin has returned, or confirmed.
    told: BTreeSet<String>,
    /// Meanwhile, the last delete of an id that was not returned.
    guessed: BTreeMap<String, u64>,
}

impl Names {
    pub(super) fn begin(&mut self, call: &Call, verdict: &mut Verdict) {
        match call.rpc.as_str() {
            "CreateVolume" => {
                if let Some(open) = self.open.get(call.text("name")) {
                    let is_same =
                        open.host() != call.host() || wanted(&open.request) == wanted(&call.request);
                    verdict.check(39, is_same, &[open.id, call.id], || {
                        "CreateVolume with other arguments than the call before, whose outcome is not known".into()
                    });
                }
            }
            "DeleteVolume" if !self.open.is_empty() && !self.told.contains(call.text("volume_id")) => {
                self.guessed.insert(call.text("volume_id").to_owned(), call.id);
            }
            _ => {}
        }
    }

    pub(super) fn end(&mut self, call: &Call, outcome: &Outcome, verdict: &mut Verdict) {
        if call.request.is_null() {
            return;
        }
        let name = call.text("name");
        match (call.rpc.as_str(), outcome) {
            ("CreateVolume", Outcome::Ok(answer)) => {
                let id = answer["volume"]["volume_id"].as_str().unwrap_or_default();
                if let Some(open) = self.open.remove(name) {
                    let delete = self.guessed.get(id).filter(|delete| **delete > open.id);
                    let evidence = [open.id, *delete.unwrap_or(&call.id), call.id];
                    verdict.check(39, delete.is_none(), &evidence, || {
                        format!("DeleteVolume of {id} before the CreateVolume that made it was sent again")
                    });
                }
                self.told.insert(id.to_owned());
            }
            // A library reports a broken connection by the same code, so the CO cannot tell them apart.
            ("CreateVolume", Outcome::Unknown | Outcome::Refused("UNAVAILABLE")) => {
                self.open.entry(name.to_owned()).or_insert_with(|| call.clone());
            }
            // The call before may be at work yet.
            ("CreateVolume", Outcome::Refused("ABORTED")) => {}
            ("CreateVolume", Outcome::Refused(_)) => drop(self.open.remove(name)),
            ("ListVolumes", Outcome::Ok(answer)) => {
                let entries = answer["entries"].as_array().into_iter().flatten();
                let ids = entries.filter_map(|entry| entry["volume"]["volume_id"].as_str());
                self.told.extend(ids.map(str::to_owned));
            }
            (rpc, Outcome::Ok(_)) if rpc != "DeleteVolume" => {
                self.told.extend(call.volume().map(str::to_owned));
            }
            _ => {}
        }
        if self.open.is_empty() {
            self.guessed.clear();
        }
    }
}

/// Secrets may be others by then.
fn wanted(request: &Value) -> impl PartialEq {
    let fields = request.as_object().into_iter().flatten();
    fields.filter(|(field, _)| *field != "secrets").collect::<Vec<_>>()
}
