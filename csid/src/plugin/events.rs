//! The events of plugins. They inform: one that cannot be written is a line in the log, and nothing waits for
//! the disk.

use serde_json::Value;

use super::PluginView;
use crate::store::rows::{EventDetails, NewEvent};
use crate::store::{Change, Durability, Store};

pub(super) fn registered(id: &str, uid: u32) -> NewEvent {
    event("plugin-registered", id, [("success", true.into()), ("uid", uid.into())])
}

pub(super) fn deregistered(id: &str) -> NewEvent {
    event("plugin-deregistered", id, [("success", true.into())])
}

pub(super) async fn restarted(store: &Store, id: &str, why: &str) {
    write(store, event("plugin-restarted", id, [("success", true.into()), ("error", why.into())])).await;
}

pub(super) async fn node_id(store: &Store, id: &str, from: &str, to: &str) {
    let details = [("success", true.into()), ("from", from.into()), ("to", to.into())];
    write(store, event("plugin-node-id", id, details)).await;
}

pub(super) async fn health(store: &Store, view: &PluginView, from: &'static str) {
    if view.healthy {
        tracing::info!(plugin = %view.id, from, "plugin {} is ready", view.id);
    } else {
        let why = &view.health_message;
        tracing::warn!(plugin = %view.id, from, to = view.state, "plugin {} is not healthy: {why}", view.id);
    }
    let mut details =
        vec![("success", view.healthy.into()), ("from", from.into()), ("to", view.state.into())];
    if !view.health_message.is_empty() {
        details.push(("error", view.health_message.as_str().into()));
    }
    write(store, event("plugin-health", &view.id, details)).await;
}

pub(super) async fn fingerprint(store: &Store, view: &PluginView) {
    let details = [
        ("success", true.into()),
        ("provider", view.provider.as_str().into()),
        ("provider-version", view.provider_version.as_str().into()),
        ("services", view.services.join(" ").into()),
    ];
    write(store, event("plugin-fingerprint", &view.id, details)).await;
}

fn event(kind: &'static str, id: &str, details: impl IntoIterator<Item = (&'static str, Value)>) -> NewEvent {
    let mut details: EventDetails = details.into_iter().collect();
    details.insert("plugin", id.into());
    NewEvent { kind, subject: id.to_owned(), details }
}

async fn write(store: &Store, event: NewEvent) {
    // Nobody writes to a damaged journal, and that was said once.
    if store.writable().is_err() {
        return;
    }
    let kind = event.kind;
    if let Err(error) = store.commit(vec![Change::Event(event)], Durability::Process).await {
        tracing::warn!(kind, %error, "an event was not written");
    }
}
