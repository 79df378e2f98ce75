//! Hints: the last line of an error, with the next step.

use csid_client::{CsidError, Error, Kind};

pub use self::attention::{Due, attention};
pub use self::common::Tried;
use self::common::{CAPABILITY, STOPPING, lacks_capability};
pub use self::explained::explained;
pub use self::helper::of_helper;
use self::obstacle::by_obstacle;
pub use self::operator::{explained_by_servers, of_operator};
pub use self::plugin::{DRAINED, unhealthy};
use self::steps::{CLAIM, DISABLED, FORGET, LIMIT, QUEUED, TOPOLOGY, WAITING};
use self::text::{UNGRANTED, obstructed};
use crate::shell::quoted;

mod attention;
mod common;
mod explained;
mod helper;
mod obstacle;
mod operator;
mod plugin;
#[cfg(test)]
mod samples;
mod steps;
mod text;

const MEMBERS: &str =
    "Run it as root, or as a member of group csid (`adduser USER csid`, then log in again).";

/// What csid says to a claim for another node.
const OWN_NODE: &str = "claims for its own node only";

const UNCHANGED: &str = "Nothing has changed. Correct the file and check it with `csictl check-config`.";

pub fn hint(error: &Error, tried: &Tried) -> Option<String> {
    let hint = match error {
        Error::Csid(error) => return csid(error, tried),
        Error::Connect(connecting) => {
            if connecting.socket_denied() {
                return Some(MEMBERS.to_owned());
            }
            let what = if connecting.socket.is_some() { "csid.socket csid" } else { "dbus csid" };
            format!("Start it: `systemctl start {what}`; csid's log: `journalctl -u csid`.")
        }
        Error::NotRunning { masked: true, .. } => {
            "Unmask it: `systemctl unmask --runtime csid; systemctl start csid.socket csid` (without \
             --runtime, if it was masked that way)."
                .to_owned()
        }
        Error::NotRunning { .. } => {
            "Start csid: `systemctl start csid`; its log: `journalctl -u csid`.".to_owned()
        }
        Error::Refused(_) => "csid's own policy of the bus admits every user: look for other rules about org.csid1 in \
                              /etc/dbus-1/system.d. Root and group csid reach csid by its private socket, without the bus."
            .to_owned(),
        Error::Disconnected(_) => match tried.operation {
            Some(_) => "csid was stopped or restarted. It finishes or rolls back each operation; repeat the \
                        same command for the outcome."
                .to_owned(),
            None => {
                "csid was stopped or restarted: `systemctl status csid`; then repeat the command.".to_owned()
            }
        },
        Error::NotServed { .. } => {
            "csid and csictl are of different versions; `csictl status` lists what this csid can do."
                .to_owned()
        }
        _ => return None,
    };
    Some(hint)
}

/// Returns the next step of a host that joins its cluster.
fn joining(error: &CsidError, tried: &Tried) -> Option<&'static str> {
    if tried.command != "cluster join" {
        return None;
    }
    Some(match error.kind {
        Kind::Busy => {
            "What has them: `csictl mounts`, `csictl claims`. Unmount and release them, then repeat the command."
        }
        Kind::NotAuthorized => {
            "A server's csid-server.toml needs the grant `register` for this node in the volume's namespace. Then repeat the command."
        }
        Kind::AlreadyExists => {
            "An operator sees what the servers have: `csictl --operator volume list`. What has moved stays there; repeat the command for the rest."
        }
        Kind::NotSupported => {
            "The host, and what keeps a volume from moving: /usr/share/doc/csid/docs/cluster-operations.md, \"A host with volumes of its own\"."
        }
        Kind::Unavailable => {
            "Why it has not joined: `csictl cluster status`. If it has volumes of its own: `csictl cluster join --import`."
        }
        _ => return None,
    })
}

