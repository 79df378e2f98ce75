//! A uid's volumes and claims are not another uid's, whatever polkit permits.

use std::collections::HashMap;

use csid_client::{AccessMode, AttachOptions, CreateVolume, DeregisterOptions, Kind, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy, Polkit, Verdict};
use csid_tests::raw::{
    MANAGER, MANAGER_PATH, MEMBER, OTHER, User, call, dict, group_csid, listen_as, text, value,
};
use csid_tests::script::{Act, CONTROLLER, Rule};
use csid_tests::world::{World, eventually, refusal, world};
use zbus::{Connection, Variant};

use crate::*;

/// Starts csid as [`attaching`] does, with every capability of a controller, and with these users on a bus.
async fn on_bus<const N: usize>(w: &mut World, users: [User; N]) -> (Client, Bus, Polkit, [Connection; N]) {
    group_csid(w);
    let bus = Bus::start(w, Policy::Everything).await;
    let polkit = Polkit::start(&bus, Verdict::Yes).await;
    let plugin = w.add_plugin("p").await;
    plugin.set(|script| {
        script.control(&CONTROLLER);
        script.plugin.push("OFFLINE".to_owned());
    });
    plugin.kill();
    plugin.start().await;
    plugin.provision("v");
    let client = w.start().await;
    healthy(&client, "p").await;
    bus.has_csid().await;
    let mut connections = Vec::new();
    for user in users {
        connections.push(bus.connect(user).await);
    }
    let connections = connections.try_into().expect("one for each user");
    (client, bus, polkit, connections)
}

/// Returns the name of the error that this member answers for volume `v`. Empty: it succeeds.
async fn answer(connection: &Connection, member: &str, volume: &str, more: Vec<Variant<'static>>) -> String {
    let arguments = [text(NAMESPACE), text(volume)].into_iter().chain(more).collect();
    match call(connection, MANAGER_PATH, MANAGER, member, arguments).await {
        Ok(_) => String::new(),
        Err((name, _)) => name.trim_start_matches("org.csid1.Error.").to_owned(),
    }
}

