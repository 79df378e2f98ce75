//! The handle of a volume at its plugin, and its text: the contract's `external-id` and the journal's.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rusqlite::ToSql;
use rusqlite::types::{FromSql, FromSqlResult, Null, ToSqlOutput, ValueRef};

/// Prefix of the text of a [`VolumeHandle::Lost`]. csid refuses a plugin's id with this prefix.
pub const WITHOUT_ID: &str = "unidentified:";

/// The handle by which csid keeps a volume of a plugin. Only [`VolumeHandle::Known`] is one that the plugin understands.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum VolumeHandle {
    /// The plugin's id of the volume.
    Known(String),
    /// The name of a volume that the plugin is to create. The plugin has not answered with an id.
    Creating { name: String },
    /// The name of the volume's directories. A damaged journal had the id, and it could not be read.
    Lost { directory: String },
}

impl VolumeHandle {
    /// Reads the text of a volume that the plugin has created.
    pub fn of(text: String) -> Self {
        match text.strip_prefix(WITHOUT_ID).filter(|name| is_ours(name)) {
            Some(directory) => VolumeHandle::Lost { directory: directory.to_owned() },
            None => VolumeHandle::Known(text),
        }
    }

    /// Returns the text of the handle. Empty: the plugin has not answered with an id.
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            VolumeHandle::Known(id) => Cow::Borrowed(id),
            VolumeHandle::Creating { .. } => Cow::Borrowed(""),
            VolumeHandle::Lost { directory } => Cow::Owned(format!("{WITHOUT_ID}{directory}")),
        }
    }

    pub fn is_creating(&self) -> bool {
        matches!(self, VolumeHandle::Creating { .. })
    }

    pub fn is_lost(&self) -> bool {
        matches!(self, VolumeHandle::Lost { .. })
    }
}

impl fmt::Display for VolumeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

/// Writes the text. A volume in creation has NULL, and its name is in its registration.
impl ToSql for VolumeHandle {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(match self {
            VolumeHandle::Known(id) => ToSqlOutput::from(id.as_str()),
            VolumeHandle::Creating { .. } => ToSqlOutput::from(Null),
            VolumeHandle::Lost { .. } => ToSqlOutput::from(self.text().into_owned()),
        })
    }
}

impl FromSql for VolumeHandle {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        String::column_result(value).map(VolumeHandle::of)
    }
}

/// Directory of a plugin's root at which csid mounts a tmpfs. The directories of volumes are below it, or below the root.
pub const LIVE: &str = "live";
/// Directories in which each volume has its own.
pub const KINDS: [&str; 3] = [STAGING, PRIVATE, PUBLISH];
pub const STAGING: &str = "staging";
/// Directory in which plugins publish. Only root may enter it.
pub const PRIVATE: &str = "private";
pub const PUBLISH: &str = "publish";

/// Returns the directory of a volume, of one of the [`KINDS`], that `path` is in or that it is. `None`: there is none.
pub fn directory_of(path: &Path) -> Option<&Path> {
    directory_in(path, last_of(path.parent()?, &KINDS)?)
}

/// Returns the directory in `kind` that `path` is in or that it is. `None`: `path` is not below `kind`.
pub fn directory_in<'p>(path: &'p Path, kind: &Path) -> Option<&'p Path> {
    let rest = bytes(path).get(bytes(kind).len() + 1..)?;
    let name = rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len());
    Some(part(path, bytes(kind).len() + 1 + name))
}

/// Returns the longest part of `path` that ends with one of these names. The comparison is of bytes, because each mount has some.
pub fn last_of<'p>(path: &'p Path, names: &[&str]) -> Option<&'p Path> {
    let mut left = bytes(path);
    loop {
        let slash = left.iter().rposition(|byte| *byte == b'/')?;
        if names.iter().any(|name| left[slash + 1..] == *name.as_bytes()) {
            return Some(part(path, left.len()));
        }
        left = &left[..slash];
    }
}

pub fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// Returns the first `length` bytes of a path.
fn part(path: &Path, length: usize) -> &Path {
    Path::new(OsStr::from_bytes(&bytes(path)[..length]))
}

/// Returns whether `name` has the form of the names that csid gives to directories.
pub fn is_ours(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::*;

    const DIRECTORY: &str = "d41d8cd98f00b204e9800998ecf8427e";

    fn kept(handle: &VolumeHandle) -> (Option<String>, rusqlite::Result<VolumeHandle>) {
        let db = Connection::open_in_memory().unwrap();
        let text = db.query_row("SELECT ?1", [handle], |row| row.get(0)).unwrap();
        (text, db.query_row("SELECT ?1", [handle], |row| row.get(0)))
    }

    #[test]
    fn handle_of_a_created_volume_is_its_text() {
        let lost = format!("unidentified:{DIRECTORY}");
        let short = format!("unidentified:{}", &DIRECTORY[1..]);
        for (text, handle) in [
            ("vol-1", VolumeHandle::Known("vol-1".into())),
            (DIRECTORY, VolumeHandle::Known(DIRECTORY.into())),
            (&lost, VolumeHandle::Lost { directory: DIRECTORY.into() }),
            // A caller's own id may have the prefix without a directory's name.
            (&short, VolumeHandle::Known(short.clone())),
        ] {
            assert_eq!(VolumeHandle::of(text.into()), handle);
            assert_eq!(handle.text(), text);
            assert_eq!(kept(&handle), (Some(text.to_owned()), Ok(handle)));
        }
    }

    #[test]
    fn volume_in_creation_has_no_text() {
        let creating = VolumeHandle::Creating { name: "disk".into() };
        assert_eq!(creating.text(), "");
        let (text, read) = kept(&creating);
        assert!(text.is_none() && read.is_err(), "{text:?} {read:?}");
    }
}
