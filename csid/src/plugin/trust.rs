//! Whether nobody but root can change what a path leads to: csid runs plugins as root, and hands secrets to who
//! listens at a socket.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// As many as the kernel follows in one path.
const LINKS: usize = 40;

#[derive(Debug, thiserror::Error)]
pub enum Distrust {
    #[error("{}: {source}", path.display())]
    Look { path: PathBuf, source: io::Error },
    #[error("{} belongs to uid {uid}, who may change what csid trusts as root's", path.display())]
    Owner { path: PathBuf, uid: u32 },
    #[error("{} can be written by others (mode {mode:o}), and csid trusts it as root's", path.display())]
    Writable { path: PathBuf, mode: u32 },
    #[error("{} is no executable file", path.display())]
    NoProgram { path: PathBuf },
    #[error("{}: too many symbolic links", path.display())]
    Links { path: PathBuf },
    #[error("uid {listener} listens there, but the plugin is uid {owner}'s")]
    Listener { listener: u32, owner: u32 },
    #[error("process {pid} of uid {uid} listens there, which is none of {unit}")]
    Stranger { pid: u32, uid: u32, unit: String },
}

/// Whether nobody but root can change the program.
pub fn check(program: &Path) -> Result<(), Distrust> {
    let (path, metadata) = walk(program, 0)?;
    if !metadata.is_file() || metadata.mode() & 0o111 == 0 {
        return Err(Distrust::NoProgram { path });
    }
    Ok(())
}

/// Whether `listener` may answer at `socket` for a plugin of `owner`. A plugin of another uid than root is served
/// by that uid alone: its socket is no second name of root's plugin. Root's is served by root (or csid's own
/// uid), or by a service user, as many drivers run; then every directory on the way is root's or that user's and
/// writable by nobody else, who could bind the name, and be sent secrets, once the driver is gone.
pub fn check_listener(socket: &Path, owner: u32, listener: u32) -> Result<(), Distrust> {
    let own = rustix::process::geteuid().as_raw();
    match owner {
        0 if listener == 0 || listener == own => Ok(()),
        0 => walk(socket.parent().unwrap_or(socket), listener).map(drop),
        _ if owner == listener => Ok(()),
        _ => Err(Distrust::Listener { listener, owner }),
    }
}

/// Walk an absolute path as the kernel would, link by link, and look at every directory on the way and at what is
/// at its end. `also` may own any of it, besides root.
fn walk(program: &Path, also: u32) -> Result<(PathBuf, Metadata), Distrust> {
    let mut links = 0;
    let mut here = PathBuf::from("/");
    // The components that are still to be walked, the next one last.
    let mut rest: Vec<PathBuf> = Vec::new();
    push(&mut rest, program);
    let mut metadata = look(&here, also)?;
    while let Some(next) = rest.pop() {
        if next == Path::new("..") {
            here.pop();
            metadata = look(&here, also)?;
            continue;
        }
        let path = here.join(next);
        let found = look(&path, also)?;
        if found.is_symlink() {
            links += 1;
            if links > LINKS {
                return Err(Distrust::Links { path: program.into() });
            }
            let target = std::fs::read_link(&path).map_err(|source| Distrust::Look { path, source })?;
            if target.is_absolute() {
                here = PathBuf::from("/");
            }
            push(&mut rest, &target);
        } else {
            here = path;
            metadata = found;
        }
    }
    Ok((here, metadata))
}

fn push(rest: &mut Vec<PathBuf>, path: &Path) {
    let walked = path.components().rev().filter(|c| matches!(c, Component::Normal(_) | Component::ParentDir));
    rest.extend(walked.map(|c| PathBuf::from(c.as_os_str())));
}

