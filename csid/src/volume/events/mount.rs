//! Events about mounts.

use std::time::Duration;

use serde_json::Value;

use crate::error::{Error, Step};
use crate::store::event_kind::EventKind;
use crate::store::registry::VolumeName;
use crate::store::rows::{Event, EventDetails, MountKey, MountRow, NewEvent};
use crate::volume::errors::mount::MountError;
use crate::volume::model::volume::Volume;

/// Makes the event of a probe. `mount-healed` is a success; every other kind is a failure with the reason `why`.
pub(in crate::volume) fn watched(kind: EventKind, row: &MountRow, why: &str) -> NewEvent {
    let mut details = EventDetails::new();
    details.insert("success", Value::from(kind == EventKind::MountHealed));
    if kind != EventKind::MountHealed {
        details.insert("error", Value::from(why));
    }
    details.insert("consumer", Value::from(row.key.consumer.clone()));
    details.insert("tag", Value::from(row.key.tag.clone()));
    details.insert("plugin", Value::from(row.volume.plugin.clone()));
    details.insert("uid", Value::from(row.uid));
    NewEvent { kind, subject: VolumeName::of(&row.key).to_string(), details }
}

pub(in crate::volume) fn secret_required(row: &MountRow) -> NewEvent {
    let error = MountError::SecretsNeeded { key: row.key.clone() };
    let mut event = watched(EventKind::SecretRequired, row, &error.to_string());
    event.details.insert("success", Value::from(false));
    event
}

/// Makes the event of an operation that has ended. `None`: it has no row.
pub(in crate::volume) fn ended(
    kind: EventKind,
    row: Option<&MountRow>,
    error: Option<&Error>,
) -> Option<NewEvent> {
    let row = row?;
    let mut details = EventDetails::new();
    details.insert("success", Value::from(error.is_none()));
    if let Some(error) = error {
        details.insert("error", Value::from(error.to_string()));
    }
    details.insert("consumer", Value::from(row.key.consumer.clone()));
    if !row.key.tag.is_empty() {
        details.insert("tag", Value::from(row.key.tag.clone()));
    }
    details.insert("uid", Value::from(row.uid));
    details.insert("plugin", Value::from(row.volume.plugin.clone()));
    Some(NewEvent { kind, subject: VolumeName::of(&row.key).to_string(), details })
}

const TIMINGS: &str = "timings";

/// Notes how long the steps of a mount took until its commit, as a list of pairs of a step and its microseconds.
pub(in crate::volume) fn note_timings(event: &mut NewEvent, timings: &[(&'static str, Duration)]) {
    let usec = |took: &Duration| u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    let list = timings.iter().filter(|(step, _)| *step != Step::Commit.name());
    let list = list.map(|(step, took)| Value::from(vec![Value::from(*step), Value::from(usec(took))]));
    event.details.insert(TIMINGS, list.collect());
}

/// Returns what [`note_timings`] noted. Empty: the event has no timings.
pub(in crate::volume) fn timings(event: &Event) -> Vec<(String, u64)> {
    let list = event.details.get(TIMINGS).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    list.iter().filter_map(|one| Some((one[0].as_str()?.to_owned(), one[1].as_u64()?))).collect()
}

/// Logs a failure. A success is an event.
pub(in crate::volume) fn log(key: &MountKey, volume: &Volume, error: &Error) {
    let MountKey { namespace, volume: name, consumer, tag } = key;
    let plugin = &volume.row.key.plugin;
    tracing::warn!(
        namespace,
        volume = name,
        consumer,
        tag,
        plugin,
        kind = error.kind.name(),
        "plugin {plugin}, {namespace}/{name} for {consumer}: {}",
        error.message
    );
}
