//! csictl doctor, with a host in the mount namespace of the world: csid's usual paths, fstab, and a systemctl that answers what a test
//! writes down, or nothing at all.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csid_client::{Client, MountOptions, Restore};
use csid_tests::ask::*;
use csid_tests::hung::Op;
use csid_tests::raw::GROUP;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, child, count, eventually, program, world};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::mount::{MountFlags, UnmountFlags, mount as mount_at, mount_bind, unmount as unmount_fs};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::process::Command;

/// Prints the file of the units that are asked for, with the properties that are asked for. It hangs while there is a file `hang`. For `cat`
/// it prints the file of the unit's name.
const SYSTEMCTL: &str = r#"#!/bin/sh
cd "$(dirname "$0")/../units" || exit 1
[ -e hang ] && exec sleep 600
[ -e broken ] && { cat broken >&2; exit 1; }
for last; do :; done
[ "$1" = cat ] && exec cat "$last"
case $last in
*.mount) cat mounts ;;
*/live) cat live ;;
'*.service') cat services ;;
*) cat csid ;;
esac
"#;

const CSID: &str = "Id=csid.service
LoadState=loaded
ActiveState=active
UnitFileState=enabled
NeedDaemonReload=no
PrivateMounts=no
PrivateTmp=no
ProtectSystem=no
ProtectProc=default
CapabilityBoundingSet=cap_dac_override cap_sys_admin
Before=remote-fs-pre.target multi-user.target
Wants=csi-plugins.target remote-fs-pre.target
NRestarts=0

Id=csid.socket
LoadState=loaded
ActiveState=active
UnitFileState=enabled
NeedDaemonReload=no

Id=csid-helper.service
LoadState=loaded
ActiveState=active
PrivateMounts=no
CapabilityBoundingSet=cap_dac_override cap_sys_admin

Id=csid-helper.socket
LoadState=loaded
ActiveState=active
UnitFileState=static

Id=csi-plugins.target
LoadState=loaded
ActiveState=active

Id=remote-fs-pre.target
LoadState=loaded
ActiveState=active

Id=csid-volume-plugin.socket
LoadState=not-found
ActiveState=inactive
";

struct Machine {
    root: PathBuf,
    socket: PathBuf,
}

/// How doctor ended: its code, and its findings.
struct Doctor {
    code: i32,
    report: Value,
    took: Duration,
}

impl Doctor {
    /// Returns the findings as `SEVERITY SUBJECT: FOUND | DO`.
    fn findings(&self) -> Vec<String> {
        let text = |finding: &Value, key: &str| finding[key].as_str().expect("a text").to_owned();
        let line = |finding: &Value| {
            let [severity, subject, found, remedy] =
                ["severity", "subject", "found", "do"].map(|key| text(finding, key));
            format!("{severity} {subject}: {found} | {remedy}")
        };
        self.report["findings"].as_array().expect("findings").iter().map(line).collect()
    }

    /// Fails if no finding has all these words.
    fn has(&self, words: &[&str]) {
        let findings = self.findings();
        assert!(
            findings.iter().any(|line| words.iter().all(|word| line.contains(word))),
            "no finding has {words:?}: {findings:#?}"
        );
    }
}

