//! The tmpfs of a plugin's root, where the directories of new mounts are made.

use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::fault;
use crate::host::{HostError, Live};
use crate::plugin::Ready;
use crate::store::MountFilter;
use crate::store::rows::{MountKey, MountRow};
use crate::volume::executor::Executor;
use crate::volume::model::paths;
use crate::volume::model::volume::{Action, Effect};

impl Executor<'_> {
    /// Returns the directory below which the directories of a new mount are made: the tmpfs of the plugin's root, or the root
    /// itself where csid has no tmpfs.
    pub(in crate::volume::mounts) async fn directory_of_new(&mut self, ready: &Ready) -> PathBuf {
        let root = ready.host_root();
        let live = match self.shared.host.live(root) {
            Live::At(path) => Some(path),
            Live::Without => None,
            Live::Unmounted(live) if self.others_are_below(&live, ready, None).await => None,
            Live::Unmounted(_) | Live::Unknown => self.make_live(root).await,
        };
        self.has_tmpfs = live.is_some();
        live.unwrap_or_else(|| root.to_owned())
    }

    /// Mounts the tmpfs that the row's directories are in before the plugin is called. After another boot there is none.
    pub(in crate::volume::mounts) async fn find_directory(
        &mut self,
        effect: &Effect,
        ready: &Ready,
    ) -> Result<()> {
        let Some(row) = self.row(&effect.key).filter(|_| !self.has_tmpfs) else { return Ok(()) };
        let path = match effect.action {
            Action::Stage => self.rows.volume().row.staging.as_deref(),
            Action::Publish => Some(row.source.as_str()),
            Action::Bind | Action::Unbind | Action::Unpublish | Action::Unstage => None,
        };
        let root = ready.host_root();
        if !path.is_some_and(|path| is_in_live(path, root)) {
            return Ok(());
        }
        match self.shared.host.live(root) {
            Live::At(_) => self.has_tmpfs = true,
            Live::Without => {}
            Live::Unmounted(live) if self.others_are_below(&live, ready, Some(&effect.key)).await => {
                return Err(HostError::LiveUnmounted(live).into());
            }
            Live::Unmounted(_) | Live::Unknown => self.has_tmpfs = self.make_live(root).await.is_some(),
        }
        Ok(())
    }

    /// Returns whether the journal has mounts of the plugin below `live`, other than `but`. True: it may have, but cannot be read.
    async fn others_are_below(&self, live: &Path, ready: &Ready, but: Option<&MountKey>) -> bool {
        let filter = MountFilter { plugin: Some(ready.id().to_owned()), ..MountFilter::default() };
        let is_other = |row: &MountRow| Some(&row.key) != but && Path::new(&row.source).starts_with(live);
        self.shared.store.mounts(filter).await.map_or(true, |rows| rows.iter().any(|(row, _)| is_other(row)))
    }

    async fn make_live(&self, root: &Path) -> Option<PathBuf> {
        fault::around("live", self.shared.host.make_live(self.shared.base(root), root)).await
    }
}

/// Returns whether `path` is in the tmpfs of a plugin with this root, by its name.
fn is_in_live(path: &str, root: &Path) -> bool {
    Path::new(path).strip_prefix(root).is_ok_and(|below| below.starts_with(paths::LIVE))
}
