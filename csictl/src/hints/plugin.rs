//! The next step for a plugin: the row `do` of `csictl plugin show`, and a drain that left mounts.

use csid_client::Plugin;

use crate::shell::quoted;

/// The step after a drain that left mounts.
pub const DRAINED: &str =
    "End what uses them (`fuser -vm PATH` as root lists the processes), then drain the plugin again.";

/// Returns how a plugin whose process or network namespace is not there can start. Empty: csid's text names no such cause.
pub fn unhealthy(plugin: &Plugin) -> String {
    // A text of the plugin itself never begins so.
    let text = plugin.health_message.as_str();
    let text = text.split_once("; it is started again at ").map_or(text, |(text, _)| text);
    let (id, unit) = (quoted(&plugin.id), quoted(&plugin.unit));
    let restart = format!("then `csictl plugin restart {id}`");
    if text.starts_with("there is no network namespace ") {
        return format!("Make it (`ip netns add NAME`), or have network-prestart make it; {restart}.");
    }
    if let Some((network, _)) = text.strip_prefix("network-prestart: ").and_then(|text| text.split_once(": "))
    {
        return format!("`journalctl -u {}` has the output of the commands.", quoted(network));
    }
    if !plugin.unit.is_empty() && text.strip_prefix("there is no ") == Some(plugin.unit.as_str()) {
        return format!(
            "Write the unit and `systemctl daemon-reload`, or register the plugin with another one; {restart}."
        );
    }
    if text.starts_with("systemd cannot load ") {
        return format!("`systemctl status {unit}` says why.");
    }
    let Some(text) = text.strip_prefix(plugin.unit.as_str()).filter(|_| !plugin.unit.is_empty()) else {
        return String::new();
    };
    match text {
        " is masked" => format!("`systemctl unmask {unit}`, {restart}."),
        _ if text.starts_with(" is another name of ") => {
            "Register the plugin with that name of the unit.".to_owned()
        }
        _ if text.starts_with(" has no main process to watch") => {
            "Register the plugin as external.".to_owned()
        }
        _ if text.starts_with(" has ended, but processes of it are left") => {
            format!("`systemctl status {unit}` lists them. Unmount what they serve, or end them.")
        }
        _ if text.starts_with(" stays ") => format!("`systemctl status {unit}` says why."),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the texts of csid's `StartError`, so that a text that changes has its hint.
    #[test]
    fn plugin_that_cannot_start_has_a_next_step() {
        let path =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../csid/src/plugin/errors/start.rs");
        let source = std::fs::read_to_string(path).unwrap();
        for (text, command) in [
            ("there is no network namespace {}", "`ip netns add NAME`"),
            ("network-prestart: {unit}: {how}", "`journalctl -u d.service`"),
            ("{unit} has ended, but processes of it are left, which keep", "Unmount what they serve"),
            ("{unit} stays {active}", "`systemctl status d.service`"),
            ("there is no {unit}", "`systemctl daemon-reload`"),
            ("{unit} is masked", "`systemctl unmask d.service`, then `csictl plugin restart p`"),
            ("systemd cannot load {unit} ({load})", "`systemctl status d.service`"),
            ("{unit} is another name of {name}", "Register the plugin with that name"),
            ("{unit} has no main process to watch", "as external"),
        ] {
            assert!(source.contains(&format!("\"{text}")), "{text}");
            let health_message =
                text.replace("{unit}", "d.service").replace("{how}", "it exited with status 1");
            for again in ["", "; it is started again at 2026-01-01 00:00:00 UTC"] {
                let health_message = format!("{health_message}{again}");
                let plugin =
                    Plugin { id: "p".into(), unit: "d.service".into(), health_message, ..Plugin::default() };
                let next = unhealthy(&plugin);
                assert!(next.contains(command), "{text}: {next}");
            }
        }
        let own = Plugin { health_message: "Probe: INTERNAL: it is masked".into(), ..Plugin::default() };
        assert_eq!(unhealthy(&own), "");
    }
}