impl Machine {
    fn new(w: &World) -> Self {
        let overlay = |at: &str| {
            let name = at.replace('/', "-");
            let [upper, work] = ["upper", "work"].map(|of| w.path(&format!("{of}{name}")));
            fs::create_dir(&upper).unwrap();
            fs::create_dir(&work).unwrap();
            let layers = format!("lowerdir={at},upperdir={},workdir={}", upper.display(), work.display());
            let layers = std::ffi::CString::new(layers).unwrap();
            mount_at("overlay", at, "overlay", MountFlags::empty(), layers.as_c_str()).expect("overlay");
        };
        overlay("/etc");
        overlay("/var/lib");
        for name in ["/etc/csid", "/var/lib/csid"] {
            let _ = fs::remove_dir_all(name);
        }
        // A bind would show each volume a second time, as an administrator's mount.
        symlink(w.path("etc"), "/etc/csid").unwrap();
        symlink(w.path("state"), "/var/lib/csid").unwrap();
        mount_at("tmpfs", "/run", "tmpfs", MountFlags::empty(), c"mode=0755").unwrap();
        fs::create_dir("/run/csid").unwrap();
        mount_bind(w.path("run"), "/run/csid").unwrap();
        fs::write("/etc/fstab", "").unwrap();
        let groups = fs::read_to_string("/etc/group").unwrap();
        let groups: String = groups
            .lines()
            .filter(|line| !line.starts_with("csid:"))
            .map(|line| format!("{line}\n"))
            .collect();
        fs::write("/etc/group", format!("{groups}csid:x:{GROUP}:\n")).unwrap();
        let root = w.path("machine");
        for directory in ["bin", "units"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        let systemctl = root.join("bin/systemctl");
        fs::write(&systemctl, SYSTEMCTL).unwrap();
        fs::set_permissions(&systemctl, Permissions::from_mode(0o755)).unwrap();
        symlink(program("csid-under-test"), root.join("bin/csid")).unwrap();
        let machine = Machine { root, socket: w.socket() };
        machine.units("csid", CSID);
        machine.units("mounts", "");
        // The drop-in of the package orders the tmpfs of each plugin.
        machine.units("live", "Id=live.mount\nActiveState=active\nBefore=csid.service\n");
        machine.units("services", "");
        machine
    }

    fn units(&self, file: &str, text: &str) {
        fs::write(self.root.join("units").join(file), text).unwrap();
    }

    /// csid's sockets as systemd makes them.
    fn give_rights(&self) {
        chown("/run/csid/csid.sock", Some(0), Some(GROUP)).unwrap();
        for (name, mode) in [("csid.sock", 0o660), ("helper.sock", 0o600)] {
            fs::set_permissions(Path::new("/run/csid").join(name), Permissions::from_mode(mode)).unwrap();
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::from(child(&program("csictl")));
        let path = format!("{}:/usr/bin:/bin", self.root.join("bin").display());
        command.args(["--csid-socket"]).arg(&self.socket).args(words).env("PATH", path).current_dir("/");
        command.env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/run/no-bus");
        command
    }

    async fn doctor(&self) -> Doctor {
        let begun = Instant::now();
        let output = self.command(&["doctor", "--json"]).output().await.expect("it runs");
        let report = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        Doctor { code: output.status.code().expect("no signal"), report, took: begun.elapsed() }
    }
}

async fn machine(w: &mut World) -> (Client, Machine) {
    let client = running(w).await;
    let machine = Machine::new(w);
    machine.give_rights();
    (client, machine)
}

#[test]
fn healthy_machine_has_no_findings() {
    world(async |w| {
        let (client, m) = machine(w).await;
        mounted(&client, "job", inline("v")).await;
        let doctor = m.doctor().await;
        assert_eq!((doctor.code, doctor.findings()), (0, Vec::<String>::new()));
        let text = m.command(&["doctor"]).output().await.unwrap();
        assert!(String::from_utf8(text.stdout).unwrap().starts_with("0 errors, 0 warnings, 0 notes, "));
        let verbose = m.command(&["doctor", "--verbose"]).output().await.unwrap();
        let verbose = String::from_utf8(verbose.stdout).unwrap();
        for subject in ["units", "/run/csid", "configuration", "fstab", "csid", "plugin p", "/var/lib/csid"] {
            assert!(verbose.contains(&format!("ok       {subject}: ")), "{subject}: {verbose}");
        }
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// Each defect of a unit, of csid's files or of fstab is planted alone.
#[test]
fn each_defect_of_the_machine_is_found() {
    world(async |w| {
        let (_client, m) = machine(w).await;
        let unit = |from: &str, to: &str| {
            assert!(CSID.contains(from), "{from}");
            CSID.replacen(from, to, 1)
        };
        let line = |name: &str| format!("{name}\nDropInPaths=/etc/systemd/system/csid.service.d/own.conf");
        let units = [
            (
                unit("PrivateTmp=no", &line("PrivateTmp=yes")),
                vec!["error csid.service", "PrivateTmp=yes", "own.conf"],
            ),
            (unit("PrivateMounts=no", "PrivateMounts=yes"), vec!["error csid.service", "PrivateMounts=yes"]),
            (
                unit("ProtectSystem=no", "ProtectSystem=strict"),
                vec!["error csid.service", "ProtectSystem=strict"],
            ),
            (unit("NRestarts=0", "ReadOnlyPaths=/usr"), vec!["error csid.service", "ReadOnlyPaths=/usr"]),
            (unit("NRestarts=0", "User=csid"), vec!["error csid.service", "User=csid"]),
            (unit(" cap_sys_admin", ""), vec!["error csid.service", "lacks CAP_SYS_ADMIN"]),
            (
                unit("NeedDaemonReload=no", "NeedDaemonReload=yes"),
                vec!["warning csid.service", "`systemctl daemon-reload"],
            ),
            (
                unit("UnitFileState=enabled", "UnitFileState=disabled"),
                vec!["warning csid.service", "`systemctl enable csid`"],
            ),
            (
                unit("Before=remote-fs-pre.target ", "Before="),
                vec!["error csid.service", "Before=remote-fs-pre.target"],
            ),
            (
                unit(" remote-fs-pre.target\nNRestarts", "\nNRestarts"),
                vec!["error csid.service", "Wants=remote-fs-pre.target"],
            ),
            (
                unit(
                    "Id=csid.socket\nLoadState=loaded\nActiveState=active",
                    "Id=csid.socket\nLoadState=loaded\nActiveState=failed",
                ),
                vec![
                    "error csid.socket",
                    "it is failed",
                    "`systemctl enable csid.socket`, then `systemctl restart csid.service`",
                ],
            ),
            (
                unit(
                    "Id=csid-helper.socket\nLoadState=loaded\nActiveState=active",
                    "Id=csid-helper.socket\nLoadState=loaded\nActiveState=failed",
                ),
                vec![
                    "error csid-helper.socket",
                    "csid can mount nothing",
                    "`systemctl stop csid-helper.service; systemctl reset-failed csid-helper.socket",
                    "systemctl start csid-helper.socket csid.service`",
                ],
            ),
            (
                unit(
                    "Id=csi-plugins.target\nLoadState=loaded\nActiveState=active",
                    "Id=csi-plugins.target\nLoadState=loaded\nActiveState=inactive",
                ),
                vec!["warning csi-plugins.target", "power-off"],
            ),
            (
                unit("LoadState=not-found\nActiveState=inactive", "LoadState=loaded\nActiveState=inactive"),
                vec!["note csid-volume-plugin.socket", "Docker and Podman"],
            ),
        ];
        let mut planted = units.len();
        for (text, words) in units {
            m.units("csid", &text);
            let doctor = m.doctor().await;
            doctor.has(&words);
            assert_eq!(doctor.findings().len(), 1, "{:#?}", doctor.findings());
            assert_eq!(doctor.code, i32::from(words[0].starts_with("error")), "{words:?}");
        }
        m.units("csid", CSID);

        let mode = |name: &str, mode| {
            fs::set_permissions(Path::new("/run/csid").join(name), Permissions::from_mode(mode)).unwrap()
        };
        mode("csid.sock", 0o666);
        m.doctor().await.has(&[
            "error /run/csid/csid.sock",
            "0666",
            "`chown root:csid /run/csid/csid.sock && chmod 0660 /run/csid/csid.sock`",
        ]);
        mode("csid.sock", 0o600);
        m.doctor().await.has(&["warning /run/csid/csid.sock", "0600"]);
        mode("csid.sock", 0o660);
        chown("/run/csid/csid.sock", Some(1), None).unwrap();
        m.doctor().await.has(&["error /run/csid/csid.sock", "uid 1"]);
        chown("/run/csid/csid.sock", Some(0), Some(0)).unwrap();
        m.doctor().await.has(&["warning /run/csid/csid.sock", "its group is 0"]);
        m.give_rights();
        mode("helper.sock", 0o620);
        // systemd starts no socket whose service is active.
        let command =
            "`chown root:root /run/csid/helper.sock && chmod 0600 /run/csid/helper.sock`; mounts stay";
        m.doctor().await.has(&["error /run/csid/helper.sock", "0620", &format!("| {command}")]);
        m.give_rights();
        fs::rename("/run/csid/helper.sock", "/run/csid/gone").unwrap();
        m.doctor().await.has(&[
            "error /run/csid/helper.sock",
            "it is not there",
            "| `systemctl stop csid-helper.service; systemctl restart csid-helper.socket",
        ]);
        fs::rename("/run/csid/gone", "/run/csid/helper.sock").unwrap();

        fs::write("/etc/fstab", "prod/pg /srv/pg csi defaults 0 0\n").unwrap();
        let doctor = m.doctor().await;
        doctor.has(&["error fstab", "/srv/pg needs _netdev"]);
        doctor.has(&["warning fstab", "systemd does not know the line of /srv/pg", "daemon-reload"]);
        doctor.has(&["warning fstab", "/srv/pg is not mounted", "srv-pg.mount"]);
        fs::write("/etc/fstab", "").unwrap();

        fs::write("/etc/csid/csid.toml", "target-roots = 7\n").unwrap();
        m.doctor().await.has(&["error configuration", "target-roots", "`csictl check-config`"]);
        w.configure("");
        fs::write("/etc/csid/plugins.d/q.toml", "supervision = \"external\"\nsocket = \"/run/q.sock\"\n")
            .unwrap();
        m.doctor().await.has(&["error plugin q", "plugins.d/q.toml", "`csictl reload`"]);
        fs::remove_file("/etc/csid/plugins.d/q.toml").unwrap();
        let volume = w.path("state/plugins/old/volume");
        fs::create_dir_all(&volume).unwrap();
        m.doctor().await.has(&[
            "note plugin old",
            "`find /var/lib/csid/plugins/old -xdev -depth -type d -empty -delete`",
        ]);
        mount_at("tmpfs", &volume, "tmpfs", MountFlags::empty(), None).unwrap();
        let doctor = m.doctor().await;
        doctor.has(&["note plugin old", "mounts in it: 1", "`csictl plugin register old --socket PATH`"]);
        assert!(!doctor.findings().concat().contains("-delete"), "{:#?}", doctor.findings());
        unmount_fs(&volume, UnmountFlags::empty()).unwrap();
        fs::remove_dir_all("/var/lib/csid/plugins/old").unwrap();
        planted += 10;
        count("defects planted", planted);
        let doctor = m.doctor().await;
        assert_eq!((doctor.code, doctor.findings()), (0, Vec::<String>::new()), "all are mended");
    });
}

#[test]
fn service_without_order_is_named() {
    world(async |w| {
        let (_client, m) = machine(w).await;
        m.units("srv-pg.mount", "[Mount]\nWhat=prod/pg\nWhere=/srv/pg\nType=csi\nOptions=_netdev\n");
        let mount = |after: &str| {
            format!(
                "Id=srv-pg.mount\nWhere=/srv/pg\nFragmentPath=/etc/systemd/system/srv-pg.mount\nAfter={after}\n\nId=-.mount\nWhere=/\n"
            )
        };
        m.units("mounts", &mount("local-fs-pre.target remote-fs-pre.target"));
        let service = |id: &str, more: &str| format!("Id={id}\nAfter=basic.target\n{more}\n\n");
        let exec = "ExecStart={ path=/bin/db ; argv[]=/bin/db -D /srv/pg/data ; ignore_errors=no }";
        let services = [
            service("no-order.service", exec),
            service("binds.service", "BindPaths=/srv/pg:/data:rbind"),
            service("requires.service", &format!("{exec}\nRequiresMountsFor=/srv/pg /var")),
            service("below.service", "WorkingDirectory=/srv/pg/data\nRequiresMountsFor=/srv/pg/data"),
            service("by-hand.service", &format!("{exec}\nRequires=srv-pg.mount\nAfter=srv-pg.mount")),
            service("other.service", "WorkingDirectory=/srv/pgsql"),
            service("csi-plugin-p-default.service", "ReadWritePaths=/srv/pg"),
        ];
        m.units("services", &services.concat());
        let doctor = m.doctor().await;
        doctor.has(&["warning no-order.service", "/srv/pg", "RequiresMountsFor=/srv/pg"]);
        doctor.has(&["warning binds.service", "RequiresMountsFor=/srv/pg"]);
        assert_eq!((doctor.findings().len(), doctor.code), (2, 0), "{:#?}", doctor.findings());
        // By an automount the service itself makes the mount, also where a line has it.
        let ordered = mount("local-fs-pre.target remote-fs-pre.target");
        let automount = format!("Id=srv-pg.automount\nWhere=/srv/pg\n\n{ordered}");
        m.units("mounts", &automount);
        for line in ["", "prod/pg /srv/pg csi noauto,x-systemd.automount,_netdev 0 0\n"] {
            fs::write("/etc/fstab", line).unwrap();
            let doctor = m.doctor().await;
            assert_eq!(doctor.findings(), Vec::<String>::new(), "{line}");
        }
        m.units("mounts", &ordered);
        fs::write("/etc/fstab", "prod/pg /srv/pg csi noauto,_netdev 0 0\n").unwrap();
        assert_eq!(m.doctor().await.findings(), Vec::<String>::new());
        // systemd has no unit of the line while nothing names the unit.
        m.units("mounts", "");
        assert_eq!(m.doctor().await.findings(), Vec::<String>::new());
        fs::write("/etc/fstab", "").unwrap();
        m.units("services", "");
        m.units("mounts", &mount("local-fs-pre.target"));
        let doctor = m.doctor().await;
        doctor.has(&["error srv-pg.mount", "remote-fs-pre.target", "add _netdev"]);
        assert_eq!(doctor.code, 1);
        m.units("mounts", "");
        fs::write("/etc/fstab", "prod/pg /srv/my-data\\0401 csi _netdev 0 0\n").unwrap();
        m.units("services", &service("blank.service", "WorkingDirectory=/srv/my-data 1"));
        let doctor = m.doctor().await;
        doctor.has(&["warning fstab", r"`systemctl start 'srv-my\x2ddata\x201.mount'`"]);
        doctor.has(&["warning blank.service", r#"RequiresMountsFor="/srv/my-data 1""#]);
        fs::write("/etc/fstab", "").unwrap();
        m.units("services", "");

        // A target that csid restores has no mount unit.
        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        let of_target = MountOptions {
            target: Some(target.to_str().unwrap().to_owned()),
            restore: Some(Restore::Auto),
            ..inline("v")
        };
        let client = w.client().await;
        mounted(&client, "job", of_target).await;
        let uses = format!("WorkingDirectory={}", target.display());
        m.units(
            "services",
            &(service("early.service", &uses)
                + &service("late.service", &format!("{uses}\nAfter=csi-volumes.target"))),
        );
        let doctor = m.doctor().await;
        doctor.has(&["warning early.service", "After=csi-volumes.target"]);
        assert_eq!(doctor.findings().len(), 1, "{:#?}", doctor.findings());
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn rows_that_need_attention_are_found() {
    world(async |w| {
        w.add_plugin("q").await;
        let (client, m) = machine(w).await;
        healthy(&client, "q").await;
        mounted(&client, "job", MountOptions { restore: Some(Restore::Hold), ..inline("held") }).await;
        mounted(&client, "job", inline("gone")).await;
        drop(client);
        w.reboot().await;
        let client = w.start().await;
        m.give_rights();
        settled(&client).await;
        let source = mounted(&client, "job", of_plugin("q", "dead")).await;
        unmount_fs(&source, UnmountFlags::DETACH).unwrap();
        w.plugin("p").rules([
            Rule::always("NodePublishVolume", Act::Fail(3)),
            Rule::always("NodeUnstageVolume", Act::Fail(13)),
        ]);
        mount(&client, "job", within(Duration::from_secs(1), inline("stuck"))).await.unwrap_err();
        eventually("a row is uncertain", async || state(&client, "stuck", "job").await == "uncertain").await;
        let doctor = m.doctor().await;
        doctor.has(&["warning mount default/held for job: it is lost"]);
        doctor.has(&["error mount default/dead for job: it is not healthy"]);
        doctor.has(&["error mount default/stuck for job: it is uncertain", "NodeUnstageVolume"]);
        assert_eq!(doctor.code, 1);
        w.honest();
    });
}

#[test]
fn plugin_and_orphan_are_named() {
    world(async |w| {
        let (client, m) = machine(w).await;
        let orphan = w.path("state/plugins/p/publish/orphan");
        mounted(&client, "job", inline("v")).await;
        fs::create_dir_all(&orphan).unwrap();
        mount_at("tmpfs", &orphan, "tmpfs", MountFlags::empty(), None).unwrap();
        let doctor = m.doctor().await;
        doctor.has(&["warning orphan", "publish/orphan", &format!("`umount {}`", orphan.display())]);
        doctor.has(&["note orphans", "`csictl reconcile --remove-orphans` removes all 1;"]);
        unmount_fs(&orphan, UnmountFlags::empty()).unwrap();
        fs::remove_dir(&orphan).unwrap();
        w.plugin("p").kill();
        eventually("csid sees it", async || !client.plugin("p").await.unwrap().healthy).await;
        let doctor = m.doctor().await;
        doctor.has(&["error plugin p", "`csictl plugin show p`"]);
        assert_eq!(doctor.code, 1);
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        unmount(&client, "v", "job").await.unwrap();
    });
}

/// Nothing waits for the server of a mount: neither doctor, nor csid's answers.
#[test]
fn hung_mount_is_found_and_hangs_nothing() {
    world(async |w| {
        let (client, m) = machine(w).await;
        w.hang("p", "NodePublishVolume");
        mounted(&client, "job", inline("v")).await;
        w.hung().hold(&[Op::GetAttr, Op::StatFs, Op::Lookup, Op::OpenDir]);
        eventually("csid has noticed", async || !row(&client, "v", "job").await.unwrap().healthy).await;
        let doctor = m.doctor().await;
        doctor.has(&["error mount default/v for job", "does not answer", "--force-hung"]);
        assert!(doctor.took < Duration::from_secs(30), "{:?}", doctor.took);
        // csid's own state directory, too.
        fs::remove_file("/var/lib/csid").unwrap();
        symlink(row(&client, "v", "job").await.unwrap().source, "/var/lib/csid").unwrap();
        let doctor = m.doctor().await;
        doctor.has(&["error /var/lib/csid: its file system does not answer"]);
        assert!(doctor.took < Duration::from_secs(60), "{:?}", doctor.took);
        w.hung().release();
        unmount(&client, "v", "job").await.unwrap();
    });
}

#[test]
fn without_csid_all_else_is_looked_at() {
    world(async |w| {
        let (client, m) = machine(w).await;
        mounted(&client, "job", inline("v")).await;
        w.kill();
        fs::write("/etc/fstab", "prod/pg /srv/pg csi defaults 0 0\n").unwrap();
        let doctor = m.doctor().await;
        doctor.has(&["error csid: csid cannot be reached", "`systemctl start"]);
        doctor.has(&["error fstab", "needs _netdev"]);
        assert_eq!((doctor.code, &doctor.report["reachable"]), (2, &Value::Bool(false)));

        // Where systemd says that csid does not run, doctor does not start it by a connection.
        m.units("csid", &CSID.replacen("ActiveState=active", "ActiveState=failed\nResult=exit-code", 1));
        let doctor = m.doctor().await;
        doctor.has(&["error csid.service: it has failed (exit-code)", "journalctl -u csid"]);
        doctor.has(&["error csid: csid cannot be reached: it is failed"]);
        m.units(
            "csid",
            &CSID.replacen(
                "LoadState=loaded\nActiveState=active",
                "LoadState=masked\nActiveState=inactive",
                1,
            ),
        );
        m.doctor().await.has(&["error csid.service: the unit is masked", "systemctl unmask"]);
        m.units(
            "csid",
            &CSID.replacen("NRestarts=0", "NRestarts=7", 1).replacen(
                "ActiveState=active",
                "ActiveState=activating",
                1,
            ),
        );
        m.doctor().await.has(&["error csid.service: it ends at each start", "7 times"]);
        m.units("csid", CSID);

        // A journal of a later version, and none at all.
        let journal = w.path("state/journal/csid.db");
        let before = fs::read(&journal).unwrap();
        let mut later = before.clone();
        later[60..64].copy_from_slice(&99_u32.to_be_bytes());
        fs::write(&journal, later).unwrap();
        // With a log, which csid left at its kill, the file's head may be old.
        let log = w.path("state/journal/csid.db-wal");
        assert!(fs::metadata(&log).unwrap().len() > 0, "csid was killed");
        let findings = m.doctor().await.findings();
        assert!(!findings.concat().contains("its version is"), "{findings:#?}");
        let aside = w.path("log");
        fs::rename(&log, &aside).unwrap();
        m.doctor().await.has(&[
            "error /var/lib/csid/journal/csid.db",
            "its version is 99",
            "later version of csid",
        ]);
        fs::write(&journal, vec![0; 4096]).unwrap();
        m.doctor().await.has(&["error /var/lib/csid/journal/csid.db", "no journal of csid's"]);
        fs::write(&journal, b"short").unwrap();
        m.doctor().await.has(&["error /var/lib/csid/journal/csid.db", "cannot be read"]);
        fs::write(&journal, before).unwrap();
        fs::rename(&aside, &log).unwrap();
        fs::write("/etc/fstab", "").unwrap();
        let client = w.start().await;
        m.give_rights();
        assert_eq!(m.doctor().await.code, 0);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn csid_and_systemd_that_hang_end_in_time() {
    world(async |w| {
        let (client, m) = machine(w).await;
        fs::write("/etc/fstab", "prod/pg /srv/pg csi defaults 0 0\n").unwrap();
        m.units("hang", "");
        let doctor = m.doctor().await;
        doctor.has(&["warning systemd", "no answer within"]);
        doctor.has(&["error fstab", "needs _netdev"]);
        assert!(doctor.took < Duration::from_secs(60), "{:?}", doctor.took);
        fs::remove_file(m.root.join("units/hang")).unwrap();
        m.units("broken", "System has not been booted with systemd as init system (PID 1).\n");
        m.doctor().await.has(&["warning systemd", "has not been booted"]);
        fs::remove_file(m.root.join("units/broken")).unwrap();
        // A unit's file that is on a dead file system.
        m.units("mounts", "Id=dead.mount\nWhere=/srv/dead\nFragmentPath=/mnt/dead.mount\n");
        let fifo = m.root.join("units/dead.mount");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let doctor = m.doctor().await;
        doctor.has(&[
            "warning dead.mount: its files cannot be read: no answer within",
            "`systemctl cat -- dead.mount`",
        ]);
        doctor.has(&["error fstab", "needs _netdev"]);
        assert!(doctor.took < Duration::from_secs(60), "{:?}", doctor.took);
        m.units("mounts", "");
        // Neither text that is no answer ends doctor.
        m.units("csid", "\u{1b}[2J=\n\n\nId\n=x\nId=csid.service\nLoadState=\u{0}\n");
        m.doctor().await;
        m.units("csid", CSID);

        let pid = Pid::from_raw(w.csid_pid().cast_signed()).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        let doctor = m.doctor().await;
        doctor.has(&["error csid: csid cannot be reached: no answer within"]);
        doctor.has(&["error fstab", "needs _netdev"]);
        assert_eq!(doctor.code, 2);
        assert!(doctor.took < Duration::from_secs(60), "{:?}", doctor.took);
        kill_process(pid, Signal::CONT).unwrap();
        w.nothing_left(&client).await;
    });
}
