//! The served members, and the errors of all other calls.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use zbus::{OwnedVariant, Variant};

use super::harness::{MANAGER, Options, World, call, connect, manager, properties};
use crate::bus::State;
use crate::bus::dispatch::{MEMBERS, OPEN};

const DBUS: &str = "org.freedesktop.DBus.Error.";
const OURS: &str = "org.csid1.Error.";

#[tokio::test(flavor = "multi_thread")]
async fn unserved_members_are_unknown() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    for (object, interface, member, error) in [
        ("/org/csid1", MANAGER, "Nonsense", "UnknownMethod"),
        ("/org/csid1/plugin/x", "org.csid1.Plugin", "Nonsense", "UnknownMethod"),
        ("/org/csid1", "org.csid1.Plugin", "Probe", "UnknownInterface"),
        ("/org/csid1", "com.example", "Mount", "UnknownInterface"),
        ("/org/csid1/plugin/x", MANAGER, "Mount", "UnknownInterface"),
        ("/org", MANAGER, "Mount", "UnknownInterface"),
        ("/org/csid1/volume", MANAGER, "Mount", "UnknownObject"),
        ("/com", "org.freedesktop.DBus.Introspectable", "Introspect", "UnknownObject"),
    ] {
        let (name, _) = call(&client, object, interface, member, &()).await.unwrap_err();
        assert_eq!(name, format!("{DBUS}{error}"), "{object} {interface}.{member}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn arguments_of_the_wrong_type_are_invalid_args() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    for member in MEMBERS.iter().filter(|member| member.method.interface == MANAGER) {
        let (name, text) = manager(&client, member.method.name, &(1u8, 2.5f64)).await.unwrap_err();
        assert_eq!(name, format!("{DBUS}InvalidArgs"), "{}: {text}", member.method.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_options_are_refused_with_details() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    let mount =
        async |options: Options| manager(&client, "Mount", &("ns", "vol", "job", options)).await.unwrap_err();

    let (name, text) = mount(Options::from([("colour", "red".into())])).await;
    assert_eq!(name, format!("{OURS}InvalidArgument"));
    assert!(text.contains("\"colour\"") && text.contains("external-id"), "{text}");

    let (name, text) = mount(Options::from([("read-only", "yes".into())])).await;
    assert_eq!(
        (name, text.as_str()),
        (format!("{OURS}InvalidArgument"), "option read-only is of type s; it must be b")
    );

    let context = BTreeMap::from([("k".to_owned(), "v".to_owned())]);
    let (name, text) = mount(Options::from([("volume-context", context.into())])).await;
    assert_eq!(name, format!("{OURS}InvalidArgument"));
    assert!(text.contains("volume-context is for an inline volume only"), "{text}");

    let (name, text) = mount(Options::new()).await;
    assert_eq!(name, format!("{OURS}NotFound"));
    assert_eq!(text, "volume \"vol\" of namespace \"ns\" is not registered");

    let body = ("ns", "vol", "job", Options::new());
    let reply = client.call_method(Some("org.csid1"), "/org/csid1", Some(MANAGER), "Mount", &body).await;
    let Err(zbus::Error::MethodError(_, _, reply)) = reply else { panic!("an error") };
    assert_eq!(reply.body().signature().to_string_no_parens(), "sa{sv}");
    let (_, details): (String, BTreeMap<String, OwnedVariant>) = reply.body().deserialize().unwrap();
    assert_eq!(<&str>::try_from(&details["namespace"]).unwrap(), "ns");
    assert!(!bool::try_from(&details["retryable"]).unwrap());
}

fn capabilities() -> Variant<'static> {
    vec![HashMap::from([("access-mode".to_owned(), Variant::from("single-node-writer"))])].into()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_string_argument_is_limited() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    let long = "x".repeat(4097);
    let none = Options::new;
    for bad in ["a\nb", "\u{1}", "\u{9f}", long.as_str(), ""] {
        let own = bad.to_owned();
        let inline = |key: &'static str| {
            let mut options = Options::from([("plugin", "local".into()), ("external-id", "v".into())]);
            options.insert(key, own.clone().into());
            options
        };
        let option = |key: &'static str| Options::from([(key, own.clone().into())]);
        // The empty namespace is `default`.
        let namespace = if bad.is_empty() { "a\n" } else { bad };
        let mut refused = vec![
            ("Mount namespace", manager(&client, "Mount", &(namespace, "v", "c", none())).await),
            ("Mount volume", manager(&client, "Mount", &("n", bad, "c", none())).await),
            ("Mount consumer", manager(&client, "Mount", &("n", "v", bad, none())).await),
            ("Unmount namespace", manager(&client, "Unmount", &(namespace, "v", "c", none())).await),
            ("Unmount volume", manager(&client, "Unmount", &("n", bad, "c", none())).await),
            ("Unmount consumer", manager(&client, "Unmount", &("n", "v", bad, none())).await),
            ("HasMount", manager(&client, "HasMount", &(bad,)).await),
            ("RegisterPlugin", manager(&client, "RegisterPlugin", &(bad, none())).await),
            ("UnregisterPlugin", manager(&client, "UnregisterPlugin", &(bad, none())).await),
            ("WaitForPlugin id", manager(&client, "WaitForPlugin", &(bad, "node", none())).await),
            ("WaitForPlugin service", manager(&client, "WaitForPlugin", &("local", bad, none())).await),
            ("CancelOperation", manager(&client, "CancelOperation", &(bad,)).await),
            ("GetVolume namespace", manager(&client, "GetVolume", &(namespace, "v")).await),
            ("GetVolume volume", manager(&client, "GetVolume", &("n", bad)).await),
            ("Reload", manager(&client, "Reload", &(option("operation-id"),)).await),
            ("Reconcile", manager(&client, "Reconcile", &(option("operation-id"),)).await),
        ];
        for member in [
            "RegisterVolume",
            "CreateVolume",
            "ValidateVolume",
            "DeregisterVolume",
            "DeleteVolume",
            "GetVolumeStats",
        ] {
            refused.push((member, manager(&client, member, &(namespace, "v", none())).await));
            refused.push((member, manager(&client, member, &("n", bad, none())).await));
            let options = option("operation-id");
            refused.push((member, manager(&client, member, &("n", "v", options)).await));
        }
        for member in ["CreateSnapshot", "AttachVolume", "DetachVolume", "Claim", "Release"] {
            refused.push((member, manager(&client, member, &(namespace, "v", "c", none())).await));
            refused.push((member, manager(&client, member, &("n", bad, "c", none())).await));
            refused.push((member, manager(&client, member, &("n", "v", bad, none())).await));
            let options = option("operation-id");
            refused.push((member, manager(&client, member, &("n", "v", "c", options)).await));
        }
        for (namespace, volume) in [(namespace, "v"), ("n", bad)] {
            let body = (namespace, volume, 1u64, 0u64, none());
            refused.push(("ExpandVolume", manager(&client, "ExpandVolume", &body).await));
        }
        for key in ["mode", "access-mode", "attachment-mode", "node", "credential"] {
            refused.push((key, manager(&client, "Claim", &("n", "v", "c", option(key))).await));
        }
        refused.push(("node", manager(&client, "Release", &("n", "v", "c", option("node"))).await));
        for key in ["namespace", "plugin", "node"] {
            if key == "namespace" && bad.is_empty() {
                continue;
            }
            refused.push((key, manager(&client, "ListVolumes", &(option(key),)).await));
        }
        for key in ["namespace", "volume", "consumer", "node"] {
            if key == "namespace" && bad.is_empty() {
                continue;
            }
            refused.push((key, manager(&client, "ListClaims", &(option(key),)).await));
        }
        for (member, keys) in [
            ("RegisterVolume", &["plugin", "external-id", "name", "heal", "credential"][..]),
            ("CreateVolume", &["plugin", "name", "heal", "credential", "clone", "snapshot"]),
        ] {
            for key in keys {
                let mut spec = Options::from([("plugin", "local".into()), ("capabilities", capabilities())]);
                if member == "RegisterVolume" {
                    spec.insert("external-id", "v".into());
                }
                spec.insert(key, own.clone().into());
                refused.push((key, manager(&client, member, &("n", "v", spec)).await));
            }
        }
        for key in [
            "plugin",
            "external-id",
            "target",
            "access-mode",
            "attachment-mode",
            "propagation",
            "restore",
            "operation-id",
            "credential",
        ] {
            refused.push((key, manager(&client, "Mount", &("n", "v", "c", inline(key))).await));
        }
        for key in ["namespace", "volume", "consumer", "plugin", "state"] {
            if key == "namespace" && bad.is_empty() {
                continue;
            }
            refused.push((key, manager(&client, "ListMounts", &(option(key),)).await));
        }
        for key in ["supervision", "socket", "instance", "plugin-root", "plugin-view", "log"] {
            let mut spec =
                Options::from([("supervision", "external".into()), ("socket", "/run/x.sock".into())]);
            spec.insert(key, own.clone().into());
            refused.push((key, manager(&client, "RegisterPlugin", &("p", spec)).await));
        }
        if !bad.is_empty() {
            for key in ["tag", "fs-type", "mount-group"] {
                refused.push((key, manager(&client, "Mount", &("n", "v", "c", inline(key))).await));
            }
            refused.push(("tag", manager(&client, "Unmount", &("n", "v", "c", option("tag"))).await));
            refused.push(("tag", manager(&client, "ListMounts", &(option("tag"),)).await));
            let mut flags = inline("plugin");
            flags.insert("plugin", "local".into());
            flags.insert("mount-flags", vec![own.clone()].into());
            refused.push(("mount-flags", manager(&client, "Mount", &("n", "v", "c", flags)).await));
            for key in ["argv", "credentials"] {
                let mut spec = Options::from([("supervision", "managed".into())]);
                spec.insert(key, vec![own.clone()].into());
                refused.push((key, manager(&client, "RegisterPlugin", &("p", spec)).await));
            }
        }
        for (what, answer) in refused {
            let (name, text) = answer.unwrap_err();
            assert_eq!(name, format!("{OURS}InvalidArgument"), "{what} with {bad:.20?}: {text}");
            assert!(text.len() < 500 && !text.chars().any(char::is_control), "{what}: {text:?}");
        }
    }
    assert!(world.rooms.store.mounts(Default::default()).await.unwrap().is_empty(), "nothing was changed");
}

