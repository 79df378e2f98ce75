//! One instance takes another's place: who is asked meanwhile, what becomes of calls under way, and what is left when it cannot.

use tokio::task::JoinHandle;

use super::controller::{request, services};
use super::*;
use crate::Kind;
use crate::error::Error;

/// A program that listens, and is not registered.
fn started(host: &Host, name: &str) -> Fake {
    let mut fake = Fake::new(host.directory.path(), name);
    fake.script().plugin_capabilities = services(&[]);
    fake.start();
    fake
}

fn spec(fake: &Fake, name: &str) -> PluginSpec {
    PluginSpec { instance: Some(name.into()), ..external(&fake.socket) }
}

fn upgrade(host: &Host, spec: PluginSpec) -> JoinHandle<Result<String, Error>> {
    let plugins = host.plugins.clone();
    tokio::spawn(async move { plugins.upgrade("p", "old", spec, 0).await })
}

fn instances(plugins: &Plugins) -> Vec<String> {
    plugins.view("p").unwrap().instances
}

/// The instances that the journal has.
async fn kept(host: Host) -> (tempfile::TempDir, Vec<PluginRow>) {
    host.plugins.shutdown().await;
    host.store.close().await.unwrap();
    let (store, rows) = open(host.directory.path());
    store.close().await.unwrap();
    (host.directory, rows)
}

#[tokio::test]
async fn calls_go_over_and_those_under_way_come_to_their_end() {
    let host = Host::new();
    let old = host.instance("old", true, true).await;
    old.script().answer = None;
    let slow = {
        let controller = host.plugins.controller("p", soon(LONG)).await.unwrap();
        tokio::spawn(async move { controller.delete("slow", request(None)).await })
    };
    until(|| old.calls("DeleteVolume") == 1).await;
    // What is in hand may be used yet.
    let in_hand = host.ready().await;
    let new = started(&host, "new");
    let first = upgrade(&host, spec(&new, "new"));
    until(|| instances(&host.plugins)[0] == "new").await;
    for volume in 0..4 {
        let controller = host.plugins.controller("p", soon(LONG)).await.unwrap();
        controller.delete(&format!("v{volume}"), request(None)).await.unwrap();
    }
    assert_eq!((old.calls("DeleteVolume"), new.calls("DeleteVolume")), (1, 4));
    assert!(host.ready().await.0.peer.id.as_ref() == "p" && host.plugins.healthy_now("p"));

    // Meanwhile nothing else changes which there are.
    let others = Fake::new(host.directory.path(), "other");
    let busy = |result: Result<(), Error>| assert_eq!(result.unwrap_err().kind, Kind::Busy);
    busy(host.plugins.register("p", spec(&others, "other"), 0).await);
    busy(host.plugins.unregister("p", Some("old"), 0).await);
    busy(upgrade(&host, spec(&others, "other")).await.unwrap().map(drop));
    let again = upgrade(&host, spec(&new, "new"));

    slow.abort();
    assert!(slow.await.unwrap_err().is_cancelled());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!first.is_finished() && host.is_healthy("old"), "one is in hand yet");
    drop(in_hand);
    assert_eq!(first.await.unwrap().unwrap(), "new");
    assert_eq!(again.await.unwrap().unwrap(), "new", "who asked the same has the same answer");
    assert_eq!(instances(&host.plugins), ["new"]);
    let told = host.events("plugin-upgraded").await;
    assert_eq!((told.len(), told[0].1["from"].as_str(), told[0].1["to"].as_str()), (1, "old", "new"));
    assert_eq!(host.events("plugin-instance").await.len(), 2, "one came, one left");
    let done = host.plugins.upgrade("p", "new", spec(&new, "new"), 0).await;
    assert_eq!(done.unwrap(), "new", "repeated after it was done");

    // The next one has its name from csid.
    let next = started(&host, "next");
    let name = host.plugins.upgrade("p", "new", external(&next.socket), 0).await.unwrap();
    assert_eq!(instances(&host.plugins), [name.as_str()]);
    let (_directory, rows) = kept(host).await;
    assert_eq!(rows.iter().map(|row| row.instance.as_str()).collect::<Vec<_>>(), [name]);
    assert!(!rows[0].spec.contains("replaces"));
}

/// A call that is never answered keeps nobody from the new version for longer than a call may take.
#[tokio::test]
async fn a_call_that_hangs_is_not_waited_for_for_ever() {
    let host = Host::new();
    let old = Fake::new(host.directory.path(), "old");
    let mut old = old.serving(true, true);
    old.script().plugin_capabilities = services(&[]);
    old.start();
    let brief = PluginSpec { rpc_deadline: Some("300ms".into()), ..spec(&old, "old") };
    host.plugins.register("p", brief, 0).await.unwrap();
    let in_hand = host.ready().await;
    let new = started(&host, "new");
    assert_eq!(upgrade(&host, spec(&new, "new")).await.unwrap().unwrap(), "new");
    assert_eq!(instances(&host.plugins), ["new"]);
    drop(in_hand);
}

