//! Who may do what. Everything csid serves is called by `nobody`: on the private socket with mode 0666, on a bus that lets
//! everything through, with and without polkit. So it is csid itself that refuses.

use std::collections::HashMap;
use std::fs;
use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;

use csi_proto::access;
use csid_client::{
    AccessMode, ClaimFilter, ClaimOptions, Client, PluginSpec, Supervision, UnregisterOptions, VolumeFilter,
};
use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy, Polkit, Verdict};
use csid_tests::raw::{
    self, GROUP, MANAGER, MANAGER_PATH, MEMBER, Member, MemberKind, NOBODY, OTHER, PLUGIN, ROOT, call, dict,
    group_csid, text, value,
};
use csid_tests::world::{SOON, World, count, eventually, world};
use futures_util::StreamExt;
use zbus::message::Type;
use zbus::{Connection, Message, MessageStream, OwnedVariant, Variant};

const REFUSED: &str = "org.csid1.Error.NotAuthorized";
const UNKNOWN: &str = "org.freedesktop.DBus.Error.UnknownMethod";
const PLUGIN_PATH: &str = "/org/csid1/plugin/p";

/// A valid call of every member, served or not; properties by Get, and all of the standard interfaces.
fn every_call() -> Vec<(&'static str, String, String, Vec<Variant<'static>>)> {
    let mut calls = Vec::new();
    for Member { interface, name, kind } in raw::members(csi_proto::DBUS_INTERFACE_XML) {
        let path = if interface == PLUGIN { PLUGIN_PATH } else { MANAGER_PATH };
        match kind {
            MemberKind::Signal => {}
            MemberKind::Property => {
                let arguments = vec![text(&interface), text(&name)];
                calls.push((path, raw::PROPERTIES.to_owned(), "Get".to_owned(), arguments));
                let arguments = vec![text(&interface), text(&name), Variant::Variant(Box::new(text("x")))];
                calls.push((path, raw::PROPERTIES.to_owned(), "Set".to_owned(), arguments));
            }
            MemberKind::Method(arguments) => {
                let arguments = arguments.iter().map(|(argument, of)| good(&name, argument, of)).collect();
                calls.push((path, interface, name, arguments));
            }
        }
    }
    for (path, interface) in [(MANAGER_PATH, MANAGER), (PLUGIN_PATH, PLUGIN)] {
        calls.push((path, raw::PROPERTIES.to_owned(), "GetAll".to_owned(), vec![text(interface)]));
    }
    let objects = "org.freedesktop.DBus.ObjectManager".to_owned();
    calls.push((MANAGER_PATH, objects, "GetManagedObjects".to_owned(), Vec::new()));
    calls
}

/// The capabilities of a volume.
fn capabilities(access_mode: &str) -> Variant<'static> {
    vec![HashMap::from([("access-mode".to_owned(), text(access_mode))])].into()
}

fn good(method: &str, argument: &str, of: &str) -> Variant<'static> {
    match (method, argument) {
        ("Mount", "options") => dict(vec![("plugin", text("p")), ("external-id", text("theirs"))]),
        ("RegisterPlugin", "spec") => {
            dict(vec![("supervision", text("external")), ("socket", text("/nowhere/csi.sock"))])
        }
        // The plugin has no controller, which these calls would wait for.
        ("GetCapacity" | "ListSnapshots", "options") => {
            dict(vec![("deadline-usec", Variant::from(100_000u64))])
        }
        ("WaitForPlugin", "service") => text("node"),
        ("WaitForPlugin", "id") => text("p"),
        ("RegisterVolume", "spec") => dict(vec![
            ("plugin", text("p")),
            ("external-id", text("theirs")),
            ("capabilities", capabilities("single-node-writer")),
        ]),
        ("Unmount" | "OpenMount", "volume") => text("in-use"),
        ("Claim" | "Release" | "GetVolume", "volume") => text("kept"),
        ("Unmount" | "OpenMount" | "Claim" | "Release" | "GetVolume", "namespace") => text(NAMESPACE),
        ("Unmount" | "OpenMount" | "Release", "consumer") => text("job"),
        _ => value(of),
    }
}

