//! Who may register what, what the journal remembers, and what a reload does.

use super::*;
use crate::Kind;
use crate::error::Obstacle;
use crate::plugin::{AppliedFiles, PluginChange};

#[tokio::test]
async fn registering_again_changes_nothing_or_is_refused() {
    let host = Host::new();
    let spec = external(Path::new("/run/none/csi.sock"));
    let register = |spec: PluginSpec, uid| {
        let plugins = host.plugins.clone();
        async move { plugins.register("p", spec, uid).await.map_err(|error| error.kind) }
    };
    let root = PluginSpec { plugin_root: Some("/srv/x".into()), ..spec.clone() };
    assert_eq!(register(root.clone(), 1000).await, Err(Kind::NotAuthorized));
    let view = PluginSpec { plugin_view: Some("/csi".into()), ..spec.clone() };
    assert_eq!(register(view, 1000).await, Err(Kind::NotAuthorized));
    assert_eq!(register(PluginSpec { socket: None, ..spec.clone() }, 0).await, Err(Kind::InvalidArgument));
    let managed = PluginSpec {
        supervision: Supervision::Managed,
        socket: None,
        argv: vec!["/usr/bin/no-such-program".into()],
        ..spec.clone()
    };
    assert_eq!(register(managed.clone(), 1000).await, Err(Kind::NotAuthorized));
    assert_eq!(register(managed, 0).await, Err(Kind::InvalidArgument));
    assert!(host.plugins.list().is_empty());

    assert_eq!(register(spec.clone(), 1000).await, Ok(()));
    assert_eq!(register(spec.clone(), 1000).await, Ok(()));
    assert_eq!(register(spec.clone(), 0).await, Ok(()));
    assert_eq!(register(spec, 1001).await, Err(Kind::NotAuthorized));
    assert_eq!(register(root, 0).await, Err(Kind::AlreadyExists));
    assert_eq!(host.plugins.view("p").unwrap().owner, 1000);
    let unregister = host.plugins.unregister("p", None, 1001).await;
    assert_eq!(unregister.unwrap_err().kind, Kind::NotAuthorized);
    assert!(host.plugins.view("p").is_some());
    let events = host.events("plugin-registered").await;
    assert_eq!((events.len(), events[0].0.as_str(), events[0].1["uid"].as_str()), (1, "p", "1000"));
    host.plugins.unregister("p", None, 1000).await.unwrap();
}

/// No user registers another's socket, or listens at the socket that root named.
#[tokio::test]
async fn listener_must_belong_to_the_plugin() {
    for (owner, listener) in [(OTHER, 0), (OTHER, 1000), (0, OTHER)] {
        let host = Host::new();
        let mut fake = host.fake();
        fake.start_as(listener);
        host.plugins.register("p", external(&fake.socket), owner).await.unwrap();
        host.state(&["unhealthy"]).await;
        let view = host.plugins.view("p").unwrap();
        let why = if owner == 0 { "can be written by others" } else { "the plugin is uid 65534's" };
        assert!(view.health_message.contains(why), "{}", view.health_message);
        assert!(fake.script().calls.is_empty(), "nothing was sent");
    }
}

#[tokio::test]
async fn journal_keeps_plugin_until_unregistered() {
    let host = Host::new();
    let mut fake = host.fake();
    fake.start();
    host.register(&fake).await;
    host.ready().await;
    host.plugins.shutdown().await;
    host.store.close().await.unwrap();

    let (store, rows) = open(host.directory.path());
    assert_eq!(rows.len(), 1);
    let directories = directories(host.directory.path());
    let plugins =
        Plugins::start_at(PACE, &directories, RPC, store.clone(), Vec::new(), (rows, BTreeMap::new()));
    plugins.ready("p", Service::Node, soon(LONG)).await.unwrap();
    plugins.unregister("p", Some("other"), 0).await.unwrap();
    assert!(plugins.view("p").is_some());
    plugins.unregister("p", None, 0).await.unwrap();
    assert!(plugins.view("p").is_none());
    plugins.unregister("p", None, 0).await.unwrap();
    assert_eq!(plugins.probe("p", None).await.unwrap_err().kind, Kind::NotFound);
    store.close().await.unwrap();
    assert!(open(host.directory.path()).1.is_empty());
}

