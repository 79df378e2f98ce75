//! Computes the disk after a power cut. It is pure: a disk, a record and a throw of the dice give another disk.
//!
//! A file holds what was written to it before its last sync, and any part of what came later: of two writes the second
//! alone, of one write some sectors. A directory holds its names as they were when it was last synced, or as they are.

use std::collections::{BTreeMap, BTreeSet};

use super::record::Entry;
use crate::dice::Dice;

/// The journal's directory: names and contents.
pub type Disk = BTreeMap<String, Vec<u8>>;

/// The bytes that a disk writes whole or not at all.
const SECTOR: usize = 512;

/// A file by its number: one that is deleted and made again is another.
type Names = BTreeMap<String, usize>;

#[derive(Default)]
struct Contents<'r> {
    synced: Vec<u8>,
    later: Vec<&'r Entry>,
}

/// The power goes at the end of `record`, which began on `before`.
pub fn cut(before: &Disk, record: &[Entry], dice: &mut Dice) -> Disk {
    let mut files: Vec<Contents<'_>> =
        before.values().map(|bytes| Contents { synced: bytes.clone(), later: Vec::new() }).collect();
    let mut names: Names = before.keys().cloned().zip(0..).collect();
    let mut synced_names = names.clone();
    for entry in record {
        match entry {
            Entry::Open { file } if names.contains_key(file) => {}
            Entry::Open { file } => {
                // The journal is born under another name: csid has synced the file and, after the rename, the
                // directory when it opens it.
                if let Some(born) = names.remove(&format!("{file}.new")) {
                    sync(&mut files[born]);
                    names.insert(file.clone(), born);
                    synced_names = names.clone();
                } else {
                    names.insert(file.clone(), files.len());
                    files.push(Contents::default());
                }
            }
            Entry::Write { file, .. } | Entry::Truncate { file, .. } => {
                files[names[file]].later.push(entry);
            }
            Entry::Sync { file } => {
                sync(&mut files[names[file]]);
                // The first sync of a log that SQLite made syncs its directory too.
                if synced_names.get(file) != names.get(file) {
                    synced_names = names.clone();
                }
            }
            Entry::Delete { file, synced } => {
                names.remove(file);
                if *synced {
                    synced_names = names.clone();
                }
            }
            Entry::Note(_) => {}
        }
    }
    // The part of the record that reached the disk: none, some or all.
    let reached = dice.of(&[0, 10, 50, 90, 100]);
    let all: BTreeSet<_> = names.keys().chain(synced_names.keys()).collect();
    let mut disk = Disk::new();
    for name in all {
        let entry = if dice.below(100) < reached { &names } else { &synced_names };
        let Some(file) = entry.get(name) else { continue };
        let mut bytes = files[*file].synced.clone();
        for later in &files[*file].later {
            reach(&mut bytes, later, reached, dice);
        }
        disk.insert(name.clone(), bytes);
    }
    disk
}

fn sync(file: &mut Contents<'_>) {
    for entry in std::mem::take(&mut file.later) {
        match entry {
            Entry::Write { offset, bytes, .. } => put(&mut file.synced, *offset, bytes),
            Entry::Truncate { length, .. } => file.synced.resize(*length, 0),
            _ => {}
        }
    }
}

/// Applies the part of an unsynced entry that reached the disk.
fn reach(disk: &mut Vec<u8>, entry: &Entry, reached: u64, dice: &mut Dice) {
    match entry {
        Entry::Write { offset, bytes, .. } if dice.once_in(4) => {
            let mut at = 0;
            while at < bytes.len() {
                let end = bytes.len().min((offset + at) / SECTOR * SECTOR + SECTOR - offset);
                if dice.below(100) < reached {
                    put(disk, offset + at, &bytes[at..end]);
                }
                at = end;
            }
        }
        Entry::Write { offset, bytes, .. } if dice.below(100) < reached => put(disk, *offset, bytes),
        Entry::Truncate { length, .. } if dice.below(100) < reached => disk.resize(*length, 0),
        _ => {}
    }
}

