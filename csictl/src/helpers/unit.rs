//! systemd's mount units.

use std::{process::Stdio, time::Duration};

use tokio::process::Command;

/// The target that is stopped before csid. A mount unit with _netdev is ordered after it.
pub const REMOTE: &str = "remote-fs-pre.target";
/// How long systemd is waited for. It reads the mount table five times a second at most.
const ORDERED_WITHIN: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(50);

/// The length of a consumer's name that csid takes, in bytes.
pub const CONSUMER_LIMIT: usize = 128;

/// Returns the name of the mount unit of an absolute path, as `systemd-escape --path --suffix=mount` does.
pub fn of_target(target: &str) -> String {
    let parts: Vec<_> = target.split('/').filter(|part| !part.is_empty()).collect();
    if parts.is_empty() {
        return "-.mount".to_owned();
    }
    let mut name = String::new();
    for (at, byte) in parts.join("/").bytes().enumerate() {
        match byte {
            b'/' => name.push('-'),
            b'.' if at == 0 => name += r"\x2e",
            byte if byte.is_ascii_alphanumeric() || b":_.".contains(&byte) => name.push(char::from(byte)),
            byte => name += &format!(r"\x{byte:02x}"),
        }
    }
    name + ".mount"
}

/// Returns whether systemd runs this process for a mount unit.
pub fn is_around() -> bool {
    std::fs::read_to_string("/proc/self/cgroup").is_ok_and(|groups| is_in(&groups))
}

/// `groups`: the content of /proc/self/cgroup.
fn is_in(groups: &str) -> bool {
    groups.lines().any(|line| line.ends_with(".mount"))
}

/// Waits until a shutdown would unmount the target before csid stops. systemd reads the mount table up to a second late. If systemd reads it
/// before utab has `_netdev`, it takes the mount for a local one. Returns false if the wait is over 5 s, and true where no systemd runs.
pub async fn wait_for_order(target: &str) -> bool {
    let unit = of_target(target);
    let ordered = async {
        while let Some(shown) = show(&unit).await {
            if is_before_csid(&shown) {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::time::timeout(ORDERED_WITHIN, ordered).await.is_ok()
}

/// Returns the unit's state and order. `None`: no systemd answers.
async fn show(unit: &str) -> Option<String> {
    let mut systemctl = Command::new("systemctl");
    systemctl
        .args(["show", "--property=ActiveState,After", "--", unit])
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = systemctl.output().await.ok().filter(|output| output.status.success())?;
    // In a chroot systemctl asks nobody, prints nothing, and ends with 0.
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    value_in(&shown, "ActiveState").is_some().then_some(shown)
}

/// `shown`: lines `KEY=VALUE`.
fn value_in<'a>(shown: &'a str, key: &str) -> Option<&'a str> {
    shown.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
}

fn is_before_csid(shown: &str) -> bool {
    value_in(shown, "ActiveState") == Some("active")
        && value_in(shown, "After").is_some_and(|units| units.split(' ').any(|unit| unit == REMOTE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each name is what `systemd-escape --path --suffix=mount` of systemd 252 printed.
    #[test]
    fn names_of_units_are_systemds() {
        for (target, unit) in [
            ("/srv/pg", "srv-pg.mount"),
            ("/srv//pg/", "srv-pg.mount"),
            ("/srv/my-db", r"srv-my\x2ddb.mount"),
            ("/.a/.b", r"\x2ea-.b.mount"),
            ("/srv/ä b", r"srv-\xc3\xa4\x20b.mount"),
            (r"/a\b", r"a\x5cb.mount"),
            ("/srv/50%", r"srv-50\x25.mount"),
            ("/srv/a:b_c.d", "srv-a:b_c.d.mount"),
            ("/", "-.mount"),
        ] {
            assert_eq!(of_target(target), unit, "{target}");
        }
    }

    #[test]
    fn order_needs_an_active_unit_after_the_target() {
        for (shown, is) in [
            ("ActiveState=active\nAfter=-.mount remote-fs-pre.target system.slice\n", true),
            ("After=remote-fs-pre.target\nActiveState=active\n", true),
            ("ActiveState=inactive\nAfter=remote-fs-pre.target\n", false),
            ("ActiveState=active\nAfter=-.mount local-fs-pre.target\n", false),
            ("ActiveState=active\nAfter=\n", false),
            ("", false),
        ] {
            assert_eq!(is_before_csid(shown), is, "{shown}");
        }
    }

    #[test]
    fn control_group_shows_the_mount_unit() {
        assert!(is_in("0::/system.slice/srv-pg.mount\n"));
        assert!(is_in("5:memory:/\n1:name=systemd:/system.slice/srv-pg.mount\n0::/\n"));
        assert!(!is_in("0::/user.slice/user-0.slice/session-1.scope\n"));
        assert!(!is_in(""));
    }
}
