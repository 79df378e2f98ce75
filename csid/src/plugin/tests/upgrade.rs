//! One instance takes another's place: who is asked meanwhile, what becomes of calls under way, and what is left when it cannot.

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tokio::task::JoinHandle;

use super::controller::{request, services};
use super::*;
use crate::Kind;
use crate::error::{Error, Obstacle};
use crate::store::{Change, Durability};

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
async fn upgrade_moves_new_calls_and_ends_old_ones() {
    let host = Host::new();
    let old = host.instance("old", true, true).await;
    old.script().answer = None;
    let slow = {
        let controller =
            host.plugins.controller("p", "ValidateVolumeCapabilities", soon(LONG)).await.unwrap();
        tokio::spawn(async move { controller.delete("slow", request(None)).await })
    };
    until(|| old.calls("DeleteVolume") == 1).await;
    // What is in hand may be used yet.
    let in_hand = host.ready().await;
    let new = started(&host, "new");
    let first = upgrade(&host, spec(&new, "new"));
    until(|| instances(&host.plugins)[0] == "new").await;
    for volume in 0..4 {
        let controller =
            host.plugins.controller("p", "ValidateVolumeCapabilities", soon(LONG)).await.unwrap();
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
    let probes = old.calls("Probe");
    until(|| old.calls("Probe") > probes + 1).await;
    assert!(!first.is_finished() && host.is_healthy("old"), "one is in hand yet");
    drop(in_hand);
    assert_eq!(first.await.unwrap().unwrap(), "new");
    assert_eq!(again.await.unwrap().unwrap(), "new", "who asked the same has the same answer");
    assert_eq!(instances(&host.plugins), ["new"]);
    let seen = host.events("plugin-upgraded").await;
    assert_eq!((seen.len(), seen[0].1["from"].as_str(), seen[0].1["to"].as_str()), (1, "old", "new"));
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
async fn upgrade_that_stays_unhealthy_is_removed() {
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
    let seen = host.events("plugin-upgraded").await;
    assert!(seen.len() == 1 && seen[0].1["success"] == "false", "{seen:?}");
    let (_directory, rows) = kept(host).await;
    assert_eq!(rows.iter().map(|row| row.instance.as_str()).collect::<Vec<_>>(), ["old"]);
}

#[tokio::test]
async fn upgrade_to_another_plugin_is_refused() {
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
async fn next_csid_ends_the_upgrade() {
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
async fn refused_upgrade_has_its_reason() {
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
        ("filed", "default", good(), 0, Kind::NotSupported, "is defined by plugins.d/filed.toml"),
        ("p", "old", good(), OTHER, Kind::NotAuthorized, "another uid"),
        (
            "p",
            "old",
            spec(&old, "new"),
            0,
            Kind::InvalidArgument,
            "instance `old` of the plugin p has that socket",
        ),
        ("p", "old", same_name, 0, Kind::AlreadyExists, "has an instance `old`"),
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
    assert_eq!(error.details.obstacle, Some(Obstacle::SeveralInstances), "{error}");
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
    let other = PluginSpec { argv: vec!["/bin/sleep".into(), argument], ..named("two") };
    let (was, said) = refused("m", "one", other, 0).await;
    assert!(was == Kind::InvalidArgument && said.contains("or an argument"), "{was:?}: {said}");
}

/// A reload that changed what is started made it: the next csid finds the unit by it.
#[tokio::test]
async fn file_instance_keeps_its_running_name() {
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
        // A file that was removed while csid did not run defines no instance.
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

/// Which instance is asked is a matter of when it came, and an upgrade changes nothing of that; nor whose the plugin is.
#[tokio::test]
async fn upgraded_instance_keeps_its_age() {
    let host = Host::new();
    let old = host.instance("old", true, true).await;
    let _second = host.instance("second", true, true).await;
    let new = started(&host, "new");
    assert_eq!(upgrade(&host, spec(&new, "new")).await.unwrap().unwrap(), "new");
    assert_eq!(instances(&host.plugins), ["second", "new"]);
    let name = host.plugins.upgrade("p", "new", external(&old.socket), 0).await.unwrap();
    assert_eq!(instances(&host.plugins), ["second", name.as_str()]);

    host.plugins.register("q", spec(&new, "theirs"), OTHER).await.unwrap();
    host.plugins
        .register("q", PluginSpec { socket: Some("/run/q.sock".into()), ..spec(&new, "roots") }, 0)
        .await
        .unwrap();
    let mut late = Fake::new(host.directory.path(), "late");
    late.start_as(OTHER);
    host.plugins.upgrade("q", "theirs", spec(&late, "later"), 0).await.unwrap();
    let (directory, rows) = kept(host).await;
    let (store, _) = open(directory.path());
    let places = directories(directory.path());
    let plugins = Plugins::start_at(PACE, &places, RPC, store.clone(), Vec::new(), (rows, BTreeMap::new()));
    assert_eq!(plugins.entries()["q"].len(), 2, "both are there again");
    assert_eq!(plugins.view("q").unwrap().owner, OTHER);
    assert_eq!(plugins.entries()["p"][0].spec.instance(), "second");
    plugins.shutdown().await;
    store.close().await.unwrap();
}

/// Makes the same call as the bus does of its arguments.
async fn again(plugins: &Plugins, replaced: Option<&str>, given: &PluginSpec) -> Result<String, Error> {
    let before = plugins.upgradable("p", replaced)?;
    let spec =
        PluginSpec { socket: given.socket.clone(), instance: given.instance.clone(), ..before.clone() };
    plugins.upgrade("p", before.instance(), spec, 0).await
}

#[tokio::test]
async fn the_same_call_again_has_the_same_answer() {
    for name in [Some("new"), None] {
        let host = Host::new();
        let old = host.instance("old", true, true).await;
        let _second = host.instance("second", true, true).await;
        let in_hand = {
            let entries = host.plugins.entries();
            let old = entries["p"].iter().find(|entry| entry.spec.instance() == "old");
            old.unwrap().hands.as_ref().unwrap().give()
        };
        let new = started(&host, "new");
        let given = PluginSpec { instance: name.map(str::to_owned), ..external(&new.socket) };
        let (plugins, asked) = (host.plugins.clone(), given.clone());
        let first = tokio::spawn(async move { again(&plugins, Some("old"), &asked).await });
        // The old one is given to nobody any more, and is in hand yet.
        let taken = || host.plugins.entries()["p"].iter().any(|entry| entry.hands.is_none());
        until(taken).await;
        let (plugins, asked) = (host.plugins.clone(), given.clone());
        let joined = tokio::spawn(async move { again(&plugins, Some("old"), &asked).await });
        // The old one is probed on.
        let probes = old.calls("Probe");
        until(|| old.calls("Probe") > probes + 1).await;
        assert!(!first.is_finished() && !joined.is_finished());
        let others = again(&host.plugins, Some("second"), &given).await.unwrap_err();
        assert_eq!(others.kind, Kind::Busy, "it is not the same instance that is replaced");
        drop(in_hand);
        let answer = first.await.unwrap().unwrap();
        assert_eq!(joined.await.unwrap().unwrap(), answer, "joined");
        assert_eq!(again(&host.plugins, Some("old"), &given).await.unwrap(), answer, "after it was done");
        let other = PluginSpec { socket: Some("/run/other.sock".into()), ..given.clone() };
        let error = again(&host.plugins, Some("old"), &other).await.unwrap_err();
        assert!(error.kind == Kind::NotFound && error.message.contains(&answer), "{error}");

        // And in the next csid.
        let (directory, rows) = kept(host).await;
        let (store, _) = open(directory.path());
        let places = directories(directory.path());
        let plugins =
            Plugins::start_at(PACE, &places, RPC, store.clone(), Vec::new(), (rows, BTreeMap::new()));
        assert_eq!(again(&plugins, Some("old"), &given).await.unwrap(), answer, "after csid's restart");
        plugins.shutdown().await;
        store.close().await.unwrap();
    }
}

/// The disk of the journal, until it is dropped.
struct Disk(std::path::PathBuf);

impl Disk {
    /// Also the journal finds no room any more in what it has.
    async fn fill(&self, store: &Store) {
        let mut filler = std::fs::File::create(self.0.join("filler")).unwrap();
        for size in [65536, 512] {
            while std::io::Write::write_all(&mut filler, &vec![0; size]).is_ok() {}
        }
        let mut rows = 0;
        for size in [1 << 20, 1 << 16, 1 << 12, 1] {
            loop {
                rows += 1;
                let (id, spec) = (format!("filler{rows}"), "x".repeat(size));
                let row = PluginRow { id, instance: "default".into(), number: 0, uid: 0, spec };
                if store.commit(vec![Change::PutPlugin(row)], Durability::Disk).await.is_err() {
                    break;
                }
            }
        }
    }

    fn make_room(&self) {
        std::fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

#[tokio::test]
async fn an_upgrade_is_ended_when_there_is_room_for_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    std::fs::create_dir(&path).unwrap();
    mount("tmpfs", &path, "tmpfs", MountFlags::empty(), c"mode=0700,size=16m").unwrap();
    let disk = Disk(path);
    let host = Host::within(directory, Pace { start: LONG, ..PACE }, Vec::new());
    let _old = host.instance("old", true, true).await;
    let mut new = Fake::new(host.directory.path(), "new");
    new.script().plugin_capabilities = services(&[]);
    let upgrading = upgrade(&host, spec(&new, "new"));
    until(|| instances(&host.plugins).len() == 2).await;
    disk.fill(&host.store).await;
    new.start();
    until(|| instances(&host.plugins) == ["new"]).await;
    // The journal refuses this row after the end of the upgrade.
    let (id, spec) = ("late".to_owned(), "x".repeat(1 << 16));
    let row = PluginRow { id, instance: "default".into(), number: 0, uid: 0, spec };
    host.store.commit(vec![Change::PutPlugin(row)], Durability::Disk).await.unwrap_err();
    assert!(!upgrading.is_finished(), "it is not forgotten that the old one was stopped");
    let error = host.plugins.unregister("p", None, 0).await.unwrap_err();
    assert_eq!(error.kind, Kind::Busy, "nobody waits for room: {error}");
    disk.make_room();
    assert_eq!(upgrading.await.unwrap().unwrap(), "new");
    let (_directory, mut rows) = kept(host).await;
    rows.retain(|row| row.id == "p");
    assert_eq!(rows.iter().map(|row| row.instance.as_str()).collect::<Vec<_>>(), ["new"]);
}

/// A row that nobody can read, or that lost its place, is not there again after the plugin was forgotten.
#[tokio::test]
async fn a_plugin_that_is_forgotten_leaves_no_row() {
    let host = Host::new();
    let fake = Fake::new(host.directory.path(), "old");
    host.plugins.register("p", spec(&fake, "old"), 0).await.unwrap();
    host.plugins.register("other", external(&fake.socket), 0).await.unwrap();
    let row = |instance: &str| PluginRow {
        id: "p".into(),
        instance: instance.into(),
        number: 7,
        uid: 0,
        spec: "what an older csid wrote".into(),
    };
    let left = Change::PutPlugin(row("left"));
    host.store.commit(vec![left], Durability::Disk).await.unwrap();
    host.plugins.unregister("p", None, 0).await.unwrap();
    let (_directory, rows) = kept(host).await;
    assert_eq!(rows.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(), ["other"]);
}

/// csid is killed while the new one is tried, and the old one never comes back: what it was is known all the same.
#[tokio::test]
async fn facts_of_the_old_instance_survive_restart() {
    let host = Host::with(Pace { start: LONG, ..PACE }, Vec::new());
    let mut old = host.instance("old", true, true).await;
    let mut new = Fake::new(host.directory.path(), "new");
    let trying = upgrade(&host, spec(&new, "new"));
    until(|| instances(&host.plugins).len() == 2).await;
    let (directory, rows) = kept(host).await;
    assert!(trying.await.unwrap().is_err());
    old.kill();
    new.script().plugin_capabilities = services(&[]);
    new.script().name = "other.csi".into();
    new.start();
    let (store, _) = open(directory.path());
    let places = directories(directory.path());
    let pace = Pace { start: Duration::from_secs(5), ..PACE };
    let plugins = Plugins::start_at(pace, &places, RPC, store.clone(), Vec::new(), (rows, BTreeMap::new()));
    until(|| instances(&plugins).len() == 1).await;
    assert_eq!(instances(&plugins), ["old"]);
    plugins.shutdown().await;
    store.close().await.unwrap();
}
