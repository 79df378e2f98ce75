//! Probes the paths of mounts, and derives the observed state of their rows.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::host::{
    Backing, Look, MountTable, OwnMounts, OwnPath, OwnPaths, PlacedMount, Shown, TableMount, mount_table,
};
use crate::store::rows::{AttachmentMode, Leg, MountKey, MountRow, VolumeRow};
use crate::volume::context::Context;
use crate::volume::model::paths;
use crate::volume::model::volume::{Observed, Volume, has_key};

/// Of a volume with more rows csid does not ask for each mount.
const FEW_ROWS: usize = 16;
/// The pause before a stale mount is probed again.
pub(super) const STALE: Duration = Duration::from_secs(1);

impl Context {
    /// Probes a mount that its row calls mounted. A mount that hangs counts as there.
    pub(super) async fn sight(&self, row: &MountRow) -> Observed {
        let look = self.host.look(&row.volume.plugin, Path::new(&row.source)).await;
        self.sight_of(row, &look).await
    }

    /// Probes like [`crate::host::Host::look`], before a dead mount is mounted again. A stale mount is probed twice, and the
    /// second result counts.
    pub(super) async fn look_surely(&self, row: &MountRow) -> Look {
        let look = self.host.look(&row.volume.plugin, Path::new(&row.source)).await;
        if !look.is_stale() {
            return look;
        }
        tokio::time::sleep(STALE).await;
        self.host.look(&row.volume.plugin, Path::new(&row.source)).await
    }

    /// Probes the mount of each row, and returns the observed states.
    pub(super) async fn sights(&self, rows: &[Arc<MountRow>]) -> Vec<Observed> {
        let rows: Vec<&MountRow> = rows.iter().map(Arc::as_ref).collect();
        self.looks_and_sights(&rows).await.1
    }

    /// Probes the mount of each row, and returns the probes with the observed states that they mean. One read of the mount table
    /// serves both. Targets are probed in parallel.
    pub(super) async fn looks_and_sights(&self, rows: &[&MountRow]) -> (Vec<Look>, Vec<Observed>) {
        let table = mount_table().await;
        let looks = self.looks_in(rows, table.as_ref()).await;
        let asking = rows.iter().zip(&looks).map(|(row, look)| self.sight_in(table.as_ref(), row, look));
        let sights = side_by_side(asking).await;
        (looks, sights)
    }

    async fn sight_in(&self, table: Option<&MountTable>, row: &MountRow, look: &Look) -> Observed {
        let is_known = matches!(look, Look::Mounted { served: false, .. });
        match table.and_then(|table| is_bound_in(table, row)).filter(|_| is_known && there(row, look)) {
            Some(true) => Observed::There,
            _ => self.sight_of(row, look).await,
        }
    }

    /// Returns the observed states at csid's start, with the probe of each mount that was probed. A mount that the mount table
    /// shows is not probed, so csid does not wait for its server. If it hangs or is dead, it counts as there. Notes the volumes
    /// whose mounts have a server. `table`: the mount table; without it each mount is probed.
    pub(super) async fn sights_at_start(
        &self,
        rows: &[&MountRow],
        table: Option<&MountTable>,
    ) -> Vec<(Observed, Option<Look>)> {
        let asking = rows.iter().map(|row| async {
            if row.spec.usage.attachment_mode == AttachmentMode::FileSystem
                && let Some(table) = table
                && let Some(shown) = table.at(Path::new(&row.source))
                && row.device == Some(shown.device)
            {
                if shown.is_served {
                    self.served.note(row);
                }
                let is_bound = is_bound_in(table, row).unwrap_or(false);
                return (if is_bound { Observed::There } else { Observed::Unbound }, None);
            }
            let source = Path::new(&row.source);
            let kind = paths::kind(source).filter(|_| paths::is_own(&row.volume, source));
            let look = match kind {
                Some(kind) => self.host.look_below(&row.volume.plugin, kind, source).await,
                None => self.host.look(&row.volume.plugin, source).await,
            };
            (self.sight_of(row, &look).await, Some(look))
        });
        side_by_side(asking).await
    }

