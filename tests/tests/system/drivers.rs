//! A driver that was not written for csid: a node plugin from crates.io.

use std::path::{Path, PathBuf};

use crate::machine::Machine;

/// What `make test` builds once for a machine, and not for each target directory.
fn built(program: &str) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let path = cache.or(home).expect("a home").join("csid-tests").join(program);
    assert!(path.exists(), "{} is missing: make cfgd-csi", path.display());
    path
}

/// The main process of csid, or of a plugin's instance `default`.
fn pid(m: &Machine, unit: &str) -> String {
    m.run(&format!("systemctl show {unit} --property MainPID --value"))
}

#[test]
fn a_driver_of_somebody_elses_mounts_and_its_mount_outlives_csid_and_it() {
    const UNIT: &str = "csi-plugin-cfgd-default.service";
    let m = Machine::with_csid();
    m.run("systemctl restart csid && csictl wait local");
    let bare = m.inventory();
    std::fs::copy(built("cfgd-csi-0.4.0/bin/cfgd-csi"), m.path("/usr/local/bin/cfgd-csi")).unwrap();
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

    // What it refuses is told in its words, and nothing is left.
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
