//! Plugins as objects.

use std::collections::{BTreeMap, HashMap};

use zbus::{Connection, OwnedObjectPath, OwnedVariant, Variant};

use super::harness::{Options, World, call, connect, manager};
use super::members::contract_properties;
use super::signals::{listen, next};

const PLUGIN: &str = "org.csid1.Plugin";
const PATH: &str = "/org/csid1/plugin/my_2dplugin";

type Managed = HashMap<OwnedObjectPath, BTreeMap<String, BTreeMap<String, OwnedVariant>>>;

#[tokio::test(flavor = "multi_thread")]
async fn a_registered_plugin_is_an_object() {
    let world = World::new();
    let (socket, _serving) = world.listen();
    let client = connect(&socket).await;
    let mut signals = listen(&client).await;
    let spec =
        || Options::from([("supervision", "external".into()), ("socket", "/run/nothing/csi.sock".into())]);

    let gone = call(&client, PATH, PLUGIN, "Probe", &(Options::new(),)).await.unwrap_err();
    assert_eq!(gone.0, "org.freedesktop.DBus.Error.UnknownObject");
    let reply = manager(&client, "RegisterPlugin", &("my-plugin", spec())).await.unwrap();
    assert_eq!(reply.body().deserialize::<OwnedObjectPath>().unwrap().as_str(), PATH);
    manager(&client, "RegisterPlugin", &("my-plugin", spec())).await.expect("the same again is the same");

    let added = loop {
        let signal = next(&mut signals).await.expect("InterfacesAdded");
        if signal.header().member().unwrap().as_str() == "InterfacesAdded" {
            break signal;
        }
    };
    let (path, interfaces): (OwnedObjectPath, BTreeMap<String, BTreeMap<String, OwnedVariant>>) =
        added.body().deserialize().unwrap();
    assert_eq!(path.as_str(), PATH);
    assert_eq!(types(&interfaces[PLUGIN]), contract_properties(PLUGIN));

    let reply = call(&client, PATH, "org.freedesktop.DBus.Properties", "GetAll", &PLUGIN).await.unwrap();
    let properties: BTreeMap<String, OwnedVariant> = reply.body().deserialize().unwrap();
    assert_eq!(types(&properties), contract_properties(PLUGIN));
    assert_eq!(<&str>::try_from(&properties["Id"]).unwrap(), "my-plugin");

    let all =
        call(&client, "/org/csid1", "org.freedesktop.DBus.ObjectManager", "GetManagedObjects", &()).await;
    let all: Managed = all.unwrap().body().deserialize().unwrap();
    assert_eq!(all.keys().map(|path| path.as_str()).collect::<Vec<_>>(), [PATH]);

    let reply = manager(&client, "ListPlugins", &()).await.unwrap();
    type Row = (String, String, String, String, OwnedObjectPath);
    let rows: Vec<Row> = reply.body().deserialize().unwrap();
    assert_eq!((rows[0].0.as_str(), rows[0].3.as_str(), rows[0].4.as_str()), ("my-plugin", "external", PATH));

    let document =
        call(&client, "/org/csid1/plugin", "org.freedesktop.DBus.Introspectable", "Introspect", &()).await;
    let document: String = document.unwrap().body().deserialize().unwrap();
    assert!(document.contains("<node name=\"my_2dplugin\"/>"), "{document}");

    let soon = Options::from([("deadline-usec", 100_000u64.into())]);
    let late = manager(&client, "WaitForPlugin", &("my-plugin", "node", soon)).await.unwrap_err();
    assert_eq!(late.0, "org.csid1.Error.TimedOut", "{}", late.1);
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_for_an_absent_plugin_ends() {
    let world = World::new();
    world.config.send_modify(|config| {
        std::sync::Arc::make_mut(config).deadlines.operation = std::time::Duration::from_millis(100);
    });
    let (socket, _serving) = world.listen();
    let client = connect(&socket).await;
    let late = manager(&client, "WaitForPlugin", &("nope", "node", Options::new())).await.unwrap_err();
    assert_eq!(late.0, "org.csid1.Error.TimedOut", "{}", late.1);
}

/// A registered plugin without a listener at its socket.
async fn silent(client: &Connection) {
    let spec =
        Options::from([("supervision", "external".into()), ("socket", "/run/nothing/csi.sock".into())]);
    manager(client, "RegisterPlugin", &("my-plugin", spec)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn controller_calls_refuse_unknown_options() {
    let world = World::new();
    let (socket, _serving) = world.listen();
    let client = connect(&socket).await;
    silent(&client).await;
    let long = "x".repeat(4097);
    let ask = async |member: &str, options: Options| call(&client, PATH, PLUGIN, member, &(options,)).await;
    let delete = async |snapshot: &str, options: Options| {
        call(&client, PATH, PLUGIN, "DeleteSnapshot", &(snapshot, options)).await
    };
    let zone = |key: &str| BTreeMap::from([(key.to_owned(), "a".to_owned())]);
    let option = |key, value: Variant<'static>| Options::from([(key, value)]);
    let mut refused = vec![
        ("a long token", call(&client, PATH, PLUGIN, "ListExternalVolumes", &(long.as_str(), 0u32)).await),
        ("a long token", ask("ListSnapshots", option("token", long.clone().into())).await),
        ("max as t", ask("ListSnapshots", option("max", 1u64.into())).await),
        ("no capabilities", ask("GetCapacity", option("capabilities", no_maps())).await),
        ("an empty topology", ask("GetCapacity", option("topology", no_map())).await),
        ("a topology with an empty key", ask("GetCapacity", option("topology", zone("").into())).await),
        ("large parameters", ask("GetCapacity", option("parameters", zone(&long).into())).await),
        ("an empty snapshot", delete("", Options::new()).await),
        ("both kinds of secrets", delete("s", both()).await),
    ];
    for member in ["GetCapacity", "ListSnapshots"] {
        refused.push((member, ask(member, option("colour", "red".into())).await));
        refused.push((member, ask(member, option("operation-id", "a\nb".into())).await));
    }
    refused.push(("DeleteSnapshot", delete("s", option("max", 1u32.into())).await));
    for bad in ["", "a\nb", &long] {
        for key in ["snapshot", "volume", "credential"] {
            refused.push((key, ask("ListSnapshots", option(key, bad.to_owned().into())).await));
        }
        refused.push(("snapshot", delete(bad, Options::new()).await));
        refused.push(("credential", delete("s", option("credential", bad.to_owned().into())).await));
    }
    for (what, answer) in refused {
        let (name, text) = answer.unwrap_err();
        assert_eq!(name, "org.csid1.Error.InvalidArgument", "{what}: {text}");
    }
}

fn no_maps() -> Variant<'static> {
    Vec::<HashMap<String, Variant<'static>>>::new().into()
}

fn no_map() -> Variant<'static> {
    BTreeMap::<String, String>::new().into()
}

fn both() -> Options {
    let secrets = std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    Options::from([("secrets", zbus::Fd::from(secrets).into()), ("credential", "disk".into())])
}

#[tokio::test(flavor = "multi_thread")]
async fn absent_controller_is_awaited_until_the_deadline() {
    let world = World::new();
    let (socket, _serving) = world.listen();
    let client = connect(&socket).await;
    silent(&client).await;
    let soon = || Options::from([("deadline-usec", 100_000u64.into())]);
    for (member, answer) in [
        ("GetCapacity", call(&client, PATH, PLUGIN, "GetCapacity", &(soon(),)).await),
        ("ListSnapshots", call(&client, PATH, PLUGIN, "ListSnapshots", &(soon(),)).await),
        ("DeleteSnapshot", call(&client, PATH, PLUGIN, "DeleteSnapshot", &("s", soon())).await),
    ] {
        let (name, text) = answer.unwrap_err();
        assert_eq!(name, "org.csid1.Error.TimedOut", "{member}: {text}");
    }
    // Without one it is csid's own patience that ends.
    world.config.send_modify(|config| {
        std::sync::Arc::make_mut(config).deadlines.operation = std::time::Duration::from_millis(100);
    });
    let late = call(&client, PATH, PLUGIN, "ListExternalVolumes", &("", 0u32)).await.unwrap_err();
    assert_eq!(late.0, "org.csid1.Error.PluginUnavailable", "{}", late.1);
    let nobody = call(&client, "/org/csid1/plugin/none", PLUGIN, "ListExternalVolumes", &("", 0u32)).await;
    assert_eq!(nobody.unwrap_err().0, "org.freedesktop.DBus.Error.UnknownObject");
}

fn types(properties: &BTreeMap<String, OwnedVariant>) -> BTreeMap<String, String> {
    properties.iter().map(|(name, value)| (name.clone(), value.value_signature().to_string())).collect()
}