    pub(super) async fn sight_of(&self, row: &MountRow, look: &Look) -> Observed {
        if !there(row, look) {
            return Observed::Gone;
        }
        if look.has_lost_its_server() {
            return Observed::Dead;
        }
        // A mount that does not answer is not probed again.
        if !healthy(row, look) {
            return Observed::There;
        }
        match &row.spec.target {
            None => Observed::There,
            Some(target) => {
                let bound =
                    self.host.is_bound(&row.volume.plugin, Path::new(&row.source), Path::new(target)).await;
                // A target that cannot be probed counts as bound.
                if bound.unwrap_or(true) { Observed::There } else { Observed::Unbound }
            }
        }
    }

    /// Probes the published path of each row, and returns the results in the order of the rows. The mount table answers for
    /// mounts without a server.
    pub(super) async fn looks(&self, rows: &[&MountRow]) -> Vec<Look> {
        self.looks_in(rows, mount_table().await.as_ref()).await
    }

    /// As [`Context::looks`], by a mount table that was just read. `None`: each mount is probed.
    pub(super) async fn looks_in(&self, rows: &[&MountRow], table: Option<&MountTable>) -> Vec<Look> {
        let looking = rows.iter().map(|row| async {
            let shown = table.and_then(|table| table.at(Path::new(&row.source)));
            match shown {
                Some(TableMount { device, is_served: false, .. }) if row.device == Some(device) => {
                    Look::Mounted { device, served: false }
                }
                _ => self.host.look(&row.volume.plugin, Path::new(&row.source)).await,
            }
        });
        side_by_side(looking).await
    }
}

impl Context {
    /// Returns the mounts of csid's own namespace that may concern the volume with these paths. A directory that was renamed into the
    /// volume's one a moment ago may be missing, unless `places` needs another read.
    pub(super) async fn own_mounts(
        &self,
        volume: &Volume,
        places: &OwnPaths<'_>,
    ) -> Result<OwnMounts, Error> {
        let backing = known(&volume.row)?;
        Ok(self.host.own_mounts(places, &backing.shown).await?)
    }

    /// Returns the mounts of what is `shown` that are at no path of a row, nor in a directory of csid's.
    pub(super) fn mounted_here(
        &self,
        mounts: &OwnMounts,
        shown: &[Shown],
        places: &OwnPaths<'_>,
    ) -> Vec<PlacedMount> {
        let mut found = mounts.foreign(shown, places);
        // A volume of another name may be of the same file system.
        found.retain(|mount| mount.path().to_str().is_none_or(|path| self.directory.holder(path).is_none()));
        found
    }

    /// Returns the paths at which a mount of the volume is csid's or the plugin's. `asked`: the row that the question is about, if there
    /// is one.
    pub(super) fn places_of<'v>(&'v self, volume: &'v Volume, asked: Option<&MountKey>) -> OwnPaths<'v> {
        let mut places = OwnPaths::default();
        let mut roots: BTreeSet<&OsStr> = BTreeSet::new();
        let own = (volume.mounts.len() > FEW_ROWS).then(|| paths::OwnDirectories::of(&volume.row.key));
        for row in &volume.mounts {
            let is_block = row.spec.usage.attachment_mode == AttachmentMode::BlockDevice;
            places.are_nodes |= is_block;
            if let Some(device) = row.device
                && !places.devices.contains(&device)
            {
                places.devices.push(device);
            }
            // A staging may have no mount, and a publish of a block device may be a node.
            let is_present = row.publish == Leg::Present;
            let at = |path, is_mounted| OwnPath { path: OsStr::new(path), is_mounted };
            let source = at(row.source.as_str(), is_present);
            let private = row.published.as_deref().map(|path| at(path, is_present && !is_block));
            let target = row.spec.target.as_deref().map(|path| at(path, false));
            let of_row = [Some(source), private, target].into_iter().flatten();
            let of_row = of_row.filter(|own| !own.path.is_empty());
            if asked.is_some_and(|asked| has_key(row, asked)) {
                places.asked.extend(of_row.clone());
            }
            places.exact.extend(of_row);
            let Some(own) = &own else {
                roots.extend(paths::root(Path::new(&row.source)).map(Path::as_os_str));
                continue;
            };
            for path in [Some(source), private].into_iter().flatten().map(|own| Path::new(own.path)) {
                if places.homes.iter().any(|home| paths::is_in(path, home)) {
                    continue;
                }
                match paths::directory_of(path).filter(|_| own.have(path)) {
                    Some(home) => places.homes.push(home),
                    None => places.apart.push(path.as_os_str()),
                }
                if path == Path::new(source.path) {
                    roots.extend(paths::root(path).map(Path::as_os_str));
                }
            }
            places.apart.extend(target.map(|own| own.path));
        }
        let staging = volume.row.staging.as_deref().filter(|path| !path.is_empty());
        let staging = staging.map(|path| OwnPath { path: OsStr::new(path), is_mounted: false });
        places.asked.extend(staging);
        places.exact.extend(staging);
        let roots = roots.into_iter().map(|directory| self.root_above(Path::new(directory)));
        let roots = roots.filter(|root| !root.starts_with(&self.directories.state));
        places.below = roots.chain([self.directories.state.as_path()]).collect();
        places
    }

