//! Several instances of one plugin: which of them is asked what, and what happens when one leaves or falls ill.

use super::calls::{call, usage};
use super::controller::request;
use super::*;
use crate::Kind;
use crate::plugin::common::{CALLS, LOOKS};
use crate::plugin::{ATTACHES, CallContext, Can, Class, Controller};

fn instance(name: &str, socket: &str) -> PluginSpec {
    PluginSpec { instance: Some(name.into()), ..external(Path::new(socket)) }
}

#[tokio::test]
async fn a_second_instance_is_its_owners_or_roots() {
    let host = Host::new();
    let register = |spec: PluginSpec, uid| {
        let plugins = host.plugins.clone();
        async move { plugins.register("p", spec, uid).await.map_err(|error| error.kind) }
    };
    assert_eq!(register(instance("a", "/run/a.sock"), 1000).await, Ok(()));
    assert_eq!(register(instance("b", "/run/b.sock"), 1001).await, Err(Kind::NotAuthorized));
    assert_eq!(register(instance("b", "/run/a.sock"), 1000).await, Err(Kind::AlreadyExists), "one socket");
    assert_eq!(register(instance("b", "/run/b.sock"), 1000).await, Ok(()));
    assert_eq!(register(instance("c", "/run/c.sock"), 0).await, Ok(()));
    assert_eq!(register(instance("a", "/run/x.sock"), 1000).await, Err(Kind::AlreadyExists));
    assert_eq!(register(instance("c", "/run/c.sock"), 1000).await, Ok(()));
    let view = host.plugins.view("p").unwrap();
    assert_eq!(
        (view.instances, view.owner, view.socket.as_str()),
        (names(&["c", "b", "a"]), 1000, "/run/c.sock")
    );
    assert_eq!(host.plugins.list().len(), 1);

    let unregister = |instance: Option<&'static str>, uid| {
        let plugins = host.plugins.clone();
        async move { plugins.unregister("p", instance, uid).await.map_err(|error| error.kind) }
    };
    assert_eq!(unregister(Some("c"), 1000).await, Err(Kind::NotAuthorized));
    assert_eq!(unregister(None, 1000).await, Err(Kind::NotAuthorized), "one is root's");
    assert_eq!(unregister(Some("b"), 1001).await, Err(Kind::NotAuthorized));
    assert_eq!(unregister(Some("none"), 1000).await, Ok(()));
    assert_eq!(host.plugins.view("p").unwrap().instances.len(), 3);
    assert_eq!(unregister(Some("b"), 1000).await, Ok(()));
    assert_eq!(host.plugins.view("p").unwrap().instances, ["c", "a"]);
    assert_eq!(unregister(None, 0).await, Ok(()));
    assert!(host.plugins.view("p").is_none());

    let mut seen = Vec::new();
    for kind in ["plugin-registered", "plugin-instance", "plugin-deregistered"] {
        for (id, details) in host.events(kind).await {
            assert_eq!(id, "p");
            let turn = if details.contains_key("to") { "came" } else { "left" };
            seen.push(format!("{kind} {turn} {}", details["instance"]));
        }
    }
    let expected = [
        "plugin-registered came a",
        "plugin-instance came b",
        "plugin-instance came c",
        "plugin-instance left b",
        "plugin-instance left a",
        "plugin-deregistered left c",
    ];
    assert_eq!(seen, expected);
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[tokio::test]
async fn node_calls_go_to_the_newest_healthy_instance() {
    // The heartbeat is too slow to be what notices.
    let host = Host::with(Pace { heartbeat: LONG, ..PACE }, Vec::new());
    let old = host.instance("old", true, true).await;
    old.script().node_id = "node-old".into();
    assert!(!host.plugins.serves_without("p", "old"));
    let mut new = host.instance("new", true, true).await;
    assert_eq!(host.plugins.view("p").unwrap().instances, ["new", "old"]);
    let usage = usage();
    let staged = || (old.calls("NodeStageVolume"), new.calls("NodeStageVolume"));
    host.ready().await.stage(call(&usage, soon(LONG))).await.unwrap();
    assert_eq!(staged(), (0, 1));
    assert!(host.plugins.serves_without("p", "new") && host.plugins.serves_without("p", "old"));

    // Dead, it is left out until it is back.
    new.kill();
    until(|| !host.is_healthy("new")).await;
    let view = host.plugins.view("p").unwrap();
    assert!(view.healthy && host.plugins.healthy_now("p"));
    assert_eq!(view.instances, ["old", "new"], "the first is who is asked");
    assert!(view.socket.ends_with("old.sock"), "{view:?}");
    assert!(!host.plugins.serves_without("p", "old"));
    host.ready().await.stage(call(&usage, soon(LONG))).await.unwrap();
    assert_eq!((old.calls("NodeStageVolume"), new.calls("NodeStageVolume")), (1, 1));
    new.script().node_id = "node-new".into();
    new.start();
    until(|| host.is_healthy("new")).await;
    assert_eq!(host.ready().await.node_id(), "node-new");
    assert_eq!(host.plugins.view("p").unwrap().node_id, "node-new");

    let mut changes = host.plugins.subscribe();
    host.plugins.unregister("p", Some("new"), 0).await.unwrap();
    let ready = host.plugins.ready("p", Service::Node, Instant::now() + Duration::from_millis(100)).await;
    assert_eq!(ready.unwrap().node_id(), "node-1");
    let view = host.plugins.view("p").unwrap();
    assert_eq!((view.instances, view.healthy), (names(&["old"]), true));
    while let Ok(change) = changes.try_recv() {
        assert!(matches!(change, crate::plugin::PluginChange::Changed(_)), "{change:?}");
    }
}

