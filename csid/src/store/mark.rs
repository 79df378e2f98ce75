//! How far the journal had come, noted outside of it after each commit: SQLite takes a log that is cut short or
//! damaged for one that a power cut ended, and drops what comes after. As long as the kernel is the same, nothing
//! that was committed is lost; a journal that knows less than its mark is damaged.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const NAME: &str = "journal-seen";
/// The noted commit of a journal whose log could not be synced.
pub(super) const UNSYNCED: u64 = u64::MAX;

/// The note in the runtime directory. Where it cannot be written less is noticed, and nothing else is lost.
pub(super) struct Mark {
    file: Option<File>,
    /// The boot and the journal it is about.
    about: String,
}

impl Mark {
    /// Begin to note; what is noted was looked at before.
    pub fn begin(runtime: &Path, boot: &str, journal: &str, newest: u64) -> Mark {
        let open =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(runtime.join(NAME));
        let mark = Mark { file: open.ok(), about: format!("{boot} {journal}") };
        mark.set(newest);
        mark
    }

    /// Notes that the log could not be synced. Until the next boot no journal is as new as this.
    pub fn set_unsynced(&self) {
        self.set(UNSYNCED);
    }

    pub fn set(&self, modify_index: u64) {
        if let Some(file) = &self.file {
            let _ = file.write_all_at(format!("{} {modify_index:020}\n", self.about).as_bytes(), 0);
        }
    }
}

/// The journal that csid had in this boot, and the newest commit that it saw.
pub(super) fn known(runtime: &Path, boot: &str) -> Option<(String, u64)> {
    let text = std::fs::read_to_string(runtime.join(NAME)).ok()?;
    let (noted, rest) = text.split_once(' ')?;
    let (journal, index) = rest.trim_end().split_once(' ')?;
    (!boot.is_empty() && noted == boot).then_some((journal.to_owned(), index.parse().ok()?))
}

/// What is noted is about a journal that is replaced.
pub(super) fn forget(runtime: &Path) {
    let _ = std::fs::remove_file(runtime.join(NAME));
}
