//! Explain: returns why a volume is not in its desired state, from the records, the operations under way and the mounts of the
//! kernel. It calls no plugin.

use std::time::{Duration, Instant};

use csi_proto::time::since;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::error::{Error, Kind, Result, Step};
use crate::store::MountFilter;
use crate::store::event_kind::EventKind;
use crate::store::registry::{Blocked, Claim, ClaimState, Record, Standing, VolumeName};
use crate::store::rows::{Event, Leg, Phase};
use crate::volume::api::views::{Explanation, MountView, OperationView};
use crate::volume::control::declarations::Waits;
use crate::volume::errors::volume::VolumeError;
use crate::volume::events::claim as claim_events;
use crate::volume::events::mount as mount_events;
use crate::volume::lifecycle::{is_of_file, is_unborn};
use crate::volume::manager::Volumes;
use crate::volume::operation::message::Message;
use crate::volume::operation::table::now_usec;
use crate::volume::servers::ServersExplanation;

/// The time limit for the answer of an actor, which answers between two steps of an operation, and for that of a server.
const PATIENCE: Duration = Duration::from_secs(1);

impl Volumes {
    pub async fn explain(&self, name: VolumeName) -> Result<Explanation> {
        let shared = &self.shared;
        let record = shared.records.registry.record(name.clone()).await?;
        let filter = MountFilter {
            namespace: Some(name.namespace.clone()),
            volume: Some(name.volume.clone()),
            ..MountFilter::default()
        };
        let mounts = self.list(filter).await?;
        let subject = name.to_string();
        let under_way: Vec<OperationView> =
            shared.operations.list().into_iter().filter(|of| of.subject == subject).collect();
        let file = shared.records.declarations.file(&name);
        let (failure, timings) = self.history(&subject).await?;
        let at_servers = self.at_servers(&name).await;
        let is_here = !record.is_empty() || !mounts.is_empty() || !under_way.is_empty() || file.is_some();
        if !is_here {
            return match at_servers {
                Some(Ok(of)) => Ok(Explanation { timings, ..only_at_servers(failure, of) }),
                Some(Err(error)) if error.kind == Kind::Unavailable && failure.is_none() => Err(error),
                // An inline volume that is no longer in use has left nothing but its events.
                _ => failure.ok_or_else(|| VolumeError::NotRegistered { name }.into()),
            };
        }
        let waiting = shared.records.declarations.waiting(&name);
        let volume = match (mounts.first(), &waiting) {
            (Some(mount), _) => mount.row.volume.clone(),
            (None, Some((declared, _))) if record.registration.is_none() => declared.volume.clone(),
            (None, _) => record.volume.clone(),
        };
        let (answer, answered) = oneshot::channel();
        shared.directory.tell(&volume, Message::NextTry(answer));
        let next = tokio::time::timeout(PATIENCE, answered).await;
        let next = next.ok().and_then(std::result::Result::ok).flatten().map(usec_of);
        let sweep = shared.next_sweep().filter(|_| record.is_restless()).map(usec_of);
        let (mut explanation, mut cause) = explain(&record, &mounts, &under_way);
        explanation.next_try_usec = next.or(sweep).unwrap_or(0);
        if let Some((_, waits)) = waiting {
            add_waits(&mut explanation, &mut cause, waits);
        }
        if let Some(of) = at_servers {
            add_servers(&mut explanation, &mut cause, of);
        }
        explanation.steps.extend(match file {
            Some(file) => Some(format!("declared by {}", file.display())),
            None if is_of_file(&record) => Some(
                "its file of volumes.d is gone or wrong: a reload without forgets it when nobody uses it"
                    .into(),
            ),
            None => None,
        });
        if let Err(error) = shared.plugins.refuse_other_node_id(&volume.plugin) {
            explanation.steps.push(error.message);
        }
        match shared.plugins.view(&volume.plugin) {
            // The plugin is unknown, so the next request for the volume waits for it.
            None if cause == Cause::Nothing => cause = Cause::Plugin,
            Some(view) if !view.healthy && cause != Cause::Plugin => {
                explanation.steps.push(shared.plugins.awaited(&volume.plugin));
            }
            _ => {}
        }
        explanation.waiting_for = match cause {
            Cause::Nothing => String::new(),
            Cause::Plugin => shared.plugins.awaited(&volume.plugin),
            Cause::Other(text) => text,
        };
        if let Some(failure) = failure {
            explanation.steps.extend(failure.steps);
            if explanation.last_error.is_empty() {
                explanation.last_error = failure.last_error;
            }
        }
        explanation.timings = timings;
        Ok(explanation)
    }

