//! What a managed plugin is run with, in real units: profiles and drop-ins, propagation, network.

use csid_tests::plugin::TestPlugin;
use csid_tests::script::Half;
use csid_tests::world::count;

use crate::machine::Machine;

const CSI_LOCAL: &str = r#"argv = ["/usr/sbin/csi-local", "--state-dir", "/var/lib/blk", "serve"]"#;
pub const TEST_PLUGIN: &str = r#"argv = ["/usr/local/sbin/test-plugin", "/var/lib/p"]"#;

/// Have `plugins.d/ID.toml` say this.
pub fn define(m: &Machine, id: &str, lines: &[&str]) {
    let text = format!("supervision = \"managed\"\n{}\n", lines.join("\n"));
    m.write(&format!("/etc/csid/plugins.d/{id}.toml"), &text);
    m.run("systemctl reload csid");
}

pub fn ready(m: &Machine, id: &str) {
    m.run(&format!("csictl wait {id} --deadline 30s"));
}

pub fn property(m: &Machine, id: &str, name: &str) -> String {
    m.run(&format!("systemctl show csi-plugin-{id}-default.service --property {name} --value"))
}

/// Whether the plugin's process is in PID 1's namespace of this kind.
fn in_hosts(m: &Machine, id: &str, kind: &str) -> bool {
    let of = |pid: &str| m.run(&format!("readlink /proc/{pid}/ns/{kind}"));
    of(&property(m, id, "MainPID")) == of("1")
}

/// What is said of a plugin that cannot be used, by itself and to who wants to mount; nothing is mounted.
fn refused(m: &Machine, id: &str, word: &str) -> String {
    m.until(&format!("csictl plugin show {id} --json | grep -q '{word}'"));
    let answer = m.run(&format!(
        "csictl mount demo v web --plugin {id} --external-id v --deadline 1s 2>&1 && echo mounted || true"
    ));
    assert!(answer.contains(word), "{word}: {answer}");
    assert_eq!(m.volumes_below_roots(), "0");
    answer
}

pub fn install_test_plugin(m: &Machine) -> TestPlugin {
    let program = m.path("/usr/local/sbin/test-plugin");
    std::fs::copy(env!("CARGO_BIN_EXE_test-plugin"), program).expect("the plugin's program");
    let plugin = TestPlugin::new(m.path("/var/lib/p"));
    plugin.provision("v");
    plugin
}