#[tokio::test]
async fn one_that_does_not_become_healthy_is_gone_again() {
    let host = Host::new();
    let _old = host.instance("old", true, true).await;
    let new = Fake::new(host.directory.path(), "new");
    let trying = upgrade(&host, spec(&new, "new"));
    until(|| instances(&host.plugins).len() == 2).await;
    assert_eq!(instances(&host.plugins), ["old", "new"]);
    assert!(host.plugins.healthy_now("p"));
    let error = trying.await.unwrap().unwrap_err();
    assert_eq!(error.kind, Kind::PluginUnavailable);
    for part in ["instance `new` did not become healthy", "instance `old` goes on as before"] {
        assert!(error.message.contains(part), "{error}");
    }
    assert_eq!(instances(&host.plugins), ["old"]);
    host.ready().await;
    let told = host.events("plugin-upgraded").await;
    assert!(told.len() == 1 && told[0].1["success"] == "false", "{told:?}");
    let (_directory, rows) = kept(host).await;
    assert_eq!(rows.iter().map(|row| row.instance.as_str()).collect::<Vec<_>>(), ["old"]);
}

#[tokio::test]
async fn what_is_another_plugin_takes_no_place() {
    type Change = fn(&Fake);
    let changes: [(&str, Change); 3] = [
        ("it is other.csi, and not test.csi", |fake| fake.script().name = "other.csi".into()),
        (r#"calls this node "node-2", and not "node-1""#, |fake| fake.script().node_id = "node-2".into()),
        ("does not offer STAGE_UNSTAGE_VOLUME", |fake| fake.script().node_capabilities.clear()),
    ];
    let host = Host::new();
    let _old = host.instance("old", true, true).await;
    for (why, change) in changes {
        let new = started(&host, "new");
        change(&new);
        let error = upgrade(&host, spec(&new, "new")).await.unwrap().unwrap_err();
        assert!(error.kind == Kind::InvalidArgument && error.message.contains(why), "{error}");
        assert_eq!((instances(&host.plugins), new.calls("NodeStageVolume")), (vec!["old".to_owned()], 0));
    }
    let mut half = Fake::new(host.directory.path(), "half").serving(true, false);
    half.start();
    let error = upgrade(&host, spec(&half, "half")).await.unwrap().unwrap_err();
    assert!(error.message.contains("it offers no controller service"), "{error}");
    // One that was never seen has nothing to lose.
    host.plugins.unregister("p", None, 0).await.unwrap();
    host.plugins.register("p", spec(&Fake::new(host.directory.path(), "none"), "old"), 0).await.unwrap();
    upgrade(&host, spec(&half, "half")).await.unwrap().unwrap();
}

/// csid ends while the new one is tried: the next csid goes on, and one of the two is left, whichever it is.
#[tokio::test]
async fn the_next_csid_ends_what_this_one_began() {
    for comes in [true, false] {
        let host = Host::with(Pace { start: LONG, ..PACE }, Vec::new());
        let _old = host.instance("old", true, true).await;
        let mut new = Fake::new(host.directory.path(), "new");
        let trying = upgrade(&host, spec(&new, "new"));
        until(|| instances(&host.plugins).len() == 2).await;
        let (directory, rows) = kept(host).await;
        assert_eq!(trying.await.unwrap().unwrap_err().kind, Kind::PluginShutdown);
        let names = |rows: &[PluginRow]| rows.iter().map(|row| row.instance.clone()).collect::<Vec<_>>();
        assert_eq!(rows.len(), 2, "{:?}", names(&rows));

        if comes {
            new.script().plugin_capabilities = services(&[]);
            new.start();
        }
        let (store, rows) = open(directory.path());
        // One that comes may take its time on a busy machine; one that does not is given up soon.
        let pace = if comes { Pace { start: LONG, ..PACE } } else { PACE };
        let plugins = Plugins::start_at(
            pace,
            &directories(directory.path()),
            RPC,
            store.clone(),
            Vec::new(),
            (rows, BTreeMap::new()),
        );
        assert_eq!(
            plugins.view("p").unwrap().instances,
            ["old", "new"],
            "it is not asked before it has shown"
        );
        until(|| instances(&plugins).len() == 1).await;
        let left = if comes { "new" } else { "old" };
        assert_eq!(instances(&plugins), [left]);
        plugins.ready("p", Service::Node, soon(LONG)).await.unwrap();
        // The last commit is the same change: who changes next comes after it.
        plugins.unregister("p", Some("none"), 0).await.unwrap();
        plugins.shutdown().await;
        store.close().await.unwrap();
        let (store, rows) = open(directory.path());
        assert_eq!(names(&rows), [left]);
        store.close().await.unwrap();
    }
}

#[tokio::test]
async fn what_cannot_be_upgraded_is_said() {
    let file = external(Path::new("/run/file.sock"));
    let host = Host::with(PACE, vec![("filed".to_owned(), file.clone())]);
    let old = host.instance("old", true, true).await;
    let new = Fake::new(host.directory.path(), "new");
    let good = || spec(&new, "new");
    let refused = async |id: &str, old: &str, spec: PluginSpec, uid| {
        let error = host.plugins.upgrade(id, old, spec, uid).await.unwrap_err();
        (error.kind, error.message)
    };
    let managed = || PluginSpec { argv: vec!["/bin/sleep".into()], ..PluginSpec::new(Supervision::Managed) };
    let elsewhere = PluginSpec { plugin_root: Some("/srv/x".into()), ..good() };
    let same_name = PluginSpec { instance: Some("old".into()), ..good() };
    for (id, of, spec, uid, kind, words) in [
        ("filed", "default", good(), 0, Kind::NotSupported, "change the file and reload"),
        ("p", "old", good(), OTHER, Kind::NotAuthorized, "another uid"),
        (
            "p",
            "old",
            spec(&old, "new"),
            0,
            Kind::InvalidArgument,
            "instance `old` of the plugin p has that socket",
        ),
        ("p", "old", same_name, 0, Kind::AlreadyExists, "choose another name"),
        ("p", "old", managed(), 0, Kind::InvalidArgument, "supervision cannot change"),
        ("p", "old", elsewhere, 0, Kind::InvalidArgument, "plugin-root cannot change"),
        ("p", "gone", good(), 0, Kind::NotFound, "no plugin"),
    ] {
        let (was, said) = refused(id, of, spec, uid).await;
        assert!(was == kind && said.contains(words), "{was:?}: {said}");
    }
    assert_eq!(instances(&host.plugins), ["old"]);
    let _second = host.instance("second", true, true).await;
    let error = host.plugins.upgradable("p", None).unwrap_err();
    assert!(error.message.contains("name the one to replace"), "{error}");
    assert_eq!(host.plugins.upgradable("p", Some("second")).unwrap().instance(), "second");
    assert_eq!(host.plugins.upgradable("p", Some("none")).unwrap_err().kind, Kind::NotFound);

    // Whose the instance is counts, not only whose the plugin is.
    host.plugins.register("q", spec(&new, "theirs"), OTHER).await.unwrap();
    host.plugins.register("q", spec(&old, "roots"), 0).await.unwrap();
    let (was, said) = refused("q", "roots", good(), OTHER).await;
    assert!(was == Kind::NotAuthorized && said.contains("`roots`"), "{said}");
    // An argument that says where the other one listens would take that away.
    let named = |name: &str| PluginSpec { instance: Some(name.into()), ..managed() };
    host.plugins.register("m", named("one"), 0).await.unwrap();
    let socket = directories(host.directory.path()).runtime.join("plugins/m/one/csi.sock");
    let argument = format!("--endpoint=unix://{}", socket.display());
    let beside = PluginSpec { argv: vec!["/bin/sleep".into(), argument], ..named("two") };
    let (was, said) = refused("m", "one", beside, 0).await;
    assert!(was == Kind::InvalidArgument && said.contains("or an argument"), "{was:?}: {said}");
}

/// A reload that changed what is started made it: the next csid finds the unit by it.
#[tokio::test]
async fn what_a_file_defines_keeps_the_name_that_it_runs_by() {
    let managed =
        |program: &str| PluginSpec { argv: vec![program.into()], ..PluginSpec::new(Supervision::Managed) };
    let row = |instance: &str, more: &str| PluginRow {
        id: "p".into(),
        instance: instance.into(),
        number: 0,
        uid: 0,
        spec: format!(
            r#"{{"supervision":"managed","argv":["/bin/old"],"instance":"{instance}","filed":"default"{more}}}"#
        ),
    };
    let tried = || row("i2", r#","replaces":"i1""#);
    for (file, rows, expected) in [
        (true, vec![], Some(vec!["default"])),
        (true, vec![row("i1", "")], Some(vec!["i1"])),
        (true, vec![row("i1", ""), tried()], Some(vec!["i1", "i2"])),
        (true, vec![tried()], Some(vec!["default"])),
        // Whoever took its file away while csid was not there has it no more.
        (false, vec![row("i1", "")], None),
    ] {
        let host = Host::new();
        let files = if file { vec![("p".to_owned(), managed("/bin/new"))] } else { Vec::new() };
        let directories = directories(host.directory.path());
        let plugins =
            Plugins::start_at(PACE, &directories, RPC, host.store.clone(), files, (rows, BTreeMap::new()));
        let view = plugins.view("p");
        assert_eq!(view.as_ref().map(|view| view.instances.iter().map(String::as_str).collect()), expected);
        if let (Some(view), Some(names)) = (view, expected) {
            assert_eq!(view.unit, format!("csi-plugin-p-{}.service", names[0]));
        }
        plugins.shutdown().await;
    }
}
