//! Rules 20 to 29, 31 and 33 to 35: what a call may rely on, given how far its volume is up on the hosts.

use std::collections::BTreeMap;

use serde_json::Value;

use super::capabilities::Capabilities;
use super::legs::{Leg, Legs, State};
use super::{Call, Kind, Outcome, Verdict, kind};

/// All that is known of the volumes.
#[derive(Default)]
pub(super) struct Volumes {
    volumes: BTreeMap<String, Volume>,
    /// By host: whose staging or target path it is, or was.
    owners: BTreeMap<(usize, String), String>,
    /// By host and volume: the last call that staged or unstaged it, whatever became of it.
    staged: BTreeMap<(usize, String), u64>,
}

#[derive(Default)]
struct Volume {
    /// By node id.
    attachments: Legs,
    hosts: BTreeMap<usize, OnHost>,
    /// The plugin made it through this witness.
    is_created: bool,
    /// Capabilities that were validated: whether they were confirmed, and by which call.
    validated: BTreeMap<String, (bool, u64)>,
}

/// What is known of a volume on one host.
#[derive(Default)]
struct OnHost {
    /// By staging path; more than one only of a CO that breaks rule 28.
    staging: Legs,
    /// By target path.
    targets: Legs,
    /// The volume_context that goes with it, and the call that said so. That of a volume that the plugin made here is the plugin's own.
    context: Option<(Value, u64)>,
}

