//! csid's volumes in containers of the real Docker, by the package csid-volume-plugin.

use csid_tests::world::count;

use crate::engines::{make_busybox, mounts};
use crate::machine::Machine;
use crate::typed::type_section;

/// crun as a container may run it: systemd-nspawn allows neither new keyrings nor control groups.
const CRUN: &str = r#"#!/bin/bash
arguments=()
for argument; do
    arguments+=("$argument")
    [[ $argument != create ]] || arguments+=(--no-new-keyring)
done
exec /usr/bin/crun --cgroup-manager=disabled "${arguments[@]}"
"#;
/// dockerd's settings for a machine without a network.
const DOCKER: &str = r#"{"runtimes": {"crun": {"path": "/usr/local/bin/crun-in-machine"}}, "default-runtime": "crun",
"storage-driver": "vfs", "iptables": false, "bridge": "none", "shutdown-timeout": 1}
"#;
/// A service that runs a CSI plugin in Docker, which docs/consumers.md advises against.
const PLUGIN_IN_DOCKER: &str = "[Unit]
After=docker.service
Requires=docker.service
Before=csi-plugins.target
[Service]
ExecStart=/usr/bin/docker run --rm --name plugin busybox sleep infinity
[Install]
WantedBy=multi-user.target
";

/// Returns a machine in which Docker can be installed. The image of the documents is there as soon as dockerd is.
fn machine() -> Machine {
    let m = Machine::boot();
    m.with_archive();
    m.copy_package("csid");
    m.copy_package("csid-volume-plugin");
    // Another client than Debian's would come first in the PATH.
    m.run("rm -f /usr/local/bin/docker* && mkdir -p /etc/docker /usr/local/bin");
    m.write_program("/usr/local/bin/crun-in-machine", CRUN);
    m.write("/etc/docker/daemon.json", DOCKER);
    make_busybox(&m);
    // The image has a file where the volume will be.
    m.run("mkdir /image/data && touch /image/data/of-the-image");
    m.run("tar -C /image -cf /root/with-data.tar . && apt-get install docker.io");
    m.run("docker import /root/busybox.tar docker.io/library/busybox && docker import /root/with-data.tar with-data");
    m
}

/// Returns how many uses csid-volume-plugin counts.
fn uses(m: &Machine) -> String {
    m.run("find /run/csid-volume-plugin -type f | wc -l")
}

