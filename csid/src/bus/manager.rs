//! org.csid1.Manager: its properties, and its members about plugins, operations, events and the configuration.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tokio::sync::oneshot;
use zbus::{OwnedVariant, Variant};

use super::authorise::PolkitAction;
use super::call::{Answer, Call, within};
use super::contract::{Map, plugin_path};
use super::exec;
use super::failure::Failure;
use super::options::{Keys, Options};
use super::rooms::Rooms;
use crate::error::{Error, Kind, Result};
use crate::names::{self, Word};
use crate::plugin::{Log, Network, PluginSpec, Profile, Service, Supervision, validate_id};
use crate::store::rows::Event;
use crate::volume::Authority;

/// The words of the property Features.
const FEATURES: &[&str] = &[
    "mount",
    "open-mount",
    "open-mount-idmap",
    "adopt-mount",
    "target-fd",
    "plugins",
    "events",
    "reconcile",
    "volumes",
    "claims",
    "pages",
    "attach",
    "forget-attachment",
    "restart",
    "log",
    "stats",
    "unit",
    "accept-node-id",
    "drain",
    "upgrade",
    "cluster",
];
/// The limit of events in one answer of GetEvents.
const MOST_EVENTS: u32 = 1000;

/// A feature that csid.toml enables.
const EXEC: &str = "exec";

pub(super) fn properties(rooms: &Rooms) -> Map {
    let mut features: Vec<String> = FEATURES.iter().map(|word| (*word).to_owned()).collect();
    features.extend(rooms.config.borrow().exec.then(|| EXEC.to_owned()));
    Map::from([
        ("Version", env!("CARGO_PKG_VERSION").into()),
        ("Features", features.into()),
        ("State", rooms.state.borrow().as_str().into()),
        ("EventSequence", rooms.store.event_sequence().into()),
        ("ModifyIndex", rooms.store.modify_index().into()),
        ("JournalId", rooms.store.journal_id().to_owned().into()),
    ])
}

pub(super) const SPEC: Keys = &[
    ("supervision", "s"),
    ("argv", "as"),
    ("environment", "a{ss}"),
    ("credentials", "as"),
    ("unit", "s"),
    ("socket", "s"),
    ("instance", "s"),
    ("profile", "s"),
    ("plugin-root", "s"),
    ("plugin-view", "s"),
    ("propagation", "s"),
    ("network", "s"),
    ("log", "s"),
];

impl Word for Profile {
    const WORDS: &'static [(&'static str, Self)] = &Profile::WORDS;
}

impl Word for Supervision {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("managed", Supervision::Managed),
        ("unit", Supervision::Unit),
        ("external", Supervision::External),
    ];
}

impl Word for Log {
    const WORDS: &'static [(&'static str, Self)] = &[("journal", Log::Journal), ("none", Log::None)];
}

impl Word for Service {
    const WORDS: &'static [(&'static str, Self)] =
        &[("node", Service::Node), ("controller", Service::Controller)];
}

/// Reads a plugin's spec; [`crate::plugin`] validates it. An absent key has its value in `before`.
pub(super) fn spec(options: &mut Options, before: Option<PluginSpec>) -> Result<PluginSpec> {
    let supervision = options.word("supervision")?.or(before.as_ref().map(|before| before.supervision));
    let supervision = supervision.ok_or_else(|| {
        Error::invalid(
            "supervision is missing; it is managed (argv), unit (unit and socket) or external (socket)",
        )
    })?;
    let before = before.unwrap_or_else(|| PluginSpec::new(supervision));
    Ok(PluginSpec {
        supervision,
        argv: options.texts("argv").unwrap_or(before.argv),
        environment: options.map("environment").unwrap_or(before.environment),
        credentials: options.texts("credentials").unwrap_or(before.credentials),
        // The plugin's spec checks its form.
        unit: options.text("unit").or(before.unit),
        socket: options.checked("socket", names::path)?.or(before.socket),
        instance: options.checked("instance", |_, text| names::instance(text))?.or(before.instance),
        plugin_root: options.checked("plugin-root", names::path)?.or(before.plugin_root),
        plugin_view: options.checked("plugin-view", names::path)?.or(before.plugin_view),
        log: options.word("log")?.unwrap_or(before.log),
        profile: options.word("profile")?.or(before.profile),
        propagation: options.word("propagation")?.or(before.propagation),
        network: options.text("network").map(Network::try_from).transpose()?.unwrap_or(before.network),
        // Other commands than argv are for plugins that a file declares.
        ..before
    })
}

pub(super) async fn register_plugin(call: Call) -> Answer {
    let (id, options): (String, HashMap<String, OwnedVariant>) = call.arguments()?;
    validate_id(&id)?;
    let mut options = Options::check(options, SPEC)?;
    let wait = options.wait(call.arrived)?;
    let spec = spec(&mut options, None)?;
    let (volumes, uid, of) = (call.server.rooms.volumes.clone(), call.permit.uid(), id.clone());
    within(&call.slot, wait.deadline, "registering the plugin", async move {
        volumes.register_plugin(&of, spec, uid).await
    })
    .await?;
    call.reply(&plugin_path(&id))
}

