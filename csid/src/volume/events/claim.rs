//! Events about claims.

use serde_json::Value;

use crate::error::Error;
use crate::store::event_kind::EventKind;
use crate::store::registry::{Claim, ClaimState, Record, VolumeName};
use crate::store::rows::{EventDetails, NewEvent};
use crate::volume::model::claim::ClaimEvent;

/// Returns the contract's word for a claim's state. `None`: there is no claim.
pub(in crate::volume) fn state(claim: Option<&Claim>) -> &'static str {
    match claim {
        None => "free",
        Some(claim) if claim.blocked.is_some() => "parked",
        Some(claim) => match claim.state {
            ClaimState::Pending => "pending",
            ClaimState::Taken => "taken",
            ClaimState::NodeDetached => "node-detached",
            ClaimState::ControllerDetached => "controller-detached",
        },
    }
}

/// Returns the event of a claim that the servers have ended.
pub(in crate::volume) fn gone(name: &VolumeName, plugin: &str, claim: &Claim) -> NewEvent {
    let mut details = EventDetails::new();
    details.insert("success", Value::from(false));
    details.insert("error", Value::from("the servers of the cluster have ended the claim"));
    details.insert("consumer", Value::from(claim.consumer.clone()));
    details.insert("uid", Value::from(claim.uid));
    details.insert("plugin", Value::from(plugin));
    details.insert("node", Value::from(claim.node.clone()));
    NewEvent { kind: EventKind::ClaimGone, subject: name.to_string(), details }
}

/// Returns an event for each claim whose state has changed.
pub(in crate::volume) fn changed(before: &Record, after: &Record, event: &ClaimEvent) -> Vec<NewEvent> {
    let forced = match event {
        ClaimEvent::Forget { consumer } => Some(consumer),
        _ => None,
    };
    let changed = before.claims.differences(&after.claims).into_iter().filter_map(|(had, has)| {
        let claim = has.or(had)?;
        let consumer = &claim.consumer;
        let (from, to) = (state(had), state(has));
        if from == to {
            return None;
        }
        let mut details = EventDetails::new();
        details.insert("success", Value::from(to != "parked"));
        if let Some(blocked) = has.and_then(|claim| claim.blocked.as_ref()) {
            details.insert("error", Value::from(blocked.reason.clone()));
        }
        details.insert("consumer", Value::from(consumer.clone()));
        details.insert("uid", Value::from(claim.uid));
        details.insert("plugin", Value::from(after.volume.plugin.clone()));
        details.insert("node", Value::from(claim.node.clone()));
        if let Some(bound) = claim.bound.as_ref().filter(|bound| bound.ended) {
            details.insert("bound", Value::from(bound.to.to_string()));
        }
        details.insert("from", Value::from(from));
        details.insert("to", Value::from(to));
        let kind = if forced.is_some_and(|forced| forced == consumer) {
            EventKind::ClaimForced
        } else {
            EventKind::ClaimChanged
        };
        Some(NewEvent { kind, subject: after.name.to_string(), details })
    });
    changed.collect()
}

/// Logs a failure. An empty `consumer`: it concerns no claim.
pub(in crate::volume) fn log(name: &VolumeName, consumer: &str, error: &Error) {
    let VolumeName { namespace, volume } = name;
    let kind = error.kind.name();
    match error.details.plugin.as_deref() {
        Some(plugin) => tracing::warn!(
            namespace,
            volume,
            consumer,
            plugin,
            kind,
            "plugin {plugin}, {namespace}/{volume}: {}",
            error.message
        ),
        None => tracing::warn!(namespace, volume, consumer, kind, "{namespace}/{volume}: {}", error.message),
    }
}
