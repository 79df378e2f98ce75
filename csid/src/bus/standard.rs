//! D-Bus' own interfaces: Properties and ObjectManager, which need the action `read`, and Peer and Introspectable, which
//! are open and tell nothing of what csid holds.

use std::collections::BTreeMap;

use zbus::names::InterfaceName;
use zbus::{Message, ObjectPath, Variant};

use super::caller::{Way, Who};
use super::dispatch::{Answer, Call, Failure, MANAGER, Map, Object, PLUGIN, Server, reply};
use super::{introspect, manager, plugin};

/// The properties of an interface of the object; the interfaces of D-Bus have none.
fn properties(call: &Call, interface: &str) -> Result<Map, Failure> {
    let map = match (&call.object, interface) {
        (Object::Manager, MANAGER) => manager::properties(&call.server.rooms),
        (Object::Plugin(id), PLUGIN) => plugin::properties(plugin::view(call, id)?),
        _ if InterfaceName::try_from(interface).is_err() => {
            return Err(Failure::Bus("InvalidArgs", "the first argument is no interface's name".to_owned()));
        }
        (object, _) if object.interfaces().contains(&interface) => Map::new(),
        _ => return Err(Failure::Bus("UnknownInterface", format!("no interface {interface} here"))),
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

/// No property can be set; the answer says which of the two it is: not there, or read-only.
pub(super) async fn set(call: Call) -> Answer {
    let (interface, name, _): (String, String, zbus::OwnedVariant) = call.arguments()?;
    match properties(&call, &interface)?.contains_key(name.as_str()) {
        true => Err(Failure::Bus("PropertyReadOnly", "csid's properties are read-only".to_owned())),
        false => Err(unknown_property()),
    }
}

/// What ObjectManager tells of a plugin.
pub(super) type Interfaces = BTreeMap<&'static str, Map>;

pub(super) async fn get_managed_objects(call: Call) -> Answer {
    let objects: BTreeMap<ObjectPath<'static>, Interfaces> = call
        .server
        .rooms
        .plugins
        .list()
        .into_iter()
        .map(|view| (plugin::path(&view.id), Interfaces::from([(PLUGIN, plugin::properties(view))])))
        .collect();
    call.reply(&(objects,))
}

/// Peer and Introspectable.
pub(super) async fn open(
    name: &str,
    object: &Object,
    server: &Server,
    who: &Who,
    message: &Message,
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
            reply(message, &introspect::document(object.interfaces(), &children))
        }
    }
}

/// The plugins are named to those who may read without polkit being asked; the others see an empty node.
async fn plugin_labels(server: &Server, who: &Who, message: &Message) -> Vec<String> {
    let reads = match who.caller(message).await {
        Ok(caller) => caller.is_root() || (caller.member && matches!(caller.way, Way::Socket)),
        Err(_) => false,
    };
    match reads {
        true => server.rooms.plugins.list().iter().map(|view| plugin::label(&view.id)).collect(),
        false => Vec::new(),
    }
}
