//! A log, read as it grows, and the logs of several hosts, read as one.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::iter::Peekable;
use std::path::{Path, PathBuf};

use crate::record::{self, Event, Record};

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
    type Item = Result<Record, LogError>;

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
        Some(record.map_err(|source| LogError::Parse { line: self.line, source }))
    }
}

/// The logs of several hosts of one plugin. Each log keeps its order, whatever its clock did. Numbers of connections and calls are unique over all
/// logs: that of a log, times how many logs there are, plus the place of the log.
pub struct Hosts {
    logs: Vec<Peekable<Reader>>,
    /// When the logs were opened. Later records are left out: those of a log that has been read to its end would be missing among them.
    opened: u64,
}

impl Hosts {
    pub fn open(logs: &[PathBuf]) -> Result<Self, LogError> {
        let opened = record::now();
        let logs = logs.iter().map(|log| Ok(Reader::open(log)?.peekable()));
        Ok(Hosts { logs: logs.collect::<Result<_, LogError>>()?, opened })
    }
}

/// Each event comes with the place of its log.
impl Iterator for Hosts {
    type Item = Result<(usize, Event), LogError>;

    fn next(&mut self) -> Option<Self::Item> {
        let heads = self.logs.iter_mut().enumerate().filter_map(|(at, log)| Some((at, log.peek()?)));
        // What cannot be read comes first.
        let first = heads.map(|(at, head)| (head.as_ref().map_or(0, |record| record.time), at)).min();
        let (_, at) = first.filter(|(time, _)| *time <= self.opened)?;
        let count = self.logs.len() as u64;
        let unique = |number: u64| number * count + at as u64;
        let record = self.logs[at].next()?;
        Some(record.map(|record| (at, record.event.numbered(unique))))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::record::{Mark, mark};

    fn written(log: &Path) -> File {
        File::options().create(true).append(true).open(log).unwrap()
    }

    /// One log has been read to its end, and both hosts go on.
    #[test]
    fn record_after_the_logs_were_opened_is_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let logs = ["one", "two"].map(|name| directory.path().join(name));
        for log in &logs {
            written(log);
            mark(log, Mark::Reboot).unwrap();
        }
        let mut hosts = Hosts::open(&logs).unwrap();
        let places: Vec<usize> = hosts.by_ref().take(2).map(|event| event.unwrap().0).collect();
        assert_eq!(places, [0, 1]);
        for log in &logs {
            mark(log, Mark::Reboot).unwrap();
        }
        assert!(hosts.next().is_none());
        let mut again = Hosts::open(&logs).unwrap();
        assert_eq!(again.by_ref().count(), 4, "a later reader has them");
        writeln!(written(&logs[1]), "no record").unwrap();
        assert!(Hosts::open(&logs).unwrap().any(|event| event.is_err()));
    }
}