/// One call to whichever is chosen.
async fn chosen(host: &Host) -> Controller {
    host.plugins.controller("p", "ValidateVolumeCapabilities", soon(LONG)).await.unwrap()
}

#[tokio::test]
async fn controllers_share_the_load() {
    let host = Host::new();
    let a = host.instance("a", false, true).await;
    let mut b = host.instance("b", false, true).await;
    let deleted = |a: &Fake, b: &Fake| (a.calls("DeleteVolume"), b.calls("DeleteVolume"));
    for _ in 0..6 {
        chosen(&host).await.delete("v", request(None)).await.unwrap();
    }
    assert_eq!(deleted(&a, &b), (3, 3), "of equals each has its turn");

    // One hangs: the other has all but the call that hangs.
    a.script().answer = None;
    let hung = loop {
        let controller = chosen(&host).await;
        let before = a.calls("DeleteVolume");
        let call = tokio::spawn(async move { controller.delete("v", request(None)).await });
        until(|| call.is_finished() || a.calls("DeleteVolume") > before).await;
        if a.calls("DeleteVolume") > before {
            break call;
        }
    };
    let before = deleted(&a, &b);
    for _ in 0..5 {
        chosen(&host).await.delete("v", request(None)).await.unwrap();
    }
    assert_eq!(deleted(&a, &b), (before.0, before.1 + 5));
    hung.abort();
    assert!(hung.await.unwrap_err().is_cancelled());
    a.script().answer = Some(Ok(()));
    for _ in 0..2 {
        chosen(&host).await.delete("v", request(None)).await.unwrap();
    }
    assert_eq!(deleted(&a, &b), (before.0 + 1, before.1 + 6), "what is given up is no load any more");

    // One dies: it is left out, and back when it is healthy.
    b.kill();
    until(|| !host.is_healthy("b")).await;
    assert!(host.plugins.view("p").unwrap().socket.ends_with("a.sock"));
    let before = a.calls("DeleteVolume");
    for _ in 0..3 {
        chosen(&host).await.delete("v", request(None)).await.unwrap();
    }
    assert_eq!(a.calls("DeleteVolume"), before + 3);
    // Probe says no: it is not healthy either.
    b.script().probe = Err((tonic::Code::FailedPrecondition, "no backend".into()));
    b.start();
    until(|| b.script().calls.last() == Some(&"Probe")).await;
    let before = deleted(&a, &b);
    chosen(&host).await.delete("v", request(None)).await.unwrap();
    chosen(&host).await.delete("v", request(None)).await.unwrap();
    assert_eq!(deleted(&a, &b), (before.0 + 2, before.1));
    b.script().probe = Ok(());
    until(|| host.is_healthy("b")).await;
    let before = deleted(&a, &b);
    for _ in 0..4 {
        chosen(&host).await.delete("v", request(None)).await.unwrap();
    }
    let after = deleted(&a, &b);
    assert!(after.0 > before.0 && after.1 > before.1, "{before:?} {after:?}");
}

