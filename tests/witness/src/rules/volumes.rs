//! Rules 20 to 29, 31 and 33 to 35: what a call may rely on, given how far its volume is up on this node.

use std::collections::BTreeMap;

use serde_json::Value;

use super::capabilities::Capabilities;
use super::legs::{Leg, Legs, State};
use super::{Call, Kind, Outcome, Verdict, kind};

/// All that is known of the volumes.
#[derive(Default)]
pub(super) struct Volumes {
    volumes: BTreeMap<String, Volume>,
    /// Whose staging or target path it is, or was.
    owners: BTreeMap<String, String>,
    /// By volume: the last call that staged or unstaged it, whatever became of it.
    staged: BTreeMap<String, u64>,
}

#[derive(Default)]
struct Volume {
    /// By node id.
    attachments: Legs,
    /// By staging path; more than one only of a CO that breaks rule 28.
    staging: Legs,
    /// By target path.
    targets: Legs,
    /// The volume_context that goes with it, and the call that said so.
    context: Option<(Value, u64)>,
    /// The plugin made it through this witness: `context` is its own.
    is_created: bool,
    /// Capabilities that were validated: whether they were confirmed, and by which call.
    validated: BTreeMap<String, (bool, u64)>,
}

impl Volumes {
    pub(super) fn begin(&mut self, call: &Call, known: &Capabilities, verdict: &mut Verdict) {
        let Some(id) = call.volume() else { return };
        let rpc = call.rpc.as_str();
        if matches!(
            rpc,
            "NodeStageVolume" | "NodeUnstageVolume" | "NodePublishVolume" | "NodeUnpublishVolume"
        ) {
            self.check_paths(id, call, verdict);
        }
        let last_staged = self.staged.get(id).copied();
        let volume = self.volumes.entry(id.to_owned()).or_default();
        match call.rpc.as_str() {
            "ControllerPublishVolume" => {
                volume.check_use(call, verdict);
                volume.check_again(&volume.attachments, call.text("node_id"), call, verdict);
                volume.attachments.make(call.text("node_id"), call);
            }
            "ControllerUnpublishVolume" => {
                volume.check_detach(call, known, verdict);
                let node = call.text("node_id");
                volume.attachments.negate(|name| node.is_empty() || name == node, call);
            }
            "NodeStageVolume" => {
                volume.check_use(call, verdict);
                volume.check_attached(call, known, verdict);
                let path = call.text("staging_target_path");
                volume.check_staging_path(path, call, verdict);
                volume.check_again(&volume.staging, path, call, verdict);
                volume.staging.make(path, call);
                self.staged.insert(id.to_owned(), call.id);
            }
            "NodeUnstageVolume" => {
                let path = call.text("staging_target_path");
                volume.check_staging_path(path, call, verdict);
                must_be_gone(verdict, 22, volume.targets.iter(), call);
                volume.staging.negate(|name| name == path, call);
                self.staged.insert(id.to_owned(), call.id);
            }
            "NodePublishVolume" => {
                volume.check_use(call, verdict);
                volume.check_attached(call, known, verdict);
                volume.check_staged(call, known, last_staged, verdict);
                let target = call.text("target_path");
                volume.check_again(&volume.targets, target, call, verdict);
                volume.check_second_target(call, verdict);
                volume.targets.make(target, call);
            }
            "NodeUnpublishVolume" => {
                let target = call.text("target_path");
                volume.targets.negate(|name| name == target, call);
            }
            "NodeGetVolumeStats" | "NodeGetVolumeHealth" => {
                volume.check_given_staging_path(call, known, verdict);
            }
            "NodeExpandVolume" => {
                volume.check_given_staging_path(call, known, verdict);
                let (what, legs, last) = match known.stages() {
                    true => ("staged", &volume.staging, last_staged),
                    false => ("published", &volume.targets, None),
                };
                let leg = legs.iter().map(|(_, leg)| leg).max_by_key(|leg| leg.state == State::Present);
                must_be_up(verdict, 26, what, leg, last, call);
            }
            "ControllerExpandVolume" if known.expands_offline_only() => {
                must_be_gone(verdict, 26, volume.legs(), call);
            }
            "DeleteVolume" => must_be_gone(verdict, 24, volume.legs(), call),
            _ => {}
        }
        self.forget_if_empty(id);
    }

