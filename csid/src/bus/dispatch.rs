//! The only way in for a call: find the member, count the call, authorise the caller, and only then read the arguments. A member that
//! is in neither [`MEMBERS`] nor [`OPEN`] is not served.

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use futures_util::future::BoxFuture;
use zbus::Message;
use zbus::message::Flags;

use super::authorise::{Permit, PolkitAction};
use super::call::{Answer, Call, Server, UntilSent};
use super::caller::{Caller, CallerSource};
use super::contract::{
    CLUSTER, INTROSPECTABLE, MANAGER, Method, OBJECT_MANAGER, Object, PEER, PLUGIN, PROPERTIES,
};
use super::facts::{self, CallFacts};
use super::failure::{Failure, encode_failure};
use super::introspect::Interfaces;
use super::limits::{CallClass, Slot};
use super::{
    claims, cluster, exec, inventory, manager, mounts, oversize, plugin, standard, upgrade, volumes,
};
use crate::error::{Error, shortened};

/// The limit of all arguments of a call together. The bus would pass 32 MiB.
const MAX_BYTES: usize = 64 * 1024;

/// A member that is served, with the action that every call of it needs. Arguments may need further actions.
pub(super) struct Member {
    pub method: Method,
    action: PolkitAction,
    class: CallClass,
    handler: fn(Call) -> BoxFuture<'static, Answer>,
}

macro_rules! members {
    ($($interface:ident.$name:ident($takes:literal): $action:ident, $class:ident => $handler:path;)*) => {
        &[$(Member {
            method: Method { interface: $interface, name: stringify!($name), takes: $takes },
            action: PolkitAction::$action,
            class: CallClass::$class,
            handler: |call| Box::pin($handler(call)),
        }),*]
    };
}

