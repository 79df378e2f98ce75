//! Services that wait for the volumes that csid makes again after a reboot: csi-volumes.target.

use crate::machine::Machine;

const UNIT: &str = "[Unit]
Requires=csi-volumes.target
After=csi-volumes.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/cp /srv/data/file /root/read
ExecStop=/bin/cp /srv/data/file /root/read-at-the-end
[Install]
WantedBy=multi-user.target
";

#[test]
fn service_starts_after_its_volume_is_restored() {
    let m = Machine::with_csid();
    m.run("csictl wait local && csictl wait-volumes");
    let capacity = "--access-mode single-node-writer --capacity 64MiB";
    m.run(&format!("csictl volume create demo data --plugin local {capacity} && mkdir /srv/data"));
    m.run(
        "csictl mount demo data job --target /srv/data --restore auto && echo here >/srv/data/file && sync",
    );
    m.write("/etc/systemd/system/job.service", UNIT);
    m.run("systemctl daemon-reload && systemctl enable --quiet job.service");

    m.kill();
    m.until("systemctl is-active job.service");
    assert_eq!(m.run("cat /root/read && rm /root/read"), "here", "after a power cut");
    m.run("csictl wait-volumes && csictl wait-volumes demo data");
    m.reboot();
    assert_eq!(m.run("cat /root/read-at-the-end"), "here", "the service stops before its volume goes");
    m.until("systemctl is-active job.service");
    assert_eq!(m.run("cat /root/read && rm /root/read"), "here", "after a reboot");
    m.has_no_ordering_cycle();

    // The plugin does not come back. A boot would wait for the service as long as the service waits.
    m.run("chmod -x /usr/sbin/csi-local && systemctl disable --quiet job.service");
    m.kill();
    m.until("csictl status");
    let waited = m.try_run("csictl wait-volumes --deadline 2s");
    let said = String::from_utf8_lossy(&waited.stderr).into_owned();
    assert_eq!(waited.status.code(), Some(1), "{said}");
    assert!(said.contains("demo/data for job: waiting"), "{said}");
    let json = m.try_run("csictl wait-volumes --deadline 1s --json demo data");
    assert!(String::from_utf8_lossy(&json.stdout).contains(r#""volume": "data""#), "{json:?}");
    let unknown = m.try_run("csictl wait-volumes --deadline 1s demo other");
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("demo/other has no mount"), "{unknown:?}");
    assert_eq!(m.try_run("csictl wait-volumes demo").status.code(), Some(1), "half a name");
    m.run("systemctl start --no-block job.service");
    m.until("systemctl is-active csi-volumes.service | grep activating");
    assert_eq!(m.run("systemctl is-active job.service || true"), "inactive", "it waits for its volume");
    m.run("chmod +x /usr/sbin/csi-local && csictl reload");
    m.until("systemctl is-active job.service");
    assert_eq!(m.run("cat /root/read"), "here");
}