pub(super) async fn unregister_plugin(call: Call) -> Answer {
    let (id, options): (String, HashMap<String, OwnedVariant>) = call.arguments()?;
    validate_id(&id)?;
    let mut options = Options::check(options, &[("instance", "s"), ("force", "b")])?;
    let wait = options.wait(call.arrived)?;
    let instance = options.checked("instance", |_, text| names::instance(text))?;
    let force = options.flag("force");
    // An error about the plugin's mounts is for its owner only. The registry compares again, because the owner may change meanwhile.
    let owner = call.server.rooms.plugins.view(&id).map(|view| view.owner);
    if owner.is_some_and(|owner| owner != call.permit.uid()) && !call.permit.caller().is_root() {
        return Err(Failure::Ours(Error::new(
            Kind::NotAuthorized,
            format!("plugin {id} was registered by another uid"),
        )));
    }
    let (volumes, uid) = (call.server.rooms.volumes.clone(), call.permit.uid());
    within(&call.slot, wait.deadline, "unregistering the plugin", async move {
        volumes.unregister_plugin(&id, instance.as_deref(), force, uid).await
    })
    .await?;
    call.reply(&())
}

pub(super) async fn list_plugins(call: Call) -> Answer {
    let plugins: Vec<_> = call
        .server
        .rooms
        .plugins
        .list()
        .into_iter()
        .map(|view| {
            let path = plugin_path(&view.id);
            (view.id, view.state, view.provider, view.supervision, path)
        })
        .collect();
    call.reply(&(plugins,))
}

pub(super) async fn wait_for_plugin(call: Call) -> Answer {
    let (id, service, options): (String, String, HashMap<String, OwnedVariant>) = call.arguments()?;
    validate_id(&id)?;
    let service = Service::read("service", &service)?;
    let mut options = Options::check(options, &[])?;
    let wait = options.wait(call.arrived)?;
    // The call also waits for unknown ids. Without a deadline it would stay until csid stops.
    let longest = call.server.rooms.config.borrow().deadlines.operation;
    let deadline = wait.deadline.or_else(|| call.arrived.checked_add(longest));
    call.server.rooms.plugins.wait(&id, service, deadline).await?;
    call.reply(&plugin_path(&id))
}

pub(super) async fn list_operations(call: Call) -> Answer {
    let mut rows: Vec<Map> = call
        .server
        .rooms
        .volumes
        .operations()
        .into_iter()
        .map(|view| {
            let mut row = Map::from([
                ("id", view.id.into()),
                ("kind", view.kind.name().into()),
                ("subject", view.subject.into()),
                ("step", view.step.name().into()),
                ("since", view.since_usec.into()),
                ("uid", view.uid.into()),
            ]);
            if let Some(deadline) = view.deadline_usec {
                row.insert("deadline", deadline.into());
            }
            row
        })
        .collect();
    match call.server.rooms.plugins.execs().await {
        Ok(runs) => rows.extend(runs.into_iter().map(exec::row)),
        // csid's own operations are listed anyway.
        Err(error) => tracing::warn!(%error, "ListOperations has no commands in plugins"),
    }
    call.reply(&(rows,))
}

/// Cancels an operation. The caller's own needs the action unmount, another uid's the action manage.
pub(super) async fn cancel_operation(call: Call) -> Answer {
    let id: String = call.arguments()?;
    names::name("the operation's id", &id)?;
    let uid = call.permit.uid();
    if exec::cancel(&call, &id).await? {
        return call.reply(&());
    }
    let volumes = &call.server.rooms.volumes;
    let operations = volumes.operations();
    let uids: BTreeSet<u32> = operations.iter().filter(|view| view.id == id).map(|view| view.uid).collect();
    let authority = match uids.is_empty() || uids.contains(&uid) {
        true => Authority::Own(uid),
        false => {
            let owner = uids.first().copied().filter(|_| uids.len() == 1);
            call.server.authoriser.also_of(&call.permit, PolkitAction::Manage, owner).await?;
            // Each uid chooses its operation ids. Taking another uid's id must not get that uid's operation cancelled.
            if uids.len() > 1 {
                return Err(Failure::Ours(Error::invalid(format!(
                    "operation ID `{id}` is ambiguous: used by uids {uids:?}; only one of these users can cancel its own"
                ))));
            }
            Authority::Any(uid)
        }
    };
    volumes.cancel(&id, authority).await?;
    call.reply(&())
}

pub(super) async fn reload(call: Call) -> Answer {
    let mut options = Options::check(call.arguments()?, &[])?;
    let wait = options.wait(call.arrived)?;
    let reload = call.server.rooms.reload.clone();
    within(&call.slot, wait.deadline, "the reload", async move {
        let stopping = || Error::new(Kind::ShuttingDown, "csid is stopping");
        let (reply, replied) = oneshot::channel();
        reload.send(reply).await.map_err(|_| stopping())?;
        replied.await.map_err(|_| stopping())?
    })
    .await?;
    call.reply(&())
}

pub(super) async fn get_events(call: Call) -> Answer {
    let (since, max): (u64, u32) = call.arguments()?;
    let (events, gap) =
        call.server.rooms.store.events(since, max.min(MOST_EVENTS)).await.map_err(Error::from)?;
    let events: Vec<_> = events.iter().map(event).collect();
    call.reply(&(events, gap))
}

/// Returns an event as GetEvents and the signal encode it.
pub(super) fn event(event: &Event) -> (u64, u64, &str, &str, BTreeMap<&str, Variant<'static>>) {
    let details = event.details.iter().map(|(key, value)| (key.as_str(), detail(value))).collect();
    (event.sequence, event.realtime_usec, &event.kind, &event.subject, details)
}

fn detail(value: &serde_json::Value) -> Variant<'static> {
    match value {
        serde_json::Value::String(text) => text.clone().into(),
        serde_json::Value::Bool(flag) => (*flag).into(),
        other => match other.as_u64() {
            Some(number) => number.into(),
            None => other.to_string().into(),
        },
    }
}