pub(super) static MEMBERS: &[Member] = members! {
    MANAGER.Mount("sssa{sv}"): Mount, Operation => mounts::mount;
    MANAGER.Unmount("sssa{sv}"): Unmount, Operation => mounts::unmount;
    MANAGER.AdoptMount("sssa{sv}"): Manage, Operation => mounts::adopt_mount;
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
    CLUSTER.Join("a{sv}"): Manage, Operation => cluster::join;
    PLUGIN.Probe("a{sv}"): Read, Operation => plugin::probe;
    PLUGIN.GetStats(""): Read, Operation => plugin::get_stats;
    PLUGIN.Restart("a{sv}"): ManagePlugins, Operation => plugin::restart;
    PLUGIN.AcceptNodeId("sa{sv}"): ManagePlugins, Operation => plugin::accept_node_id;
    PLUGIN.Drain("a{sv}"): ManagePlugins, Operation => upgrade::drain;
    PLUGIN.Upgrade("a{sv}a{sv}"): ManagePlugins, Operation => upgrade::upgrade;
    PLUGIN.OpenLog("a{sv}"): PluginLog, Operation => plugin::open_log;
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

/// Members without authorization. Their answers show nothing of csid's state.
pub(super) static OPEN: &[(&str, &str)] =
    &[(PEER, "Ping"), (PEER, "GetMachineId"), (INTROSPECTABLE, "Introspect")];

/// The introspection of the served members.
static INTERFACES: LazyLock<Interfaces> = LazyLock::new(|| {
    let methods: Vec<&Method> = MEMBERS.iter().map(|member| &member.method).collect();
    Interfaces::with(&methods)
});

enum Found {
    Open(&'static str),
    Member(&'static Member),
}

/// Returns the object and the member that a message names.
fn find(message: &Message) -> Result<(Object, Found), Failure> {
    let header = message.header();
    let path = header.path().map_or("", |path| path.as_str());
    let name = header.member().map_or("", |member| member.as_str());
    let object = Object::at(path)
        .ok_or_else(|| Failure::Bus("UnknownObject", format!("no object at {}", shortened(path))))?;
    let interfaces = match header.interface() {
        None => object.interfaces(),
        Some(wanted) => {
            let place = object.interfaces().iter().position(|interface| *interface == wanted.as_str());
            let place = place.ok_or_else(|| {
                Failure::Bus("UnknownInterface", format!("{} has no interface {wanted}", shortened(path)))
            })?;
            &object.interfaces()[place..=place]
        }
    };
    let open = OPEN.iter().find(|(interface, open)| interfaces.contains(interface) && *open == name);
    if let Some((_, open)) = open {
        return Ok((object, Found::Open(open)));
    }
    let member = MEMBERS
        .iter()
        .find(|member| interfaces.contains(&member.method.interface) && member.method.name == name);
    match member {
        Some(member) => Ok((object, Found::Member(member))),
        None => Err(Failure::Bus(
            "UnknownMethod",
            format!(
                "{} has no method {name}; the property Features lists what this csid serves",
                shortened(path)
            ),
        )),
    }
}

/// Answers one method call. `None`: the caller wants no answer.
pub(super) async fn answer(
    server: &Arc<Server>,
    who: &CallerSource,
    message: Message,
) -> Option<(Message, UntilSent)> {
    let arrived = Instant::now();
    let silent = message.primary_header().flags().contains(Flags::NO_REPLY_EXPECTED);
    let mut until_sent = UntilSent::default();
    let found = oversize::refuse(&message).map_err(Failure::Ours).and_then(|()| find(&message));
    let answer = match found {
        Err(failure) => Err(failure),
        Ok((object, Found::Open(name))) => {
            standard::open(name, &object, server, who, &message, &INTERFACES).await
        }
        Ok((object, Found::Member(member))) => match enter(server, who, member, &message).await {
            Err(error) => Err(error.into()),
            Ok((caller, entered)) => {
                until_sent.slot = Some(entered.clone());
                let held = until_sent.held.clone();
                let permit = permit(server, &caller, member, &object, &message).await;
                let call = |permit| Call {
                    server: server.clone(),
                    permit,
                    object,
                    message: message.clone(),
                    arrived,
                    slot: entered,
                    held,
                };
                match permit {
                    Err(failure) => Err(failure),
                    Ok(permit) => (member.handler)(call(permit)).await,
                }
            }
        },
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(failure) => encode_failure(&message, failure)?,
    };
    (!silent).then_some((answer, until_sent))
}

/// Returns the caller and a slot for the call. This precedes polkit, so that a caller without rights cannot ask it without limit.
async fn enter(
    server: &Server,
    who: &CallerSource,
    member: &Member,
    message: &Message,
) -> Result<(Arc<Caller>, Slot), Error> {
    // The size first, because the next steps may wait for polkit with the message in memory.
    let bytes = message.body().len();
    if bytes > MAX_BYTES {
        return Err(Error::invalid(format!("the arguments have {bytes} bytes; the limit is {MAX_BYTES}")));
    }
    let caller = who.caller(message).await?;
    let most = server.rooms.config.borrow().operations_per_uid;
    let slot = server.rooms.limits.enter(&caller, member.class, most)?;
    Ok((caller, slot))
}

/// Returns the permit of a call whose arguments have the member's types.
async fn permit(
    server: &Arc<Server>,
    caller: &Arc<Caller>,
    member: &'static Member,
    object: &Object,
    message: &Message,
) -> Result<Permit, Failure> {
    let given = message.body().signature().to_string_no_parens();
    let facts = match given == member.method.takes && server.authoriser.asks_about(caller) {
        true => facts::of(&member.method, object, message, &server.rooms),
        false => CallFacts::new(),
    };
    let permit = server.authoriser.permit_with(caller, member.action, facts).await?;
    if given != member.method.takes {
        return Err(Failure::Bus(
            "InvalidArgs",
            format!("{} takes ({}), not ({given})", member.method.name, member.method.takes),
        ));
    }
    Ok(permit)
}
