//! The one way in for a call: which member is meant, whether this caller may, whether he has too many under way, and only
//! then what he sent. What is not in [`MEMBERS`] or [`OPEN`] is not served.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::error;
use zbus::message::Flags;
use zbus::{DynamicType, Message, Type, Variant};

use super::authorise::{Action, Authoriser, Permit};
use super::caller::{Caller, Way, Who};
use super::limits::{Class, Slot};
use super::options::Options;
use super::{Rooms, claims, exec, inventory, manager, mounts, plugin, standard, upgrade, volumes};
use crate::error::{Details, Error, Kind};
use crate::volume::Wait;

/// A map of the contract.
pub(super) type Map = BTreeMap<&'static str, Variant<'static>>;

pub(super) const PATH: &str = "/org/csid1";
pub(super) const PLUGINS: &str = "/org/csid1/plugin";
pub(super) const MANAGER: &str = "org.csid1.Manager";
pub(super) const PLUGIN: &str = "org.csid1.Plugin";
pub(super) const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
pub(super) const OBJECT_MANAGER: &str = "org.freedesktop.DBus.ObjectManager";
pub(super) const INTROSPECTABLE: &str = "org.freedesktop.DBus.Introspectable";
pub(super) const PEER: &str = "org.freedesktop.DBus.Peer";

/// What all arguments of a call may take together. The bus would let 32 MiB through.
const MAX_BYTES: usize = 64 * 1024;

/// The rooms, and who may go in by the way the caller came.
pub(super) struct Server {
    pub rooms: Rooms,
    pub authoriser: Authoriser,
}

/// One authorised call.
pub(super) struct Call {
    pub server: Arc<Server>,
    pub permit: Permit,
    pub object: Object,
    pub message: Message,
    pub arrived: Instant,
    /// For the work that goes on when the call has been answered.
    pub slot: Slot,
}

/// Why there is no answer: an error of the contract, or one of D-Bus' own (its last name, and a message).
pub(super) enum Failure {
    Ours(Error),
    Bus(&'static str, String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Ours(error)
    }
}

pub(super) type Answer = Result<Message, Failure>;

/// A member that is served, what it takes, and the action it needs (at least: arguments may ask for more).
pub(super) struct Member {
    pub interface: &'static str,
    pub name: &'static str,
    pub takes: &'static str,
    action: Action,
    class: Class,
    handler: fn(Call) -> BoxFuture<'static, Answer>,
}

macro_rules! members {
    ($($interface:ident.$name:ident($takes:literal): $action:ident, $class:ident => $handler:path;)*) => {
        &[$(Member {
            interface: $interface,
            name: stringify!($name),
            takes: $takes,
            action: Action::$action,
            class: Class::$class,
            handler: |call| Box::pin($handler(call)),
        }),*]
    };
}

