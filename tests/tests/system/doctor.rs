//! csictl doctor, and ID-mapped mounts in the hardened units.

use std::fs;
use std::process::{Child, Command};

use csid_client::{Client, OpenOptions, Target};
use csid_tests::world::count;
use serde_json::Value;

use crate::machine::Machine;

/// The exit code of doctor, and its findings as `SEVERITY SUBJECT: FOUND`.
fn doctor(m: &Machine) -> (i32, Vec<String>) {
    let output = m.try_run("csictl doctor --json");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report: Value = serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("{error}: {text}\n{}", String::from_utf8_lossy(&output.stderr)));
    let line = |finding: &Value| {
        let [severity, subject, found] =
            ["severity", "subject", "found"].map(|key| finding[key].as_str().unwrap());
        format!("{severity} {subject}: {found}")
    };
    let findings = report["findings"].as_array().unwrap().iter().map(line).collect();
    (output.status.code().expect("no signal"), findings)
}

/// Runs the commands of the finding about the subject. Each has to succeed.
fn follow(m: &Machine, subject: &str) {
    let text = m.try_run("csictl doctor --json").stdout;
    let report: Value = serde_json::from_slice(&text).expect("a report");
    let of_subject = |finding: &&Value| finding["subject"] == subject;
    let finding = report["findings"].as_array().unwrap().iter().find(of_subject).expect("a finding");
    let remedy = finding["do"].as_str().unwrap();
    m.run(remedy.split('`').nth(1).expect("a command"));
}

fn has(findings: &[String], words: &[&str]) {
    assert!(
        findings.iter().any(|line| words.iter().all(|word| line.contains(word))),
        "no finding has {words:?}: {findings:#?}"
    );
}

const SERVICE: &str = "[Service]\nExecStart=/bin/sh -c 'exec sleep infinity' /srv/pg/data\n";