/// csid with a mount and a claim of root's, and what is served.
async fn busy(w: &mut World) -> (Client, Vec<Member>) {
    let client = running(w).await;
    mounted(&client, "job", inline("in-use")).await;
    registered(&client, "kept", &[AccessMode::MultiNodeMultiWriter]).await;
    client.claim(NAMESPACE, "kept", "job", ClaimOptions::default()).await.unwrap();
    settled(&client).await;
    let root = raw::peer(ROOT, &w.socket()).await.unwrap();
    let mut served = Vec::new();
    for path in [MANAGER_PATH, PLUGIN_PATH] {
        served.extend(raw::members(&raw::introspect(&root, path).await.unwrap()));
    }
    (client, served)
}

/// Every call by a connection that may do nothing. Returns how many were refused by name, and how many are not served.
async fn all_refused(connection: &Connection, served: &[Member]) -> (usize, usize) {
    let (mut refused, mut unserved) = (0, 0);
    for (path, interface, name, arguments) in every_call() {
        let answer = call(connection, path, &interface, &name, arguments).await;
        let Err((error, text)) = answer else { panic!("{interface}.{name} was answered: {answer:?}") };
        let ours = interface.starts_with("org.csid1.");
        if ours && !served.iter().any(|m| m.interface == interface && m.name == name) {
            assert_eq!(error, UNKNOWN, "{interface}.{name}: {text}");
            unserved += 1;
        } else {
            assert_eq!(error, REFUSED, "{interface}.{name}: {text}");
            refused += 1;
        }
    }
    (refused, unserved)
}

async fn claims(client: &Client) -> Vec<String> {
    let claims = client.list_claims(ClaimFilter::default()).await.unwrap();
    claims.into_iter().map(|claim| format!("{} {}", claim.consumer, claim.state)).collect()
}

async fn nothing_happened(w: &mut World, client: &Client) {
    assert_eq!(w.plugin("p").volume_calls().len(), 2, "root's own mount, and nothing else");
    assert_eq!(client.list_mounts(Default::default()).await.unwrap().len(), 1);
    assert_eq!(client.list_plugins().await.unwrap().len(), 1);
    assert_eq!(client.list_volumes(VolumeFilter::default()).await.unwrap().len(), 1);
    assert_eq!(claims(client).await, ["job taken"]);
    assert_eq!(state(client, "in-use", "job").await, "mounted");
}

#[test]
fn nobody_cannot_use_the_private_socket() {
    world(async |w| {
        group_csid(w);
        let (client, served) = busy(w).await;
        let socket = w.socket();
        let mode = fs::metadata(&socket).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o660, "the shipped mode");
        assert!(raw::connect_as(NOBODY, &socket).is_err(), "nobody does not even get in");

        fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
        let nobody = raw::peer(NOBODY, &socket).await.unwrap();
        // Another connection: a stream that is not read would block its own.
        let listening = raw::peer(NOBODY, &socket).await.unwrap();
        let mut stream = MessageStream::from(&listening);
        let (refused, unserved) = all_refused(&nobody, &served).await;
        count("calls of nobody refused on the private socket", refused);
        count("members that are not served", unserved);
        nothing_happened(w, &client).await;
        // Peer and Introspectable tell nothing.
        raw::introspect(&nobody, MANAGER_PATH).await.expect("introspection is open");
        call(&nobody, MANAGER_PATH, "org.freedesktop.DBus.Peer", "Ping", Vec::new())
            .await
            .expect("so is Peer");
        // And no signal either: csid answers a call after root has the event, and no signal comes before the answer.
        let mut follower = client.follow(None).await.unwrap();
        for _ in 0..5 {
            let since = cursor(&client).await;
            unmount(&client, "in-use", "job").await.unwrap();
            mounted(&client, "job", inline("in-use")).await;
            let last = events(&client, since).await.last().expect("an event").sequence;
            let heard = async {
                while follower.cursor() < last {
                    follower.next().await.expect("an event for root");
                }
            };
            tokio::time::timeout(SOON, heard).await.expect("root has its events");
            let ping = Message::method_call(MANAGER_PATH, "Ping").interface("org.freedesktop.DBus.Peer");
            let ping = ping.destination(raw::NAME).build(&()).unwrap();
            let signals = signals_before_answer(&listening, &mut stream, &ping).await;
            assert_eq!(signals, 0, "nobody receives no signal");
        }
    });
}

