//! What a managed plugin is run with beside its command: a profile's settings, the propagation of its mounts, its network. All
//! of them are properties of its unit, which an administrator's drop-ins change (`csi-plugin-ID-.service.d/`,
//! `csi-plugin-.service.d/`). A node profile has none that would give the plugin a mount namespace of its own.

use serde::{Deserialize, Serialize};
use zbus::Variant;

use super::network::Network;
use super::spec::{Place, PluginSpec};
use crate::store::rows::Propagation;

/// For which kind of driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Disks: local, iSCSI, NVMe, RBD.
    NodeBlock,
    /// Mounts that are processes, which outlive the plugin's own.
    NodeFuse,
    /// NFS, SMB and other file systems of the kernel's.
    NodeNet,
    /// Talks to its back end, and mounts nothing.
    Controller,
}

impl Profile {
    /// As calls say them; files say the same.
    pub const WORDS: [(&str, Self); 4] = [
        ("node-block", Profile::NodeBlock),
        ("node-fuse", Profile::NodeFuse),
        ("node-net", Profile::NodeNet),
        ("controller", Profile::Controller),
    ];
}

/// A property as StartTransientUnit takes it.
type Setting = (&'static str, Variant<'static>);

/// Capabilities by linux/capability.h.
mod cap {
    pub const CHOWN: u32 = 0;
    pub const DAC_OVERRIDE: u32 = 1;
    pub const DAC_READ_SEARCH: u32 = 2;
    pub const FOWNER: u32 = 3;
    pub const FSETID: u32 = 4;
    pub const KILL: u32 = 5;
    pub const SETGID: u32 = 6;
    pub const SETUID: u32 = 7;
    pub const SETPCAP: u32 = 8;
    pub const NET_BIND_SERVICE: u32 = 10;
    pub const NET_ADMIN: u32 = 12;
    pub const IPC_LOCK: u32 = 14;
    pub const SYS_MODULE: u32 = 16;
    pub const SYS_RAWIO: u32 = 17;
    pub const SYS_CHROOT: u32 = 18;
    pub const SYS_PTRACE: u32 = 19;
    pub const SYS_ADMIN: u32 = 21;
    pub const SYS_NICE: u32 = 23;
    pub const SYS_RESOURCE: u32 = 24;
    pub const MKNOD: u32 = 27;
}

/// Mounting (CSI rule 7), files of any owner, and the way into the host's root by chroot or nsenter that drivers written for
/// containers take.
const NODE: [u32; 13] = [
    cap::SYS_ADMIN,
    cap::CHOWN,
    cap::DAC_OVERRIDE,
    cap::DAC_READ_SEARCH,
    cap::FOWNER,
    cap::FSETID,
    cap::KILL,
    cap::SETGID,
    cap::SETUID,
    cap::SETPCAP,
    cap::SYS_CHROOT,
    cap::SYS_PTRACE,
    cap::MKNOD,
];

/// What is different from profile to profile.
struct Table {
    /// Beside [`NODE`]; `None`: no capability at all.
    capabilities: Option<&'static [u32]>,
    /// Beside /dev/null and its like. Classes, not names: a rule for a device that is not there when the unit starts is
    /// dropped, and drivers load modules later.
    devices: &'static [&'static str],
    tasks: u64,
    files: u64,
}

impl Profile {
    fn table(self) -> Table {
        match self {
            Profile::NodeBlock => Table {
                // SCSI commands, LUKS keys in memory, iSCSI's netlink, modules.
                capabilities: Some(&[
                    cap::SYS_RAWIO,
                    cap::IPC_LOCK,
                    cap::NET_ADMIN,
                    cap::SYS_MODULE,
                    cap::SYS_NICE,
                    cap::SYS_RESOURCE,
                ]),
                devices: &["block-*", "char-*"],
                tasks: 8192,
                files: 65_536,
            },
            Profile::NodeFuse => Table {
                capabilities: Some(&[cap::IPC_LOCK, cap::SYS_NICE, cap::SYS_RESOURCE]),
                // /dev/fuse is one of them.
                devices: &["char-misc"],
                // The helpers of all its mounts, with their threads and files.
                tasks: 65_536,
                files: 1_048_576,
            },
            Profile::NodeNet => Table {
                // NFS servers want a client below port 1024.
                capabilities: Some(&[cap::NET_BIND_SERVICE]),
                devices: &[],
                tasks: 8192,
                files: 65_536,
            },
            Profile::Controller => Table { capabilities: None, devices: &[], tasks: 4096, files: 65_536 },
        }
    }

