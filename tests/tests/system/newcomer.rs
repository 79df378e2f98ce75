//! PostgreSQL on a volume, as docs/consumers.md has its reader type it on a machine without csid.

use std::path::Path;

use crate::engines::{mounts, set_podman_up};
use crate::machine::Machine;
use crate::typed::type_section;

/// Returns a machine without csid. Its packages are in /root, and Debian's are at hand.
fn machine() -> Machine {
    let m = Machine::boot();
    m.with_archive();
    m.copy_package("csid");
    m.copy_package("csid-volume-plugin");
    // A machine of the tests boots multi-user.target, and does not mount network file systems. A server's default is that target.
    m.run("rm /etc/systemd/system/remote-fs.target && systemctl set-default --quiet multi-user.target");
    m.run("systemctl daemon-reload && systemctl enable --quiet remote-fs.target");
    m
}

/// Adds a row over a reboot and one over a power cut. `psql`: the command that runs SQL.
fn rows_outlive_both(m: &Machine, psql: &str) {
    let select = format!("{psql} --tuples-only --no-align --command 'select * from visits'");
    let insert = |name: &str| m.run(&format!("{psql} --command \"insert into visits values ('{name}')\""));
    assert_eq!(m.run(&select), "first");
    insert("second");
    m.reboot();
    m.until(&select);
    assert_eq!(m.run(&select), "first\nsecond");
    insert("third");
    m.kill();
    m.until(&select);
    assert_eq!(m.run(&select), "first\nsecond\nthird");
    m.has_no_ordering_cycle();
    let journal = m.run("journalctl --no-pager --merge --output=cat");
    assert!(!journal.contains("Failed unmounting"), "{journal}");
}

#[test]
fn database_under_systemd_is_made_as_documented() {
    let m = machine();
    type_section(&m, "## A database under systemd");
    rows_outlive_both(&m, "runuser -u postgres -- psql --cluster 15/prod");
    let shown = m.run("csictl mounts --target /srv/pg");
    assert!(shown.contains("srv-pg.mount") && shown.contains("mounted"), "{shown}");
    // Without its volume the database does not start: it would make no new cluster, but write to the wrong disk.
    m.run("systemctl stop postgresql@15-prod srv-pg.mount && chmod -x /usr/sbin/csi-local && systemctl stop csi-plugin-local-default");
    m.run("sed -i s/_netdev/_netdev,csi.deadline=1s/ /etc/fstab && systemctl daemon-reload");
    m.run("! systemctl start postgresql@15-prod");
    let log = m.run("journalctl --no-pager --boot --output=cat -u srv-pg.mount");
    assert!(log.contains("mount.csi: PluginUnavailable"), "csid's reason: {log}");
    m.run("chmod +x /usr/sbin/csi-local && csictl reload && csictl wait local && systemctl start postgresql@15-prod");
    m.run("mountpoint /srv/pg");
}

#[test]
fn database_in_podman_is_made_as_documented() {
    let m = machine();
    set_podman_up(&m);
    m.run("apt-get install postgresql");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("postgres-image");
    std::fs::copy(script, m.path("/root/postgres-image")).expect("the script is copied");
    m.run(
        "/root/postgres-image | podman import --quiet --change 'ENTRYPOINT [\"docker-entrypoint.sh\"]' \
         --change 'CMD [\"postgres\"]' --change 'STOPSIGNAL SIGINT' --change 'VOLUME /var/lib/postgresql/data' - docker.io/library/postgres:15",
    );
    type_section(&m, "### A database in Podman");
    rows_outlive_both(&m, "podman exec pg psql --username postgres");
    assert_eq!(mounts(&m), "podman mounted");
    type_section(&m, "### podman kube play");
    assert_eq!(m.run("podman volume inspect pg --format '{{.Driver}}'"), "csid");
    m.run("podman kube down /root/pg.yaml || podman play kube --down /root/pg.yaml");
    assert!(m.run("csictl volume list").contains("pg"), "csid keeps the volume");
}
