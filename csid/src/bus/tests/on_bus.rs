//! The system bus: polkit as it should and should not answer, and a bus that comes and goes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use zbus::message::{Flags, Type};
use zbus::{Connection, Message, MessageStream, OwnedVariant};

use super::harness::{Bus, MANAGER, MEMBER, NOBODY, ROOT, World, is_root, manager};
use crate::bus::polkit::Patience;
use crate::bus::{State, serve};

pub const QUICK: Patience = Patience { machine: Duration::from_millis(500), person: Duration::from_secs(2) };

/// What the scripted polkit answers.
#[derive(Clone, Copy, Debug)]
pub enum Script {
    Yes,
    No,
    /// Yes to all actions but this one.
    AllBut(&'static str),
    Challenge,
    Silent,
    Error,
    /// A reply that is no `(bba{ss})`: a plain true.
    Malformed,
    /// The same with one boolean more.
    Longer,
    /// It leaves the bus while it is asked.
    Dies,
}

/// Subject kind, subject details, action, flags.
type Question = (String, HashMap<String, OwnedVariant>, String, u32);

pub struct Authority {
    pub asked: Arc<AtomicUsize>,
    last: Arc<Mutex<Option<Question>>>,
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
    let authority = Authority { asked: Arc::default(), last: Arc::default(), connection: connection.clone() };
    let (asked, last) = (authority.asked.clone(), authority.last.clone());
    tokio::spawn(async move {
        while let Some(Ok(message)) = stream.next().await {
            if message.message_type() != Type::MethodCall {
                continue;
            }
            let header = message.header();
            assert_eq!(header.member().unwrap().as_str(), "CheckAuthorization");
            type Body =
                ((String, HashMap<String, OwnedVariant>), String, HashMap<String, String>, u32, String);
            let ((kind, details), action, _, flags, _): Body = message.body().deserialize().unwrap();
            let is_but = matches!(script, Script::AllBut(but) if but == action);
            *last.lock().unwrap() = Some((kind, details, action, flags));
            asked.fetch_add(1, Ordering::Relaxed);
            let none = HashMap::<&str, &str>::new;
            let answer = match script {
                Script::Yes => connection.reply(&header, &((true, false, none()),)).await,
                Script::AllBut(_) => connection.reply(&header, &((!is_but, false, none()),)).await,
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

async fn read_as_member(bus: &Bus) -> Result<(), String> {
    let client = bus.connect_as(MEMBER).await;
    manager(&client, "ListPlugins", &()).await.map(drop).map_err(|(name, text)| format!("{name}: {text}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn polkits_word_counts_and_only_a_plain_yes_is_one() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    for (script, said) in [
        (Script::Yes, None),
        (Script::No, Some("org.csid1.read:")),
        (Script::Challenge, Some("a person")),
        (Script::Silent, Some("did not answer")),
        (Script::Error, Some("could not be asked")),
        (Script::Malformed, Some("malformed")),
        (Script::Longer, Some("malformed")),
        (Script::Dies, Some("could not be asked")),
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
async fn a_yes_for_nobody_is_a_yes_for_that_action_alone() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let authority = polkit(&bus, Script::Yes).await;
    let client = bus.connect_as(NOBODY).await;
    manager(&client, "Reload", &(super::harness::Options::new(),)).await.unwrap();
    let (kind, details, action, flags) = authority.last.lock().unwrap().take().unwrap();
    assert_eq!(kind, "system-bus-name", "never a pid");
    assert_eq!(details.len(), 1);
    assert_eq!(<&str>::try_from(&details["name"]).unwrap(), client.unique_name().unwrap().as_str());
    assert_eq!((action.as_str(), flags), ("org.csid1.manage", 0));

    // A person is asked only where the call allows it.
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
async fn a_polkit_that_is_installed_and_does_not_start_refuses() {
    let Some(bus) = is_root().then(|| Bus::start(true)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let error = read_as_member(&bus).await.unwrap_err();
    assert!(error.starts_with("org.csid1.Error.NotAuthorized"), "{error}");
    manager(&bus.connect_as(ROOT).await, "ListPlugins", &()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn csid_serves_a_bus_that_comes_goes_and_comes_back() {
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
async fn without_a_bus_csid_waits_and_stops_when_told() {
    let world = World::new();
    let nowhere = zbus::Address::try_from("unix:path=/nonexistent/bus").unwrap();
    let serving =
        tokio::spawn(serve::serve_bus_at(Some(nowhere), world.rooms.clone(), world.group_file(), QUICK));
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert!(!serving.is_finished());
    world.state.send(State::Stopping).unwrap();
    tokio::time::timeout(Duration::from_secs(3), serving).await.expect("it stops").unwrap();
}
