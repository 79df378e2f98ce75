//! Hints by the words of csid's texts, for what no detail of an error and no field of a row says.

use csid_client::{CsidError, Kind};

use super::common::{HELD, HELPER, ORPHAN, Tried};
use crate::shell::quoted;

/// An obstacle that is only in csid's text, in no detail of an error and no field of a row.
#[derive(Clone, Copy)]
pub(super) enum Obstacle {
    /// The file system's server does not answer.
    Hung,
    /// The file system's server is gone.
    Dead,
    /// One of the former two.
    HungOrDead,
    /// The mount or its target is gone, without a dead server.
    Vanished,
    /// A claim of another node.
    OtherNode,
    /// Another holder of an unmounted volume. csid continues when it has ended.
    Held,
    /// Another holder, before anything was unmounted.
    InUseElsewhere,
    /// Processes that csid may not see.
    Unseen,
    /// Another mount, at a path that csid needs.
    Occupied,
    /// A mount whose source is gone, so that csid cannot prove whose mount it is.
    Unproven,
    /// A mount below csid's directories that no row explains.
    Orphan,
    Helper,
    /// csid's helper, which closes what callers sent before.
    Closing,
    /// The loss of the volume's external ID with a damaged journal.
    Unidentified,
}

/// The words behind the path of a mount that processes use.
pub(super) const UNSEEN: &str = " is in use by processes that csid may not see";

/// The words between the path of a mount and its users in another mount namespace.
pub(super) const ELSEWHERE: &str = " is in use in another mount namespace, by ";

/// The words at the end of a server's error about a plugin that no host may attach volumes for.
pub(super) const UNGRANTED: &str = " is in csid-server.toml for this namespace";

/// The words before another error of csid's.
pub(super) const UNSETTLED: &str = "an earlier operation has not ended: ";

/// The obstacles with the words at the start of csid's text, and those at its end, that identify them. In the middle stand names that
/// a caller, a plugin or a process chose, with any words. `explained` and the hint for NotAuthorized read csid's texts, too.
pub(super) const WORDS: [(&str, &str, Obstacle); 20] = [
    ("the kernel did not answer in time for ", "", Obstacle::Hung),
    ("csid's helper did not answer for ", "", Obstacle::Helper),
    ("csid's helper is still closing earlier descriptors", "", Obstacle::Closing),
    ("/", " is mounted and no row explains it; the volume stays staged until it is gone", Obstacle::Orphan),
    ("something that no row explains is at ", "", Obstacle::Orphan),
    ("the external id of ", " to unpublish", Obstacle::Unidentified),
    ("the volume is unpublished, but another mount namespace still shows it, by ", "", Obstacle::Held),
    ("the volume is unpublished, but it is still mounted at ", "", Obstacle::Held),
    ("the volume is unmounted, but its block device ", "", Obstacle::Held),
    ("the file system at ", "; its server may answer yet", Obstacle::Hung),
    ("something else is mounted at ", "", Obstacle::Occupied),
    ("nothing is mounted at ", " cannot be shown to be from there", Obstacle::Unproven),
    ("the file system at ", " is dead or does not answer", Obstacle::HungOrDead),
    ("the file system at ", " does not answer", Obstacle::Hung),
    ("the file system does not answer", "", Obstacle::Hung),
    ("the file system is dead: ", "", Obstacle::Dead),
    ("removed behind csid's back", "", Obstacle::Vanished),
    ("nothing is mounted at its target", "", Obstacle::Vanished),
    ("the claim is of node ", ", which has to release it itself", Obstacle::OtherNode),
    ("/", UNSEEN, Obstacle::Unseen),
];

pub(super) fn obstacle(text: &str) -> Option<Obstacle> {
    let text = text.strip_prefix(UNSETTLED).unwrap_or(text);
    let is_it = |first: &str, last: &str| text.strip_prefix(first).is_some_and(|rest| rest.ends_with(last));
    let found = WORDS.iter().find(|(first, last, _)| is_it(first, last)).map(|(_, _, obstacle)| *obstacle);
    // A path may have these words, too. The hint for them names no command.
    found.or_else(|| (text.starts_with('/') && text.contains(ELSEWHERE)).then_some(Obstacle::InUseElsewhere))
}

/// Returns how to end a mount whose file system hangs. `mount`: its name for `csictl unmount`.
pub(super) fn end_hung(mount: &str) -> String {
    format!(
        "The file system's server does not answer. Repair the server. If it never answers: `csictl unmount --force-hung \
         {mount}` as root."
    )
}

