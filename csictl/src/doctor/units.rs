//! csid's units: whether they run and start at a boot, and what a drop-in has changed in them.

use super::finding::Report;
use super::systemctl::{Unit, show};
use crate::helpers::unit::REMOTE;

const CSID: &str = "csid.service";
const SOCKET: &str = "csid.socket";
const HELPER: &str = "csid-helper.service";
const HELPER_SOCKET: &str = "csid-helper.socket";
const PLUGINS: &str = "csi-plugins.target";
const ENGINES: &str = "csid-volume-plugin.socket";
const ENGINES_SERVICE: &str = "csid-volume-plugin.service";

const ALL: [&str; 8] = [CSID, SOCKET, HELPER, HELPER_SOCKET, PLUGINS, REMOTE, ENGINES, ENGINES_SERVICE];

/// Settings that give a unit a mount namespace of its own, and the values without that effect.
const NAMESPACE: [(&str, &[&str]); 22] = [
    ("PrivateMounts", &["no"]),
    ("PrivateTmp", &["no"]),
    ("PrivateDevices", &["no"]),
    ("PrivateIPC", &["no"]),
    ("ProtectSystem", &["no"]),
    ("ProtectHome", &["no"]),
    ("ProtectKernelTunables", &["no"]),
    ("ProtectKernelModules", &["no"]),
    ("ProtectKernelLogs", &["no"]),
    ("ProtectControlGroups", &["no"]),
    ("ProtectProc", &["default"]),
    ("ProcSubset", &["all"]),
    ("MountAPIVFS", &["no"]),
    ("DynamicUser", &["no"]),
    ("ReadOnlyPaths", &[]),
    ("ReadWritePaths", &[]),
    ("InaccessiblePaths", &[]),
    ("TemporaryFileSystem", &[]),
    ("BindPaths", &[]),
    ("BindReadOnlyPaths", &[]),
    ("RootDirectory", &[]),
    ("RootImage", &[]),
];

const OTHERS: [&str; 18] = [
    "Id",
    "LoadState",
    "LoadError",
    "UnitFileState",
    "ActiveState",
    "SubState",
    "Result",
    "NeedDaemonReload",
    "DropInPaths",
    "MainPID",
    "Before",
    "Wants",
    "User",
    "CapabilityBoundingSet",
    "PrivateNetwork",
    "NRestarts",
    "FragmentPath",
    "Triggers",
];

/// What systemd says of csid's units.
#[derive(Default)]
pub struct Units {
    units: Vec<Unit>,
}

impl Units {
    /// Returns a unit. `None`: systemd did not answer.
    pub fn get(&self, id: &str) -> Option<&Unit> {
        self.units.iter().find(|unit| unit.id() == id)
    }

    /// Returns why csid does not run. A connection would start it then. `None`: it runs, or systemd did not answer.
    pub fn stopped(&self) -> Option<String> {
        let csid = self.get(CSID).filter(|csid| !csid.is_active())?;
        // Without systemd a csid may run that no unit is about.
        let is_known = csid.is_loaded() || csid.is("LoadState", "masked");
        is_known.then(|| format!("it is {} ({})", csid.get("ActiveState"), csid.get("Result")))
    }
}

pub async fn look(report: &mut Report) -> Units {
    let properties: Vec<&str> = OTHERS.into_iter().chain(NAMESPACE.map(|(name, _)| name)).collect();
    let units = match show(&ALL, &properties).await {
        Ok(units) => Units { units },
        Err(error) => {
            let found = format!("`systemctl show` failed, so no unit is checked: {error}");
            report.warning("systemd", &found, "`systemctl is-system-running`; `systemctl status dbus`");
            return Units::default();
        }
    };
    let before = report.len();
    if let Some(unit) = units.get(CSID) {
        service(unit, report);
        order(unit, &units, report);
    }
    sockets(&units, report);
    if let Some(unit) = units.get(HELPER).filter(|unit| unit.is_loaded()) {
        settings(unit, report);
        if unit.is("ActiveState", "failed") {
            report.error(HELPER, &format!("it has failed ({})", unit.get("Result")), &restart_helper());
        }
    }
    engines(&units, report);
    if report.len() == before {
        report.ok("units", "csid's units run, start at a boot, and are as the package has them");
    }
    units
}

