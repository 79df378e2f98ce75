//! Rows that are read of the journal, and the filter of mounts.

use std::collections::BTreeMap;

use crate::store::rows::{JournaledFence, MountKey, MountRow, Phase, PluginRow, VolumeRow};

/// Everything the journal holds, or what can be read of it.
pub struct Loaded {
    pub boot: Option<String>,
    pub plugins: Vec<PluginRow>,
    /// Each plugin's accepted name of this node, by the plugin's id.
    pub node_ids: BTreeMap<String, String>,
    /// The last fence of this node by the servers. `None`: there was none, or the node has joined since.
    pub fence: Option<JournaledFence>,
    pub volumes: Vec<VolumeRow>,
    pub mounts: Vec<MountRow>,
}

/// Equality on each field that is given, but for the part.
#[derive(Clone, Debug, Default)]
pub struct MountFilter {
    pub namespace: Option<String>,
    pub volume: Option<String>,
    pub consumer: Option<String>,
    pub tag: Option<String>,
    pub plugin: Option<String>,
    pub source: Option<String>,
    /// The volume's staging path.
    pub staging: Option<String>,
    pub phase: Option<Phase>,
    pub uid: Option<u32>,
    /// The path where the consumer has it bound, as the row has it.
    pub target: Option<String>,
    /// Those that come after it by key.
    pub after: Option<MountKey>,
    /// The first so many of them; 0: all.
    pub most: usize,
}

impl MountFilter {
    /// The one mount of this identity.
    pub fn of(key: &MountKey) -> Self {
        MountFilter {
            namespace: Some(key.namespace.clone()),
            volume: Some(key.volume.clone()),
            consumer: Some(key.consumer.clone()),
            tag: Some(key.tag.clone()),
            ..MountFilter::default()
        }
    }
}