#[test]
fn broken_machine_is_diagnosed_and_healthy_one_is_not() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    // The machine lacks network mounts, which the other tests have no need of.
    m.run("rm /etc/systemd/system/remote-fs.target && systemctl daemon-reload && systemctl enable remote-fs.target");
    m.run("csictl volume create prod pg --plugin local --access-mode single-node-writer --capacity 64M");
    m.run(
        "mkdir -p /srv/pg && echo 'prod/pg /srv/pg csi _netdev 0 0' >>/etc/fstab && systemctl daemon-reload",
    );
    m.run("systemctl start srv-pg.mount");
    m.write(
        "/etc/systemd/system/pg.service",
        &SERVICE.replacen("[Service]", "[Unit]\nRequiresMountsFor=/srv/pg\n[Service]", 1),
    );
    m.run("systemctl daemon-reload && systemctl start pg");
    assert_eq!(doctor(&m), (0, Vec::new()), "a healthy machine");
    let verbose = m.run("csictl doctor --verbose");
    assert!(verbose.contains("ok       csid.service: it has the host's mount namespace"), "{verbose}");
    let before = m.run("csictl events --json | wc -l; findmnt --noheadings | wc -l; systemctl list-units --all --no-legend | wc -l");
    m.run("csictl doctor");
    let after = m.run("csictl events --json | wc -l; findmnt --noheadings | wc -l; systemctl list-units --all --no-legend | wc -l");
    assert_eq!(before, after, "doctor changes nothing");

    let mut planted = 0;
    let mut finds = |code: i32, words: &[&[&str]]| {
        let (ended, findings) = doctor(&m);
        words.iter().for_each(|words| has(&findings, words));
        assert_eq!(ended, code, "{findings:#?}");
        planted += words.len();
    };
    // Drop-ins of csid's unit and of its helper's.
    m.run("mkdir -p /etc/systemd/system/csid.service.d /etc/systemd/system/csid-helper.service.d && systemctl daemon-reload");
    m.write("/etc/systemd/system/csid.service.d/own.conf", "[Service]\nPrivateTmp=yes\n");
    finds(0, &[&["warning csid.service", "changed since systemd read them"]]);
    m.run("systemctl daemon-reload && systemctl restart csid");
    finds(
        1,
        &[
            &["error csid.service", "PrivateTmp=yes"],
            &["error csid.service", "it runs in a mount namespace of its own"],
        ],
    );
    m.run("rm /etc/systemd/system/csid.service.d/own.conf");
    m.write(
        "/etc/systemd/system/csid-helper.service.d/own.conf",
        "[Service]\nProtectHome=yes\nCapabilityBoundingSet=\n",
    );
    m.run("systemctl daemon-reload && systemctl restart csid && csictl wait local");
    finds(
        1,
        &[
            &["error csid-helper.service", "ProtectHome=yes"],
            &["error csid-helper.service", "lacks CAP_SYS_ADMIN"],
        ],
    );
    m.run("rm /etc/systemd/system/csid-helper.service.d/own.conf && systemctl daemon-reload");
    // A unit of one's own in place of the package's.
    m.run("sed '/remote-fs-pre.target$/d; s/ remote-fs-pre.target//' /lib/systemd/system/csid.service >/etc/systemd/system/csid.service");
    m.run("systemctl daemon-reload");
    finds(
        1,
        &[
            &["error csid.service", "no Before=remote-fs-pre.target"],
            &["error csid.service", "no Wants=remote-fs-pre.target"],
        ],
    );
    m.run("rm /etc/systemd/system/csid.service && systemctl daemon-reload");
    m.run("systemctl disable csid.service csid.socket");
    finds(0, &[&["warning csid.service", "it is disabled"], &["warning csid.socket", "it is disabled"]]);
    m.run("systemctl enable csid.service");
    // The commands that doctor names are typed: systemd starts no socket whose service is active.
    m.run("systemctl start csid-helper.service && chmod 0666 /run/csid/helper.sock");
    finds(1, &[&["error /run/csid/helper.sock", "0666"]]);
    follow(&m, "/run/csid/helper.sock");
    m.run("rm /run/csid/helper.sock");
    finds(1, &[&["error /run/csid/helper.sock", "it is not there"]]);
    follow(&m, "/run/csid/helper.sock");
    m.run("rm /run/csid/csid.sock");
    finds(1, &[&["error /run/csid/csid.sock", "it is not there"]]);
    follow(&m, "/run/csid/csid.sock");
    m.run("csictl wait local");
    m.run("systemctl start csid-helper.service && systemctl stop csid-helper.socket");
    finds(2, &[&["error csid-helper.socket", "it is inactive"], &["error csid.service", "it does not run"]]);
    follow(&m, "csid-helper.socket");
    m.run(
        "csictl wait local && mkdir -p /etc/systemd/system/csid-helper.socket.d && systemctl daemon-reload",
    );
    m.write("/etc/systemd/system/csid-helper.socket.d/own.conf", "[Socket]\nBacklog=64\n");
    finds(0, &[&["warning csid-helper.socket", "changed since systemd read them"]]);
    follow(&m, "csid-helper.socket");
    m.run("csictl wait local");
    assert_eq!(doctor(&m), (0, Vec::new()), "the sockets are mended");
    // What is ordered by hand, or uses an automount, is in order. systemctl quotes the escaped name.
    let by_hand = SERVICE.replace("/srv/pg", "/srv/my-data");
    let unit = r"srv-my\x2ddata.mount";
    m.write(
        "/etc/systemd/system/by-hand.service",
        &format!("[Unit]\nRequires={unit}\nAfter={unit}\n{by_hand}"),
    );
    m.write("/etc/systemd/system/auto.service", &SERVICE.replace("/srv/pg", "/srv/auto"));
    m.run("echo 'prod/my /srv/my-data csi _netdev,nofail 0 0' >>/etc/fstab");
    m.run("echo 'prod/auto /srv/auto csi noauto,x-systemd.automount,_netdev 0 0' >>/etc/fstab");
    m.run("systemctl add-wants multi-user.target by-hand.service auto.service && systemctl start remote-fs.target");
    let (_, findings) = doctor(&m);
    has(&findings, &["warning fstab", "/srv/my-data is not mounted"]);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    m.run("systemctl stop srv-auto.automount; sed -i '/my-data/d; /auto/d' /etc/fstab");
    m.run("find /etc/systemd/system -name by-hand.service -delete -o -name auto.service -delete; systemctl daemon-reload");
    // Services, lines and sockets.
    m.write("/etc/systemd/system/pg.service", SERVICE);
    m.run("echo 'prod/gone /srv/gone csi defaults 0 0' >>/etc/fstab && systemctl daemon-reload && chmod 0666 /run/csid/csid.sock");
    finds(
        1,
        &[
            &["warning pg.service", "may start before the volume"],
            &["error fstab", "/srv/gone needs _netdev"],
            &["warning fstab", "/srv/gone is not mounted"],
            &["error /run/csid/csid.sock", "0666"],
        ],
    );
    m.run("sed -i '/gone/d' /etc/fstab && chmod 0660 /run/csid/csid.sock && rm /etc/systemd/system/pg.service && systemctl daemon-reload");
    m.run("systemctl stop pg || true");
    // A plugin that fails, a mount that is gone, an orphan.
    m.run("systemctl stop csi-plugin-local-default && systemctl mask --runtime csi-plugin-local-default");
    let source = m.run("csictl mounts --json | sed -n 's/.*\"source\": \"\\(.*\\)\",*/\\1/p' | head -n 1");
    m.run(&format!("umount -l {source} && mkdir -p /var/lib/csid/plugins/local/publish/stray && mount -t tmpfs stray /var/lib/csid/plugins/local/publish/stray"));
    m.until("csictl plugin show local | grep -Eq 'failed|unhealthy'");
    finds(
        1,
        &[
            &["error plugin local", "it is failed"],
            &["error mount prod/pg for srv-pg.mount", "not healthy"],
            &["orphan", "stray"],
        ],
    );
    m.run("umount /var/lib/csid/plugins/local/publish/stray && rmdir /var/lib/csid/plugins/local/publish/stray && systemctl unmask --runtime csi-plugin-local-default && csictl plugin restart local");
    m.run("umount /srv/pg; systemctl stop srv-pg.mount; systemctl start srv-pg.mount");
    assert_eq!(doctor(&m), (0, Vec::new()), "all is mended");

    // Without csid, and with no start of it by doctor's connection.
    m.run("systemctl stop csid");
    finds(2, &[&["error csid.service", "it does not run"], &["note mounts", "mounts are below"]]);
    assert_eq!(m.run("systemctl is-active csid || true"), "inactive");
    m.run("systemctl mask --runtime csid.service");
    finds(2, &[&["error csid.service", "the unit is masked"]]);
    m.run("systemctl unmask --runtime csid.service && systemctl start csid");
    m.write("/etc/csid/plugins.d/local.toml.bad", "");
    m.run("cp /etc/csid/csid.toml /root/csid.toml && echo 'sokket = 1' >>/etc/csid/csid.toml");
    finds(1, &[&["error configuration", "sokket"]]);
    m.run("cp /root/csid.toml /etc/csid/csid.toml");
    count("defects found", planted);
    m.run("systemctl stop srv-pg.mount");
}

