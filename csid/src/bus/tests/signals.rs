//! The receivers of signals, and the cost of a receiver that does not read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use zbus::message::Type;
use zbus::{Connection, Message, MessageStream, OwnedVariant};

use super::harness::{
    Bus, MANAGER, MEMBER, NOBODY, ROOT, World, call, connect, connect_as, is_root, manager, properties,
};
use super::on_bus::QUICK;
use crate::bus::State;
use crate::cluster::Node;
use crate::store::event_kind::EventKind;
use crate::store::rows::{EventDetails, NewEvent};
use crate::store::{Change, Durability};

impl World {
    async fn happens(&self, subject: &str) {
        let details =
            EventDetails::from([("success", true.into()), ("error", "x".into()), ("uid", 7.into())]);
        let event = NewEvent { kind: EventKind::Mount, subject: subject.to_owned(), details };
        self.rooms.store.commit(vec![Change::Event(event)], Durability::Process).await.unwrap();
    }
}

/// The next signal, or `None` when none comes.
pub async fn next(stream: &mut MessageStream) -> Option<Message> {
    let signal = async {
        loop {
            let message = stream.next().await?.ok()?;
            if message.message_type() == Type::Signal
                && message
                    .header()
                    .interface()
                    .is_some_and(|interface| interface.as_str() != "org.freedesktop.DBus")
            {
                return Some(message);
            }
        }
    };
    tokio::time::timeout(Duration::from_millis(500), signal).await.ok().flatten()
}

/// A stream of a connection that is known to be served.
pub async fn listen(connection: &Connection) -> MessageStream {
    let stream = MessageStream::from(connection);
    call(connection, "/org/csid1", "org.freedesktop.DBus.Peer", "Ping", &()).await.unwrap();
    stream
}

type Event = (u64, u64, String, String, BTreeMap<String, OwnedVariant>);

#[tokio::test(flavor = "multi_thread")]
async fn readers_on_the_socket_get_signals() {
    if !is_root() {
        return;
    }
    let world = World::new();
    let (path, _serving) = world.listen();
    let clients =
        [connect_as(&path, ROOT).await, connect_as(&path, MEMBER).await, connect_as(&path, NOBODY).await];
    let [mut root, mut member, mut nobody] =
        [listen(&clients[0]).await, listen(&clients[1]).await, listen(&clients[2]).await];
    world.happens("ns/vol").await;
    for stream in [&mut root, &mut member] {
        let signal = next(stream).await.expect("an Event");
        assert_eq!(signal.header().member().unwrap().as_str(), "Event");
        assert_eq!(signal.body().signature().to_string_no_parens(), "ttssa{sv}");
        let (sequence, _, kind, subject, details): Event = signal.body().deserialize().unwrap();
        assert_eq!((kind.as_str(), subject.as_str()), ("mount", "ns/vol"));
        assert_eq!(sequence, world.rooms.store.event_sequence());
        let types: Vec<_> = details.values().map(|value| value.value_signature().to_string()).collect();
        assert_eq!(types, ["s", "b", "t"], "error, success, uid");
    }
    world.state.send(State::Degraded).unwrap();
    let signal = next(&mut root).await.expect("PropertiesChanged");
    let (interface, changed, _): (String, BTreeMap<String, OwnedVariant>, Vec<String>) =
        signal.body().deserialize().unwrap();
    assert_eq!(interface, MANAGER);
    assert_eq!(<&str>::try_from(&changed["State"]).unwrap(), "degraded");
    // nobody is answered after both signals, and no signal comes before the answers.
    for _ in 0..10 {
        let ping = Message::method_call("/org/csid1", "Ping").interface("org.freedesktop.DBus.Peer");
        let ping = ping.build(&()).unwrap();
        clients[2].send(&ping).await.unwrap();
        let mut answered = false;
        while !answered {
            let message = nobody.next().await.unwrap().unwrap();
            assert_ne!(message.message_type(), Type::Signal, "{message:?}");
            answered = message.header().reply_serial() == Some(ping.primary_header().serial_num());
        }
    }

    let reply = manager(&clients[0], "GetEvents", &(0u64, 10u32)).await.unwrap();
    let (events, gap): (Vec<Event>, bool) = reply.body().deserialize().unwrap();
    assert_eq!((events.len(), gap), (1, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn change_of_the_clusters_state_is_signalled() {
    let mut world = World::new();
    let link = world.path("no-link");
    let config = crate::config::Cluster {
        name: "prod".into(),
        inline: false,
        on_fenced: Default::default(),
        link: link.clone(),
        controllers: Default::default(),
        controller_credentials: Default::default(),
        controller_volumes: Default::default(),
    };
    let node = Arc::new(Node::new(&config, "n1", "journal", "boot", None));
    world.rooms.node = Some(node.clone());
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    let mut stream = listen(&client).await;
    let _running = tokio::spawn(node.run(world.rooms.volumes.clone(), world.rooms.plugins.clone()));
    let signal = next(&mut stream).await.expect("PropertiesChanged");
    let (interface, changed, _): (String, BTreeMap<String, OwnedVariant>, Vec<String>) =
        signal.body().deserialize().unwrap();
    let text = |name: &str| <&str>::try_from(&changed[name]).unwrap();
    assert_eq!((interface.as_str(), text("State")), ("org.csid1.Cluster", "cut-off"));
    assert!(text("Reason").contains(link.to_str().unwrap()) && !changed.contains_key("Name"), "{changed:?}");
    // csid tries again and again, and nothing changes.
    assert!(next(&mut stream).await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn receivers_on_the_bus_get_signals_by_policy() {
    let Some(bus) = Bus::start(false) else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let client = bus.connect_as(ROOT).await;
    let rule = zbus::MatchRule::builder().msg_type(Type::Signal).interface(MANAGER).build().unwrap();
    let mut stream = MessageStream::for_match_rule(rule, &client, None).await.unwrap();
    world.happens("ns/vol").await;
    let signal = next(&mut stream).await.expect("an Event");
    assert_eq!(signal.header().sender().map(ToString::to_string), {
        let proxy = zbus::fdo::DBusProxy::new(&client).await.unwrap();
        Some(proxy.get_name_owner("org.csid1".try_into().unwrap()).await.unwrap().to_string())
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_receiver_delays_no_other() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let deaf = tokio::task::spawn_blocking({
        let path = path.clone();
        move || super::harness::raw(&path)
    });
    let _deaf = deaf.await.unwrap();
    let client = connect(&path).await;
    let mut stream = listen(&client).await;
    let mut heard = 0;
    for number in 0..3000 {
        world.happens(&format!("{}/{number}", "x".repeat(200))).await;
        // Read at once: the test is not about this receiver's queue.
        heard += usize::from(next(&mut stream).await.is_some());
    }
    // A signal that was late on a busy machine has arrived by now.
    while heard < 3000 && next(&mut stream).await.is_some() {
        heard += 1;
    }
    assert_eq!(heard, 3000);
    properties(&client).await;
}
