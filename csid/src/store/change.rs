//! Changes of the journal, and their durability.

use std::sync::Arc;

use crate::store::rows::{JournaledFence, MountKey, MountRow, NewEvent, PluginRow, VolumeKey, VolumeRow};

/// The event that a commit survives once it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The end of csid: written, not synced. Enough for the intent of a node call, which no power cut
    /// outlives either.
    Process,
    /// A power cut: synced, and with it every earlier commit.
    Disk,
}

pub enum Change {
    PutVolume(VolumeRow),
    DeleteVolume(VolumeKey),
    PutMount(Arc<MountRow>),
    DeleteMount(MountKey),
    PutPlugin(PluginRow),
    /// By id and instance.
    DeletePlugin(String, String),
    /// All instances, by their id.
    DeletePlugins(String),
    /// A plugin's accepted name of this node, by the plugin's id.
    PutNodeId(String, String),
    DeleteNodeId(String),
    Event(NewEvent),
    /// The boot in which the mounts that the rows tell of were made.
    Boot(String),
    PutFence(JournaledFence),
    DeleteFence,
}
