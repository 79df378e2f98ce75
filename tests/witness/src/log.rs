//! A log, read as it grows.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use crate::record::{Event, Record};

/// Why a log cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("cannot read the log")]
    Read(#[from] io::Error),
    #[error("line {line} of the log is no record of csi-witness")]
    Parse { line: usize, source: serde_json::Error },
}

/// Goes on where it was, so that a long log is read once.
pub struct Reader {
    file: BufReader<File>,
    line: usize,
    /// The begin of a line whose end is not written yet.
    partial: Vec<u8>,
}

impl Reader {
    pub fn open(path: &Path) -> Result<Self, LogError> {
        Ok(Reader { file: BufReader::new(File::open(path)?), line: 0, partial: Vec::new() })
    }
}

/// Ends after the last record that is written by now, and goes on when more is.
impl Iterator for Reader {
    type Item = Result<Event, LogError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Err(error) = self.file.read_until(b'\n', &mut self.partial) {
            return Some(Err(error.into()));
        }
        if self.partial.last() != Some(&b'\n') {
            return None;
        }
        self.line += 1;
        let record = serde_json::from_slice::<Record>(&self.partial);
        self.partial.clear();
        Some(record.map(|record| record.event).map_err(|source| LogError::Parse { line: self.line, source }))
    }
}
