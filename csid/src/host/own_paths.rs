//! The paths in csid's own namespace where mounts of a volume are csid's or the plugin's.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::OnceLock;

/// A path of one of the volume's rows, or its staging.
#[derive(Clone, Copy)]
pub struct OwnPath<'a> {
    pub path: &'a OsStr,
    /// Whether a mount is there for certain.
    pub is_mounted: bool,
}

/// The paths in csid's own namespace where mounts of a volume are csid's or the plugin's.
#[derive(Default)]
pub struct OwnPaths<'a> {
    /// The paths of the volume's rows, and its staging.
    pub exact: Vec<OwnPath<'a>>,
    /// Those of them that a question is about: of one row, and the staging.
    pub asked: Vec<OwnPath<'a>>,
    /// The volume's own directories, in which csid makes its mounts. They are two levels below a tmpfs of csid's. Empty: csid asks for
    /// the mount at each path.
    pub homes: Vec<&'a Path>,
    /// Paths of `exact` that are in none of `homes`, if there are any.
    pub apart: Vec<&'a OsStr>,
    /// Directories that only csid and the plugin mount in.
    pub below: Vec<&'a Path>,
    /// The numbers of file systems that the volume's mounts are known to have.
    pub devices: Vec<u64>,
    /// Whether the paths are nodes of a block device.
    pub are_nodes: bool,
    /// Whether directories that csid has read before do not answer the question.
    pub needs_read: bool,
    /// The paths of `exact`, once many questions are about them.
    pub sorted: OnceLock<BTreeSet<&'a OsStr>>,
}

impl<'a> OwnPaths<'a> {
    /// Returns whether it is a path of one of the volume's rows, or its staging.
    pub(super) fn have_exactly(&self, path: &OsStr) -> bool {
        self.asked.iter().chain(&self.exact).any(|own| own.path == path)
    }

    /// Returns whether only csid and the plugin mount at this path, whatever the rows are.
    pub(super) fn have_above(&self, path: &OsStr) -> bool {
        self.below.iter().any(|above| Path::new(path).starts_with(above))
    }

    /// Returns the paths of the volume's rows for the comparison with all mounts of the host.
    pub(super) fn sorted(&self) -> &BTreeSet<&'a OsStr> {
        self.sorted.get_or_init(|| self.exact.iter().map(|own| own.path).collect())
    }

    /// Returns the tmpfs of csid's that all directories of the volume are below. Empty: csid asks for the mount at each path.
    pub(super) fn lives(&self) -> BTreeSet<&'a Path> {
        self.homes.iter().filter_map(|home| live_of(home)).collect()
    }
}

/// Returns the tmpfs of csid's that a volume's directory is two levels below.
pub(super) fn live_of(home: &Path) -> Option<&Path> {
    home.parent().and_then(Path::parent)
}