/// Returns how to end a mount of which csid cannot prove whose it is. `mount`: its name for `csictl unmount`.
pub(super) fn unproven(mount: &str) -> String {
    format!(
        "Unmount it by hand (`umount PATH`), then repeat the command; or `csictl unmount --force {mount}`."
    )
}

/// Returns the hint for an obstacle. `None`: the error's kind is enough for a hint.
pub(super) fn obstructed(error: &CsidError, tried: &Tried, mount: &str) -> Option<String> {
    // The text may be the plugin's, with the same words.
    if error.details.rpc.is_some() {
        return None;
    }
    let found = obstacle(&error.message)?;
    let asked_for_target = matches!(tried.command, "mount" | "adopt-mount") && error.kind == Kind::Internal;
    match found {
        Obstacle::Helper => Some(HELPER.to_owned()),
        // The path may be on another file system than the mount.
        Obstacle::Hung if asked_for_target => Some(
            "The server of that path's file system does not answer. Repair the server, then repeat the command."
                .to_owned(),
        ),
        Obstacle::Hung => Some(end_hung(mount)),
        Obstacle::HungOrDead => Some(format!(
            "If the server is gone: `csictl unmount {mount}` (with `--force` while processes have its files open), then mount \
             it again. If it does not answer, repair it; if it never answers: `csictl unmount --force-hung {mount}` as \
             root. `csictl mounts` shows the case."
        )),
        Obstacle::Held => Some(HELD.to_owned()),
        Obstacle::Unseen => {
            let path = error.message.strip_suffix(UNSEEN)?;
            let path = path.strip_prefix(UNSETTLED).unwrap_or(path);
            // csid shortens a long path.
            let path = if path.contains('…') { "PATH".to_owned() } else { quoted(path) };
            Some(format!(
                "`fuser -vm {path}` as root lists them. End them, then repeat the command. If the mount's server is gone, as \
                 `csictl mounts` shows, `csictl unmount --force {mount}` detaches it anyway."
            ))
        }
        Obstacle::Occupied => {
            Some("`findmnt PATH` shows that mount. Unmount it, then repeat the command.".to_owned())
        }
        Obstacle::Unproven => Some(unproven(mount)),
        Obstacle::Orphan => Some(ORPHAN.to_owned()),
        Obstacle::Closing => Some(
            "Files that callers sent hang at their close: repair or end the server of those files. Root is not held up by \
             them on the private socket (without --bus)."
                .to_owned(),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use csid_client::{Details, Explanation};

    use super::*;
    use crate::hints::explained::explained;
    use crate::hints::samples::*;
    use crate::hints::steps::FORGET;

    /// Where csid says it otherwise, the words here have to follow.
    #[test]
    fn obstacle_words_are_in_csids_source() {
        let csid = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../csid/src");
        let files = [
            "bus/oversize.rs",
            "host/error.rs",
            "volume/probe.rs",
            "volume/manager.rs",
            "volume/mounts/effects.rs",
            "volume/mounts/removals.rs",
            "volume/control/claim_effects.rs",
        ];
        let errors = std::fs::read_dir(csid.join("volume/errors")).unwrap().map(|file| file.unwrap().path());
        let said: Vec<String> = files
            .iter()
            .map(|file| csid.join(file))
            .chain(errors)
            .map(|path| std::fs::read_to_string(path).unwrap())
            .collect();
        for (first, then, _) in WORDS {
            let says = |file: &String| file.contains(first) && file.contains(then);
            assert!(said.iter().any(says), "nothing says: {first}…{then}");
        }
    }

    #[test]
    fn helper_that_closes_files_names_the_private_socket() {
        let text = "csid's helper is still closing earlier descriptors";
        let hint = failed(Kind::RateLimited, text, Details::default(), &tried("mount"));
        assert!(hint.contains("private socket") && !hint.contains("limit"), "{hint}");
    }

    #[test]
    fn held_mount_does_not_suggest_forget() {
        let elsewhere = "/p is in use in another mount namespace, by 7 sh";
        let bound = "the volume is unpublished, but it is still mounted at /srv; it is released when that is unmounted";
        let held = [
            ("unmounting", IS_HELD),
            ("uncertain", IS_HELD),
            ("unmounting", elsewhere),
            ("uncertain", bound),
        ];
        for row in held.map(|(state, error)| mount(state, error)) {
            assert_eq!(ends(&row), HELD);
        }
        let explanation = Explanation {
            waiting_for: "the release of job, which is taken".into(),
            last_error: IS_HELD.into(),
            ..Explanation::default()
        };
        assert_eq!(explained(&explanation, &[], &tried("explain")), HELD);
        let refused = Details { step: Some(FORGET.into()), ..Details::default() };
        for (command, details) in [("unmount", Details::default()), ("unmount", refused)] {
            assert_eq!(failed(Kind::Busy, IS_HELD, details, &tried(command)), HELD);
        }
        // Nothing was unmounted, so csid has nothing to continue.
        let hint = failed(Kind::Busy, elsewhere, Details::default(), &tried("unmount"));
        assert!(hint.contains("then repeat the command"), "{hint}");
    }

    #[test]
    fn hung_mount_needs_force_hung() {
        let refused = "the file system at /p does not answer; its server may answer yet";
        let unsettled = format!("an earlier operation has not ended: {HANGS}");
        for (kind, message) in
            [(Kind::Internal, HANGS), (Kind::Busy, refused), (Kind::Uncertain, unsettled.as_str())]
        {
            let hint = failed(kind, message, Details::default(), &tried("unmount"));
            assert!(hint.contains("`csictl unmount --force-hung ns v job` as root"), "{hint}");
        }
        let hint = failed(Kind::Internal, HANGS, Details::default(), &tried("release"));
        assert!(hint.contains("`csictl unmount --force-hung ns v job --all-tags`"), "{hint}");
        // A target root hangs, perhaps, and not the mount.
        let hint = failed(Kind::Internal, HANGS, Details::default(), &tried("mount"));
        assert!(hint.contains("Repair the server") && !hint.contains("--force-hung"), "{hint}");
        for row in [mount("mounted", "the file system does not answer"), mount("unmounting", HANGS)] {
            let next = ends(&row);
            assert!(next.contains("--force-hung ns v 'my job'") && !next.contains("`--force`"), "{next}");
        }
        let said = Details { rpc: Some("NodeUnpublishVolume".into()), ..Details::default() };
        let hint = failed(Kind::PluginError, HANGS, said, &tried("unmount"));
        assert!(!hint.contains("--force-hung"), "a plugin's words: {hint}");
    }

    #[test]
    fn dead_mount_needs_force_only_if_used() {
        let next = ends(&mount("mounted", "the file system is dead: Transport endpoint is not connected"));
        assert!(next.starts_with("`csictl unmount ns v 'my job'` (with `--force` while"), "{next}");
        let next = ends(&mount("mounted", "removed behind csid's back"));
        assert!(next.contains("`csictl reconcile`") && !next.contains("unmount"), "nothing is there: {next}");
        let busy = failed(Kind::Busy, "/p is in use by 7 sh", Details::default(), &tried("unmount"));
        assert!(busy.contains("`csictl unmount --force ns v job`"), "{busy}");
        let text = "the file system at /p is dead or does not answer";
        let either = failed(Kind::PluginError, text, Details::default(), &tried("mount"));
        assert!(either.contains("`--force`") && either.contains("--force-hung ns v job"), "{either}");
    }

    #[test]
    fn unseen_users_are_listed_by_fuser() {
        let later = "an earlier operation has not ended: ";
        for before in ["", later] {
            let message = format!("{before}/srv/my pg is in use by processes that csid may not see");
            let hint = failed(Kind::Busy, &message, Details::default(), &tried("unmount"));
            assert!(hint.contains("`fuser -vm '/srv/my pg'` as root"), "{hint}");
            assert!(hint.contains("`csictl unmount --force ns v job`"), "{hint}");
        }
    }

    /// A caller chooses the path of a target, and with it words in csid's errors.
    #[test]
    fn words_of_a_callers_path_choose_no_hint() {
        let attack = "/srv/t/x gives y'; touch pwned; echo ' a mount namespace of its own, z";
        let message = format!("something else is mounted at {attack}");
        let hint = failed(Kind::Busy, &message, Details::default(), &tried("mount"));
        assert!(!hint.contains("pwned"), "{hint}");
        for (first, then, _) in WORDS {
            let path = format!("/srv/a {first}b{then}");
            for message in
                [format!("{path} is not below /srv/csid"), format!("target {path} is over csid's own")]
            {
                assert!(obstacle(&message).is_none(), "{message}");
            }
        }
        let polkit =
            failed(Kind::NotAuthorized, "/srv/org.csid1.x is uid 7's", Details::default(), &tried("mount"));
        assert!(!polkit.contains("the action named above"), "{polkit}");
    }
}
