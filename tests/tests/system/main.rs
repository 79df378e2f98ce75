//! The package installed in a booted Debian: systemd, dbus-daemon, polkitd, journald and the kernel are the real ones.
//! Needs `make deb PROFILE=dev` before, which `make test` does.

mod access;
mod bound;
mod closed;
mod cluster_demo;
mod clustered;
mod credentials;
mod docker;
mod doctor;
mod drivers;
mod engines;
mod exec;
mod fstab;
mod hung;
mod machine;
mod newcomer;
mod package;
mod profiles;
mod restored;
mod rpm;
mod settings;
mod shutdown;
mod stats;
mod typed;
mod units;
mod upgrades;

use std::time::{Duration, Instant};

use csid_tests::search::Haystack;
use csid_tests::world::count;
use machine::Machine;

#[test]
fn file_outlives_restart_kill_and_reboot() {
    let m = Machine::with_csid();
    m.run("systemctl stop csid.service csid.socket && systemctl start csid");
    let bare = m.inventory();
    m.run("csictl wait local");
    let id = m.run("csi-local create data --size 64M");
    let mount = format!("csictl mount demo data web --plugin local --external-id {id} --restore auto");
    let path = m.run(&mount);
    m.run(&format!("echo 'written before' >{path}/hello && sync {path}/hello"));
    let file = || m.run(&format!("cat {path}/hello"));
    let pid = || m.run("systemctl show csid --property MainPID --value");

    // systemctl restart: nothing is unmounted, and it is ready when systemctl says so.
    let before = pid();
    m.run("systemctl restart csid");
    assert_ne!(pid(), before);
    assert_eq!(file(), "written before");
    assert_eq!(m.run(&mount), path, "the same answer");
    assert!(m.run("csictl mounts").contains("mounted"));

    // kill -9: systemd starts it again.
    let before = pid();
    m.run(&format!("kill -9 {before}"));
    m.until("csictl status && [ $(systemctl show csid --property MainPID --value) != 0 ]");
    assert_ne!(pid(), before);
    assert_eq!(file(), "written before");

    // The machine goes down in order and comes up again.
    let boot = m.run("cat /proc/sys/kernel/random/boot_id");
    m.reboot();
    assert_ne!(m.run("cat /proc/sys/kernel/random/boot_id"), boot);
    m.until(&format!("mountpoint -q {path}"));
    assert_eq!(file(), "written before");
    // And once more as if the plug was pulled.
    m.kill();
    m.until(&format!("mountpoint -q {path}"));
    assert_eq!(file(), "written before");
    m.run("systemctl is-active csid");
    m.until("systemctl show csid --property StatusText | grep -q '1 healthy.*1 mount'");

    m.run("csictl unmount demo data web");
    m.run(&format!("csi-local delete {id}"));
    assert_eq!(m.inventory(), bare, "nothing is left");
    assert_eq!(m.loops(), "", "no loop device");
    m.has_no_ordering_cycle();
    let left = m.run("journalctl --no-pager --merge | grep -ci 'failed unmounting.*csid' || true");
    assert_eq!(left, "0", "the volumes were unmounted in order at shutdown");
    let boots: usize =
        m.run("journalctl --list-boots --no-pager | grep -cE '^ *-?[0-9]+ '").parse().expect("a number");
    assert!(boots >= 3, "{boots} boots in the journal");
    count("boots in which the file was there", boots);
}

