//! The next step for a volume that waits: the row `do` of `csictl explain`.

use csid_client::{Explanation, MountRow};

use super::common::{HELD, HELPER, ORPHAN, Tried};
use super::steps::{CLAIMS, OTHER_VOLUMES, SNAPSHOT, UNUSED};
use super::text::{Obstacle, end_hung, obstacle, unproven};
use crate::shell::quoted;

pub(super) const HOLDERS: &str = "unmount or release it for its holders (`csictl mounts`, `csictl claims`)";

pub(super) const CANCEL: &str =
    "`csictl operations` lists the operation that waits, and `csictl cancel ID` ends it";

/// Returns the command that ends a volume's wait. Empty: none is needed. `mounts`: those of the volume, for their tags and errors, which
/// the explanation does not have.
pub fn explained(explanation: &Explanation, mounts: &[MountRow], tried: &Tried) -> String {
    let waits = explanation.waiting_for.as_str();
    let volume = tried.volume.as_deref().unwrap_or("NAMESPACE VOLUME");
    if let Some((consumer, state)) =
        waits.strip_prefix("the mount of ").and_then(|rest| rest.rsplit_once(", which is "))
    {
        let row = mounts.iter().rfind(|row| row.consumer == consumer && phase(row) == state);
        return of_mount(
            state,
            &named(volume, consumer, row),
            row.map_or(&explanation.last_error, |row| &row.error),
        );
    }
    if let Some((consumer, _)) =
        waits.strip_prefix("the release of ").and_then(|rest| rest.rsplit_once(", which is "))
    {
        let claim = format!("{volume} {}", quoted(consumer));
        return match obstacle(&explanation.last_error) {
            Some(Obstacle::Held | Obstacle::InUseElsewhere) => HELD.to_owned(),
            Some(Obstacle::Hung) => end_hung(&format!("{claim} --all-tags")),
            Some(Obstacle::OtherNode) => {
                format!("if that node is gone for good, as root: `csictl release --force {claim}`")
            }
            _ => format!(
                "`csictl release {claim}` calls the plugin again; the last resort, as root, is `csictl release \
                 --forget {claim}`"
            ),
        };
    }
    if let Some(consumer) = waits.strip_prefix("a repeated Release of ").and_then(|rest| {
        // A consumer's name may contain ": ", so compare with the holders' names.
        let is_it = |holder: &&String| rest.strip_prefix(*holder).is_some_and(|rest| rest.starts_with(": "));
        explanation.holders.iter().filter(is_it).max_by_key(|holder| holder.len())
    }) {
        let claim = format!("{volume} {}", quoted(consumer));
        return format!(
            "remove the cause, then `csictl release {claim}` (with --secrets-file FILE, if it needs secrets); the last \
             resort, as root, is `csictl release --forget {claim}`"
        );
    }
    // Such a claim has not been answered.
    if let Some(consumer) = waits.strip_prefix("the claim of ")
        && explanation.holders.iter().any(|holder| holder == consumer)
    {
        return format!(
            "`csictl release {volume} {}` ends it; csid detaches the volume then",
            quoted(consumer)
        );
    }
    if let Some(node) = waits.strip_prefix("the plugin's answer to ControllerUnpublishVolume from ") {
        let node = quoted(node);
        return format!(
            "`csictl volume detach {volume} {node}` calls the plugin again (with --secrets-file FILE, if it needs secrets); the \
             last resort, as root, is `csictl volume detach --forget {volume} {node}`"
        );
    }
    let given_up = format!(
        "`csictl volume delete {volume}` (with --secrets-file FILE, if it needs secrets); the last resort, as root, is `csictl \
         volume deregister --forget {volume}`"
    );
    let is_unfinished = |step: &String| step.starts_with("creating: ") || step.starts_with("deleting: ");
    let unfinished = match explanation.steps.iter().any(is_unfinished) {
        true => format!("; or {given_up}"),
        false => String::new(),
    };
    // Other texts contain consumers' names, which may be any text.
    let plugin = waits.strip_prefix("plugin ").and_then(|rest| rest.split([' ', ',']).next()).map(quoted);
    match plugin {
        _ if waits.starts_with("the plugin's answer to CreateVolume of ")
            || waits.starts_with("the plugin's answer to DeleteVolume") =>
        {
            given_up
        }
        _ if waits.starts_with("the caller of CreateVolume") => {
            format!("repeat `csictl volume create`, or `csictl volume delete {volume}`")
        }
        Some(plugin) if waits.contains(" calls this node `") => format!(
            "`csictl plugin show {plugin}` shows both names; as root, `csictl plugin accept-node-id {plugin} NAME` accepts the new one"
        ),
        Some(plugin) if waits.contains("(not registered)") => format!(
            "start the plugin or register it (`csictl plugin register {plugin} --socket PATH`), then `csictl wait {plugin}`{unfinished}"
        ),
        Some(plugin) => {
            format!("`csictl plugin show {plugin}`, `csictl plugin logs {plugin}`{unfinished}")
        }
        _ if waits.starts_with("a repeated ") => "repeat it; `csictl events` shows the tries".to_owned(),
        _ if waits == "to be registered as declared" => {
            "correct its file of volumes.d, then `csictl reload`, which tries again at once".to_owned()
        }
        _ if [UNUSED, CLAIMS].contains(&waits) => format!("{HOLDERS}; {CANCEL}"),
        _ if waits == OTHER_VOLUMES => format!(
            "release a claim of another volume of the plugin (`csictl plugin show PLUGIN` lists the consumers); {CANCEL}"
        ),
        _ if waits == SNAPSHOT => {
            format!("wait: `csictl snapshots PLUGIN` shows whether it is ready; {CANCEL}")
        }
        // The servers' part of a volume of a cluster.
        _ if waits.starts_with("the end of ") || waits.starts_with("node ") => {
            format!("an operator ends it: `csictl --operator explain {volume}`")
        }
        _ => String::new(),
    }
}

