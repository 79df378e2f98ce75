//! systemd's mount units.

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
    fn control_group_shows_the_mount_unit() {
        assert!(is_in("0::/system.slice/srv-pg.mount\n"));
        assert!(is_in("5:memory:/\n1:name=systemd:/system.slice/srv-pg.mount\n0::/\n"));
        assert!(!is_in("0::/user.slice/user-0.slice/session-1.scope\n"));
        assert!(!is_in(""));
    }
}
