//! The tmpfs of a plugin's root, where the directories of new mounts are made.

use std::path::{Path, PathBuf};

use crate::fault;
use crate::host::Live;
use crate::plugin::Ready;
use crate::volume::executor::Executor;
use crate::volume::model::paths;
use crate::volume::model::volume::{Action, Effect};

impl Executor<'_> {
    /// Returns the directory below which the directories of a new mount are made: the tmpfs of the plugin's root, or the root
    /// itself where csid has no tmpfs.
    pub(in crate::volume::mounts) async fn directory_of_new(&mut self, ready: &Ready) -> PathBuf {
        let root = ready.host_root();
        let live = self.tmpfs(root).await;
        self.has_tmpfs = live.is_some();
        live.unwrap_or_else(|| root.to_owned())
    }

    /// Mounts the tmpfs that the row's directories are in before the plugin is called to make a mount. After another boot there is
    /// none. Before a removal csid looks for the tmpfs if it holds none.
    pub(in crate::volume::mounts) async fn find_directory(&mut self, effect: &Effect, ready: &Ready) {
        let Some(row) = self.row(&effect.key).filter(|_| !self.has_tmpfs) else { return };
        let path = match effect.action {
            Action::Stage | Action::Unstage => self.rows.volume().row.staging.as_deref(),
            Action::Publish | Action::Unpublish => Some(row.source.as_str()),
            Action::Bind | Action::Unbind => None,
        };
        let root = ready.host_root();
        if !path.is_some_and(|path| is_in_live(path, root)) {
            return;
        }
        if !effect.action.makes() {
            // Something may have covered it when csid started, and be gone.
            if self.shared.host.live_of(root).is_none() {
                self.shared.host.find_lives([root.to_owned()].into()).await;
            }
            return;
        }
        self.has_tmpfs = self.tmpfs(root).await.is_some();
    }

    /// Returns the directory of the tmpfs of a plugin with this root, and mounts one where there is none. `None`: csid does without one.
    async fn tmpfs(&self, root: &Path) -> Option<PathBuf> {
        match self.shared.host.live(root) {
            Live::At(path) => Some(path),
            Live::Without => None,
            Live::Unknown => {
                fault::around("live", self.shared.host.make_live(self.shared.base(root), root)).await
            }
        }
    }
}

/// Returns whether `path` is in the tmpfs of a plugin with this root, by its name.
fn is_in_live(path: &str, root: &Path) -> bool {
    Path::new(path).strip_prefix(root).is_ok_and(|below| below.starts_with(paths::LIVE))
}
