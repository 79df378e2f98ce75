//! Explain: why a volume is not where it is wanted, from what is recorded and what is under way. It asks no plugin.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::error::Result;
use crate::store::MountFilter;
use crate::store::registry::{Claim, ClaimState, Record, Standing, VolumeName};
use crate::store::rows::{Leg, MountRow, Phase};
use crate::volume::creating::{is_unborn, task_of};
use crate::volume::declared::{Waits, is_of_file};
use crate::volume::operations::now_usec;
use crate::volume::requests::Explanation;
use crate::volume::task::Message;
use crate::volume::{OperationView, Volumes, claim_words as words, say};

/// A task answers between two steps of what it does.
const PATIENCE: Duration = Duration::from_secs(1);

impl Volumes {
    pub async fn explain(&self, name: VolumeName) -> Result<Explanation> {
        let shared = &self.shared;
        let record = shared.registry.record(name.clone()).await?;
        let filter = MountFilter {
            namespace: Some(name.namespace.clone()),
            volume: Some(name.volume.clone()),
            ..MountFilter::default()
        };
        let mounts: Vec<MountRow> =
            shared.store.mounts(filter).await?.into_iter().map(|(row, _)| row).collect();
        let subject = name.to_string();
        let under_way: Vec<OperationView> =
            shared.operations.list().into_iter().filter(|of| of.subject == subject).collect();
        let file = shared.declarations.file(&name);
        if record.is_empty() && mounts.is_empty() && under_way.is_empty() && file.is_none() {
            return Err(say::not_registered(&name.key("")));
        }
        let waiting = shared.declarations.waiting(&name);
        let volume = match (mounts.first(), &waiting) {
            (Some(row), _) => row.volume.clone(),
            (None, Some((declared, _))) if record.registration.is_none() => declared.volume.clone(),
            (None, _) => task_of(&record),
        };
        let (answer, answered) = oneshot::channel();
        shared.directory.tell(&volume, Message::NextTry(answer));
        let next = tokio::time::timeout(PATIENCE, answered).await;
        let next = next.ok().and_then(std::result::Result::ok).flatten().map(usec_of);
        let sweep = shared.next_sweep().filter(|_| record.is_restless()).map(usec_of);
        let mut told = explain(&record, &mounts, &under_way);
        told.next_try_usec = next.or(sweep).unwrap_or(0);
        if let Some((_, waits)) = waiting {
            tell_waiting(&mut told, waits);
        }
        told.steps.extend(match file {
            Some(file) => Some(format!("declared by {}", file.display())),
            None if is_of_file(&record) => Some(
                "its file of volumes.d is gone or wrong: a reload without forgets it when nobody uses it"
                    .into(),
            ),
            None => None,
        });
        if let Err(error) = shared.plugins.refuse_other_node_id(&volume.plugin) {
            told.steps.push(error.message);
        }
        if told.waiting_for == WAITING_FOR_PLUGIN {
            told.waiting_for = shared.plugins.awaited(&volume.plugin);
        }
        Ok(told)
    }
}

const WAITING_FOR_PLUGIN: &str = "waiting for plugin";

fn usec_of(at: Instant) -> u64 {
    let left = at.saturating_duration_since(Instant::now()).as_micros();
    now_usec().saturating_add(u64::try_from(left).unwrap_or(u64::MAX))
}

/// Of a volume that is not registered as a file declares it.
fn tell_waiting(told: &mut Explanation, waits: Waits) {
    let next = waits.next_try.map_or(0, usec_of);
    if told.waiting_for.is_empty() {
        let of_plugin = waits.error.is_empty();
        told.waiting_for =
            if of_plugin { WAITING_FOR_PLUGIN } else { "to be registered as declared" }.to_owned();
        told.next_try_usec = next;
    }
    if told.last_error.is_empty() {
        told.last_error = waits.error;
    }
}

/// All but the next try.
fn explain(record: &Record, mounts: &[MountRow], under_way: &[OperationView]) -> Explanation {
    let mut told = Explanation::default();
    let mut errors = Vec::new();
    let mut waits = Vec::new();
    if let Some(registration) = &record.registration {
        let step = match &registration.standing {
            Standing::Registered => "registered".to_owned(),
            Standing::Creating(_) if is_unborn(record) => {
                waits.push(format!("the plugin's answer to CreateVolume of {}", registration.spec.name));
                "creating: the plugin is asked for it".to_owned()
            }
            Standing::Creating(_) => {
                waits.push("the caller of CreateVolume, to ask for its answer again".to_owned());
                "created: its caller has not had the answer".to_owned()
            }
            Standing::Deleting { .. } => {
                waits.push("the plugin's answer to DeleteVolume".to_owned());
                "deleting: the plugin is asked to".to_owned()
            }
        };
        told.steps.push(step);
        errors.push(registration.error.clone());
        if let Some(expansion) = registration.pending_expansion {
            let who = if expansion.by_controller { "its next mount, or the node" } else { "the controller" };
            told.steps.push(format!("expansion to {} bytes: due by {who}", expansion.required));
        }
    }
    for claim in &record.claims {
        let state = words::state(Some(claim));
        told.holders.push(claim.consumer.clone());
        told.steps.push(format!("claim of {} on {}: {state}", claim.consumer, claim.node));
        errors.extend([&claim.parked, &claim.error].map(String::clone));
        waits.extend(claim_waits(claim));
    }
    for at in &record.attachments {
        let node = if at.node_id.is_empty() { &at.node } else { &at.node_id };
        if at.by_call.is_some() {
            told.holders.push(format!("node {node}"));
        }
        let leg = match at.leg {
            Leg::Present => "attached",
            Leg::Making => "being attached",
            Leg::Removing => "being detached, or not known",
            Leg::Absent => "detached",
        };
        told.steps.push(format!("node {node}: {leg}"));
        if at.by_call.is_some() && at.leg == Leg::Removing {
            waits.push(format!("the plugin's answer to ControllerUnpublishVolume from {node}"));
        }
    }
    for mount in mounts {
        let (consumer, phase) = (&mount.key.consumer, phase(mount.phase));
        told.holders.push(consumer.clone());
        told.steps.push(format!("mount of {consumer}: {phase}"));
        errors.push(mount.error.clone());
        if mount.phase != Phase::Mounted {
            waits.push(format!("the mount of {consumer}, which is {phase}"));
        }
    }
    for operation in under_way {
        errors.insert(0, operation.said.clone());
        told.steps.push(format!("{} by uid {}: {}", operation.kind, operation.uid, operation.step));
        waits.extend(operation.step.starts_with("waiting").then(|| operation.step.to_owned()));
    }
    told.holders.sort();
    told.holders.dedup();
    told.last_error = errors.into_iter().find(|error| !error.is_empty()).unwrap_or_default();
    // What is under way now says the most.
    told.waiting_for = waits.pop().unwrap_or_default();
    told
}

fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Mounting => "mounting",
        Phase::Mounted => "mounted",
        Phase::Unmounting => "unmounting",
        Phase::Uncertain => "uncertain",
        Phase::Lost => "lost",
        Phase::Waiting => "waiting",
    }
}

fn claim_waits(claim: &Claim) -> Option<String> {
    let consumer = &claim.consumer;
    match (claim.parked.is_empty(), claim.state) {
        (false, _) => Some(format!("a repeated Release of {consumer}: {}", claim.parked)),
        (true, ClaimState::Taken) if !claim.releasing => None,
        (true, ClaimState::Pending) if !claim.releasing => Some(format!("the claim of {consumer}")),
        (true, _) => Some(format!("the release of {consumer}, which is {}", words::state(Some(claim)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::{Capability, ClaimMode, Creation, Origin, Registration, Use, VolumeSpec};
    use crate::store::rows::{AccessMode, AttachmentMode, VolumeKey};
    use crate::volume::registered::new_claim;
    use crate::volume::registering::new_registration;

    fn record(standing: Standing) -> Record {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        let spec = VolumeSpec { name: "disk".into(), ..VolumeSpec::default() };
        let registration = Registration { standing, ..new_registration(7, spec, Origin::Bus) };
        let volume = VolumeKey { plugin: "p".into(), external_id: "x".into() };
        Record { volume, registration: Some(registration), ..Record::none(name) }
    }

    fn operation(kind: &'static str, step: &'static str) -> OperationView {
        let (id, subject) = ("o".to_owned(), "ns/v".to_owned());
        OperationView {
            id,
            kind,
            subject,
            step,
            said: String::new(),
            since_usec: 1,
            deadline_usec: None,
            uid: 7,
        }
    }

    #[test]
    fn what_is_as_it_is_wanted_waits_for_nothing() {
        let told = explain(&record(Standing::Registered), &[], &[]);
        assert_eq!((told.waiting_for.as_str(), told.last_error.as_str()), ("", ""));
        assert_eq!(told.steps, ["registered"]);
        assert!(told.holders.is_empty());
    }

    #[test]
    fn a_creation_names_its_last_error_and_what_it_waits_for_now() {
        let creation = Creation {
            capacity_min: 0,
            capacity_max: 0,
            register: true,
            secrets_given: false,
            source: String::new(),
            sourceless: false,
        };
        let mut creating = record(Standing::Creating(creation));
        creating.volume.external_id.clear();
        creating.registration.as_mut().unwrap().error = "CreateVolume: INTERNAL: no".into();
        let told = explain(&creating, &[], &[]);
        assert_eq!(told.waiting_for, "the plugin's answer to CreateVolume of disk");
        assert_eq!(told.last_error, "CreateVolume: INTERNAL: no");
        let said = "CreateVolume: RESOURCE_EXHAUSTED: full".to_owned();
        let again = OperationView { said: said.clone(), ..operation("create", "create") };
        assert_eq!(explain(&creating, &[], &[again]).last_error, said, "the newest");
        let told = explain(&creating, &[], &[operation("create", WAITING_FOR_PLUGIN)]);
        assert_eq!(told.waiting_for, WAITING_FOR_PLUGIN);
        assert_eq!(told.steps.last().unwrap(), "create by uid 7: waiting for plugin");
    }

    #[test]
    fn a_parked_release_says_what_is_to_be_done() {
        let capability = Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        };
        let mut used = record(Standing::Registered);
        let mut claim = new_claim("job", "n1", 7, Use { mode: ClaimMode::Write, capability });
        claim.state = ClaimState::NodeDetached;
        claim.releasing = true;
        claim.parked = "it needs its secrets".into();
        used.claims.push(claim);
        let told = explain(&used, &[], &[]);
        assert_eq!(told.waiting_for, "a repeated Release of job: it needs its secrets");
        assert_eq!(
            (told.holders, told.last_error),
            (vec!["job".to_owned()], "it needs its secrets".to_owned())
        );
    }
}