fn put(disk: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    let end = offset + bytes.len();
    if disk.len() < end {
        disk.resize(end, 0);
    }
    disk[offset..end].copy_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(file: &str, offset: usize, bytes: &[u8]) -> Entry {
        Entry::Write { file: file.to_owned(), offset, bytes: bytes.to_vec() }
    }

    fn synced(file: &str) -> Entry {
        Entry::Sync { file: file.to_owned() }
    }

    fn open(file: &str) -> Entry {
        Entry::Open { file: file.to_owned() }
    }

    fn disk(files: &[(&str, &[u8])]) -> Disk {
        files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect()
    }

    /// Every disk that 2,000 cuts at the end of the record leave.
    fn cuts(before: &Disk, record: &[Entry]) -> BTreeSet<Disk> {
        (0..2000).map(|seed| cut(before, record, &mut Dice::new(seed, 0))).collect()
    }

    #[test]
    fn synced_data_stays_and_unsynced_may() {
        let before = disk(&[("a", b"....")]);
        let record = [write("a", 0, b"1"), synced("a"), write("a", 1, b"2"), write("a", 2, b"3")];
        let due = [&b"1..."[..], b"12..", b"1.3.", b"123."].map(|bytes| disk(&[("a", bytes)]));
        assert_eq!(cuts(&before, &record), due.into());
        assert_eq!(cuts(&before, &record[..2]), [disk(&[("a", b"1...")])].into());
    }

    #[test]
    fn write_tears_at_sectors_alone() {
        let before = disk(&[("a", &[b'.'; 1536])]);
        let record = [write("a", 500, &[b'x'; 600])];
        let mut due = BTreeSet::new();
        for parts in 0..8 {
            let mut bytes = [b'.'; 1536];
            for (part, sector) in [500..512, 512..1024, 1024..1100].into_iter().enumerate() {
                if parts & 1 << part != 0 {
                    bytes[sector].fill(b'x');
                }
            }
            due.insert(disk(&[("a", &bytes)]));
        }
        assert_eq!(cuts(&before, &record), due);
    }

    #[test]
    fn truncation_is_lost_apart_from_the_write_before() {
        let before = disk(&[("a", b"abc")]);
        let truncate = Entry::Truncate { file: "a".to_owned(), length: 1 };
        let record = [write("a", 0, b"A"), truncate.clone()];
        let due = [&b"abc"[..], b"Abc", b"a", b"A"].map(|bytes| disk(&[("a", bytes)]));
        assert_eq!(cuts(&before, &record), due.into());
        assert_eq!(cuts(&before, &[truncate, synced("a")]), [disk(&[("a", b"a")])].into());
    }

    #[test]
    fn names_are_as_last_synced_or_current() {
        let delete = |synced| Entry::Delete { file: "a".to_owned(), synced };
        let before = disk(&[("a", b"old")]);
        let gone = Disk::new();
        assert_eq!(cuts(&before, &[delete(false)]), [before.clone(), gone.clone()].into());
        assert_eq!(cuts(&before, &[delete(true)]), [gone.clone()].into());
        // Made again it is another file: either, but never one in the other.
        let again = [delete(false), open("a"), write("a", 0, b"n")];
        let made = [disk(&[("a", b"")]), disk(&[("a", b"n")])];
        assert_eq!(cuts(&before, &again), [before.clone()].into_iter().chain(made).collect());
        let again = [&again[..], &[synced("a")]].concat();
        assert_eq!(cuts(&before, &again), [disk(&[("a", b"n")])].into());
        let made = [open("b"), write("b", 0, b"n")];
        assert!(cuts(&gone, &made).contains(&gone), "a new file's name may be lost");
    }

    #[test]
    fn journal_is_born_when_it_is_opened_by_its_name() {
        let record = [open("db.new"), write("db.new", 0, b"n"), open("db")];
        assert_eq!(cuts(&Disk::new(), &record), [disk(&[("db", b"n")])].into());
        let early = cuts(&Disk::new(), &record[..2]);
        assert_eq!(early, [Disk::new(), disk(&[("db.new", b"")]), disk(&[("db.new", b"n")])].into());
    }

    #[test]
    fn same_seed_is_the_same_disk() {
        let record: Vec<_> = (0..100).map(|n| write("a", n * 100, &[1; 1000])).collect();
        let before = disk(&[("a", b"")]);
        let cut = |seed| cut(&before, &record, &mut Dice::new(seed, 0));
        assert_eq!(cut(7), cut(7));
        assert!((8..20).any(|seed| cut(seed) != cut(7)));
    }
}
