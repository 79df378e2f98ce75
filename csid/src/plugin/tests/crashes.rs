//! Plugins that end, over and over.

use super::systemd::Systemd;
use super::*;
use crate::Kind;

const CRASHES: u32 = 1000;

fn managed(socket: &Path) -> PluginSpec {
    PluginSpec {
        supervision: Supervision::Managed,
        socket: None,
        // Not the program that runs here, but one that csid trusts.
        argv: vec!["/bin/sh".into()],
        environment: [("CSI_ENDPOINT".into(), format!("unix://{}", socket.display()))].into(),
        ..external(socket)
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test]
async fn thousand_crashes_leave_one_process() {
    let millis = Duration::from_millis;
    let pace = Pace { restart: millis(1), longest: millis(1), start: millis(50), ..PACE };
    let host = Host::with(pace, Vec::new());
    let systemd = Systemd::behind(&host.plugins.units()).await;
    let mut fake = host.fake();
    // In turn: exit with an error, killed, failed at once, exited well, never ready.
    const ENDS: [&str; 5] =
        ["/bin/sh -c 'exit 3'", "/bin/sh -c 'kill -9 $$'", "/bin/false", "/bin/true", "/bin/sleep 0.02"];
    const HANGS: &str = "/bin/sleep 1000";
    systemd.machine().runs = HANGS;
    let tasks = tokio::runtime::Handle::current().metrics();
    let before = tasks.num_alive_tasks();
    host.plugins.register("p", managed(&fake.socket), 0).await.unwrap();
    until(|| systemd.machine().starts == 1).await;
    let restarts = || host.plugins.view("p").unwrap().restarts;
    let (mut seen, mut held) = (0, 0);
    while restarts() < CRASHES {
        let starts = systemd.machine().starts;
        if starts != seen {
            seen = starts;
            held = held.max(descriptors());
            systemd.machine().runs =
                if starts.is_multiple_of(50) { HANGS } else { ENDS[starts % ENDS.len()] };
        }
        tokio::time::sleep(millis(1)).await;
    }
    // It mends itself.
    systemd.machine().runs = HANGS;
    let mended = async {
        while host.plugins.view("p").unwrap().state != "ready" {
            if systemd.pid() != 0 && !fake.socket.exists() {
                // Of a start that was late.
                fake.kill();
                fake.start();
            }
            tokio::time::sleep(millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, mended).await.expect("it never was ready");
    let (pid, starts, counted) = (systemd.pid(), systemd.machine().starts, restarts());
    assert_eq!(systemd.machine().doubles, 0, "two processes at a time");
    assert_eq!(starts, counted as usize + 1, "each restart is one start");
    // Its own task, the connection's to the plugin and those of the bus; not one a crash.
    let now = tasks.num_alive_tasks();
    assert!(now < before + 10, "{now} tasks, {before} before");
    // Other tests of this program have descriptors for a while. What a crash has left stays.
    until(|| descriptors() < held + 10).await;
    assert!(held < 200, "{held} descriptors at most while it crashed");
    // It is probed by what would start it.
    let probes = fake.calls("Probe");
    until(|| fake.calls("Probe") > probes + 1).await;
    assert_eq!((systemd.pid(), systemd.machine().starts), (pid, starts), "nobody else starts it");

    // Each is an event, and the fall into the loop is one, not a thousand.
    let falls = host.events("plugin-health").await;
    let falls = falls.iter().filter(|(_, details)| details["to"] == "failed").count();
    assert_eq!(falls, 1);

    host.plugins.unregister("p", None, 0).await.unwrap();
    fake.kill();
    until(|| tasks.num_alive_tasks() <= before).await;
    assert_eq!((systemd.pid(), systemd.machine().starts), (0, starts), "nor after its end");
}

/// Its mounts are served by it: a plugin that is stopped for being slow takes them away.
#[tokio::test]
async fn an_adopted_plugin_that_is_slow_is_not_stopped() {
    let host = Host::new();
    let systemd = Systemd::behind(&host.plugins.units()).await;
    let mut fake = host.fake();
    systemd.machine().runs = "/bin/sleep 1000";
    host.plugins.register("p", managed(&fake.socket), 0).await.unwrap();
    until(|| systemd.pid() != 0).await;
    fake.start();
    host.ready().await;
    let (pid, starts) = (systemd.pid(), systemd.machine().starts);
    host.plugins.shutdown().await;
    let Host { directory, store, .. } = host;
    store.close().await.unwrap();

    fake.script().late = LONG * 60;
    let before = fake.calls("Probe");
    let host = Host::within(directory, PACE, Vec::new());
    systemd.connect(&host.plugins.units()).await;
    // Each is waited for nearly as long as a plugin that was started may take in all.
    until(|| fake.calls("Probe") > before + 4 || systemd.pid() != pid).await;
    assert_eq!((systemd.pid(), systemd.machine().starts), (pid, starts), "it was stopped under its mounts");
    host.state(&["unhealthy"]).await;
    fake.script().late = Duration::ZERO;
    host.ready().await;
    assert_eq!((systemd.pid(), systemd.machine().starts), (pid, starts));

    // A restart is asked for, and the process that it starts has no mounts yet.
    fake.script().late = LONG * 60;
    host.plugins.restart("p").await.unwrap();
    until(|| systemd.machine().starts >= starts + 2).await;
    let error = host.plugins.not_back("p");
    assert_eq!((error.kind, error.details.plugin.as_deref()), (Kind::TimedOut, Some("p")));
    assert!(error.message.contains("is not ready since: plugin p ("), "{error}");
}

#[tokio::test]
async fn plugin_that_says_it_is_not_ready_is_waited_for() {
    let pace = Pace { start: Duration::from_millis(300), ..PACE };
    let host = Host::with(pace, Vec::new());
    let systemd = Systemd::behind(&host.plugins.units()).await;
    let mut fake = host.fake();
    systemd.machine().runs = "/bin/sleep 1000";
    fake.script().ready = Some(false);
    host.plugins.register("p", managed(&fake.socket), 0).await.unwrap();
    until(|| systemd.pid() != 0).await;
    fake.start();
    host.state(&["probing"]).await;
    let (pid, starts) = (systemd.pid(), systemd.machine().starts);
    tokio::time::sleep(pace.start * 3).await;
    assert_eq!((systemd.pid(), systemd.machine().starts), (pid, starts), "it was started again");
    fake.script().ready = Some(true);
    host.ready().await;
    assert_eq!((systemd.pid(), systemd.machine().starts), (pid, starts));
}

#[tokio::test]
async fn hidden_mounts_name_the_unit_in_the_details() {
    let host = Host::new();
    let systemd = Systemd::behind(&host.plugins.units()).await;
    let mut fake = host.fake();
    (systemd.machine().runs, systemd.machine().hides) = ("/bin/sleep 1000", true);
    host.plugins.register("p", managed(&fake.socket), 0).await.unwrap();
    until(|| systemd.pid() != 0).await;
    fake.start();
    host.state(&["unhealthy"]).await;
    let refused =
        async || host.plugins.wait("p", Service::Node, Some(soon(Duration::ZERO))).await.unwrap_err();
    let error = refused().await;
    assert!(error.message.contains("PrivateTmp=yes gives csi-plugin-p-default.service"), "{error}");
    assert_eq!(error.details.obstacle.map(|obstacle| obstacle.name()), Some("hidden"));
    assert_eq!(error.details.holders, ["csi-plugin-p-default.service"]);

    // The next reason is another one.
    fake.kill();
    until(|| !host.plugins.view("p").unwrap().health_message.contains("PrivateTmp")).await;
    let error = refused().await;
    assert_eq!((error.details.obstacle, error.details.holders), (None, Vec::new()), "{}", error.message);
}

/// csid registered such a plugin until now, and ran it as root.
#[tokio::test]
async fn journaled_controller_with_an_endpoint_is_not_started() {
    let host = Host::new();
    let socket = host.directory.path().join("csi.sock");
    host.plugins.register("p", managed(&socket), 0).await.unwrap();
    host.plugins.shutdown().await;
    let Host { directory, store, .. } = host;
    store.close().await.unwrap();

    let (store, mut rows) = open(directory.path());
    rows[0].spec = rows[0].spec.replacen('{', r#"{"profile":"controller","#, 1);
    let directories = directories(directory.path());
    let known = (rows, BTreeMap::new());
    let plugins = Plugins::start_at(PACE, &directories, RPC, store.clone(), Vec::new(), known);
    let host = Host { directory, store, plugins };
    let systemd = Systemd::behind(&host.plugins.units()).await;
    systemd.machine().runs = "/bin/sleep 1000";
    let is_refused = || host.plugins.view("p").unwrap().health_message.contains("CSI_ENDPOINT");
    until(|| is_refused() || systemd.machine().starts > 0).await;
    assert_eq!((is_refused(), systemd.machine().starts), (true, 0));
}

#[tokio::test]
async fn probe_or_restart_ends_the_pause_of_failed() {
    let pace = Pace { restart: Duration::from_millis(10), longest: LONG * 60, ..PACE };
    let host = Host::with(pace, Vec::new());
    let systemd = Systemd::behind(&host.plugins.units()).await;
    let mut fake = host.fake();
    systemd.machine().runs = "/bin/sh -c 'exit 3'";
    host.plugins.register("p", managed(&fake.socket), 0).await.unwrap();
    // Until the pauses are long: the next one is of five seconds.
    until(|| systemd.machine().starts == 10).await;
    host.state(&["failed"]).await;
    let view = host.plugins.view("p").unwrap();
    assert!(view.health_message.contains("exited with status 3; it is started again at "), "{view:?}");
    assert!(view.health_message.ends_with(" UTC"), "{view:?}");

    // A Probe starts it now, and is answered by what comes of it; the first may still have asked about the tenth.
    let begun = Instant::now();
    while systemd.machine().starts == 10 {
        let error = host.plugins.probe("p", Some(soon(LONG))).await.unwrap_err();
        assert_eq!(error.kind, Kind::PluginUnavailable);
        assert!(error.message.contains("exited with status 3"), "{error}");
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    systemd.machine().runs = "/bin/sleep 1000";
    let plugins = host.plugins.clone();
    let probe = tokio::spawn(async move { plugins.probe("p", Some(soon(LONG))).await });
    until(|| systemd.pid() != 0).await;
    fake.start();
    assert!(probe.await.unwrap().unwrap());
    host.ready().await;

    // So does Restart, and the pauses are reset.
    systemd.machine().runs = "/bin/false";
    let pid = systemd.pid();
    host.plugins.restart("p").await.unwrap();
    assert_ne!(systemd.pid(), pid);
    let begun = Instant::now();
    let starts = systemd.machine().starts;
    until(|| systemd.machine().starts > starts + 2).await;
    assert!(begun.elapsed() < Duration::from_secs(10), "10, 20, 40 ms: {:?}", begun.elapsed());
    host.state(&["failed"]).await;
    systemd.machine().runs = "/bin/sleep 1000";
    host.plugins.restart("p").await.unwrap();
    until(|| systemd.pid() != 0).await;
    fake.kill();
    fake.start();
    host.plugins.ready_again("p").await.unwrap();
}

/// A restart of a unit that somebody else has defined is systemd's; until the process has ended, its calls are refused.
#[tokio::test]
async fn restarted_unit_is_stopping_until_its_process_ends() {
    let host = Host::new();
    let systemd = Systemd::behind(&host.plugins.units()).await;
    let mut fake = host.fake().serving(true, true);
    fake.script().plugin_capabilities = controller::services(&[]);
    fake.start();
    systemd.machine().runs = "/bin/sleep 1000";
    let spec = PluginSpec {
        supervision: Supervision::Unit,
        unit: Some("driver.service".into()),
        ..external(&fake.socket)
    };
    host.plugins.register("p", spec, 0).await.unwrap();
    let controller = host.plugins.controller("p", "ValidateVolumeCapabilities", soon(LONG)).await.unwrap();
    let pid = systemd.pid();
    systemd.machine().lingers = true;
    let plugins = host.plugins.clone();
    let restarting = tokio::spawn(async move { plugins.restart("p").await });
    host.state(&["stopping"]).await;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(host.plugins.view("p").unwrap().state, "stopping");
        let error = controller.delete("v", controller::request(None)).await.unwrap_err();
        assert_eq!(crate::Error::from(error).kind, Kind::PluginShutdown);
    }
    assert!(systemd.pid() == pid && !restarting.is_finished());
    systemd.machine().lingers = false;
    restarting.await.unwrap().unwrap();
    host.plugins.ready_again("p").await.unwrap();
    assert_ne!(systemd.pid(), pid);
}
