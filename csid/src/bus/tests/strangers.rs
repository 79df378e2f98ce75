//! Callers other than root, over a socket and a bus that are open to all users, so that csid itself refuses.

use std::sync::atomic::Ordering;
use std::time::Duration;

use zbus::{Connection, Variant};

use super::harness::{
    Bus, MANAGER, MEMBER, NOBODY, Options, ROOT, User, World, call, connect_as, is_root, manager,
};
use super::lost::until;
use super::on_bus::{QUICK, Script, polkit};
use crate::bus::dispatch::MEMBERS;

const REFUSED: &str = "org.csid1.Error.NotAuthorized";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";

/// One call: its name, the action that it needs by the contract, and the error's name.
struct Called {
    what: String,
    action: &'static str,
    answer: Result<(), String>,
}

/// Calls every member that is served, and gets every property by itself.
async fn everything(client: &Connection) -> Vec<Called> {
    let mut calls = Vec::new();
    let mut note = |what: String, (interface, member): (&str, &str), answer: Result<_, (String, String)>| {
        let access = csi_proto::access::of(interface, member).unwrap_or_else(|| panic!("{what}: no access"));
        let answer = answer.map(|_: zbus::Message| ()).map_err(|(name, _)| name);
        calls.push(Called { what, action: csi_proto::access::action(access), answer });
    };
    for member in MEMBERS {
        let objects: &[&str] = match member.method.interface {
            MANAGER | "org.csid1.Cluster" | "org.freedesktop.DBus.ObjectManager" => &["/org/csid1"],
            PROPERTIES => &["/org/csid1", "/org/csid1/plugin/local"],
            _ => &["/org/csid1/plugin/local"],
        };
        for object in objects {
            let what = format!("{object} {}.{}", member.method.interface, member.method.name);
            let answer = match member.method.takes {
                "" => call(client, object, member.method.interface, member.method.name, &()).await,
                "s" => call(client, object, member.method.interface, member.method.name, &MANAGER).await,
                "ss" => {
                    call(client, object, member.method.interface, member.method.name, &(MANAGER, "State"))
                        .await
                }
                "asa{sv}" => {
                    let body = (vec!["true"], Options::new());
                    call(client, object, member.method.interface, member.method.name, &body).await
                }
                "sqq" => {
                    call(
                        client,
                        object,
                        member.method.interface,
                        member.method.name,
                        &("csi-exec-0", 1u16, 1u16),
                    )
                    .await
                }
                "ssv" => {
                    let body = (MANAGER, "State", Variant::new("ready"));
                    call(client, object, member.method.interface, member.method.name, &body).await
                }
                "su" => call(client, object, member.method.interface, member.method.name, &("", 1u32)).await,
                "tu" => {
                    call(client, object, member.method.interface, member.method.name, &(0u64, 1u32)).await
                }
                "a{sv}" => {
                    call(client, object, member.method.interface, member.method.name, &(Options::new(),))
                        .await
                }
                "a{sv}a{sv}" => {
                    let body = (Options::new(), Options::new());
                    call(client, object, member.method.interface, member.method.name, &body).await
                }
                "sa{sv}" => {
                    call(
                        client,
                        object,
                        member.method.interface,
                        member.method.name,
                        &("local", Options::new()),
                    )
                    .await
                }
                "ssa{sv}" => {
                    let soon = Options::from([("deadline-usec", 1000u64.into())]);
                    call(
                        client,
                        object,
                        member.method.interface,
                        member.method.name,
                        &("local", "node", soon),
                    )
                    .await
                }
                "sssa{sv}" => {
                    let body = ("ns", "vol", "job", Options::new());
                    call(client, object, member.method.interface, member.method.name, &body).await
                }
                "sstta{sv}" => {
                    let body = ("ns", "vol", 1u64, 0u64, Options::new());
                    call(client, object, member.method.interface, member.method.name, &body).await
                }
                other => panic!("{what}: no arguments for the signature {other}"),
            };
            note(what, (member.method.interface, member.method.name), answer);
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
                (PROPERTIES, "Get"),
                call(client, object, PROPERTIES, "Get", &(interface, name)).await,
            );
        }
    }
    assert!(calls.len() > 40, "{}", calls.len());
    calls
}

async fn all_refused(client: &Connection) {
    for Called { what, answer, .. } in everything(client).await {
        assert_eq!(answer, Err(REFUSED.to_owned()), "{what}");
    }
    let peer = call(client, "/org/csid1", "org.freedesktop.DBus.Peer", "Ping", &()).await;
    assert!(peer.is_ok(), "Peer is open");
    let document =
        call(client, "/org/csid1/plugin", "org.freedesktop.DBus.Introspectable", "Introspect", &()).await;
    let document = document.unwrap().body().deserialize::<String>().unwrap();
    assert!(!document.contains("<node name="), "Introspectable is open, but names no plugin: {document}");
}

/// Calls everything as a member of group csid, without polkit.
async fn allowed_by_the_contract(client: &Connection) {
    for Called { what, action, answer } in everything(client).await {
        let may = csi_proto::access::group_has(action);
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
    // The groups of the process count, not the group's list of users.
    all_refused(&connect_as(&path, User { groups: &[100, 42], ..MEMBER }).await).await;
    allowed_by_the_contract(&connect_as(&path, MEMBER).await).await;
    // The size is checked before the caller.
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
    allowed_by_the_contract(&bus.connect_as(MEMBER).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_bus_with_polkit() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    let _serving = bus.serve(&world, QUICK).await;
    let authority = polkit(&bus, Script::No).await;
    // With polkit a member of the group has no rights of its own.
    for user in [NOBODY, MEMBER] {
        authority.asked.store(0, Ordering::Relaxed);
        all_refused(&bus.connect_as(user).await).await;
        assert!(authority.asked.load(Ordering::Relaxed) > 40, "it was polkit that was asked");
    }
    authority.asked.store(0, Ordering::Relaxed);
    for Called { what, answer, .. } in everything(&bus.connect_as(ROOT).await).await {
        assert_ne!(answer, Err(REFUSED.to_owned()), "{what}");
    }
    assert_eq!(authority.asked.load(Ordering::Relaxed), 0, "root is never asked about");
}

/// Arguments may need another action than the member.
#[tokio::test(flavor = "multi_thread")]
async fn polkit_is_asked_about_arguments_too() {
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
        // Other errors are expected: the objects do not exist.
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
async fn calls_of_one_uid_are_limited() {
    let Some(bus) = is_root().then(|| Bus::start(false)).flatten() else { return };
    let world = World::new();
    world.config.send_modify(|config| {
        std::sync::Arc::make_mut(config).operations_per_uid = 2;
    });
    let timeouts = crate::bus::polkit::Timeouts { unattended: Duration::from_secs(5), ..QUICK };
    let _serving = bus.serve(&world, timeouts).await;
    let authority = polkit(&bus, Script::Silent).await;
    // Two calls that wait for polkit are this uid's limit. The third is refused at once, and root's is not.
    let client = bus.connect_as(NOBODY).await;
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let client = client.clone();
        waiting.spawn(async move { manager(&client, "ListPlugins", &()).await.unwrap_err().0 });
    }
    let asked = || authority.asked.load(Ordering::Relaxed);
    until("both wait for polkit", async || asked() == 2).await;
    let (name, _) = manager(&client, "ListPlugins", &()).await.unwrap_err();
    assert_eq!(name, "org.csid1.Error.RateLimited");
    assert!(waiting.try_join_next().is_none(), "the two wait still");
    assert!(manager(&bus.connect_as(ROOT).await, "ListPlugins", &()).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_one_sender_are_limited() {
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
