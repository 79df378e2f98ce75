//! The mounts of this process's mount namespace.

use std::{
    ffi::{OsStr, OsString},
    io,
    path::Path,
};

use super::octal::unescaped;

pub struct MountTable(Vec<MountEntry>);

/// A mount, as a line of /proc/self/mountinfo shows it.
#[derive(Clone)]
pub struct MountEntry {
    id: u64,
    parent: u64,
    /// The numbers of the file system's device, and the directory of the file system that is the mount's root.
    content: (String, OsString),
    point: OsString,
    pub fs_type: OsString,
    pub source: OsString,
}

impl MountTable {
    pub fn read() -> io::Result<Self> {
        Ok(Self::parse(&String::from_utf8_lossy(&std::fs::read("/proc/self/mountinfo")?)))
    }

    fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(MountEntry::parse).collect())
    }

    /// Returns the mount that a walk to the path ends on. `None`: the path is no mount point.
    pub fn at(&self, point: &OsStr) -> Option<&MountEntry> {
        let mut here = self.0.iter().filter(|entry| entry.point == point);
        let below: Vec<_> = here.clone().map(|entry| entry.parent).collect();
        here.find(|entry| !below.contains(&entry.id))
    }

    /// Returns the mounts below a directory.
    pub fn below(&self, directory: &OsStr) -> impl Iterator<Item = &MountEntry> {
        let is_below = move |entry: &&MountEntry| {
            let point = Path::new(&entry.point);
            point.starts_with(directory) && point != Path::new(directory)
        };
        self.0.iter().filter(is_below)
    }

    /// Returns the mount points of a source.
    pub fn of_source(&self, source: &str) -> impl Iterator<Item = &Path> {
        self.0.iter().filter(move |entry| entry.source == source).map(|entry| Path::new(&entry.point))
    }

    /// Returns how many mounts are at a directory and below it.
    pub fn within(&self, directory: &Path) -> usize {
        self.0.iter().filter(|entry| Path::new(&entry.point).starts_with(directory)).count()
    }

    /// Returns whether the mount at the path has an automount below it, at the same path.
    pub fn is_on_automount(&self, point: &OsStr) -> bool {
        let parent = self.at(point).and_then(|top| self.0.iter().find(|entry| entry.id == top.parent));
        parent.is_some_and(|parent| parent.point == point && parent.fs_type == "autofs")
    }
}

impl MountEntry {
    pub fn parse(line: &str) -> Option<Self> {
        let (first, last) = line.split_once(" - ")?;
        let mut first = first.split(' ');
        let mut next = || first.next();
        let (id, parent, device, root, point) =
            (next()?.parse().ok()?, next()?.parse().ok()?, next()?.to_owned(), next()?, next()?);
        let mut last = last.split(' ');
        Some(Self {
            id,
            parent,
            content: (device, unescaped(root)),
            point: unescaped(point),
            fs_type: unescaped(last.next()?),
            source: unescaped(last.next()?),
        })
    }

    /// Returns the directory of the file system that is the mount's root.
    pub fn root(&self) -> &OsString {
        &self.content.1
    }

    /// Returns whether both mounts show the same directory of the same file system.
    pub fn shows_the_same(&self, other: &Self) -> bool {
        self.content == other.content
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = r"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
40 22 0:44 / /srv/auto rw - autofs systemd-1 rw,fd=44,pgrp=1
41 40 7:3 / /srv/auto rw,nosuid shared:7 - ext4 /dev/loop3 rw
42 22 7:3 / /var/lib/csid/p rw shared:8 - ext4 /dev/loop3 rw
43 22 7:3 /sub /srv/a\040b rw - ext4 /dev/loop3 rw
44 22 0:50 / /srv/bare rw - autofs systemd-1 rw
";

    #[test]
    fn topmost_mount_is_found() {
        let table = MountTable::parse(TABLE);
        let at = |point: &str| table.at(OsStr::new(point));
        assert_eq!(at("/srv/auto").map(|entry| entry.source.as_os_str()), Some(OsStr::new("/dev/loop3")));
        assert_eq!(at("/srv/bare").map(|entry| entry.fs_type.as_os_str()), Some(OsStr::new("autofs")));
        assert!(at("/srv").is_none() && at(r"/srv/a\040b").is_none());
        let (bound, own, sub) = (at("/srv/auto"), at("/var/lib/csid/p"), at("/srv/a b"));
        assert!(bound.unwrap().shows_the_same(own.unwrap()));
        assert!(!sub.unwrap().shows_the_same(own.unwrap()));
    }

    #[test]
    fn mounts_within_a_directory_are_counted() {
        let table = MountTable::parse(TABLE);
        for (directory, count) in [
            ("/srv", 4),
            ("/srv/auto", 2),
            ("/var/lib/csid", 1),
            ("/var/lib/csid/p", 1),
            ("/var/lib/csi", 0),
            ("/srv/a", 0),
        ] {
            assert_eq!(table.within(Path::new(directory)), count, "{directory}");
        }
    }

    #[test]
    fn automount_below_a_mount_is_seen() {
        let table = MountTable::parse(TABLE);
        for (point, is) in [("/srv/auto", true), ("/srv/bare", false), ("/srv/a b", false), ("/none", false)]
        {
            assert_eq!(table.is_on_automount(OsStr::new(point)), is, "{point}");
        }
    }
}
