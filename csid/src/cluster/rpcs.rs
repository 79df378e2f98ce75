//! The names of a controller's RPCs that servers have called.

pub const PUBLISH: &str = "ControllerPublishVolume";
pub const UNPUBLISH: &str = "ControllerUnpublishVolume";
pub const CREATE: &str = "CreateVolume";
pub const DELETE: &str = "DeleteVolume";
pub const EXPAND: &str = "ControllerExpandVolume";
pub const VALIDATE: &str = "ValidateVolumeCapabilities";
pub const SNAPSHOT: &str = "CreateSnapshot";
pub const DELETE_SNAPSHOT: &str = "DeleteSnapshot";
pub const LIST_SNAPSHOTS: &str = "ListSnapshots";
pub const LIST: &str = "ListVolumes";
pub const CAPACITY: &str = "GetCapacity";

/// All of them.
pub(super) const ALL: [&str; 11] = [
    PUBLISH,
    UNPUBLISH,
    CREATE,
    DELETE,
    EXPAND,
    VALIDATE,
    SNAPSHOT,
    DELETE_SNAPSHOT,
    LIST_SNAPSHOTS,
    LIST,
    CAPACITY,
];