/// Returns whether a message is a signal of csid's.
fn is_signal(message: &Message) -> bool {
    let header = message.header();
    let is_ours = header.path().is_some_and(|path| path.as_str().starts_with(MANAGER_PATH));
    is_ours && message.message_type() == Type::Signal
}

async fn next(stream: &mut MessageStream) -> Message {
    let next = tokio::time::timeout(SOON, stream.next()).await.expect("a message in time");
    next.expect("the connection stays").expect("a message")
}

/// Sends a call, and counts csid's signals that `stream` of that connection has before the answer.
async fn signals_before_answer(connection: &Connection, stream: &mut MessageStream, call: &Message) -> usize {
    connection.send(call).await.expect("a call");
    let serial = call.primary_header().serial_num();
    let mut signals = 0;
    loop {
        let message = next(stream).await;
        if message.header().reply_serial() == Some(serial) {
            return signals;
        }
        signals += usize::from(is_signal(&message));
    }
}

/// Returns the serials of csid's signals up to the event of an unmount.
async fn signals_until_unmount(stream: &mut MessageStream) -> Vec<NonZeroU32> {
    type Event = (u64, u64, String, String, HashMap<String, OwnedVariant>);
    let mut serials = Vec::new();
    loop {
        let message = next(stream).await;
        if is_signal(&message) {
            serials.push(message.primary_header().serial_num());
            if message.body().deserialize::<Event>().is_ok_and(|(_, _, kind, ..)| kind == "unmount") {
                return serials;
            }
        }
    }
}

/// Calls that need more than their method's action: their arguments name an inline volume, or what is root's.
const MORE: [(&str, &str); 4] = [
    ("Mount", "org.csid1.inline"),
    ("Unmount", "org.csid1.unmount-others"),
    ("Release", "org.csid1.unmount-others"),
    ("OpenMount", "root"),
];

/// Calls that are allowed and fail: their object does not exist.
const FAIL: [&str; 7] = [
    "Set",
    "CancelOperation",
    "GetVolumeStats",
    "Explain",
    "GetCapacity",
    "ListExternalVolumes",
    "ListSnapshots",
];

/// Makes every call as a member of group csid, who has what the contract says. Returns how many calls were answered and refused.
async fn as_member(connection: &Connection) -> (usize, usize) {
    let (mut answered, mut refused) = (0, 0);
    for (path, interface, name, arguments) in every_call() {
        let access = access::of(&interface, &name).unwrap_or_else(|| panic!("{interface}.{name}"));
        let more = MORE.iter().find(|(method, _)| *method == name);
        if let Some((_, more)) = more {
            assert!(access.split_once("; ").is_some_and(|(_, rest)| rest.contains(more)), "{name}: {access}");
        }
        let answer = call(connection, path, &interface, &name, arguments).await;
        if more.is_some() || !access::group_has(access::action(access)) {
            assert_eq!(answer.unwrap_err().0, REFUSED, "{name}");
            refused += 1;
        } else if FAIL.contains(&name.as_str()) {
            assert_ne!(answer.unwrap_err().0, REFUSED, "{name}");
        } else {
            answer.unwrap_or_else(|error| panic!("{name}: {error:?}"));
            answered += 1;
        }
    }
    (answered, refused)
}

#[test]
fn group_csid_has_the_rights_of_its_table() {
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Shipped).await;
        let (client, _) = busy(w).await;
        bus.has_csid().await;
        // As csid.socket has it.
        std::os::unix::fs::chown(w.socket(), None, Some(GROUP)).unwrap();
        let peer = raw::peer(MEMBER, &w.socket()).await.unwrap();
        let (may, may_not) = as_member(&peer).await;
        count("calls a member may make on the private socket", may);
        count("calls a member may not make", may_not);
        let on_bus = bus.connect(MEMBER).await;
        assert_eq!(as_member(&on_bus).await, (may, may_not), "the same on the bus without polkit");
        assert_eq!(state(&client, "in-use", "job").await, "mounted");
        // Two equal claims of a member are one claim, which the member may release.
        assert_eq!(claims(&client).await, ["job taken", "x taken"]);
        let own = || vec![text(NAMESPACE), text("kept"), text("x"), value("a{sv}")];
        call(&peer, MANAGER_PATH, MANAGER, "Release", own()).await.expect("its own");
        assert_eq!(claims(&client).await, ["job taken"]);
    });
}

