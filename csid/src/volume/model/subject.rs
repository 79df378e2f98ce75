//! The subjects of operations and of unfinished work.

use crate::store::registry::VolumeName;
use crate::store::rows::MountKey;

/// The identity of a claim. A consumer has at most one claim of a volume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimKey {
    pub volume: VolumeName,
    pub consumer: String,
}

impl ClaimKey {
    pub fn new(volume: &VolumeName, consumer: &str) -> Self {
        ClaimKey { volume: volume.clone(), consumer: consumer.to_owned() }
    }

    /// Returns the claim that a mount of a registered volume needs.
    pub fn of(mount: &MountKey) -> Self {
        ClaimKey { volume: VolumeName::of(mount), consumer: mount.consumer.clone() }
    }

    /// Returns whether the mount is of this claim's volume and consumer, whatever its tag is.
    pub fn has_mount(&self, mount: &MountKey) -> bool {
        self.consumer == mount.consumer
            && self.volume.volume == mount.volume
            && self.volume.namespace == mount.namespace
    }
}

/// The subject of an operation. Unfinished work of a volume is retried in this order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    Volume(VolumeName),
    Attachment { volume: VolumeName, node_id: String },
    Claim(ClaimKey),
    Mount(MountKey),
}

impl Subject {
    /// Returns the name of the volume that the subject is, or is part of.
    pub fn volume(&self) -> VolumeName {
        match self {
            Subject::Volume(volume)
            | Subject::Attachment { volume, .. }
            | Subject::Claim(ClaimKey { volume, .. }) => volume.clone(),
            Subject::Mount(mount) => VolumeName::of(mount),
        }
    }

    /// Returns the mount. `None`: the subject is not a mount.
    pub fn mount(&self) -> Option<&MountKey> {
        match self {
            Subject::Mount(mount) => Some(mount),
            Subject::Volume(_) | Subject::Attachment { .. } | Subject::Claim(_) => None,
        }
    }
}