/// A volume of plugin `p`, with one capability and more options.
fn as_writer(external_id: &str, more: Vec<(&str, Variant<'static>)>) -> Variant<'static> {
    let capability = HashMap::from([("access-mode".to_owned(), text("single-node-writer"))]);
    let volume = vec![
        ("plugin", text("p")),
        ("external-id", text(external_id)),
        ("capabilities", Variant::from(vec![capability])),
    ];
    dict(volume.into_iter().chain(more).collect())
}

#[test]
fn inline_attachment_is_its_callers() {
    alone(UNREGISTERED, async |w| {
        let (client, _bus, polkit, [other]) = on_bus(w, [OTHER]).await;
        polkit.says(Verdict::But("org.csid1.inline"));
        let options = AttachOptions {
            plugin: Some("p".to_owned()),
            external_id: Some("v".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
            ..AttachOptions::default()
        };
        client.attach_volume(NAMESPACE, "v", "node-2", options).await.unwrap();
        let calls = w.plugin("p").volume_calls().len();
        let none = || value("a{sv}");
        assert_eq!(answer(&other, "DetachVolume", "v", vec![text("node-2"), none()]).await, "NotAuthorized");
        // The name means what csid has attached, and nothing of another node.
        assert_eq!(answer(&other, "DetachVolume", "v", vec![text("node-3"), none()]).await, "");
        // By its name it can be detached, and no more.
        let snapshot = vec![text("s"), none()];
        assert_eq!(answer(&other, "CreateSnapshot", "v", snapshot).await, "NotFound");
        let expand = vec![Variant::from(8u64 << 20), Variant::from(0u64), none()];
        assert_eq!(answer(&other, "ExpandVolume", "v", expand).await, "NotFound");

        // Nor under another name, nor another volume under this one.
        polkit.says(Verdict::Yes);
        let given = |id| dict(vec![("plugin", text("p")), ("external-id", text(id))]);
        let detach = |id| vec![text("node-2"), given(id)];
        assert_eq!(answer(&other, "DetachVolume", "alias", detach("v")).await, "AlreadyExists");
        assert_eq!(answer(&other, "DetachVolume", "v", detach("w")).await, "Busy");
        assert_eq!(answer(&other, "DetachVolume", "v", detach("v")).await, "NotAuthorized");
        assert_eq!(
            answer(&other, "CreateSnapshot", "alias", vec![text("s"), given("v")]).await,
            "AlreadyExists"
        );
        assert_eq!(w.plugin("p").volume_calls().len(), calls, "the plugin was asked for nothing");

        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        let attach = vec![text("node-2"), as_writer("v", vec![])];
        assert_eq!(answer(&other, "AttachVolume", "v", attach).await, "");
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.expect("root may");
        w.nothing_left(&client).await;
    });
}

/// An expansion of `v` that waits until it is detached; its answer in the end.
async fn waiting(
    client: &Client,
    who: &Connection,
    options: Variant<'static>,
) -> tokio::task::JoinHandle<String> {
    let who = who.clone();
    let sizes = vec![Variant::from(8u64 << 20), Variant::from(0u64), options];
    let expanding = tokio::spawn(async move { answer(&who, "ExpandVolume", "v", sizes).await });
    eventually("it waits", async || {
        let operations = client.list_operations().await.unwrap();
        operations.iter().any(|operation| operation.step == "waiting until nobody has it")
    })
    .await;
    expanding
}

/// A call waits for its turn. Until then its volume may have another owner, or its name another volume.
#[test]
fn call_is_authorised_for_its_own_volume() {
    alone("root alone registers volumes on a node", async |w| {
        let (client, _bus, _polkit, [other]) = on_bus(w, [OTHER]).await;
        assert_eq!(answer(&other, "RegisterVolume", "v", vec![as_writer("v", vec![])]).await, "");
        client.attach_volume(NAMESPACE, "v", "node-2", AttachOptions::default()).await.unwrap();
        let his = waiting(&client, &other, value("a{sv}")).await;
        let force = || DeregisterOptions { force: Some(true), ..DeregisterOptions::default() };
        client.deregister_volume(NAMESPACE, "v", force()).await.unwrap();
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        let answer = his.await.unwrap();
        assert!(["NotFound", "NotAuthorized"].contains(&answer.as_str()), "{answer}");

        // So is one that brings its volume, which is registered since.
        client.attach_volume(NAMESPACE, "v", "node-2", AttachOptions::default()).await.unwrap();
        client.deregister_volume(NAMESPACE, "v", force()).await.unwrap();
        let given = dict(vec![("plugin", text("p")), ("external-id", text("v"))]);
        let inline = waiting(&client, &other, given).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        assert_eq!(inline.await.unwrap(), "AlreadyExists");
        assert_eq!(w.plugin("p").count("ControllerExpandVolume", "v"), 0);
        w.nothing_left(&client).await;
    });
}

/// A mount outlives its claim where that is released by force; the consumer's next claim may be another uid's.
#[test]
fn reboot_mounts_nothing_under_another_claim() {
    alone("a node claims nothing that it has mounted for a claim that has ended", async |w| {
        let (client, _bus, _polkit, [other]) = on_bus(w, [OTHER]).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        assert_eq!(answer(&other, "Mount", "v", vec![text("job"), value("a{sv}")]).await, "");
        let force = ReleaseOptions { force: Some(true), ..ReleaseOptions::default() };
        client.release(NAMESPACE, "v", "job", force).await.unwrap();
        claim(&client, "v", "job").await.unwrap();
        let count = |w: &mut World| w.plugin("p").count("NodePublishVolume", "v");
        assert_eq!(count(w), 1);
        w.reboot().await;
        w.another_boot_id();
        let client = w.start().await;
        settled(&client).await;
        eventually("it is said why it is not there", async || {
            row(&client, "v", "job").await.is_some_and(|row| row.error.contains("not claimed by job"))
        })
        .await;
        assert_eq!(count(w), 1, "the claim is root's");
        client.unmount(NAMESPACE, "v", "job", UnmountOptions::default()).await.unwrap();
        release(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The registrar of a volume has fixed its mount options.
#[test]
fn mount_only_user_cannot_change_mount_options() {
    alone("root alone registers volumes on a node", async |w| {
        let (client, _bus, polkit, [other, member]) = on_bus(w, [OTHER, MEMBER]).await;
        let flags =
            |flags: &[&str]| Variant::from(flags.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>());
        let as_registered = || {
            vec![("fs-type", text("ext4")), ("mount-flags", flags(&["noexec"])), ("mount-group", text("7"))]
        };
        let spec = as_writer("v", as_registered());
        assert_eq!(answer(&other, "RegisterVolume", "v", vec![spec]).await, "");
        polkit.says(Verdict::But("org.csid1.manage-volumes"));
        let mount = async |who: &Connection, options| {
            answer(who, "Mount", "v", vec![text("job"), dict(options)]).await
        };
        let leave = async |who: &Connection| {
            assert_eq!(answer(who, "Unmount", "v", vec![text("job"), value("a{sv}")]).await, "");
        };
        let otherwise = [
            ("fs-type", text("xfs")),
            ("fs-type", text("")),
            ("mount-flags", flags(&[])),
            ("mount-flags", flags(&["noexec", "errors=panic"])),
            ("mount-group", text("8")),
        ];
        for option in &otherwise {
            let (key, value) = option.clone();
            assert_eq!(mount(&member, vec![(key, value)]).await, "NotAuthorized", "{option:?}");
        }
        for options in [Vec::new(), as_registered()] {
            assert_eq!(mount(&member, options).await, "", "as it was registered");
            leave(&member).await;
        }
        let [.., (key, value)] = otherwise;
        assert_eq!(mount(&other, vec![(key, value)]).await, "", "its own");
        leave(&other).await;
        let group = MountOptions { mount_group: Some("9".to_owned()), ..MountOptions::default() };
        client.mount(NAMESPACE, "v", "job", group).await.expect("root may");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// csid undoes an attach that it never sent to another user's plugin. It needs no secrets for that.
#[test]
fn attach_with_forbidden_secrets_leaves_nothing() {
    alone(UNREGISTERED, async |w| {
        let (client, _bus, _polkit, [other]) = on_bus(w, [OTHER]).await;
        let (theirs, plugins) = (w.path("theirs.sock"), w.plugin("p").witnessed_socket());
        let listener = listen_as(OTHER, &theirs).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::UnixListener::from_std(listener).unwrap();
        tokio::spawn(async move {
            while let Ok((mut csid, _)) = listener.accept().await {
                let mut plugin = tokio::net::UnixStream::connect(&plugins).await.unwrap();
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut csid, &mut plugin).await });
            }
        });
        let spec = dict(vec![("supervision", text("external")), ("socket", text(theirs.to_str().unwrap()))]);
        let arguments = vec![text("theirs"), spec];
        call(&other, MANAGER_PATH, MANAGER, "RegisterPlugin", arguments).await.expect("theirs plugin");
        healthy(&client, "theirs").await;
        let options = || AttachOptions {
            plugin: Some("theirs".to_owned()),
            external_id: Some("v".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
            ..AttachOptions::default()
        };
        let with_secrets = AttachOptions { secrets: Some(secrets(&[("password", "x")])), ..options() };
        let (kind, error) = refusal(client.attach_volume(NAMESPACE, "v", "node-2", with_secrets).await);
        assert_eq!(kind, Kind::NotAuthorized, "{error}");
        let answer = client.explain(NAMESPACE, "v", CallOptions::default()).await;
        assert_eq!(refusal(answer).0, Kind::NotFound, "no row names it");
        client.attach_volume(NAMESPACE, "v", "node-2", options()).await.expect("it has no owner");
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The last resort is root's, whatever polkit lets a member do.
#[test]
fn forget_by_a_member_is_denied() {
    world(async |w| {
        let (client, _bus, _polkit, [member]) = on_bus(w, [MEMBER]).await;
        for name in ["Unmount", "Release"] {
            for options in [dict(vec![("forget", Variant::from(true))]), dict(Vec::new())] {
                let is_forget = options != dict(Vec::new());
                let said = answer(&member, name, "v", vec![text("job"), options]).await;
                assert_eq!(said, if is_forget { "NotAuthorized" } else { "" }, "{name}");
            }
        }
        w.nothing_left(&client).await;
    });
}

/// Root waits for a creation that another uid has begun.
#[test]
fn delete_refused_for_a_waiter_deletes_nothing() {
    alone(UNREGISTERED, async |w| {
        let (client, _bus, _polkit, [other]) = on_bus(w, [OTHER]).await;
        w.plugin("p").rules([Rule::always("CreateVolume", Act::FailAfter(13))]);
        let capability = HashMap::from([("access-mode".to_owned(), text("single-node-writer"))]);
        let begun = dict(vec![
            ("plugin", text("p")),
            ("capabilities", Variant::from(vec![capability])),
            ("capacity-min", Variant::from(1u64 << 20)),
            ("deadline-usec", Variant::from(300_000u64)),
        ]);
        assert_eq!(answer(&other, "CreateVolume", "a", vec![begun]).await, "TimedOut");
        let waits = {
            let client = client.clone();
            let spec = CreateVolume {
                plugin: Some("p".to_owned()),
                capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
                capacity_min: Some(1 << 20),
                ..CreateVolume::default()
            };
            tokio::spawn(async move { client.create_volume(NAMESPACE, "a", spec).await })
        };
        eventually("root waits", async || {
            let operations = client.list_operations().await.unwrap();
            operations.iter().any(|operation| operation.kind == "create" && operation.uid == 0)
        })
        .await;
        assert_eq!(answer(&other, "DeleteVolume", "a", vec![value("a{sv}")]).await, "Busy");
        w.plugin("p").honest();
        waits.await.unwrap().expect("it is created");
        eventually("no operation", async || client.list_operations().await.unwrap().is_empty()).await;
        assert_eq!(w.plugin("p").count("DeleteVolume", ""), 0);
        client.delete_volume(NAMESPACE, "a", Default::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// csid asks the plugin whose snapshot it is, and the plugin is away.
#[test]
fn create_waiting_for_a_snapshot_ends_with_caller() {
    alone(UNREGISTERED, async |w| {
        let (client, _bus, _polkit, [other]) = on_bus(w, [OTHER]).await;
        let wanted = |more: Vec<(&str, Variant<'static>)>| {
            let capability = HashMap::from([("access-mode".to_owned(), text("single-node-writer"))]);
            let volume = vec![("plugin", text("p")), ("capabilities", Variant::from(vec![capability]))];
            vec![dict(volume.into_iter().chain(more).collect())]
        };
        assert_eq!(answer(&other, "CreateVolume", "a", wanted(vec![])).await, "");
        let taken = client.create_snapshot(NAMESPACE, "a", "s", Default::default()).await.unwrap();
        w.plugin("p").kill();
        eventually("it is missed", async || !client.plugin("p").await.unwrap().healthy).await;
        let more = vec![("snapshot", text(&taken.id)), ("deadline-usec", Variant::from(300_000u64))];
        assert_eq!(answer(&other, "CreateVolume", "b", wanted(more)).await, "TimedOut");
        eventually("no operation", async || client.list_operations().await.unwrap().is_empty()).await;
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        assert_eq!(w.plugin("p").count("CreateVolume", ""), 1, "the first volume alone");
        client.delete_snapshot("p", &taken.id, CallOptions::default()).await.unwrap();
        client.delete_volume(NAMESPACE, "a", Default::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}