/// Returns a mount's state in the words of an explanation.
pub(super) fn phase(row: &MountRow) -> &str {
    match row.state.as_str() {
        "mounted" if !row.healthy => "mounted, but not healthy",
        state => state,
    }
}

/// Returns a mount's name for commands, quoted for a shell.
pub(super) fn named(volume: &str, consumer: &str, row: Option<&MountRow>) -> String {
    let tag = row.map_or("", |row| row.tag.as_str());
    let tag = if tag.is_empty() { String::new() } else { format!(" --tag {}", quoted(tag)) };
    format!("{volume} {}{tag}", quoted(consumer))
}

/// Returns the hint for a mount. `mount`: its name for `csictl unmount`. `error`: the error of its row.
pub(super) fn of_mount(state: &str, mount: &str, error: &str) -> String {
    let last = format!("the last resort, as root, is `csictl unmount --forget {mount}`");
    match (state, obstacle(error)) {
        (_, Some(Obstacle::Helper)) => HELPER.to_owned(),
        (_, Some(Obstacle::Hung)) => end_hung(mount),
        ("mounted, but not healthy", Some(Obstacle::Vanished)) => {
            "repeat `csictl mount` with the same options, or `csictl reconcile`".to_owned()
        }
        ("mounted, but not healthy", _) => format!(
            "`csictl unmount {mount}` (with `--force` while processes have its files open), then mount it again"
        ),
        (_, Some(Obstacle::Orphan)) => ORPHAN.to_owned(),
        (_, Some(Obstacle::Unproven)) => unproven(mount),
        (_, Some(Obstacle::Unidentified)) => format!(
            "`csictl mount NAMESPACE VOLUME CONSUMER --plugin PLUGIN --external-id ID`, as it was mounted: csid refuses that, and \
             knows the id then; then `csictl unmount {mount}`"
        ),
        ("mounting" | "unmounting" | "uncertain" | "waiting", Some(Obstacle::Occupied)) => {
            "`findmnt PATH` shows that mount; unmount it, and csid goes on by itself".to_owned()
        }
        ("unmounting" | "uncertain", Some(Obstacle::Held | Obstacle::InUseElsewhere)) => HELD.to_owned(),
        ("unmounting" | "uncertain", _) => {
            format!("`csictl unmount {mount}` calls the plugin again; {last}")
        }
        ("mounting", _) => format!("`csictl unmount {mount}` cancels it; csid rolls it back with the plugin"),
        ("lost", _) => format!(
            "`csictl mount` with the same options (`csictl mounts --json` shows them), or `csictl unmount {mount}`"
        ),
        ("waiting", _) => format!(
            "bring the plugin back, or repeat `csictl mount` with the secrets; or `csictl unmount {mount}`; {last}"
        ),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use csid_client::{Details, Kind};

    use super::*;
    use crate::hints::samples::*;

    #[test]
    fn explanation_names_the_next_command() {
        for (waiting_for, command) in [
            ("the mount of my job, which is mounted, but not healthy", "`csictl unmount ns v 'my job'`"),
            ("the mount of my job, which is uncertain", "`csictl unmount --forget ns v 'my job'`"),
            ("the release of my job, which is node-detached", "`csictl release --forget ns v 'my job'`"),
            ("a repeated Release of my job: it needs its secrets", "`csictl release ns v 'my job'` (with"),
            ("the caller of CreateVolume, to ask for its answer again", "`csictl volume create`"),
            ("plugin nfs (not registered)", "`csictl wait nfs`"),
            (
                "plugin nfs (running) the plugin nfs calls this node `b`, which was `a`",
                "accept-node-id nfs NAME`",
            ),
            ("plugin nfs, instance b (unhealthy) no", "`csictl plugin show nfs`"),
            ("a repeated mount of job: the last one failed, and csid does not repeat it", "`csictl events`"),
        ] {
            let explanation = Explanation {
                waiting_for: waiting_for.into(),
                holders: vec!["my".into(), "my job".into()],
                ..Explanation::default()
            };
            let next = explained(&explanation, &[], &tried("explain"));
            assert!(next.contains(command), "{next}");
        }
        let explanation = |waiting_for: &str, holders: &[&str]| Explanation {
            waiting_for: waiting_for.into(),
            holders: holders.iter().map(|&holder| holder.to_owned()).collect(),
            ..Explanation::default()
        };
        let released = explanation("a repeated Release of job: x: no", &["job", "job: x"]);
        let next = explained(&released, &[], &tried("explain"));
        assert!(next.contains("'job: x'"), "another's claim is not named: {next}");
        let named = explanation("the claim of x plugin $(id) (not registered)", &[]);
        assert_eq!(explained(&named, &[], &tried("explain")), "", "a name is no command");
        assert_eq!(explained(&Explanation::default(), &[], &tried("explain")), "");
    }

    #[test]
    fn every_wait_names_a_way_out() {
        for (waiting_for, command) in [
            ("the claim of my job", "`csictl release ns v 'my job'`"),
            ("to be registered as declared", "`csictl reload`"),
            (
                "the plugin's answer to ControllerUnpublishVolume from node 1",
                "`csictl volume detach --forget ns v 'node 1'`",
            ),
            (UNUSED, "`csictl claims`"),
            (CLAIMS, "`csictl cancel ID`"),
            (OTHER_VOLUMES, "`csictl plugin show PLUGIN`"),
            (SNAPSHOT, "`csictl snapshots PLUGIN`"),
        ] {
            let explanation = Explanation {
                waiting_for: waiting_for.into(),
                holders: vec!["my job".into()],
                ..Explanation::default()
            };
            let next = explained(&explanation, &[], &tried("explain"));
            assert!(next.contains(command), "{waiting_for}: {next}");
        }
        for (error, command) in [
            ("something else is mounted at /p", "`findmnt PATH`"),
            ("something that no row explains is at /p", "`csictl reconcile --remove-orphans`"),
            (
                "/p is mounted and no row explains it; the volume stays staged until it is gone",
                "`csictl reconcile --remove-orphans`",
            ),
            (
                "nothing is mounted at /s any more, so what is mounted at /p cannot be shown to be from there",
                "`umount PATH`",
            ),
            (
                "the external id of a/b could not be read from the damaged journal, and without it csid cannot name the \
                 volume to unpublish",
                "--external-id ID`",
            ),
        ] {
            let next = ends(&mount("unmounting", error));
            assert!(next.contains(command) && !next.contains("--forget"), "{error}: {next}");
        }
    }

    #[test]
    fn explained_command_has_the_mounts_tag() {
        let row = MountRow { tag: "a b".into(), ..mount("uncertain", "") };
        assert!(ends(&row).contains("`csictl unmount --forget ns v 'my job' --tag 'a b'`"));
        let explanation = Explanation {
            waiting_for: "the mount of my job, which is uncertain".into(),
            ..Explanation::default()
        };
        let another = MountRow { tag: "other".into(), healthy: true, ..mount("mounted", "") };
        let next = explained(&explanation, &[row, another], &tried("explain"));
        assert!(next.contains("--tag 'a b'") && !next.contains("other"), "the one that it waits for: {next}");
    }

    #[test]
    fn unfinished_mount_is_explained() {
        assert!(ends(&mount("mounting", "")).contains("`csictl unmount ns v 'my job'` cancels it"));
        assert!(ends(&mount("lost", "")).contains("`csictl mount` with the same options"));
        let waiting = ends(&mount("waiting", ""));
        assert!(waiting.contains("secrets") && waiting.contains("--forget ns v 'my job'"), "{waiting}");
    }

    #[test]
    fn endless_creation_names_the_last_resort() {
        let forget = "as root, is `csictl volume deregister --forget ns v`";
        let explanation = |waiting_for: &str, step: &str| Explanation {
            waiting_for: waiting_for.into(),
            steps: vec![step.into()],
            ..Explanation::default()
        };
        for explanation in [
            explanation(
                "the plugin's answer to CreateVolume of disk",
                "creating: the plugin is asked for it",
            ),
            explanation("the plugin's answer to DeleteVolume", "deleting: the plugin is asked to"),
            explanation("plugin p (failed) gone", "creating: the plugin is asked for it"),
            explanation("plugin p (not registered)", "deleting: the plugin is asked to"),
        ] {
            let next = explained(&explanation, &[], &tried("explain"));
            assert!(next.contains("`csictl volume delete ns v`") && next.contains(forget), "{next}");
        }
        let next = explained(&explanation("plugin p (failed) gone", "registered"), &[], &tried("explain"));
        assert!(!next.contains("--forget"), "{next}");
        let hint = failed(Kind::Busy, "it is being created", Details::default(), &tried("volume deregister"));
        assert!(hint.contains("`csictl explain ns v`"), "{hint}");
    }

    #[test]
    fn a_failed_helper_is_started_by_its_socket() {
        let message = "csid's helper did not answer for /p: Connection refused";
        let hint = failed(Kind::Internal, message, Details::default(), &tried("unmount"));
        assert!(hint.contains("`systemctl reset-failed csid-helper.socket"), "{hint}");
        assert_eq!(ends(&mount("uncertain", message)), hint);
    }
}
