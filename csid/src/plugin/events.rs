//! The events of plugins. They inform: one that cannot be written is a line in the log, and nothing waits for
//! the disk.

use serde_json::Value;

use crate::error::Error;
use crate::plugin::view::PluginView;
use crate::store::event_kind::EventKind;
use crate::store::rows::{EventDetails, NewEvent};
use crate::store::{Change, Durability, Store};

/// The most characters of a program's path in an event.
const PROGRAM: usize = 256;

/// `first`: the plugin came with this instance.
pub(super) fn came(id: &str, instance: &str, uid: u32, first: bool) -> NewEvent {
    let details = [("success", true.into()), ("uid", uid.into()), ("to", instance.into())];
    event(if first { EventKind::PluginRegistered } else { EventKind::PluginInstance }, id, instance, details)
}

/// `last`: the plugin left with this instance.
pub(super) fn left(id: &str, instance: &str, last: bool) -> NewEvent {
    let details = [("success", true.into()), ("from", instance.into())];
    event(if last { EventKind::PluginDeregistered } else { EventKind::PluginInstance }, id, instance, details)
}

/// An instance has, or has not (`error`), taken another's place.
pub(super) fn upgraded(id: &str, from: &str, to: &str, error: Option<&str>) -> NewEvent {
    let mut details = vec![("success", error.is_none().into()), ("from", from.into()), ("to", to.into())];
    details.extend(error.map(|error| ("error", error.into())));
    event(EventKind::PluginUpgraded, id, to, details)
}

pub(super) async fn restarted(store: &Store, view: &PluginView, why: &str) {
    write(store, of(EventKind::PluginRestarted, view, [("success", true.into()), ("error", why.into())]))
        .await;
}

pub(super) async fn node_id(store: &Store, view: &PluginView, from: &str) {
    let to = view.node_id.as_str();
    let details = [("success", true.into()), ("from", from.into()), ("to", to.into())];
    write(store, of(EventKind::PluginNodeId, view, details)).await;
}

pub(super) fn node_id_accepted(id: &str, from: &str, to: &str, uid: u32) -> NewEvent {
    let details = [("success", true.into()), ("from", from.into()), ("to", to.into()), ("uid", uid.into())];
    NewEvent {
        kind: EventKind::PluginNodeId,
        subject: id.to_owned(),
        details: details.into_iter().chain([("plugin", id.into()), ("accepted", true.into())]).collect(),
    }
}

pub(super) async fn health(store: &Store, view: &PluginView, from: &'static str) {
    let (id, instance) = (&view.id, instance(view));
    if view.healthy {
        tracing::info!(plugin = %id, instance, from, "plugin {id} is ready");
    } else {
        let why = &view.health_message;
        tracing::warn!(plugin = %id, instance, from, to = view.state, "plugin {id} is not healthy: {why}");
    }
    let mut details =
        vec![("success", view.healthy.into()), ("from", from.into()), ("to", view.state.into())];
    if !view.health_message.is_empty() {
        details.push(("error", view.health_message.as_str().into()));
    }
    write(store, of(EventKind::PluginHealth, view, details)).await;
}

pub(super) async fn fingerprint(store: &Store, view: &PluginView) {
    let details = [
        ("success", true.into()),
        ("provider", view.provider.as_str().into()),
        ("provider-version", view.provider_version.as_str().into()),
        ("services", view.services.join(" ").into()),
    ];
    write(store, of(EventKind::PluginFingerprint, view, details)).await;
}

/// Returns the event of a command in the plugin. It has only the program, for arguments may hold secrets.
pub(super) fn exec(id: &str, uid: u32, operation: &str, program: &str, error: Option<&Error>) -> NewEvent {
    let program: String = program.chars().take(PROGRAM).collect();
    let mut details = EventDetails::from([
        ("success", error.is_none().into()),
        ("uid", uid.into()),
        ("plugin", id.into()),
        ("operation", operation.into()),
        ("program", program.into()),
    ]);
    details.extend(error.map(|error| ("error", error.to_string().into())));
    NewEvent { kind: EventKind::PluginExec, subject: id.to_owned(), details }
}

/// A task's view is of its own instance alone.
fn instance(view: &PluginView) -> &str {
    view.instances.first().map_or("", String::as_str)
}

fn of(
    kind: EventKind,
    view: &PluginView,
    details: impl IntoIterator<Item = (&'static str, Value)>,
) -> NewEvent {
    event(kind, &view.id, instance(view), details)
}

fn event(
    kind: EventKind,
    id: &str,
    instance: &str,
    details: impl IntoIterator<Item = (&'static str, Value)>,
) -> NewEvent {
    let mut details: EventDetails = details.into_iter().collect();
    details.extend([("plugin", id.into()), ("instance", instance.into())]);
    NewEvent { kind, subject: id.to_owned(), details }
}

pub(super) async fn write(store: &Store, event: NewEvent) {
    // A damaged journal is not written to. That was logged once.
    if store.writable().is_err() {
        return;
    }
    let kind = event.kind.name();
    if let Err(error) = store.commit(vec![Change::Event(event)], Durability::Process).await {
        tracing::warn!(kind, %error, "an event was not written");
    }
}
