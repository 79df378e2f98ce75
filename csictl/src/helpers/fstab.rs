//! The lines of fstab with the type csi.

use std::path::Path;

use super::{
    failure::HelperFailure,
    options::{HelperOptions, field, volume, words},
    unit,
};
use crate::args::FSTAB;

/// A line of the type csi.
pub struct CsiLine {
    source: String,
    pub target: String,
    options: String,
}

fn csi_lines(text: &str) -> impl Iterator<Item = CsiLine> {
    text.lines().filter(|line| !line.trim_start().starts_with('#')).filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (source, target, kind) = (fields.next()?, fields.next()?, fields.next()?);
        (kind == "csi" || kind.starts_with("csi.")).then_some(())?;
        let target = field(target)?;
        let target = if target.len() > 1 { target.trim_end_matches('/').to_owned() } else { target };
        Some(CsiLine { source: field(source)?, target, options: field(fields.next().unwrap_or(""))? })
    })
}

impl CsiLine {
    /// Returns whether systemd mounts the file system before csid runs.
    fn is_too_early(&self) -> bool {
        !words(&self.options).any(|word| ["_netdev", "noauto"].contains(&word))
    }

    fn needs_netdev(&self) -> String {
        format!(
            "/etc/fstab: the line of {} needs _netdev: without it the next boot tries it before csid runs, and ends in the \
             emergency shell",
            self.target
        )
    }

    /// Returns whether systemd mounts the file system at each boot.
    pub fn is_automatic(&self) -> bool {
        !words(&self.options).any(|word| word == "noauto" || word == "x-systemd.automount")
    }

    /// Returns whether systemd loads a unit for the line without one that names it.
    pub fn is_loaded(&self) -> bool {
        self.is_automatic() || words(&self.options).any(|word| word == "x-systemd.automount")
    }

    /// Returns what mount.csi would refuse in the line. `None`: nothing.
    pub fn fault(&self) -> Option<String> {
        if self.is_too_early() {
            return Some(self.needs_netdev());
        }
        if !words(&self.options).any(|word| word == "_netdev") {
            return Some(format!(
                "/etc/fstab: the line of {} needs _netdev: without it the volume is still mounted when csid stops",
                self.target
            ));
        }
        let of_line = |why: &str| format!("/etc/fstab: the line of {}: {why}", self.target);
        if volume(&self.source).is_none() {
            return Some(of_line(&format!("{} is not NAMESPACE/VOLUME", self.source)));
        }
        match HelperOptions::parse(&self.options, false) {
            Err(error) => Some(of_line(&error.text())),
            Ok(options) => consumer(&options, &self.target).err().map(|error| of_line(&error.text())),
        }
    }
}

/// Returns the consumer's name for a mount at `target`.
pub fn consumer(options: &HelperOptions, target: &str) -> Result<String, HelperFailure> {
    let name = options.consumer.clone().unwrap_or_else(|| unit::of_target(target));
    if name.len() <= unit::CONSUMER_LIMIT {
        return Ok(name);
    }
    let (length, limit) = (name.len(), unit::CONSUMER_LIMIT);
    Err(HelperFailure::Usage(format!(
        "the consumer's name {name} has {length} bytes, the limit is {limit}; csi.consumer=NAME sets another"
    )))
}

/// Returns the text against the line of `target` if the next boot would end at it. `None`: there is no such line.
pub fn ends_the_boot(target: &str) -> Option<String> {
    let text = std::fs::read_to_string(FSTAB).ok()?;
    csi_lines(&text).find(|line| line.target == target && line.is_too_early()).map(|line| line.needs_netdev())
}

/// Returns the source in the line of `target`. `None`: there is no such line.
pub fn source_of(target: &str) -> Option<String> {
    let text = std::fs::read_to_string(FSTAB).ok()?;
    csi_lines(&text).find(|line| line.target == target).map(|line| line.source)
}

/// Returns the lines of the type csi. A file that cannot be read has none.
pub fn lines(path: &Path) -> Vec<CsiLine> {
    csi_lines(&String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default())).collect()
}

/// Returns what is wrong with the lines of a file, which may be missing.
pub fn faults(path: &Path) -> Vec<String> {
    let text = match std::fs::read(path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return vec![format!("cannot read {}: {error}", path.display())],
    };
    csi_lines(&text).filter_map(|line| line.fault()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults_of(text: &str) -> Vec<String> {
        csi_lines(text).filter_map(|line| line.fault()).collect()
    }

    #[test]
    fn line_without_netdev_is_a_fault() {
        let early = "prod/pg /srv/pg csi defaults 0 0";
        let due = "/etc/fstab: the line of /srv/pg needs _netdev: without it the next boot tries it before csid runs, and ends \
                   in the emergency shell";
        assert_eq!(faults_of(early), [due]);
        for (line, is_fault) in [
            ("prod/pg /srv/pg csi", true),
            ("prod/pg /srv/pg csi nofail,x_netdev 0 0", true),
            ("prod/pg /srv/pg csi.xfs defaults", true),
            ("prod/pg /srv/pg csi _netdev,noatime 0 0", false),
            ("prod/pg /srv/pg csi noauto,x-systemd.automount 0 0", true),
            ("prod/pg /srv/pg csi noauto,x-systemd.automount,_netdev 0 0", false),
            ("#prod/pg /srv/pg csi defaults 0 0", false),
            ("/dev/vda1 / ext4 defaults 0 1", false),
            ("", false),
        ] {
            assert_eq!(faults_of(line).len(), usize::from(is_fault), "{line}");
        }
    }

    #[test]
    fn every_fault_of_a_file_is_named() {
        let long = "a".repeat(140);
        let text = format!(
            "prod/pg\t/srv/a\\040b/\tcsi\tdefaults\n\
             pg /srv/c csi _netdev\n\
             prod/pg /srv/d csi _netdev,csi.tags=x\n\
             prod/pg /srv/{long} csi _netdev\n\
             prod/pg /srv/{long} csi _netdev,csi.consumer=pg\n\
             prod/pg /srv/e csi _netdev,csi.tag=x\n"
        );
        let faults = faults_of(&text);
        let due = [
            "/srv/a b needs _netdev",
            "/srv/c: pg is not NAMESPACE/VOLUME",
            "/srv/d: unknown option csi.tags=x",
            "has 150 bytes, the limit is 128",
        ];
        assert_eq!(faults.len(), due.len(), "{faults:#?}");
        assert!(faults.iter().zip(due).all(|(fault, due)| fault.contains(due)), "{faults:#?}");
    }

    #[test]
    fn missing_file_has_no_faults() {
        let directory = tempfile::tempdir().unwrap();
        assert!(faults(&directory.path().join("fstab")).is_empty());
        assert_eq!(faults(directory.path()).len(), 1, "a directory cannot be read");
    }
}
