//! Drivers and registrars that were not written for csid: a node plugin from crates.io, and a registrar that speaks by the kubelet's
//! own Go module.

use std::path::Path;
use std::process::Command;

use csid_tests::world::count;

use crate::machine::{Machine, cached};

const REGISTRATION: &str = "/var/lib/csid/plugins_registry/driver-reg.sock";
const ENDPOINT: &str = "/run/driver/csi.sock";
/// The name that csi-local reports.
const NAME: &str = "local.csid1.org";

/// The main process of csid, or of a plugin's instance `default`.
fn pid(m: &Machine, unit: &str) -> String {
    m.run(&format!("systemctl show {unit} --property MainPID --value"))
}

#[test]
fn foreign_drivers_mount_outlives_csid_and_driver() {
    const UNIT: &str = "csi-plugin-cfgd-default.service";
    let m = Machine::with_csid();
    m.run("systemctl restart csid && csictl wait local");
    let bare = m.inventory();
    std::fs::copy(cached("cfgd-csi-0.4.0/bin/cfgd-csi"), m.path("/usr/local/bin/cfgd-csi")).unwrap();
    // What it would have pulled from a registry of containers.
    m.run("mkdir -p /srv/cfgd/m/1 && touch /srv/cfgd/m/1/.cfgd-complete && echo 'of the module' >/srv/cfgd/m/1/f");

    // As docs/plugins.md has it.
    m.write(
        "/etc/csid/plugins.d/cfgd.toml",
        r#"supervision = "managed"
argv = ["/bin/sh", "-c", "CSI_ENDPOINT=${CSI_ENDPOINT#unix://} exec /usr/local/bin/cfgd-csi"]
environment = { CACHE_DIR = "/srv/cfgd" }
profile = "node-net"
network = "none"
"#,
    );
    m.run("csictl check-config && systemctl reload csid && csictl wait cfgd --deadline 30s");
    let shown = m.run("csictl plugin show cfgd");
    assert!(shown.contains("csi.cfgd.io"), "{shown}");
    let everywhere = m.run("ss --listening --tcp --numeric --no-header");
    assert!(!everywhere.contains(":9090"), "its metrics are not on the host's network: {everywhere}");
    let own = m.run(&format!("nsenter -t {} -n ss --listening --tcp --numeric --no-header", pid(&m, UNIT)));
    assert!(own.contains(":9090"), "they are on its own: {own}");

    // Its refusal has its own words, and nothing is left.
    let mount = "csictl mount demo conf web --plugin cfgd --external-id conf --read-only --restore auto --context module=m";
    let refused = m.run(&format!("{mount} 2>&1 && echo it is mounted || true"));
    assert!(refused.contains("missing required volume attribute: version"), "{refused}");
    assert_eq!(m.inventory(), bare);

    let mount = format!("{mount} --context version=1");
    let path = m.run(&mount);
    let read = || assert_eq!(m.run(&format!("cat {path}/f")), "of the module");
    read();
    m.run(&format!("! touch {path}/other"));
    // Alone: it does not tell its own mount from a directory, and mounts a second time if it is asked again.
    let mounts = || m.run(&format!("grep -c ' {path} ' /proc/1/mountinfo"));
    assert_eq!(mounts(), "1");

    // csid comes and goes; the driver is adopted.
    let before = pid(&m, UNIT);
    m.run("systemctl restart csid && csictl wait cfgd");
    read();
    m.run("systemctl kill --signal KILL csid");
    m.until("csictl wait cfgd");
    assert_eq!(pid(&m, UNIT), before);
    assert_eq!(m.run(&mount), path, "the same answer");
    read();

    // So does the driver.
    m.run("csictl plugin restart cfgd");
    let after = pid(&m, UNIT);
    assert_ne!(after, before);
    read();
    m.run(&format!("kill -9 {after}"));
    m.until(&format!(
        "csictl wait cfgd --deadline 1s && [ $(systemctl show {UNIT} --property MainPID --value) != {after} ]"
    ));
    read();
    assert_eq!(mounts(), "1");

    m.reboot();
    m.until(&format!("mountpoint -q {path}"));
    read();
    assert_eq!(mounts(), "1");

    m.run("csictl unmount demo conf web");
    assert_eq!(m.inventory(), bare, "nothing is left");
    m.run("rm /etc/csid/plugins.d/cfgd.toml && systemctl reload csid");
    assert_eq!(m.run("systemctl list-units --all --plain --no-legend 'csi-plugin-cfgd*'"), "");
    assert_eq!(m.run("pgrep --count cfgd-csi || true"), "0");
}

