//! Events about mounts.

use serde_json::Value;

use crate::store::rows::{EventDetails, MountRow, NewEvent};
use crate::volume::errors::mount as mount_errors;

/// The kind of the event for a mount that was forgotten.
pub(in crate::volume) const FORGOTTEN: &str = "mount-forgotten";

/// Makes the event of a probe. `mount-healed` is a success; every other kind is a failure with the reason `why`.
pub(in crate::volume) fn watched(kind: &'static str, row: &MountRow, why: &str) -> NewEvent {
    let mut details = EventDetails::new();
    details.insert("success", Value::from(kind == "mount-healed"));
    if kind != "mount-healed" {
        details.insert("error", Value::from(why));
    }
    details.insert("consumer", Value::from(row.key.consumer.clone()));
    details.insert("tag", Value::from(row.key.tag.clone()));
    details.insert("plugin", Value::from(row.volume.plugin.clone()));
    details.insert("uid", Value::from(row.uid));
    NewEvent { kind, subject: mount_errors::name(&row.key), details }
}

pub(in crate::volume) fn secret_required(row: &MountRow) -> NewEvent {
    let error = mount_errors::secret_required(&row.key);
    let mut event = watched("secret-required", row, &error.message);
    event.details.insert("success", Value::from(false));
    event
}
