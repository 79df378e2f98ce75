//! Finds the settings of a unit that hide its mounts from the host. systemd gives a unit with such a setting a mount namespace of its
//! own. Nothing propagates out of it, whatever MountFlags= says. csid cannot see the namespace of a root process with more
//! capabilities than its own. So it asks systemd for the unit's settings, or has systemd look.

use std::collections::HashMap;
use std::time::Duration;

use zbus::{OwnedVariant, Variant};

use crate::host::units::{Units, UnitsError, command};

/// Each of these alone does it, unless it is empty, off or its default. With PrivateUsers= there is no namespace, and no
/// right to mount either. Those of newer systemds are simply not there on older ones.
const HIDING: [&str; 30] = [
    "BindPaths",
    "BindReadOnlyPaths",
    "DynamicUser",
    "ExecPaths",
    "ExtensionDirectories",
    "ExtensionImages",
    "IPCNamespacePath",
    "InaccessiblePaths",
    "LogNamespace",
    "MountFlags",
    "MountImages",
    "NoExecPaths",
    "PrivateDevices",
    "PrivateIPC",
    "PrivateMounts",
    "PrivatePIDs",
    "PrivateTmp",
    "PrivateUsers",
    "ProcSubset",
    "ProtectControlGroups",
    "ProtectHome",
    "ProtectKernelLogs",
    "ProtectKernelModules",
    "ProtectKernelTunables",
    "ProtectProc",
    "ProtectSystem",
    "ReadOnlyPaths",
    "ReadWritePaths",
    "RootImage",
    "TemporaryFileSystem",
];
/// For a look into `/proc`.
const LOOK_USEC: u64 = 10_000_000;
const OFF: [&str; 5] = ["", "no", "off", "default", "all"];

impl Units {
    /// The settings of a loaded service, as `Name=value`, that keep its mounts from the host.
    pub async fn hiding(&self, unit: &str) -> Result<Vec<String>, UnitsError> {
        let Some(path) = self.path(unit).await? else { return Ok(Vec::new()) };
        let call = "GetAll";
        let body = ("org.freedesktop.systemd1.Service",);
        let answer = self.call(&path, "org.freedesktop.DBus.Properties", call, unit, &body).await?;
        let failed = |source| UnitsError::Call { call, unit: unit.to_owned(), source };
        let properties: HashMap<String, OwnedVariant> = answer.body().deserialize().map_err(failed)?;
        Ok(hiding(&properties))
    }

    /// Whether a process that runs mounts where the host sees it, whatever its unit says by now: it has the mount namespace of PID 1,
    /// and the user namespace that has a right to it. A unit with all of root's capabilities looks.
    pub async fn is_in_hosts_namespaces(&self, pid: u32) -> Result<bool, UnitsError> {
        let unit = format!("csid-look-{pid}.service");
        let same = |kind: &str| {
            let of = |pid: &str| format!("/proc/{pid}/ns/{kind}");
            command(&["/usr/bin/test".to_owned(), of(&pid.to_string()), "-ef".to_owned(), of("1")])
        };
        let properties: Vec<(&str, Variant<'_>)> = vec![
            ("Description", format!("Whether the host sees what process {pid} mounts").into()),
            ("Type", "oneshot".into()),
            ("ExecStart", [same("mnt"), same("user")].concat().into()),
            ("TimeoutStartUSec", LOOK_USEC.into()),
            // Else one that has not begun looks as one that has ended well.
            ("RemainAfterExit", true.into()),
        ];
        // A killed csid may have left such a unit for this pid.
        self.stop(&unit).await?;
        self.reset_failed(&unit).await?;
        self.start_transient_unit(&unit, &properties).await?;
        let mut pause = Duration::from_millis(5);
        let looking = async {
            loop {
                match self.state(&unit).await? {
                    Some(state) if state.active == "active" => return Ok(true),
                    Some(state) if state.active == "failed" => return Ok(false),
                    _ => tokio::time::sleep(pause).await,
                }
                pause = (pause * 2).min(Duration::from_millis(200));
            }
        };
        // A look that failed has seen nothing of the host.
        let limit = Duration::from_micros(LOOK_USEC) * 2;
        let is_there = tokio::time::timeout(limit, looking).await.unwrap_or(Ok(false))?;
        self.stop(&unit).await?;
        self.reset_failed(&unit).await?;
        Ok(is_there)
    }
}

pub(crate) fn hiding(properties: &HashMap<String, OwnedVariant>) -> Vec<String> {
    let get = |name: &str| properties.get(name).map(|value| &**value);
    let mut found: Vec<String> =
        HIDING.iter().filter_map(|name| Some(format!("{name}={}", set(name, get(name)?)?))).collect();
    // Without the kernel's file systems mounted below it, it is a chroot in the host's namespace.
    let root = get("RootDirectory").and_then(|root| set("RootDirectory", root));
    if let (Some(root), Some(Variant::Bool(true))) = (root, get("MountAPIVFS")) {
        found.push(format!("RootDirectory={root}"));
    }
    found
}

/// Returns the value of the setting. `None`: it is not set.
fn set(name: &str, value: &Variant<'_>) -> Option<String> {
    match value {
        Variant::Bool(is_on) => is_on.then(|| "yes".to_owned()),
        Variant::Str(text) => (!OFF.contains(&text.as_str())).then(|| text.as_str().to_owned()),
        Variant::U64(flags) if name == "MountFlags" => match *flags {
            0 | libc::MS_SHARED => None,
            libc::MS_SLAVE => Some("slave".to_owned()),
            libc::MS_PRIVATE => Some("private".to_owned()),
            other => Some(other.to_string()),
        },
        // Their elements differ in shape; `systemctl cat` shows them.
        Variant::Array(elements) => (!elements.is_empty()).then(|| "…".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(properties: Vec<(&str, Variant<'static>)>) -> Vec<String> {
        let owned = |(name, value): (&str, Variant<'static>)| (name.to_owned(), value.try_into().unwrap());
        hiding(&properties.into_iter().map(owned).collect())
    }

    #[test]
    fn off_or_unknown_settings_hide_nothing() {
        let none: Vec<String> = Vec::new();
        assert_eq!(
            of(vec![
                ("PrivateTmp", false.into()),
                ("ProtectSystem", "no".into()),
                ("ProtectProc", "default".into()),
                ("ProcSubset", "all".into()),
                ("LogNamespace", "".into()),
                ("MountFlags", 0_u64.into()),
                ("BindPaths", Vec::<String>::new().into()),
                ("RootDirectory", "/srv/driver".into()),
                ("MountAPIVFS", false.into()),
                ("NoNewPrivileges", true.into()),
                ("PrivateNetwork", true.into()),
            ]),
            none
        );
    }

    #[test]
    fn hiding_setting_is_named_with_value() {
        assert_eq!(
            of(vec![
                ("PrivateTmp", true.into()),
                ("ProtectSystem", "strict".into()),
                ("ProtectProc", "invisible".into()),
                ("MountFlags", libc::MS_PRIVATE.into()),
                ("ReadOnlyPaths", vec!["/etc".to_owned()].into()),
                ("RootDirectory", "/srv/driver".into()),
                ("MountAPIVFS", true.into()),
            ]),
            [
                "MountFlags=private",
                "PrivateTmp=yes",
                "ProtectProc=invisible",
                "ProtectSystem=strict",
                "ReadOnlyPaths=…",
                "RootDirectory=/srv/driver"
            ]
        );
    }
}
