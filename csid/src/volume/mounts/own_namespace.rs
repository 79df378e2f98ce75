//! Mounts of a volume in csid's own mount namespace, at paths that no row has: an administrator's bind, or one of a container's
//! runtime. Such a mount is a use of the volume.
//!
//! A plugin may have mounts of its own there. When the plugin has published, csid notes in the volume's `backing` which mounts have
//! appeared since the last quiet moment; those are the plugin's. At the first publish of a staging all mounts count as the plugin's:
//! a consumer could not have the volume before.

use std::path::Path;

use crate::error::{Error, Result};
use crate::host::{Backing, KnownEnds, OwnMounts, OwnPaths};
use crate::store::rows::{Leg, MountKey, MountRow};
use crate::volume::errors::mount::MountError;
use crate::volume::executor::Executor;
use crate::volume::model::volume::{Action, Effect, Volume};
use crate::volume::probe::known;

impl Executor<'_> {
    /// Notes the mounts at paths that no row has, before the volume is staged or published. At the first publish of a volume
    /// nothing is read.
    pub(in crate::volume::mounts) async fn note_before(
        &mut self,
        effect: &Effect,
        is_first: bool,
    ) -> Result<()> {
        let volume = self.rows.volume();
        let mut backing = known(&volume.row)?;
        // A try that was not answered may have mounted something already, for this row or for another one.
        let is_under_way = |row: &MountRow| match row.key == effect.key && effect.action == Action::Publish {
            true => effect.from != Leg::Absent,
            false => !matches!(row.publish, Leg::Absent | Leg::Present),
        };
        let is_quiet = !volume.mounts.iter().any(|row| is_under_way(row));
        let there = match backing.knows_own() && (is_first || is_quiet) {
            true => {
                // What is missing here would count as the plugin's later.
                let places =
                    OwnPaths { needs_read: true, ..self.shared.places_of(volume, Some(&effect.key)) };
                let mounts = self.shared.own_mounts(volume, &places).await?;
                Some(self.shared.mounted_here(&mounts, &mounts.shown(&places), &places))
            }
            false => None,
        };
        match there {
            there if is_first => {
                backing = backing.restaged(there.unwrap_or_default());
                *self.rows.ends_mut() = KnownEnds::default();
            }
            Some(there) => backing.note_before(there),
            None => return Ok(()),
        }
        self.set_known(&backing)
    }

    /// Notes the plugin's own mounts, after it has published. `is_done`: the publish succeeded. Otherwise the plugin may keep mounts of
    /// it, which matter only where its other mounts are known.
    pub(in crate::volume::mounts) async fn note_published(
        &mut self,
        key: &MountKey,
        is_done: bool,
    ) -> Result<()> {
        let volume = self.rows.volume();
        let mut backing = known(&volume.row)?;
        // The staging of an older csid: what is the plugin's is not known.
        let is_alone = volume.mounts.iter().filter(|row| row.publish != Leg::Absent).count() <= 1;
        let is_first = is_alone && is_done;
        if !backing.knows_own() && !is_first {
            return Ok(());
        }
        let places = self.shared.places_of(volume, Some(key));
        match self.shared.own_mounts(volume, &places).await {
            Ok(mounts) => {
                let shown = mounts.shown(&places);
                backing.note_published(self.shared.mounted_here(&mounts, &shown, &places));
            }
            Err(error) => {
                tracing::warn!(%error, "it is not known which mounts are the plugin's");
                backing.forget_own();
            }
        }
        self.set_known(&backing)
    }

    pub(in crate::volume::mounts) fn set_known(&mut self, backing: &Backing) -> Result<()> {
        let text = backing.to_text().map_err(|error| {
            Error::internal(format!("what the volume's mounts show is not JSON: {error}"))
        })?;
        self.rows.set_backing(Some(text).filter(|text| !text.is_empty()));
        Ok(())
    }

    /// Returns Busy while csid's own namespace has a mount of the volume that is no row's and not the plugin's.
    pub(in crate::volume::mounts) fn refuse_while_bound_here(
        &self,
        row: &MountRow,
        mounts: &OwnMounts,
        places: &OwnPaths<'_>,
    ) -> Result<()> {
        let volume = self.rows.volume();
        let backing = known(&volume.row)?;
        if !backing.knows_own() {
            return Ok(());
        }
        let mut found = backing.foreign(self.shared.mounted_here(mounts, &mounts.shown(places), places));
        found.retain(|mount| belongs_to(volume, row, mount.path(), mount.is_read_only()));
        if found.is_empty() {
            return Ok(());
        }
        let at = found.iter().map(|mount| mount.path().to_owned()).collect();
        Err(MountError::BoundHere { path: row.source.clone().into(), at }.into())
    }
}

/// Returns whether a mount of the volume, at a path that no row has, belongs to this row: it is below a path of the row, or it is
/// writable and all other published rows are read-only. It also belongs to the row if no other row is published.
fn belongs_to(volume: &Volume, row: &MountRow, path: &Path, is_read_only: bool) -> bool {
    let mut others =
        volume.mounts.iter().filter(|other| other.key != row.key && other.publish != Leg::Absent).peekable();
    if others.peek().is_none() {
        return true;
    }
    let mut own = [Some(row.source.as_str()), row.spec.target.as_deref()].into_iter().flatten();
    own.any(|own| path.starts_with(own))
        || (!is_read_only && !row.spec.read_only && others.all(|other| other.spec.read_only))
}