#[test]
fn killed_plugin_restarts_and_its_mounts_stay() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    let id = m.run("csi-local create data --size 64M");
    let path = m.run(&format!("csictl mount demo data web --plugin local --external-id {id}"));
    m.run(&format!("echo here >{path}/file"));
    let unit = "csi-plugin-local-default.service";
    let pid = || m.run(&format!("systemctl show {unit} --property MainPID --value"));
    let mut slowest = Duration::ZERO;
    for _ in 0..3 {
        let before = pid();
        let begun = Instant::now();
        m.run(&format!("kill -9 {before}"));
        m.until(&format!(
            "p=$(systemctl show {unit} --property MainPID --value); [ $p != 0 ] && [ $p != {before} ]"
        ));
        slowest = slowest.max(begun.elapsed());
        assert_eq!(m.run(&format!("cat {path}/file")), "here", "the mount stays");
        m.run("csictl wait local");
    }
    assert!(slowest > Duration::from_millis(800) && slowest < Duration::from_secs(6), "{slowest:?}");
    let plugin = m.run("csictl plugin show local");
    assert!(plugin.contains('3'), "the restarts are counted: {plugin}");
    let before = pid();
    m.run("csictl plugin restart local");
    assert_ne!(pid(), before);
    assert_eq!(m.run(&format!("cat {path}/file")), "here", "the mount stays");
    assert!(m.run("csictl plugin show local --json").contains("\"restarts\": 4"), "it is counted too");
    m.run("csictl unmount demo data web");

    // It is no child of csid's and outlives it; a unit that is there is adopted.
    let before = pid();
    m.run("systemctl stop csid.service csid.socket");
    assert_eq!(pid(), before, "the plugin outlives csid");
    m.run("systemctl start csid");
    m.run("csictl wait local");
    assert_eq!(pid(), before, "and is adopted");
    // One that died while csid was away is started.
    m.run("systemctl stop csid.service csid.socket");
    m.run(&format!("kill -9 {before}"));
    m.run("systemctl start csid");
    m.run("csictl wait local");
    assert_ne!(pid(), before);
    // The socket activates csid.
    m.run("systemctl stop csid.service");
    m.run("csictl status");
    m.run("systemctl is-active csid");
    // Its log lines carry what to filter by.
    let fields =
        m.run("journalctl --no-pager --output=json -u csi-plugin-local-default | grep -c CSI_PLUGIN || true");
    assert_ne!(fields, "0", "the plugin's lines carry CSI_PLUGIN");
    let logged = || m.run("csictl plugin logs local");
    let (some, last) = (logged(), m.run("csictl plugin logs local -n 1"));
    assert!(some.contains("csi_local") && some.ends_with(&last), "{some}");
    assert_eq!(last.lines().count(), 1);
    // Followed, it goes on when csid is restarted, and ends with its reader.
    m.run("systemd-run --quiet --unit follower --property StandardOutput=file:/root/log csictl plugin logs local -f");
    m.until("grep -q csi_local /root/log");
    // No copy of a consumer's mount is kept in a mount namespace of its own.
    let reader = m.run("systemctl show 'csid-log-*' --property MainPID --value");
    assert_eq!(m.run(&format!("readlink /proc/{reader}/ns/mnt")), m.run("readlink /proc/1/ns/mnt"));
    m.run("systemctl restart csid && csictl plugin restart local");
    m.until("[ $(wc -l </root/log) -gt 11 ]");
    m.run("systemctl stop follower");
    m.until("! systemctl --quiet is-active 'csid-log-*'");
    m.run("csictl plugin register ext --socket /run/none.sock");
    let refused = m.run("csictl plugin logs ext 2>&1 || true");
    assert!(refused.contains("NotSupported"), "{refused}");
    m.run("csictl plugin unregister ext");
    m.run(&format!("csi-local delete {id}"));
}

#[test]
fn reboot_orders_a_hold_mount_and_its_target() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    for volume in ["held", "kept"] {
        let id = m.run(&format!("csi-local create {volume} --size 64M"));
        m.run(&format!("mkdir -p /srv/{volume}"));
        let restore = if volume == "held" { "hold" } else { "auto" };
        m.run(&format!(
            "csictl mount demo {volume} job --plugin local --external-id {id} --restore {restore} --target /srv/{volume}"
        ));
        m.run(&format!("echo {volume} >/srv/{volume}/file && sync /srv/{volume}/file"));
    }
    let block = m.run("csi-local create disk --size 16M --block");
    let device = m.run(&format!("csictl mount demo disk job --plugin local --external-id {block} --block"));
    m.run(&format!("test -b {device} && echo raw | dd of={device} conv=notrunc,fsync status=none"));
    m.reboot();
    m.until("mountpoint -q /srv/kept");
    assert_eq!(m.run("cat /srv/kept/file"), "kept");
    assert_eq!(m.run("mountpoint -q /srv/held && echo mounted || echo not"), "not");
    let rows = m.run("csictl mounts --json");
    assert_eq!(rows.matches("\"lost\"").count(), 2, "the held one and the disk: {rows}");
    assert_eq!(m.run(&format!("test -b {device} && echo device || echo none")), "none", "no stale node");
    let id = m.run("csi-local create held --size 64M");
    m.run(&format!(
        "csictl mount demo held job --plugin local --external-id {id} --restore hold --target /srv/held"
    ));
    assert_eq!(m.run("cat /srv/held/file"), "held");
    for volume in ["held", "kept", "disk"] {
        m.run(&format!("csictl unmount demo {volume} job"));
    }
    assert_eq!(m.loops(), "", "no loop device");
    let words = m.run(
        "journalctl --no-pager --merge | grep -Ei 'ordering cycle|failed unmounting.*(csid|srv)' || true",
    );
    assert_eq!(words, "");
}

/// systemd 254 gives a unit with a network of its own a mount namespace, which 252, where this runs, does not.
#[test]
fn unit_shares_the_hosts_mounts() {
    let unit = include_str!("../../../systemd/csid.service");
    let has = |line: &str| unit.lines().any(|of| of == line);
    assert!(has("PrivateNetwork=yes") && has("PrivateMounts=no"), "{unit}");
}

