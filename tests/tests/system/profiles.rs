//! What a profile leaves a plugin, as the kernel has it: the helpers of FUSE mounts live on.

use csid_tests::backend::Server;
use csid_tests::script::{Act, Lie, Rule};
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