#[tokio::test(flavor = "multi_thread")]
async fn manager_properties_have_contract_types() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    let properties = properties(&client).await;
    let types: BTreeMap<_, _> =
        properties.iter().map(|(name, value)| (name.as_str(), value.value_signature().to_string())).collect();
    assert_eq!(types, contract_properties(MANAGER).iter().map(|(n, t)| (n.as_str(), t.clone())).collect());
    assert_eq!(<&str>::try_from(&properties["State"]).unwrap(), "ready");

    let body = (MANAGER, "State", Variant::new("x"));
    let set = call(&client, "/org/csid1", "org.freedesktop.DBus.Properties", "Set", &body).await;
    assert_eq!(set.unwrap_err().0, format!("{DBUS}PropertyReadOnly"));
    let get = call(&client, "/org/csid1", "org.freedesktop.DBus.Properties", "Get", &(MANAGER, "Nonsense"));
    assert_eq!(get.await.unwrap_err().0, format!("{DBUS}UnknownProperty"));
}

#[tokio::test(flavor = "multi_thread")]
async fn host_alone_has_the_clusters_properties() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    const CLUSTER: &str = "org.csid1.Cluster";
    let reply = call(&client, "/org/csid1", "org.freedesktop.DBus.Properties", "GetAll", &(CLUSTER,)).await;
    let properties: HashMap<String, OwnedVariant> = reply.unwrap().body().deserialize().unwrap();
    let types: BTreeMap<_, _> =
        properties.iter().map(|(name, value)| (name.clone(), value.value_signature().to_string())).collect();
    assert_eq!(types, contract_properties(CLUSTER));
    assert_eq!(<&str>::try_from(&properties["State"]).unwrap(), "alone");
    for import in [false, true] {
        let options = Options::from([("import", import.into())]);
        let (name, text) = call(&client, "/org/csid1", CLUSTER, "Join", &(options,)).await.unwrap_err();
        assert!(name.ends_with(".NotSupported") && text.contains("no cluster"), "{name}: {text}");
    }
    let body = (CLUSTER, "State", Variant::new("x"));
    let set = call(&client, "/org/csid1", "org.freedesktop.DBus.Properties", "Set", &body).await;
    assert_eq!(set.unwrap_err().0, format!("{DBUS}PropertyReadOnly"));
}