/// systemd starts no socket whose service is active, so the helper is stopped first.
fn restart_helper() -> String {
    format!(
        "`systemctl stop {HELPER}; systemctl reset-failed {HELPER_SOCKET} {HELPER}; systemctl start {HELPER_SOCKET} {CSID}`; \
         your mounts stay. Its log: `journalctl -u {HELPER}`"
    )
}

/// csid requires its socket, so systemd starts the socket between csid's stop and start. Alone it starts no socket of an active service.
fn restart_csid() -> String {
    format!("`systemctl enable {SOCKET}`, then `systemctl restart {CSID}`; your mounts stay")
}

/// Returns the step that has systemd read the socket's files again.
fn reload_socket(id: &str) -> String {
    match id {
        HELPER_SOCKET => format!(
            "`systemctl daemon-reload; systemctl stop {HELPER_SOCKET} {HELPER}; systemctl start {HELPER_SOCKET} {CSID}`; your \
             mounts stay"
        ),
        id => format!("`systemctl daemon-reload && systemctl restart {id}`"),
    }
}

fn service(unit: &Unit, report: &mut Report) {
    match unit.get("LoadState") {
        "loaded" => {}
        "masked" => {
            let remedy = "`systemctl unmask --runtime csid; systemctl start csid.socket csid`; without --runtime, if it was \
                          masked without it";
            return report.error(CSID, "the unit is masked", remedy);
        }
        "not-found" => return report.error(CSID, "there is no such unit", "install the package csid"),
        state => {
            let found = format!("systemd cannot load the unit ({state}): {}", unit.get("LoadError"));
            return report.error(
                CSID,
                &found,
                "`systemctl cat csid` shows its files; correct them, then `systemctl daemon-reload`",
            );
        }
    }
    match unit.get("ActiveState") {
        "failed" => {
            let found = format!("it has failed ({})", unit.get("Result"));
            report.error(
                CSID,
                &found,
                "`journalctl -u csid -n 50` has the reason; then `systemctl start csid`",
            );
        }
        "inactive" | "deactivating" => {
            let remedy = "`systemctl start csid.socket csid`; mounts and services that use them have stayed";
            report.error(CSID, "it does not run", remedy);
        }
        "activating" if !unit.is("NRestarts", "0") && !unit.is("NRestarts", "") => {
            let found =
                format!("it ends at each start; systemd has restarted it {} times", unit.get("NRestarts"));
            report.error(CSID, &found, "`journalctl -u csid -n 50` has the reason");
        }
        _ => {}
    }
    if unit.is("UnitFileState", "disabled") {
        let found = "it is disabled: after a reboot no volume is restored before a program asks for one";
        report.warning(CSID, found, "`systemctl enable csid`");
    }
    settings(unit, report);
}

/// Checks what a drop-in may have changed.
fn settings(unit: &Unit, report: &mut Report) {
    let id = unit.id();
    let mend = |what: &str| {
        format!(
            "take {what} out ({}), then `systemctl daemon-reload && systemctl restart {id}`; mounts stay",
            drop_ins(unit)
        )
    };
    if unit.is("NeedDaemonReload", "yes") {
        let found = "its files have changed since systemd read them";
        report.warning(id, found, &format!("`systemctl daemon-reload && systemctl restart {id}`"));
    }
    for (name, harmless) in NAMESPACE {
        let value = unit.get(name);
        if !value.is_empty() && !harmless.contains(&value) {
            let found = format!(
                "{name}={value} gives it a mount namespace of its own: the host and its services do not see what csid mounts"
            );
            report.error(id, &found, &mend(&format!("{name}=")));
        }
    }
    let user = unit.get("User");
    if !["", "root", "0"].contains(&user) {
        report.error(id, &format!("User={user}: only root can mount"), &mend("User="));
    }
    for needed in ["cap_sys_admin", "cap_dac_override"] {
        if unit.has("CapabilityBoundingSet") && !unit.lists("CapabilityBoundingSet", needed) {
            let found = format!("CapabilityBoundingSet= lacks {}: csid cannot mount", needed.to_uppercase());
            report.error(id, &found, &mend("CapabilityBoundingSet="));
        }
    }
}