pub(super) static MEMBERS: &[Member] = members! {
    MANAGER.Mount("sssa{sv}"): Mount, Operation => mounts::mount;
    MANAGER.Unmount("sssa{sv}"): Unmount, Operation => mounts::unmount;
    MANAGER.OpenMount("sssa{sv}"): Mount, Operation => mounts::open_mount;
    MANAGER.HasMount("s"): Read, Short => mounts::has_mount;
    MANAGER.ListMounts("a{sv}"): Read, Survey => mounts::list_mounts;
    MANAGER.Reconcile("a{sv}"): Manage, Survey => mounts::reconcile;
    MANAGER.RegisterPlugin("sa{sv}"): ManagePlugins, Operation => manager::register_plugin;
    MANAGER.UnregisterPlugin("sa{sv}"): ManagePlugins, Operation => manager::unregister_plugin;
    MANAGER.ListPlugins(""): Read, Short => manager::list_plugins;
    MANAGER.WaitForPlugin("ssa{sv}"): Read, Operation => manager::wait_for_plugin;
    MANAGER.RegisterVolume("ssa{sv}"): ManageVolumes, Operation => volumes::register_volume;
    MANAGER.CreateVolume("ssa{sv}"): ManageVolumes, Operation => volumes::create_volume;
    MANAGER.ListVolumes("a{sv}"): Read, Survey => volumes::list_volumes;
    MANAGER.GetVolume("ss"): Read, Short => volumes::get_volume;
    MANAGER.ValidateVolume("ssa{sv}"): ManageVolumes, Operation => volumes::validate_volume;
    MANAGER.DeregisterVolume("ssa{sv}"): ManageVolumes, Operation => volumes::deregister_volume;
    MANAGER.DeleteVolume("ssa{sv}"): ManageVolumes, Operation => volumes::delete_volume;
    MANAGER.ExpandVolume("sstta{sv}"): ManageVolumes, Operation => volumes::expand_volume;
    MANAGER.CreateSnapshot("sssa{sv}"): ManageVolumes, Operation => volumes::create_snapshot;
    MANAGER.GetVolumeStats("ssa{sv}"): Read, Operation => volumes::get_volume_stats;
    MANAGER.AttachVolume("sssa{sv}"): ManageVolumes, Operation => volumes::attach_volume;
    MANAGER.DetachVolume("sssa{sv}"): ManageVolumes, Operation => volumes::detach_volume;
    MANAGER.Explain("ssa{sv}"): Read, Operation => volumes::explain;
    MANAGER.Claim("sssa{sv}"): Mount, Operation => claims::claim;
    MANAGER.Release("sssa{sv}"): Unmount, Operation => claims::release;
    MANAGER.ListClaims("a{sv}"): Read, Survey => claims::list_claims;
    MANAGER.ListOperations(""): Read, Short => manager::list_operations;
    MANAGER.CancelOperation("s"): Unmount, Short => manager::cancel_operation;
    MANAGER.Reload("a{sv}"): Manage, Operation => manager::reload;
    MANAGER.GetEvents("tu"): Read, Survey => manager::get_events;
    PLUGIN.Probe("a{sv}"): Read, Operation => plugin::probe;
    PLUGIN.GetStats(""): Read, Operation => plugin::get_stats;
    PLUGIN.Restart("a{sv}"): ManagePlugins, Operation => plugin::restart;
    PLUGIN.AcceptNodeId("sa{sv}"): ManagePlugins, Operation => plugin::accept_node_id;
    PLUGIN.Drain("a{sv}"): ManagePlugins, Operation => upgrade::drain;
    PLUGIN.Upgrade("a{sv}a{sv}"): ManagePlugins, Operation => upgrade::upgrade;
    PLUGIN.OpenLog("a{sv}"): PluginExec, Operation => plugin::open_log;
    PLUGIN.Exec("asa{sv}"): PluginExec, Operation => exec::exec;
    PLUGIN.ResizeExec("sqq"): PluginExec, Short => exec::resize_exec;
    PLUGIN.WaitExec("sa{sv}"): PluginExec, Operation => exec::wait_exec;
    PLUGIN.GetCapacity("a{sv}"): Read, Operation => inventory::get_capacity;
    PLUGIN.ListExternalVolumes("su"): Read, Operation => inventory::list_external_volumes;
    PLUGIN.ListSnapshots("a{sv}"): Read, Operation => inventory::list_snapshots;
    PLUGIN.DeleteSnapshot("sa{sv}"): ManageVolumes, Operation => inventory::delete_snapshot;
    PROPERTIES.Get("ss"): Read, Short => standard::get;
    PROPERTIES.GetAll("s"): Read, Short => standard::get_all;
    PROPERTIES.Set("ssv"): Read, Short => standard::set;
    OBJECT_MANAGER.GetManagedObjects(""): Read, Short => standard::get_managed_objects;
};

/// Open to everybody who can send a message; they tell nothing of what csid holds.
pub(super) static OPEN: &[(&str, &str)] =
    &[(PEER, "Ping"), (PEER, "GetMachineId"), (INTROSPECTABLE, "Introspect")];

/// What stands at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Object {
    /// A node that only has children.
    Node(&'static str),
    Manager,
    /// A plugin's id; whether there is one is not said before the caller may read.
    Plugin(String),
}

impl Object {
    fn at(path: &str) -> Option<Object> {
        match path {
            "/" => Some(Object::Node("org")),
            "/org" => Some(Object::Node("csid1")),
            PATH => Some(Object::Manager),
            PLUGINS => Some(Object::Node("")),
            _ => {
                let label = path.strip_prefix(PLUGINS)?.strip_prefix('/')?;
                plugin::id_of_label(label).map(Object::Plugin)
            }
        }
    }

    pub fn interfaces(&self) -> &'static [&'static str] {
        match self {
            Object::Node(_) => &[PEER, INTROSPECTABLE],
            Object::Manager => &[MANAGER, PROPERTIES, OBJECT_MANAGER, PEER, INTROSPECTABLE],
            Object::Plugin(_) => &[PLUGIN, PROPERTIES, PEER, INTROSPECTABLE],
        }
    }
}

