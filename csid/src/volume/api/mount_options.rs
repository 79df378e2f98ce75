//! The options of a Mount, and the mount spec made of them.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::store::registry::{Bound, Capability, VolumeSpec};
use crate::store::rows::{AccessMode, AttachmentMode, MountSpec, Propagation, Restore, Usage};

/// The options of a Mount. `None` stands for the value of the volume's registration, else for the contract's default.
#[derive(Clone, Default)]
pub struct MountOptions {
    pub access_mode: Option<AccessMode>,
    pub attachment_mode: Option<AttachmentMode>,
    pub fs_type: Option<String>,
    pub mount_flags: Option<Vec<String>>,
    pub mount_group: Option<String>,
    pub read_only: bool,
    pub target: Option<String>,
    pub propagation: Propagation,
    pub suid: Option<bool>,
    pub dev: Option<bool>,
    pub restore: Option<Restore>,
    pub credential: Option<String>,
    /// The context of an inline volume. It is ignored for a registered volume.
    pub context: BTreeMap<String, String>,
    pub publish_context: BTreeMap<String, String>,
    /// The unit or connection whose end releases the claim of the mount. It is stored with the claim.
    pub bound: Option<Bound>,
}

impl MountOptions {
    /// Returns an option of how the plugin mounts the volume that differs from the registration. `None`: no option differs.
    pub(in crate::volume) fn other_than(&self, volume: &VolumeSpec) -> Option<&'static str> {
        let is_other = |given: &Option<String>, of: &String| given.as_ref().is_some_and(|given| given != of);
        [
            (is_other(&self.fs_type, &volume.fs_type), "fs-type"),
            (self.mount_flags.as_ref().is_some_and(|flags| *flags != volume.mount_flags), "mount-flags"),
            (is_other(&self.mount_group, &volume.mount_group), "mount-group"),
        ]
        .into_iter()
        .find_map(|(is_other, option)| is_other.then_some(option))
    }

    /// Makes the spec of the mount. `registered`: the capability of the claim, and the registered spec; `None`: the volume is
    /// inline.
    pub fn spec(self, registered: Option<(Capability, &VolumeSpec)>) -> Result<MountSpec> {
        let (capability, volume) = registered.unzip();
        let Capability { access_mode, attachment_mode } = capability.unwrap_or(Capability {
            access_mode: self.access_mode.unwrap_or(AccessMode::SingleNodeWriter),
            attachment_mode: self.attachment_mode.unwrap_or(AttachmentMode::FileSystem),
        });
        let block = attachment_mode == AttachmentMode::BlockDevice;
        for (key, given) in [
            ("fs-type", self.fs_type.is_some()),
            ("mount-flags", self.mount_flags.is_some()),
            ("mount-group", self.mount_group.is_some()),
        ] {
            if block && given {
                return Err(Error::invalid(format!("{key} means nothing for a block-device")));
            }
        }
        if self.propagation == Propagation::Bidirectional && self.read_only {
            return Err(Error::invalid("propagation bidirectional needs a mount that is not read-only"));
        }
        let of_volume = volume.filter(|_| !block);
        let text = |given: Option<String>, of: fn(&VolumeSpec) -> &String| {
            given.or_else(|| of_volume.map(|volume| of(volume).clone())).unwrap_or_default()
        };
        let mount_flags = self.mount_flags.or_else(|| of_volume.map(|volume| volume.mount_flags.clone()));
        Ok(MountSpec {
            usage: Usage {
                access_mode,
                attachment_mode,
                fs_type: text(self.fs_type, |volume| &volume.fs_type),
                mount_flags: mount_flags.unwrap_or_default(),
                mount_group: text(self.mount_group, |volume| &volume.mount_group),
                context: volume.map_or(self.context, |volume| volume.context.clone()),
                publish_context: self.publish_context,
            },
            read_only: self.read_only,
            target: self.target,
            propagation: self.propagation,
            suid: self.suid.or(volume.map(|volume| volume.suid)).unwrap_or(false),
            dev: self.dev.or(volume.map(|volume| volume.dev)).unwrap_or(false),
            restore: self.restore.unwrap_or(if volume.is_some() { Restore::Auto } else { Restore::Hold }),
            registered: volume.is_some(),
            credential: self.credential,
            secrets_given: false,
        })
    }
}
