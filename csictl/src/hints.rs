//! An error's last line: what to do next.

use csid_client::{CsidError, Error, Kind};

use crate::commands::quoted;

/// What was tried, as far as a hint needs it.
#[derive(Default)]
pub struct Tried {
    /// The subcommand, `mount`.
    pub command: &'static str,
    pub plugin: Option<String>,
    /// `NAMESPACE VOLUME CONSUMER`, quoted for a shell.
    pub mount: Option<String>,
    /// `NAMESPACE VOLUME`, quoted for a shell.
    pub volume: Option<String>,
    pub operation: Option<String>,
}

const MEMBERS: &str =
    "Run it as root, or as a member of group csid (`adduser USER csid`, then log in again).";

const UNCHANGED: &str = "Nothing has changed. Correct the file and check it with `csictl check-config`.";

pub fn hint(error: &Error, tried: &Tried) -> Option<String> {
    let hint = match error {
        Error::Csid(error) => return csid(error, tried),
        Error::Connect(connecting) => {
            if connecting.socket.as_ref().is_some_and(|(_, error)| error.to_string().contains("denied")) {
                return Some(MEMBERS.to_owned());
            }
            let what = if connecting.socket.is_some() { "csid.socket csid" } else { "dbus csid" };
            format!("Start it: `systemctl start {what}`; csid's log: `journalctl -u csid`.")
        }
        Error::NotRunning(why) if why.contains("masked") => {
            "Have it start again: `systemctl unmask --runtime csid; systemctl start csid.socket csid` (without \
             --runtime, if it was masked so)."
                .to_owned()
        }
        Error::NotRunning(_) => {
            "Start csid: `systemctl start csid`; its log: `journalctl -u csid`.".to_owned()
        }
        Error::Refused(_) => MEMBERS.to_owned(),
        Error::Disconnected(_) => match tried.operation {
            Some(_) => {
                "csid was stopped or restarted. What it had begun it finishes or undoes; repeat the same \
                        command to learn the outcome."
                    .to_owned()
            }
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

fn csid(error: &CsidError, tried: &Tried) -> Option<String> {
    let plugin = error.details.plugin.as_deref().or(tried.plugin.as_deref()).unwrap_or("PLUGIN");
    let mount = tried.mount.as_deref().unwrap_or("NAMESPACE VOLUME CONSUMER");
    let log = format!("`csictl plugin logs {plugin}` if csid runs it");
    let volume = tried.volume.as_deref().unwrap_or("NAMESPACE VOLUME");
    // The one that is in the way.
    let other = match (&error.details.namespace, &error.details.volume) {
        (Some(namespace), Some(volume)) => format!("{} {}", quoted(namespace), quoted(volume)),
        _ => volume.to_owned(),
    };
    let of_claim = matches!(tried.command, "claim" | "release");
    let of_volume = tried.command.starts_with("volume") || tried.command == "explain";
    let registering = tried.command == "plugin register";
    let hint = match error.kind {
        Kind::InvalidArgument => match tried.command {
            "reload" => UNCHANGED.to_owned(),
            command => format!("What may be given: `csictl {command} --help`."),
        },
        Kind::NotFound => match tried.command {
            "cancel" => {
                "It has ended already, or never was: `csictl operations` lists those under way.".to_owned()
            }
            _ if of_claim || of_volume => {
                "What there is: `csictl volume list`, `csictl claims`, `csictl plugin list`.".to_owned()
            }
            _ => "What there is: `csictl plugin list`, `csictl volume list`, `csictl mounts`.".to_owned(),
        },
        Kind::AlreadyExists if registering => {
            format!(
                "See it with `csictl plugin show {plugin}`; a new version takes its place by `csictl plugin upgrade \
                 {plugin}`."
            )
        }
        Kind::AlreadyExists if of_claim => format!(
            "See it with `csictl claims`; to have it otherwise, first `csictl release {mount}`."
        ),
        Kind::AlreadyExists if of_volume => format!(
            "See it with `csictl volume show {other}`; to replace it, first `csictl volume deregister {other}`."
        ),
        Kind::AlreadyExists if tried.command == "reload" => UNCHANGED.to_owned(),
        Kind::AlreadyExists => "What there is: `csictl mounts --json`, `csictl volume list`.".to_owned(),
        Kind::Busy => {
            "Wait until it is free, or end who holds it; `csictl mounts`, `csictl claims` and `csictl operations` \
                       show what csid knows."
                .to_owned()
        }
        Kind::ClaimConflict if tried.command == "claim" => {
            "Who has it: `csictl claims`, `csictl mounts`. With --queue TIME a claim waits that long.".to_owned()
        }
        Kind::ClaimConflict => {
            "Unmount it there first, for a mount does not wait (`csictl claim --queue TIME` does); or give all of \
                                them the same name of the volume, the same options and an access mode that lets \
                                several in, such as single-node-multi-writer."
                .to_owned()
        }
        Kind::PluginUnavailable => {
            format!("See why: `csictl plugin show {plugin}`, and {log}. Then `csictl wait {plugin}`.")
        }
        Kind::PluginShutdown => format!("Wait until it is back: `csictl wait {plugin}`."),
        Kind::PluginError if error.details.retryable == Some(true) => {
            format!("The same command may succeed later. The plugin's log: {log}.")
        }
        Kind::PluginError => format!("The plugin refused it. Its log: {log}."),
        Kind::NotSupported => {
            format!("What the plugin can do: `csictl plugin show {plugin}`; csid: `csictl status`.")
        }
        Kind::NotAuthorized => {
            "Ask as root; or have polkit allow the action named above, and ask with --bus. Group \
                                csid may list, wait, claim and mount what is registered, and release and unmount \
                                what is its own."
                .to_owned()
        }
        Kind::Cancelled => "It was cancelled and undone; repeat it when it is wanted again.".to_owned(),
        Kind::TimedOut if tried.command == "plugin wait" => {
            format!("See why: `csictl plugin show {plugin}`, and {log}.")
        }
        Kind::TimedOut => {
            "Give it longer with --deadline; `csictl operations` shows whether csid still works on it."
                .to_owned()
        }
        Kind::Uncertain if of_claim => format!(
            "csid cannot know what the plugin did: repeat the command, or end it with `csictl release \
             {mount}`. The plugin's log: {log}."
        ),
        Kind::Uncertain if of_volume => {
            format!("csid cannot know what the plugin did: repeat the command. The plugin's log: {log}.")
        }
        Kind::Uncertain => format!(
            "csid cannot know what the plugin did: repeat the command, or end it with `csictl unmount \
             {mount}`. The plugin's log: {log}."
        ),
        Kind::RateLimited => {
            "This user has as much as one may. Of what is under way (`csictl operations`): wait, then repeat.".to_owned()
        }
        Kind::SecretRequired => {
            "Give --secrets-file FILE, or --credential NAME for a volume that shall survive a \
                                 reboot by itself."
                .to_owned()
        }
        Kind::ShuttingDown => {
            "csid is stopping; repeat it when csid is back: `systemctl status csid`.".to_owned()
        }
        Kind::StateCorrupt => {
            "Nothing was unmounted. See what would be recorded with `csictl reconcile --new-journal \
                               --dry-run`, then begin a new journal without --dry-run; csid(8) says what follows."
                .to_owned()
        }
        Kind::Internal if error.details.retryable == Some(true) => {
            "Nothing was changed: do as it says, then repeat the same command.".to_owned()
        }
        Kind::Internal => "This is csid's fault; its log says more: `journalctl -u csid`.".to_owned(),
        _ => return None,
    };
    Some(hint)
}

#[cfg(test)]
mod tests {
    use csid_client::Details;

    use super::*;

    fn said(kind: Kind, details: Details, tried: &Tried) -> String {
        let error = CsidError { kind, message: "m".into(), details };
        hint(&Error::Csid(Box::new(error)), tried).unwrap()
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

        let tried = Tried { mount: Some("ns 'my vol' job".into()), ..Tried::default() };
        let hint = said(Kind::Uncertain, Details::default(), &tried);
        assert!(hint.contains("`csictl unmount ns 'my vol' job`"), "{hint}");
        let tried = Tried { command: "release", ..tried };
        let hint = said(Kind::Uncertain, Details::default(), &tried);
        assert!(hint.contains("`csictl release ns 'my vol' job`"), "{hint}");
    }

    #[test]
    fn a_new_version_of_a_plugin_is_an_upgrade() {
        let tried = Tried { command: "plugin register", plugin: Some("nfs".into()), ..Tried::default() };
        let hint = said(Kind::AlreadyExists, Details::default(), &tried);
        assert!(hint.contains("`csictl plugin upgrade nfs`") && !hint.contains("unregister"), "{hint}");
    }

    #[test]
    fn a_masked_csid_is_unmasked() {
        let masked = Error::NotRunning("Unit csid.service is masked.".into());
        assert!(hint(&masked, &Tried::default()).unwrap().contains("systemctl unmask --runtime csid;"));
    }

    /// A file against a registration by a call, an inline mount of what is registered: nothing is to be unmounted.
    #[test]
    fn what_exists_already_need_not_be_a_mount() {
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