#[test]
fn nobody_is_refused_on_a_bus_without_polkit() {
    world(async |w| {
        let bus = Bus::start(w, Policy::Everything).await;
        let (client, served) = busy(w).await;
        bus.has_csid().await;
        let nobody = bus.connect(NOBODY).await;
        let (refused, unserved) = all_refused(&nobody, &served).await;
        count("calls of nobody refused on an open bus without polkit", refused);
        count("members that are not served", unserved);
        nothing_happened(w, &client).await;
        let root = bus.connect(ROOT).await;
        call(&root, MANAGER_PATH, MANAGER, "ListPlugins", Vec::new()).await.expect("root may");
    });
}

#[test]
fn nobody_is_refused_where_polkit_does_not_say_yes() {
    world(async |w| {
        let bus = Bus::start(w, Policy::Everything).await;
        let polkit = Polkit::start(&bus, Verdict::No).await;
        let (client, served) = busy(w).await;
        bus.has_csid().await;
        let nobody = bus.connect(NOBODY).await;
        let name = nobody.unique_name().unwrap().to_string();
        for verdict in [Verdict::No, Verdict::Challenge, Verdict::Error, Verdict::Malformed] {
            polkit.says(verdict);
            polkit.asked();
            let (refused, _) = all_refused(&nobody, &served).await;
            let asked = polkit.asked();
            assert!(asked.len() >= refused, "{verdict:?}: asked {} times for {refused} calls", asked.len());
            for question in &asked {
                // Never a pid or a uid: the bus' own name for the caller.
                assert_eq!((question.kind.as_str(), question.keys), ("system-bus-name", 1), "{question:?}");
                assert_eq!(question.name, name, "the caller, not another name in the message");
                assert!(question.action.starts_with("org.csid1."), "{question:?}");
                assert_eq!(question.flags, 0, "nobody is asked in person unless the call allows it");
            }
            count(&format!("calls of nobody refused when polkit answers {verdict:?}"), refused);
        }
        nothing_happened(w, &client).await;
    });
}

#[test]
fn polkit_is_asked_for_the_tables_action() {
    world(async |w| {
        let bus = Bus::start(w, Policy::Everything).await;
        let polkit = Polkit::start(&bus, Verdict::No).await;
        let (_, served) = busy(w).await;
        bus.has_csid().await;
        let nobody = bus.connect(NOBODY).await;
        let mut looked = 0;
        for (path, interface, name, arguments) in every_call() {
            let standard = !interface.starts_with("org.csid1.");
            if !standard && !served.iter().any(|m| m.interface == interface && m.name == name) {
                continue;
            }
            polkit.asked();
            let _ = call(&nobody, path, &interface, &name, arguments).await;
            let asked: Vec<_> = polkit.asked().into_iter().map(|a| a.action).collect();
            let due = match name.as_str() {
                "Mount" | "Claim" | "OpenMount" => "mount",
                "Unmount" | "Release" | "CancelOperation" => "unmount",
                "RegisterVolume" | "CreateVolume" | "ValidateVolume" | "DeregisterVolume"
                | "DeleteVolume" | "ExpandVolume" | "CreateSnapshot" | "DeleteSnapshot" | "AttachVolume"
                | "DetachVolume" => "manage-volumes",
                "RegisterPlugin" | "UnregisterPlugin" | "Restart" | "AcceptNodeId" | "Drain" | "Upgrade" => {
                    "manage-plugins"
                }
                "OpenLog" => "plugin-log",
                "Exec" | "ResizeExec" | "WaitExec" => "plugin-exec",
                "Reload" | "Reconcile" | "AdoptMount" | "Join" => "manage",
                "Get"
                | "GetAll"
                | "Set"
                | "GetManagedObjects"
                | "ListPlugins"
                | "WaitForPlugin"
                | "HasMount"
                | "ListMounts"
                | "ListOperations"
                | "GetEvents"
                | "Probe"
                | "ListVolumes"
                | "GetVolume"
                | "ListClaims"
                | "GetStats"
                | "GetVolumeStats"
                | "Explain"
                | "GetCapacity"
                | "ListExternalVolumes"
                | "ListSnapshots" => "read",
                other => panic!("{other}: which action does it need?"),
            };
            assert!(!asked.is_empty(), "{name} asked nobody");
            // An inline mount may be asked for by its own action first.
            let inline = name == "Mount" && asked[0] == "org.csid1.inline";
            assert!(inline || asked[0] == format!("org.csid1.{due}"), "{name}: {asked:?}");
            looked += 1;
        }
        count("members and the action each asks for", looked);
    });
}

