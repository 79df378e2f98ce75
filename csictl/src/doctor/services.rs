//! Services that use a volume's target, and whether they are ordered after its mount.

use std::collections::BTreeMap;

use super::finding::Report;
use super::systemctl::{Unit, show};
use crate::helpers::unit;
use crate::shell::quoted;

/// What makes the mount at a target, and so what a service is ordered after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// A mount unit, also of fstab.
    MountUnit,
    /// csid, after a reboot.
    Volumes,
}

/// Properties that name paths.
const PATHS: [&str; 10] = [
    "WorkingDirectory",
    "RootDirectory",
    "BindPaths",
    "BindReadOnlyPaths",
    "ReadWritePaths",
    "ReadOnlyPaths",
    "ExecStartPre",
    "ExecStart",
    "Environment",
    "EnvironmentFiles",
];
const OTHERS: [&str; 6] = ["Id", "RequiresMountsFor", "Requires", "BindsTo", "Wants", "After"];

pub async fn look(targets: &BTreeMap<String, Order>, report: &mut Report) {
    if targets.is_empty() {
        return;
    }
    let properties: Vec<&str> = OTHERS.into_iter().chain(PATHS).collect();
    let units = match show(&["*.service"], &properties).await {
        Ok(units) => units,
        Err(error) => {
            return report.warning(
                "services",
                &format!("they cannot be listed: {error}"),
                "`systemctl show '*.service'`",
            );
        }
    };
    let before = report.len();
    for (target, order) in targets {
        for service in units.iter().filter(|unit| uses(unit, target)) {
            if is_ordered(service, target, *order) {
                continue;
            }
            let id = service.id();
            let line = match order {
                Order::MountUnit => format!("RequiresMountsFor={}", in_setting(target)),
                Order::Volumes => "Wants=csi-volumes.target and After=csi-volumes.target".to_owned(),
            };
            let found = format!("it uses {target}, and may start before the volume is mounted there");
            report.warning(id, &found, &format!("`systemctl edit {}`: {line} below [Unit]", quoted(id)));
        }
    }
    if report.len() == before {
        report.ok("services", "those that use a volume's target are ordered after its mount");
    }
}

/// Returns the path as a word of a setting in a unit's file.
fn in_setting(path: &str) -> String {
    let escaped = path.replace('\\', r"\\").replace('"', r#"\""#).replace('%', "%%");
    match path.contains(|c: char| c.is_whitespace() || "'\"".contains(c)) {
        true => format!("\"{escaped}\""),
        false => escaped,
    }
}

/// Returns whether a setting of the service has the target, or a path below it.
fn uses(service: &Unit, target: &str) -> bool {
    let is_csids = service.id().starts_with("csi-plugin-") || service.id().starts_with("csid");
    !is_csids && PATHS.into_iter().any(|property| names(service.get(property), target))
}

/// Returns whether the text has the path, or one below it, as a path of its own.
fn names(text: &str, path: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || "/._-@".contains(c);
    text.match_indices(path).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + path.len()..].chars().next();
        !before.is_some_and(is_part) && !after.is_some_and(|c| c != '/' && is_part(c))
    })
}

fn is_ordered(service: &Unit, target: &str, order: Order) -> bool {
    match order {
        Order::Volumes => {
            // A service that mounts the volume itself needs no order.
            let mounts =
                ["ExecStartPre", "ExecStart"].iter().any(|of| service.get(of).contains("csictl mount"));
            mounts || service.lists("After", "csi-volumes.target")
        }
        Order::MountUnit => {
            let mount = unit::of_target(target);
            let pulls = ["Requires", "BindsTo", "Wants"].iter().any(|of| service.lists(of, &mount));
            (pulls && service.lists("After", &mount)) || names(service.get("RequiresMountsFor"), target)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::systemctl::parse;
    use super::*;

    #[test]
    fn path_in_a_setting_is_one_word() {
        for (path, word) in [
            ("/srv/pg", "/srv/pg"),
            ("/srv/my data", r#""/srv/my data""#),
            ("/srv/50%", "/srv/50%%"),
            (r"/srv/a\b", r"/srv/a\\b"),
            (r#"/srv/it's "x" 5%"#, r#""/srv/it's \"x\" 5%%""#),
        ] {
            assert_eq!(in_setting(path), word, "{path}");
        }
    }

    #[test]
    fn service_by_hand_is_ordered_after_an_escaped_unit() {
        let text = "Id=db.service\nRequires=\"srv-my\\\\x2ddata.mount\" -.mount\nAfter=basic.target \"srv-my\\\\x2ddata.mount\"\n";
        let units = parse(text);
        assert!(is_ordered(&units[0], "/srv/my-data", Order::MountUnit));
        assert!(!is_ordered(&units[0], "/srv/my-other", Order::MountUnit));
    }

    #[test]
    fn path_is_found_as_a_whole() {
        for text in [
            "/srv/pg",
            "{ path=/bin/db ; argv[]=/bin/db -D /srv/pg/data ; }",
            "--data=/srv/pg",
            "/srv/pg:/data:rw",
            "PGDATA=/srv/pg/16",
        ] {
            assert!(names(text, "/srv/pg"), "{text}");
        }
        for text in ["", "/srv/pgsql", "/data/srv/pg", "/srv/pg-2/x", "/srv/p", "x/srv/pg.old"] {
            assert!(!names(text, "/srv/pg"), "{text}");
        }
    }
}
