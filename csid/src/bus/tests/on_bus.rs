//! The system bus: polkit as it should and should not answer, and a bus that comes and goes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use zbus::message::{Flags, Type};
use zbus::{Connection, Message, MessageStream, OwnedVariant, Variant};

use super::harness::{Bus, MANAGER, MEMBER, NOBODY, Options, ROOT, World, call, is_root, manager};
use crate::bus::polkit::Timeouts;
use crate::bus::{Signals, State, serve};

pub const QUICK: Timeouts =
    Timeouts { unattended: Duration::from_millis(500), interactive: Duration::from_secs(2) };

/// The answer of the scripted polkit.
#[derive(Clone, Copy, Debug)]
pub enum Script {
    Yes,
    No,
    /// Yes to all actions but this one.
    AllBut(&'static str),
    /// Yes where the details name this namespace, as a rule of an administrator's does.
    In(&'static str),
    Challenge,
    Silent,
    Error,
    /// A reply that is no `(bba{ss})`: a plain true.
    Malformed,
    /// The same with one boolean more.
    Longer,
    /// It leaves the bus during the call.
    Dies,
}

/// Subject kind, subject details, action, flags.
type Question = (String, HashMap<String, OwnedVariant>, String, u32);

/// What the call was about.
type CallFacts = HashMap<String, String>;

pub struct Authority {
    pub asked: Arc<AtomicUsize>,
    last: Arc<Mutex<Option<Question>>>,
    facts: Arc<Mutex<Vec<(String, CallFacts)>>>,
    connection: Connection,
}

impl Authority {
    pub async fn leave(self) {
        self.connection.close().await.ok();
        // The name is free before the next one asks for it.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub async fn polkit(bus: &Bus, script: Script) -> Authority {
    let connection = bus.connect_as(ROOT).await;
    let mut stream = MessageStream::from(&connection);
    connection.request_name("org.freedesktop.PolicyKit1").await.unwrap();
    let authority = Authority {
        asked: Arc::default(),
        last: Arc::default(),
        facts: Arc::default(),
        connection: connection.clone(),
    };
    let (asked, last, facts_of) = (authority.asked.clone(), authority.last.clone(), authority.facts.clone());
    tokio::spawn(async move {
        while let Some(Ok(message)) = stream.next().await {
            if message.message_type() != Type::MethodCall {
                continue;
            }
            let header = message.header();
            assert_eq!(header.member().unwrap().as_str(), "CheckAuthorization");
            type Body =
                ((String, HashMap<String, OwnedVariant>), String, HashMap<String, String>, u32, String);
            let ((kind, details), action, facts, flags, _): Body = message.body().deserialize().unwrap();
            let is_but = matches!(script, Script::AllBut(but) if but == action);
            let is_in = matches!(script, Script::In(one) if facts.get("namespace").is_some_and(|n| n == one));
            facts_of.lock().unwrap().push((action.clone(), facts));
            *last.lock().unwrap() = Some((kind, details, action, flags));
            asked.fetch_add(1, Ordering::Relaxed);
            let none = HashMap::<&str, &str>::new;
            let answer = match script {
                Script::Yes => connection.reply(&header, &((true, false, none()),)).await,
                Script::AllBut(_) => connection.reply(&header, &((!is_but, false, none()),)).await,
                Script::In(_) => connection.reply(&header, &((is_in, false, none()),)).await,
                Script::No => connection.reply(&header, &((false, false, none()),)).await,
                Script::Challenge => connection.reply(&header, &((false, true, none()),)).await,
                Script::Malformed => connection.reply(&header, &true).await,
                Script::Longer => connection.reply(&header, &((true, true, none(), true),)).await,
                Script::Error => {
                    connection.reply_error(&header, "org.freedesktop.PolicyKit1.Error.Failed", &"no").await
                }
                Script::Silent => Ok(()),
                Script::Dies => connection.clone().close().await,
            };
            answer.unwrap();
        }
    });
    authority
}

#[tokio::test(flavor = "multi_thread")]
async fn largest_message_of_a_bus_gets_an_error() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let client = bus.connect_as(NOBODY).await;
    let owner = async || {
        let bus = zbus::fdo::DBusProxy::new(&client).await.unwrap();
        bus.get_name_owner("org.csid1".try_into().unwrap()).await.unwrap().to_string()
    };
    let before = owner().await;
    // The bus takes 32 MiB, all of it.
    let long = "/".to_owned() + &"x".repeat((32 << 20) - 1024);
    let text = "y".repeat((32 << 20) - 1024);
    for (path, body) in [(long.as_str(), ""), ("/org/csid1", text.as_str())] {
        let (name, said) = call(&client, path, MANAGER, "HasMount", &body).await.unwrap_err();
        assert_eq!(name, "org.csid1.Error.InvalidArgument");
        assert!(said.len() < 256 && said.contains("the limits are 1048576"), "{said}");
    }
    // One that is read, and not shown.
    let long = "/".to_owned() + &"x".repeat(10_000);
    let (name, said) = call(&client, &long, MANAGER, "HasMount", &"/").await.unwrap_err();
    assert_eq!(name, "org.freedesktop.DBus.Error.UnknownObject");
    assert!(said.len() < 512, "{} bytes", said.len());
    assert_eq!(owner().await, before, "csid is on the bus as before");
}

#[tokio::test(flavor = "multi_thread")]
async fn polkit_rule_allows_one_namespace() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let authority = polkit(&bus, Script::In("a")).await;
    let client = bus.connect_as(NOBODY).await;
    let text = |text: &str| Variant::from(text.to_owned());
    let given = |entries: &[(&'static str, &str)]| -> Options {
        entries.iter().map(|(key, value)| (*key, text(value))).collect()
    };
    let refused = |answer: Result<Message, (String, String)>| {
        answer.err().is_some_and(|(name, _)| name == "org.csid1.Error.NotAuthorized")
    };
    for (namespace, may) in [("a", true), ("b", false), ("a ", false), ("", false)] {
        assert_eq!(refused(manager(&client, "GetVolume", &(namespace, "v")).await), !may, "{namespace:?}");
        let inline = given(&[("plugin", "p"), ("external-id", "x"), ("bind", "unit:job.service")]);
        let mount = manager(&client, "Mount", &(namespace, "v", "job", inline)).await;
        assert_eq!(refused(mount), !may, "{namespace:?}");
        let listed = manager(&client, "ListMounts", &given(&[("namespace", namespace)])).await;
        assert_eq!(refused(listed), !may, "{namespace:?}");
        // Options do not replace the object of the call.
        let other = manager(&client, "Mount", &(namespace, "v", "job", given(&[("namespace", "a")]))).await;
        assert_eq!(refused(other), !may, "{namespace:?}");
    }
    let long = "a".repeat(2000);
    assert!(refused(manager(&client, "GetVolume", &(long.as_str(), "v")).await));
    assert!(refused(manager(&client, "ListMounts", &Options::new()).await));
    assert!(refused(manager(&client, "ListPlugins", &()).await));
    let facts = |pairs: &[(&str, &str)]| -> CallFacts {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let received = authority.facts.lock().unwrap().clone();
    let mount = facts(&[("namespace", "a"), ("volume", "v"), ("plugin", "p"), ("unit", "job.service")]);
    for action in ["org.csid1.mount", "org.csid1.inline"] {
        assert!(received.contains(&(action.to_owned(), mount.clone())), "{action}: {received:?}");
    }
    authority.facts.lock().unwrap().clear();
    let _ = manager(&client, "WaitForPlugin", &("p", "node", Options::new())).await;
    let _ = call(&client, "/org/csid1/plugin/p", "org.csid1.Plugin", "OpenLog", &Options::new()).await;
    let plugin = facts(&[("plugin", "p")]);
    let received = authority.facts.lock().unwrap().clone();
    let due = ["org.csid1.read", "org.csid1.plugin-log"].map(|action| (action.to_owned(), plugin.clone()));
    assert_eq!(received, due);
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_namespace_is_default_for_polkit() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let authority = polkit(&bus, Script::In("default")).await;
    let client = bus.connect_as(NOBODY).await;
    let refused = |answer: Result<Message, (String, String)>| {
        answer.err().is_some_and(|(name, _)| name == "org.csid1.Error.NotAuthorized")
    };
    for namespace in ["", "default"] {
        assert!(!refused(manager(&client, "GetVolume", &(namespace, "v")).await), "{namespace:?}");
        let filter = Options::from([("namespace", namespace.into())]);
        assert!(!refused(manager(&client, "ListMounts", &filter).await), "{namespace:?}");
        let inline = Options::from([("plugin", "p".into()), ("external-id", "x".into())]);
        let mount = manager(&client, "Mount", &(namespace, "v", "job", inline)).await;
        assert!(!refused(mount), "{namespace:?}");
    }
    assert!(refused(manager(&client, "ListMounts", &Options::new()).await), "a list of all namespaces");
    let received = authority.facts.lock().unwrap().clone();
    let unnamed = |(_, facts): &&(String, CallFacts)| !facts.contains_key("namespace");
    assert_eq!(received.iter().filter(unnamed).count(), 1, "{received:?}");
}

async fn read_as_member(bus: &Bus) -> Result<(), String> {
    let client = bus.connect_as(MEMBER).await;
    manager(&client, "ListPlugins", &()).await.map(drop).map_err(|(name, text)| format!("{name}: {text}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn only_polkits_yes_authorises() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    for (script, said) in [
        (Script::Yes, None),
        (Script::No, Some("org.csid1.read:")),
        (Script::Challenge, Some("requires authentication")),
        (Script::Silent, Some("did not answer")),
        (Script::Error, Some("polkit failed")),
        (Script::Malformed, Some("malformed")),
        (Script::Longer, Some("malformed")),
        (Script::Dies, Some("polkit failed")),
    ] {
        let authority = polkit(&bus, script).await;
        let begun = Instant::now();
        let answer = read_as_member(&bus).await;
        match said {
            None => assert_eq!(answer, Ok(()), "{script:?}"),
            Some(said) => {
                let error = answer.unwrap_err();
                assert!(
                    error.starts_with("org.csid1.Error.NotAuthorized") && error.contains(said),
                    "{script:?}: {error}"
                );
            }
        }
        assert_eq!(authority.asked.load(Ordering::Relaxed), 1, "{script:?}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{script:?}");
        authority.leave().await;
    }
    assert_eq!(read_as_member(&bus).await, Ok(()), "without polkit the group counts");
}

#[tokio::test(flavor = "multi_thread")]
async fn polkit_yes_covers_one_action() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let authority = polkit(&bus, Script::Yes).await;
    let client = bus.connect_as(NOBODY).await;
    manager(&client, "Reload", &(Options::new(),)).await.unwrap();
    let (kind, details, action, flags) = authority.last.lock().unwrap().take().unwrap();
    assert_eq!(kind, "system-bus-name", "never a pid");
    assert_eq!(details.len(), 1);
    assert_eq!(<&str>::try_from(&details["name"]).unwrap(), client.unique_name().unwrap().as_str());
    assert_eq!((action.as_str(), flags), ("org.csid1.manage", 0));

    // The user authenticates only if the call allows it.
    let call = Message::method_call("/org/csid1", "ListPlugins")
        .destination("org.csid1")
        .interface(MANAGER)
        .with_flags(Flags::ALLOW_INTERACTIVE_AUTH)
        .build(&())
        .unwrap();
    client.send(&call).await.unwrap();
    let question = async {
        loop {
            if let Some(question) = authority.last.lock().unwrap().take() {
                return question;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let (_, _, action, flags) = tokio::time::timeout(Duration::from_secs(5), question).await.unwrap();
    assert_eq!((action.as_str(), flags), ("org.csid1.read", 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn polkit_that_does_not_start_refuses() {
    let Some(bus) = is_root().then(|| Bus::start(true)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let error = read_as_member(&bus).await.unwrap_err();
    assert!(error.starts_with("org.csid1.Error.NotAuthorized"), "{error}");
    manager(&bus.connect_as(ROOT).await, "ListPlugins", &()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn csid_reconnects_to_a_restarted_bus() {
    let Some(mut bus) = Bus::start(false) else { return };
    let world = World::new();
    let serving = bus.serve(&world, QUICK).await;
    bus.restart();
    let back = async {
        loop {
            if bus.has("org.csid1").await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), back).await.expect("csid is on the new bus");
    world.state.send(State::Stopping).unwrap();
    tokio::time::timeout(Duration::from_secs(3), serving).await.expect("it stops").unwrap();
    assert!(!bus.has("org.csid1").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn csid_without_a_bus_waits_and_stops() {
    let world = World::new();
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("bus");
    // No bus listens there: each connection is closed at once.
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let nowhere = zbus::Address::try_from(format!("unix:path={}", socket.display()).as_str()).unwrap();
    let (rooms, signals) = (world.rooms.clone(), Signals::of(&world.rooms));
    let serving = tokio::spawn(serve::serve_bus_at(Some(nowhere), rooms, signals, world.group_file(), QUICK));
    let tries = async {
        for _ in 0..3 {
            drop(listener.accept().await.unwrap());
        }
    };
    tokio::time::timeout(Duration::from_secs(10), tries).await.expect("it tries again");
    assert!(!serving.is_finished());
    world.state.send(State::Stopping).unwrap();
    tokio::time::timeout(Duration::from_secs(3), serving).await.expect("it stops").unwrap();
}
