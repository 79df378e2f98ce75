//! A mount that a client has. The client uses it, and looks that it stays the same mount.

use std::fs;
use std::path::{Path, PathBuf};

use csid_tests::kernel::mount_id;

/// A mount, and a file of the client in it.
pub struct HeldMount {
    source: PathBuf,
    number: u64,
    file: PathBuf,
    text: String,
}

impl HeldMount {
    /// Writes a file of `who` into the mount at `source`, which was just answered. Fails where there is no directory that takes a file.
    pub fn new(source: &Path, who: &str) -> Result<HeldMount, String> {
        let failed = |error| format!("{} was answered to {who}: {error}", source.display());
        let number = mount_id(source).map_err(failed)?;
        let (file, text) = (source.join(who.replace('/', "-")), format!("{who} {number}"));
        fs::write(&file, &text).map_err(failed)?;
        Ok(HeldMount { source: source.to_owned(), number, file, text })
    }

    /// Fails if another mount, or none, is at the path, or if the file is not the one that was written.
    pub fn check(&self) -> Result<(), String> {
        let HeldMount { source, number, file, text } = self;
        let source = source.display();
        match mount_id(&self.source) {
            Ok(now) if now == *number => {}
            now => return Err(format!("mount {number} at {source} is {now:?} now")),
        }
        match fs::read_to_string(file) {
            Ok(now) if now == *text => Ok(()),
            now => Err(format!("{text:?} was written below {source}, and {now:?} is there")),
        }
    }
}

#[cfg(test)]
mod tests {
    use csid_tests::world::world;
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

    use super::*;

    #[test]
    fn mount_that_is_lost_or_replaced_is_found() {
        world(async |w| {
            let source = w.path("held");
            fs::create_dir(&source).unwrap();
            let tmpfs = || mount("none", &source, "tmpfs", MountFlags::empty(), None).unwrap();
            tmpfs();
            let held = HeldMount::new(&source, "n1/c0").unwrap();
            held.check().unwrap();
            fs::write(source.join("n1-c0"), "another").unwrap();
            assert!(held.check().unwrap_err().contains("another"));
            unmount(&source, UnmountFlags::empty()).unwrap();
            assert!(held.check().is_err(), "it is lost");
            tmpfs();
            fs::write(source.join("n1-c0"), &held.text).unwrap();
            assert!(held.check().unwrap_err().contains("now"), "it is another mount");
            unmount(&source, UnmountFlags::empty()).unwrap();
        });
    }
}
