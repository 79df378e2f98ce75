//! Hints by the detail `obstacle` of an error.

use csid_client::CsidError;

use super::common::{ORPHAN, STOPPING, Tried};
use crate::shell::quoted;

/// Returns the hint for an obstacle that the error names by a word of the contract. `None`: it names none, or an unknown one.
/// `volume`: `NAMESPACE VOLUME`, quoted for a shell.
pub(super) fn by_obstacle(error: &CsidError, tried: &Tried, plugin: &str, volume: &str) -> Option<String> {
    let mount = tried.mount.as_deref().unwrap_or("NAMESPACE VOLUME CONSUMER");
    let hint = match error.details.obstacle.as_deref()? {
        "node-id" => format!(
            "`csictl plugin show {plugin}` shows both names. If the new one is right, as root: `csictl plugin accept-node-id \
             {plugin} NAME`."
        ),
        "unknown-plugin" => format!(
            "Existing ones: `csictl plugin list`. `csictl plugin register {plugin} --socket PATH` adds one that runs; `csictl wait {plugin}` waits \
             for one that registers itself."
        ),
        "unregistered-volume" if tried.command == "mount" => format!(
            "Register it first (`csictl volume register {volume} --plugin ID --external-id ID --access-mode MODE`), or give --plugin and --external-id. Existing ones: \
             `csictl volume list`."
        ),
        "declared-volume" => format!("The cause and the remedy: `csictl explain {volume}`."),
        "registered-by-call" => {
            format!("Deregister it (`csictl volume deregister {volume}`) and reload, or remove the file.")
        }
        "capability" => format!("Its capabilities: `csictl volume show {volume}`."),
        "unknown-mount" => ORPHAN.to_owned(),
        "other-node" => {
            format!("If that node is gone for good, as root: `csictl release --force {mount}`.")
        }
        "expansion" => "Repeat the command when the expansion has ended, or wait for it with --wait TIME (a claim: --queue \
                        TIME)."
            .to_owned(),
        "creation" => {
            let operation = error.details.holders.first().map_or("OPERATION".into(), |id| quoted(id));
            format!("Wait for its end, or cancel it (`csictl cancel {operation}`); then repeat the command.")
        }
        "unconfirmed-source" | "unfit-capacity" => format!(
            "Look at the volume. Then delete it (`csictl volume delete {volume}`), or keep it: `csictl volume deregister \
             --force {volume}`, then register it."
        ),
        "other-user" => "Choose another consumer (for a mount also --tag TAG), or ask as that user.".to_owned(),
        "claimed-otherwise" => {
            format!("See it with `csictl claims`; to change it, first `csictl release {mount}`.")
        }
        "mounted-otherwise" => format!(
            "Compare the options with its own: `csictl mounts --json`. Give the same ones, or unmount it first (`csictl \
             unmount {mount}`), or give this mount a --tag of its own."
        ),
        "not-running" => "Start the unit first, or give it time with --grace TIME.".to_owned(),
        "not-mounted" => format!("Mount it first: `csictl mount {volume} CONSUMER`. Existing mounts: `csictl mounts`."),
        "declared-by-file" => "Change the file of volumes.d that declares it, or remove the file; then `csictl reload`. A \
                               reload forgets a volume without a file once it is not in use."
            .to_owned(),
        "spare-volume" => "Register the new volume under another name (`csictl volume register`, with its --plugin, --external-id and --access-mode). \
                           `csictl volume delete` of that name deletes it."
            .to_owned(),
        "csid-stopping" => STOPPING.to_owned(),
        "several-instances" => {
            format!("Name it with --replace INSTANCE; `csictl plugin show {plugin}` lists the instances.")
        }
        "replaced-instance" => {
            format!("Name its successor with --replace INSTANCE: `csictl plugin show {plugin}`.")
        }
        "fixed-key" => format!(
            "Unregister the plugin (`csictl plugin unregister {plugin}`), then `csictl plugin register {plugin}` with --socket PATH \
             or -- COMMAND, and the new value."
        ),
        "instance-socket" => "Let the new instance listen elsewhere, and name that socket with --socket PATH. A plugin that \
                              csid runs gets its own: leave CSI_ENDPOINT and the socket out of its command."
            .to_owned(),
        "upgrade" => format!(
            "The upgrade ends by itself; `csictl plugin show {plugin}` shows its instances. Then repeat the command."
        ),
        "plugin-of-file" => {
            format!("Change or remove plugins.d/{plugin}.toml, then `csictl reload`.")
        }
        "self-registered" => "It comes and goes with its registration socket. Start the new version, or end this one, where \
                              the plugin is deployed."
            .to_owned(),
        "external-plugin" => format!("Do it where the plugin runs: `csictl plugin show {plugin}` has its socket."),
        "hidden" => {
            let unit = error.details.holders.first().map_or("UNIT".into(), |unit| quoted(unit));
            format!(
                "`systemctl cat {unit}` shows where the setting is. Take it out, then `systemctl daemon-reload && csictl \
                 plugin restart {plugin}`."
            )
        }
        "credential" => {
            let name = error.message.strip_prefix("credential ").and_then(|text| text.split_once(": "));
            let name = name.map_or("NAME".into(), |(name, _)| quoted(name));
            format!(
                "Put it into /etc/credstore/{name} (root's, mode 0600), or say where it is by LoadCredential={name}:PATH in \
                 csid.service, then `systemctl daemon-reload`. Then repeat the command."
            )
        }
        "target" => "Choose another --target, or unmount what is there: `csictl mounts --json` shows the targets.".to_owned(),
        "known-volume" => format!("Use it by its name, `{volume}`, without --plugin and --external-id."),
        "unidentified-volume" => format!(
            "Name the volume as it was mounted: `csictl mount NAMESPACE VOLUME CONSUMER --plugin {plugin} --external-id ID`. csid \
             refuses that mount, and knows the id then. Then repeat the command."
        ),
        "unknown-target" => {
            let path = error.details.holders.first().map_or("PATH".into(), |path| quoted(path));
            format!("End what uses it, unmount it by hand (`umount {path}`), then repeat the command.")
        }
        "symbolic-link" => "`namei -l PATH` shows a link on the way: give the path without it. If there is none, a directory was \
                            renamed: repeat the command."
            .to_owned(),
        "bound-target" => "Unmount the target by hand (`umount TARGET`), then repeat the command.".to_owned(),
        "container" => "Run it by the container's manager (`podman exec`), or on the host.".to_owned(),
        _ => return None,
    };
    Some(hint)
}

