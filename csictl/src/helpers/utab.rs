//! The file in which libmount keeps what the kernel does not: that umount(8) runs umount.csi for a mount.

use std::{ffi::OsString, process::Stdio};

use tokio::process::Command;

use super::{mount_table::MountEntry, octal::unescaped};

const UTAB: &str = "/run/mount/utab";
const HELPER: &str = "helper=csi";

/// Notes the mount at the target, a bind of csid's path `source`, unless it is noted already. libmount finds a note only by the source and the
/// root that the kernel shows. mount(8) reads both from the mount at the path of a bind.
pub async fn note(entry: &MountEntry, source: &str, target: &str, netdev: bool) -> Result<(), String> {
    let noted = std::fs::read(UTAB).unwrap_or_default();
    if has(&String::from_utf8_lossy(&noted), target, entry) {
        return Ok(());
    }
    // A mount that csid ended without umount(8) left its lines.
    keep(0, target).await;
    let options = if netdev { "_netdev,helper=csi" } else { HELPER };
    let mut mount = Command::new("/bin/mount");
    mount.args(["-i", "-f", "--bind", "-o", options, "--", source, target]);
    let output = mount.stdin(Stdio::null()).stdout(Stdio::null()).output().await;
    let output = output.map_err(|error| format!("cannot run /bin/mount: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("/bin/mount: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}

/// Removes lines of the target until `limit` are left. mount(8) writes a line of its own after mount.csi has ended, and umount(8) removes one
/// line alone.
pub async fn keep(limit: usize, target: &str) {
    let utab = std::fs::read(UTAB).unwrap_or_default();
    let utab = String::from_utf8_lossy(&utab);
    let lines = utab.lines().filter(|line| field(line, "TARGET").is_some_and(|at| at == target)).count();
    for _ in limit..lines {
        let mut umount = Command::new("/bin/umount");
        umount.args(["-i", "--fake", "--", target]);
        // A line that stays is no harm: what it names is not mounted.
        let _ = umount.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().await;
    }
}

fn field(line: &str, key: &str) -> Option<OsString> {
    let mut fields = line.split(' ').filter_map(|field| field.split_once('='));
    fields.find(|(name, _)| *name == key).map(|(_, value)| unescaped(value))
}

fn has(utab: &str, target: &str, entry: &MountEntry) -> bool {
    utab.lines().any(|line| {
        let field = |key| field(line, key);
        field("TARGET").is_some_and(|at| at == target)
            && field("SRC").as_ref() == Some(&entry.source)
            && field("ROOT").as_ref() == Some(entry.root())
            && field("OPTS")
                .is_some_and(|words| words.to_string_lossy().split(',').any(|word| word == HELPER))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_is_found_by_target_source_and_root() {
        let utab = r"SRC=/dev/loop3 TARGET=/srv/a\040b ROOT=/ BINDSRC=/p OPTS=_netdev,helper=csi
SRC=/dev/loop4 TARGET=/srv/c ROOT=/ OPTS=_netdev
SRC=h:/e TARGET=/srv/d ROOT=/sub ATTRS= OPTS=helper=csi
";
        for (target, root, source, is) in [
            ("/srv/a b", "/", "/dev/loop3", true),
            ("/srv/a b", "/", "/dev/loop9", false),
            ("/srv/c", "/", "/dev/loop4", false),
            ("/srv/d", "/sub", "h:/e", true),
            ("/srv/d", "/", "h:/e", false),
            ("/srv/e", "/", "/dev/loop3", false),
        ] {
            let line = format!("22 1 8:1 {root} /p rw - ext4 {source} rw");
            let entry = MountEntry::parse(&line).unwrap();
            assert_eq!(has(utab, target, &entry), is, "{target} {root} {source}");
        }
    }
}
