//! csid's volumes in containers of the real Podman, by the package csid-volume-plugin.

use csid_tests::world::count;

use crate::machine::Machine;

/// `podman` with what a machine without a network and with the host's control groups needs.
const PODMAN: &str =
    "podman --storage-driver vfs --cgroup-manager cgroupfs --events-backend none --runtime crun";
const RUN: &str = "run --network none --cgroups disabled --ulimit nofile=1024:1024 --ulimit nproc=1024:1024";

/// Returns a machine with both packages, an image `box`, and the volume `pg` of the namespace `containers`.
fn with_volume_plugin() -> Machine {
    let m = Machine::with_csid();
    m.install_package("csid-volume-plugin");
    m.run("csictl wait local");
    let capacity = "--access-mode single-node-writer --capacity 64MiB";
    m.run(&format!("csictl volume create containers pg --plugin local {capacity}"));
    // /var/lib/containers is on an overlay, and Podman's first run makes it.
    m.run("mkdir -p /image/bin /var/lib/containers && cp /bin/busybox /image/bin/ && ln -s busybox /image/bin/sh");
    m.run(&format!("tar -C /image -cf /root/image.tar . && {PODMAN} import --quiet /root/image.tar box"));
    m
}

fn podman(m: &Machine, arguments: &str) -> String {
    m.run(&format!("{PODMAN} {arguments}"))
}

/// Runs a shell command in a new container that has the volume at /data.
fn in_container(m: &Machine, command: &str) -> String {
    podman(m, &format!("{RUN} --rm --volume pg:/data box sh -c '{command}'"))
}

/// Returns state and consumer of all mounts.
fn mounts(m: &Machine) -> String {
    let rows: serde_json::Value = serde_json::from_str(&m.run("csictl mounts --json")).expect("JSON");
    let rows = rows.as_array().expect("a list").iter();
    let text = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    rows.map(|row| format!("{} {}", text(row, "consumer"), text(row, "state"))).collect::<Vec<_>>().join(",")
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
        podman(
            &m,
            &format!("{RUN} --detach --name {name} --volume pg:/data box sh -c 'exec busybox sleep 600'"),
        );
        assert_eq!(mounts(&m), "podman mounted");
    }
    let write = "busybox sh -c 'echo more >>/data/file && busybox sync'";
    m.run("systemctl restart csid && systemctl kill --signal KILL csid csid-volume-plugin");
    m.until("csictl status");
    for name in ["one", "two"] {
        podman(&m, &format!("exec {name} {write}"));
        podman(&m, &format!("rm --force --time 0 {name}"));
    }
    m.until("test \"$(csictl mounts --json)\" = '[]'");
    assert_eq!(in_container(&m, "cat /data/file"), "first\nmore\nmore");

    // A reboot under a container: Podman counts again from 0, and has the lost row back.
    podman(&m, &format!("{RUN} --detach --name one --volume pg:/data box sh -c 'exec busybox sleep 600'"));
    m.reboot();
    m.until("csictl wait local");
    assert_eq!(mounts(&m), "podman lost");
    podman(&m, "start one");
    assert_eq!(mounts(&m), "podman mounted");
    podman(&m, &format!("exec one {write}"));
    podman(&m, "rm --force --time 0 one");
    m.until("test \"$(csictl mounts --json)\" = '[]'");
    assert_eq!(in_container(&m, "cat /data/file"), "first\nmore\nmore\nmore");

    // What the engine removes stays in csid.
    podman(&m, "volume prune --force");
    assert_eq!(podman(&m, "volume ls --quiet"), "");
    assert!(m.run("csictl volume list").contains("pg"), "a prune deletes no volume");
    podman(&m, "volume create --driver csid pg");
    assert_eq!(in_container(&m, "cat /data/file"), "first\nmore\nmore\nmore");
    podman(&m, "volume rm pg");
    let unknown = m.try_run(&format!("{PODMAN} volume create --driver csid other"));
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(!unknown.status.success() && said.contains("containers/other is not registered"), "{said}");

    let score = m.run("systemd-analyze security --no-pager csid-volume-plugin.service | tail -n 1");
    let tenths: String =
        score.split_whitespace().rev().find(|word| word.contains('.')).unwrap_or("").replace('.', "");
    count("tenths of exposure of csid-volume-plugin.service", tenths.parse().expect("a score"));
    let log = m.run("journalctl --no-pager -u csid-volume-plugin.service");
    assert!(!log.contains("ERROR") && !log.contains("panicked"), "{log}");
    assert!(!m.run("journalctl --no-pager").contains("ordering cycle"), "the units have no cycle");
}

#[test]
fn volume_plugin_is_removed_under_a_container() {
    let m = with_volume_plugin();
    podman(&m, "volume create --driver csid pg");
    podman(&m, &format!("{RUN} --detach --name one --volume pg:/data box sh -c 'exec busybox sleep 600'"));
    m.install_package("csid-volume-plugin");
    podman(&m, "exec one busybox touch /data/after-the-upgrade");
    m.run("dpkg --remove csid-volume-plugin");
    podman(&m, "exec one busybox touch /data/after-the-removal");
    assert_eq!(mounts(&m), "podman mounted", "a removal unmounts nothing");
    assert_eq!(m.run("ls /run/docker/plugins"), "");
    m.install_package("csid-volume-plugin");
    podman(&m, "rm --force --time 0 one");
    m.until("test \"$(csictl mounts --json)\" = '[]'");
    m.run("dpkg --purge csid-volume-plugin");
    assert_eq!(m.run("ls -d /etc/containers/containers.conf.d/50-csid.conf 2>/dev/null || true"), "");
}
