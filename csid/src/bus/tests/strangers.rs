//! Callers who are not root, over a socket and a bus that let everybody in: it is csid itself that refuses.

use std::sync::atomic::Ordering;
use std::time::Duration;

use zbus::{Connection, Variant};

use super::harness::{
    Bus, MANAGER, MEMBER, NOBODY, Options, ROOT, User, World, call, connect_as, is_root, manager,
};
use super::on_bus::{QUICK, Script, polkit};
use crate::bus::dispatch::MEMBERS;

const REFUSED: &str = "org.csid1.Error.NotAuthorized";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";

/// What members of group csid may not do.
const ROOTS: &[&str] = &[
    "Reconcile",
    "RegisterPlugin",
    "UnregisterPlugin",
    "Restart",
    "AcceptNodeId",
    "Drain",
    "Upgrade",
    "OpenLog",
    "Exec",
    "ResizeExec",
    "WaitExec",
    "Reload",
    "RegisterVolume",
    "CreateVolume",
    "ValidateVolume",
    "DeregisterVolume",
    "DeleteVolume",
    "ExpandVolume",
    "CreateSnapshot",
    "AttachVolume",
    "DetachVolume",
    "DeleteSnapshot",
];

/// Every member that is served, and every property, by itself.
async fn everything(client: &Connection) -> Vec<(String, Result<(), String>)> {
    let mut answers = Vec::new();
    let mut note = |what: String, answer: Result<zbus::Message, (String, String)>| {
        answers.push((what, answer.map(drop).map_err(|(name, _)| name)));
    };
    for member in MEMBERS {
        let objects: &[&str] = match member.interface {
            MANAGER | "org.freedesktop.DBus.ObjectManager" => &["/org/csid1"],
            PROPERTIES => &["/org/csid1", "/org/csid1/plugin/local"],
            _ => &["/org/csid1/plugin/local"],
        };
        for object in objects {
            let what = format!("{object} {}.{}", member.interface, member.name);
            let answer = match member.takes {
                "" => call(client, object, member.interface, member.name, &()).await,
                "s" => call(client, object, member.interface, member.name, &MANAGER).await,
                "ss" => call(client, object, member.interface, member.name, &(MANAGER, "State")).await,
                "asa{sv}" => {
                    let body = (vec!["true"], Options::new());
                    call(client, object, member.interface, member.name, &body).await
                }
                "sqq" => {
                    call(client, object, member.interface, member.name, &("csi-exec-0", 1u16, 1u16)).await
                }
                "ssv" => {
                    let body = (MANAGER, "State", Variant::new("ready"));
                    call(client, object, member.interface, member.name, &body).await
                }
                "su" => call(client, object, member.interface, member.name, &("", 1u32)).await,
                "tu" => call(client, object, member.interface, member.name, &(0u64, 1u32)).await,
                "a{sv}" => call(client, object, member.interface, member.name, &(Options::new(),)).await,
                "a{sv}a{sv}" => {
                    let body = (Options::new(), Options::new());
                    call(client, object, member.interface, member.name, &body).await
                }
                "sa{sv}" => {
                    call(client, object, member.interface, member.name, &("local", Options::new())).await
                }
                "ssa{sv}" => {
                    let soon = Options::from([("deadline-usec", 1000u64.into())]);
                    call(client, object, member.interface, member.name, &("local", "node", soon)).await
                }
                "sssa{sv}" => {
                    let body = ("ns", "vol", "job", Options::new());
                    call(client, object, member.interface, member.name, &body).await
                }
                "sstta{sv}" => {
                    let body = ("ns", "vol", 1u64, 0u64, Options::new());
                    call(client, object, member.interface, member.name, &body).await
                }
                other => panic!("{what}: say how to call one that takes {other}"),
            };
            note(what, answer);
        }
    }
    let contract = csi_proto::DBUS_INTERFACE_XML;
    let (of_manager, of_plugin) = contract.split_once("<interface name=\"org.csid1.Plugin\">").unwrap();
    for (object, interface, text) in
        [("/org/csid1", MANAGER, of_manager), ("/org/csid1/plugin/local", "org.csid1.Plugin", of_plugin)]
    {
        let names = text.split("<property name=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
        for name in names {
            note(
                format!("{interface}.{name}"),
                call(client, object, PROPERTIES, "Get", &(interface, name)).await,
            );
        }
    }
    assert!(answers.len() > 40, "{}", answers.len());
    answers
}

async fn all_refused(client: &Connection) {
    for (what, answer) in everything(client).await {
        assert_eq!(answer, Err(REFUSED.to_owned()), "{what}");
    }
    let peer = call(client, "/org/csid1", "org.freedesktop.DBus.Peer", "Ping", &()).await;
    assert!(peer.is_ok(), "Peer is open");
    let told =
        call(client, "/org/csid1/plugin", "org.freedesktop.DBus.Introspectable", "Introspect", &()).await;
    let told = told.unwrap().body().deserialize::<String>().unwrap();
    assert!(!told.contains("<node name="), "Introspectable is open, but names no plugin: {told}");
}

/// What a member of group csid may, without polkit.
async fn a_members_share(client: &Connection) {
    for (what, answer) in everything(client).await {
        let may = !ROOTS.iter().any(|name| what.ends_with(&format!(".{name}")));
        assert_eq!(answer != Err(REFUSED.to_owned()), may, "{what}: {answer:?}");
    }
    let inline = Options::from([("plugin", "local".into()), ("external-id", "v".into())]);
    let (name, text) = manager(client, "Mount", &("ns", "vol", "job", inline)).await.unwrap_err();
    assert_eq!(name, REFUSED, "a volume given inline needs an action of its own");
    assert!(text.contains("org.csid1.inline"), "{text}");
    let force = Options::from([("force", true.into())]);
    for member in ["Unmount", "Release"] {
        let body = ("ns", "vol", "job", &force);
        let (name, text) = manager(client, member, &body).await.unwrap_err();
        assert_eq!(name, REFUSED, "{member}: force needs unmount-others");
        assert!(text.contains("org.csid1.unmount-others"), "{text}");
    }
    for member in ["Claim", "Release"] {
        let foreign = Options::from([("credential", "csid.other.disk".into())]);
        let (name, text) = manager(client, member, &("ns", "vol", "job", foreign)).await.unwrap_err();
        assert_eq!(name, REFUSED, "{member}: a credential of another namespace");
        assert!(text.contains("csid.ns.NAME"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_the_socket() {
    if !is_root() {
        return;
    }
    let world = World::new();
    let (path, _serving) = world.listen();
    all_refused(&connect_as(&path, NOBODY).await).await;
    // A uid that is not in the group's list: what counts is the group the process has.
    all_refused(&connect_as(&path, User { groups: &[100, 42], ..MEMBER }).await).await;
    a_members_share(&connect_as(&path, MEMBER).await).await;
    // What is too large is refused before it is asked who sent it.
    let large = Options::from([("operation-id", "x".repeat(64 * 1024).into())]);
    let (name, text) = manager(&connect_as(&path, NOBODY).await, "Reload", &(large,)).await.unwrap_err();
    assert_eq!(name, "org.csid1.Error.InvalidArgument", "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_bus_without_polkit() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    all_refused(&bus.connect_as(NOBODY).await).await;
    a_members_share(&bus.connect_as(MEMBER).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_bus_with_polkit() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let authority = polkit(&bus, Script::No).await;
    // What polkit refuses to a member of the group is refused, whatever the table without polkit says.
    for user in [NOBODY, MEMBER] {
        authority.asked.store(0, Ordering::Relaxed);
        all_refused(&bus.connect_as(user).await).await;
        assert!(authority.asked.load(Ordering::Relaxed) > 40, "it was polkit that was asked");
    }
    authority.asked.store(0, Ordering::Relaxed);
    for (what, answer) in everything(&bus.connect_as(ROOT).await).await {
        assert_ne!(answer, Err(REFUSED.to_owned()), "{what}");
    }
    assert_eq!(authority.asked.load(Ordering::Relaxed), 0, "root is never asked about");
}

/// What the arguments ask for may need another action than the member.
#[tokio::test(flavor = "multi_thread")]
async fn polkit_is_asked_for_what_the_arguments_need_too() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let client = bus.connect_as(NOBODY).await;
    let inline = || Options::from([("plugin", "local".into()), ("external-id", "v".into())]);
    let force = || Options::from([("force", true.into())]);
    let ask = async |member: &str, options: Options| {
        let answer = match member {
            "Mount" | "CreateSnapshot" | "AttachVolume" | "DetachVolume" | "Unmount" | "Release" => {
                manager(&client, member, &("ns", "vol", "job", options)).await
            }
            "ExpandVolume" => manager(&client, member, &("ns", "vol", 1u64, 0u64, options)).await,
            _ => manager(&client, member, &("ns", "vol", options)).await,
        };
        // Whatever else it is answered with: nothing is there.
        answer.err().filter(|(name, _)| name == REFUSED).map(|(_, text)| text)
    };
    for (action, members, options) in [
        (
            "org.csid1.inline",
            &[
                "Mount",
                "ValidateVolume",
                "DeleteVolume",
                "ExpandVolume",
                "CreateSnapshot",
                "AttachVolume",
                "DetachVolume",
            ][..],
            inline as fn() -> Options,
        ),
        ("org.csid1.unmount-others", &["Unmount", "Release", "DeregisterVolume"], force),
    ] {
        let authority = polkit(&bus, Script::AllBut(action)).await;
        for member in members {
            let refusal = ask(member, options()).await.unwrap_or_else(|| panic!("{member}: {action}"));
            assert!(refusal.contains(action), "{member}: {refusal}");
            assert_eq!(ask(member, Options::new()).await, None, "{member}, without what needs {action}");
        }
        authority.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_uid_has_a_bound_of_its_own() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    world.config.send_modify(|config| {
        std::sync::Arc::make_mut(config).operations_per_uid = 2;
    });
    let patience = crate::bus::polkit::Patience { machine: Duration::from_secs(5), ..QUICK };
    let _serving = bus.serve(&world, patience).await;
    let _authority = polkit(&bus, Script::Silent).await;
    // Two that wait for polkit are all that nobody may have; the third is turned away at once, and root is not.
    let client = bus.connect_as(NOBODY).await;
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let client = client.clone();
        waiting.spawn(async move { manager(&client, "ListPlugins", &()).await.unwrap_err().0 });
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (name, _) = manager(&client, "ListPlugins", &()).await.unwrap_err();
    assert_eq!(name, "org.csid1.Error.RateLimited");
    assert!(waiting.try_join_next().is_none(), "the two wait still");
    assert!(manager(&bus.connect_as(ROOT).await, "ListPlugins", &()).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn one_sender_on_the_bus_leaves_room_for_the_others() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let client = bus.connect_as(ROOT).await;
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..300 {
        let client = client.clone();
        let soon = Options::from([("deadline-usec", 2_000_000u64.into())]);
        waiting.spawn(async move {
            manager(&client, "WaitForPlugin", &("nope", "node", soon)).await.unwrap_err().0
        });
    }
    let mut names = waiting.join_all().await;
    names.retain(|name| name == "org.csid1.Error.RateLimited");
    assert_eq!(names.len(), 300 - 256, "root's calls are counted by their sender");
    assert!(manager(&client, "ListPlugins", &()).await.is_ok());
}