    fn settings(self, place: &Place) -> Vec<Setting> {
        let table = self.table();
        let bits = |bits: &[u32]| bits.iter().fold(0_u64, |mask, bit| mask | 1 << bit);
        let devices = table.devices.iter().map(|class| ((*class).to_owned(), "rwm".to_owned()));
        let mut settings: Vec<Setting> = vec![
            ("CapabilityBoundingSet", table.capabilities.map_or(0, |more| bits(&NODE) | bits(more)).into()),
            ("DevicePolicy", "closed".into()),
            ("DeviceAllow", devices.collect::<Vec<(String, String)>>().into()),
            ("TasksMax", table.tasks.into()),
            ("LimitNOFILE", table.files.into()),
            // Secrets pass through its memory.
            ("LimitCORE", 0_u64.into()),
            ("NoNewPrivileges", true.into()),
            ("LockPersonality", true.into()),
            ("RestrictRealtime", true.into()),
            ("SystemCallArchitectures", vec!["native".to_owned()].into()),
        ];
        match self {
            // One helper that the kernel kills for want of memory does not take the others along.
            Profile::NodeFuse => settings.push(("OOMPolicy", "continue".into())),
            Profile::Controller => settings.extend(sandbox(place)),
            Profile::NodeBlock | Profile::NodeNet => {}
        }
        settings
    }
}

/// Where root, which the plugin is, may have anything done on this host; those that are there.
const COMMANDS: [&str; 3] = ["-/run/dbus/system_bus_socket", "-/run/systemd/private", "-/run/csid/csid.sock"];

/// Of a plugin that does nothing on this host but listen and ask.
fn sandbox(place: &Place) -> Vec<Setting> {
    let allowed = |what: &[&str]| -> Variant<'static> {
        (true, what.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>()).into()
    };
    let on = [
        "PrivateTmp",
        "PrivateDevices",
        "ProtectKernelTunables",
        "ProtectKernelModules",
        "ProtectKernelLogs",
        "ProtectControlGroups",
        "ProtectClock",
        "ProtectHostname",
        "RestrictSUIDSGID",
    ];
    let socket = place.socket.parent().map(|directory| directory.to_string_lossy().into_owned());
    let mut settings: Vec<Setting> = on.map(|name| (name, true.into())).into();
    settings.extend([
        ("ProtectSystem", "strict".into()),
        ("ProtectHome", "yes".into()),
        ("ProtectProc", "invisible".into()),
        ("ReadWritePaths", Vec::from_iter(socket).into()),
        ("InaccessiblePaths", COMMANDS.map(str::to_owned).to_vec().into()),
        ("RestrictNamespaces", 0_u64.into()),
        ("RestrictAddressFamilies", allowed(&["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"])),
        ("SystemCallFilter", allowed(&["@system-service"])),
    ]);
    settings
}

