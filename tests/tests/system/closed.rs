//! What a volume's content may do in a service with `PrivateTmp=` that was there before the mount.

use csid_tests::elsewhere::{PROBE, Probe};
use csid_tests::world::count;

use crate::machine::Machine;

/// At a target with `suid` and `dev` nothing is refused: the probes work.
#[test]
fn older_service_gets_no_setuid_no_device() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    m.write("/srv/probe", PROBE);
    m.run("mkfifo --mode 666 /srv/asked /srv/said && chmod 644 /srv/probe");
    m.run(
        "systemd-run --quiet --unit early --property PrivateTmp=yes --property User=nobody \
         bash -c 'while read -r path </srv/asked; do perl /srv/probe $path >/srv/said 2>&1; done'",
    );
    let namespace = |pid: &str| m.run(&format!("readlink /proc/{pid}/ns/mnt"));
    let service = m.run("systemctl show early --property MainPID --value");
    assert_ne!(namespace(&service), namespace("1"), "it has a mount namespace of its own");
    let probe =
        |path: &str| Probe::of(&m.run(&format!("echo {path} >/srv/asked && timeout 60 cat /srv/said")));

    let id = m.run("csi-local create data --size 64M");
    let mount = |consumer: &str, more: &str| {
        m.run(&format!(
            "csictl mount demo data {consumer} --plugin local --external-id {id} \
             --access-mode single-node-multi-writer {more}"
        ))
    };
    let setup = mount("setup", "");
    m.run(&format!(
        "cp /usr/bin/id {setup}/id && chmod 4755 {setup}/id && chmod 1777 {setup} &&
         disk=$(stat --format '0x%t 0x%T' $(findmnt --noheadings --output SOURCE --first-only {setup})) &&
         mknod --mode 666 {setup}/character c 1 5 && mknod --mode 666 {setup}/block b $disk"
    ));
    // "setup" stays mounted. Otherwise the volume would be attached again, perhaps to another loop device than the node's.
    m.run("mkdir /srv/target /srv/reads /srv/loose");
    let mut refused = 0;
    for (consumer, more, target, due) in [
        ("published", "", None, Probe::refused().writes()),
        ("target", "--target /srv/target", Some("/srv/target"), Probe::refused().writes()),
        ("reads", "--read-only", None, Probe::refused()),
        ("reads-target", "--read-only --target /srv/reads", Some("/srv/reads"), Probe::refused()),
        ("loose", "--suid --dev --target /srv/loose", Some("/srv/loose"), Probe::permitted()),
    ] {
        let path = mount(consumer, more);
        assert_eq!(probe(target.unwrap_or(&path)), due, "{consumer}");
        refused += due.refusals();
    }
    assert_eq!(m.run("systemctl show early --property MainPID --value"), service, "the same service");
    count("setuid programs, device nodes and writes refused to an older service", refused);
    for consumer in ["setup", "published", "target", "reads", "reads-target", "loose"] {
        m.run(&format!("csictl unmount demo data {consumer}"));
    }
    m.run(&format!("systemctl stop early && csi-local delete {id}"));
    assert_eq!(m.loops(), "", "no loop device");
}
