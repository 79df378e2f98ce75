//! Decides whether a mount is admitted: who owns an identity, what the users of one volume share, what the plugin can do. Pure,
//! as [`step`](super::step), which calls it before it enters a row.

use std::sync::Arc;

use crate::store::rows::{AccessMode, MountRow, Phase};
use crate::volume::model::volume::{Abilities, DesiredMount, Volume, has_key};

/// Limit of claims, and of mounts, that a uid other than root may have of one volume. Each change of one reads all of them.
pub const OF_UID: usize = 256;

/// Reason why an event changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The row belongs to another uid.
    NotOwner,
    /// The identity is in use with another value of this option.
    OtherOption { option: &'static str },
    /// A row of that identity is still being taken down. It has to be settled first.
    Unsettled,
    /// The mount, or the staging of its volume, is at another path than the given one.
    OtherPath { what: &'static str, path: String },
    /// The volume has users under another name.
    OtherName { namespace: String, volume: String, holders: Vec<String> },
    /// The options conflict with those of the volume's users.
    Conflict { what: &'static str, holders: Vec<String> },
    /// The plugin lacks the capability.
    NotSupported { capability: &'static str },
    /// A writer was requested with a reader-only access mode.
    ReaderOnly,
    /// The row needs its secrets again.
    SecretRequired,
    /// The uid has [`OF_UID`] rows.
    TooMany,
    /// No such row.
    NoSuchMount,
}

/// Checks whether a mount is admitted along with the volume's users. `abilities` is `None` while the plugin is not there. Then
/// only the rules that do not depend on the plugin are checked.
pub fn admit(volume: &Volume, wanted: &DesiredMount, abilities: Option<Abilities>) -> Result<(), Refusal> {
    if let Some(present) = volume.mount(&wanted.key) {
        if present.uid != wanted.uid {
            return Err(Refusal::NotOwner);
        }
        match present.phase {
            Phase::Unmounting | Phase::Uncertain => return Err(Refusal::Unsettled),
            Phase::Mounting | Phase::Mounted | Phase::Lost | Phase::Waiting => {}
        }
        let other = match volume.is_down(present) {
            true => present.spec.other_option_but_attached(&wanted.spec),
            false => present.spec.other_option(&wanted.spec),
        };
        if let Some(option) = other {
            return Err(Refusal::OtherOption { option });
        }
        let given = wanted.spec.secrets_given || wanted.spec.credential.is_some();
        if matches!(present.phase, Phase::Lost | Phase::Waiting) && present.lacks_secrets() && !given {
            return Err(Refusal::SecretRequired);
        }
    } else if wanted.uid != 0
        && volume.mounts.iter().filter(|mount| mount.uid == wanted.uid).count() >= OF_UID
    {
        return Err(Refusal::TooMany);
    }
    compatible(volume, wanted)?;
    let usage = &wanted.spec.usage;
    let reader =
        matches!(usage.access_mode, AccessMode::SingleNodeReaderOnly | AccessMode::MultiNodeReaderOnly);
    if reader && !wanted.spec.read_only {
        return Err(Refusal::ReaderOnly);
    }
    if let Some(abilities) = abilities {
        if usage.access_mode == AccessMode::SingleNodeMultiWriter && !abilities.single_node_multi_writer {
            return Err(Refusal::NotSupported { capability: "SINGLE_NODE_MULTI_WRITER" });
        }
        if !usage.mount_group.is_empty() && !abilities.mount_group {
            return Err(Refusal::NotSupported { capability: "VOLUME_MOUNT_GROUP" });
        }
    }
    Ok(())
}

/// Checks the rules for a second user of a volume (CSI rules 28, 34).
fn compatible(volume: &Volume, wanted: &DesiredMount) -> Result<(), Refusal> {
    let is_other = |mount: &&MountRow| !has_key(mount, &wanted.key) && !volume.has_ended(mount);
    let others: Vec<&MountRow> = volume.mounts.iter().map(Arc::as_ref).filter(is_other).collect();
    let names = |rows: &[&MountRow]| rows.iter().map(|row| row.key.consumer.clone()).collect::<Vec<_>>();
    if others.is_empty() {
        return Ok(());
    }
    if (&volume.row.namespace, &volume.row.volume) != (&wanted.key.namespace, &wanted.key.volume) {
        return Err(Refusal::OtherName {
            namespace: volume.row.namespace.clone(),
            volume: volume.row.volume.clone(),
            holders: names(&others),
        });
    }
    let usage = &wanted.spec.usage;
    let conflict = |what| Err(Refusal::Conflict { what, holders: names(&others) });
    for other in &others {
        let theirs = &other.spec.usage;
        let what = if theirs.attachment_mode != usage.attachment_mode {
            "the attachment mode"
        } else if theirs.access_mode != usage.access_mode {
            "the access mode"
        } else if theirs.fs_type != usage.fs_type {
            "the fs type"
        } else if theirs.mount_flags != usage.mount_flags {
            "the list of mount flags"
        } else if theirs.mount_group != usage.mount_group {
            "the mount group"
        } else if theirs.context != usage.context {
            "the volume context"
        } else if theirs.publish_context != usage.publish_context && !volume.is_down(other) {
            "the publish context"
        } else {
            continue;
        };
        return conflict(what);
    }
    match usage.access_mode {
        AccessMode::SingleNodeMultiWriter
        | AccessMode::MultiNodeReaderOnly
        | AccessMode::MultiNodeMultiWriter => Ok(()),
        AccessMode::MultiNodeSingleWriter => {
            let writers: Vec<&MountRow> = others.iter().filter(|row| !row.spec.read_only).copied().collect();
            if wanted.spec.read_only || writers.is_empty() {
                Ok(())
            } else {
                Err(Refusal::Conflict { what: "the one writer", holders: names(&writers) })
            }
        }
        AccessMode::SingleNodeWriter
        | AccessMode::SingleNodeReaderOnly
        | AccessMode::SingleNodeSingleWriter => conflict("a second consumer"),
    }
}
