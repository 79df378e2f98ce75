//! A log read as it grows, and judged.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use crate::record::Record;
use crate::rules::{Checker, Verdict};

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
    checker: Checker,
}

impl Reader {
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = BufReader::new(File::open(path)?);
        Ok(Reader { file, line: 0, partial: Vec::new(), checker: Checker::default() })
    }

    /// The verdict on all that is written by now.
    pub fn verdict(&mut self) -> Result<&Verdict, LogError> {
        while self.file.read_until(b'\n', &mut self.partial)? > 0 {
            if self.partial.last() != Some(&b'\n') {
                break;
            }
            self.line += 1;
            let record: Record = serde_json::from_slice(&self.partial)
                .map_err(|source| LogError::Parse { line: self.line, source })?;
            self.partial.clear();
            self.checker.feed(&record.event);
        }
        Ok(self.checker.verdict())
    }
}