enum Found {
    Open(&'static str),
    Member(&'static Member),
}

/// The member that a message names, or why it names none.
fn find(message: &Message) -> Result<(Object, Found), Failure> {
    let header = message.header();
    let path = header.path().map_or("", |path| path.as_str());
    let name = header.member().map_or("", |member| member.as_str());
    let object =
        Object::at(path).ok_or_else(|| Failure::Bus("UnknownObject", format!("no object at {path}")))?;
    let interfaces = match header.interface() {
        None => object.interfaces(),
        Some(wanted) => {
            let place = object.interfaces().iter().position(|interface| *interface == wanted.as_str());
            let place = place.ok_or_else(|| {
                Failure::Bus("UnknownInterface", format!("{path} has no interface {wanted} here"))
            })?;
            &object.interfaces()[place..=place]
        }
    };
    let open = OPEN.iter().find(|(interface, open)| interfaces.contains(interface) && *open == name);
    if let Some((_, open)) = open {
        return Ok((object, Found::Open(open)));
    }
    let member = MEMBERS.iter().find(|member| interfaces.contains(&member.interface) && member.name == name);
    match member {
        Some(member) => Ok((object, Found::Member(member))),
        None => Err(Failure::Bus(
            "UnknownMethod",
            format!("{path} has no method {name} here; the Features property says what this csid serves"),
        )),
    }
}

/// Answer one method call; `None`: the caller wants no answer. The slot is to be held until the answer is sent.
pub(super) async fn answer(
    server: &Arc<Server>,
    who: &Who,
    message: Message,
) -> Option<(Message, Option<Slot>)> {
    let arrived = Instant::now();
    let silent = message.primary_header().flags().contains(Flags::NO_REPLY_EXPECTED);
    let mut slot = None;
    let answer = match find(&message) {
        Err(failure) => Err(failure),
        Ok((object, Found::Open(name))) => standard::open(name, &object, server, who, &message).await,
        Ok((object, Found::Member(member))) => match enter(server, who, member, &message).await {
            Err(error) => Err(error.into()),
            Ok((caller, entered)) => {
                slot = Some(entered.clone());
                call(server, &caller, member, object, &message, arrived, entered).await
            }
        },
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(failure) => encode_failure(&message, failure)?,
    };
    (!silent).then_some((answer, slot))
}

/// Who calls, and his slot; before polkit is asked, for a caller who may nothing must not make it answer without bound.
async fn enter(
    server: &Server,
    who: &Who,
    member: &Member,
    message: &Message,
) -> Result<(Arc<Caller>, Slot), Error> {
    // First of all: what follows may wait for polkit, and would hold the message meanwhile.
    let bytes = message.body().len();
    if bytes > MAX_BYTES {
        return Err(Error::invalid(format!("the arguments are {bytes} bytes, more than {MAX_BYTES}")));
    }
    let caller = who.caller(message).await?;
    let most = server.rooms.config.borrow().operations_per_uid;
    let slot = server.rooms.limits.enter(&caller, member.class, most)?;
    Ok((caller, slot))
}

async fn call(
    server: &Arc<Server>,
    caller: &Arc<Caller>,
    member: &'static Member,
    object: Object,
    message: &Message,
    arrived: Instant,
    slot: Slot,
) -> Answer {
    let permit = server.authoriser.permit(caller, member.action).await?;
    let given = message.body().signature().to_string_no_parens();
    if given != member.takes {
        return Err(Failure::Bus(
            "InvalidArgs",
            format!("{} takes ({}), not ({given})", member.name, member.takes),
        ));
    }
    let call = Call { server: server.clone(), permit, object, message: message.clone(), arrived, slot };
    (member.handler)(call).await
}

impl Call {
    /// The arguments; their types were compared with the member's, so what is left to fail is their encoding.
    pub fn arguments<T: DeserializeOwned + Type>(&self) -> Result<T, Failure> {
        let body = self.message.body();
        body.deserialize()
            .map_err(|error| Failure::Bus("InvalidArgs", format!("the arguments are malformed: {error}")))
    }

    /// When this caller stops waiting; the work that he waits for holds his slot until it has ended.
    pub fn wait(&self, options: &mut Options) -> Result<Wait, Error> {
        let wait = options.wait(self.arrived)?;
        Ok(Wait { hold: Some(Arc::new(self.slot.clone())), ..wait })
    }

    pub fn reply<B: Serialize + DynamicType>(&self, body: &B) -> Answer {
        let answer = reply(&self.message, body)?;
        refuse_too_large(&self.permit.caller().way, answer.data().len()).map_err(Failure::Ours)?;
        Ok(answer)
    }
}

/// A bus ends the connection of whoever sends more than it takes; by default that is 32 MiB.
const BUS_BYTES: usize = 16 << 20;

fn refuse_too_large(way: &Way, bytes: usize) -> Result<(), Error> {
    match way {
        Way::Bus { .. } if bytes > BUS_BYTES => Err(Error::invalid(format!(
            "the answer has {bytes} bytes, and {BUS_BYTES} go over the bus: filter the list, or ask on csid's private socket"
        ))),
        _ => Ok(()),
    }
}

pub(super) fn reply<B: Serialize + DynamicType>(message: &Message, body: &B) -> Answer {
    Message::method_return(&message.header())
        .build(body)
        .map_err(|error| Failure::Ours(Error::internal(format!("the answer cannot be encoded: {error}"))))
}

/// The answer to a call whose answer has a descriptor, on a connection that passes none.
pub(super) fn without_descriptors(call: &Message) -> Option<Message> {
    let text = "the answer is a descriptor, and this connection passes none: negotiate them when it is made";
    encode_failure(call, Error::new(Kind::NotSupported, text).into())
}

fn encode_failure(message: &Message, failure: Failure) -> Option<Message> {
    let header = message.header();
    let encoded = match failure {
        Failure::Bus(name, text) => {
            Message::error(&header, format!("org.freedesktop.DBus.Error.{name}")).build(&text)
        }
        Failure::Ours(error) => Message::error(&header, format!("org.csid1.Error.{}", error.kind.name()))
            .build(&(&error.message, details(&error.details))),
    };
    // Only a message of more than 128 MiB gets here.
    encoded.inspect_err(|why| error!(%why, "an error cannot be encoded")).ok()
}

/// The contract's details map; what does not apply is absent, `retryable` always there.
fn details(details: &Details) -> Map {
    let mut map = Map::from([("retryable", details.retryable.into())]);
    let texts = [
        ("rpc", details.rpc),
        ("plugin-message", details.plugin_message.as_deref()),
        ("operation", details.operation.as_deref()),
        ("namespace", details.namespace.as_deref()),
        ("volume", details.volume.as_deref()),
        ("plugin", details.plugin.as_deref()),
        ("step", details.step),
    ];
    for (key, text) in texts {
        if let Some(text) = text {
            map.insert(key, text.to_owned().into());
        }
    }
    if let Some(code) = details.grpc_code {
        map.insert("grpc-code", code.into());
    }
    if !details.holders.is_empty() {
        map.insert("holders", details.holders.clone().into());
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_and_their_paths() {
        assert_eq!(Object::at("/org/csid1"), Some(Object::Manager));
        assert_eq!(Object::at("/org/csid1/plugin/a_2eb"), Some(Object::Plugin("a.b".into())));
        for nothing in ["/org/csid1/", "/org/csid1/plugin/", "/org/csid1/plugin/a/b", "/org/csid", "/com"] {
            assert_eq!(Object::at(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn an_answer_that_costs_the_connection_does_not_go_over_the_bus() {
        let root = crate::bus::socket::Credentials { uid: 0, groups: Vec::new() };
        let bus = Caller::on_bus(&root, None, ":1.1".to_owned(), false);
        let socket = Caller::on_socket(&root, None);
        let refused = |caller: &Caller, bytes| refuse_too_large(&caller.way, bytes).is_err();
        assert!(!refused(&bus, BUS_BYTES) && refused(&bus, BUS_BYTES + 1));
        assert!(!refused(&socket, BUS_BYTES + 1));
    }

    #[test]
    fn details_have_the_contracts_types() {
        let error = Error::internal("x").with(|details| {
            details.rpc = Some("NodeStageVolume");
            details.grpc_code = Some(9);
            details.holders = vec!["a".into()];
        });
        let map = details(&error.details);
        let types: Vec<_> =
            map.iter().map(|(key, value)| (*key, value.value_signature().to_string())).collect();
        let wanted = [("grpc-code", "u"), ("holders", "as"), ("retryable", "b"), ("rpc", "s")];
        assert_eq!(types, wanted.map(|(key, signature)| (key, signature.to_owned())));
    }
}