#[test]
fn root_only_options_are_refused_whatever_polkit_says() {
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Everything).await;
        let _polkit = Polkit::start(&bus, Verdict::Yes).await;
        let (client, _) = busy(w).await;
        bus.has_csid().await;
        let other = bus.connect(OTHER).await;
        let mut refused = 0;
        for (method, volume, consumer, option) in [
            ("Unmount", "in-use", Some("job"), "force-hung"),
            ("Unmount", "in-use", Some("job"), "forget"),
            ("Release", "kept", Some("job"), "forget"),
            ("DeregisterVolume", "kept", None, "forget"),
            ("DeregisterVolume", "none", None, "forget"),
            ("DetachVolume", "kept", Some("node-1"), "forget"),
        ] {
            let names = [Some(NAMESPACE), Some(volume), consumer].into_iter().flatten().map(text);
            let values = names.chain([dict(vec![(option, Variant::from(true))])]).collect();
            let (name, words) = call(&other, MANAGER_PATH, MANAGER, method, values).await.unwrap_err();
            assert_eq!(name, REFUSED, "{method} {volume} {option}: {words}");
            assert!(words.starts_with(&format!("{option} requires root")), "{method} {volume}: {words}");
            refused += 1;
        }
        count("calls with an option of root's refused though polkit allows", refused);
        nothing_happened(w, &client).await;
    });
}

#[test]
fn polkit_yes_gives_no_right_to_a_mount_of_another_uid() {
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Everything).await;
        let polkit = Polkit::start(&bus, Verdict::Yes).await;
        let (client, _) = busy(w).await;
        bus.has_csid().await;
        let other = bus.connect(OTHER).await;
        let options = || dict(vec![("plugin", text("p")), ("external-id", text("v"))]);
        let who = || vec![text(NAMESPACE), text("v"), text("theirs")];
        let mount = |options| who().into_iter().chain([options]).collect();
        call(&other, MANAGER_PATH, MANAGER, "Mount", mount(options())).await.expect("polkit says yes");
        let actions: Vec<_> = polkit.asked().into_iter().map(|a| a.action).collect();
        assert!(actions.contains(&"org.csid1.inline".to_owned()), "{actions:?}");
        assert_eq!(row(&client, "v", "theirs").await.unwrap().uid, OTHER.uid);
        call(&other, MANAGER_PATH, MANAGER, "Mount", mount(options())).await.expect("its own, again");

        // The same identity by another uid, root included, is not the same call.
        let third = bus.connect(NOBODY).await;
        let error = call(&third, MANAGER_PATH, MANAGER, "Mount", mount(options())).await.unwrap_err();
        assert_eq!(error.0, REFUSED, "{error:?}");
        // A target outside target-roots and a foreign credential are root's, whatever polkit says.
        for (key, word) in [("target", "/etc"), ("target", "/srv/x"), ("credential", "csid.other.x")] {
            let entries = vec![("plugin", text("p")), ("external-id", text("w")), (key, text(word))];
            let values = vec![text(NAMESPACE), text("w"), text("theirs"), dict(entries)];
            let error = call(&other, MANAGER_PATH, MANAGER, "Mount", values).await.unwrap_err();
            assert_eq!(error.0, REFUSED, "{key}={word}: {error:?}");
        }
        // Below target-roots the caller may name one.
        let target = w.path("targets/own");
        fs::create_dir(&target).unwrap();
        let own = text(target.to_str().unwrap());
        let entries = vec![("plugin", text("p")), ("external-id", text("w")), ("target", own)];
        let values = vec![text(NAMESPACE), text("w"), text("theirs"), dict(entries)];
        call(&other, MANAGER_PATH, MANAGER, "Mount", values).await.expect("a target below target-roots");
        assert_eq!(csid_tests::kernel::stacked(&target).unwrap(), 1);
        // The caller may not cover another user's directory there, and nothing is staged for it.
        let anothers = w.path("targets/anothers");
        fs::create_dir(&anothers).unwrap();
        std::os::unix::fs::chown(&anothers, Some(NOBODY.uid), None).unwrap();
        for target in [anothers.clone(), anothers.join("below")] {
            let _ = fs::create_dir(&target);
            let target = text(target.to_str().unwrap());
            let entries = vec![("plugin", text("p")), ("external-id", text("y")), ("target", target)];
            let values = vec![text(NAMESPACE), text("y"), text("theirs"), dict(entries)];
            let error = call(&other, MANAGER_PATH, MANAGER, "Mount", values).await.unwrap_err();
            assert_eq!(error.0, REFUSED, "{error:?}");
            assert!(error.1.contains("belongs to uid"), "{error:?}");
        }
        assert_eq!(w.plugin("p").count("NodeStageVolume", "y"), 0);
        assert!(row(&client, "y", "theirs").await.is_none());
        // Another's mount needs its own action.
        let unmount = |c: &str, v: &str| vec![text(NAMESPACE), text(v), text(c), value("a{sv}")];
        polkit.asked();
        polkit.says(Verdict::No);
        let values = unmount("job", "in-use");
        let error = call(&other, MANAGER_PATH, MANAGER, "Unmount", values).await.unwrap_err();
        assert_eq!(error.0, REFUSED);
        polkit.says(Verdict::Yes);
        polkit.asked();
        call(&other, MANAGER_PATH, MANAGER, "Unmount", unmount("job", "in-use")).await.expect("allowed");
        let actions: Vec<_> = polkit.asked().into_iter().map(|a| a.action).collect();
        assert!(actions.contains(&"org.csid1.unmount-others".to_owned()), "{actions:?}");
        // So does another's claim, and what is forced.
        let force = || dict(vec![("force", Variant::from(true))]);
        call(&other, MANAGER_PATH, MANAGER, "Claim", unmount("theirs", "kept"))
            .await
            .expect("polkit says yes");
        for (consumer, options) in [("job", value("a{sv}")), ("theirs", force())] {
            let values = || vec![text(NAMESPACE), text("kept"), text(consumer), options.clone()];
            polkit.says(Verdict::But("org.csid1.unmount-others"));
            let error = call(&other, MANAGER_PATH, MANAGER, "Release", values()).await.unwrap_err();
            assert_eq!(error.0, REFUSED, "{consumer}");
            polkit.says(Verdict::Yes);
            call(&other, MANAGER_PATH, MANAGER, "Release", values()).await.expect("allowed");
        }
        assert!(claims(&client).await.is_empty());
        for volume in ["v", "w"] {
            let values = unmount("theirs", volume);
            call(&other, MANAGER_PATH, MANAGER, "Unmount", values).await.expect("its own");
        }
        w.nothing_left(&client).await;
    });
}