#[tokio::test]
async fn file_overrides_registration_and_is_fixed_on_the_bus() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = open(directory.path());
    let row = |id: &str, spec: &str| PluginRow {
        id: id.into(),
        instance: "default".into(),
        number: 1,
        uid: 7,
        spec: spec.into(),
    };
    let rows = vec![
        row("a", r#"{"supervision":"external","socket":"/run/row.sock"}"#),
        row("b", r#"{"supervision":"external","socket":"/run/row.sock"}"#),
        row("c", r#"{"supervision":"external","socket":"/run/row.sock","from-the-future":1}"#),
        row("d", r#"{"supervision":"external"}"#),
    ];
    let files = vec![("a".to_owned(), external(Path::new("/run/file.sock")))];
    let plugins =
        Plugins::start_at(PACE, &directories(directory.path()), RPC, store, files, (rows, BTreeMap::new()));
    let sockets: Vec<_> = plugins.list().into_iter().map(|view| (view.id, view.socket)).collect();
    let expected = [("a", "/run/file.sock"), ("b", "/run/row.sock")];
    assert_eq!(sockets, expected.map(|(id, socket)| (id.to_owned(), socket.to_owned())));

    let register = plugins.register("a", external(Path::new("/run/file.sock")), 0).await;
    assert_eq!(register.unwrap_err().kind, Kind::AlreadyExists);
    let unregister = plugins.unregister("a", None, 0).await.unwrap_err();
    assert!(unregister.message.contains("plugins.d/a.toml"), "{unregister}");
}

#[tokio::test]
async fn reload_keeps_plugins_in_use() {
    let socket = |name: &str| external(Path::new(name));
    let file = |id: &str, name: &str| (id.to_owned(), socket(name));
    let host = Host::with(PACE, vec![file("a", "/run/a.sock"), file("b", "/run/b.sock")]);
    host.plugins.register("r", socket("/run/r.sock"), 0).await.unwrap();
    let mut changes = host.plugins.subscribe();
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();

    // `a` is gone but used, `b` changed, `c` new, `r` is registered on the bus.
    let files = vec![file("b", "/run/b2.sock"), file("c", "/run/c.sock"), file("r", "/run/x.sock")];
    let applied =
        host.plugins.apply_files(files.clone(), ["a".to_owned()].into()).await.unwrap().ended().await;
    assert_eq!((applied.kept, applied.changed), (names(&["a"]), names(&["b"])));
    assert_eq!((applied.added, applied.removed), (names(&["c"]), names(&[])));
    assert_eq!(applied.failed.len(), 1);
    assert_eq!(host.plugins.view("b").unwrap().socket, "/run/b2.sock");
    assert_eq!(host.plugins.view("r").unwrap().socket, "/run/r.sock");
    let mut seen = Vec::new();
    while let Ok(change) = changes.try_recv() {
        match change {
            PluginChange::Added(id) => seen.push(format!("+{id}")),
            PluginChange::Removed(id) => seen.push(format!("-{id}")),
            PluginChange::Changed(_) => {}
        }
    }
    assert_eq!(seen, ["-b", "+b", "+c"]);

    let again =
        host.plugins.apply_files(files[..2].to_vec(), ["a".to_owned()].into()).await.unwrap().ended().await;
    assert_eq!(again, AppliedFiles { kept: names(&["a"]), ..AppliedFiles::default() });
    let gone = host.plugins.apply_files(files[..2].to_vec(), Default::default()).await.unwrap().ended().await;
    assert_eq!(gone, AppliedFiles { removed: names(&["a"]), ..AppliedFiles::default() });
    let ids: Vec<_> = host.plugins.list().into_iter().map(|view| view.id).collect();
    assert_eq!(ids, ["b", "c", "r"]);
}

#[tokio::test]
async fn a_plugin_that_is_not_there_yet_is_waited_for() {
    let host = Host::new();
    let mut fake = host.fake();
    fake.start();
    let waiting = {
        let plugins = host.plugins.clone();
        tokio::spawn(async move { plugins.wait("p", Service::Node, Some(soon(LONG))).await })
    };
    let error = host.plugins.ready("p", Service::Node, soon(Duration::from_millis(30))).await.err().unwrap();
    assert_eq!((error.kind, error.details.plugin.as_deref()), (Kind::PluginUnavailable, Some("p")));
    assert_eq!(error.details.obstacle, Some(Obstacle::UnknownPlugin), "{error}");
    let timed_out = host.plugins.wait("p", Service::Node, Some(soon(Duration::from_millis(30)))).await;
    assert_eq!(timed_out.unwrap_err().kind, Kind::TimedOut);
    host.register(&fake).await;
    waiting.await.unwrap().unwrap();
}

/// Without systemd a managed plugin says why it does not run, and nothing else suffers.
#[tokio::test]
async fn a_managed_plugin_without_systemd_is_failed() {
    if Path::new("/run/systemd/system").exists() {
        eprintln!("not run: there is a systemd here; tests/container tries managed plugins");
        return;
    }
    let host = Host::new();
    let managed = PluginSpec {
        supervision: Supervision::Managed,
        socket: None,
        argv: vec!["/bin/sh".into()],
        ..external(Path::new(""))
    };
    host.plugins.register("p", managed, 0).await.unwrap();
    host.state(&["failed"]).await;
    let view = host.plugins.view("p").unwrap();
    assert!(view.health_message.contains("no systemd answers on the system bus"), "{view:?}");
    assert_eq!(host.plugins.probe("p", Some(soon(LONG))).await.unwrap_err().kind, Kind::PluginUnavailable);
    assert_eq!(host.plugins.unregister("p", None, 0).await.unwrap_err().kind, Kind::Internal);
    assert!(host.plugins.view("p").is_some());
}
