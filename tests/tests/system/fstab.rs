//! Lines of fstab and mount units of the type csi, with the real mount(8) and systemd.

use std::time::Duration;

use csid_tests::script::{Act, Rule};
use csid_tests::world::count;
use rustix::process::Signal;

use crate::machine::Machine;
use crate::settings::{TEST_PLUGIN, define, install_test_plugin, ready};

/// A machine that mounts network file systems at a boot. The others have no need of it.
fn machine() -> Machine {
    let m = Machine::with_csid();
    m.run("rm /etc/systemd/system/remote-fs.target && systemctl daemon-reload && systemctl enable remote-fs.target");
    m.run("csictl wait local");
    m
}

fn create(m: &Machine, volume: &str, size: &str) {
    m.run(&format!(
        "csictl volume create prod {volume} --plugin local --access-mode single-node-writer --capacity {size}"
    ));
}

fn property(m: &Machine, unit: &str, name: &str) -> String {
    m.run(&format!("systemctl show {unit} --property {name} --value"))
}

/// The lines of a boot's journal.
struct Journal(String);

impl Journal {
    fn of(m: &Machine, boot: &str) -> Self {
        Journal(m.run(&format!("journalctl --no-pager --boot={boot} --output=cat")))
    }

    /// Returns the number of the last line that begins so.
    fn last(&self, text: &str) -> usize {
        let found = self.0.lines().enumerate().filter(|(_, line)| line.starts_with(text)).last();
        found.unwrap_or_else(|| panic!("no `{text}`: {}", self.0)).0
    }

    /// Returns the lines from the last one that begins so: CI shows the first lines of a failure only.
    fn since(&self, text: &str) -> String {
        self.0.lines().skip(self.last(text)).collect::<Vec<_>>().join("\n")
    }

    fn is_clean(&self) {
        for words in ["ordering cycle", "Failed unmounting"] {
            assert!(!self.0.contains(words), "{words}: {}", self.0);
        }
    }
}

/// A service that writes at its start and its stop. It runs only with its volume.
const SERVICE: &str = "[Unit]
RequiresMountsFor=/srv/my-db
[Service]
ExecStart=/bin/sh -c 'mountpoint -q /srv/my-db && echo start >>/srv/my-db/log && exec sleep infinity'
ExecStop=/bin/sh -c 'echo stop >>/srv/my-db/log'
[Install]
WantedBy=multi-user.target
";