fn drop_ins(unit: &Unit) -> String {
    match unit.get("DropInPaths") {
        "" => format!("`systemctl cat {}`", unit.id()),
        paths => format!("its drop-ins: {paths}"),
    }
}

/// Checks that mount units of the type csi are ordered after csid.
fn order(csid: &Unit, units: &Units, report: &mut Report) {
    if !csid.is_loaded() {
        return;
    }
    let remedy = format!(
        "a file of your own in place of the package's unit lacks the line ({}); remove it, or add the line, then `systemctl \
         daemon-reload`",
        drop_ins(csid)
    );
    for (property, why) in [
        (
            "Before",
            "the next boot mounts volumes of fstab before csid runs, and at the power-off csid stops before they are unmounted",
        ),
        (
            "Wants",
            "mounts of fstab are not ordered after csid, because only an active target orders anything",
        ),
    ] {
        if !csid.lists(property, REMOTE) {
            report.error(CSID, &format!("it has no {property}={REMOTE}: {why}"), &remedy);
        }
    }
    for (target, why) in [
        (REMOTE, "mounts of fstab are not ordered after csid"),
        (PLUGINS, "at the power-off plugins may stop before their volumes are unmounted"),
    ] {
        let is_inactive = units.get(target).is_some_and(|unit| !unit.is_active());
        if csid.is("ActiveState", "active") && is_inactive {
            let remedy = format!("`systemctl status {target}`; `systemctl start {target}`");
            report.warning(target, &format!("it is not active: {why}"), &remedy);
        }
    }
}

fn sockets(units: &Units, report: &mut Report) {
    for (id, why, remedy) in [
        (SOCKET, "programs reach csid by the system bus only", restart_csid()),
        (HELPER_SOCKET, "csid can mount nothing", restart_helper()),
    ] {
        let Some(unit) = units.get(id) else { continue };
        match unit.get("LoadState") {
            "loaded" => {}
            // The service was found to be missing.
            "not-found" => continue,
            state => {
                report.error(
                    id,
                    &format!("the unit is {state}: {why}"),
                    &format!("`systemctl unmask {id}`, then {remedy}"),
                );
                continue;
            }
        }
        if !unit.is_active() {
            let found = format!("it is {} ({}): {why}", unit.get("ActiveState"), unit.get("Result"));
            report.error(id, &found, &remedy);
        } else if unit.is("NeedDaemonReload", "yes") {
            let found = "its files have changed since systemd read them";
            report.warning(id, found, &reload_socket(id));
        } else if id == SOCKET && unit.is("UnitFileState", "disabled") {
            report.warning(
                id,
                "it is disabled: it does not listen after a reboot",
                &format!("`systemctl enable {id}`"),
            );
        }
    }
}

/// Checks the volume plugin for container engines, which is a package of its own.
fn engines(units: &Units, report: &mut Report) {
    let Some(socket) = units.get(ENGINES).filter(|unit| unit.is_loaded()) else { return };
    let service = units.get(ENGINES_SERVICE);
    if service.is_some_and(|service| service.is("ActiveState", "failed")) {
        report.error(
            ENGINES_SERVICE,
            "it has failed: Docker and Podman have no volumes of csid's",
            "`journalctl -u csid-volume-plugin` has the reason; then `systemctl restart csid-volume-plugin.socket`",
        );
    } else if !socket.is_active() {
        let found =
            format!("it is {}: Docker and Podman have no volumes of csid's", socket.get("ActiveState"));
        let remedy = format!("`systemctl enable --now {ENGINES}`, if an engine shall use them");
        match socket.is("ActiveState", "failed") {
            true => report.error(ENGINES, &found, &remedy),
            false => report.note(ENGINES, &found, &remedy),
        }
    } else if socket.is("UnitFileState", "disabled") {
        report.warning(
            ENGINES,
            "it is disabled: engines have no volumes after a reboot",
            &format!("`systemctl enable {ENGINES}`"),
        );
    }
}