    pub(super) fn end(&mut self, call: &Call, outcome: &Outcome) {
        if let ("CreateVolume", Outcome::Ok(answer)) = (call.rpc.as_str(), outcome) {
            let created = &answer["volume"];
            let volume = self.volumes.entry(created["volume_id"].as_str().unwrap_or_default().to_owned());
            let volume = volume.or_default();
            volume.context = Some((created["volume_context"].clone(), call.id));
            volume.is_created = true;
        }
        let Some(id) = call.volume() else { return };
        let Some(volume) = self.volumes.get_mut(id) else {
            // Nothing is known of the volume but the result of its validation.
            if call.rpc == "ValidateVolumeCapabilities" {
                self.volumes.entry(id.to_owned()).or_default().validate(call, outcome);
                self.forget_if_empty(id);
            }
            return;
        };
        match call.rpc.as_str() {
            "ControllerPublishVolume" => volume.attachments.made(call, outcome),
            "ControllerUnpublishVolume" => volume.attachments.negated(call, outcome),
            "NodeStageVolume" => volume.staging.made(call, outcome),
            "NodeUnstageVolume" => volume.staging.negated(call, outcome),
            "NodePublishVolume" => volume.targets.made(call, outcome),
            "NodeUnpublishVolume" => volume.targets.negated(call, outcome),
            "ValidateVolumeCapabilities" => volume.validate(call, outcome),
            "DeleteVolume" if outcome.took_away() => {
                volume.is_created = false;
                volume.context = None;
                volume.validated.clear();
            }
            _ => {}
        }
        self.forget_if_empty(id);
    }

    pub(super) fn reboot(&mut self) {
        self.owners.clear();
        for volume in self.volumes.values_mut() {
            volume.staging.clear();
            volume.targets.clear();
        }
        let ids: Vec<String> = self.volumes.keys().cloned().collect();
        ids.iter().for_each(|id| self.forget_if_empty(id));
    }

    /// CO rule 24, for a CO that says that it is done with every volume.
    pub(super) fn rest(&self, verdict: &mut Verdict) {
        for (id, volume) in &self.volumes {
            for (name, leg) in volume.legs() {
                let rule = if leg.state == State::Making { 25 } else { 24 };
                verdict.check(rule, false, &[leg.made, leg.last], || {
                    format!("at rest, {id} is not known to be gone from {name}")
                });
            }
        }
        for rule in [24, 25] {
            verdict.looked(rule);
        }
    }

    fn forget_if_empty(&mut self, id: &str) {
        let Some(volume) = self.volumes.get_mut(id).filter(|volume| volume.is_down()) else { return };
        if !volume.is_created {
            volume.context = None;
        }
        if volume.is_empty() {
            self.volumes.remove(id);
        }
    }

    /// Checks CO rules 28 and 29: the path is absolute, and no other volume is there. A call that removes the other volume breaks
    /// them, too.
    fn check_paths(&mut self, id: &str, call: &Call, verdict: &mut Verdict) {
        let staging = call.text("staging_target_path");
        let (rule, path) = match call.rpc.as_str() {
            "NodeStageVolume" | "NodeUnstageVolume" => (28, staging),
            _ => (29, call.text("target_path")),
        };
        verdict.check(rule, path.starts_with('/'), &[call.id], || {
            format!("{} with the path {path:?}, which is not absolute", call.rpc)
        });
        let leg_of = |volume: &str| {
            let volume = self.volumes.get(volume)?;
            volume.staging.get(path).or_else(|| volume.targets.get(path))
        };
        let other = self.owners.get(path).filter(|owner| *owner != id);
        let other = other.and_then(|owner| Some((owner, leg_of(owner)?)));
        let evidence = other.map_or(call.id, |(_, leg)| leg.made);
        verdict.check(rule, other.is_none(), &[evidence, call.id], || {
            format!("{} at {path}, where {} is", call.rpc, other.map_or("", |(owner, _)| owner))
        });
        if call.rpc == "NodePublishVolume" {
            verdict.check(29, path != staging, &[call.id], || format!("{} at the staging path", call.rpc));
        }
        if kind(&call.rpc) == Kind::Make {
            self.owners.insert(path.to_owned(), id.to_owned());
        }
    }
}

impl Volume {
    fn is_down(&self) -> bool {
        self.attachments.is_empty() && self.staging.is_empty() && self.targets.is_empty()
    }