fn csid(error: &CsidError, tried: &Tried) -> Option<String> {
    let plugin = error.details.plugin.as_deref().or(tried.plugin.as_deref()).unwrap_or("PLUGIN");
    let mount = tried.mount.as_deref().unwrap_or("NAMESPACE VOLUME CONSUMER");
    let log = format!("`csictl plugin logs {plugin}` if csid runs it");
    let volume = tried.volume.as_deref().unwrap_or("NAMESPACE VOLUME");
    // A release ends all the consumer's mounts.
    let unmount = match tried.command {
        "release" => format!("{mount} --all-tags"),
        _ => mount.to_owned(),
    };
    if let Some(hint) = obstructed(error, tried, &unmount) {
        return Some(hint);
    }
    // The volume in the way.
    let other = match (&error.details.namespace, &error.details.volume) {
        (Some(namespace), Some(volume)) => format!("{} {}", quoted(namespace), quoted(volume)),
        _ => volume.to_owned(),
    };
    if let Some(hint) = by_obstacle(error, tried, plugin, &other) {
        return Some(hint);
    }
    if let Some(hint) = joining(error, tried) {
        return Some(hint.to_owned());
    }
    let ends = matches!(tried.command, "unmount" | "release");
    let goes_on = match tried.command {
        // csid keeps trying even if a plugin has refused.
        "unmount" | "release" => true,
        "volume delete" => error.details.retryable == Some(true),
        // A creation that has not reached the plugin ends with its caller.
        "volume create" => {
            let step = error.details.step.as_deref();
            error.details.retryable == Some(true) && ![Some(QUEUED), Some(WAITING)].contains(&step)
        }
        _ => false,
    };
    let why = format!("The cause and the remedy: `csictl explain {volume}`.");
    // Only for a removal that was tried already.
    let last = match tried.command {
        command @ ("unmount" | "release") => {
            format!(
                " The last resort, if the plugin never succeeds: `csictl {command} --forget {mount}` as root."
            )
        }
        _ => String::new(),
    };
    let of_claim = matches!(tried.command, "claim" | "release");
    let of_volume = tried.command.starts_with("volume") || tried.command == "explain";
    let registering = tried.command == "plugin register";
    let hint = match error.kind {
        Kind::InvalidArgument => match tried.command {
            "reload" => UNCHANGED.to_owned(),
            command if lacks_capability(command, &error.message) => CAPABILITY.to_owned(),
            command => format!("Valid arguments: `csictl {command} --help`."),
        },
        Kind::NotFound => match tried.command {
            "unmount" if !error.details.tags.is_empty() => {
                let tags: Vec<String> = error.details.tags.iter().map(|tag| quoted(tag)).collect();
                format!("It has the tags {}: name one with --tag, or all with --all-tags.", tags.join(" "))
            }
            "explain" => "Volumes and mounts: `csictl volume list`, `csictl mounts`.".to_owned(),
            "cancel" => {
                "It has ended already, or never existed: `csictl operations` lists those in progress.".to_owned()
            }
            "adopt-mount" => {
                "The kernel's mounts: `findmnt PATH`. csid's plugins and mounts: `csictl plugin list`, `csictl mounts`.".to_owned()
            }
            _ if of_claim || of_volume => {
                "Existing ones: `csictl volume list`, `csictl claims`, `csictl plugin list`.".to_owned()
            }
            _ => "Existing ones: `csictl plugin list`, `csictl volume list`, `csictl mounts`.".to_owned(),
        },
        Kind::AlreadyExists if registering => {
            format!(
                "See it with `csictl plugin show {plugin}`; a new version replaces it with `csictl plugin upgrade \
                 {plugin}` (and --replace INSTANCE, if it has several). Or register another instance with --instance."
            )
        }
        Kind::AlreadyExists if tried.command == "plugin upgrade" => format!(
            "Choose another --instance: `csictl plugin show {plugin}` lists those that exist."
        ),
        Kind::AlreadyExists if of_claim => format!(
            "See it with `csictl claims`; to change it, first `csictl release {mount}`."
        ),
        Kind::AlreadyExists if tried.command == "volume create" => format!(
            "See it with `csictl volume show {other}`. Delete it first (`csictl volume delete {other}`), or choose another \
             name."
        ),
        Kind::AlreadyExists if of_volume => format!(
            "See it with `csictl volume show {other}`; to replace it, first `csictl volume deregister {other}`."
        ),
        Kind::AlreadyExists if tried.command == "reload" => UNCHANGED.to_owned(),
        Kind::AlreadyExists if tried.command == "adopt-mount" => {
            "See which row has the path: `csictl mounts --json`.".to_owned()
        }
        Kind::AlreadyExists if tried.command == "mount" => format!(
            "Compare the options with its own: `csictl mounts --json`, `csictl volume show {volume}`."
        ),
        Kind::AlreadyExists => "Existing ones: `csictl mounts --json`, `csictl volume list`.".to_owned(),
        Kind::Busy if error.details.step.as_deref() == Some(FORGET) => format!(
            "Unmount it by hand (`umount PATH`; where its server does not answer, `csictl unmount --force-hung {unmount}` as \
             root), or end the processes that show it in another mount namespace; then repeat the command."
        ),
        Kind::Busy if ends => format!(
            "End its holders, then repeat the command. If the mount's server is gone, as `csictl mounts` shows, \
             `csictl unmount --force {unmount}` detaches it anyway."
        ),
        Kind::Busy if tried.command == "volume deregister" && !error.details.holders.is_empty() => format!(
            "Release its claims first (`csictl claims` shows them), or drop them as they are: `csictl volume deregister \
             --force {other}`. {why}"
        ),
        Kind::Busy if tried.command.starts_with("volume") && !error.details.holders.is_empty() => {
            format!("Unmount, release or detach it first; `csictl mounts` and `csictl claims` show its users. {why}")
        }
        Kind::Busy if tried.command.starts_with("volume") => why,
        Kind::Busy if tried.command == "plugin unregister" => format!(
            "Wait for what is under way (`csictl operations`); `csictl plugin drain {plugin}` unmounts its mounts, `csictl \
             claims` shows its claims. Or repeat the command with --force."
        ),
        Kind::Busy => {
            "Wait until it is free, or end its holders; `csictl mounts`, `csictl claims` and `csictl operations` \
                       show what csid knows."
                .to_owned()
        }
        Kind::ClaimConflict if error.details.step.as_deref() == Some(LIMIT) => format!(
            "The plugin takes no more volumes on this node: release one of its others (`csictl plugin show {plugin}` lists \
             their consumers), or wait for that with --wait TIME (a claim: --queue TIME)."
        ),
        Kind::ClaimConflict if error.details.step.as_deref() == Some(TOPOLOGY) => {
            format!(
                "The volume's topologies: `csictl volume show {other}`; this node's: `csictl plugin show {plugin}`. Use the \
                 volume on a node in one of its topologies. If this node's is wrong, correct the plugin's configuration, then \
                 `csictl plugin restart {plugin}`."
            )
        }
        Kind::ClaimConflict if tried.command == "claim" => {
            format!(
                "Its holders: `csictl claims`, `csictl mounts`. With --queue TIME a claim waits that long. If a holder does \
                 not end: `csictl explain {volume}`."
            )
        }
        Kind::ClaimConflict => format!(
            "Unmount it there first, or wait for it with --wait TIME (a claim: --queue TIME); or give all of them the same \
             name of the volume, the same options and an access mode for several users, such as \
             single-node-multi-writer. If an unmount does not end: `csictl explain {volume}`."
        ),
        Kind::PluginUnavailable if error.details.step.as_deref() == Some(CLAIM) => format!(
            "The servers lack a report of a host: of one with the plugin's controller (`csictl --operator node list`), or of this one \
             (`csictl cluster status`, `csictl plugin show {plugin}`)."
        ),
        Kind::PluginUnavailable => {
            format!(
                "See why: `csictl plugin show {plugin}`, and {log}. If csid does not run it, start what listens at its socket. Then \
                 `csictl wait {plugin}`."
            )
        }
        Kind::PluginShutdown => format!("Wait until it is back: `csictl wait {plugin}`."),
        Kind::PluginError if goes_on => format!("csid keeps trying. {why} The plugin's log: {log}."),
        Kind::PluginError if error.details.retryable == Some(true) => {
            format!("The same command may succeed later. The plugin's log: {log}.")
        }
        Kind::PluginError if error.details.rpc.is_some() && error.details.grpc_code.is_none() => {
            format!("The plugin answered OK without the result, which is a fault of the plugin. Its log: {log}.")
        }
        Kind::PluginError if error.details.rpc.is_none() => format!("The plugin's log: {log}."),
        Kind::PluginError => format!("The plugin refused it. Its log: {log}."),
        Kind::NotSupported if error.message.ends_with(UNGRANTED) => {
            "csid-server.toml of each server needs that grant for a host with the plugin's controller, in the volume's namespace, then \
             `systemctl reload csid-server`: /usr/share/doc/csid/docs/cluster-volumes.md, \"Controllers\"."
                .to_owned()
        }
        Kind::NotSupported if tried.command == "adopt-mount" => {
            "Adopt it under a name that is not registered, with --plugin, --external-id and --publish-context; its present manager detaches it."
                .to_owned()
        }
        Kind::NotSupported
            if tried.command == "plugin exec" && error.details.step.as_deref() == Some(DISABLED) =>
        {
            "`exec = true` above `[deadlines]` in csid.toml, then `csictl reload`, allows commands in plugins.".to_owned()
        }
        Kind::NotSupported if tried.command == "volume create" => format!(
            "Features of the plugin: `csictl plugin show {plugin}`. Or create the volume with the storage's own tools, \
             then `csictl volume register {volume} --plugin {plugin} --external-id ID --access-mode MODE`."
        ),
        Kind::NotSupported => {
            format!("Features of the plugin: `csictl plugin show {plugin}`; of csid: `csictl status`.")
        }
        Kind::NotAuthorized if tried.command == "claim" && error.message.contains(OWN_NODE) => {
            "Leave --node out, or claim it by csid of that node.".to_owned()
        }
        Kind::NotAuthorized if !lacks_action(&error.message) => {
            "Ask as root, or leave out what requires root: no rule of polkit allows it.".to_owned()
        }
        Kind::NotAuthorized => {
            "Ask as root; or have polkit allow the action named above, and ask with --bus. Group \
                                csid may list, wait, claim and mount what is registered, and release and unmount \
                                what is its own."
                .to_owned()
        }
        Kind::Cancelled if tried.volume.is_some() => format!(
            "csid rolls the operation back: `csictl explain {volume}` shows the progress. Repeat the command if it is \
             needed again."
        ),
        Kind::Cancelled => "csid rolls the operation back. Repeat the command if it is needed again.".to_owned(),
        Kind::TimedOut if tried.command == "plugin wait" => {
            format!("See why: `csictl plugin show {plugin}`, and {log}.")
        }
        Kind::TimedOut if tried.command == "plugin restart" => format!(
            "csid restarts it anyway, until it is ready: `csictl plugin show {plugin}`, `csictl wait {plugin}`, and {log}."
        ),
        Kind::TimedOut if goes_on => format!("csid keeps trying. {why}"),
        Kind::TimedOut if error.details.step.as_deref() == Some(QUEUED) => format!(
            "Nothing was started: another operation of the volume came first (`csictl operations`). {why}"
        ),
        Kind::TimedOut => {
            "Give it longer with --deadline; `csictl operations` shows whether csid still works on it."
                .to_owned()
        }
        Kind::Uncertain if of_claim => format!(
            "The plugin's outcome is unknown: repeat the command, or end it with `csictl release \
             {mount}`. The plugin's log: {log}.{last}"
        ),
        Kind::Uncertain if goes_on && of_volume => {
            format!("The plugin's outcome is unknown; csid keeps trying. {why} The plugin's log: {log}.")
        }
        Kind::Uncertain if of_volume => {
            format!("The plugin's outcome is unknown: repeat the command. The plugin's log: {log}.")
        }
        Kind::Uncertain => format!(
            "The plugin's outcome is unknown: repeat the command, or end it with `csictl unmount \
             {mount}`. The plugin's log: {log}.{last}"
        ),
        Kind::RateLimited if tried.command == "plugin exec" => {
            "`csictl operations` lists the commands that run in plugins; `csictl cancel ID` ends one.".to_owned()
        }
        Kind::RateLimited if tried.command == "plugin logs" => {
            "`systemctl list-units 'csid-log-*'` lists them; `systemctl stop UNIT` ends one.".to_owned()
        }
        Kind::RateLimited => {
            "This user has reached a limit. Wait for operations in progress (`csictl operations`), or end what is not \
             needed (`csictl claims`, `csictl mounts`); then repeat."
                .to_owned()
        }
        Kind::SecretRequired => {
            "Give --secrets-file FILE, or --credential NAME for a volume that must survive a reboot by itself. A claim of \
             a cluster's attached volume takes --credential csid.NAMESPACE.NAME alone."
                .to_owned()
        }
        Kind::ShuttingDown => STOPPING.to_owned(),
        Kind::StateCorrupt => {
            "Nothing was unmounted. See what would be recorded with `csictl reconcile --new-journal \
                               --dry-run`, then begin a new journal without --dry-run; csid(8) says what follows."
                .to_owned()
        }
        Kind::Unavailable => {
            "Mounts stay as they are. See the state of this host: `csictl cluster status`. What ends it: \
             /usr/share/doc/csid/docs/troubleshooting.md, Clusters; if it is cut off, `systemctl status csid-link`. Then repeat \
             the command."
                .to_owned()
        }
        Kind::Internal if error.details.retryable == Some(true) => {
            "Nothing was changed. Remove the cause, then repeat the same command.".to_owned()
        }
        Kind::Internal => "This is a fault of csid. Its log has more: `journalctl -u csid`.".to_owned(),
        _ => return None,
    };
    Some(hint)
}

