//! Unmounts, unless anything uses the mount: a process, another mount namespace, or a bind in csid's own.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::error::{Error, Result, Step, shown};
use crate::host::{HostError, Look, Sought};
use crate::store::rows::{AttachmentMode, Leg, MountKey, MountRow, Phase};
use crate::volume::api::requests::{Authority, Force, Uncovered};
use crate::volume::errors::mount::MountError;
use crate::volume::executor::{Executor, Searched};
use crate::volume::model::volume::MountEvent;
use crate::volume::mounts::until_done::Purpose;
use crate::volume::waits::PATIENCE;

impl Executor<'_> {
    /// Unmounts. Detaches no mount by force that is neither dead nor hung.
    pub(in crate::volume) async fn unmount(
        &mut self,
        key: &MountKey,
        authority: Authority,
        force: Force,
        names: Vec<String>,
    ) -> Result<()> {
        let Some(row) = self.row(key) else { return self.shared.synced().await };
        if matches!(authority, Authority::Own(uid) if uid != row.uid) {
            return Err(MountError::NotOwner { key: key.clone() }.into());
        }
        let row = row.clone();
        self.force = self.may_force(&row, force).await?;
        if row.phase == Phase::Mounted && self.force == Force::No {
            self.shared.refuse_while_shown(self.rows.volume(), &row)?;
            self.refuse_while_in_use(row).await?;
        }
        self.rows.remark(key, |row| row.operations = names);
        let next = self.event(MountEvent::Unmount { key: key.clone() })?;
        self.until_done(next, key, Purpose::Unmount, None).await.map_err(|failure| failure.error)
    }

    /// Regards the target of the mount as unmounted. The descriptor has to prove that.
    pub(in crate::volume) fn uncover(&mut self, key: &MountKey, uncovered: Uncovered) -> Result<()> {
        let Uncovered { target, fd } = uncovered;
        let Some(row) = self.row(key) else { return Ok(()) };
        if row.spec.target.as_ref() != Some(&target) {
            return Err(Error::invalid(format!("{} is not the target of this mount", shown(target))));
        }
        if !self.shared.host.is_free(&fd, Path::new(&target))? {
            return Err(HostError::StillBound(target.into()).into());
        }
        self.target_fd = Some(fd);
        Ok(())
    }

    /// Returns the part of `force` that the mount needs. Refuses a mount that hangs, unless the caller requests `Hung` by name.
    async fn may_force(&self, row: &MountRow, force: Force) -> Result<Force> {
        let (host, plugin, source) = (&self.shared.host, &row.volume.plugin, Path::new(&row.source));
        let look = match force {
            Force::No => return Ok(Force::No),
            Force::Gone | Force::Dead => self.shared.look_surely(row).await,
            // An earlier probe proves nothing about the present. The consumers' path may be detached already while the mount
            // that it shows is not.
            Force::Hung => {
                let mut look = host.look_despite_hung(plugin, source).await?;
                let staging = self.rows.volume().row.staging.as_deref();
                for path in [row.published()].into_iter().chain(staging) {
                    if matches!(look, Look::Missing | Look::Plain) && path != row.source {
                        look = host.look_despite_hung(plugin, Path::new(path)).await?;
                    }
                }
                look
            }
        };
        match look {
            Look::Mounted { .. } | Look::Device { .. } => Ok(Force::No),
            Look::Hung if force != Force::Hung => {
                Err(MountError::Hung { path: row.source.clone(), consumer: row.key.consumer.clone() }.into())
            }
            Look::Hung => Ok(Force::Hung),
            Look::Missing | Look::Plain => Ok(Force::Gone),
            Look::Dead(_) if look.has_lost_its_server() => Ok(Force::Dead),
            // A server that answers an error may come back, and a consumer may still write.
            Look::Dead(_) if force == Force::Hung => Ok(Force::Hung),
            Look::Dead(code) => Err(MountError::Failing {
                path: row.source.clone(),
                consumer: row.key.consumer.clone(),
                source: std::io::Error::from_raw_os_error(code),
            }
            .into()),
        }
    }

    /// Returns Busy, before anything is touched, while processes use the mount.
    pub(in crate::volume) async fn refuse_while_in_use(&mut self, row: MountRow) -> Result<()> {
        self.operation.step.set(Step::Verify);
        // The descriptor proves that nothing is mounted at the target.
        let target = row.spec.target.as_deref().filter(|_| self.target_fd.is_none());
        for path in [Some(row.source.as_str()), target].into_iter().flatten().map(Path::new) {
            if self.shared.host.in_use(&row.volume.plugin, path).await? {
                let holders = tokio::time::timeout(PATIENCE, self.shared.host.holders(path)).await;
                return Err(MountError::InUse {
                    path: path.into(),
                    consumer: row.key.consumer,
                    processes: holders.unwrap_or_default(),
                }
                .into());
            }
        }
        // The search begins after the last of these answers: a user may leave csid's namespace for a copy of it meanwhile.
        self.refuse_while_elsewhere(&row).await
    }

    /// Returns Busy while another mount namespace, or another path of csid's own, shows the file system or device of the row's mount
    /// and would continue to show it.
    async fn refuse_while_elsewhere(&mut self, row: &MountRow) -> Result<()> {
        let host = &self.shared.host;
        let own = [Some(row.source.as_str()), row.spec.target.as_deref()].into_iter().flatten();
        let own: Vec<&Path> = own.map(Path::new).collect();
        let is_block = row.spec.usage.attachment_mode == AttachmentMode::BlockDevice;
        let places = self.shared.places_of(self.rows.volume(), Some(&row.key));
        let mounts = self.shared.own_mounts(self.rows.volume(), &places).await?;
        self.refuse_while_bound_here(row, &mounts, &places)?;
        drop(places);
        let (_, mounts) = self.own_mounts.insert((row.key.clone(), mounts));
        let shown = mounts.backing(&own, is_block, row.device).shown;
        let plugin = self.shared.plugins.processes(&row.volume.plugin);
        let mut found = match shown.is_empty() && row.publish == Leg::Present {
            false => {
                let at = Instant::now();
                let found = host.copies_elsewhere(&shown, &plugin).await?;
                self.searched = found.is_empty().then_some(Searched { at, shown });
                found
            }
            // The mounts were unmounted behind csid's back, and only the number of their file system is known. Copies elsewhere have
            // not gone with them.
            true => host.still_elsewhere(self.gone(row)).await?,
        };
        let others = self.rows.volume().mounts.iter();
        let others: Vec<_> =
            others.filter(|other| other.key != row.key && other.publish != Leg::Absent).collect();
        if !others.is_empty() {
            // A copy belongs to this mount if it is below this mount's path, or if it is writable and all other mounts are
            // read-only. The volume stays staged for the others.
            let all_read = others.iter().all(|other| other.spec.read_only);
            found.retain(|mount| {
                let writes = !mount.read_only && !row.spec.read_only && all_read;
                writes || own.iter().any(|own| mount.may_be_below(own))
            });
        }
        if found.is_empty() {
            return Ok(());
        }
        let holders = host.holders_elsewhere(&found).await;
        Err(MountError::InUseElsewhere {
            path: row.source.clone().into(),
            consumer: row.key.consumer.clone(),
            holders,
        }
        .into())
    }

    /// Returns what to search for a row whose mounts are gone in csid's own namespace.
    fn gone(&self, row: &MountRow) -> Sought {
        let volume = self.rows.volume();
        let own = [row.source.as_str(), row.published()].into_iter().filter(|path| !path.is_empty());
        let is_alone = !volume.published_elsewhere(&row.key);
        Sought {
            below: own.chain(volume.row.staging.as_deref()).map(PathBuf::from).collect(),
            target: row.spec.target.as_ref().map(PathBuf::from),
            device: row.device,
            shown: Vec::new(),
            everywhere: is_alone,
            base: self.shared.directories.state.clone(),
        }
    }
}
