//! The life of a plugin under systemd: what ends is started again, by csid or by systemd.

use crate::machine::Machine;

const DRIVER: &str = "[Service]
RuntimeDirectory=driver
Environment=CSI_ENDPOINT=unix:///run/driver/csi.sock
ExecStart=/usr/sbin/csi-local serve
";
const REGISTER: &str = "csictl plugin register adopted --unit driver.service --socket /run/driver/csi.sock";

fn property(m: &Machine, unit: &str, name: &str) -> String {
    m.run(&format!("systemctl show {unit} --property {name} --value"))
}

/// What `plugin show` says of the health, until it says this.
fn health(m: &Machine, plugin: &str, text: &str) {
    m.until(&format!("csictl plugin show {plugin} | grep -q -F '{text}'"));
}

#[test]
fn foreign_unit_is_started_and_never_stopped() {
    let m = Machine::with_csid();
    let pid = || property(&m, "driver.service", "MainPID");
    // What cannot be adopted says why.
    m.run(REGISTER);
    health(&m, "adopted", "there is no driver.service");
    m.run("systemctl mask --quiet driver.service");
    health(&m, "adopted", "driver.service is masked");
    m.run("systemctl unmask --quiet driver.service");
    m.write(
        "/etc/systemd/system/driver.service",
        "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=true\n",
    );
    m.run("systemctl daemon-reload && csictl plugin restart --deadline 1s adopted || true");
    health(&m, "adopted", "driver.service has no main process to watch");
    m.run("systemctl stop driver");

    // It is started, and used.
    m.write("/etc/systemd/system/driver.service", DRIVER);
    m.run("systemctl daemon-reload && csictl wait adopted");
    let shown = m.run("csictl plugin show adopted");
    for line in ["supervision: unit", "unit: driver.service", "log: journal"] {
        assert!(shown.contains(line), "{line}: {shown}");
    }
    let id = m.run("csi-local create data --size 16M");
    let path = m.run(&format!("csictl mount demo data web --plugin adopted --external-id {id}"));
    m.run(&format!("echo here >{path}/file"));
    assert!(m.run("csictl plugin logs adopted").contains("csi_local"), "its log is the unit's");

    // Killed, it is started again, once.
    let before = pid();
    m.run(&format!("kill -9 {before}"));
    m.until(&format!(
        "p=$(systemctl show driver --property MainPID --value); [ $p != 0 ] && [ $p != {before} ]"
    ));
    m.run("csictl wait adopted");
    assert_eq!(m.run(&format!("cat {path}/file")), "here", "the mount stays");

    // Its own Restart= is waited for: csid starts nothing, and takes what comes.
    m.write("/etc/systemd/system/driver.service", &format!("{DRIVER}Restart=always\nRestartSec=3s\n"));
    m.run("systemctl daemon-reload");
    let before = pid();
    m.run(&format!("kill -9 {before}"));
    m.until("csictl plugin show adopted | grep -q 'killed by signal 9'");
    m.until(&format!(
        "p=$(systemctl show driver --property MainPID --value); [ $p != 0 ] && [ $p != {before} ]"
    ));
    assert_eq!(property(&m, "driver.service", "NRestarts"), "1", "it was systemd that started it");
    m.run("csictl wait adopted");

    // Restart is systemd's, and waits.
    let before = pid();
    m.run("csictl plugin restart adopted");
    assert_ne!(pid(), before);
    assert!(m.run("csictl plugin show adopted --json").contains("\"healthy\": true"));

    // csid adopts it again, and what it has not defined it does not stop: neither at its end nor when it is forgotten.
    let before = pid();
    m.run("systemctl restart csid && csictl wait adopted");
    assert_eq!(pid(), before);
    m.run("csictl unmount demo data web && csictl plugin unregister adopted");
    assert_eq!(pid(), before, "it runs on");
    assert_eq!(property(&m, "driver.service", "ActiveState"), "active");

    // One that runs already is adopted as it is, also when it forks.
    m.run("systemctl stop driver");
    m.write(
        "/etc/systemd/system/driver.service",
        "[Service]\nType=forking\nPIDFile=/run/driver/pid\nRuntimeDirectory=driver\n\
         Environment=CSI_ENDPOINT=unix:///run/driver/csi.sock\n\
         ExecStart=bash -c '/usr/sbin/csi-local serve & echo $$! >/run/driver/pid'\n",
    );
    m.run("systemctl daemon-reload && systemctl start driver");
    let before = pid();
    m.run(&format!("{REGISTER} && csictl wait adopted"));
    assert_eq!(pid(), before);
    m.run(&format!("csi-local delete {id}"));
}

#[test]
fn crash_loop_is_delayed_reported_and_ends() {
    let m = Machine::with_csid();
    let program = "#!/bin/sh\nexec /usr/sbin/csi-local serve --state-dir /root/state\n";
    m.write_program("/usr/local/sbin/loop", program);
    m.run("csictl plugin register loop -- /usr/local/sbin/loop && csictl wait loop");
    let restarts = || -> u32 {
        let shown = m.run("csictl plugin show loop | sed -n 's/^ *restarts: *//p'");
        shown.parse().unwrap_or_else(|_| panic!("a number: {shown}"))
    };
    // Each end is noticed, whatever its cause.
    m.run("printf '#!/bin/sh\\nexit 7\\n' >/usr/local/sbin/loop");
    m.run("systemctl kill --signal KILL csi-plugin-loop-default.service");
    m.until("[ $(csictl plugin show loop | sed -n 's/^ *restarts: *//p') -ge 3 ]");
    health(&m, "loop", "exited with status 7; it is started again at ");
    let names = m.run("systemctl list-units --all --plain --no-legend 'csi-plugin-loop*' | wc -l");
    assert!(names == "0" || names == "1", "one unit: {names}");
    // The failure was reported once, and each try.
    let events = m.run("csictl events --json");
    let of =
        |kind: &str| events.lines().filter(|line| line.contains(kind) && line.contains("\"loop\"")).count();
    assert!(of("plugin-restarted") as u32 >= 3, "{events}");
    // It is mended, and nobody has to say so; but who does need not wait.
    m.write_program("/usr/local/sbin/loop", program);
    let before = restarts();
    m.run("csictl plugin restart loop");
    assert_eq!(restarts(), before + 1);
    assert_eq!(m.run("pgrep --count --full 'csi-local serve --state-dir /root/state'"), "1", "one process");
}
