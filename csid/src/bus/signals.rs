//! Signals: encoded once and sent to every connection that may receive them. A slow connection loses some. It sees the gap in the
//! events' sequence, and GetEvents returns the lost ones.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;
use tracing::error;
use zbus::{Connection, DynamicType, Message, ObjectPath};

use super::call::BUS_BYTES;
use super::contract::{CLUSTER, MANAGER, Map, OBJECT_MANAGER, PATH, PLUGIN, PROPERTIES, plugin_path};
use super::rooms::Rooms;
use super::standard::Properties;
use super::{cluster, manager, plugin};
use crate::cluster::NodeWatch;

/// The limit of signals that wait for one connection.
const QUEUE: usize = 256;

/// The signals of csid, for the private socket and the bus. The task that makes them ends with this.
#[derive(Clone)]
pub struct Signals {
    sender: broadcast::Sender<Message>,
    _emitter: Arc<JoinSet<()>>,
}

impl Signals {
    /// Begins to make signals of events and changes in the rooms.
    pub fn of(rooms: &Rooms) -> Self {
        let sender = broadcast::Sender::new(QUEUE);
        let mut emitter = JoinSet::new();
        emitter.spawn(emit(rooms.clone(), sender.clone()));
        Signals { sender, _emitter: Arc::new(emitter) }
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<Message> {
        self.sender.subscribe()
    }
}

/// Forwards `signals` until the connection ends.
pub(super) async fn forward(connection: Connection, mut signals: broadcast::Receiver<Message>) {
    loop {
        let signal = tokio::select! {
            signal = signals.recv() => signal,
            () = connection.closed() => return,
        };
        match signal {
            Ok(signal) => {
                if connection.send(&signal).await.is_err() {
                    return;
                }
            }
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
    }
}

/// Makes signals of events and changes in the rooms. It does not end by itself.
async fn emit(rooms: Rooms, signals: broadcast::Sender<Message>) {
    let mut events = rooms.store.subscribe();
    let mut changes = rooms.plugins.subscribe();
    let mut state = rooms.state.clone();
    state.mark_unchanged();
    let mut watch = rooms.node.as_ref().map(|node| node.watch());
    let mut node = cluster::view(&rooms);
    let mut known = plugins(&rooms);
    let send = |message: Option<Message>| {
        // An error means that no connection listens.
        message.map(|message| signals.send(message).ok());
    };
    loop {
        tokio::select! {
            Some(event) = next(&mut events) => send(signal(PATH, MANAGER, "Event", &manager::event(&event))),
            // The difference of the states shows all changes since the last signal, including missed ones.
            _ = next(&mut changes) => {
                let now = plugins(&rooms);
                differences(&known, &now).into_iter().for_each(send);
                known = now;
            }
            () = changed(watch.as_mut()) => {
                let now = cluster::view(&rooms);
                let changes = cluster::changes(&node, &now);
                if !changes.is_empty() {
                    send(properties_changed(PATH, CLUSTER, changes));
                }
                node = now;
            }
            Ok(()) = state.changed() => {
                let now = state.borrow_and_update().as_str();
                send(properties_changed(PATH, MANAGER, Map::from([("State", now.into())])));
            }
        }
    }
}

/// Waits for a change of the node of a cluster. Never returns if there is none.
async fn changed(watch: Option<&mut NodeWatch>) {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}

/// Waits for the next message of a room. `None`: some messages were lost. It never returns after the room has ended.
async fn next<T: Clone>(receiver: &mut broadcast::Receiver<T>) -> Option<T> {
    match receiver.recv().await {
        Ok(message) => Some(message),
        Err(RecvError::Lagged(_)) => None,
        Err(RecvError::Closed) => std::future::pending().await,
    }
}

fn plugins(rooms: &Rooms) -> BTreeMap<ObjectPath<'static>, Map> {
    let views = rooms.plugins.list();
    views.into_iter().map(|view| (plugin_path(&view.id), plugin::properties(view))).collect()
}

fn differences(
    before: &BTreeMap<ObjectPath<'static>, Map>,
    now: &BTreeMap<ObjectPath<'static>, Map>,
) -> Vec<Option<Message>> {
    let mut made = Vec::new();
    for path in before.keys().filter(|path| !now.contains_key(*path)) {
        made.push(signal(PATH, OBJECT_MANAGER, "InterfacesRemoved", &(path, [PLUGIN].as_slice())));
    }
    for (path, properties) in now {
        let Some(old) = before.get(path) else {
            let interfaces = Properties::from([(PLUGIN, clone(properties, |_, _| true))]);
            made.push(signal(PATH, OBJECT_MANAGER, "InterfacesAdded", &(path, interfaces)));
            continue;
        };
        let changed = clone(properties, |name, value| old.get(name) != Some(value));
        if !changed.is_empty() {
            made.push(properties_changed(path.as_str(), PLUGIN, changed));
        }
    }
    made
}

fn clone(map: &Map, wanted: impl Fn(&str, &zbus::Variant<'static>) -> bool) -> Map {
    // Cloning fails only for a file descriptor, and properties have none.
    map.iter()
        .filter(|(name, value)| wanted(name, value))
        .filter_map(|(name, value)| Some((*name, value.try_clone().ok()?)))
        .collect()
}

fn properties_changed(path: &str, interface: &str, changed: Map) -> Option<Message> {
    signal(path, PROPERTIES, "PropertiesChanged", &(interface, changed, Vec::<&str>::new()))
}

fn signal<B: Serialize + DynamicType>(path: &str, interface: &str, name: &str, body: &B) -> Option<Message> {
    let message = Message::signal(path, interface, name).build(body);
    let message = message.inspect_err(|why| error!(%why, name, "a signal cannot be encoded")).ok()?;
    let bytes = message.data().len();
    if bytes > BUS_BYTES {
        error!(bytes, name, "a signal is larger than {BUS_BYTES} bytes and is not sent");
        return None;
    }
    Some(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::PluginView;

    fn known(views: &[&PluginView]) -> BTreeMap<ObjectPath<'static>, Map> {
        views.iter().map(|view| (plugin_path(&view.id), plugin::properties((*view).clone()))).collect()
    }

    #[test]
    fn changes_of_plugins_are_signalled() {
        let a = PluginView { id: "a".into(), state: "starting", ..PluginView::default() };
        let ready = PluginView { state: "ready", healthy: true, ..a.clone() };
        let b = PluginView { id: "b".into(), ..PluginView::default() };
        let signals = |before: &[&PluginView], now: &[&PluginView]| -> Vec<(String, String)> {
            let made = differences(&known(before), &known(now));
            made.into_iter()
                .map(|message| {
                    let message = message.unwrap();
                    let member = message.header().member().unwrap().to_string();
                    (member, message.body().signature().to_string_no_parens())
                })
                .collect()
        };
        let one = |name: &str, signature: &str| vec![(name.to_owned(), signature.to_owned())];
        assert_eq!(signals(&[], &[&a]), one("InterfacesAdded", "oa{sa{sv}}"));
        assert_eq!(signals(&[&a], &[]), one("InterfacesRemoved", "oas"));
        assert_eq!(signals(&[&a], &[&a]), []);
        assert_eq!(signals(&[&a, &b], &[&a]), one("InterfacesRemoved", "oas"));

        let made = differences(&known(&[&a]), &known(&[&ready])).remove(0).unwrap();
        assert_eq!(made.header().path().unwrap().as_str(), "/org/csid1/plugin/a");
        let body = made.body();
        type Changed<'a> = (&'a str, BTreeMap<&'a str, zbus::Variant<'a>>, Vec<&'a str>);
        let (interface, changed, invalidated): Changed<'_> = body.deserialize().unwrap();
        assert_eq!((interface, invalidated.len()), (PLUGIN, 0));
        assert_eq!(changed.keys().copied().collect::<Vec<_>>(), ["Healthy", "State"]);
    }
}
