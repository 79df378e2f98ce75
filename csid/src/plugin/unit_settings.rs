//! The settings of a managed plugin besides its command: a profile's settings, the propagation of its mounts, its network. All
//! of them are properties of its unit, which an administrator's drop-ins change (`csi-plugin-ID-.service.d/`,
//! `csi-plugin-.service.d/`). A node profile has none that would give the plugin a mount namespace of its own.

use zbus::Variant;

use crate::plugin::network::Network;
use crate::plugin::place::Location;
use crate::plugin::profile::Profile;
use crate::plugin::spec::PluginSpec;
use crate::store::rows::Propagation;

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

/// The settings in which profiles differ.
struct Table {
    /// The capabilities in addition to [`NODE`]. `None`: no capability at all.
    capabilities: Option<&'static [u32]>,
    /// In addition to /dev/null and its like. Classes, not names: a rule for a device that is not there when the unit starts is
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

    fn settings(self, place: &Location) -> Vec<Setting> {
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
            // The kernel may kill one helper for lack of memory. The others go on.
            Profile::NodeFuse => settings.push(("OOMPolicy", "continue".into())),
            Profile::Controller => settings.extend(sandbox(place)),
            Profile::NodeBlock | Profile::NodeNet => {}
        }
        settings
    }
}

/// The parts of /run that a plugin in the sandbox keeps, where they exist. /etc/resolv.conf may be a link to there.
const RESOLVERS: [&str; 3] = ["/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager"];

/// Returns settings for a user of its own, and of /run only its own directory. A cover of single sockets would not last: who makes a
/// socket again uncovers it.
fn apart_from_others(user: &str, directory: &str) -> [Setting; 5] {
    let bind = |path: &str, is_optional: bool| (path.to_owned(), path.to_owned(), is_optional, libc::MS_REC);
    [
        ("DynamicUser", true.into()),
        ("User", user.to_owned().into()),
        ("TemporaryFileSystem", vec![("/run".to_owned(), "ro,mode=0755".to_owned())].into()),
        ("BindPaths", vec![bind(directory, false)].into()),
        ("BindReadOnlyPaths", RESOLVERS.map(|path| bind(path, true)).to_vec().into()),
    ]
}

/// Returns the settings of a plugin that only listens and makes connections on this host.
fn sandbox(place: &Location) -> Vec<Setting> {
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
    // csid's own directory, unless an older csid has journaled another one.
    let directory = place.socket.parent().unwrap_or(&place.socket).to_string_lossy().into_owned();
    let mut settings: Vec<Setting> = on.map(|name| (name, true.into())).into();
    settings.extend([
        ("ProtectSystem", "strict".into()),
        ("ProtectHome", "yes".into()),
        ("ProtectProc", "invisible".into()),
        ("ReadWritePaths", vec![directory.clone()].into()),
        ("RestrictNamespaces", 0_u64.into()),
        ("RestrictAddressFamilies", allowed(&["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"])),
        ("SystemCallFilter", allowed(&["@system-service"])),
    ]);
    // With an empty name systemd names the user by the unit; it is never root.
    settings.extend(apart_from_others(place.user.as_deref().unwrap_or_default(), &directory));
    settings
}

/// Returns the properties with which the plugin's unit is started.
pub(super) fn settings(spec: &PluginSpec, place: &Location) -> Vec<Setting> {
    let mut settings = spec.profile.map(|profile| profile.settings(place)).unwrap_or_default();
    settings.push(match spec.profile {
        Some(Profile::Controller) => ("KillMode", "control-group".into()),
        // FUSE helpers are the mounts: they outlive the plugin's own process.
        _ => ("KillMode", "process".into()),
    });
    // Either gives it a mount namespace, into which the host's mounts come or do not; out of it comes none.
    match spec.propagation() {
        Propagation::Bidirectional => {}
        // Not MS_PRIVATE: a private copy of a volume's mount never hears of an unmount, and keeps the volume in use.
        Propagation::HostToTask | Propagation::Private => {
            settings.push(("MountFlags", libc::MS_SLAVE.into()));
        }
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
        // systemd 254 and later give a unit with a network of its own a mount namespace too, unless set otherwise.
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
    use super::*;
    use crate::config::Directories;
    use crate::host::sandbox;
    use crate::plugin::spec::Supervision;

    fn with(profile: Option<Profile>, network: Network) -> Vec<Setting> {
        let directories = Directories { state: "/s".into(), runtime: "/r".into(), configuration: "/".into() };
        let spec =
            PluginSpec { supervision: Supervision::Managed, profile, network, ..PluginSpec::default() };
        settings(&spec, &Location::of(&directories, "a", &spec))
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
    fn a_controller_has_a_user_of_its_own() {
        let of = |settings: &[Setting], name: &str| {
            settings.iter().find(|(of, _)| *of == name).map(|(_, value)| value.try_clone().unwrap())
        };
        let settings = with(Some(Profile::Controller), Network::Host);
        assert_eq!(of(&settings, "User"), Some("csi-a".into()));
        let own = "/r/plugins/a/default".to_owned();
        assert_eq!(of(&settings, "BindPaths"), Some(vec![(own.clone(), own, false, libc::MS_REC)].into()));
        for profile in [Profile::NodeBlock, Profile::NodeFuse, Profile::NodeNet] {
            assert_eq!(of(&with(Some(profile), Network::Host), "DynamicUser"), None, "{profile:?}");
        }
    }

    /// csid starts no controller that an older csid has journaled with a socket of its own.
    #[test]
    fn no_controller_runs_as_root() {
        let directories = Directories { state: "/s".into(), runtime: "/r".into(), configuration: "/".into() };
        let spec = PluginSpec {
            supervision: Supervision::Managed,
            profile: Some(Profile::Controller),
            environment: [("CSI_ENDPOINT".to_owned(), "unix:///srv/p/csi.sock".to_owned())].into(),
            ..PluginSpec::default()
        };
        let settings = settings(&spec, &Location::of(&directories, "a", &spec));
        let has = |name: &str| settings.iter().find(|(of, _)| *of == name).map(|(_, value)| value);
        assert_eq!(has("User"), Some(&"csi-a".into()));
        assert_eq!(has("DynamicUser"), Some(&true.into()));
        let hidden = vec![("/run".to_owned(), "ro,mode=0755".to_owned())];
        assert_eq!(has("TemporaryFileSystem"), Some(&hidden.into()));
        assert_eq!(has("InaccessiblePaths"), None, "a cover is gone when its socket is made again");
    }

    #[test]
    fn no_propagation_keeps_a_private_copy_of_a_volume() {
        let directories = Directories { state: "/s".into(), runtime: "/r".into(), configuration: "/".into() };
        for propagation in [Propagation::HostToTask, Propagation::Private] {
            let spec = PluginSpec {
                supervision: Supervision::Managed,
                propagation: Some(propagation),
                ..PluginSpec::default()
            };
            let settings = settings(&spec, &Location::of(&directories, "a", &spec));
            let flags = settings.iter().find(|(name, _)| *name == "MountFlags").map(|(_, flags)| flags);
            assert_eq!(flags, Some(&Variant::from(libc::MS_SLAVE)), "{propagation:?}");
        }
    }

    #[test]
    fn profile_has_one_name() {
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
