//! Events about registered volumes.

use serde_json::Value;

use crate::error::{Error, Kind};
use crate::store::event_kind::EventKind;
use crate::store::registry::Record;
use crate::store::rows::{EventDetails, NewEvent};

/// Makes an event about a registration.
pub(in crate::volume) fn registered(kind: EventKind, record: &Record) -> NewEvent {
    let mut details = EventDetails::from([
        ("success", Value::from(true)),
        ("plugin", Value::from(record.volume.plugin.clone())),
    ]);
    if let Some(registration) = &record.registration {
        details.insert("uid", Value::from(registration.uid));
    }
    NewEvent { kind, subject: record.name.to_string(), details }
}

/// Makes an event about an attachment by AttachVolume.
pub(in crate::volume) fn attached(kind: EventKind, record: &Record, node_id: &str) -> NewEvent {
    let mut event = registered(kind, record);
    event.details.insert("node", Value::from(node_id));
    event
}

/// Makes the event for a creation or deletion that continues only when a caller repeats it.
pub(in crate::volume) fn parked(record: &Record, why: &Error) -> NewEvent {
    let kind =
        if why.kind == Kind::SecretRequired { EventKind::SecretRequired } else { EventKind::VolumeParked };
    let mut event = registered(kind, record);
    event.details.insert("success", Value::from(false));
    event.details.insert("error", Value::from(why.to_string()));
    event
}