/// Interface, member, its kind and arguments: (name, type, direction).
pub type Shape = BTreeMap<(String, String), (String, Vec<[String; 3]>)>;

/// The members of a document, by an XML reader of the test's own.
pub fn shape(xml: &str) -> Shape {
    let mut shape = Shape::new();
    let (mut interface, mut member) = (String::new(), String::new());
    let mut rest = xml;
    while let Some(place) = rest.find('<') {
        rest = &rest[place..];
        if rest.starts_with("<!--") {
            rest = rest.split_once("-->").unwrap().1;
            continue;
        }
        let end = rest.find('>').unwrap();
        let element = &rest[1..end];
        let attribute = |name: &str| {
            let value = element.split(&format!(" {name}=\"")).nth(1);
            value.map(|text| text.split('"').next().unwrap().to_owned()).unwrap_or_default()
        };
        match element.split([' ', '/']).next().unwrap() {
            "interface" => interface = attribute("name"),
            kind @ ("method" | "signal" | "property") => {
                member = attribute("name");
                let own = if kind == "property" {
                    vec![[attribute("access"), attribute("type"), String::new()]]
                } else {
                    Vec::new()
                };
                shape.insert((interface.clone(), member.clone()), (kind.to_owned(), own));
            }
            "arg" => {
                let entry = shape.get_mut(&(interface.clone(), member.clone())).unwrap();
                entry.1.push([attribute("name"), attribute("type"), attribute("direction")]);
            }
            _ => {}
        }
        rest = &rest[end..];
    }
    shape
}