#[test]
fn profile_is_applied_unless_a_drop_in_changes_it() {
    let m = Machine::with_csid();
    let mut plugin = install_test_plugin(&m);
    m.run("mkdir -p /var/lib/blk");

    // A real disk, by a plugin with the profile for disks.
    define(&m, "blk", &[CSI_LOCAL, r#"profile = "node-block""#]);
    ready(&m, "blk");
    let id = m.run("csi-local --state-dir /var/lib/blk create data --size 64M");
    let mount = format!("csictl mount demo data web --plugin blk --external-id {id}");
    let path = m.run(&mount);
    m.run(&format!("echo here >{path}/file && csictl unmount demo data web"));
    assert!(in_hosts(&m, "blk", "mnt"), "a node profile gives no mount namespace");
    for (name, value) in [
        ("Description", "CSI plugin blk (profile node-block)"),
        ("DevicePolicy", "closed"),
        ("KillMode", "process"),
        ("LimitNOFILE", "65536"),
        ("LimitCORE", "0"),
        ("TasksMax", "8192"),
        ("NoNewPrivileges", "yes"),
    ] {
        assert_eq!(property(&m, "blk", name), value, "{name}");
    }
    let capabilities = property(&m, "blk", "CapabilityBoundingSet");
    assert!(
        capabilities.contains("cap_sys_admin") && !capabilities.contains("cap_sys_boot"),
        "{capabilities}"
    );

    // The others, each as its table says; mounts that are processes outlive their plugin.
    for (profile, devices) in [("node-fuse", "char-misc rwm"), ("node-net", "")] {
        define(&m, "p", &[TEST_PLUGIN, &format!("profile = {profile:?}")]);
        ready(&m, "p");
        assert!(in_hosts(&m, "p", "mnt"), "{profile}");
        assert_eq!(property(&m, "p", "DeviceAllow"), devices, "{profile}");
        assert_eq!(property(&m, "p", "KillMode"), "process", "{profile}");
        m.run("csictl mount demo v web --plugin p --external-id v && csictl unmount demo v web");
    }

    // An administrator's drop-ins win, those for all plugins and those for one.
    let all = "/etc/systemd/system/csi-plugin-.service.d";
    let own = "/etc/systemd/system/csi-plugin-blk-.service.d";
    m.run(&format!("mkdir -p {all} {own}"));
    m.write(&format!("{all}/10-files.conf"), "[Service]\nLimitNOFILE=4096\n");
    m.write(
        &format!("{own}/10-own.conf"),
        "[Service]\nTasksMax=77\nKillMode=mixed\nDevicePolicy=auto\nDeviceAllow=\nCapabilityBoundingSet=\n\
         CapabilityBoundingSet=CAP_SYS_ADMIN CAP_DAC_OVERRIDE CAP_FOWNER CAP_CHOWN\n",
    );
    m.run("systemctl daemon-reload && csictl plugin restart blk");
    for (name, value) in [
        ("LimitNOFILE", "4096"),
        ("TasksMax", "77"),
        ("KillMode", "mixed"),
        ("DevicePolicy", "auto"),
        ("DeviceAllow", ""),
        ("CapabilityBoundingSet", "cap_chown cap_dac_override cap_fowner cap_sys_admin"),
        ("NoNewPrivileges", "yes"),
    ] {
        assert_eq!(property(&m, "blk", name), value, "{name}");
    }
    m.run(&format!("{mount} && csictl unmount demo data web"));

    // One that is for the next start only says nothing of the process that runs.
    m.write(&format!("{own}/20-hide.conf"), "[Service]\nPrivateTmp=yes\n");
    let before = property(&m, "blk", "MainPID");
    m.run("systemctl daemon-reload && systemctl restart csid");
    ready(&m, "blk");
    m.run(&format!("{mount} && csictl unmount demo data web"));
    assert_eq!(property(&m, "blk", "MainPID"), before);
    m.until("journalctl -u csid | grep -q 'started without what the next one would be.*PrivateTmp=yes'");
    // Nor does a csid that comes later take a hidden one for one that is not.
    m.run("csictl plugin restart blk --deadline 1s || true");
    refused(&m, "blk", "PrivateTmp=yes");
    m.run("systemctl restart csid");
    refused(&m, "blk", "PrivateTmp=yes");
    assert_eq!(m.run("systemctl list-units --all --plain --no-legend 'csid-look-*'"), "");

    // One that would hide the plugin's mounts is found before the first of them, and named.
    let mut named = 0;
    for (setting, shown) in [
        ("PrivateTmp=yes", "PrivateTmp=yes"),
        ("ReadOnlyPaths=/etc", "ReadOnlyPaths="),
        ("ProtectSystem=full", "ProtectSystem=full"),
    ] {
        m.write(&format!("{own}/20-hide.conf"), &format!("[Service]\n{setting}\n"));
        m.run("systemctl daemon-reload; csictl plugin restart blk --deadline 1s || true");
        let answer = refused(&m, "blk", shown);
        assert!(
            answer.contains("systemctl cat") && answer.contains("plugin restart blk"),
            "what to do: {answer}"
        );
        assert!(!in_hosts(&m, "blk", "mnt"), "{setting}");
        named += 1;
    }
    // It is not started again and again: that would not change it.
    assert!(m.run("csictl plugin show blk --json").contains("\"unhealthy\""));
    m.run(&format!("rm {own}/20-hide.conf; systemctl daemon-reload; csictl plugin restart blk"));
    m.run(&format!("{mount} && csictl unmount demo data web"));

    // A controller is shut in; with a node service that is refused, without one it serves.
    define(&m, "p", &[TEST_PLUGIN, r#"profile = "controller""#]);
    let state = "/etc/systemd/system/csi-plugin-p-.service.d";
    m.run(&format!("mkdir -p {state}"));
    m.write(&format!("{state}/10-state.conf"), "[Service]\nReadWritePaths=/var/lib/p\n");
    // It has a user of its own.
    m.run("chmod -R a+rwX /var/lib/p");
    m.run("systemctl daemon-reload; csictl plugin restart p --deadline 1s || true");
    refused(&m, "p", "profile `controller`");
    plugin.set(|script| {
        script.control(&["CREATE_DELETE_VOLUME"]);
        script.serves = vec![Half::Controller];
    });
    m.run("chmod -R a+rwX /var/lib/p; csictl plugin restart p && csictl plugin wait p --service controller");
    assert!(!in_hosts(&m, "p", "mnt"));
    assert_eq!(property(&m, "p", "ProtectSystem"), "strict");
    assert_eq!(property(&m, "p", "CapabilityBoundingSet"), "");

    // By a call: kept over csid's restart, and the same again is the same.
    m.run("rm /etc/csid/plugins.d/p.toml && systemctl reload csid");
    plugin.set(|script| script.serves = vec![Half::Node]);
    let register = |network: &str| {
        format!(
            "csictl plugin register q --profile node-net --network {network} -- /usr/local/sbin/test-plugin /var/lib/p"
        )
    };
    let answer = m.run(&format!("{} 2>&1 && echo registered || true", register("netns:../x")));
    assert!(answer.contains("InvalidArgument") && answer.contains("network"), "{answer}");
    m.run(&register("none"));
    ready(&m, "q");
    assert_eq!(property(&m, "q", "Description"), "CSI plugin q (profile node-net, network none)");
    m.run("systemctl restart csid");
    ready(&m, "q");
    m.run(&register("none"));
    let answer = m.run(&format!("{} 2>&1 && echo registered || true", register("host")));
    assert!(answer.contains("AlreadyExists"), "{answer}");
    count("settings that hide mounts, named before the first", named);
}

#[test]
fn plugin_has_its_own_propagation_and_network() {
    let m = Machine::with_csid();
    let _plugin = install_test_plugin(&m);
    m.run("mkdir -p /srv/host /srv/plugin /var/lib/blk");
    let mounts = || m.run("csictl mount demo v web --plugin p --external-id v && csictl unmount demo v web");
    let pid = || property(&m, "p", "MainPID");
    let seen = |pid: &str, path: &str| {
        m.run(&format!("grep -q ' {path} ' /proc/{pid}/mountinfo && echo yes || echo no")) == "yes"
    };

    for (word, from_host, to_host) in
        [("bidirectional", true, true), ("host-to-task", true, false), ("private", true, false)]
    {
        define(&m, "p", &[TEST_PLUGIN, &format!("propagation = {word:?}")]);
        if to_host {
            ready(&m, "p");
            mounts();
        } else {
            let answer = refused(&m, "p", &format!("propagation is `{word}`"));
            assert!(answer.contains("bidirectional"), "what to do: {answer}");
        }
        let pid = pid();
        m.run("mount -t tmpfs host /srv/host");
        m.run(&format!("nsenter -t {pid} -m mount -t tmpfs plugin /srv/plugin"));
        assert_eq!((seen(&pid, "/srv/host"), seen("1", "/srv/plugin")), (from_host, to_host), "{word}");
        m.run(&format!("nsenter -t {pid} -m umount /srv/plugin; umount /srv/host"));
    }

    // A consumer's target: what is mounted in the volume, and what in the target.
    define(&m, "p", &[TEST_PLUGIN]);
    ready(&m, "p");
    for (word, from_source, to_source) in
        [("private", false, false), ("host-to-task", true, false), ("bidirectional", true, true)]
    {
        m.run("mkdir -p /srv/target");
        let source = m.run(&format!(
            "csictl mount demo v web --plugin p --external-id v --target /srv/target --propagation {word}"
        ));
        m.run(&format!("mkdir -p {source}/a {source}/b"));
        m.run(&format!("mount -t tmpfs a {source}/a && mount -t tmpfs b /srv/target/b"));
        let through = (seen("1", "/srv/target/a"), seen("1", &format!("{source}/b")));
        assert_eq!(through, (from_source, to_source), "{word}");
        m.run(&format!("umount {source}/a /srv/target/b && csictl unmount demo v web"));
    }

    define(&m, "p", &[TEST_PLUGIN, r#"network = "none""#]);
    ready(&m, "p");
    assert!(!in_hosts(&m, "p", "net") && in_hosts(&m, "p", "mnt"));
    assert_eq!(m.run(&format!("nsenter -t {} -n ls /sys/class/net | wc -l", pid())).trim(), "1", "lo alone");
    mounts();

    // One that somebody else makes; csid waits for it.
    define(&m, "p", &[TEST_PLUGIN, r#"network = "netns:storage""#]);
    refused(&m, "p", "no network namespace /run/netns/storage");
    m.run("ip netns add storage");
    ready(&m, "p");
    let in_namespace = |name: &str| {
        let own = m.run(&format!("stat -L -c %i /proc/{}/ns/net", pid()));
        own == m.run(&format!("stat -c %i /run/netns/{name}"))
    };
    assert!(in_namespace("storage") && in_hosts(&m, "p", "mnt"));
    mounts();

    // And one that commands make: it is there before the plugin, through the death of both, and goes with it.
    let made = [
        TEST_PLUGIN,
        r#"network = "netns:made""#,
        r#"network-prestart = ["/usr/sbin/ip", "netns", "add", "made"]"#,
        r#"network-poststop = ["/usr/sbin/ip", "netns", "delete", "made"]"#,
    ];
    define(&m, "p", &made);
    ready(&m, "p");
    assert!(in_namespace("made") && in_hosts(&m, "p", "mnt"));
    mounts();
    let unit = "csid-network-made.service";
    let since = m.run(&format!("systemctl show {unit} --property ActiveEnterTimestampMonotonic"));
    let before = pid();
    m.run(&format!("kill -9 {before} $(systemctl show csid --property MainPID --value)"));
    m.until(&format!("csictl wait p --deadline 1s && [ $(systemctl show csi-plugin-p-default --property MainPID --value) != {before} ]"));
    assert!(in_namespace("made"));
    assert_eq!(m.run(&format!("systemctl show {unit} --property ActiveEnterTimestampMonotonic")), since);
    m.run("csictl plugin restart p");
    assert!(in_namespace("made"), "made again");
    // Another plugin in it keeps it.
    define(&m, "blk", &[CSI_LOCAL, made[1], made[2], made[3]]);
    ready(&m, "blk");
    let other = property(&m, "blk", "MainPID");
    m.run("csictl plugin restart p");
    assert!(in_namespace("made") && property(&m, "blk", "MainPID") == other);
    // Also one that says no more how it is made.
    define(&m, "p", &[TEST_PLUGIN, made[1]]);
    ready(&m, "p");
    m.run("rm /etc/csid/plugins.d/blk.toml && systemctl reload csid");
    assert!(in_namespace("made"), "its plugin is in it yet");
    define(&m, "p", &made);
    ready(&m, "p");
    define(&m, "p", &[TEST_PLUGIN, made[1]]);
    ready(&m, "p");
    assert!(in_namespace("made"), "nothing would make it again");
    m.run("csictl plugin restart p");
    assert!(in_namespace("made"), "nor after this");
    m.run("rm /etc/csid/plugins.d/p.toml && systemctl reload csid");
    assert_eq!(m.run("ls /run/netns"), "storage", "what commands made is gone, what others made is not");
    m.run(&format!("! systemctl --quiet is-active {unit}"));
    // What others made is taken as it is, and stays.
    m.run("ip netns add made");
    define(&m, "p", &made);
    ready(&m, "p");
    assert!(in_namespace("made"));
    m.run("csictl plugin restart p && rm /etc/csid/plugins.d/p.toml && systemctl reload csid");
    assert_eq!(m.run("ls /run/netns | xargs"), "made storage");
    m.run("ip netns delete made");

    // Commands that fail, or make nothing, are reported.
    define(&m, "p", &[TEST_PLUGIN, made[1], r#"network-prestart = ["/usr/bin/false"]"#, made[3]]);
    refused(&m, "p", "network-prestart: csid-network-made.service: it exited with status 1");
    define(&m, "p", &[TEST_PLUGIN, made[1], r#"network-prestart = ["/usr/bin/true"]"#]);
    refused(&m, "p", "did not make /run/netns/made");
    m.write("/usr/local/sbin/open", "#!/bin/sh\n");
    m.run("chmod 777 /usr/local/sbin/open");
    m.write(
        "/etc/csid/plugins.d/p.toml",
        &format!(
            "supervision = \"managed\"\n{TEST_PLUGIN}\n{}\nnetwork-prestart = [\"/usr/local/sbin/open\"]\n",
            made[1]
        ),
    );
    let answer = m.run("csictl reload 2>&1 && echo reloaded || true");
    assert!(answer.contains("p.toml") && answer.contains("network-prestart[0]"), "{answer}");
}
