//! The mount table: whether csid's mounts reach the host, and which stay while csid does not run.

use std::{fs, io::ErrorKind};

use super::finding::Report;
use super::units::Units;
use crate::helpers::mount_table::MountTable;

const PLUGINS: &str = "/var/lib/csid/plugins";

pub fn look(units: &Units, has_csid: bool, report: &mut Report) {
    let own = fs::read_link("/proc/self/ns/mnt").ok();
    // Only root may read the links of PID 1 and of csid.
    let host = fs::read_link("/proc/1/ns/mnt");
    if let Ok(host) = &host
        && own.as_ref() != Some(host)
    {
        let remedy =
            "run doctor on the host, as root, outside of containers and of services with a mount namespace";
        report.note(
            "mounts",
            "csictl runs in another mount namespace than systemd and sees other mounts",
            remedy,
        );
    }
    namespace(units, &host, report);
    let table = match MountTable::read() {
        Ok(table) => table,
        Err(error) => {
            return report.warning("mounts", &format!("/proc/self/mountinfo cannot be read: {error}"), "");
        }
    };
    let there = table.below(PLUGINS.as_ref()).filter(|entry| entry.source != "csid-live").count();
    match (has_csid, there) {
        (false, 1..) => {
            let found = format!(
                "{there} mounts are below {PLUGINS}; they and their users are not affected while csid is away"
            );
            report.note("mounts", &found, "start csid; it takes them over");
        }
        _ => report.ok("mounts", &format!("{there} mounts are below {PLUGINS}")),
    }
}

/// Compares csid's mount namespace with that of PID 1: a setting of the unit that doctor does not know shows here.
fn namespace(units: &Units, host: &std::io::Result<std::path::PathBuf>, report: &mut Report) {
    for id in ["csid.service", "csid-helper.service"] {
        let Some(pid) = units.get(id).map(|unit| unit.get("MainPID")).filter(|pid| !["", "0"].contains(pid))
        else {
            continue;
        };
        match (fs::read_link(format!("/proc/{pid}/ns/mnt")), host) {
            (Ok(own), Ok(host)) if own == *host => report.ok(id, "it has the host's mount namespace"),
            (Ok(_), Ok(_)) => report.error(
                id,
                "it runs in a mount namespace of its own: the host and its services do not see what csid mounts",
                &format!("`systemctl cat {id}` shows the setting; take it out, then `systemctl daemon-reload && systemctl restart {id}`"),
            ),
            // It has just ended, or only root may look.
            (Err(error), _) if error.kind() == ErrorKind::NotFound => {}
            _ => report.ok(id, "only root can see its mount namespace"),
        }
    }
}