/// A process in a user namespace of its own, which ends when it is dropped.
struct Contained(Child);

impl Contained {
    fn start() -> Self {
        let contained =
            Contained(Command::new("unshare").args(["--user", "sleep", "600"]).spawn().expect("unshare"));
        let own = fs::read_link("/proc/self/ns/user").unwrap();
        while fs::read_link(contained.path("ns/user")).unwrap() == own {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        for map in ["uid_map", "gid_map"] {
            fs::write(contained.path(map), "0 100000 1000").unwrap();
        }
        contained
    }

    fn path(&self, name: &str) -> String {
        format!("/proc/{}/{name}", self.0.id())
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The variable that has the test below run in the machine: csid accepts no peer of another PID namespace.
const INSIDE: &str = "CSID_TEST_INSIDE";

/// Opens the mount with mapped owners, in the machine. `path`: where the volume is.
fn open_mapped(path: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let contained = Contained::start();
    let tree = runtime.block_on(async {
        let client = Client::connect(&Target::Auto).await.expect("csid");
        let userns = fs::File::open(contained.path("ns/user")).unwrap();
        let userns = std::os::fd::OwnedFd::from(userns);
        let options = OpenOptions { userns: Some(userns.into()), ..OpenOptions::default() };
        client.open_mount("demo", "data", "web", options).await.expect("a tree")
    });
    let file = rustix::fs::statat(&tree, c"file", rustix::fs::AtFlags::empty()).unwrap();
    assert_eq!((file.st_uid, file.st_gid), (100_000, 100_000));
    let own = rustix::fs::stat(format!("{path}/file")).unwrap();
    assert_eq!((own.st_uid, own.st_ino), (0, file.st_ino));
}

/// RestrictNamespaces= and the filters of system calls of both units let the helper map owners.
#[test]
fn hardened_csid_maps_owners() {
    if let Ok(path) = std::env::var(INSIDE) {
        return open_mapped(&path);
    }
    let m = Machine::with_csid();
    m.run("csictl wait local");
    let id = m.run("csi-local create data --size 64M");
    let path = m.run(&format!("csictl mount demo data web --plugin local --external-id {id}"));
    m.run(&format!("echo data >{path}/file"));
    fs::copy(std::env::current_exe().unwrap(), m.path("/root/inside")).expect("this program is copied");
    m.run(&format!("{INSIDE}={path} /root/inside --exact doctor::hardened_csid_maps_owners --nocapture"));
    m.run(&format!("csictl unmount demo data web && csi-local delete {id}"));
    assert_eq!(m.loops(), "", "no loop device");
}