    /// Returns what the cluster's servers know of a volume. `None`: csid is alone.
    async fn at_servers(&self, name: &VolumeName) -> Option<Result<ServersExplanation>> {
        let servers = self.shared.records.servers.as_ref()?;
        let asked = tokio::time::timeout(PATIENCE, servers.explain(name.clone())).await;
        let late = |_| Err(Error::new(Kind::Unavailable, "the cluster's server did not answer within 1 s"));
        Some(asked.unwrap_or_else(late))
    }

    /// Returns what the last [`EVENTS`] tell of a volume: the newest one, if it is a failure or a forgotten mount, and how long the
    /// steps of the last mount took.
    async fn history(&self, subject: &str) -> Result<(Option<Explanation>, Vec<(String, u64)>)> {
        let since = self.shared.store.event_sequence().saturating_sub(EVENTS);
        let (events, _) = self.shared.store.events(since, EVENTS as u32).await?;
        let mut of_volume = events.iter().rev().filter(|event| event.subject == subject).peekable();
        let failure = of_volume.peek().and_then(|event| failed(event));
        let timings = of_volume.map(mount_events::timings).find(|timings| !timings.is_empty());
        Ok((failure, timings.unwrap_or_default()))
    }
}

/// The number of latest events that are searched for a failure, and for the last mount.
const EVENTS: u64 = 1000;

fn failed(event: &Event) -> Option<Explanation> {
    let text = |key: &str| event.details.get(key).and_then(Value::as_str).unwrap_or_default();
    if event.is(EventKind::MountForgotten) {
        return Some(Explanation {
            last_error: text("last-error").to_owned(),
            steps: vec![format!("the mount of {} was forgotten, at {}", text("consumer"), text("source"))],
            ..Explanation::default()
        });
    }
    if event.details.get("success").and_then(Value::as_bool) != Some(false) {
        return None;
    }
    let (kind, consumer) = (&event.kind, text("consumer"));
    let of = if consumer.is_empty() { String::new() } else { format!(" of {consumer}") };
    Some(Explanation {
        waiting_for: format!("a repeated {kind}{of}: the last one failed, and csid does not repeat it"),
        last_error: text("error").to_owned(),
        steps: vec![if event.is(EventKind::MountLost) {
            format!("the mount{of} was lost")
        } else if event.is(EventKind::MountDead) {
            format!("the mount{of} died")
        } else {
            format!("the last {kind}{of} failed")
        }],
        ..Explanation::default()
    })
}

/// The cause of a volume's wait.
#[derive(Debug, PartialEq, Eq)]
enum Cause {
    Nothing,
    Plugin,
    Other(String),
}

fn usec_of(at: Instant) -> u64 {
    let left = at.saturating_duration_since(Instant::now()).as_micros();
    now_usec().saturating_add(u64::try_from(left).unwrap_or(u64::MAX))
}

/// Adds the wait of a volume that is not registered as a file declares it.
fn add_waits(explanation: &mut Explanation, cause: &mut Cause, waits: Waits) {
    let next = waits.next_try.map_or(0, usec_of);
    if *cause == Cause::Nothing {
        *cause = match waits.error.is_empty() {
            true => Cause::Plugin,
            false => Cause::Other("to be registered as declared".to_owned()),
        };
        explanation.next_try_usec = next;
    }
    if explanation.last_error.is_empty() {
        explanation.last_error = waits.error;
    }
}

/// Explains a volume of which this host has nothing but events. No plugin here is concerned.
fn only_at_servers(failure: Option<Explanation>, of: ServersExplanation) -> Explanation {
    let (mut explanation, mut cause) = (failure.unwrap_or_default(), Cause::Nothing);
    add_servers(&mut explanation, &mut cause, Ok(of));
    if let Cause::Other(text) = cause {
        explanation.waiting_for = text;
    }
    explanation
}