/// What the plugin's unit is started with.
pub(super) fn settings(spec: &PluginSpec, place: &Place) -> Vec<Setting> {
    let mut settings = spec.profile.map(|profile| profile.settings(place)).unwrap_or_default();
    settings.push(match spec.profile {
        Some(Profile::Controller) => ("KillMode", "control-group".into()),
        // FUSE helpers are the mounts: they outlive the plugin's own process.
        _ => ("KillMode", "process".into()),
    });
    // Either gives it a mount namespace, into which the host's mounts come or do not; out of it comes none.
    match spec.propagation() {
        Propagation::Bidirectional => {}
        Propagation::HostToTask => settings.push(("MountFlags", libc::MS_SLAVE.into())),
        Propagation::Private => settings.push(("MountFlags", libc::MS_PRIVATE.into())),
    }
    match &spec.network {
        Network::Host => {}
        Network::None => settings.push(("PrivateNetwork", true.into())),
        Network::Namespace(_) => {
            let path = spec.network.path().map(|path| path.to_string_lossy().into_owned());
            settings.push(("NetworkNamespacePath", path.unwrap_or_default().into()));
        }
    }
    let is_apart = spec.profile == Some(Profile::Controller) || apart(spec).is_some();
    if !spec.network.is_host() && !is_apart {
        // systemd 254 and later give a unit with a network of its own a mount namespace too, unless told not to.
        settings.push(("PrivateMounts", false.into()));
    }
    settings
}

/// The propagation's word, where the plugin has its mounts to itself.
pub(super) fn apart(spec: &PluginSpec) -> Option<&'static str> {
    match spec.propagation() {
        Propagation::Bidirectional => None,
        Propagation::HostToTask => Some("host-to-task"),
        Propagation::Private => Some("private"),
    }
}

/// With what it was started, for people and for [`is_defined_as`](crate::host::units::Units::is_defined_as).
pub(super) fn description(id: &str, spec: &PluginSpec) -> String {
    let network = Some(&spec.network).filter(|network| !network.is_host()).cloned().map(String::from);
    let word = |profile| Profile::WORDS.iter().find(|(_, of)| *of == profile).map(|(word, _)| *word);
    let parts: Vec<String> = [
        spec.profile.and_then(word).map(|word| format!("profile {word}")),
        apart(spec).map(|propagation| format!("propagation {propagation}")),
        network.map(|network| format!("network {network}")),
    ]
    .into_iter()
    .flatten()
    .collect();
    match parts.is_empty() {
        true => format!("CSI plugin {id}"),
        false => format!("CSI plugin {id} ({})", parts.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::spec::Supervision;
    use super::*;
    use crate::config::Directories;
    use crate::host::sandbox;

    fn with(profile: Option<Profile>, network: Network) -> Vec<Setting> {
        let directories = Directories { state: "/s".into(), runtime: "/r".into(), configuration: "/".into() };
        let spec =
            PluginSpec { supervision: Supervision::Managed, profile, network, ..PluginSpec::default() };
        settings(&spec, &Place::of(&directories, "a", &spec))
    }

    fn hiding(settings: Vec<Setting>) -> usize {
        let owned = |(name, value): Setting| (name.to_owned(), value.try_into().unwrap());
        sandbox::hiding(&settings.into_iter().map(owned).collect()).len()
    }

    #[test]
    fn no_node_profile_and_no_network_hides_mounts() {
        let networks = [Network::Host, Network::None, Network::Namespace("n".into())];
        for network in networks {
            for profile in [None, Some(Profile::NodeBlock), Some(Profile::NodeFuse), Some(Profile::NodeNet)] {
                assert_eq!(hiding(with(profile, network.clone())), 0, "{profile:?} {network:?}");
            }
            assert!(hiding(with(Some(Profile::Controller), network)) > 5);
        }
        assert_eq!(with(None, Network::Host), [("KillMode", Variant::from("process"))], "as ever");
    }

    #[test]
    fn a_profile_has_one_word() {
        for (word, profile) in Profile::WORDS {
            assert_eq!(serde_json::to_value(profile).unwrap(), word);
            let spec = PluginSpec { profile: Some(profile), ..PluginSpec::default() };
            assert_eq!(description("a", &spec), format!("CSI plugin a (profile {word})"));
        }
        let spec = PluginSpec {
            propagation: Some(Propagation::Private),
            network: Network::None,
            ..PluginSpec::default()
        };
        assert_eq!(description("a", &spec), "CSI plugin a (propagation private, network none)");
        assert_eq!(description("a", &PluginSpec::default()), "CSI plugin a");
    }
}
