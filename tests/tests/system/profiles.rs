//! What a profile leaves a plugin, as the kernel has it: the helpers of FUSE mounts live on, and devices open or do not.

use csid_tests::backend::Server;
use csid_tests::script::{Act, Half, Lie, Rule};
use csid_tests::world::count;

use crate::machine::Machine;
use crate::settings::{TEST_PLUGIN, define, install_test_plugin, property, ready};

const UNIT: &str = "csi-plugin-p-default.service";

#[test]
fn a_fuse_helper_outlives_its_plugin_and_serves_on() {
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
    assert_eq!(m.run("grep -c /var/lib/csid/plugins/ /proc/1/mountinfo || true"), "0");
    let kept = plugin.backend().data("v").join("file");
    let last: usize = std::fs::read_to_string(kept).unwrap().lines().next().unwrap().parse().unwrap();
    assert!(last >= written(), "{last}: it was the plugin's directory that was written to");
    assert!(plugin.backend().get::<Server>("v").unwrap().is_some());
}

#[test]
fn a_profile_without_a_device_cannot_open_it() {
    let m = Machine::boot();
    // Control groups of version 1 are read-only in a container, until somebody says otherwise; then systemd has to look anew.
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
    m.write(
        "/usr/local/sbin/opens",
        r#"#!/bin/bash
for device in /dev/null /srv/disk /srv/fuse; do
    said=$({ : <$device; } 2>&1) && echo "$1 opens $device" || echo "$1 does not: $said"
done
echo "$1 has tried"
exec /usr/local/sbin/test-plugin /var/lib/p
"#,
    );
    m.run("chmod 755 /usr/local/sbin/opens");
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
            let state = "/etc/systemd/system/csi-plugin-p-.service.d/10-state.conf";
            m.write(state, "[Service]\nReadWritePaths=/var/lib/p\n");
            m.run("rm /etc/csid/plugins.d/p.toml && systemctl daemon-reload && systemctl reload csid");
            plugin.set(|script| {
                script.control(&["CREATE_DELETE_VOLUME"]);
                script.serves = vec![Half::Controller];
            });
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
