//! Plugins as objects.

use std::collections::{BTreeMap, HashMap};

use zbus::{OwnedObjectPath, OwnedVariant};

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

    let told =
        call(&client, "/org/csid1/plugin", "org.freedesktop.DBus.Introspectable", "Introspect", &()).await;
    let told: String = told.unwrap().body().deserialize().unwrap();
    assert!(told.contains("<node name=\"my_2dplugin\"/>"), "{told}");

    let soon = Options::from([("deadline-usec", 100_000u64.into())]);
    let late = manager(&client, "WaitForPlugin", &("my-plugin", "node", soon)).await.unwrap_err();
    assert_eq!(late.0, "org.csid1.Error.TimedOut", "{}", late.1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_does_not_come_is_not_waited_for_for_ever() {
    let world = World::new();
    world.config.send_modify(|config| {
        std::sync::Arc::make_mut(config).deadlines.operation = std::time::Duration::from_millis(100);
    });
    let (socket, _serving) = world.listen();
    let client = connect(&socket).await;
    let late = manager(&client, "WaitForPlugin", &("nope", "node", Options::new())).await.unwrap_err();
    assert_eq!(late.0, "org.csid1.Error.TimedOut", "{}", late.1);
}

fn types(properties: &BTreeMap<String, OwnedVariant>) -> BTreeMap<String, String> {
    properties.iter().map(|(name, value)| (name.clone(), value.value_signature().to_string())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_yet_is_not_supported() {
    let world = World::new();
    let (socket, _serving) = world.listen();
    let client = connect(&socket).await;
    for key in ["unit", "profile", "propagation", "network"] {
        let spec = Options::from([("supervision", "external".into()), (key, "host".into())]);
        let (name, _) = manager(&client, "RegisterPlugin", &("p", spec)).await.unwrap_err();
        assert_eq!(name, "org.csid1.Error.NotSupported", "{key}");
    }
}
