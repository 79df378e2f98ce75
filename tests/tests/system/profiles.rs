//! What a profile leaves a plugin, as the kernel has it: the helpers of FUSE mounts live on, and devices open or do not.

use csid_tests::backend::Server;
use csid_tests::script::{Act, Half, Lie, Rule};
use csid_tests::world::count;

use crate::machine::Machine;
use crate::settings::{TEST_PLUGIN, define, install_test_plugin, property, ready};

const UNIT: &str = "csi-plugin-p-default.service";

#[test]
fn fuse_helper_outlives_its_plugin() {
    let m = Machine::with_csid();
    let mut plugin = install_test_plugin(&m);
    plugin.rules([Rule::always("NodeStageVolume", Act::Lie(Lie::Left))]);
    define(&m, "p", &[TEST_PLUGIN, r#"profile = "node-fuse""#]);
    ready(&m, "p");
    let path = m.run("csictl mount demo v web --plugin p --external-id v");
    assert_eq!(m.run(&format!("findmnt --noheadings --output FSTYPE {path}")), "fuse");
    let helper = m.run("pgrep -x bindfs");
    let main = || property(&m, "p", "MainPID");
    assert_ne!(helper, main());
    let group =
        |pid: &str| m.run(&format!("grep name=systemd /proc/{pid}/cgroup || grep ^0:: /proc/{pid}/cgroup"));
    assert_eq!(group(&helper), group(&main()), "it counts as the plugin's");

    // It writes, and syncs each write, to the end.
    m.write(
        "/root/writer.sh",
        &format!(
            "n=0\nwhile :; do\n  n=$((n + 1))\n  echo $n | dd of={path}/file conv=notrunc,fsync status=none || echo $n >>/root/failed\n  \
             echo $n >>/root/count\ndone\n"
        ),
    );
    m.run("systemd-run --quiet --unit writer bash /root/writer.sh");
    let written = || m.run("tail -n 1 /root/count").parse::<usize>().expect("a number");
    m.until("test -s /root/count");
    let serves = |when: &str| {
        let before = written();
        m.until(&format!("[ $(tail -n 1 /root/count) -gt {} ]", before + 20));
        assert_eq!(m.run("cat /root/failed 2>/dev/null || true"), "", "writes that failed {when}");
        assert_eq!(m.run("pgrep -x bindfs"), helper, "{when}");
    };
    serves("at first");

    let mut ends = 0;
    for how in [
        "csictl plugin restart p".to_owned(),
        format!("systemctl kill --kill-whom main --signal KILL {UNIT}"),
        format!("systemctl restart csid && systemctl kill --kill-whom main --signal TERM {UNIT}"),
    ] {
        let before = main();
        m.run(&how);
        m.until(&format!(
            "p=$(systemctl show {UNIT} --property MainPID --value); [ $p != 0 ] && [ $p != {before} ] && csictl wait p --deadline 1s"
        ));
        serves(&how);
        assert_eq!(group(&helper), group(&main()), "{how}");
        ends += 1;
    }
    // csid is killed, and adopts the plugin that it finds.
    let before = main();
    m.run("systemctl kill --signal KILL csid");
    m.until("csictl wait p --deadline 1s");
    assert_eq!(main(), before);
    serves("after csid was killed");
    assert!(!m.run("csictl events").contains("mount-dead"));

    m.run("systemctl stop writer");
    count("synced writes to a FUSE volume, none failed", written());
    count("ends of its plugin that the helper outlived", ends);
    m.run("csictl unmount demo v web");
    m.until("! pgrep -x bindfs");
    assert_eq!(m.volumes_below_roots(), "0");
    let kept = plugin.backend().data("v").join("file");
    let last: usize = std::fs::read_to_string(kept).unwrap().lines().next().unwrap().parse().unwrap();
    assert!(last >= written(), "{last}: it was the plugin's directory that was written to");
    assert!(plugin.backend().get::<Server>("v").unwrap().is_some());
}

#[test]
fn profile_without_a_device_cannot_open_it() {
    let m = Machine::boot();
    // Control groups of version 1 are read-only in a container, until they are remounted; then systemd has to read them again.
    m.run(
        "if [ ! -e /sys/fs/cgroup/cgroup.controllers ] && [ -e /sys/fs/cgroup/devices ]; then
             mount -o remount,bind,rw /sys/fs/cgroup/devices && systemctl daemon-reexec
         fi",
    );
    let control = "systemd-run --quiet --wait --pipe --property DevicePolicy=closed sh -c ': </dev/loop-control' 2>&1 && echo opened || true";
    let control = m.run(control);
    if control.contains("opened") {
        count(
            "profiles shown: this host's kernel or container has no control group that refuses a device",
            0,
        );
        return;
    }
    assert!(control.contains("Operation not permitted"), "{control}");
    m.install();
    let mut plugin = install_test_plugin(&m);
    m.run("sed -i '1i exec = true' /etc/csid/csid.toml && systemctl reload csid");

    // A disk, and nodes where every plugin has them, also one with a /dev of its own.
    m.run("echo data >/srv/image && truncate --size 1M /srv/image");
    let disk = m.run("losetup --find --show /srv/image");
    for (node, kind, device) in [("disk", "b", disk.as_str()), ("fuse", "c", "/dev/fuse")] {
        m.run(&format!("mknod /srv/{node} {kind} $(stat --format '0x%t 0x%T' {device})"));
    }
    // What its own process can open, before it is the plugin.
    m.write_program(
        "/usr/local/sbin/opens",
        r#"#!/bin/bash
for device in /dev/null /srv/disk /srv/fuse; do
    said=$({ : <$device; } 2>&1) && echo "$1 opens $device" || echo "$1 does not: $said"
done
echo "$1 has tried"
exec /usr/local/sbin/test-plugin /var/lib/p
"#,
    );
    let mut refused = 0;
    for (profile, has_disk, has_fuse) in [
        ("none", true, true),
        ("node-block", true, true),
        ("node-fuse", false, true),
        ("node-net", false, false),
        ("controller", false, false),
    ] {
        let argv = format!(r#"argv = ["/usr/local/sbin/opens", "{profile}"]"#);
        let line = if profile == "none" { String::new() } else { format!("profile = {profile:?}") };
        let service = if profile == "controller" { "controller" } else { "node" };
        if service == "controller" {
            m.run("mkdir -p /etc/systemd/system/csi-plugin-p-.service.d");
            // It has a user of its own.
            m.run("chmod -R a+rwX /var/lib/p");
            let state = "/etc/systemd/system/csi-plugin-p-.service.d/10-state.conf";
            m.write(state, "[Service]\nReadWritePaths=/var/lib/p\n");
            m.run("rm /etc/csid/plugins.d/p.toml && systemctl daemon-reload && systemctl reload csid");
            plugin.set(|script| {
                script.control(&["CREATE_DELETE_VOLUME"]);
                script.serves = vec![Half::Controller];
            });
            m.run("chmod -R a+rwX /var/lib/p");
        }
        define(&m, "p", &[&argv, &line]);
        m.run(&format!("csictl plugin wait p --service {service} --deadline 30s"));
        m.until(&format!("csictl plugin logs p | grep -q '{profile} has tried'"));
        let said = m.run(&format!("csictl plugin logs p | grep '{profile} '"));
        assert!(said.contains("opens /dev/null"), "{said}");
        for (device, has) in [("/srv/disk", has_disk), ("/srv/fuse", has_fuse)] {
            assert_eq!(said.contains(&format!("opens {device}")), has, "{said}");
            assert_eq!(said.contains(&format!("{device}: Operation not permitted")), !has, "{said}");
            refused += usize::from(!has);
        }
        // Nor can a command that is run in it.
        let read = m.run("csictl plugin exec p -- head --bytes 4 /srv/disk 2>&1 </dev/null || true");
        assert_eq!(read == "data", has_disk, "{profile}: {read}");
        assert_eq!(read.contains("Operation not permitted"), !has_disk, "{profile}: {read}");
    }
    count("devices refused by the kernel to plugins of profiles without them", refused);
    m.run(&format!("losetup --detach {disk}"));
    assert_eq!(m.loops(), "", "no loop device");
}

/// Returns systemd's exposure level of a unit, 0 to 10.
fn exposure(m: &Machine, unit: &str) -> f64 {
    let report = m.run(&format!("systemd-analyze security {unit} --no-pager | tail -n 1"));
    report
        .split_whitespace()
        .find_map(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("a level in {report}"))
}

#[test]
fn csi_local_does_all_it_can_under_its_profile() {
    let m = Machine::with_csid();
    // A file system with reflinks below csi-local's volumes.
    m.run("truncate --size 2G /srv/pool && mkfs.xfs -q -m reflink=1 /srv/pool");
    let pool = m.run("losetup --find --show /srv/pool");
    m.run(&format!("mkdir -p /var/lib/csi-local && mount {pool} /var/lib/csi-local"));
    m.run("sed -i 's/\"serve\"/\"serve\", \"--attach\"/' /etc/csid/plugins.d/local.toml && systemctl reload csid");
    m.run("csictl wait local --deadline 30s");
    let unit = m.run("systemctl list-units --plain --no-legend 'csi-plugin-local-*' | cut -d ' ' -f 1");
    let shown = |name: &str| m.run(&format!("systemctl show {unit} --property {name} --value"));
    assert_eq!(shown("Description"), "CSI plugin local (profile node-block)");
    assert_eq!((shown("LimitCORE"), shown("NoNewPrivileges")), ("0".to_owned(), "yes".to_owned()));
    let level = exposure(&m, &unit);
    assert!(level <= 8.6, "{level}");
    count("hundredths of csi-local's exposure level", (level * 100.0) as usize);

    for fs in ["ext4", "xfs"] {
        let create = "csictl volume create demo";
        let how = format!("--plugin local --access-mode single-node-writer --fs-type {fs} --capacity 320MiB");
        m.run(&format!("{create} {fs} {how}"));
        let path = m.run(&format!("csictl mount demo {fs} web"));
        assert_eq!(m.run(&format!("findmnt --noheadings --output FSTYPE {path}")), fs);
        m.run(&format!("echo here >{path}/file && sync {path}/file"));
        // By reflink: the source is mounted.
        let snapshot = m.run(&format!("csictl volume snapshot demo {fs} before-{fs}"));
        let id = snapshot.split_whitespace().next().expect("an id");
        // This host may have given the machine no CAP_SYS_RESOURCE, without which ext4 does not grow while it is mounted.
        if fs == "xfs" || m.run("sed -n 's/CapBnd:\\t//p' /proc/1/status").ends_with("1ffffffffff") {
            m.run(&format!("csictl volume expand demo {fs} 400MiB"));
        }
        m.run(&format!("{create} {fs}-old --snapshot {id} {how}"));
        let old = m.run(&format!("csictl mount demo {fs}-old web"));
        assert_eq!(m.run(&format!("cat {old}/file")), "here");
        m.run(&format!("csictl unmount demo {fs} web && csictl unmount demo {fs}-old web"));
        m.run(&format!("csictl volume delete demo {fs}-old --yes demo/{fs}-old && csictl volume delete demo {fs} --yes demo/{fs}"));
    }
    m.run("csictl volume create demo raw --plugin local --access-mode single-node-writer --block --capacity 64MiB");
    let device = m.run("csictl mount demo raw web --block");
    m.run(&format!("[ -b {device} ] && head --bytes 4k /dev/urandom >{device}"));
    m.run("csictl unmount demo raw web && csictl volume delete demo raw --yes demo/raw");
    m.run(&format!("systemctl stop csid.socket csid '{unit}'"));
    m.run(&format!("umount /var/lib/csi-local && losetup --detach {pool}"));
    assert_eq!(m.loops(), "", "no loop device");
}

/// What a process inside a controller's unit tries, as the unit runs it: its own first, then what is not for it.
const PRIES: &str = r#"#!/bin/bash
say() { echo "tried $*"; }
say uid $(id -u) $(id -un)
touch "${CSI_ENDPOINT#unix://}.own" && rm "${CSI_ENDPOINT#unix://}.own" && say own yes
say run $(find /run -mindepth 1 -type s -o -mindepth 1 -type f | tr '\n' ' ')
for socket in /run/csid/plugins/local/default/csi.sock /run/csid/csid.sock /run/docker.sock \
    /run/dbus/system_bus_socket /run/systemd/private /srv/roots.sock; do
    if perl -MSocket -e 'socket(S, PF_UNIX, SOCK_STREAM, 0); connect(S, pack_sockaddr_un($ARGV[0])) or exit 1' $socket 2>/dev/null; then
        say connect $socket
    fi
done
for unit in csid csi-plugin-local-default; do
    kill -0 $(cat /srv/$unit.pid) 2>/dev/null && say kill $unit
done
touch /etc/cron.d/x 2>/dev/null && say cron
say end
exec /usr/local/sbin/test-plugin /var/lib/p
"#;

const CONNECTS: &str = r#"#!/usr/bin/perl
use Socket;
socket(S, PF_UNIX, SOCK_STREAM, 0);
connect(S, pack_sockaddr_un($ARGV[0])) or exit 1;
"#;

#[test]
fn controller_reaches_no_other_plugin() {
    let m = Machine::with_csid();
    let mut plugin = install_test_plugin(&m);
    plugin.set(|script| {
        script.control(&["CREATE_DELETE_VOLUME"]);
        script.serves = vec![Half::Controller];
    });
    m.run("csictl wait local");
    m.write_program("/usr/local/sbin/pries", PRIES);
    m.run("chmod -R a+rwX /var/lib/p");
    // As Docker's is, and one outside of /run that root alone may connect to.
    m.write(
        "/root/listens",
        "use Socket;\nmy @kept;\nunlink '/run/docker.sock', '/srv/roots.sock';\nfor (['/run/docker.sock', 0660], ['/srv/roots.sock', 0600]) {\n\
         socket(my $s, PF_UNIX, SOCK_STREAM, 0); bind($s, pack_sockaddr_un($_->[0])); chmod($_->[1], $_->[0]);\n\
         listen($s, 9); push @kept, $s;\n}\nsleep 600;\n",
    );
    m.run("systemd-run --quiet --unit sockets perl /root/listens");
    m.until("[ -S /srv/roots.sock ]");
    for unit in ["csid", "csi-plugin-local-default"] {
        m.run(&format!("systemctl show {unit} --property MainPID --value >/srv/{unit}.pid"));
    }
    m.run("mkdir -p /etc/systemd/system/csi-plugin-p-.service.d");
    let state = "/etc/systemd/system/csi-plugin-p-.service.d/10-state.conf";
    m.write(state, "[Service]\nReadWritePaths=/var/lib/p\n");
    m.run("systemctl daemon-reload; sed -i '1i exec = true' /etc/csid/csid.toml");
    let argv = r#"argv = ["/usr/local/sbin/pries"]"#;
    define(&m, "p", &[argv, r#"profile = "controller""#]);
    m.run("csictl plugin wait p --service controller --deadline 30s");
    m.until("csictl plugin logs p | grep -q 'tried end'");
    let said = m.run("csictl plugin logs p");
    let tried = |what: &str| said.lines().any(|line| line.contains(&format!("tried {what}")));
    assert!(tried("own yes"), "{said}");
    assert!(!tried("uid 0 "), "{said}");
    for what in ["connect", "kill", "cron"] {
        assert!(!tried(what), "{what}: {said}");
    }
    let line = said.lines().find(|line| line.contains("tried run")).expect("a line").to_owned();
    assert!(!line.contains("/run/csid"), "of others it sees nothing: {line}");
    let uid = |unit: &str| {
        m.run(&format!("stat --format %u /proc/$(systemctl show {unit} --property MainPID --value)"))
    };
    let before = uid(UNIT);
    assert!(before.parse::<u32>().unwrap() >= 61184, "systemd made it: {before}");
    let level = exposure(&m, UNIT);
    count("hundredths of a controller's exposure level", (level * 100.0) as usize);

    // A volume, a command, a restart of csid and an upgrade.
    m.run("csictl volume create demo c --plugin p --access-mode single-node-writer --capacity 1MiB");
    assert_eq!(m.run("csictl plugin exec p -- sh -c 'echo of the command'"), "of the command");

    // A socket that is made again stays out of reach, also of a command that runs there as root.
    m.run("systemctl stop sockets && rm /srv/roots.sock && systemd-run --quiet --unit sockets perl /root/listens");
    m.until("[ -S /srv/roots.sock ]");
    m.write_program("/usr/local/sbin/connects", CONNECTS);
    m.run("/usr/local/sbin/connects /run/docker.sock");
    for socket in ["/run/docker.sock", "/run/csid/csid.sock", "/run/csid/helper.sock"] {
        let refused = format!("csictl plugin exec p -- sh -c '/usr/local/sbin/connects {socket} || echo $?'");
        assert_eq!(m.run(&refused), "1", "{socket}");
    }
    // With a socket of its own it would have to be root.
    let own = "csictl plugin register q --profile controller --env CSI_ENDPOINT=unix:///run/q/csi.sock -- /usr/local/sbin/pries";
    let refused = m.run(&format!("{own} 2>&1 || true"));
    assert!(refused.contains("CSI_ENDPOINT") && refused.contains("profile `controller`"), "{refused}");
    m.run("systemctl restart csid && csictl plugin wait p --service controller --deadline 30s");
    assert_eq!(uid(UNIT), before);
    define(&m, "p", &[argv, r#"profile = "controller""#, r#"environment = { A = "b" }"#]);
    m.run("csictl plugin wait p --service controller --deadline 30s");
    let after = "csi-plugin-p-i1.service";
    assert_eq!(uid(after), before, "what it keeps is its own after an upgrade, too");
    m.run("csictl volume delete demo c --yes demo/c");

    // Another's socket in the place of its own is not spoken to.
    m.run(&format!("systemctl stop sockets; systemctl kill --kill-whom main --signal STOP {after}"));
    m.run("ln -sf ../../local/default/csi.sock /run/csid/plugins/p/i1/other && mv -f /run/csid/plugins/p/i1/other /run/csid/plugins/p/i1/csi.sock");
    m.run("systemctl restart csid");
    m.until("csictl plugin show p --json | grep -q 'is none of'");
    m.run(&format!("systemctl kill --kill-whom main --signal KILL {after}"));
    m.run("rm -f /run/csid/plugins/p/i1/csi.sock");
    m.until("csictl plugin wait p --service controller --deadline 1s");
}