fn look(path: &Path, also: u32) -> Result<Metadata, Distrust> {
    let found = path.symlink_metadata().map_err(|source| Distrust::Look { path: path.into(), source })?;
    if found.uid() != 0 && found.uid() != also {
        return Err(Distrust::Owner { path: path.into(), uid: found.uid() });
    }
    // A link's own mode means nothing. The group's bits are refused also of the group root: with an ACL they are
    // what it allows to others.
    if !found.is_symlink() && found.mode() & 0o022 != 0 {
        return Err(Distrust::Writable { path: path.into(), mode: found.mode() & 0o7777 });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    /// Below `/run`, as `/tmp` may be written by all. `None` for who is not root: there is nothing to
    /// distrust then.
    fn directory() -> Option<tempfile::TempDir> {
        rustix::process::geteuid().is_root().then(|| tempfile::tempdir_in("/run").unwrap())
    }

    fn program(path: &Path, mode: u32) {
        std::fs::write(path, "").unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    #[test]
    fn system_program_is_trusted_through_links() {
        check(Path::new("/bin/sh")).unwrap();
    }

    #[test]
    fn program_writable_by_others_is_refused() {
        let Some(directory) = directory() else { return };
        let at = |name: &str| directory.path().join(name);
        program(&at("good"), 0o755);
        check(&at("good")).unwrap();

        assert!(matches!(check(&at("none")), Err(Distrust::Look { .. })));
        program(&at("writable"), 0o757);
        assert!(matches!(check(&at("writable")), Err(Distrust::Writable { .. })));
        program(&at("foreign"), 0o755);
        chown(at("foreign"), Some(65534), None).unwrap();
        assert!(matches!(check(&at("foreign")), Err(Distrust::Owner { uid: 65534, .. })));
        program(&at("text"), 0o644);
        assert!(matches!(check(&at("text")), Err(Distrust::NoProgram { .. })));
        assert!(matches!(check(directory.path()), Err(Distrust::NoProgram { .. })));

        // A directory that others may write, also in the midst of a chain of links.
        std::fs::create_dir(at("open")).unwrap();
        std::fs::set_permissions(at("open"), PermissionsExt::from_mode(0o1777)).unwrap();
        program(&at("open/program"), 0o755);
        assert!(matches!(check(&at("open/program")), Err(Distrust::Writable { .. })));
        symlink("../good", at("open/link")).unwrap();
        symlink("open/link", at("link")).unwrap();
        assert!(matches!(check(&at("link")), Err(Distrust::Writable { .. })));
        symlink("good", at("fine")).unwrap();
        check(&at("fine")).unwrap();
        symlink("loop", at("loop")).unwrap();
        assert!(matches!(check(&at("loop")), Err(Distrust::Links { .. })));

        // The group root may be the mask of an ACL.
        program(&at("acl"), 0o775);
        assert!(matches!(check(&at("acl")), Err(Distrust::Writable { .. })));
    }

    #[test]
    fn listener_owner_is_checked() {
        let Some(directory) = directory() else { return };
        let at = |name: &str, owner: u32, mode: u32| {
            let path = directory.path().join(name);
            std::fs::create_dir(&path).unwrap();
            chown(&path, Some(owner), None).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            path.join("csi.sock")
        };
        let roots = at("root", 0, 0o755);
        check_listener(&roots, 0, 0).unwrap();
        check_listener(Path::new("/tmp/csi.sock"), 0, 0).expect("root's process needs no look at the way");
        check_listener(&roots, 1000, 1000).unwrap();
        for listener in [0, 1001] {
            let refused = check_listener(&roots, 1000, listener);
            assert!(matches!(refused, Err(Distrust::Listener { owner: 1000, .. })), "{listener}");
        }
        // A service user for root's plugin.
        check_listener(&roots, 0, 1000).unwrap();
        check_listener(&at("own", 1000, 0o750), 0, 1000).unwrap();
        let other = check_listener(&at("other", 1001, 0o755), 0, 1000);
        assert!(matches!(other, Err(Distrust::Owner { uid: 1001, .. })));
        for (name, mode) in [("all", 0o1777), ("group", 0o770)] {
            let open = check_listener(&at(name, 0, mode), 0, 1000);
            assert!(matches!(open, Err(Distrust::Writable { .. })), "{name}");
        }
        let swept = check_listener(Path::new("/tmp/x/csi.sock"), 0, 1000);
        assert!(matches!(swept, Err(Distrust::Writable { .. })), "anybody could have made /tmp/x");
    }
}
