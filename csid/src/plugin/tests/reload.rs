//! A reload of plugins.d over what runs, and what csid's next start finds of it.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use super::systemd::Systemd;
use super::*;
use crate::plugin::profile::Profile;
use crate::plugin::spec::unit_name;
use crate::plugin::{AppliedFiles, files};
use crate::store::{Change, Durability};

/// A start may take long on a busy machine.
const UNHURRIED: Pace = Pace { start: LONG, ..PACE };

/// Returns a plugin that listens at one socket, whatever its instance is called.
fn managed(socket: &Path) -> PluginSpec {
    PluginSpec {
        // Not the program that runs here, but one that csid trusts.
        argv: vec!["/bin/sh".into()],
        environment: [("CSI_ENDPOINT".into(), format!("unix://{}", socket.display()))].into(),
        ..PluginSpec::new(Supervision::Managed)
    }
}

fn file(spec: &PluginSpec) -> Vec<(String, PluginSpec)> {
    vec![("p".to_owned(), spec.clone())]
}

async fn reload(plugins: &Plugins, spec: &PluginSpec) -> AppliedFiles {
    plugins.apply_files(file(spec), Default::default()).await.unwrap().ended().await
}

fn instances(plugins: &Plugins) -> Vec<String> {
    plugins.view("p").unwrap().instances
}

/// Waits until the plugin's process was started `starts` times, and lets it listen.
async fn serve(host: &Host, systemd: &Systemd, fake: &mut Fake, starts: usize) {
    let started = async {
        while systemd.pid() == 0 || systemd.machine().starts != starts {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    if tokio::time::timeout(LONG, started).await.is_err() {
        panic!("it was not started: {:?}", host.plugins.view("p"));
    }
    fake.kill();
    fake.start();
    host.ready().await;
}

/// Returns the instances of the journal, each with its name in the file.
async fn kept(store: &Store) -> Vec<(String, bool)> {
    let rows = store.rows().await.unwrap().plugins;
    rows.into_iter().map(|row| (row.instance, row.spec.contains(r#""filed":"default""#))).collect()
}

#[tokio::test]
async fn reload_with_helpers_left_starts_another_unit() {
    let directory = tempfile::tempdir().unwrap();
    let first = managed(&directory.path().join("csi.sock"));
    let mut renewed = first.clone();
    renewed.environment.insert("TZ".into(), "UTC".into());
    let profiled = PluginSpec { profile: Some(Profile::NodeNet), ..first.clone() };
    let host = Host::within(directory, UNHURRIED, Vec::new());
    let systemd = Systemd::behind(&host.plugins.units()).await;
    systemd.machine().runs = "/bin/sleep 1000";
    systemd.machine().helps = true;
    let mut fake = host.fake();
    reload(&host.plugins, &first).await;
    serve(&host, &systemd, &mut fake, 1).await;

    // The helpers of each unit live on.
    for (starts, spec, name) in [(2, &renewed, "i1"), (3, &profiled, "i2")] {
        assert_eq!(reload(&host.plugins, spec).await.changed, ["p"]);
        serve(&host, &systemd, &mut fake, starts).await;
        assert_eq!(
            (instances(&host.plugins), kept(&host.store).await),
            (vec![name.into()], vec![(name.into(), true)])
        );
        assert_eq!(systemd.machine().unit, unit_name("p", name));
    }

    // The next csid finds it by its name.
    host.plugins.shutdown().await;
    host.store.close().await.unwrap();
    let pid = systemd.pid();
    let host = Host::within(host.directory, UNHURRIED, file(&profiled));
    systemd.connect(&host.plugins.units()).await;
    host.ready().await;
    assert_eq!((systemd.pid(), systemd.machine().starts), (pid, 3), "it is adopted");

    // With the helpers gone the name is the file's again.
    systemd.machine().left.clear();
    assert_eq!(reload(&host.plugins, &first).await.changed, ["p"]);
    serve(&host, &systemd, &mut fake, 4).await;
    assert_eq!((instances(&host.plugins), kept(&host.store).await), (vec!["default".into()], vec![]));
    assert_eq!(systemd.machine().unit, unit_name("p", "default"));
}

/// csid starts while the file is wrong, and the file is mended.
#[tokio::test]
async fn mended_file_keeps_its_running_name() {
    let row = |instance: &str, more: &str| PluginRow {
        id: "p".into(),
        instance: instance.into(),
        number: 0,
        uid: 0,
        spec: format!(
            r#"{{"supervision":"managed","argv":["/bin/sh"],"instance":"{instance}","filed":"default"{more}}}"#
        ),
    };
    let tried = || row("i2", r#","replaces":"i1""#);
    let expected: [(_, &[&str]); 3] = [
        (vec![], &["default"]),
        (vec![row("i1", "")], &["i1"]),
        // The upgrade goes on.
        (vec![row("i1", ""), tried()], &["i1", "i2"]),
    ];
    for (rows, names) in expected {
        let before = Host::new();
        let rows = rows.into_iter().map(Change::PutPlugin).collect();
        before.store.commit(rows, Durability::Disk).await.unwrap();
        before.plugins.shutdown().await;
        before.store.close().await.unwrap();

        let host = Host::within(before.directory, UNHURRIED, Vec::new());
        let systemd = Systemd::behind(&host.plugins.units()).await;
        systemd.machine().runs = "/bin/sleep 1000";
        assert!(host.plugins.view("p").is_none(), "no file defines it");
        let spec = PluginSpec { argv: vec!["/bin/sh".into()], ..PluginSpec::new(Supervision::Managed) };
        assert_eq!(reload(&host.plugins, &spec).await.added, ["p"]);
        assert_eq!(instances(&host.plugins), names);
        let unit = host.plugins.view("p").unwrap().unit;
        assert_eq!(unit, unit_name("p", names[0]));
        let came = host.events("plugin-registered").await.pop().unwrap().1;
        assert_eq!(came["instance"], names[0]);
        if names.len() > 1 {
            let renewed = PluginSpec { environment: [("A".into(), "b".into())].into(), ..spec };
            let failed = reload(&host.plugins, &renewed).await.failed;
            assert!(failed.len() == 1 && failed[0].contains("upgrade"), "{failed:?}");
        }
        host.plugins.shutdown().await;
    }
}

/// csid starts before the mounts of remote-fs.target.
#[tokio::test]
async fn late_program_starts_its_plugin() {
    let late = tempfile::tempdir_in("/run").unwrap();
    let program = late.path().join("driver");
    let directory = tempfile::tempdir().unwrap();
    let text = format!("supervision = \"managed\"\nargv = [{program:?}]\n");
    std::fs::write(directory.path().join("p.toml"), text).unwrap();
    let files = files::load_each(directory.path()).unwrap().into_iter().collect::<Result<_, _>>().unwrap();

    let host = Host::within(directory, UNHURRIED, files);
    let systemd = Systemd::behind(&host.plugins.units()).await;
    systemd.machine().runs = "/bin/sleep 1000";
    until(|| {
        let view = host.plugins.view("p").unwrap();
        view.state == "failed" && view.health_message.contains(&*program.to_string_lossy())
    })
    .await;
    assert_eq!(systemd.machine().starts, 0);
    std::fs::write(&program, "").unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    until(|| systemd.machine().starts == 1).await;
}