    /// Returns the plugin's root that the tmpfs `directory` is at, or `directory`, where it is no such tmpfs.
    fn root_above<'p>(&self, directory: &'p Path) -> &'p Path {
        let is_live = |root: &&Path| {
            self.host.live_of(root).is_some_and(|live| live.as_os_str() == directory.as_os_str())
        };
        directory.parent().filter(is_live).unwrap_or(directory)
    }

    /// Notes in `backing` that all mounts of the volume at other paths are the plugin's, or another manager's.
    pub(super) fn note_found(&self, mounts: &OwnMounts, places: &OwnPaths<'_>, backing: &mut Backing) {
        backing.note_found(self.mounted_here(mounts, &mounts.shown(places), places));
    }
}

/// Returns the journal's record of the file systems and devices that keep the volume.
pub(super) fn known(volume: &VolumeRow) -> Result<Backing, Error> {
    Backing::from_text(volume.backing.as_deref().unwrap_or_default()).map_err(|error| {
        Error::internal(format!(
            "the journal's record of what the mounts of volume {} of plugin {} showed cannot be read: {error}",
            volume.key.handle, volume.key.plugin
        ))
    })
}

/// Returns whether the row's target shows what is at its source. A row without a target counts as bound. `None`: the table has no
/// mount at the source.
fn is_bound_in(table: &MountTable, row: &MountRow) -> Option<bool> {
    let Some(target) = &row.spec.target else { return Some(true) };
    let source = table.at(Path::new(&row.source))?;
    let target = table.at(Path::new(target));
    Some(target.is_some_and(|target| (target.device, target.root) == (source.device, source.root)))
}

/// Waits for all futures at once, and returns the results in their order.
pub(super) async fn side_by_side<T: Send>(
    asking: impl Iterator<Item = impl Future<Output = T> + Send>,
) -> Vec<T> {
    let asking: Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>> =
        asking.map(|one| Box::pin(one) as Pin<Box<_>>).collect();
    futures_util::future::join_all(asking).await
}

/// Returns whether the published mount or device is there, and nothing else in its place. A mount that is dead or hangs counts as
/// there.
pub(super) fn there(row: &MountRow, look: &Look) -> bool {
    match (row.spec.usage.attachment_mode, look) {
        (_, Look::Dead(_) | Look::Hung) => true,
        (AttachmentMode::FileSystem, Look::Mounted { device, .. })
        | (AttachmentMode::BlockDevice, Look::Device { rdev: device }) => row.device == Some(*device),
        _ => false,
    }
}

pub(super) fn healthy(row: &MountRow, look: &Look) -> bool {
    there(row, look) && !matches!(look, Look::Dead(_) | Look::Hung)
}

/// Returns why a mount is not healthy, for a person.
pub(super) fn why(look: &Look) -> String {
    match look {
        Look::Dead(code) => {
            format!("the file system is dead: {}", std::io::Error::from_raw_os_error(*code))
        }
        Look::Hung => "the file system does not answer".to_owned(),
        _ => "removed behind csid's back".to_owned(),
    }
}

/// Returns the sorted paths in a directory that csid alone writes. Empty: it has none, or cannot be read.
pub(super) fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}
