//! The lock of a target. Of several mount.csi at one target one at a time asks csid, so that each knows what the others have mounted.

use std::{
    fs::{DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use super::unit;

/// The directory of the locks. It is root's, and goes with a boot.
const DIRECTORY: &str = "/run/csid/mounting";
/// The limit of a file's name, in bytes. Targets with the same beginning then share a lock.
const NAME_LIMIT: usize = 255;
const PAUSE: Duration = Duration::from_millis(50);

/// The lock of a target, until this value is dropped.
pub struct TargetLock {
    path: PathBuf,
    _file: File,
}

impl TargetLock {
    /// Waits for the lock. `None`: it is another process's at the deadline.
    pub async fn wait(target: &str, deadline: Instant) -> io::Result<Option<Self>> {
        Self::wait_in(Path::new(DIRECTORY), target, deadline).await
    }

    async fn wait_in(directory: &Path, target: &str, deadline: Instant) -> io::Result<Option<Self>> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let mut name = unit::of_target(target);
        name.truncate(NAME_LIMIT);
        let path = directory.join(name);
        let mut file = open(&path)?;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_at(&file, &path)? => return Ok(Some(Self { path, _file: file })),
                // The process that had the lock has removed the file since it was opened here.
                Ok(()) => file = open(&path)?,
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => tokio::time::sleep(PAUSE).await,
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    File::options().create(true).truncate(false).write(true).mode(0o600).open(path)
}

/// Returns whether the open file is the one at the path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let number = |file: std::fs::Metadata| (file.dev(), file.ino());
    let own = number(file.metadata()?);
    Ok(std::fs::metadata(path).is_ok_and(|there| number(there) == own))
}

impl Drop for TargetLock {
    fn drop(&mut self) {
        // The lock is still this process's: a file that another process locks next is a new one.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn taken(directory: &Path, target: &str) -> Option<TargetLock> {
        TargetLock::wait_in(directory, target, Instant::now()).await.unwrap()
    }

    #[tokio::test]
    async fn lock_is_of_one_target_and_one_holder() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path().join("mounting");
        let first = taken(&at, "/srv/a").await.expect("nobody has it");
        assert!(taken(&at, "/srv/a").await.is_none());
        let other = taken(&at, "/srv/b").await.expect("another target");
        drop(first);
        drop(taken(&at, "/srv/a").await.expect("it was dropped"));
        drop(other);
        assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0, "no file is left");
        let long = format!("/{}", "a".repeat(4000));
        assert!(taken(&at, &long).await.is_some());
    }

    /// A holder removes its file while others wait for it: two must never have the lock.
    #[test]
    fn removed_file_is_no_lock() {
        use std::sync::atomic::{AtomicUsize, Ordering};

        let directory = tempfile::tempdir().unwrap();
        let (at, holders) = (directory.path(), AtomicUsize::new(0));
        let work = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            for _ in 0..20 {
                let end = Instant::now() + Duration::from_secs(60);
                let lock = runtime.block_on(TargetLock::wait_in(at, "/srv/a", end)).unwrap().unwrap();
                assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "another thread has the lock");
                std::thread::yield_now();
                holders.fetch_sub(1, Ordering::SeqCst);
                drop(lock);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(work);
            }
        });
    }
}
