//! The users of volumes, as the engines count them: an empty file `DIRECTORY/SHA256(VOLUME)/SHA256(ID)` for each. The directory is on a
//! tmpfs, because no container outlives the boot. The files tell who is left; csid's rows tell what is mounted.

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Result};
use std::path::PathBuf;

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

/// The users of all volumes of one namespace.
pub struct Users {
    directory: PathBuf,
}

impl Users {
    pub fn new(directory: PathBuf) -> Self {
        Users { directory }
    }

    /// Adds a user. Returns false if it is there already.
    pub fn add(&self, volume: &VolumeHash, id: &str) -> Result<bool> {
        let of_volume = self.directory.join(&volume.0);
        fs::create_dir_all(&of_volume)?;
        match fs::OpenOptions::new().write(true).create_new(true).open(of_volume.join(hash(id))) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes a user, if it is there.
    pub fn remove(&self, volume: &VolumeHash, id: &str) -> Result<()> {
        self.remove_file(volume, &hash(id))
    }

    /// Removes all users of an engine.
    pub fn clear(&self, volume: &VolumeHash, engine: Engine) -> Result<()> {
        for file in self.files(volume)? {
            if of(&file) == engine {
                self.remove_file(volume, &file)?;
            }
        }
        Ok(())
    }

    /// Returns whether an engine has a user of the volume.
    pub fn has(&self, volume: &VolumeHash, engine: Engine) -> Result<bool> {
        Ok(self.files(volume)?.iter().any(|file| of(file) == engine))
    }

    /// Returns the volumes that have users, with the engines of these.
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
        // The kernel refuses this while another user is in it.
        let _ = fs::remove_dir(of_volume);
        Ok(())
    }
}

/// Returns the engine of a user's file.
fn of(file: &str) -> Engine {
    let podman = hash(Engine::PODMAN_ID);
    if file == podman { Engine::Podman } else { Engine::Docker }
}

/// Returns the names in a directory. Empty: there is no directory.
fn names(directory: &std::path::Path) -> Result<Vec<String>> {
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
    fn each_engines_users_are_counted_apart() {
        let directory = tempfile::tempdir().unwrap();
        let users = Users::new(directory.path().join("users"));
        let (pg, other) = (VolumeHash::of("a/b"), VolumeHash::of("../c"));
        assert!(!users.has(&pg, Engine::Docker).unwrap() && users.all().unwrap().is_empty());
        assert!(users.add(&pg, "one").unwrap() && users.add(&pg, "two").unwrap());
        assert!(!users.add(&pg, "one").unwrap(), "a repeated Mount");
        assert!(users.add(&pg, Engine::PODMAN_ID).unwrap() && users.add(&other, "../x").unwrap());
        users.remove(&pg, "one").unwrap();
        users.remove(&pg, "one").unwrap();
        assert!(users.has(&pg, Engine::Docker).unwrap());
        users.remove(&pg, "two").unwrap();
        assert!(!users.has(&pg, Engine::Docker).unwrap() && users.has(&pg, Engine::Podman).unwrap());
        assert_eq!(users.all().unwrap(), BTreeSet::from([(pg.clone(), "podman"), (other.clone(), "docker")]));
        users.clear(&pg, Engine::Podman).unwrap();
        users.clear(&other, Engine::Podman).unwrap();
        assert_eq!(users.all().unwrap(), BTreeSet::from([(other, "docker")]));
        assert_eq!(
            fs::read_dir(directory.path().join("users")).unwrap().count(),
            1,
            "an empty directory goes"
        );
    }
}