/// A process that answered for a plugin that is away would be asked to unmount the mounts of others.
#[test]
fn plugin_in_use_is_not_registered_by_another_uid() {
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Everything).await;
        let _polkit = Polkit::start(&bus, Verdict::Yes).await;
        let client = running(w).await;
        bus.has_csid().await;
        let spec = |socket: &str| PluginSpec {
            supervision: Some(Supervision::External),
            socket: Some(socket.to_owned()),
            ..PluginSpec::default()
        };
        let socket = w.plugin("p").socket().to_string_lossy().into_owned();
        client.register_plugin("roots", spec(&socket)).await.unwrap();
        mount(&client, "job", of_plugin("roots", "v")).await.unwrap();
        let force = UnregisterOptions { force: Some(true), ..UnregisterOptions::default() };
        client.unregister_plugin("roots", force).await.unwrap();

        let other = bus.connect(OTHER).await;
        let register = async |id: &str| {
            let options = dict(vec![("supervision", text("external")), ("socket", text("/run/own.sock"))]);
            call(&other, MANAGER_PATH, MANAGER, "RegisterPlugin", vec![text(id), options]).await
        };
        assert_eq!(register("roots").await.unwrap_err().0, REFUSED);
        register("own").await.expect("nobody uses it");
        client.register_plugin("roots", spec(&socket)).await.expect("root may");
        unmount(&client, "v", "job").await.unwrap();
    });
}