#[test]
fn fstab_volume_is_there_whenever_its_service_runs() {
    let m = machine();
    create(&m, "db", "64MiB");
    m.write("/etc/fstab", "prod/db /srv/my-db csi _netdev,noatime 0 0\n");
    m.write("/etc/systemd/system/app.service", SERVICE);
    m.run("mkdir /srv/my-db && systemctl daemon-reload && systemctl enable --now app");
    let unit = r"'srv-my\x2ddb.mount'";
    let running = |m: &Machine| {
        m.run("systemctl is-active app && mountpoint /srv/my-db");
        property(m, "app", "MainPID")
    };
    let mounted = |m: &Machine| {
        let shown = m.run("csictl mounts --target /srv/my-db");
        assert!(shown.contains(r"srv-my\x2ddb.mount") && shown.contains("mounted"), "{shown}");
        m.run("csictl mounts --json | grep -c '\"target\": \"/srv/my-db\"'")
    };
    let noted = |m: &Machine| m.run("grep -c helper=csi /run/mount/utab || true");
    let pid = running(&m);
    assert_eq!((mounted(&m).as_str(), noted(&m).as_str()), ("1", "1"));
    assert!(m.run("findmnt --noheadings --output OPTIONS /srv/my-db").contains("noatime"));

    // csid alone: neither the mount nor the service notices.
    m.run("systemctl restart csid && csictl wait local");
    m.run("systemctl kill --signal KILL csid");
    m.until("csictl wait local");
    m.run("systemctl stop csid.service && systemctl start csid.service && csictl wait local");
    assert_eq!((running(&m), property(&m, unit, "ActiveState").as_str()), (pid.clone(), "active"));

    // The same again changes nothing.
    m.run(&format!("mount -a && mount -a && systemctl reload {unit}"));
    assert_eq!((mounted(&m).as_str(), noted(&m).as_str()), ("1", "1"));
    assert_eq!(running(&m), pid);

    // The unit's end is the claim's.
    m.run(&format!("systemctl restart {unit}"));
    assert_ne!(running(&m), pid, "the service was restarted with its mount");
    mounted(&m);
    m.run(&format!("systemctl stop {unit}"));
    assert_eq!(m.run("systemctl is-active app || true"), "inactive");
    assert_eq!(m.run("csictl claims --json"), "[]");
    assert_eq!((m.run("csictl mounts --json").as_str(), noted(&m).as_str()), ("[]", "0"));
    m.run("systemctl start app");
    running(&m);

    // By hand, under a service that does not use it at the moment.
    m.run("umount /srv/my-db && systemctl is-active app && ! mountpoint -q /srv/my-db");
    assert_eq!(m.run("csictl claims --json"), "[]");
    // systemd sees the mount late. The command returns when a shutdown would unmount the volume before csid stops.
    m.until(&format!("! systemctl is-active {unit}"));
    m.signal(Signal::STOP);
    std::thread::scope(|scope| {
        let mount = scope.spawn(|| m.run("mount /srv/my-db"));
        std::thread::sleep(Duration::from_secs(2));
        let has_returned = mount.is_finished();
        m.signal(Signal::CONT);
        assert!(!has_returned, "{}", mount.join().unwrap());
    });
    m.run(&format!("systemctl is-active {unit}"));
    assert!(property(&m, unit, "After").split(' ').any(|unit| unit == "remote-fs-pre.target"));
    mounted(&m);

    // A line that would end the boot is refused by hand.
    m.run("cp /etc/fstab /etc/fstab.good && sed -i s/_netdev/defaults/ /etc/fstab && umount /srv/my-db");
    let refused = m.try_run("mount /srv/my-db");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && text.contains("needs _netdev"), "{text}");
    let checked = m.try_run("csictl check-config");
    assert!(!checked.status.success());
    m.run("mv /etc/fstab.good /etc/fstab && csictl check-config && mount /srv/my-db");

    // In order down and up, and as after a power cut.
    m.run("rm -f /srv/my-db/log && systemctl restart app");
    m.reboot();
    running(&m);
    mounted(&m);
    let journal = Journal::of(&m, "-1");
    journal.is_clean();
    let down = [
        "Stopped app.service",
        r"Unmounted srv-my\x2ddb.mount",
        "Stopped csid.service",
        "Stopped csi-plugin-local-default.service",
    ];
    let order = down.map(|text| journal.last(text));
    assert!(order.is_sorted(), "{order:?} of {down:?}: {}", journal.since("Stopping app.service"));
    assert_eq!(m.run("cat /srv/my-db/log"), "stop\nstart\nstop\nstart");
    m.kill();
    running(&m);
    mounted(&m);
    assert_eq!(m.run("cat /srv/my-db/log"), "stop\nstart\nstop\nstart\nstart");
    Journal::of(&m, "0").is_clean();
    assert_eq!(m.cycles_of_boot(), "");
    m.run(&format!("systemctl stop {unit} && csictl volume delete prod db --yes prod/db"));
    assert_eq!((m.run("csictl mounts --json").as_str(), m.loops().as_str()), ("[]", ""));
}

#[test]
fn fifty_lines_are_mounted_at_one_boot() {
    const LINES: usize = 50;
    let m = machine();
    m.run(&format!(
        "for n in $(seq {LINES}); do csictl volume create prod v$n --plugin local --access-mode single-node-writer \
         --capacity 16MiB >/dev/null & done; wait; for n in $(seq {LINES}); do mkdir /srv/v$n; \
         echo prod/v$n /srv/v$n csi _netdev 0 0; done >/etc/fstab"
    ));
    assert_eq!(m.run("csictl volume list --json | grep -c '\"id\": \"v'"), LINES.to_string());
    // One whose plugin never serves delays neither the others nor the boot.
    m.run("mkdir /srv/never && echo 'prod/never /srv/never csi _netdev,csi.deadline=2s,csi.plugin=never,csi.external-id=x 0 0' >>/etc/fstab");
    m.write("/etc/csid/plugins.d/never.toml", "supervision = \"external\"\nsocket = \"/run/never.sock\"\n");
    let app = "[Unit]\nRequiresMountsFor=/srv/never\n[Service]\nExecStart=sleep infinity\n[Install]\nWantedBy=multi-user.target\n";
    m.write("/etc/systemd/system/app.service", app);
    m.run("systemctl enable app");
    m.reboot();
    let all = LINES.to_string();
    m.until(&format!("[ $(csictl mounts --json | grep -c '\"state\": \"mounted\"') = {all} ]"));
    assert_eq!(m.run("grep -c helper=csi /run/mount/utab"), all);
    assert_eq!(m.run("systemctl list-units --plain --no-legend --state active 'srv-v*.mount' | wc -l"), all);
    let log = m.run("journalctl --no-pager --boot --output=cat -u srv-never.mount");
    assert!(log.contains("mount.csi: ") && log.contains("never"), "csid's reason: {log}");
    assert_eq!(m.run("systemctl is-failed srv-never.mount"), "failed");
    let app = Journal::of(&m, "0");
    assert!(app.0.contains("Dependency failed for app.service"), "{}", app.0);
    app.is_clean();
    m.reboot();
    Journal::of(&m, "-1").is_clean();
    m.until(&format!("[ $(csictl mounts --json | grep -c '\"state\": \"mounted\"') = {all} ]"));
    m.run("umount -a -t ext4 -O _netdev || true; for n in $(seq 50); do ! mountpoint -q /srv/v$n || umount /srv/v$n; done");
    assert_eq!((m.run("csictl mounts --json").as_str(), m.loops().as_str()), ("[]", ""));
    count("lines of fstab at one boot", LINES);
}

