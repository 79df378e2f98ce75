//! Identifies the boot. Kernel mounts last until the next one. In another boot the kernel's boot id differs, or the marker is gone
//! that csid left in its runtime directory, a tmpfs. In a container the id may stay the same.

use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::host::error::HostError;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const UUID: &str = "/proc/sys/kernel/random/uuid";
const MARKER: &str = "boot";

/// The boot's name, as the journal keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot(String);

impl Boot {
    /// Whether what was journalled under this name was made in this boot.
    pub fn same(&self, journalled: &str) -> bool {
        self.0 == journalled
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// This boot, by its id and the marker in `runtime`, which is made when it is not there.
pub fn current(runtime: &Path) -> Result<Boot, HostError> {
    let id = read(Path::new(BOOT_ID))?;
    let path = runtime.join(MARKER);
    let marker = match read(&path) {
        Ok(marker) => marker,
        Err(HostError::Os { source, .. }) if source.kind() == ErrorKind::NotFound => mark(&path)?,
        Err(error) => return Err(error),
    };
    Ok(Boot(format!("{} {}", id.trim(), marker.trim())))
}

fn read(path: &Path) -> Result<String, HostError> {
    std::fs::read_to_string(path).map_err(at("read", path))
}

/// Written whole and then named, so that csid killed here leaves no other boot behind.
fn mark(path: &Path) -> Result<String, HostError> {
    let marker = read(Path::new(UUID))?;
    let new = path.with_extension("new");
    let write = || {
        let mut file =
            std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(marker.as_bytes())?;
        std::fs::rename(&new, path)
    };
    write().map_err(at("write", path))?;
    Ok(marker)
}

fn at(step: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> HostError {
    move |source| HostError::Os { step: step.into(), path: path.into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_is_its_id_and_its_marker() {
        let runtime = tempfile::tempdir().unwrap();
        let first = current(runtime.path()).unwrap();
        assert!(current(runtime.path()).unwrap().same(first.as_str()));
        let id = read(Path::new(BOOT_ID)).unwrap();
        assert!(first.as_str().starts_with(id.trim()));
        std::fs::remove_file(runtime.path().join(MARKER)).unwrap();
        assert!(!current(runtime.path()).unwrap().same(first.as_str()));
        assert!(matches!(current(Path::new("/nowhere")), Err(HostError::Os { step, .. }) if step == "write"));
    }
}
