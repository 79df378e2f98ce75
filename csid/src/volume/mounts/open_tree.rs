//! OpenMount: a detached copy of a mount, which the caller mounts elsewhere. It changes no row and needs no actor.

use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::host::{Look, Restrict, Tree};
use crate::store::MountFilter;
use crate::store::rows::{AttachmentMode, MountKey, MountRow, Phase};
use crate::volume::errors::mount::MountError;
use crate::volume::manager::Volumes;

impl Volumes {
    /// Returns the row of a mount that is called mounted.
    pub async fn mounted(&self, key: &MountKey) -> Result<MountRow> {
        let rows = self.shared.store.mounts(MountFilter::of(key)).await?;
        match rows.into_iter().next() {
            Some((row, _)) if row.phase == Phase::Mounted => Ok(row),
            row => {
                Err(MountError::NotMounted { key: key.clone(), phase: row.map(|(row, _)| row.phase) }.into())
            }
        }
    }

    /// Returns a detached copy of the row's mount, or of `subpath` in it. The copy is private, has the row's flags, and
    /// `read_only`. It contains no submounts. The kernel keeps the file system for as long as a process has the copy.
    ///
    /// `userns`, of a user namespace, maps the owners of its files.
    ///
    /// The owner of a detached mount can clear its flags in a user namespace of its own (mount_setattr(2)). Therefore only root
    /// gets a copy that has any flag: root can clear them anyway.
    pub async fn open_tree(
        &self,
        row: &MountRow,
        subpath: Option<PathBuf>,
        read_only: bool,
        userns: Option<Tree>,
        is_root: bool,
    ) -> Result<Tree> {
        let gone = || MountError::NotMounted { key: row.key.clone(), phase: None };
        let device = row.device.ok_or_else(gone)?;
        let spec = &row.spec;
        let (shown, how) = match spec.usage.attachment_mode {
            AttachmentMode::FileSystem => {
                let read_only = read_only || spec.read_only;
                let shown = Look::Mounted { device, served: false };
                (shown, Restrict { nosuid: !spec.suid, nodev: !spec.dev, read_only })
            }
            // The device itself decides what can be written to it. With nodev no process could open its node.
            AttachmentMode::BlockDevice if subpath.is_some() => {
                return Err(Error::invalid("subpath means nothing for a block-device"));
            }
            AttachmentMode::BlockDevice if userns.is_some() => {
                return Err(Error::invalid("userns means nothing for a block-device"));
            }
            AttachmentMode::BlockDevice if read_only && !self.shared.host.block_is_read_only(device)? => {
                let text = "a block-device is not read-only because its mount is: mount it read-only";
                return Err(Error::invalid(text));
            }
            AttachmentMode::BlockDevice => (Look::Device { rdev: device }, Restrict::default()),
        };
        let host = &self.shared.host;
        let tree =
            host.open_tree(&row.volume.plugin, Path::new(&row.source), shown, subpath, how, userns).await?;
        let (tree, is_bound) = tree.ok_or_else(gone)?;
        if is_bound && !is_root && spec.usage.attachment_mode == AttachmentMode::FileSystem {
            let text = "nosuid, nodev, noexec and read-only would not hold for a caller other than root: ask as root, \
                        or use the published path";
            return Err(Error::new(Kind::NotAuthorized, text));
        }
        Ok(tree)
    }
}
