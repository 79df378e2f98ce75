//! What a caller wants of a volume, checked: the one place that reads `VolumeCapability`.

use std::ffi::{CStr, CString};

use csi_proto::csi::v1::VolumeCapability;
use csi_proto::csi::v1::volume_capability::AccessType;
use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use rustix::mount::MountFlags;

use crate::error::{Error, Result};
use crate::mounts;
use crate::store::Content;

pub struct Wanted {
    /// None: any file-system will do.
    pub content: Option<Content>,
    pub mode: Mode,
    pub options: MountOptions,
}

pub struct MountOptions {
    pub flags: MountFlags,
    /// For the file-system; may hold what must not be logged (CO rule 17).
    pub data: Option<CString>,
}

impl MountOptions {
    pub fn add_data(&mut self, option: &CStr) {
        let joined = match &self.data {
            Some(data) => [data.as_bytes(), b",", option.to_bytes()].concat(),
            None => option.to_bytes().to_vec(),
        };
        self.data = CString::new(joined).ok(); // neither part holds a NUL
    }
}

impl Wanted {
    pub fn parse(capability: Option<&VolumeCapability>) -> Result<Wanted> {
        let invalid = |text: &str| Error::Invalid(text.to_owned());
        let capability = capability.ok_or_else(|| invalid("volume_capability is missing"))?;
        let mode = capability.access_mode.as_ref().and_then(|m| Mode::try_from(m.mode).ok());
        let mode = match mode {
            None | Some(Mode::Unknown) => return Err(invalid("the access mode is missing or unknown")),
            Some(
                mode @ (Mode::SingleNodeWriter
                | Mode::SingleNodeReaderOnly
                | Mode::SingleNodeSingleWriter
                | Mode::SingleNodeMultiWriter),
            ) => mode,
            Some(_) => return Err(invalid("a volume of this driver is on one node: use a SINGLE_NODE mode")),
        };
        let mut options = MountOptions { flags: MountFlags::empty(), data: None };
        let content = match &capability.access_type {
            None => return Err(invalid("the access type is missing")),
            Some(AccessType::Block(_)) => Some(Content::Block),
            Some(AccessType::Mount(mount)) => {
                if !mount.volume_mount_group.is_empty() {
                    return Err(invalid(
                        "volume_mount_group needs VOLUME_MOUNT_GROUP, which this driver has not",
                    ));
                }
                let (flags, data) = mounts::parse_flags(&mount.mount_flags);
                options.flags = flags;
                if !data.is_empty() {
                    let data = CString::new(data.join(","));
                    options.data = Some(data.map_err(|_| invalid("a mount flag holds a NUL"))?);
                }
                match mount.fs_type.as_str() {
                    "" => None,
                    "ext4" => Some(Content::Ext4),
                    "xfs" => Some(Content::Xfs),
                    _ => return Err(invalid("the file-systems are ext4 and xfs")),
                }
            }
        };
        if mode == Mode::SingleNodeReaderOnly {
            options.flags |= MountFlags::RDONLY;
        }
        Ok(Wanted { content, mode, options })
    }

    pub fn reader_only(&self) -> bool {
        self.mode == Mode::SingleNodeReaderOnly
    }

    /// What is wanted must be what the volume holds: it is never formatted to something else.
    pub fn fits(&self, volume: Content) -> Result<()> {
        match (self.content, volume) {
            (None, Content::Ext4 | Content::Xfs) => Ok(()),
            (Some(content), volume) if content == volume => Ok(()),
            _ => Err(Error::Invalid(format!(
                "the volume is {}, and something else is asked for",
                volume.name()
            ))),
        }
    }
}

/// What a new volume is to hold so that all of these can be had of it; one with a source holds what that does.
pub fn content_for(capabilities: &[VolumeCapability], source: Option<Content>) -> Result<Content> {
    if capabilities.is_empty() {
        return Err(Error::Invalid("volume_capabilities is empty".into()));
    }
    let wanted = capabilities.iter().map(|c| Wanted::parse(Some(c))).collect::<Result<Vec<_>>>()?;
    let content = source.or_else(|| wanted.iter().find_map(|w| w.content)).unwrap_or(Content::Ext4);
    match wanted.iter().try_for_each(|w| w.fits(content)) {
        Ok(()) => Ok(content),
        Err(_) if source.is_some() => {
            Err(Error::Invalid(format!("the source is {}, and something else is asked for", content.name())))
        }
        Err(_) => Err(Error::Invalid("one volume holds one file-system, or is one block device".into())),
    }
}
