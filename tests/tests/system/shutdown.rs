//! The order in which a machine goes down.

use csid_tests::script::{Act, Lie, Rule};

use crate::machine::Machine;
use crate::settings::{define, install_test_plugin, ready};

/// csid, then the volumes, then their plugins: each is there while what needs it ends.
#[test]
fn shutdown_unmounts_while_the_plugin_runs() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    let id = m.run("csi-local create data --size 64M");
    m.run(&format!("csictl mount demo data web --plugin local --external-id {id}"));
    m.reboot();
    let journal = m.run("journalctl --no-pager --boot=-1 --output=cat");
    let position = |text: &str| -> Vec<usize> {
        journal.lines().enumerate().filter(|(_, line)| line.starts_with(text)).map(|(at, _)| at).collect()
    };
    let csid = position("Stopped csid.service");
    let volumes = position("Unmounted var-lib-csid-");
    let plugin = position("Stopped csi-plugin-local-default.service");
    assert_eq!(
        (csid.len(), volumes.len(), plugin.len()),
        (1, 4, 1),
        "staged, published, cloned, and the tmpfs of their directories: {journal}"
    );
    assert!(csid[0] < volumes[0] && volumes[3] < plugin[0], "{csid:?} {volumes:?} {plugin:?}");
    assert!(!journal.contains("ordering cycle"), "{journal}");
}

/// A FUSE driver whose server writes at unmount, a consumer that writes when it is stopped, and what the driver's data takes.
#[test]
fn at_shutdown_targets_go_first_and_the_network_last() {
    let m = Machine::with_csid();
    let mut plugin = install_test_plugin(&m);
    let server = m.path("/usr/local/sbin/hung-server");
    std::fs::copy(env!("CARGO_BIN_EXE_hung-server"), server).expect("the server's program");
    plugin.set(|script| {
        script.hung = "/run/served.sock".into();
        script.rules = vec![Rule::always("NodeStageVolume", Act::Lie(Lie::Hung))];
    });
    // Its server is the unit's main process: where the plugin has stopped, nothing can be written any more.
    let plugin = "/usr/local/sbin/test-plugin /var/lib/p &";
    let serve = "exec /usr/local/sbin/hung-server /run/served.sock /var/lib/served";
    let argv = format!(r#"argv = ["/bin/sh", "-c", "{plugin} {serve}"]"#);
    define(&m, "p", &[&argv]);
    ready(&m, "p");
    for (unit, more) in [("net", "Before=network.target\nWants=network.target"), ("iscsid", "")] {
        let service = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n";
        let install = "[Install]\nWantedBy=multi-user.target\n";
        m.write(
            &format!("/etc/systemd/system/{unit}.service"),
            &format!("[Unit]\n{more}\n{service}{install}"),
        );
        m.run(&format!("systemctl enable --now {unit}"));
    }
    m.run("mkdir /srv/web && csictl mount demo v web --plugin p --external-id v --restore auto --target /srv/web");
    m.write(
        "/etc/systemd/system/web.service",
        "[Unit]\nAfter=csid.service\n[Service]\nExecStart=/bin/sleep infinity\nExecStop=/bin/sh -c 'echo last >/srv/web/file'\n",
    );
    m.run("systemctl start web");
    m.reboot();

    let journal = m.run("journalctl --no-pager --boot=-1 --output=cat");
    let at = |text: &str| -> Vec<usize> {
        journal.lines().enumerate().filter(|(_, line)| line.starts_with(text)).map(|(at, _)| at).collect()
    };
    let order = [
        ("Stopped web.service", 1),
        ("the system goes down, the targets are unmounted", 1),
        ("Stopped csid.service", 1),
        ("Unmounted var-lib-csid-", 4),
        ("Stopped csi-plugin-p-default.service", 1),
    ];
    let lines = order.map(|(text, times)| {
        let lines = at(text);
        assert_eq!(lines.len(), times, "`{text}`: {journal}");
        lines
    });
    assert!(
        lines.iter().is_sorted_by(|one, next| one.last() < next.first()),
        "{lines:?} of {order:?}: {journal}"
    );
    // PID 1 may say later that it has unmounted what the server has already written.
    let written = at("v is unmounted, its files are written: Ok");
    assert!(lines[1] < written && written < lines[4], "{written:?}: {journal}");
    for unit in ["net", "iscsid"] {
        let stopped = at(&format!("Stopped {unit}.service"));
        assert!(
            lines.last() < Some(&stopped),
            "{unit} stops at {stopped:?}, the plugin {lines:?}: {journal}"
        );
    }
    assert_eq!(at("Unmounting srv-web.mount").len(), 0, "csid unmounted it: {journal}");
    assert!(!journal.contains("ordering cycle"), "{journal}");
    assert_eq!(m.run("cat /var/lib/served/v/file"), "last");
    // The row was kept.
    m.until("mountpoint --quiet /srv/web && csictl mounts | grep -q mounted");
    // A stop of csid alone unmounts nothing.
    m.run("systemctl stop csid && mountpoint --quiet /srv/web && systemctl start csid");
    assert!(!m.run("journalctl --no-pager --boot --output=cat").contains("ordering cycle"));
}