pub fn contract_properties(of: &str) -> BTreeMap<String, String> {
    let shape = shape(csi_proto::DBUS_INTERFACE_XML);
    shape
        .into_iter()
        .filter(|((interface, _), (kind, _))| interface == of && kind == "property")
        .map(|((_, name), (_, own))| (name, own[0][1].clone()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn introspection_has_the_served_part_of_the_contract() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    let contract = shape(csi_proto::DBUS_INTERFACE_XML);
    let mut introspected = Shape::new();
    for object in ["/org/csid1", "/org/csid1/plugin/any"] {
        let reply =
            call(&client, object, "org.freedesktop.DBus.Introspectable", "Introspect", &()).await.unwrap();
        introspected.extend(shape(reply.body().deserialize().unwrap()));
    }
    let ours: Shape = introspected
        .iter()
        .filter(|((interface, _), _)| interface.starts_with("org.csid1."))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    for (member, what) in &ours {
        assert_eq!(contract.get(member), Some(what), "{member:?}");
    }
    for ((interface, member), (kind, args)) in &contract {
        let served = MEMBERS
            .iter()
            .find(|served| served.method.interface == interface && served.method.name == member);
        let is_introspected = ours.contains_key(&(interface.clone(), member.clone()));
        assert_eq!(is_introspected, kind != "method" || served.is_some(), "{interface}.{member}");
        if let Some(served) = served {
            let takes: String = args.iter().filter(|arg| arg[2] == "in").map(|arg| arg[1].as_str()).collect();
            assert_eq!(served.method.takes, takes, "{interface}.{member}");
        }
    }
    // Introspection has every served member, of D-Bus' own interfaces too, and no other.
    let methods = |shape: &Shape| -> BTreeSet<(String, String)> {
        shape.iter().filter(|(_, (kind, _))| kind == "method").map(|(key, _)| key.clone()).collect()
    };
    let served = MEMBERS
        .iter()
        .map(|member| (member.method.interface, member.method.name))
        .chain(OPEN.iter().copied());
    let served: BTreeSet<_> = served.map(|(a, b)| (a.to_owned(), b.to_owned())).collect();
    assert_eq!(methods(&introspected), served);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tree_can_be_walked() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    for (object, child) in [
        ("/", Some("org")),
        ("/org", Some("csid1")),
        ("/org/csid1", Some("plugin")),
        ("/org/csid1/plugin", None),
    ] {
        let reply =
            call(&client, object, "org.freedesktop.DBus.Introspectable", "Introspect", &()).await.unwrap();
        let body = reply.body();
        let xml: &str = body.deserialize().unwrap();
        let children: Vec<&str> =
            xml.split("<node name=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
        assert_eq!(children, Vec::from_iter(child), "{object}");
    }
    call(&client, "/org/csid1", "org.freedesktop.DBus.Peer", "Ping", &()).await.unwrap();
    // A message may leave the interface out.
    let reply =
        client.call_method(None::<&str>, "/org/csid1", None::<&str>, "ListPlugins", &()).await.unwrap();
    assert_eq!(reply.body().signature().to_string(), "a(sssso)");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_have_the_contracts_types() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    let none = Options::new;
    for (member, reply) in [
        ("ListPlugins", manager(&client, "ListPlugins", &()).await),
        ("ListOperations", manager(&client, "ListOperations", &()).await),
        ("GetEvents", manager(&client, "GetEvents", &(0u64, 10u32)).await),
        ("ListVolumes", manager(&client, "ListVolumes", &(none(),)).await),
        ("ListClaims", manager(&client, "ListClaims", &(none(),)).await),
        ("Release", manager(&client, "Release", &("ns", "v", "job", none())).await),
        ("DeleteVolume", manager(&client, "DeleteVolume", &("ns", "v", none())).await),
        ("DeregisterVolume", manager(&client, "DeregisterVolume", &("ns", "v", none())).await),
        ("DetachVolume", manager(&client, "DetachVolume", &("ns", "v", "node", none())).await),
        ("Reload", manager(&client, "Reload", &(none(),)).await),
    ] {
        let shape = shape(csi_proto::DBUS_INTERFACE_XML);
        let (_, args) = &shape[&(MANAGER.to_owned(), member.to_owned())];
        let out: String = args.iter().filter(|arg| arg[2] == "out").map(|arg| arg[1].as_str()).collect();
        let reply = reply.unwrap_or_else(|error| panic!("{member}: {error:?}"));
        assert_eq!(reply.body().signature().to_string_no_parens(), out, "{member}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn serving_stops_with_the_daemon() {
    let world = World::new();
    let (path, serving) = world.listen();
    let client = connect(&path).await;
    properties(&client).await;
    world.state.send(State::Stopping).unwrap();
    let ended = tokio::time::timeout(std::time::Duration::from_secs(3), serving).await;
    ended.expect("within 3 s").unwrap().unwrap();
    client.closed().await;
}