/// Whatever there is to do: who has many volumes is not to be asked for all of them at once.
#[tokio::test]
async fn controller_calls_in_flight_are_bounded() {
    let host = Host::new();
    let a = host.instance("a", false, true).await;
    let b = host.instance("b", false, true).await;
    for fake in [&a, &b] {
        fake.script().answer = None;
    }
    let mut calls = tokio::task::JoinSet::new();
    for volume in 0..CALLS + 6 {
        let controller = chosen(&host).await;
        calls.spawn(async move { controller.delete(&format!("v{volume}"), request(None)).await });
        // It counts as load from its beginning.
        tokio::task::yield_now().await;
    }
    let came = || a.calls("DeleteVolume") + b.calls("DeleteVolume");
    until(|| came() >= CALLS).await;
    let late = CallContext { patience: Duration::from_millis(20), ..request(None) };
    let error = chosen(&host).await.delete("late", late).await.unwrap_err();
    assert!(
        error.class == Class::NotSent && error.to_string().contains("has not answered 64 calls"),
        "{error}"
    );
    // The six others have asked for their turn before this one.
    assert_eq!((a.calls("DeleteVolume"), b.calls("DeleteVolume")), (CALLS / 2, CALLS / 2));
    // Who only looks has a turn all the same, and looks have their own bound.
    let mut looks = tokio::task::JoinSet::new();
    for _ in 0..LOOKS + 6 {
        let controller = chosen(&host).await;
        looks.spawn(async move { controller.validate("v", &[], &BTreeMap::new(), request(None)).await });
    }
    let looked = || a.calls("ValidateVolumeCapabilities") + b.calls("ValidateVolumeCapabilities");
    until(|| looked() >= LOOKS).await;
    let error = chosen(&host).await.validate("v", &[], &BTreeMap::new(), late).await.unwrap_err();
    assert!(error.class == Class::NotSent && error.to_string().contains("16 calls"), "{error}");
    assert_eq!(looked(), LOOKS);
    drop(looks);
    // A call that is given up makes room, and the next one keeps the deadline that it came with.
    const PATIENCE: Duration = Duration::from_secs(8);
    const WAIT: Duration = Duration::from_millis(500);
    let patient = chosen(&host).await;
    let patient = tokio::spawn(async move {
        patient.delete("patient", CallContext { patience: PATIENCE, ..request(None) }).await
    });
    // The wait is tested: a deadline that began with the call would have lost it.
    tokio::time::sleep(WAIT).await;
    for fake in [&a, &b] {
        fake.script().timeouts.clear();
    }
    calls.abort_all();
    while calls.join_next().await.is_some() {}
    for fake in [&a, &b] {
        fake.script().answer = Some(Ok(()));
    }
    until(|| came() == CALLS + 1).await;
    let seen: Vec<String> = [&a, &b].iter().flat_map(|fake| fake.script().timeouts.clone()).collect();
    let micros =
        seen.iter().filter_map(|seen| seen.strip_suffix('u')?.parse().ok()).map(Duration::from_micros);
    assert!(micros.max() > Some(PATIENCE - WAIT / 2), "{seen:?}");
    patient.abort();
    chosen(&host).await.delete("v", request(None)).await.unwrap();
}