#[test]
fn mount_that_systemd_gives_up_does_not_arrive_later() {
    let m = machine();
    let mut plugin = install_test_plugin(&m);
    define(&m, "p", &[TEST_PLUGIN]);
    ready(&m, "p");
    plugin.rules([Rule::always("NodeStageVolume", Act::Hold)]);
    let options = "_netdev,noauto,x-systemd.mount-timeout=8s,csi.plugin=p,csi.external-id=v";
    m.write("/etc/fstab", &format!("prod/v /srv/slow csi {options} 0 0\n"));
    m.run("mkdir /srv/slow && systemctl daemon-reload && ! systemctl start srv-slow.mount");
    assert_eq!(property(&m, "srv-slow.mount", "Result"), "timeout");
    // mount(8) ends at once, and the helper when the mount is rolled back.
    m.until("journalctl --no-pager --boot --output=cat | grep 'mount.csi: cancelled; nothing is mounted'");
    plugin.honest();
    assert_eq!(
        (m.run("csictl mounts --json").as_str(), m.run("csictl operations --json").as_str()),
        ("[]", "[]")
    );
    assert_eq!(property(&m, "srv-slow.mount", "ActiveState"), "failed");
    m.run("systemctl start srv-slow.mount && systemctl stop srv-slow.mount");
}

#[test]
fn automount_is_mounted_expired_and_mounted_again() {
    let m = machine();
    create(&m, "auto", "64MiB");
    m.write(
        "/etc/fstab",
        "prod/auto /srv/auto csi noauto,x-systemd.automount,x-systemd.idle-timeout=1s,_netdev 0 0\n",
    );
    m.run("mkdir /srv/auto && systemctl daemon-reload && systemctl start srv-auto.automount");
    m.run("timeout 20 sh -c 'echo here >/srv/auto/file'");
    for _ in 0..2 {
        m.until("[ \"$(csictl mounts --json)\" = '[]' ]");
        assert_eq!(property(&m, "srv-auto.mount", "ActiveState"), "inactive");
        assert_eq!(m.run("timeout 20 cat /srv/auto/file"), "here");
    }
    m.run("systemctl stop srv-auto.mount");
    assert_eq!(m.run("timeout 20 cat /srv/auto/file"), "here");
    m.reboot();
    Journal::of(&m, "-1").is_clean();
    assert_eq!(m.run("timeout 20 cat /srv/auto/file"), "here");
    m.run("systemctl stop srv-auto.mount && systemctl stop srv-auto.automount && ! mountpoint -q /srv/auto");
    assert_eq!(m.run("csictl claims --json"), "[]");
}

#[test]
fn unit_by_hand_needs_no_section_unit() {
    let m = machine();
    create(&m, "data", "64MiB");
    m.write(
        "/etc/systemd/system/srv-data.mount",
        "[Mount]\nWhat=prod/data\nWhere=/srv/data\nType=csi\nOptions=_netdev\n[Install]\nWantedBy=remote-fs.target\n",
    );
    m.run("mkdir /srv/data && systemctl daemon-reload && systemctl enable --now srv-data.mount");
    m.run("echo here >/srv/data/file");
    m.reboot();
    assert_eq!(m.run("cat /srv/data/file"), "here");
    Journal::of(&m, "-1").is_clean();
    m.run("systemctl stop srv-data.mount");
    assert_eq!(m.run("csictl claims --json"), "[]");
    assert_eq!(m.cycles_of_boot(), "");
    // docs/consumers.md, A host with `/var` on the network: csid waits for it, and it waits for csid.
    m.write("/etc/fstab", "server:/csid /var/lib/csid nfs _netdev 0 0\n");
    let cycle = m.cycles_of_boot();
    assert!(cycle.contains("csid.service"), "{cycle}");
}