/// Root is not bounded: a scheduler is root.
#[test]
fn operations_of_one_uid_are_bounded() {
    use csid_tests::script::{Act, Rule};
    world(async |w| {
        w.configure("operations-per-uid = 4");
        group_csid(w);
        let bus = Bus::start(w, Policy::Everything).await;
        let _polkit = Polkit::start(&bus, Verdict::Yes).await;
        let client = running(w).await;
        bus.has_csid().await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(60_000))]);
        let other = bus.connect(OTHER).await;
        let ask = |n: usize| {
            let other = other.clone();
            let volume = format!("v{n}");
            let entries = [("plugin", "p"), ("external-id", &volume), ("operation-id", &volume)];
            let options = dict(entries.into_iter().map(|(key, word)| (key, text(word))).collect());
            let values = vec![text(NAMESPACE), text(&volume), text("job"), options];
            tokio::spawn(async move { call(&other, MANAGER_PATH, MANAGER, "Mount", values).await })
        };
        let first: Vec<_> = (0..4).map(ask).collect();
        eventually("four are under way", async || client.list_operations().await.unwrap().len() == 4).await;
        let mut limited = 0;
        for n in 4..20 {
            let error = ask(n).await.unwrap().unwrap_err();
            assert_eq!(error.0, "org.csid1.Error.RateLimited", "{error:?}");
            limited += 1;
        }
        count("calls refused above the bound", limited);
        // Another uid's calls are not limited, and the limited uid may still list and cancel its own.
        call(&other, MANAGER_PATH, MANAGER, "ListOperations", Vec::new()).await.unwrap();
        for n in 0..4 {
            let values = vec![text(&format!("v{n}"))];
            call(&other, MANAGER_PATH, MANAGER, "CancelOperation", values).await.unwrap();
        }
        for call in first {
            assert_eq!(call.await.unwrap().unwrap_err().0, "org.csid1.Error.Cancelled");
        }
        w.plugin("p").honest();
        // Until csid has sent an answer its call counts, and it is read before csid knows that it was sent.
        eventually("there is room again", async || match ask(5).await.unwrap() {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.0, "org.csid1.Error.RateLimited", "{error:?}");
                false
            }
        })
        .await;
        unmount(&client, "v5", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A deadline ends the caller's waiting, not the work: a caller with TimedOut has not made room for another call.
#[test]
fn place_of_a_uid_is_taken_until_its_operation_ends() {
    use csid_tests::script::{Act, Rule};
    world(async |w| {
        w.configure("operations-per-uid = 1");
        group_csid(w);
        let bus = Bus::start(w, Policy::Everything).await;
        let _polkit = Polkit::start(&bus, Verdict::Yes).await;
        w.add_plugin_with("p", "rpc-deadline = \"2s\"").await;
        let client = w.start().await;
        healthy(&client, "p").await;
        bus.has_csid().await;
        let other = bus.connect(OTHER).await;
        let ask = async |member: &str, volume: &str, deadline: u64| {
            let mut entries = vec![("deadline-usec", Variant::from(deadline))];
            if member == "Mount" {
                entries.extend([("plugin", text("p")), ("external-id", text(volume))]);
            }
            let values = vec![text(NAMESPACE), text(volume), text("job"), dict(entries)];
            call(&other, MANAGER_PATH, MANAGER, member, values).await.map(drop).map_err(|error| error.0)
        };
        let failed = |name: &str| Err(format!("org.csid1.Error.{name}"));
        assert_eq!(ask("Mount", "kept", 60_000_000).await, Ok(()));
        let hang = |rpc| Rule::always(rpc, Act::Delay(3_600_000));
        let mut refused = 0;
        for (member, volume, rpcs) in [
            ("Mount", "v", vec!["NodeStageVolume", "NodeUnstageVolume"]),
            ("Unmount", "kept", vec!["NodeUnpublishVolume"]),
        ] {
            w.plugin("p").rules(rpcs.into_iter().map(hang));
            assert_eq!(ask(member, volume, 300_000).await, failed("TimedOut"), "{member}");
            let listed = client.list_operations().await.unwrap();
            assert!(
                listed.iter().any(|operation| operation.subject == format!("{NAMESPACE}/{volume}")),
                "what goes on is listed: {listed:?}"
            );
            // The plugin is still at it.
            for volume in ["v", "kept", "w"] {
                assert_eq!(
                    ask("Mount", volume, 300_000).await,
                    failed("RateLimited"),
                    "{member}, then {volume}"
                );
                refused += 1;
            }
            w.plugin("p").honest();
            eventually("there is room again", async || match ask("Mount", "w", 60_000_000).await {
                Ok(()) => true,
                refused => {
                    assert_eq!(refused, failed("RateLimited"));
                    false
                }
            })
            .await;
            assert_eq!(ask("Unmount", "w", 60_000_000).await, Ok(()));
        }
        assert_eq!(ask("Unmount", "kept", 60_000_000).await, Ok(()));
        count("calls refused while what had timed out went on", refused);
        w.nothing_left(&client).await;
    });
}

#[test]
fn operation_of_another_uid_is_not_cancelled() {
    use csid_tests::script::{Act, Rule};
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Everything).await;
        let client = running(w).await;
        bus.has_csid().await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(60_000))]);
        let asked = {
            let client = client.clone();
            tokio::spawn(async move {
                let options =
                    csid_client::MountOptions { operation_id: Some("op".to_owned()), ..inline("v") };
                mount(&client, "job", options).await
            })
        };
        eventually("it is under way", async || !client.list_operations().await.unwrap().is_empty()).await;
        let member = bus.connect(MEMBER).await;
        let error =
            call(&member, MANAGER_PATH, MANAGER, "CancelOperation", vec![text("op")]).await.unwrap_err();
        assert!([REFUSED, "org.csid1.Error.NotFound"].contains(&error.0.as_str()), "{error:?}");
        assert!(!asked.is_finished());
        client.cancel_operation("op").await.unwrap();
        assert!(asked.await.unwrap().is_err());
        w.nothing_left(&client).await;
    });
}