/// The instances may have different capabilities (CSI rule 10).
#[tokio::test]
async fn call_goes_to_instance_with_its_capability() {
    let host = Host::with(Pace { heartbeat: LONG, ..PACE }, Vec::new());
    let attacher = host.controller_with("attacher", &[2]).await;
    let mut provisioner = host.controller_with("provisioner", &[1, 3]).await;
    let by = async |rpc: &str, wait| host.plugins.controller("p", rpc, soon(wait)).await;
    for _ in 0..4 {
        by("DeleteVolume", LONG).await.unwrap().delete("v", request(None)).await.unwrap();
        by("ControllerUnpublishVolume", LONG)
            .await
            .unwrap()
            .unpublish("v", "n", request(None))
            .await
            .unwrap();
        by("ListVolumes", LONG).await.unwrap().volumes("", 0, request(None)).await.unwrap();
    }
    assert_eq!((provisioner.calls("DeleteVolume"), attacher.calls("ControllerUnpublishVolume")), (4, 4));
    // No instance has it, so any of them refuses the call.
    let error = by("GetCapacity", LONG).await.unwrap();
    let error = error.capacity(&[], &BTreeMap::new(), &BTreeMap::new(), request(None)).await.unwrap_err();
    assert_eq!(error.class, Class::Unimplemented);
    // The one that has it is waited for while it is not healthy.
    provisioner.kill();
    until(|| !host.is_healthy("provisioner")).await;
    let error = by("DeleteVolume", Duration::from_millis(50)).await.err().unwrap();
    assert!(error.message.contains("the plugin p (instance provisioner) is unhealthy"), "{error}");
    by("ControllerPublishVolume", LONG).await.unwrap();
}

#[tokio::test]
async fn an_older_instance_is_waited_for_too() {
    // Nothing is heard of the newest meanwhile.
    let host = Host::with(Pace { heartbeat: LONG, ..PACE }, Vec::new());
    let mut old = host.instance("old", false, true).await;
    let _new = host.instance("new", true, false).await;
    old.kill();
    until(|| !host.is_healthy("old")).await;
    assert_eq!(host.plugins.can("p", ATTACHES), Some(true), "from any instance");
    let waiting = {
        let plugins = host.plugins.clone();
        tokio::spawn(async move {
            plugins.controller("p", "ValidateVolumeCapabilities", soon(LONG)).await.map(drop)
        })
    };
    // It waits now: this runtime has one thread.
    tokio::task::yield_now().await;
    old.start();
    tokio::time::timeout(LONG / 2, waiting).await.expect("it hears of it").unwrap().unwrap();
}

/// The node half and the controllers of a plugin may be different processes (CSI rule 10).
#[tokio::test]
async fn split_plugin_serves_node_and_controller() {
    let host = Host::new();
    let mut node = host.instance("node", true, false).await;
    assert_eq!(host.plugins.can("p", ATTACHES), None);
    let error = host
        .plugins
        .controller("p", "ValidateVolumeCapabilities", soon(Duration::from_millis(50)))
        .await
        .err()
        .unwrap();
    assert!(error.message.contains("offers no controller service (it offers: node)"), "{error}");
    let mut controller = host.instance("c1", false, true).await;
    assert_eq!(host.plugins.can("p", ATTACHES), Some(true));
    host.ready().await;
    chosen(&host).await.delete("v", request(None)).await.unwrap();
    assert_eq!((node.calls("DeleteVolume"), controller.calls("DeleteVolume")), (0, 1));
    let view = host.plugins.view("p").unwrap();
    assert_eq!((view.instances, view.services), (names(&["node", "c1"]), names(&["node", "controller"])));
    assert_eq!((view.node_id.as_str(), view.healthy), ("node-1", true));
    assert_eq!(view.controller_capabilities, ["CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME"]);

    // What attaches detaches, too.
    assert!(!host.plugins.serves_without("p", "c1") && !host.plugins.serves_without("p", "node"));
    let second = host.instance("c2", false, true).await;
    assert!(host.plugins.serves_without("p", "c1") && !host.plugins.serves_without("p", "node"));
    drop(second);
    host.plugins.unregister("p", Some("c2"), 0).await.unwrap();

    // Each half's health is reported where a caller waits for it.
    controller.kill();
    until(|| !host.is_healthy("c1")).await;
    let error = host
        .plugins
        .controller("p", "ValidateVolumeCapabilities", soon(Duration::from_millis(50)))
        .await
        .err()
        .unwrap();
    assert!(error.message.contains("the plugin p (instance c1) is unhealthy"), "{error}");
    let view = host.plugins.view("p").unwrap();
    assert_eq!((view.healthy, view.services), (true, names(&["node"])), "which is what serves");
    assert_eq!(host.plugins.can("p", ATTACHES), Some(true), "what was seen is known");
    host.ready().await;
    controller.start();
    node.kill();
    until(|| !host.is_healthy("node") && host.is_healthy("c1")).await;
    assert_eq!(host.plugins.view("p").unwrap().state, "unhealthy", "as who is waited for");
    chosen(&host).await;
    let error = host.plugins.ready("p", Service::Node, soon(Duration::from_millis(50))).await.err().unwrap();
    assert!(error.message.contains("the plugin p (instance node) is unhealthy"), "{error}");
}