#[cfg(test)]
mod tests {
    use csid_client::{Details, Kind};

    use crate::hints::samples::*;

    /// Each word of csid's `Obstacle` has its hint here, but for what a hint of the kind says.
    #[test]
    fn obstacle_of_an_error_names_the_next_command() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../csid/src/error.rs");
        let source = std::fs::read_to_string(path).unwrap();
        let words = source.split("impl Obstacle {").nth(1).unwrap().split("\n}").next().unwrap();
        let words: Vec<&str> =
            words.split("=> \"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
        let commands = [
            ("node-id", "`csictl plugin accept-node-id nfs NAME`"),
            ("unknown-plugin", "`csictl plugin register nfs --socket PATH`"),
            (
                "unregistered-volume",
                "`csictl volume register ns v --plugin ID --external-id ID --access-mode MODE`",
            ),
            ("declared-volume", "`csictl explain ns v`"),
            ("registered-by-call", "`csictl volume deregister ns v`"),
            ("capability", "`csictl volume show ns v`"),
            ("unknown-mount", "`csictl reconcile --remove-orphans`"),
            ("other-node", "`csictl release --force ns v job`"),
            ("expansion", "--queue TIME"),
            ("creation", "`csictl cancel 'op 1'`"),
            ("unconfirmed-source", "`csictl volume delete ns v`"),
            ("unfit-capacity", "`csictl volume delete ns v`"),
            ("other-user", "another consumer"),
            ("claimed-otherwise", "`csictl release ns v job`"),
            ("mounted-otherwise", "`csictl unmount ns v job`"),
            ("not-running", "--grace TIME"),
            ("not-mounted", "`csictl mount ns v CONSUMER`"),
            ("declared-by-file", "`csictl reload`"),
            ("spare-volume", "`csictl volume register`"),
            ("csid-stopping", "`systemctl status csid`"),
            ("several-instances", "--replace INSTANCE"),
            ("replaced-instance", "--replace INSTANCE"),
            ("fixed-key", "`csictl plugin unregister nfs`"),
            ("instance-socket", "--socket PATH"),
            ("upgrade", "`csictl plugin show nfs`"),
            ("plugin-of-file", "plugins.d/nfs.toml, then `csictl reload`"),
            ("self-registered", "registration socket"),
            ("external-plugin", "`csictl plugin show nfs`"),
            ("container", "`podman exec`"),
            ("target", "another --target"),
            ("known-volume", "`ns v`, without --plugin"),
            ("unidentified-volume", "CONSUMER --plugin nfs --external-id ID`"),
            ("unknown-target", "`umount 'op 1'`"),
            ("symbolic-link", "`namei -l PATH`"),
            ("bound-target", "`umount TARGET`"),
            ("hidden", "`systemctl cat 'op 1'`"),
            ("credential", "/etc/credstore/NAME"),
        ];
        assert_eq!(words, commands.map(|(word, _)| word));
        for (word, command) in commands {
            let details = Details {
                obstacle: Some(word.into()),
                plugin: Some("nfs".into()),
                holders: vec!["op 1".into()],
                ..Details::default()
            };
            let hint = said(Kind::Busy, details, &tried("mount"));
            assert!(hint.contains(command), "{word}: {hint}");
        }
        let unknown = Details { obstacle: Some("word-of-a-later-csid".into()), ..Details::default() };
        assert!(said(Kind::Busy, unknown, &tried("mount")).starts_with("Wait until it is free"));
    }

    #[test]
    fn unit_that_hides_mounts_is_quoted() {
        let details = Details {
            obstacle: Some("hidden".into()),
            plugin: Some("nfs".into()),
            holders: vec!["csi-plugin-my\\x2dnfs-a'; touch pwned.service".into()],
            ..Details::default()
        };
        let hint = said(Kind::PluginUnavailable, details, &tried("mount"));
        let quoted = r"`systemctl cat 'csi-plugin-my\x2dnfs-a'\''; touch pwned.service'`";
        assert!(
            hint.contains(quoted) && hint.contains("`systemctl daemon-reload && csictl plugin restart nfs`"),
            "{hint}"
        );
    }
}