#[test]
fn signals_reach_root_and_the_group_alone() {
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Shipped).await;
        let client = running(w).await;
        bus.has_csid().await;
        let member = bus.connect(MEMBER).await;
        let mut listeners = Vec::new();
        for connection in [bus.connect(ROOT).await, member, bus.connect(NOBODY).await] {
            for rule in [
                "type='signal',sender='org.csid1'",
                "type='signal',path_namespace='/org/csid1'",
                "type='signal'",
            ] {
                let dbus = zbus::fdo::DBusProxy::new(&connection).await.unwrap();
                dbus.add_match_rule(rule.try_into().unwrap()).await.unwrap();
            }
            listeners.push((MessageStream::from(&connection), connection));
        }
        // Events, and properties that change.
        mounted(&client, "job", inline("v")).await;
        w.plugin("p").kill();
        eventually("its death is seen", async || !client.plugin("p").await.unwrap().healthy).await;
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        unmount(&client, "v", "job").await.unwrap();
        let [root, group, nobody] = &mut listeners[..] else { unreachable!() };
        let (root, group) =
            (signals_until_unmount(&mut root.0).await, signals_until_unmount(&mut group.0).await);
        count("signals root heard", root.len());
        // The group began to listen later.
        assert!(
            group.len() >= 4 && root.ends_with(&group),
            "events, and changed properties: {root:?} {group:?}"
        );
        // The bus has delivered the last of them, and afterwards it answers.
        let (stream, connection) = nobody;
        let id = Message::method_call("/org/freedesktop/DBus", "GetId").interface("org.freedesktop.DBus");
        let id = id.destination("org.freedesktop.DBus").build(&()).unwrap();
        let signals = signals_before_answer(connection, stream, &id).await;
        assert_eq!(signals, 0, "nobody receives no signal of csid's");
        // Calls reach csid, which refuses.
        let error = call(connection, MANAGER_PATH, MANAGER, "ListPlugins", Vec::new()).await.unwrap_err();
        assert_eq!(error.0, REFUSED);
    });
}

#[test]
fn calls_go_on_after_the_bus_returned() {
    world(async |w| {
        let bus = Bus::start(w, Policy::Everything).await;
        let client = running(w).await;
        bus.has_csid().await;
        drop(bus);
        mounted(&client, "job", inline("v")).await;
        fs::remove_file(w.path("bus")).unwrap();
        let bus = Bus::start(w, Policy::Everything).await;
        bus.has_csid().await;
        let root = bus.connect(ROOT).await;
        let values = vec![text(NAMESPACE), text("v"), text("job"), value("a{sv}")];
        call(&root, MANAGER_PATH, MANAGER, "Unmount", values).await.expect("by the new bus");
        w.nothing_left(&client).await;
    });
}
