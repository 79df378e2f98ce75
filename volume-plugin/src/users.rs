//! The uses of volumes, as the engines count them: an empty file `DIRECTORY/SHA256(VOLUME)/SHA256(ID).N` for each Mount that was answered
//! and not undone. The directory is on a tmpfs, because no container outlives the boot. The files tell who is left; csid's rows tell what
//! is mounted.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use crate::engine::Engine;

/// A volume in the directory of users: the hash of its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeHash(String);

impl VolumeHash {
    pub fn of(volume: &str) -> Self {
        VolumeHash(hash(volume))
    }
}

fn hash(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The uses of a volume by one ID.
const MOST: usize = 1024;

/// A use that was added. `file`: its file; `None`: it was there already.
pub struct Use {
    file: Option<String>,
}

/// The uses of all volumes of one namespace.
pub struct Users {
    directory: PathBuf,
    /// Locked: two processes for one namespace would each unmount what the other's containers use.
    _lock: File,
}

impl Users {
    /// Opens the directory of a namespace in `runtime`.
    ///
    /// # Errors
    ///
    /// `WouldBlock`: another process has it.
    pub fn open(runtime: &Path, namespace: &str) -> Result<Self> {
        let directory = runtime.join(hash(namespace));
        fs::create_dir_all(&directory)?;
        let lock = File::open(&directory)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(Error::from)?;
        Ok(Users { directory, _lock: lock })
    }

    /// Adds a use. Docker mounts once more under the same ID for `docker cp`, and unmounts once more. Podman counts by itself: all that
    /// it has is one use.
    pub fn add(&self, volume: &VolumeHash, id: &str) -> Result<Use> {
        let of_volume = self.directory.join(&volume.0);
        fs::create_dir_all(&of_volume)?;
        for number in 0..MOST {
            let file = format!("{}.{number}", hash(id));
            let made = fs::OpenOptions::new().write(true).create_new(true).open(of_volume.join(&file));
            match (made, Engine::of(id)) {
                (Ok(_), _) => return Ok(Use { file: Some(file) }),
                (Err(error), Engine::Podman) if error.kind() == ErrorKind::AlreadyExists => {
                    return Ok(Use { file: None });
                }
                (Err(error), Engine::Docker) if error.kind() == ErrorKind::AlreadyExists => {}
                (Err(error), _) => return Err(error),
            }
        }
        Err(Error::other(format!("one ID has {MOST} uses of a volume, and the limit is {MOST}")))
    }

    /// Removes a use that [`Self::add`] has added.
    pub fn undo(&self, volume: &VolumeHash, one: &Use) -> Result<()> {
        one.file.as_ref().map_or(Ok(()), |file| self.remove_file(volume, file))
    }

    /// Removes one use of an ID, if there is one.
    pub fn remove(&self, volume: &VolumeHash, id: &str) -> Result<()> {
        let of_id = format!("{}.", hash(id));
        let one = self.files(volume)?.into_iter().find(|file| file.starts_with(&of_id));
        one.map_or(Ok(()), |file| self.remove_file(volume, &file))
    }

    /// Removes all uses of an engine.
    pub fn clear(&self, volume: &VolumeHash, engine: Engine) -> Result<()> {
        for file in self.files(volume)? {
            if of(&file) == engine {
                self.remove_file(volume, &file)?;
            }
        }
        Ok(())
    }

    /// Returns whether an engine uses the volume.
    pub fn has(&self, volume: &VolumeHash, engine: Engine) -> Result<bool> {
        Ok(self.files(volume)?.iter().any(|file| of(file) == engine))
    }

    /// Returns the volumes that are used, with the engines that use them.
    pub fn all(&self) -> Result<BTreeSet<(VolumeHash, &'static str)>> {
        let mut found = BTreeSet::new();
        for volume in names(&self.directory)? {
            let volume = VolumeHash(volume);
            for file in self.files(&volume)? {
                found.insert((volume.clone(), of(&file).consumer()));
            }
        }
        Ok(found)
    }

    fn files(&self, volume: &VolumeHash) -> Result<Vec<String>> {
        names(&self.directory.join(&volume.0))
    }

    fn remove_file(&self, volume: &VolumeHash, file: &str) -> Result<()> {
        let of_volume = self.directory.join(&volume.0);
        absent_is_done(fs::remove_file(of_volume.join(file)))?;
        // The kernel refuses this while another use is in it.
        let _ = fs::remove_dir(of_volume);
        Ok(())
    }
}

/// Returns the engine of a use.
fn of(file: &str) -> Engine {
    let is_podmans = file.split('.').next() == Some(&hash(Engine::PODMAN_ID));
    if is_podmans { Engine::Podman } else { Engine::Docker }
}

/// Returns the names in a directory. Empty: there is no directory.
fn names(directory: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

fn absent_is_done(result: Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engines_uses_are_counted_apart() {
        let directory = tempfile::tempdir().unwrap();
        let users = Users::open(directory.path(), "prod/../x").unwrap();
        let (pg, other) = (VolumeHash::of("a/b"), VolumeHash::of("../c"));
        assert!(!users.has(&pg, Engine::Docker).unwrap() && users.all().unwrap().is_empty());
        users.add(&pg, "one").unwrap();
        users.add(&pg, Engine::PODMAN_ID).unwrap();
        users.add(&other, "../x").unwrap();
        users.remove(&pg, "one").unwrap();
        users.remove(&pg, "one").unwrap();
        assert!(!users.has(&pg, Engine::Docker).unwrap() && users.has(&pg, Engine::Podman).unwrap());
        assert_eq!(users.all().unwrap(), BTreeSet::from([(pg.clone(), "podman"), (other.clone(), "docker")]));
        users.clear(&pg, Engine::Podman).unwrap();
        users.clear(&other, Engine::Podman).unwrap();
        assert_eq!(users.all().unwrap(), BTreeSet::from([(other, "docker")]));
        assert_eq!(fs::read_dir(&users.directory).unwrap().count(), 1, "an empty directory goes");
    }

    #[test]
    fn docker_counts_an_id_twice_and_podman_once() {
        let directory = tempfile::tempdir().unwrap();
        let users = Users::open(directory.path(), "prod").unwrap();
        let pg = VolumeHash::of("pg");
        for (id, engine, is_left) in
            [("one", Engine::Docker, true), (Engine::PODMAN_ID, Engine::Podman, false)]
        {
            for _ in 0..2 {
                users.add(&pg, id).unwrap();
            }
            users.remove(&pg, id).unwrap();
            assert_eq!(users.has(&pg, engine).unwrap(), is_left);
            let added = users.add(&pg, id).unwrap();
            users.undo(&pg, &added).unwrap();
            assert_eq!(users.has(&pg, engine).unwrap(), is_left);
        }
    }

    #[test]
    fn namespace_has_one_process() {
        let directory = tempfile::tempdir().unwrap();
        let users = Users::open(directory.path(), "prod").unwrap();
        assert_eq!(Users::open(directory.path(), "prod").err().unwrap().kind(), ErrorKind::WouldBlock);
        Users::open(directory.path(), "test").unwrap();
        drop(users);
        Users::open(directory.path(), "prod").unwrap();
    }
}