    fn is_empty(&self) -> bool {
        self.is_down() && !self.is_created && self.validated.is_empty()
    }

    fn legs(&self) -> impl Iterator<Item = (&str, &Leg)> {
        self.attachments.iter().chain(self.staging.iter()).chain(self.targets.iter())
    }

    /// CO rules 31 and 35, for every call that makes something of the volume.
    fn check_use(&mut self, call: &Call, verdict: &mut Verdict) {
        let context = &call.request["volume_context"];
        let (expected, said) = self.context.get_or_insert_with(|| (context.clone(), call.id));
        verdict.check(31, expected == context, &[*said, call.id], || {
            format!("{} with another volume_context", call.rpc)
        });
        if let Some((confirmed, validated)) = self.validated.get(&capability(&call.request).to_string()) {
            verdict.check(35, *confirmed, &[*validated, call.id], || {
                format!("{} with a capability that was not confirmed", call.rpc)
            });
        }
    }

    /// CO rules 25 and 34: the same thing is not made with another capability before it was taken away.
    fn check_again(&self, legs: &Legs, name: &str, call: &Call, verdict: &mut Verdict) {
        let Some(leg) = legs.get(name) else { return };
        let is_same = capability(&leg.request) == capability(&call.request)
            && leg.request["readonly"] == call.request["readonly"];
        let rule = match leg.state {
            State::Making => 25,
            State::Present => 34,
            // Not only its negation undoes a removal: so does making it once more.
            State::Removing => return,
        };
        verdict.check(rule, is_same, &[leg.made, leg.last, call.id], || {
            format!("{} with another capability or readonly, with no negation in between", call.rpc)
        });
    }

    /// The attachment to the node that the plugin runs on.
    fn attachment(&self, known: &Capabilities) -> Option<&Leg> {
        match known.node_id() {
            Some(node) => self.attachments.get(node),
            None => self.attachments.iter().next().map(|(_, leg)| leg),
        }
    }

    /// CO rules 20, 27 and 31.
    fn check_attached(&self, call: &Call, known: &Capabilities, verdict: &mut Verdict) {
        let Some(attaches) = known.attaches() else { return };
        let context = &call.request["publish_context"];
        if !attaches {
            verdict.check(31, context.is_null(), &[call.id], || {
                format!("{} with a publish_context, and the plugin does not attach", call.rpc)
            });
            return;
        }
        let leg = self.attachment(known);
        match (leg, self.attachments.iter().next()) {
            (Some(leg), _) => {
                must_be_there(verdict, 20, "attached", leg, call);
                verdict.looked(27);
                let is_known = leg.contexts.is_empty() || leg.contexts.contains(context);
                verdict.check(31, is_known, &[leg.made, call.id], || {
                    format!("{} with another publish_context than ControllerPublishVolume answered", call.rpc)
                });
            }
            (None, Some((node, other))) => verdict.check(27, false, &[other.made, call.id], || {
                let own = known.node_id().unwrap_or_default();
                format!("{} on the node {own:?}, and the volume is attached to {node:?}", call.rpc)
            }),
            (None, None) => verdict
                .check(20, false, &[call.id], || format!("{} of a volume that is not attached", call.rpc)),
        }
    }

    /// CO rule 28.
    fn check_staging_path(&self, path: &str, call: &Call, verdict: &mut Verdict) -> bool {
        let other = self.staging.iter().find(|(name, _)| *name != path);
        let evidence = other.map_or(call.id, |(_, leg)| leg.made);
        verdict.check(28, other.is_none(), &[evidence, call.id], || {
            let staged = other.map_or("", |(name, _)| name);
            format!("{} with the staging path {path:?}, and it is staged at {staged}", call.rpc)
        });
        other.is_none()
    }

    /// CO rule 21.
    fn check_staged(&self, call: &Call, known: &Capabilities, last: Option<u64>, verdict: &mut Verdict) {
        let path = call.text("staging_target_path");
        if !known.stages() || !self.check_staging_path(path, call, verdict) {
            return;
        }
        must_be_up(verdict, 21, "staged", self.staging.get(path), last, call);
    }

