//! The mount table: whether csid's mounts reach the host, and which stay while csid does not run.

use std::{fs, io::ErrorKind};

use super::finding::Report;
use super::systemctl::{Unit, show};
use super::units::Units;
use crate::helpers::mount_table::MountTable;
use crate::shell::quoted;

const PLUGINS: &str = "/var/lib/csid/plugins";

/// The source of csid's tmpfs below a plugin-root.
const LIVE: &str = "csid-live";

/// The drop-in that orders mounts below /var/lib/csid at a shutdown.
const DROP_IN: &str = "/usr/lib/systemd/system/var-lib-csid-.mount.d/10-csid.conf";

pub async fn look(units: &Units, has_csid: bool, report: &mut Report) {
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
    order(&table, report).await;
    let there = table.below(PLUGINS.as_ref()).filter(|entry| entry.source != LIVE).count();
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

/// Looks at the order of a shutdown for mounts of a plugin-root elsewhere. A drop-in for them counts for their tmpfs, too.
async fn order(table: &MountTable, report: &mut Report) {
    for live in table.of_source(LIVE).filter(|live| !live.starts_with("/var/lib/csid")) {
        let (Some(root), Some(path)) = (live.parent().and_then(|root| root.to_str()), live.to_str()) else {
            continue;
        };
        let units = show(&[path], &["Id", "ActiveState", "Before"]).await.unwrap_or_default();
        if units.iter().any(is_unordered) {
            let found =
                "at a shutdown its volumes may be unmounted before csid has stopped, or after their plugin";
            report.warning(&format!("plugin-root {root}"), found, &drop_in(root));
        }
    }
}

fn is_unordered(mount: &Unit) -> bool {
    mount.is_active() && !mount.lists("Before", "csid.service")
}

fn drop_in(root: &str) -> String {
    let root = quoted(root);
    format!(
        "`install -D -m 644 {DROP_IN} \"/etc/systemd/system/$(systemd-escape --path {root})-.mount.d/10-csid.conf\"`, then \
         `systemctl daemon-reload`"
    )
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

#[cfg(test)]
mod tests {
    use super::super::systemctl::parse;
    use super::*;

    #[test]
    fn mount_without_the_drop_in_is_unordered() {
        let units = parse(
            "Id=a.mount\nActiveState=active\nBefore=umount.target\n\n\
             Id=b.mount\nActiveState=active\nBefore=umount.target csid.service\n\n\
             Id=c.mount\nActiveState=inactive\nBefore=\n",
        );
        assert_eq!(units.iter().map(is_unordered).collect::<Vec<_>>(), [true, false, false]);
        assert!(drop_in("/srv/a b").contains("--path '/srv/a b')-.mount.d/10-csid.conf"));
        let name = DROP_IN.strip_prefix("/usr/lib/systemd/system/").unwrap();
        assert!(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd").join(name).exists());
    }
}
