//! D-Bus' own interfaces. Properties and ObjectManager need the action `read`. Peer and Introspectable need none and show nothing of
//! csid's state.

use std::collections::BTreeMap;

use zbus::names::InterfaceName;
use zbus::{Message, ObjectPath, Variant};

use super::call::{Answer, Call, Server, reply};
use super::caller::{CallerSource, Way};
use super::contract::{CLUSTER, MANAGER, Map, Object, PLUGIN, plugin_label, plugin_path};
use super::failure::Failure;
use super::introspect::Interfaces;
use super::{cluster, manager, plugin};

/// Returns the properties of an interface of the object. D-Bus' own interfaces have none.
fn properties(call: &Call, interface: &str) -> Result<Map, Failure> {
    let map = match (&call.object, interface) {
        (Object::Manager, MANAGER) => manager::properties(&call.server.rooms),
        (Object::Manager, CLUSTER) => cluster::properties(&cluster::view(&call.server.rooms)),
        (Object::Plugin(id), PLUGIN) => plugin::properties(plugin::view(call, id)?),
        _ if InterfaceName::try_from(interface).is_err() => {
            return Err(Failure::Bus(
                "InvalidArgs",
                "the first argument is not an interface name".to_owned(),
            ));
        }
        (object, _) if object.interfaces().contains(&interface) => Map::new(),
        _ => {
            return Err(Failure::Bus("UnknownInterface", format!("the object has no interface {interface}")));
        }
    };
    Ok(map)
}

fn unknown_property() -> Failure {
    Failure::Bus("UnknownProperty", "the interface has no such property".to_owned())
}

pub(super) async fn get(call: Call) -> Answer {
    let (interface, name): (String, String) = call.arguments()?;
    let value: Variant<'static> =
        properties(&call, &interface)?.remove(name.as_str()).ok_or_else(unknown_property)?;
    call.reply(&(value,))
}

pub(super) async fn get_all(call: Call) -> Answer {
    let interface: String = call.arguments()?;
    call.reply(&(properties(&call, &interface)?,))
}

/// Refuses to set a property. The error says whether it is unknown or read-only.
pub(super) async fn set(call: Call) -> Answer {
    let (interface, name, _): (String, String, zbus::OwnedVariant) = call.arguments()?;
    match properties(&call, &interface)?.contains_key(name.as_str()) {
        true => Err(Failure::Bus("PropertyReadOnly", "csid's properties are read-only".to_owned())),
        false => Err(unknown_property()),
    }
}

/// The interfaces of a plugin's object, and their properties.
pub(super) type Properties = BTreeMap<&'static str, Map>;

pub(super) async fn get_managed_objects(call: Call) -> Answer {
    let objects: BTreeMap<ObjectPath<'static>, Properties> = call
        .server
        .rooms
        .plugins
        .list()
        .into_iter()
        .map(|view| (plugin_path(&view.id), Properties::from([(PLUGIN, plugin::properties(view))])))
        .collect();
    call.reply(&(objects,))
}

/// Answers a member of Peer or Introspectable.
pub(super) async fn open(
    name: &str,
    object: &Object,
    server: &Server,
    who: &CallerSource,
    message: &Message,
    interfaces: &Interfaces,
) -> Answer {
    if !message.body().is_empty() {
        return Err(Failure::Bus("InvalidArgs", format!("{name} takes no arguments")));
    }
    match name {
        "Ping" => reply(message, &()),
        "GetMachineId" => {
            let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
            match id.trim() {
                "" => Err(Failure::Bus("Failed", "this host has no machine id".to_owned())),
                id => reply(message, &id),
            }
        }
        _ => {
            let children = match object {
                Object::Node("") => plugin_labels(server, who, message).await,
                Object::Node(child) => vec![(*child).to_owned()],
                Object::Manager => vec!["plugin".to_owned()],
                Object::Plugin(_) => Vec::new(),
            };
            reply(message, &interfaces.document(object.interfaces(), &children))
        }
    }
}

/// Returns the names of the plugins' objects, for a caller that may read without a question to polkit. Other callers get no names.
async fn plugin_labels(server: &Server, who: &CallerSource, message: &Message) -> Vec<String> {
    let reads = match who.caller(message).await {
        Ok(caller) => caller.is_root() || (caller.member && matches!(caller.way, Way::Socket)),
        Err(_) => false,
    };
    match reads {
        true => server.rooms.plugins.list().iter().map(|view| plugin_label(&view.id)).collect(),
        false => Vec::new(),
    }
}