/// After csid's start each is seen in its own time, and the node half need not know of a controller.
#[tokio::test]
async fn capability_unknown_until_every_instance_probed() {
    let host = Host::new();
    let mut controller = Fake::new(host.directory.path(), "c1").serving(false, true);
    controller.script().plugin_capabilities = controller::services(&[]);
    let of_controller = PluginSpec { instance: Some("c1".into()), ..external(&controller.socket) };
    host.plugins.register("p", of_controller, 0).await.unwrap();
    let mut node = Fake::new(host.directory.path(), "node").serving(true, false);
    node.start();
    let of_node = PluginSpec { instance: Some("node".into()), ..external(&node.socket) };
    host.plugins.register("p", of_node, 0).await.unwrap();
    host.ready().await;
    for (what, known) in [
        (ATTACHES, None),
        (Can::Plugin("CONTROLLER_SERVICE"), None),
        (Can::Node("EXPAND_VOLUME"), None),
        (Can::Node("STAGE_UNSTAGE_VOLUME"), Some(true)),
    ] {
        assert_eq!(host.plugins.can("p", what), known, "{what:?}");
    }
    let error = host.plugins.known("p", ATTACHES, soon(Duration::from_millis(50))).await.unwrap_err();
    assert!(error.kind == Kind::PluginUnavailable && error.message.contains("(instance c1)"), "{error}");
    let waiting = {
        let plugins = host.plugins.clone();
        tokio::spawn(async move { plugins.known("p", ATTACHES, soon(LONG)).await })
    };
    // It waits now: this runtime has one thread.
    tokio::task::yield_now().await;
    controller.start();
    assert!(waiting.await.unwrap().unwrap());
    assert_eq!(host.plugins.can("p", Can::Node("EXPAND_VOLUME")), Some(false), "all were seen");
}

#[tokio::test]
async fn reregistered_older_instance_becomes_active() {
    let host = Host::new();
    let register = async |name: &str, uid| {
        let spec = instance(name, &format!("/run/{name}.sock"));
        host.plugins.register("p", spec, uid).await.unwrap();
        host.plugins.view("p").unwrap().instances
    };
    for (name, uid) in [("a", 1000), ("b", 1000)] {
        register(name, uid).await;
    }
    assert_eq!(register("c", 0).await, ["c", "b", "a"]);
    assert_eq!(register("c", 1000).await, ["c", "b", "a"], "it is the newest");
    assert_eq!(register("b", 1000).await, ["b", "c", "a"]);
    assert_eq!(register("c", 1000).await, ["b", "c", "a"], "it is root's");
    assert_eq!(register("c", 0).await, ["c", "b", "a"]);
    assert_eq!(register("a", 1000).await, ["a", "c", "b"]);
    host.plugins.unregister("p", Some("a"), 1000).await.unwrap();
    assert_eq!(register("b", 1000).await, ["c", "b"], "the plugin would become root's");
    register("d", 1000).await;
    assert_eq!(register("c", 0).await, ["c", "d", "b"]);
    let before = host.plugins.view("p").unwrap();
    assert_eq!((before.owner, before.socket.as_str()), (1000, "/run/c.sock"));
    host.plugins.shutdown().await;
    host.store.close().await.unwrap();

    let (store, rows) = open(host.directory.path());
    let directories = directories(host.directory.path());
    let again = Plugins::start_at(PACE, &directories, RPC, store, Vec::new(), (rows, BTreeMap::new()));
    let view = again.view("p").unwrap();
    assert_eq!((view.instances, view.owner), (before.instances, before.owner));
}