impl OnHost {
    fn legs(&self) -> impl Iterator<Item = (&str, &Leg)> {
        self.staging.iter().chain(self.targets.iter())
    }
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
        let at = (call.host(), id.to_owned());
        let last_staged = self.staged.get(&at).copied();
        let volume = self.volumes.entry(id.to_owned()).or_default();
        let rpc = call.rpc.as_str();
        if matches!(rpc, "ControllerPublishVolume" | "NodeStageVolume" | "NodePublishVolume") {
            volume.check_use(call, verdict);
        }
        if matches!(rpc, "NodeStageVolume" | "NodePublishVolume") {
            volume.check_second_node(call, verdict);
        }
        match rpc {
            "ControllerPublishVolume" => {
                check_again(&volume.attachments, call.text("node_id"), call, verdict);
                volume.attachments.make(call.text("node_id"), call);
            }
            "ControllerUnpublishVolume" => {
                volume.check_detach(call, known, verdict);
                let node = call.text("node_id");
                volume.attachments.negate(|name| node.is_empty() || name == node, call);
            }
            "NodeStageVolume" => {
                volume.check_attached(call, known, verdict);
                let path = call.text("staging_target_path");
                volume.check_staging_path(path, call, verdict);
                let here = volume.at(call);
                check_again(&here.staging, path, call, verdict);
                here.staging.make(path, call);
                self.staged.insert(at, call.id);
            }
            "NodeUnstageVolume" => {
                let path = call.text("staging_target_path");
                volume.check_staging_path(path, call, verdict);
                let here = volume.at(call);
                must_be_gone(verdict, 22, here.targets.iter(), call);
                here.staging.negate(|name| name == path, call);
                self.staged.insert(at, call.id);
            }
            "NodePublishVolume" => {
                volume.check_attached(call, known, verdict);
                volume.check_staged(call, known, last_staged, verdict);
                let target = call.text("target_path");
                volume.check_second_target(call, verdict);
                let here = volume.at(call);
                check_again(&here.targets, target, call, verdict);
                here.targets.make(target, call);
            }
            "NodeUnpublishVolume" => {
                let target = call.text("target_path");
                volume.at(call).targets.negate(|name| name == target, call);
            }
            "NodeGetVolumeStats" | "NodeGetVolumeHealth" => {
                volume.check_given_staging_path(call, known, verdict);
            }
            "NodeExpandVolume" => {
                volume.check_given_staging_path(call, known, verdict);
                let here = volume.at(call);
                let (what, legs, last) = match known.stages() {
                    true => ("staged", &here.staging, last_staged),
                    false => ("published", &here.targets, None),
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

    pub(super) fn end(&mut self, call: &Call, outcome: &Outcome, verdict: &mut Verdict) {
        if let ("CreateVolume", Outcome::Ok(answer)) = (call.rpc.as_str(), outcome) {
            let created = &answer["volume"];
            let volume = self.volumes.entry(created["volume_id"].as_str().unwrap_or_default().to_owned());
            let volume = volume.or_default();
            volume.at(call).context = Some((created["volume_context"].clone(), call.id));
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
            "ControllerPublishVolume" => {
                // The plugin refuses a second node: CSI has an error for that.
                if let Outcome::Ok(_) = outcome {
                    volume.check_second_node(call, verdict);
                }
                volume.attachments.made(call, outcome);
            }
            "ControllerUnpublishVolume" => volume.attachments.negated(call, outcome),
            "NodeStageVolume" => volume.at(call).staging.made(call, outcome),
            "NodeUnstageVolume" => volume.at(call).staging.negated(call, outcome),
            "NodePublishVolume" => volume.at(call).targets.made(call, outcome),
            "NodeUnpublishVolume" => volume.at(call).targets.negated(call, outcome),
            "ValidateVolumeCapabilities" => volume.validate(call, outcome),
            "DeleteVolume" if outcome.took_away() => {
                volume.is_created = false;
                volume.forget_contexts();
                volume.validated.clear();
            }
            _ => {}
        }
        self.forget_if_empty(id);
    }

    pub(super) fn reboot(&mut self, host: usize) {
        self.owners.retain(|(at, _), _| *at != host);
        for here in self.volumes.values_mut().filter_map(|volume| volume.hosts.get_mut(&host)) {
            here.staging.clear();
            here.targets.clear();
        }
        let ids: Vec<String> = self.volumes.keys().cloned().collect();
        ids.iter().for_each(|id| self.forget_if_empty(id));
    }

    /// Forgets an attachment that the CO cannot know.
    pub(super) fn forget(&mut self, id: &str, node: &str) {
        if let Some(volume) = self.volumes.get_mut(id) {
            volume.attachments.forget(node);
            self.forget_if_empty(id);
        }
    }

    /// CO rule 24, for a CO that says that it is done with every volume on this host.
    pub(super) fn rest(&self, host: usize, known: &Capabilities, verdict: &mut Verdict) {
        for (id, volume) in &self.volumes {
            let attachments = volume.attachments.iter().filter(|(node, _)| !known.is_elsewhere(node, host));
            let here = volume.hosts.get(&host).into_iter().flat_map(OnHost::legs);
            for (name, leg) in attachments.chain(here) {
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
            volume.forget_contexts();
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
            let here = self.volumes.get(volume)?.hosts.get(&call.host())?;
            here.staging.get(path).or_else(|| here.targets.get(path))
        };
        let at = (call.host(), path.to_owned());
        let other = self.owners.get(&at).filter(|owner| *owner != id);
        let other = other.and_then(|owner| Some((owner, leg_of(owner)?)));
        let evidence = other.map_or(call.id, |(_, leg)| leg.made);
        verdict.check(rule, other.is_none(), &[evidence, call.id], || {
            format!("{} at {path}, where {} is", call.rpc, other.map_or("", |(owner, _)| owner))
        });
        if call.rpc == "NodePublishVolume" {
            verdict.check(29, path != staging, &[call.id], || format!("{} at the staging path", call.rpc));
        }
        if kind(&call.rpc) == Kind::Make {
            self.owners.insert(at, id.to_owned());
        }
    }
}

impl Volume {
    /// Returns what is known of it on a call's host.
    fn at(&mut self, call: &Call) -> &mut OnHost {
        self.hosts.entry(call.host()).or_default()
    }

    fn forget_contexts(&mut self) {
        self.hosts.values_mut().for_each(|here| here.context = None);
    }

    fn is_down(&self) -> bool {
        let is_down = |here: &OnHost| here.staging.is_empty() && here.targets.is_empty();
        self.attachments.is_empty() && self.hosts.values().all(is_down)
    }

    fn is_empty(&self) -> bool {
        self.is_down() && !self.is_created && self.validated.is_empty()
    }

    fn legs(&self) -> impl Iterator<Item = (&str, &Leg)> {
        self.attachments.iter().chain(self.hosts.values().flat_map(OnHost::legs))
    }

    /// CO rules 31 and 35, for every call that makes something of the volume.
    fn check_use(&mut self, call: &Call, verdict: &mut Verdict) {
        let context = &call.request["volume_context"];
        let (expected, said) = self.at(call).context.get_or_insert_with(|| (context.clone(), call.id));
        verdict.check(31, expected == context, &[*said, call.id], || {
            format!("{} with another volume_context", call.rpc)
        });
        if let Some((confirmed, validated)) = self.validated.get(&capability(&call.request).to_string()) {
            verdict.check(35, *confirmed, &[*validated, call.id], || {
                format!("{} with a capability that was not confirmed", call.rpc)
            });
        }
    }

    /// CO rules 25 and 34: a volume in a mode of one node is not brought up at a second one.
    fn check_second_node(&self, call: &Call, verdict: &mut Verdict) {
        verdict.looked(34);
        let is_of_one = |request: &Value| mode(request).starts_with("SINGLE_NODE_");
        let is_in_the_way = |leg: &Leg| is_of_one(&call.request) || is_of_one(&leg.request);
        let node = call.text("node_id");
        let other = match call.rpc.as_str() {
            "ControllerPublishVolume" => {
                let mut others = self.attachments.iter().filter(|(name, _)| *name != node);
                others
                    .find(|(_, leg)| is_in_the_way(leg))
                    .map(|(name, leg)| (leg, format!("attached to {name:?}")))
            }
            _ => {
                let others = self.hosts.iter().filter(|(host, _)| **host != call.host());
                let mut legs = others.flat_map(|(_, other)| other.legs());
                legs.find(|(_, leg)| is_in_the_way(leg))
                    .map(|(name, leg)| (leg, format!("at {name} of another node")))
            }
        };
        if let Some((leg, place)) = other {
            let rule = if leg.state == State::Making { 25 } else { 34 };
            verdict.check(rule, false, &[leg.made, leg.last, call.id], || {
                format!("{} in the mode {} of a volume that is not known to be gone from a second node: it is {place}", call.rpc, mode(&call.request))
            });
        }
    }

    /// Returns the attachment to the node that the plugin runs on there.
    fn attachment(&self, known: &Capabilities, host: usize) -> Option<&Leg> {
        match known.node_id(host) {
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
        let leg = self.attachment(known, call.host());
        let mut others = self.attachments.iter().filter(|(node, _)| !known.is_elsewhere(node, call.host()));
        match (leg, others.next()) {
            (Some(leg), _) => {
                must_be_there(verdict, 20, "attached", leg, call);
                verdict.looked(27);
                let is_known =
                    leg.contexts.is_empty() || leg.host != call.host() || leg.contexts.contains(context);
                verdict.check(31, is_known, &[leg.made, call.id], || {
                    format!("{} with another publish_context than ControllerPublishVolume answered", call.rpc)
                });
            }
            (None, Some((node, other))) => verdict.check(27, false, &[other.made, call.id], || {
                let own = known.node_id(call.host()).unwrap_or_default();
                format!("{} on the node {own:?}, and the volume is attached to {node:?}", call.rpc)
            }),
            (None, None) => verdict
                .check(20, false, &[call.id], || format!("{} of a volume that is not attached", call.rpc)),
        }
    }

    /// CO rule 28.
    fn check_staging_path(&mut self, path: &str, call: &Call, verdict: &mut Verdict) -> bool {
        let other = self.at(call).staging.iter().find(|(name, _)| *name != path);
        let evidence = other.map_or(call.id, |(_, leg)| leg.made);
        verdict.check(28, other.is_none(), &[evidence, call.id], || {
            let staged = other.map_or("", |(name, _)| name);
            format!("{} with the staging path {path:?}, and it is staged at {staged}", call.rpc)
        });
        other.is_none()
    }

    /// CO rule 21.
    fn check_staged(&mut self, call: &Call, known: &Capabilities, last: Option<u64>, verdict: &mut Verdict) {
        let path = call.text("staging_target_path");
        if !known.stages() || !self.check_staging_path(path, call, verdict) {
            return;
        }
        must_be_up(verdict, 21, "staged", self.at(call).staging.get(path), last, call);
    }

    /// CO rule 34.
    fn check_second_target(&mut self, call: &Call, verdict: &mut Verdict) {
        let target = call.text("target_path");
        let mode = mode(&call.request);
        let many = mode.starts_with("MULTI_NODE_") || mode == "SINGLE_NODE_MULTI_WRITER";
        verdict.looked(34);
        for (name, leg) in self.at(call).targets.iter().filter(|(name, _)| *name != target) {
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

    /// CO rules 23 and 33.
    fn check_detach(&self, call: &Call, known: &Capabilities, verdict: &mut Verdict) {
        let node = call.text("node_id");
        let is_there = |host: usize| match known.node_id(host) {
            _ if node.is_empty() => true,
            Some(own) => own == node,
            None => host == call.host(),
        };
        let there = self.hosts.iter().filter(|(host, _)| is_there(**host));
        must_be_gone(verdict, 23, there.flat_map(|(_, there)| there.legs()), call);
        for (_, leg) in self.attachments.iter().filter(|(name, _)| node.is_empty() || *name == node) {
            let (published, given) = (keys(&leg.request), keys(&call.request));
            verdict.check(33, published == given, &[leg.made, call.id], || {
                format!("{} with other secrets ({given:?}) than the publish ({published:?})", call.rpc)
            });
        }
    }

    /// CO rule 33.
    fn check_given_staging_path(&mut self, call: &Call, known: &Capabilities, verdict: &mut Verdict) {
        let path = call.text("staging_target_path");
        for (name, leg) in self.at(call).staging.iter().filter(|(_, leg)| leg.state == State::Present) {
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

/// CO rules 25 and 34: the same thing is not made with another capability before it was taken away.
fn check_again(legs: &Legs, name: &str, call: &Call, verdict: &mut Verdict) {
    let Some(leg) = legs.get(name).filter(|leg| leg.host == call.host()) else { return };
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

fn mode(request: &Value) -> &str {
    capability(request)["access_mode"]["mode"].as_str().unwrap_or_default()
}

fn keys(request: &Value) -> Vec<&str> {
    let secrets = request["secrets"]["values"].as_object();
    secrets.into_iter().flatten().map(|(key, _)| key.as_str()).collect()
}
