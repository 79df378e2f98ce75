//! The record's entries, as they are written and read again.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Before each entry. csid may be killed within the write of one: what does not reach to the next mark is left out.
const MARK: &[u8] = b"\n#entry ";

/// Something that was done to a file, named without its directory; or what the test has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Open {
        file: String,
    },
    Write {
        file: String,
        offset: usize,
        bytes: Vec<u8>,
    },
    Truncate {
        file: String,
        length: usize,
    },
    Sync {
        file: String,
    },
    /// `synced`: with the directory.
    Delete {
        file: String,
        synced: bool,
    },
    Note(String),
}

pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// An entry's words, and the bytes of a write, in one write(2): no other writer comes in between.
pub fn append(mut record: &File, words: &str, bytes: &[u8]) -> io::Result<()> {
    record.write_all(&[MARK, words.as_bytes(), b"\n", bytes].concat())
}

pub fn read(path: &Path) -> io::Result<Vec<Entry>> {
    Ok(parse(&std::fs::read(path)?))
}

fn parse(mut rest: &[u8]) -> Vec<Entry> {
    let mut entries = Vec::new();
    while let Some(mark) = rest.windows(MARK.len()).position(|window| window == MARK) {
        rest = &rest[mark + MARK.len()..];
        if let Some((entry, after)) = one(rest)
            && (after.is_empty() || after.starts_with(MARK))
        {
            entries.push(entry);
            rest = after;
        }
    }
    entries
}

/// The entry at the beginning of `text`, and what comes after it.
fn one(text: &[u8]) -> Option<(Entry, &[u8])> {
    let end = text.iter().position(|byte| *byte == b'\n')?;
    let (words, after) = (std::str::from_utf8(&text[..end]).ok()?, &text[end + 1..]);
    let (verb, rest) = words.split_once(' ')?;
    let mut arguments = rest.split(' ');
    let file = arguments.next()?.to_owned();
    let mut number = || arguments.next()?.parse::<usize>().ok();
    let entry = match verb {
        "open" => Entry::Open { file },
        "write" => {
            let (offset, length) = (number()?, number()?);
            let (bytes, after) = after.split_at_checked(length)?;
            return Some((Entry::Write { file, offset, bytes: bytes.to_vec() }, after));
        }
        "truncate" => Entry::Truncate { file, length: number()? },
        "sync" => Entry::Sync { file },
        "delete" => Entry::Delete { file, synced: number()? != 0 },
        "note" => Entry::Note(rest.to_owned()),
        _ => return None,
    };
    Some((entry, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_records_are_read_up_to_a_torn_write() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        let record = open(&path).unwrap();
        append(&record, "open a", b"").unwrap();
        append(&record, "write a 512 9", b"\n#entry x").unwrap();
        append(&record, "truncate a 7", b"").unwrap();
        append(&record, "write a 0 4096", b"killed here").unwrap();
        append(&record, "note two words", b"").unwrap();
        append(&record, "delete a 0", b"").unwrap();
        let file = || "a".to_owned();
        let due = [
            Entry::Open { file: file() },
            Entry::Write { file: file(), offset: 512, bytes: b"\n#entry x".to_vec() },
            Entry::Truncate { file: file(), length: 7 },
            Entry::Note("two words".to_owned()),
            Entry::Delete { file: file(), synced: false },
        ];
        assert_eq!(read(&path).unwrap(), due);
    }
}