#[tokio::test]
async fn the_journal_remembers_which_is_the_newest() {
    let host = Host::new();
    for (name, uid) in [("b", 1000), ("c", 0), ("a", 1000)] {
        let spec = instance(name, &format!("/run/{name}.sock"));
        host.plugins.register("p", spec, uid).await.unwrap();
    }
    host.plugins.unregister("p", Some("c"), 0).await.unwrap();
    host.plugins.register("p", instance("c", "/run/c.sock"), 0).await.unwrap();
    let before = host.plugins.view("p").unwrap();
    assert_eq!((&before.instances, before.owner), (&names(&["c", "a", "b"]), 1000));
    host.plugins.shutdown().await;
    host.store.close().await.unwrap();

    let (store, rows) = open(host.directory.path());
    let directories = directories(host.directory.path());
    let again =
        Plugins::start_at(PACE, &directories, RPC, store.clone(), Vec::new(), (rows, BTreeMap::new()));
    let view = again.view("p").unwrap();
    assert_eq!((view.instances, view.owner), (before.instances, before.owner));
    again.register("p", instance("d", "/run/d.sock"), 1000).await.unwrap();
    assert_eq!(again.view("p").unwrap().instances, ["d", "c", "a", "b"]);
    again.unregister("p", None, 0).await.unwrap();
    store.close().await.unwrap();
    assert!(open(host.directory.path()).1.is_empty());
}

#[tokio::test]
async fn file_defines_the_oldest_instance() {
    let file = |socket: &str| vec![("p".to_owned(), external(Path::new(socket)))];
    let host = Host::with(PACE, file("/run/file.sock"));
    let instances = || host.plugins.view("p").map(|view| view.instances).unwrap_or_default();
    let theirs = host.plugins.register("p", instance("b", "/run/b.sock"), 1000).await;
    assert_eq!(theirs.unwrap_err().kind, Kind::NotAuthorized, "the file is root's");
    host.plugins.register("p", instance("b", "/run/b.sock"), 0).await.unwrap();
    assert_eq!(instances(), ["b", "default"]);
    let error = host.plugins.unregister("p", None, 0).await.unwrap_err();
    assert!(error.message.contains("plugins.d/p.toml"), "{error}");

    // A file that is changed is no newer for it.
    let applied =
        host.plugins.apply_files(file("/run/file2.sock"), Default::default()).await.unwrap().ended().await;
    assert_eq!((applied.changed, instances()), (names(&["p"]), names(&["b", "default"])));
    let applied = host.plugins.apply_files(Vec::new(), Default::default()).await.unwrap().ended().await;
    assert_eq!((applied.removed, instances()), (names(&["p"]), names(&["b"])));
    let taken = vec![("p".to_owned(), instance("b", "/run/file.sock"))];
    let applied = host.plugins.apply_files(taken, Default::default()).await.unwrap().ended().await;
    assert_eq!((applied.failed.len(), instances()), (1, names(&["b"])));
    let applied =
        host.plugins.apply_files(file("/run/file.sock"), Default::default()).await.unwrap().ended().await;
    assert_eq!((applied.added, instances()), (names(&["p"]), names(&["b", "default"])));

    // At the next start, too, a file's plugin is not joined by another's instance that was there before it.
    let row = |instance: &str, uid| PluginRow {
        id: "p".into(),
        instance: instance.into(),
        number: 1,
        uid,
        spec: format!(
            r#"{{"supervision":"external","socket":"/run/{instance}.sock","instance":"{instance}"}}"#
        ),
    };
    let rows = vec![row("theirs", 1000), row("roots", 0)];
    let directories = directories(host.directory.path());
    let next = Plugins::start_at(
        PACE,
        &directories,
        RPC,
        host.store.clone(),
        file("/run/file.sock"),
        (rows, BTreeMap::new()),
    );
    assert_eq!(next.view("p").unwrap().instances, ["roots", "default"]);

    // Nor is another's plugin joined by a file that root wrote for a plugin of root's.
    host.plugins.register("q", instance("b", "/run/q.sock"), 1000).await.unwrap();
    let both = [file("/run/file.sock"), vec![("q".to_owned(), external(Path::new("/run/x.sock")))]].concat();
    let applied = host.plugins.apply_files(both, Default::default()).await.unwrap().ended().await;
    assert_eq!((applied.failed.len(), applied.added.len()), (1, 0));
    assert_eq!(host.plugins.view("q").unwrap().instances, ["b"]);
}
