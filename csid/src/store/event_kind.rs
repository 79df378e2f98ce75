//! The types of events, in the contract's words (`org.csid1`, signal Event).

use std::fmt;

/// The type of an event that csid writes. The journal may hold types of other versions, so an event that was read has a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    PluginRegistered,
    PluginDeregistered,
    /// An instance came or left, and the plugin has others.
    PluginInstance,
    PluginHealth,
    PluginFingerprint,
    PluginNodeId,
    PluginRestarted,
    PluginUpgraded,
    PluginDrained,
    /// A command in the plugin.
    PluginExec,
    VolumeRegistered,
    VolumeChanged,
    VolumeDeregistered,
    VolumeExpanded,
    /// A creation or deletion that continues only when a caller repeats it.
    VolumeParked,
    VolumeAttached,
    VolumeDetached,
    ClaimChanged,
    ClaimForced,
    /// The servers of the cluster have ended a claim that csid has.
    ClaimGone,
    Mount,
    Unmount,
    MountDead,
    MountHealed,
    MountLost,
    MountForgotten,
    SecretRequired,
    /// A path that no row explains, or that csid could not remove.
    Orphan,
    TargetRoot,
    Reload,
    /// A new journal in place of a damaged one.
    State,
}

impl EventKind {
    pub fn name(self) -> &'static str {
        match self {
            EventKind::PluginRegistered => "plugin-registered",
            EventKind::PluginDeregistered => "plugin-deregistered",
            EventKind::PluginInstance => "plugin-instance",
            EventKind::PluginHealth => "plugin-health",
            EventKind::PluginFingerprint => "plugin-fingerprint",
            EventKind::PluginNodeId => "plugin-node-id",
            EventKind::PluginRestarted => "plugin-restarted",
            EventKind::PluginUpgraded => "plugin-upgraded",
            EventKind::PluginDrained => "plugin-drained",
            EventKind::PluginExec => "plugin-exec",
            EventKind::VolumeRegistered => "volume-registered",
            EventKind::VolumeChanged => "volume-changed",
            EventKind::VolumeDeregistered => "volume-deregistered",
            EventKind::VolumeExpanded => "volume-expanded",
            EventKind::VolumeParked => "volume-parked",
            EventKind::VolumeAttached => "volume-attached",
            EventKind::VolumeDetached => "volume-detached",
            EventKind::ClaimChanged => "claim-changed",
            EventKind::ClaimForced => "claim-forced",
            EventKind::ClaimGone => "claim-gone",
            EventKind::Mount => "mount",
            EventKind::Unmount => "unmount",
            EventKind::MountDead => "mount-dead",
            EventKind::MountHealed => "mount-healed",
            EventKind::MountLost => "mount-lost",
            EventKind::MountForgotten => "mount-forgotten",
            EventKind::SecretRequired => "secret-required",
            EventKind::Orphan => "orphan",
            EventKind::TargetRoot => "target-root",
            EventKind::Reload => "reload",
            EventKind::State => "state",
        }
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