    /// CO rule 34.
    fn check_second_target(&self, call: &Call, verdict: &mut Verdict) {
        let target = call.text("target_path");
        let mode = capability(&call.request)["access_mode"]["mode"].as_str().unwrap_or_default();
        let many = mode.starts_with("MULTI_NODE_") || mode == "SINGLE_NODE_MULTI_WRITER";
        verdict.looked(34);
        for (name, leg) in self.targets.iter().filter(|(name, _)| *name != target) {
            let evidence = [leg.made, leg.last, call.id];
            if !many {
                let rule = if leg.state == State::Making { 25 } else { 34 };
                verdict.check(rule, false, &evidence, || {
                    format!("{} at a second target in the mode {mode}; the first is {name}", call.rpc)
                });
            } else if leg.state == State::Present {
                let is_same = capability(&leg.request) == capability(&call.request);
                verdict.check(34, is_same, &evidence, || {
                    format!("{} with another capability than at {name}", call.rpc)
                });
            }
        }
    }

    /// CO rules 23 and 33. What another node does with the volume is not seen here.
    fn check_detach(&self, call: &Call, known: &Capabilities, verdict: &mut Verdict) {
        let node = call.text("node_id");
        if node.is_empty() || known.node_id().is_none_or(|own| own == node) {
            must_be_gone(verdict, 23, self.staging.iter().chain(self.targets.iter()), call);
        }
        for (_, leg) in self.attachments.iter().filter(|(name, _)| node.is_empty() || *name == node) {
            let (published, given) = (keys(&leg.request), keys(&call.request));
            verdict.check(33, published == given, &[leg.made, call.id], || {
                format!("{} with other secrets ({given:?}) than the publish ({published:?})", call.rpc)
            });
        }
    }

    /// CO rule 33.
    fn check_given_staging_path(&self, call: &Call, known: &Capabilities, verdict: &mut Verdict) {
        let path = call.text("staging_target_path");
        for (name, leg) in self.staging.iter().filter(|(_, leg)| leg.state == State::Present) {
            verdict.check(33, known.stages() && name == path, &[leg.made, call.id], || {
                format!("{} with the staging path {path:?}; the volume is staged at {name}", call.rpc)
            });
        }
    }

    /// CO rule 35.
    fn validate(&mut self, call: &Call, outcome: &Outcome) {
        let Outcome::Ok(answer) = outcome else { return };
        let confirmed = answer["confirmed"]["volume_capabilities"].as_array();
        for asked in call.request["volume_capabilities"].as_array().into_iter().flatten() {
            let is_confirmed = confirmed.is_some_and(|confirmed| confirmed.contains(asked));
            self.validated.insert(asked.to_string(), (is_confirmed, call.id));
        }
    }
}

/// Reported as `rule`, or as 25 where no answer says whether it is.
fn must_be_there(verdict: &mut Verdict, rule: u8, what: &str, leg: &Leg, call: &Call) {
    let evidence = [leg.made, leg.last, call.id];
    let is_known = leg.state != State::Making;
    verdict.check(25, is_known, &evidence, || {
        format!("{} of a volume of which it is not known whether it is {what}", call.rpc)
    });
    if is_known {
        verdict.check(rule, leg.state == State::Present, &evidence, || {
            format!("{} of a volume that was asked to be {what} no more", call.rpc)
        });
    }
}

/// `last` is the call that left it down, where one is known.
fn must_be_up(
    verdict: &mut Verdict,
    rule: u8,
    what: &str,
    leg: Option<&Leg>,
    last: Option<u64>,
    call: &Call,
) {
    match leg {
        Some(leg) => must_be_there(verdict, rule, what, leg, call),
        None => verdict.check(rule, false, &[last.unwrap_or(call.id), call.id], || {
            format!("{} of a volume that is not {what}", call.rpc)
        }),
    }
}

fn must_be_gone<'a>(
    verdict: &mut Verdict,
    rule: u8,
    legs: impl Iterator<Item = (&'a str, &'a Leg)>,
    call: &Call,
) {
    for rule in [rule, 25] {
        verdict.looked(rule);
    }
    for (name, leg) in legs {
        let rule = if leg.state == State::Making { 25 } else { rule };
        verdict.check(rule, false, &[leg.made, leg.last, call.id], || {
            format!("{} of a volume that is not known to be gone from {name}", call.rpc)
        });
    }
}

fn capability(request: &Value) -> &Value {
    &request["volume_capability"]
}

fn keys(request: &Value) -> Vec<&str> {
    let secrets = request["secrets"]["values"].as_object();
    secrets.into_iter().flatten().map(|(key, _)| key.as_str()).collect()
}