#[test]
fn unit_has_no_network() {
    let unit = include_str!("../../../systemd/csid.service");
    let settings = |name: &str| {
        let of = unit.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        of.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(settings("PrivateNetwork"), ["yes"]);
    assert_eq!(settings("RestrictAddressFamilies"), ["AF_UNIX"]);
    assert_eq!(settings("IPAddressDeny"), ["any"]);
    for opening in ["IPAddressAllow", "JoinsNamespaceOf", "NetworkNamespacePath"] {
        assert!(settings(opening).is_empty(), "{opening}");
    }
}

#[test]
fn unit_is_hardened() {
    let m = Machine::with_csid();
    let report = m.run("systemd-analyze security csid.service --no-pager | tail -n 1");
    let score: f64 = report
        .split_whitespace()
        .find_map(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("a score in {report}"));
    assert!(score <= 3.3, "{report}");
    count("hundredths of systemd's exposure level", (score * 100.0) as usize);
    count("ms for the start of csid.service", m.start_time("csid.service"));
    m.run(
        "systemd-analyze verify /lib/systemd/system/csid.service /lib/systemd/system/csid{,-metrics}.socket",
    );
    // What csid mounts is seen by the host.
    m.run("csictl wait local");
    let id = m.run("csi-local create data --size 64M");
    let path = m.run(&format!("csictl mount demo data web --plugin local --external-id {id}"));
    assert_eq!(m.run(&format!("grep -c ' {path} ' /proc/1/mountinfo")), "1");
    // It may not look into processes; a refusal names the consumer.
    m.run(&format!("systemd-run --unit user --working-directory {path} sleep 600"));
    let refused = m.run("csictl unmount demo data web 2>&1 && echo it is unmounted || true");
    assert!(refused.contains("is in use by") && refused.contains("Held by: web"), "{refused}");
    m.run("systemctl stop user && csictl unmount demo data web");
    // What is installed is not the build for the crash tests.
    let points = m.run("csid --fault-points 2>&1 && echo it has || true");
    assert!(!points.contains("it has"), "the shipped csid has fault points: {points}");
}

#[test]
fn canary_is_found_nowhere() {
    const SECRET: &str = "c4n4ry-s3cr3t-4242";
    const CONTEXT: &str = "c4n4ry-c0nt3xt-4242";
    const MARKER: &str = "m4rk3r-n0-s3cr3t-4242";
    let m = Machine::with_csid();
    m.run("csictl wait local");
    let id = m.run("csi-local create data --size 64M");
    // Not on a command line: what runs here may be logged.
    m.write("/root/secrets.json", &format!(r#"{{"password":"{SECRET}"}}"#));
    m.write(
        "/root/canary.sh",
        &format!(
            "csictl mount demo {MARKER} web --plugin local --external-id $1 --secrets-file /root/secrets.json \
             --context token={CONTEXT} --mount-flag noatime"
        ),
    );
    m.run("mkdir -p /etc/systemd/system/csid.service.d");
    m.write("/etc/systemd/system/csid.service.d/trace.conf", "[Service]\nEnvironment=CSID_LOG=trace\n");
    m.run("systemctl daemon-reload && systemctl restart csid && csictl wait local");
    m.run("! bash /root/canary.sh no-such-volume");
    m.run(&format!("bash /root/canary.sh {id}"));
    let reply = [
        m.run("csictl mounts --json"),
        m.run("csictl events --json"),
        m.run("csictl operations --json"),
        m.run("csictl status --json"),
    ];
    m.run(&format!("csictl unmount demo {MARKER} web"));
    // The plugin goes away while it is used: a failure, with everything in the call.
    m.run("systemctl stop csi-plugin-local-default.service");
    m.run(&format!("bash /root/canary.sh {id} || true; csictl unmount demo {MARKER} web || true"));
    m.run("sync");
    m.run("journalctl --sync || true");
    let mut haystack = Haystack::default();
    for text in reply {
        haystack.add("reply", text.as_bytes());
    }
    // Every field of every line, as journald keeps it.
    haystack.add("journal", &m.bytes("journalctl --no-pager --merge --output=export"));
    haystack.add("state", &m.bytes("cat /var/lib/csid/journal/*"));
    let files = "find /run/csid /run/systemd /var/lib/systemd -type f -exec cat {} + || true";
    haystack.add("systemd", &m.bytes(files));
    let lines = m.run("journalctl --no-pager -u csid | wc -l").parse().expect("a number");
    // What is no secret is found: the volume's name, and the plugin's unit.
    let found: Vec<_> =
        [MARKER, "csi-plugin-local-default"].iter().flat_map(|marker| haystack.hits(marker)).collect();
    for place in ["journal", "state", "reply", "systemd"] {
        assert!(found.contains(&place), "only in {found:?}");
    }
    assert_eq!(haystack.hits(SECRET).len(), 0, "the secret in {:?}", haystack.hits(SECRET));
    // The journal of mounts keeps the context for a restore.
    let found: Vec<_> = haystack.hits(CONTEXT).into_iter().filter(|place| *place != "state").collect();
    assert!(found.is_empty(), "the context in {found:?}");
    count("bytes searched", haystack.bytes());
    m.run("test -s /var/lib/csid/journal/csid.db");
    count("journal lines without a canary", lines);
    m.run("csictl wait local");
    m.run(&format!("csi-local delete {id}"));
}
