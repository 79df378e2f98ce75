//! The journal's directory: private and locked against a second csid, the files in it, and how one journal
//! takes another's place.
//!
//! A journal is born whole under another name: one that lies there empty or cut short is damaged, not new.
//! One that is to replace a damaged one is called [`NEXT`] when all of it is on the disk. From then on the old
//! one is as good as replaced: this csid keeps it aside and gives its name away, or the next one does.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::store::error::{StoreError, file};
use crate::store::mark;

pub(super) const NAME: &str = "csid.db";
pub(super) const LOG: &str = "csid.db-wal";
const BORN: &str = "csid.db.new";
const NEXT: &str = "csid.db.next";

/// The directory of the journal, which no other csid has while this lives.
pub struct JournalDirectory {
    pub(super) directory: PathBuf,
    /// csid's runtime directory, which a boot empties.
    pub(super) runtime: PathBuf,
    /// The directory, locked while this lives.
    fd: OwnedFd,
}

impl JournalDirectory {
    /// Makes the directory 0700 if it is not there, and locks it. In `runtime`, which a boot empties, is noted how far the journal came.
    pub fn take(directory: &Path, runtime: &Path) -> Result<JournalDirectory, StoreError> {
        match rustix::fs::mkdir(directory, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(file("create", directory)(error)),
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(directory, flags, Mode::empty()).map_err(|error| match error {
            Errno::NOTDIR | Errno::LOOP => StoreError::Unsafe {
                path: directory.into(),
                why: "it is not a directory, or a symbolic link".into(),
            },
            error => file("open", directory)(error),
        })?;
        private(&rustix::fs::fstat(&fd).map_err(file("look at", directory))?, directory)?;
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(JournalDirectory { directory: directory.into(), runtime: runtime.into(), fd }),
            Err(Errno::WOULDBLOCK) => Err(StoreError::Held { path: directory.into() }),
            Err(error) => Err(file("lock", directory)(error)),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The length of a file, if it is there; an error if it is anything but a private regular file.
    pub fn length(&self, name: &str) -> Result<Option<u64>, StoreError> {
        let path = self.path(name);
        let stat = match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(file("look at", &path)(error)),
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_nlink != 1 {
            let why = "it is not a regular file with a single name".into();
            return Err(StoreError::Unsafe { path, why });
        }
        private(&stat, &path)?;
        Ok(Some(stat.st_size.unsigned_abs()))
    }

    /// The first journal.
    pub fn create(&self, fill: impl FnOnce(&Path) -> Result<(), StoreError>) -> Result<(), StoreError> {
        self.bear(NAME, fill)
    }

    /// Another journal in place of the damaged one; where that is kept.
    pub fn replace(&self, fill: impl FnOnce(&Path) -> Result<(), StoreError>) -> Result<PathBuf, StoreError> {
        self.bear(NEXT, fill)?;
        self.finish().map(Option::unwrap_or_default)
    }

    /// Have a file written, and give it its name when all of it is on the disk.
    fn bear(&self, name: &str, fill: impl FnOnce(&Path) -> Result<(), StoreError>) -> Result<(), StoreError> {
        let born = self.path(BORN);
        let clear = || {
            for leftover in [BORN, "csid.db.new-journal"] {
                match rustix::fs::unlinkat(&self.fd, leftover, AtFlags::empty()) {
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(error) => return Err(file("remove the leftover", &self.path(leftover))(error)),
                }
            }
            Ok(())
        };
        clear()?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.fd, BORN, flags, Mode::RUSR | Mode::WUSR)
            .map_err(file("create", &born))?;
        let written = fill(&born).and_then(|()| rustix::fs::fsync(&made).map_err(file("sync", &born)));
        if let Err(error) = written {
            // What was written of it may be what fills the disk.
            clear()?;
            return Err(error);
        }
        self.rename(BORN, name)?;
        self.sync()
    }

    /// Go on with a replacement that was begun, if one was; where the damaged journal is kept.
    pub fn finish(&self) -> Result<Option<PathBuf>, StoreError> {
        if self.length(NEXT)?.is_none() {
            return Ok(None);
        }
        // The moment in which the new one was made: the same, however often this is begun.
        let next = std::fs::symlink_metadata(self.path(NEXT)).map_err(|source| StoreError::File {
            step: "look at",
            path: self.path(NEXT),
            source,
        })?;
        let aside = format!("{NAME}.corrupt-{}.{:09}", next.mtime(), next.mtime_nsec());
        for (name, aside) in [(LOG, format!("{aside}-wal")), (NAME, aside.clone())] {
            // Not opened before that was seen to be a regular file.
            if self.length(name)?.is_some() {
                self.sync_file(name)?;
                self.rename(name, &aside)?;
            }
        }
        self.sync()?;
        mark::forget(&self.runtime);
        self.rename(NEXT, NAME)?;
        self.sync()?;
        Ok(Some(self.path(&aside)))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), StoreError> {
        rustix::fs::renameat(&self.fd, from, &self.fd, to).map_err(file("name", &self.path(to)))
    }

    fn sync_file(&self, name: &str) -> Result<(), StoreError> {
        let path = self.path(name);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty()).map_err(file("open", &path))?;
        rustix::fs::fsync(fd).map_err(file("sync", &path))
    }

    fn sync(&self) -> Result<(), StoreError> {
        rustix::fs::fsync(&self.fd).map_err(file("sync", &self.directory))
    }
}

fn private(stat: &Stat, path: &Path) -> Result<(), StoreError> {
    let own = rustix::process::geteuid().as_raw();
    let why = if stat.st_uid != 0 && stat.st_uid != own {
        format!("it belongs to uid {}; chown it to root", stat.st_uid)
    } else if stat.st_mode & 0o077 != 0 {
        format!("others have access to it (mode {:o}); chmod go= it", stat.st_mode & 0o7777)
    } else {
        return Ok(());
    };
    Err(StoreError::Unsafe { path: path.into(), why })
}