#[test]
fn kubelet_registrar_learns_the_result() {
    let m = Machine::with_csid();
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("go/registrar");
    let program = m.path("/usr/local/sbin/registrar");
    let go = Command::new("go")
        .arg("-C")
        .arg(&module)
        .args(["build", "-o"])
        .arg(&program)
        .env("CGO_ENABLED", "0")
        .output();
    let go = go.expect("go");
    assert!(go.status.success(), "{}", String::from_utf8_lossy(&go.stderr));

    m.run("csictl wait local");
    m.write(
        "/etc/systemd/system/driver.service",
        &format!("[Service]\nRuntimeDirectory=driver\nEnvironment=CSI_ENDPOINT=unix://{ENDPOINT}\nExecStart=/usr/sbin/csi-local serve\n"),
    );
    m.run("systemctl daemon-reload && systemctl start driver");
    let driver = pid(&m, "driver");
    // Next to it, in a unit of its own; the file has the answers.
    let registrar = |arguments: &str| {
        m.run(&format!(
            "rm -f /root/reply && systemd-run --quiet --collect --unit registrar --property StandardOutput=append:/root/reply \
             registrar {arguments}"
        ));
    };
    let ends = || m.run(&format!("systemctl stop registrar && rm {REGISTRATION}"));
    let is_known = || m.try_run(&format!("csictl plugin show {NAME}")).status.success();
    assert!(!is_known());

    let honest = format!("{REGISTRATION} {NAME} {ENDPOINT}");
    registrar(&honest);
    m.until("grep -qx registered /root/reply");
    m.run(&format!("csictl wait {NAME}"));
    let shown = m.run(&format!("csictl plugin show {NAME}"));
    assert!(shown.contains("external") && shown.contains(ENDPOINT), "{shown}");
    let id = m.run("csi-local create data --size 16M");
    let path = m.run(&format!("csictl mount demo data web --plugin {NAME} --external-id {id}"));
    m.run(&format!("echo here >{path}/file"));
    let stays = |when: &str| {
        assert_eq!(m.run(&format!("cat {path}/file")), "here", "{when}");
        assert!(m.run("csictl mounts").contains("mounted"), "{when}");
        assert_eq!(pid(&m, "driver"), driver, "{when}");
    };

    // Each csid asks again, and answers again.
    m.run("systemctl restart csid");
    m.until("[ $(grep -cx registered /root/reply) = 2 ]");
    m.run(&format!("csictl wait {NAME}"));
    stays("after csid's restart");

    // A registrar that dies leaves its socket, and with that the plugin; the socket's end is the registration's.
    m.run("systemctl kill --signal KILL registrar");
    m.until("! systemctl --quiet is-active registrar");
    m.run(&format!("csictl plugin show {NAME}"));
    m.run(&format!("rm {REGISTRATION}"));
    m.until(&format!("! csictl plugin show {NAME}"));
    stays("without a registration");
    let reply = m.run("csictl unmount demo data web --deadline 300ms 2>&1 && echo it is unmounted || true");
    assert!(reply.contains("waiting for plugin"), "{reply}");
    assert_eq!(m.run(&format!("cat {path}/file")), "here", "nobody but the driver unmounts it");

    // What csid does not take it refuses, in words for readers of the registrar's log.
    let mut refused = 0;
    for (arguments, word) in [
        (format!("{REGISTRATION} ../{NAME} {ENDPOINT}"), "plugin id"),
        (format!("-version 0.3.0 {honest}"), "version 1 of CSI"),
        (format!("-type DevicePlugin {honest}"), "type CSIPlugin, not `DevicePlugin`"),
        (format!("{REGISTRATION} {NAME} tcp://127.0.0.1:1"), "socket"),
        (format!("{REGISTRATION} local {ENDPOINT}"), "no instance of a socket joins it"),
    ] {
        registrar(&arguments);
        m.until(&format!("grep -q '^refused: .*{word}' /root/reply"));
        assert!(!is_known(), "{arguments}");
        ends();
        refused += 1;
    }
    count("registrations refused with a reason", refused);

    registrar(&honest);
    m.until("grep -qx registered /root/reply");
    m.run("csictl unmount demo data web");
    ends();
    m.until(&format!("! csictl plugin show {NAME}"));
    assert_eq!(pid(&m, "driver"), driver);
    m.run(&format!("csi-local delete {id}"));
    assert_eq!(m.loops(), "", "no loop device");
}
