//! org.csid1.Manager: its properties, and the members that concern plugins, operations, events and the configuration.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::time::Instant;

use tokio::sync::oneshot;
use zbus::{OwnedVariant, Variant};

use super::Rooms;
use super::authorise::Action;
use super::dispatch::{Answer, Call, Failure, Map};
use super::exec;
use super::limits::Slot;
use super::options::{Keys, Options};
use super::plugin;
use crate::error::{Error, Kind, Result};
use crate::names::{self, Word};
use crate::plugin::{Log, Network, PluginSpec, Profile, Service, Supervision, validate_id};
use crate::store::rows::Event;
use crate::volume::Authority;

/// One word a capability that is there.
const FEATURES: &[&str] = &[
    "mount",
    "open-mount",
    "plugins",
    "events",
    "reconcile",
    "volumes",
    "claims",
    "attach",
    "restart",
    "log",
    "stats",
    "unit",
    "accept-node-id",
    "drain",
    "upgrade",
];
/// The most events that one GetEvents answers.
const MOST_EVENTS: u32 = 1000;

/// There where csid.toml allows it.
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

/// The work goes on to its end, whether or not the caller still waits for it, and it is his until then: also a list, which
/// the journal makes whoever has lost interest in it.
pub(super) async fn within<T, F>(slot: &Slot, deadline: Option<Instant>, what: &str, work: F) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let slot = slot.clone();
    let work = tokio::spawn(async move {
        let done = work.await;
        drop(slot);
        done
    });
    let ended = match deadline {
        None => work.await,
        Some(deadline) => tokio::time::timeout_at(deadline.into(), work).await.map_err(|_| {
            Error::new(Kind::TimedOut, format!("{what} took longer than the deadline and goes on; ask again"))
        })?,
    };
    ended.unwrap_or_else(|_| {
        Err(Error::internal(format!("{what} ended without an answer; csid's log says why")))
    })
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

/// The spec as it was given; the plugins' room says whether it is sound. What is not given is as `before`.
pub(super) fn spec(options: &mut Options, before: Option<PluginSpec>) -> Result<PluginSpec> {
    let supervision = options.word("supervision")?.or(before.as_ref().map(|before| before.supervision));
    let supervision = supervision.ok_or_else(|| {
        Error::invalid("supervision is missing: managed (argv), unit (unit and socket) or external (socket)")
    })?;
    let before = before.unwrap_or_else(|| PluginSpec::new(supervision));
    Ok(PluginSpec {
        supervision,
        argv: options.texts("argv").unwrap_or(before.argv),
        environment: options.map("environment").unwrap_or(before.environment),
        credentials: options.texts("credentials").unwrap_or(before.credentials),
        // Its form is the spec's to check.
        unit: options.text("unit").or(before.unit),
        socket: options.checked("socket", names::path)?.or(before.socket),
        instance: options.checked("instance", |_, text| names::instance(text))?.or(before.instance),
        plugin_root: options.checked("plugin-root", names::path)?.or(before.plugin_root),
        plugin_view: options.checked("plugin-view", names::path)?.or(before.plugin_view),
        log: options.word("log")?.unwrap_or(before.log),
        profile: options.word("profile")?.or(before.profile),
        propagation: options.word("propagation")?.or(before.propagation),
        network: options.text("network").map(Network::try_from).transpose()?.unwrap_or(before.network),
        // Commands beside argv are for files alone.
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
    call.reply(&plugin::path(&id))
}

pub(super) async fn unregister_plugin(call: Call) -> Answer {
    let (id, options): (String, HashMap<String, OwnedVariant>) = call.arguments()?;
    validate_id(&id)?;
    let mut options = Options::check(options, &[("instance", "s"), ("force", "b")])?;
    let wait = options.wait(call.arrived)?;
    let instance = options.checked("instance", |_, text| names::instance(text))?;
    let force = options.flag("force");
    // Another is not told of the plugin's mounts; the registry compares again, for the id may change hands before its turn.
    let owner = call.server.rooms.plugins.view(&id).map(|view| view.owner);
    if owner.is_some_and(|owner| owner != call.permit.uid()) && !call.permit.caller().is_root() {
        return Err(Failure::Ours(Error::new(
            Kind::NotAuthorized,
            format!("plugin {id} was registered by another uid; root may unregister it"),
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
            let path = plugin::path(&view.id);
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
    // Ids that nobody knows are waited for too: without an end each such call would be held till csid stops.
    let patience = call.server.rooms.config.borrow().deadlines.operation;
    let deadline = wait.deadline.or_else(|| call.arrived.checked_add(patience));
    call.server.rooms.plugins.wait(&id, service, deadline).await?;
    call.reply(&plugin::path(&id))
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
                ("kind", view.kind.into()),
                ("subject", view.subject.into()),
                ("step", view.step.into()),
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
        // What csid itself does is told all the same.
        Err(error) => tracing::warn!(%error, "ListOperations tells of no commands in plugins"),
    }
    call.reply(&(rows,))
}

/// One's own needs what ending one's own mount needs; another's is management.
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
            call.server.authoriser.also(&call.permit, Action::Manage).await?;
            // Names are each uid's own: whoever takes another's name must not have him cancelled too.
            if uids.len() > 1 {
                return Err(Failure::Ours(Error::invalid(format!(
                    "operation `{id}` is one of uids {uids:?} each: it cannot be said which is meant; Unmount what is to be ended, or cancel as its uid"
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
        let (answer, answered) = oneshot::channel();
        reload.send(answer).await.map_err(|_| stopping())?;
        answered.await.map_err(|_| stopping())?
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

/// An event as GetEvents and the signal tell it.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bus::Limits;
    use crate::bus::caller::Caller;
    use crate::bus::limits::Class;
    use crate::bus::socket::Credentials;

    #[tokio::test]
    async fn work_that_nobody_waits_for_still_counts() {
        let limits = Limits::default();
        let caller = Caller::on_socket(&Credentials { uid: 1000, groups: Vec::new() }, None);
        let slot = limits.enter(&caller, Class::Operation, 1).ok().unwrap();
        let (finish, finished) = oneshot::channel();
        let soon = Instant::now() + Duration::from_millis(5);
        let timed_out =
            within(
                &slot,
                Some(soon),
                "it",
                async move { finished.await.map_err(|_| Error::internal("dropped")) },
            );
        assert_eq!(timed_out.await.unwrap_err().kind, Kind::TimedOut);
        drop(slot);
        let refused = limits.enter(&caller, Class::Operation, 1).err().expect("the work is under way");
        assert_eq!(refused.kind, Kind::RateLimited);
        finish.send(()).unwrap();
        for _ in 0..500 {
            if limits.enter(&caller, Class::Operation, 1).is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the work has ended, and its slot is taken");
    }
}