/// Returns whether the message of a refusal names the polkit action that the caller lacks.
fn lacks_action(message: &str) -> bool {
    let uid = message.strip_prefix("uid ").and_then(|rest| rest.split_once(" may not do org.csid1."));
    uid.is_some_and(|(uid, _)| uid.bytes().all(|digit| digit.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use csid_client::{Connecting, Details};

    use super::samples::*;
    use super::*;

    #[test]
    fn unreachable_volume_names_both_topologies() {
        let tried = Tried { plugin: Some("p".into()), ..tried("mount") };
        let details = Details { step: Some(TOPOLOGY.into()), ..Details::default() };
        let hint = said(Kind::ClaimConflict, details, &tried);
        assert!(
            hint.contains("`csictl volume show ns v`") && hint.contains("`csictl plugin show p`"),
            "{hint}"
        );
    }

    #[test]
    fn mount_in_the_way_is_unmounted_by_hand() {
        let hint = failed(Kind::Busy, "something else is mounted at /p", Details::default(), &tried("mount"));
        assert!(hint.contains("Unmount it"), "{hint}");
        let unproven =
            "nothing is mounted at /s any more, so what is mounted at /p cannot be shown to be from there";
        let hint = failed(Kind::Busy, unproven, Details::default(), &tried("unmount"));
        assert!(hint.contains("`umount PATH`") && hint.contains("--force ns v job`"), "{hint}");
    }

    #[test]
    fn existing_volume_is_deleted_before_a_creation() {
        let hint = said(Kind::AlreadyExists, Details::default(), &tried("volume create"));
        assert!(hint.contains("`csictl volume delete ns v`") && !hint.contains("deregister"), "{hint}");
    }

    #[test]
    fn limit_of_commands_in_plugins_names_cancel() {
        let hint = said(Kind::RateLimited, Details::default(), &tried("plugin exec"));
        assert!(hint.contains("`csictl operations`") && hint.contains("`csictl cancel ID`"), "{hint}");
        let hint = said(Kind::RateLimited, Details::default(), &tried("plugin logs"));
        assert!(hint.contains("`systemctl stop UNIT`"), "{hint}");
    }

    #[test]
    fn busy_volume_or_plugin_names_force() {
        let held = || Details { holders: vec!["job".into()], ..Details::default() };
        let hint = said(Kind::Busy, held(), &tried("volume deregister"));
        assert!(hint.contains("`csictl claims`") && hint.contains("deregister --force ns v`"), "{hint}");
        let hint = said(Kind::Busy, held(), &tried("volume delete"));
        assert!(hint.contains("release") && !hint.contains("--force"), "a deletion has no force: {hint}");
        let unregister =
            Tried { command: "plugin unregister", plugin: Some("nfs".into()), ..Tried::default() };
        let hint = said(Kind::Busy, Details::default(), &unregister);
        assert!(hint.contains("`csictl plugin drain nfs`") && hint.contains("--force"), "{hint}");
    }

    #[test]
    fn continuing_operations_name_explain() {
        let may_pass = || Details { retryable: Some(true), ..Details::default() };
        for command in ["unmount", "release", "volume create", "volume delete"] {
            for kind in [Kind::TimedOut, Kind::PluginError] {
                let hint = failed(kind, "m", may_pass(), &tried(command));
                assert!(
                    hint.contains("csid keeps trying") && hint.contains("`csictl explain ns v`"),
                    "{hint}"
                );
            }
        }
        let hint = failed(Kind::Uncertain, "m", may_pass(), &tried("volume create"));
        assert!(hint.contains("keeps trying") && hint.contains("`csictl explain ns v`"), "{hint}");
        let away = Details { step: Some(WAITING.into()), ..may_pass() };
        let hint = failed(Kind::TimedOut, "m", away, &tried("volume create"));
        assert!(
            !hint.contains("keeps trying"),
            "a creation ends with its caller before the plugin is asked: {hint}"
        );
        let refused =
            || Details { grpc_code: Some(3), rpc: Some("CreateVolume".into()), ..Details::default() };
        let hint = failed(Kind::PluginError, "m", refused(), &tried("volume create"));
        assert!(!hint.contains("keeps trying"), "a creation that was refused has ended: {hint}");
        let hint = failed(Kind::PluginError, "m", refused(), &tried("unmount"));
        assert!(hint.contains("keeps trying"), "{hint}");
        assert!(!failed(Kind::TimedOut, "m", may_pass(), &tried("mount")).contains("keeps trying"));
        let queued = Details { step: Some(QUEUED.into()), ..may_pass() };
        let hint = failed(Kind::TimedOut, "m", queued, &tried("mount"));
        assert!(hint.starts_with("Nothing was started"), "{hint}");
        let queued = Details { step: Some(QUEUED.into()), ..may_pass() };
        let hint = failed(Kind::TimedOut, "m", queued, &tried("unmount"));
        assert!(hint.contains("keeps trying"), "an unmount keeps its place: {hint}");
    }

    #[test]
    fn missing_capability_names_the_access_mode() {
        for command in ["volume create", "volume register"] {
            let hint =
                failed(Kind::InvalidArgument, "capabilities is missing", Details::default(), &tried(command));
            assert!(hint.starts_with("Give --access-mode MODE"), "{hint}");
        }
        let hint =
            failed(Kind::InvalidArgument, "name is empty", Details::default(), &tried("volume create"));
        assert!(hint.contains("--help"), "{hint}");
    }

    #[test]
    fn polkit_hint_needs_an_action_in_the_error() {
        let refused =
            |message: &str| failed(Kind::NotAuthorized, message, Details::default(), &tried("mount"));
        assert!(refused("uid 7 may not do org.csid1.inline").contains("polkit allow the action"));
        let of_node = format!("this csid {OWN_NODE}, db-1");
        let hint = failed(Kind::NotAuthorized, &of_node, Details::default(), &tried("claim"));
        assert!(hint.starts_with("Leave --node out"), "{hint}");
        let calls = concat!(env!("CARGO_MANIFEST_DIR"), "/../csid/src/volume/volumes/calls.rs");
        assert!(std::fs::read_to_string(calls).unwrap().contains(OWN_NODE), "csid says it");
        for message in ["force-hung requires root", "/srv/a belongs to uid 8; a target has to be of uid 7"] {
            assert!(!refused(message).contains("the action named above"), "{message}");
        }
    }

    #[test]
    fn only_disabled_commands_suggest_the_setting() {
        let refused = |step: Option<&str>| {
            let details = Details { step: step.map(str::to_owned), ..Details::default() };
            said(Kind::NotSupported, details, &tried("plugin exec"))
        };
        assert!(refused(Some(DISABLED)).contains("exec = true"));
        assert!(!refused(None).contains("exec = true"), "the plugin is in another's unit, or a container");
    }

    #[test]
    fn unavailable_cluster_names_its_status() {
        let join = |kind| said(kind, Details::default(), &tried("cluster join"));
        assert!(join(Kind::Busy).contains("csictl claims"));
        assert!(join(Kind::NotAuthorized).contains("register"));
        assert!(join(Kind::Unavailable).contains("--import"));
        let hint = said(Kind::Unavailable, Details::default(), &tried("mount"));
        assert!(
            hint.contains("`csictl cluster status`")
                && hint.contains("cut off, `systemctl status csid-link`"),
            "{hint}"
        );
    }

    #[test]
    fn cancelled_mount_names_explain() {
        let hint = said(Kind::Cancelled, Details::default(), &tried("mount"));
        assert!(hint.contains("`csictl explain ns v`") && !hint.contains("undone"), "{hint}");
    }

    #[test]
    fn claim_conflict_names_explain() {
        for command in ["mount", "claim"] {
            let hint = said(Kind::ClaimConflict, Details::default(), &tried(command));
            assert!(hint.contains("`csictl explain ns v`"), "{hint}");
        }
    }

    #[test]
    fn a_mount_with_another_tag_names_its_tags() {
        let details = Details { tags: vec!["a b".into()], ..Details::default() };
        let hint = said(Kind::NotFound, details, &tried("unmount"));
        assert!(hint.contains("the tags 'a b'") && hint.contains("--all-tags"), "{hint}");
        assert!(said(Kind::NotFound, Details::default(), &tried("explain")).contains("`csictl mounts`"));
    }

    #[test]
    fn ok_without_a_mount_is_the_plugins_fault() {
        let lie = Details { rpc: Some("NodePublishVolume".into()), ..Details::default() };
        let hint = failed(Kind::PluginError, "OK, but nothing is mounted", lie, &tried("mount"));
        assert!(hint.starts_with("The plugin answered OK without the result"), "{hint}");
    }

    #[test]
    fn full_node_names_claims_to_release() {
        let tried = Tried { plugin: Some("p".into()), ..tried("mount") };
        let limit = Details { step: Some(LIMIT.into()), ..Details::default() };
        let hint = said(Kind::ClaimConflict, limit, &tried);
        assert!(hint.contains("`csictl plugin show p`") && hint.contains("--queue TIME"), "{hint}");
    }

    #[test]
    fn claim_without_a_controller_names_the_hosts() {
        let tried = Tried { plugin: Some("p".into()), ..tried("mount") };
        let claim = Details { step: Some(CLAIM.into()), ..Details::default() };
        let hint = said(Kind::PluginUnavailable, claim.clone(), &tried);
        assert!(
            hint.contains("`csictl --operator node list`") && hint.contains("`csictl plugin show p`"),
            "{hint}"
        );
        assert!(!hint.contains("start what listens"), "{hint}");
        let message =
            format!("ns/v: plugin p attaches volumes, and no node with the grant controller:p{UNGRANTED}");
        let hint = failed(Kind::NotSupported, &message, claim, &tried);
        assert!(
            hint.contains("csid-server.toml") && hint.contains("`systemctl reload csid-server`"),
            "{hint}"
        );
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/src/controllers.rs");
        let source = std::fs::read_to_string(path).unwrap();
        assert!(source.contains(UNGRANTED.trim_start()), "no server says: {UNGRANTED}");
    }

    #[test]
    fn a_refusal_is_explained_by_what_refused() {
        let tried = Tried { plugin: Some("p".into()), command: "claim", ..Tried::default() };
        let limit = Details { step: Some("count the plugin's volumes".into()), ..Details::default() };
        let hint = said(Kind::ClaimConflict, limit, &tried);
        assert!(hint.contains("no more volumes") && !hint.contains("access mode"), "{hint}");
        let lie = Details { rpc: Some("NodePublishVolume".into()), ..Details::default() };
        assert!(!said(Kind::PluginError, lie.clone(), &tried).contains("refused"));
        let refused = Details { grpc_code: Some(3), ..lie };
        assert!(said(Kind::PluginError, refused, &tried).contains("refused"));
    }

    #[test]
    fn hints_name_the_plugin_and_the_mount() {
        let details = Details { plugin: Some("nfs".into()), ..Details::default() };
        let tried = Tried { plugin: Some("other".into()), ..Tried::default() };
        let hint = said(Kind::PluginUnavailable, details, &tried);
        assert!(
            hint.contains("`csictl plugin show nfs`") && hint.contains("`csictl plugin logs nfs`"),
            "{hint}"
        );
        assert!(hint.contains("start what listens at its socket"), "{hint}");

        let tried = Tried { mount: Some("ns 'my vol' job".into()), ..Tried::default() };
        let hint = said(Kind::Uncertain, Details::default(), &tried);
        assert!(hint.contains("`csictl unmount ns 'my vol' job`"), "{hint}");
        assert!(!hint.contains("--forget"), "a mount is not forgotten before it was unmounted: {hint}");
        let tried = Tried { command: "release", ..tried };
        let hint = said(Kind::Uncertain, Details::default(), &tried);
        assert!(hint.contains("`csictl release ns 'my vol' job`"), "{hint}");
        assert!(hint.ends_with("`csictl release --forget ns 'my vol' job` as root."), "the last: {hint}");
        let shown = Details { step: Some(FORGET.into()), ..Details::default() };
        assert!(said(Kind::Busy, shown, &tried).contains("umount PATH"));
    }

    #[test]
    fn a_new_version_of_a_plugin_is_an_upgrade() {
        let tried = Tried { command: "plugin register", plugin: Some("nfs".into()), ..Tried::default() };
        let hint = said(Kind::AlreadyExists, Details::default(), &tried);
        assert!(hint.contains("`csictl plugin upgrade nfs`") && !hint.contains("unregister"), "{hint}");
        let again = Tried { command: "plugin upgrade", ..tried };
        let hint = said(Kind::AlreadyExists, Details::default(), &again);
        assert!(hint.contains("--instance") && hint.contains("`csictl plugin show nfs`"), "{hint}");
    }

    #[test]
    fn masked_csid_is_unmasked() {
        let not_running = |masked| Error::NotRunning { message: "m".into(), masked };
        let hint = |error| hint(&error, &Tried::default()).unwrap();
        assert!(hint(not_running(true)).contains("systemctl unmask --runtime csid;"));
        assert!(!hint(not_running(false)).contains("unmask"));
    }

    #[test]
    fn denied_socket_names_group_csid() {
        let failed = |kind: std::io::ErrorKind| {
            let error = zbus::Error::InputOutput(std::sync::Arc::new(kind.into()));
            Error::Connect(Connecting { socket: Some(("/run/csid/csid.sock".into(), error)), bus: None })
        };
        let hint = |kind| hint(&failed(kind), &Tried::default()).unwrap();
        assert!(hint(std::io::ErrorKind::PermissionDenied).contains("group csid"));
        assert!(hint(std::io::ErrorKind::NotFound).contains("systemctl start csid.socket csid"));
    }

    /// The conflict may be between a file and a registration, or an inline mount and a registered volume.
    #[test]
    fn already_exists_does_not_suggest_unmount() {
        let hint =
            |command| said(Kind::AlreadyExists, Details::default(), &Tried { command, ..Tried::default() });
        assert!(hint("reload").contains("check-config"));
        assert!(["reload", "mount"].iter().all(|command| !hint(command).contains("unmount")));
    }

    #[test]
    fn a_volumes_hints_name_it() {
        let tried =
            Tried { command: "volume register", volume: Some("ns 'my vol'".into()), ..Tried::default() };
        let hint = said(Kind::AlreadyExists, Details::default(), &tried);
        assert!(hint.contains("`csictl volume deregister ns 'my vol'`"), "{hint}");
        let known_as =
            Details { namespace: Some("ns".into()), volume: Some("first".into()), ..Details::default() };
        let hint = said(Kind::AlreadyExists, known_as, &tried);
        assert!(hint.contains("`csictl volume deregister ns first`"), "the one that is there: {hint}");
        let hint = said(Kind::Uncertain, Details::default(), &tried);
        assert!(!hint.contains("unmount"), "a volume is not unmounted by its registration: {hint}");
    }
}