#[test]
fn docker_container_has_its_volume_over_all_restarts() {
    let m = machine();
    type_section(&m, "### A container in Docker");
    assert_eq!((mounts(&m).as_str(), uses(&m).as_str()), ("docker mounted", "1"));
    m.run("docker exec web sh -c 'echo first >/data/file && sync'");
    let file = |command: &str| m.run(&format!("docker {command} cat /data/file"));
    let busybox = "--rm --network none busybox";
    let by_mount = "run --mount type=volume,volume-driver=csid,source=data,target=/data";
    assert_eq!(file(&format!("{by_mount} {busybox}")), "first");
    assert_eq!(file(&format!("run --volume-driver csid --volume data:/data {busybox}")), "first");
    assert_eq!((mounts(&m).as_str(), uses(&m).as_str()), ("docker mounted", "1"), "the others have ended");

    // Copies into and out of a container that does not run are mounts of their own.
    m.run(
        "docker create --name copied --volume data:/data with-data cat /data/copy && echo copy >/root/copy",
    );
    m.run("docker cp /root/copy copied:/data/copy");
    assert_eq!(m.run("docker start --attach copied"), "copy");
    assert_eq!(m.run("docker cp copied:/data/copy - | tar -xO"), "copy");
    m.run("docker rm copied");
    assert_eq!(m.run("docker exec web ls /data | grep -c of-the-image || true"), "0", "nothing is copied up");
    assert_eq!(uses(&m), "1");

    // csid and csid-volume-plugin come and go below a container. An engine that asks meanwhile waits.
    m.run("systemctl restart csid && systemctl kill --signal KILL csid csid-volume-plugin");
    m.run("docker restart --time 0 web");
    assert_eq!((file("exec web").as_str(), uses(&m).as_str()), ("first", "1"));
    m.run("systemctl stop csid-volume-plugin.service && systemctl kill --signal KILL csid; docker restart --time 0 web");
    assert_eq!((file("exec web").as_str(), mounts(&m).as_str()), ("first", "docker mounted"));

    // dockerd stops its containers and starts them again.
    m.run("systemctl restart docker");
    m.until("docker exec web true");
    assert_eq!((file("exec web").as_str(), uses(&m).as_str()), ("first", "1"));

    // A process of the host holds the volume when its last container ends: a sweep unmounts it later.
    m.run("mkdir -p /etc/systemd/system/csid-volume-plugin.service.d");
    m.write(
        "/etc/systemd/system/csid-volume-plugin.service.d/sweep.conf",
        "[Service]\nExecStart=\nExecStart=/usr/sbin/csid-volume-plugin --sweep=1\n",
    );
    m.run("systemctl daemon-reload && systemctl restart csid-volume-plugin");
    let source = m.run("csictl mounts --json | sed -n 's/.*\"source\": \"\\(.*\\)\".*/\\1/p'");
    m.run(&format!("systemd-run --quiet --unit holder --working-directory {source} sleep infinity"));
    m.run("docker stop --time 0 web");
    assert_eq!((mounts(&m).as_str(), uses(&m).as_str()), ("docker mounted", "0"));
    m.run("systemctl stop holder");
    m.until("test \"$(csictl mounts --json)\" = '[]'");
    m.run("rm -r /etc/systemd/system/csid-volume-plugin.service.d && systemctl daemon-reload");
    m.run("systemctl restart csid-volume-plugin && docker start web");
    assert_eq!(file("exec web"), "first");

    // dockerd is killed and sends no Unmount. The next container has the volume at once.
    m.run("systemctl kill --signal KILL docker.service");
    m.until("docker exec web true");
    assert_eq!(uses(&m), "2");
    m.run("docker rm --force web");
    assert_eq!((mounts(&m).as_str(), uses(&m).as_str()), ("docker mounted", "1"));
    assert_eq!(file(&format!("run --volume data:/data {busybox}")), "first");
    m.run("csictl unmount containers data docker");
    assert_eq!(file(&format!("run --volume data:/data {busybox}")), "first");
    assert_eq!((mounts(&m).as_str(), uses(&m).as_str()), ("", "0"));

    // What Docker and Compose remove stays in csid.
    type_section(&m, "### Docker Compose");
    assert_eq!(mounts(&m), "docker mounted");
    m.run("docker exec web_web_1 sh -c 'echo composed >>/data/file && sync'");
    m.run("cd /srv/web && docker-compose down --volumes --timeout 0");
    assert_eq!(mounts(&m), "");
    m.run("docker volume prune --force && docker volume rm data");
    assert_eq!(m.run("docker volume ls --quiet"), "data", "csid's list");
    assert_eq!(file(&format!("run --volume-driver csid --volume data:/data {busybox}")), "first\ncomposed");
    let unknown = m.try_run("docker volume create --driver csid other");
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(!unknown.status.success() && said.contains("containers/other is not registered"), "{said}");

    // The machine goes down in order, and comes up; then as after a power cut. Nobody starts the container.
    m.run("cd /srv/web && docker-compose up --detach");
    m.reboot();
    let is_up = "docker exec web_web_1 cat /data/file";
    m.until(is_up);
    assert_eq!((m.run(is_up).as_str(), mounts(&m).as_str()), ("first\ncomposed", "docker mounted"));
    m.kill();
    m.until(is_up);
    assert_eq!((m.run(is_up).as_str(), mounts(&m).as_str()), ("first\ncomposed", "docker mounted"));
    assert_eq!(uses(&m), "1");
    m.has_no_ordering_cycle();
    let journal = m.run("journalctl --no-pager --merge");
    assert!(!journal.contains("Failed unmounting"), "the volumes are unmounted in order: {journal}");

    // After a reboot, a container that is removed leaves its row until its volume is removed, too.
    m.run("docker rm --force web_web_1");
    m.run("docker run --detach --name once --volume data:/data busybox sleep infinity");
    m.kill();
    m.until("docker ps");
    assert_eq!(mounts(&m), "docker lost");
    m.run("docker rm once");
    assert_eq!(mounts(&m), "docker lost");
    m.run("docker volume rm data");
    assert_eq!((mounts(&m).as_str(), m.run("csictl claims --json").as_str()), ("", "[]"));

    // The order that the document warns of.
    m.write("/etc/systemd/system/plugin-in-docker.service", PLUGIN_IN_DOCKER);
    m.run("systemctl daemon-reload");
    let cycle = m.run("systemd-analyze verify plugin-in-docker.service csid-volume-plugin.service csid.service 2>&1 || true");
    assert!(
        cycle.contains("Found ordering cycle"),
        "docs/consumers.md, A CSI plugin in a container: {cycle}"
    );
    count("boots under Docker's containers", 3);
}