/// Adds what the cluster's servers know. What csid itself waits for is the nearer cause.
fn add_servers(explanation: &mut Explanation, cause: &mut Cause, of: Result<ServersExplanation>) {
    match of {
        Ok(of) => {
            explanation.holders.extend(of.holders);
            explanation.holders.sort();
            explanation.holders.dedup();
            explanation.steps.extend(of.steps);
            if *cause == Cause::Nothing && !of.waiting_for.is_empty() {
                *cause = Cause::Other(of.waiting_for);
            }
        }
        // Here it is known without them.
        Err(error) if error.kind == Kind::NotFound => {}
        Err(error) => explanation.steps.push(format!("the servers' part is not known: {}", error.message)),
    }
}

/// Returns the explanation without the time of the next retry, and the cause of the wait.
fn explain(record: &Record, mounts: &[MountView], under_way: &[OperationView]) -> (Explanation, Cause) {
    let mut explanation = Explanation::default();
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
        explanation.steps.push(step);
        errors.extend(registration.error.clone());
        if let Some(expansion) = registration.pending_expansion {
            let who = if expansion.by_controller { "its next mount, or the node" } else { "the controller" };
            explanation.steps.push(format!("expansion to {} bytes: due by {who}", expansion.required));
        }
    }
    for claim in &record.claims {
        let state = claim_events::state(Some(claim));
        explanation.holders.push(claim.consumer.clone());
        let since = since(claim.since_usec);
        explanation.steps.push(format!("claim of {} on {}: {state}{since}", claim.consumer, claim.node));
        errors.extend(claim.blocked.iter().map(|blocked| blocked.reason.clone()));
        errors.extend(claim.error.clone());
        waits.extend(claim_waits(claim));
    }
    for at in &record.attachments {
        let node = at.shown_node();
        if at.by_call.is_some() {
            explanation.holders.push(format!("node {node}"));
        }
        let leg = match at.leg {
            Leg::Present => "attached",
            Leg::Making => "being attached",
            Leg::Removing => "being detached, or not known",
            Leg::Absent => "detached",
        };
        explanation.steps.push(format!("node {node}: {leg}"));
        if at.by_call.is_some() && at.leg == Leg::Removing {
            waits.push(format!("the plugin's answer to ControllerUnpublishVolume from {node}"));
        }
    }
    for MountView { row, healthy, error, .. } in mounts {
        let consumer = &row.key.consumer;
        let phase = match row.phase {
            Phase::Mounted if !healthy => "mounted, but not healthy",
            other => phase(other),
        };
        explanation.holders.push(consumer.clone());
        explanation.steps.push(format!("mount of {consumer}: {phase}"));
        errors.push(error.clone());
        if row.phase != Phase::Mounted || !healthy {
            waits.push(format!("the mount of {consumer}, which is {phase}"));
        }
    }
    for operation in under_way {
        errors.insert(0, operation.said.clone());
        explanation.holders.extend(operation.holders.iter().cloned());
        explanation.steps.push(format!("{} by uid {}: {}", operation.kind, operation.uid, operation.step));
    }
    explanation.holders.sort();
    explanation.holders.dedup();
    explanation.last_error = errors.into_iter().find(|error| !error.is_empty()).unwrap_or_default();
    // The last reason is the most precise: operations under way come last.
    let cause = match under_way.iter().rev().map(|operation| operation.step).find(|step| step.waits()) {
        Some(Step::WaitingForPlugin) => Cause::Plugin,
        Some(step) => Cause::Other(step.to_string()),
        None => waits.pop().map_or(Cause::Nothing, Cause::Other),
    };
    (explanation, cause)
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
    match (&claim.blocked, claim.state) {
        (Some(Blocked { reason }), _) => Some(format!("a repeated Release of {consumer}: {reason}")),
        (None, ClaimState::Taken) if !claim.releasing => None,
        (None, ClaimState::Pending) if !claim.releasing => Some(format!("the claim of {consumer}")),
        (None, _) => {
            Some(format!("the release of {consumer}, which is {}", claim_events::state(Some(claim))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::{Capability, ClaimMode, Creation, Origin, Registration, Use, VolumeSpec};
    use crate::store::rows::{AccessMode, AttachmentMode, VolumeKey};
    use crate::volume::api::operation_kind::OperationKind;
    use crate::volume::lifecycle::{new_claim, new_registration};

    fn record(standing: Standing) -> Record {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        let spec = VolumeSpec { name: "disk".into(), ..VolumeSpec::default() };
        let registration = Registration { standing, ..new_registration(7, spec, Origin::Bus) };
        let volume = VolumeKey::new("p", "x");
        Record { volume, registration: Some(registration), ..Record::none(name) }
    }

    fn operation(kind: OperationKind, step: Step) -> OperationView {
        let (id, subject) = ("o".to_owned(), "ns/v".to_owned());
        OperationView {
            id,
            kind,
            subject,
            step,
            said: String::new(),
            holders: Vec::new(),
            since_usec: 1,
            deadline_usec: None,
            uid: 7,
        }
    }

    #[test]
    fn only_failed_events_are_explained() {
        let event = |success: bool| Event {
            sequence: 1,
            realtime_usec: 1,
            kind: "mount".into(),
            subject: "ns/v".into(),
            details: [
                ("success".to_owned(), Value::from(success)),
                ("consumer".to_owned(), Value::from("job")),
                ("error".to_owned(), Value::from("PluginError: no")),
            ]
            .into(),
        };
        assert!(failed(&event(true)).is_none());
        let explanation = failed(&event(false)).unwrap();
        assert!(
            explanation.waiting_for.starts_with("a repeated mount of job"),
            "{}",
            explanation.waiting_for
        );
        assert_eq!(explanation.last_error, "PluginError: no");
    }

    #[test]
    fn settled_volume_waits_for_nothing() {
        let (explanation, cause) = explain(&record(Standing::Registered), &[], &[]);
        assert_eq!((cause, explanation.last_error.as_str()), (Cause::Nothing, ""));
        assert_eq!(explanation.steps, ["registered"]);
        assert!(explanation.holders.is_empty());
    }

    #[test]
    fn creation_names_its_error_and_present_wait() {
        let creation = Creation {
            capacity_min: 0,
            capacity_max: 0,
            register: true,
            secrets_given: false,
            source: None,
            sourceless: false,
            ..Creation::default()
        };
        let mut creating = record(Standing::Creating(creation));
        creating.volume = VolumeKey::creating("p", "disk");
        creating.registration.as_mut().unwrap().error = Some("CreateVolume: INTERNAL: no".into());
        let (explanation, cause) = explain(&creating, &[], &[]);
        assert_eq!(cause, Cause::Other("the plugin's answer to CreateVolume of disk".into()));
        assert_eq!(explanation.last_error, "CreateVolume: INTERNAL: no");
        let said = "CreateVolume: RESOURCE_EXHAUSTED: full".to_owned();
        let again = OperationView { said: said.clone(), ..operation(OperationKind::Create, Step::Create) };
        assert_eq!(explain(&creating, &[], &[again]).0.last_error, said, "the newest");
        let waiting = operation(OperationKind::Create, Step::WaitingForPlugin);
        let (explanation, cause) = explain(&creating, &[], &[waiting]);
        assert_eq!(cause, Cause::Plugin);
        assert_eq!(explanation.steps.last().unwrap(), "create by uid 7: waiting for plugin");
    }

    #[test]
    fn blocked_release_names_its_remedy() {
        let capability = Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        };
        let mut used = record(Standing::Registered);
        let mut claim = new_claim("job", "n1", 7, Use { mode: ClaimMode::Write, capability });
        claim.state = ClaimState::NodeDetached;
        claim.releasing = true;
        claim.blocked = Some(Blocked { reason: "it needs its secrets".into() });
        used.claims.insert(claim);
        let (explanation, cause) = explain(&used, &[], &[]);
        assert_eq!(cause, Cause::Other("a repeated Release of job: it needs its secrets".into()));
        assert_eq!(
            (explanation.holders, explanation.last_error),
            (vec!["job".to_owned()], "it needs its secrets".to_owned())
        );
    }
}
