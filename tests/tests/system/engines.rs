//! csid's volumes in containers of the real Podman, by the package csid-volume-plugin.

use csid_tests::world::count;

use crate::machine::Machine;

/// Podman's settings for a machine without a network, without keyrings, and with the host's control groups.
const PODMAN: &str = r#"[containers]
netns = "none"
cgroups = "disabled"
keyring = false
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "crun"
"#;
const STORAGE: &str = "[storage]\ndriver = \"vfs\"\nrunroot = \"/run/containers/storage\"\n\
                       graphroot = \"/var/lib/containers/storage\"\n";

/// Sets Podman up for a machine.
pub fn set_podman_up(m: &Machine) {
    // /var/lib/containers is on an overlay, and Podman's first run makes it.
    m.run("mkdir -p /etc/containers/containers.conf.d /var/lib/containers && rm -f /usr/local/bin/podman");
    m.write("/etc/containers/containers.conf.d/90-machine.conf", PODMAN);
    m.write("/etc/containers/storage.conf", STORAGE);
}

/// Makes /root/busybox.tar, a root file system of Debian's busybox.
pub fn make_busybox(m: &Machine) {
    m.run(
        "mkdir -p /image/bin && cp /bin/busybox /image/bin/ && \
         for name in $(busybox --list | grep -vx busybox); do ln -s busybox /image/bin/$name; done && tar -C /image -cf /root/busybox.tar .",
    );
}

/// Returns a machine with both packages, an image `box`, and the volume `pg` of the namespace `containers`.
fn with_volume_plugin() -> Machine {
    let m = Machine::with_csid();
    m.install_package("csid-volume-plugin");
    m.run("csictl wait local");
    let capacity = "--access-mode single-node-writer --capacity 64MiB";
    m.run(&format!("csictl volume create containers pg --plugin local {capacity}"));
    set_podman_up(&m);
    make_busybox(&m);
    m.run("podman import --quiet /root/busybox.tar box");
    m
}

fn podman(m: &Machine, arguments: &str) -> String {
    m.run(&format!("podman {arguments}"))
}

/// Runs a shell command in a new container that has the volume at /data.
fn in_container(m: &Machine, command: &str) -> String {
    podman(m, &format!("run --rm --volume pg:/data box sh -c '{command}'"))
}

/// Returns state and consumer of all mounts.
pub fn mounts(m: &Machine) -> String {
    let rows: serde_json::Value = serde_json::from_str(&m.run("csictl mounts --json")).expect("JSON");
    let rows = rows.as_array().expect("a list").iter();
    let text = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    rows.map(|row| format!("{} {}", text(row, "consumer"), text(row, "state"))).collect::<Vec<_>>().join(",")
}

/// Starts as many containers at once as its argument says. Each writes its number.
const MANY: &str = r#"#!/bin/bash
for n in $(seq $1); do
    { podman run --rm --volume pg:/data box sh -c "echo $n >>/data/many" || echo $n; } >>/root/failed-starts &
done
wait
"#;

/// Returns how many containers start at once: `CSID_CONTAINERS`, or a few.
fn at_once() -> usize {
    std::env::var("CSID_CONTAINERS").map_or(16, |number| number.parse().expect("a number"))
}

#[test]
fn podman_container_has_its_volume_over_all_restarts() {
    let m = with_volume_plugin();
    podman(&m, "volume create --driver csid pg");
    in_container(&m, "echo first >/data/file && sync");
    assert_eq!(mounts(&m), "", "the mount ends with its container");
    assert_eq!(in_container(&m, "cat /data/file"), "first");

    // Two containers share a mount, over restarts of csid and kills of both daemons.
    for name in ["one", "two"] {
        podman(&m, &format!("run --detach --name {name} --volume pg:/data box sleep 600"));
        assert_eq!(mounts(&m), "podman mounted");
    }
    let write = "sh -c 'echo more >>/data/file && sync'";
    m.run("systemctl restart csid && systemctl kill --signal KILL csid csid-volume-plugin");
    m.until("csictl status");
    for name in ["one", "two"] {
        podman(&m, &format!("exec {name} {write}"));
        podman(&m, &format!("rm --force --time 0 {name}"));
    }
    m.until("test \"$(csictl mounts --json)\" = '[]'");
    assert_eq!(in_container(&m, "cat /data/file"), "first\nmore\nmore");

    // A reboot under a container: Podman counts again from 0, and has the lost row back.
    podman(&m, "run --detach --name one --volume pg:/data box sleep 600");
    m.reboot();
    m.until("csictl wait local");
    assert_eq!(mounts(&m), "podman lost");
    podman(&m, "start one");
    assert_eq!(mounts(&m), "podman mounted");
    podman(&m, &format!("exec one {write}"));
    podman(&m, "rm --force --time 0 one");
    m.until("test \"$(csictl mounts --json)\" = '[]'");
    assert_eq!(in_container(&m, "cat /data/file"), "first\nmore\nmore\nmore");

    // Containers that start and end at once share the volume, and leave nothing.
    let containers = at_once();
    m.write_program("/root/many", MANY);
    m.run(&format!("/root/many {containers}"));
    assert_eq!(m.run("cat /root/failed-starts"), "");
    assert_eq!(in_container(&m, "sort -u /data/many | wc -l"), containers.to_string());
    m.until("test \"$(csictl mounts --json)\" = '[]'");
    count("containers of Podman that started at once", containers);

    // What the engine removes stays in csid.
    podman(&m, "volume prune --force");
    assert_eq!(podman(&m, "volume ls --quiet"), "");
    assert!(m.run("csictl volume list").contains("pg"), "a prune deletes no volume");
    podman(&m, "volume create --driver csid pg");
    assert_eq!(in_container(&m, "cat /data/file"), "first\nmore\nmore\nmore");
    podman(&m, "volume rm pg");
    let unknown = m.try_run("podman volume create --driver csid other");
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(!unknown.status.success() && said.contains("containers/other is not registered"), "{said}");

    count("ms for the start of csid-volume-plugin.service", m.start_time("csid-volume-plugin.service"));
    let score = m.run("systemd-analyze security --no-pager csid-volume-plugin.service | tail -n 1");
    let tenths: String =
        score.split_whitespace().rev().find(|word| word.contains('.')).unwrap_or("").replace('.', "");
    count("tenths of exposure of csid-volume-plugin.service", tenths.parse().expect("a score"));
    let log = m.run("journalctl --no-pager -u csid-volume-plugin.service");
    assert!(!log.contains("ERROR") && !log.contains("panicked"), "{log}");
    m.has_no_ordering_cycle();
}

#[test]
fn volume_plugin_is_removed_under_a_container() {
    let m = with_volume_plugin();
    podman(&m, "volume create --driver csid pg");
    podman(&m, "run --detach --name one --volume pg:/data box sleep 600");
    m.install_package("csid-volume-plugin");
    podman(&m, "exec one touch /data/after-the-upgrade");
    m.run("dpkg --remove csid-volume-plugin");
    podman(&m, "exec one touch /data/after-the-removal");
    assert_eq!(mounts(&m), "podman mounted", "a removal unmounts nothing");
    assert_eq!(m.run("ls /run/docker/plugins"), "");
    m.install_package("csid-volume-plugin");
    podman(&m, "rm --force --time 0 one");
    m.until("test \"$(csictl mounts --json)\" = '[]'");
    m.run("dpkg --purge csid-volume-plugin");
    assert_eq!(m.run("ls -d /etc/containers/containers.conf.d/50-csid.conf 2>/dev/null || true"), "");
}
