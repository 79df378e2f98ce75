//! Hints: the last line of an error, with the next step.

use csid_client::{CsidError, Error, Explanation, Kind, MountRow, Plugin};

use crate::shell::quoted;

/// The facts about a command that a hint needs.
#[derive(Default)]
pub struct Tried {
    /// The subcommand, `mount`.
    pub command: &'static str,
    pub plugin: Option<String>,
    /// `NAMESPACE VOLUME CONSUMER`, and of an unmount its `--tag TAG` or `--all-tags`; quoted for a shell.
    pub mount: Option<String>,
    /// `NAMESPACE VOLUME`, quoted for a shell.
    pub volume: Option<String>,
    pub operation: Option<String>,
}

const MEMBERS: &str =
    "Run it as root, or as a member of group csid (`adduser USER csid`, then log in again).";

/// The step of a command in a plugin that the configuration refuses.
const DISABLED: &str = "read the configuration";

/// The step of a claim that the plugin's limit of volumes refuses.
const LIMIT: &str = "count the plugin's volumes";

/// The step of a claim of a volume that this node cannot reach.
const TOPOLOGY: &str = "look at the topology";

/// The step of a forced release.
const FORGET: &str = "forget";

/// The step of an operation that waits for its turn.
const QUEUED: &str = "queued";

/// The step of an operation whose plugin does not serve.
const WAITING: &str = "waiting for plugin";

/// The steps of operations that wait for others.
const UNUSED: &str = "waiting until nobody has it";
const CLAIMS: &str = "waiting for claims";
const OTHER_VOLUMES: &str = "waiting for another volume's claims";
const SNAPSHOT: &str = "waiting for the snapshot";

const HOLDERS: &str = "unmount or release it for its holders (`csictl mounts`, `csictl claims`)";

const CANCEL: &str = "`csictl operations` lists the operation that waits, and `csictl cancel ID` ends it";

const HELPER: &str = "If csid-helper.socket has failed (`systemctl status csid-helper.socket csid-helper.service`): \
                      `systemctl reset-failed csid-helper.socket csid-helper.service; systemctl start \
                      csid-helper.socket`. Your mounts stay. Then repeat the command.";

const STOPPING: &str = "csid is stopping; repeat it when csid is back: `systemctl status csid`.";

const HELD: &str = "End what holds it; csid then continues by itself.";

const ORPHAN: &str =
    "`csictl reconcile --dry-run` shows it; `csictl reconcile --remove-orphans` or `umount PATH` removes it.";

/// The step after a drain that left mounts.
pub const DRAINED: &str =
    "End what uses them (`fuser -vm PATH` as root lists the processes), then drain the plugin again.";

/// An obstacle that is only in csid's text, in no detail of an error and no field of a row.
#[derive(Clone, Copy)]
enum Obstacle {
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
const UNSEEN: &str = " is in use by processes that csid may not see";

/// The words between the path of a mount and its users in another mount namespace.
const ELSEWHERE: &str = " is in use in another mount namespace, by ";

/// The words before another error of csid's.
const UNSETTLED: &str = "an earlier operation has not ended: ";

/// The obstacles with the words at the start of csid's text, and those at its end, that identify them. In the middle stand names that
/// a caller, a plugin or a process chose, with any words. `explained` and the hint for NotAuthorized read csid's texts, too.
const WORDS: [(&str, &str, Obstacle); 19] = [
    ("the kernel did not answer in time for ", "", Obstacle::Hung),
    ("csid's helper did not answer for ", "", Obstacle::Helper),
    ("csid's helper is still closing earlier descriptors", "", Obstacle::Closing),
    ("/", " is mounted and no row explains it; the volume stays staged until it is gone", Obstacle::Orphan),
    ("something that no row explains is at ", "", Obstacle::Orphan),
    ("the external id of ", " to unpublish", Obstacle::Unidentified),
    ("the volume is unpublished, but another mount namespace still shows it, by ", "", Obstacle::Held),
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

fn obstacle(text: &str) -> Option<Obstacle> {
    let text = text.strip_prefix(UNSETTLED).unwrap_or(text);
    let is_it = |first: &str, last: &str| text.strip_prefix(first).is_some_and(|rest| rest.ends_with(last));
    let found = WORDS.iter().find(|(first, last, _)| is_it(first, last)).map(|(_, _, obstacle)| *obstacle);
    // A path may have these words, too. The hint for them names no command.
    found.or_else(|| (text.starts_with('/') && text.contains(ELSEWHERE)).then_some(Obstacle::InUseElsewhere))
}

/// Returns how to end a mount whose file system hangs. `mount`: its name for `csictl unmount`.
fn end_hung(mount: &str) -> String {
    format!(
        "The file system's server does not answer. Repair the server. If it never answers: `csictl unmount --force-hung \
         {mount}` as root."
    )
}

/// Returns how to end a mount of which csid cannot prove whose it is. `mount`: its name for `csictl unmount`.
fn unproven(mount: &str) -> String {
    format!(
        "Unmount it by hand (`umount PATH`), then repeat the command; or `csictl unmount --force {mount}`."
    )
}

/// Returns the hint for an obstacle. `None`: the error's kind is enough for a hint.
fn obstructed(error: &CsidError, tried: &Tried, mount: &str) -> Option<String> {
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

/// Returns the hint for an obstacle that the error names by a word of the contract. `None`: it names none, or an unknown one.
/// `volume`: `NAMESPACE VOLUME`, quoted for a shell.
fn by_obstacle(error: &CsidError, tried: &Tried, plugin: &str, volume: &str) -> Option<String> {
    let mount = tried.mount.as_deref().unwrap_or("NAMESPACE VOLUME CONSUMER");
    let hint = match error.details.obstacle.as_deref()? {
        "node-id" => format!(
            "`csictl plugin show {plugin}` shows both names. If the new one is right, as root: `csictl plugin accept-node-id \
             {plugin} NAME`."
        ),
        "unknown-plugin" => format!(
            "Existing ones: `csictl plugin list`. `csictl plugin register {plugin}` adds it; `csictl wait {plugin}` waits \
             for one that registers itself."
        ),
        "unregistered-volume" if tried.command == "mount" => format!(
            "Register it first (`csictl volume register {volume}`), or give --plugin and --external-id. Existing ones: \
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
        "unconfirmed-source" => format!(
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
        "spare-volume" => "Register the new volume under another name (`csictl volume register`, with its --external-id). \
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
            "Unregister the plugin (`csictl plugin unregister {plugin}`), then `csictl plugin register {plugin}` with the new \
             value."
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
        Error::Refused(_) => MEMBERS.to_owned(),
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
        Kind::NotSupported if tried.command == "adopt-mount" => {
            "Adopt it under a name that is not registered, with --plugin, --external-id and --publish-context; its present manager detaches it."
                .to_owned()
        }
        Kind::NotSupported
            if tried.command == "plugin exec" && error.details.step.as_deref() == Some(DISABLED) =>
        {
            "`exec = true` in csid.toml, then `csictl reload`, allows commands in plugins.".to_owned()
        }
        Kind::NotSupported if tried.command == "volume create" => format!(
            "Features of the plugin: `csictl plugin show {plugin}`. Or create the volume with the storage's own tools, \
             then `csictl volume register {volume}`."
        ),
        Kind::NotSupported => {
            format!("Features of the plugin: `csictl plugin show {plugin}`; of csid: `csictl status`.")
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
            "Give --secrets-file FILE, or --credential NAME for a volume that must survive a \
                                 reboot by itself."
                .to_owned()
        }
        Kind::ShuttingDown => STOPPING.to_owned(),
        Kind::StateCorrupt => {
            "Nothing was unmounted. See what would be recorded with `csictl reconcile --new-journal \
                               --dry-run`, then begin a new journal without --dry-run; csid(8) says what follows."
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

/// Returns whether the message of a refusal names the polkit action that the caller lacks.
fn lacks_action(message: &str) -> bool {
    let uid = message.strip_prefix("uid ").and_then(|rest| rest.split_once(" may not do org.csid1."));
    uid.is_some_and(|(uid, _)| uid.bytes().all(|digit| digit.is_ascii_digit()))
}

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
            "csid repeats it while the plugin may succeed later; else repeat DetachVolume. Of a registered volume, as root: `busctl \
             call org.csid1 /org/csid1 org.csid1.Manager DetachVolume 'sssa{{sv}}' {volume} {node} 0`"
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
            "start the plugin or register it (`csictl plugin register {plugin}`), then `csictl wait {plugin}`{unfinished}"
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
        _ => String::new(),
    }
}

/// Returns a mount's state in the words of an explanation.
fn phase(row: &MountRow) -> &str {
    match row.state.as_str() {
        "mounted" if !row.healthy => "mounted, but not healthy",
        state => state,
    }
}

/// Returns a mount's name for commands, quoted for a shell.
fn named(volume: &str, consumer: &str, row: Option<&MountRow>) -> String {
    let tag = row.map_or("", |row| row.tag.as_str());
    let tag = if tag.is_empty() { String::new() } else { format!(" --tag {}", quoted(tag)) };
    format!("{volume} {}{tag}", quoted(consumer))
}

/// Returns the hint for a mount. `mount`: its name for `csictl unmount`. `error`: the error of its row.
fn of_mount(state: &str, mount: &str, error: &str) -> String {
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
    use csid_client::{Connecting, Details};

    use super::*;

    fn said(kind: Kind, details: Details, tried: &Tried) -> String {
        let error = CsidError { kind, message: "m".into(), details };
        hint(&Error::Csid(Box::new(error)), tried).unwrap()
    }

    fn failed(kind: Kind, message: &str, details: Details, tried: &Tried) -> String {
        let error = CsidError { kind, message: message.into(), details };
        hint(&Error::Csid(Box::new(error)), tried).unwrap()
    }

    fn tried(command: &'static str) -> Tried {
        Tried { command, volume: Some("ns v".into()), mount: Some("ns v job".into()), ..Tried::default() }
    }

    fn mount(state: &str, error: &str) -> MountRow {
        MountRow {
            consumer: "my job".into(),
            state: state.into(),
            error: error.into(),
            ..MountRow::default()
        }
    }

    /// Returns the hint of explain for a mount with this row.
    fn ends(row: &MountRow) -> String {
        let waiting_for = format!("the mount of {}, which is {}", row.consumer, phase(row));
        let explanation = Explanation { waiting_for, ..Explanation::default() };
        explained(&explanation, std::slice::from_ref(row), &tried("explain"))
    }

    const HANGS: &str =
        "the kernel did not answer in time for /p; what serves its file system does not answer";
    const IS_HELD: &str =
        "the volume is unmounted, but its block device loop0 is still in use: by an overlay on it";

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
        let steps = std::fs::read_to_string(csid.join("error.rs")).unwrap();
        for step in
            [DISABLED, LIMIT, TOPOLOGY, FORGET, QUEUED, WAITING, UNUSED, CLAIMS, OTHER_VOLUMES, SNAPSHOT]
        {
            assert!(steps.contains(&format!("=> \"{step}\"")), "no step is called {step}");
        }
    }

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
            ("unknown-plugin", "`csictl plugin register nfs`"),
            ("unregistered-volume", "`csictl volume register ns v`"),
            ("declared-volume", "`csictl explain ns v`"),
            ("registered-by-call", "`csictl volume deregister ns v`"),
            ("capability", "`csictl volume show ns v`"),
            ("unknown-mount", "`csictl reconcile --remove-orphans`"),
            ("other-node", "`csictl release --force ns v job`"),
            ("expansion", "--queue TIME"),
            ("creation", "`csictl cancel 'op 1'`"),
            ("unconfirmed-source", "`csictl volume delete ns v`"),
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

    /// Reads the texts of csid's `StartError`, so that a text that changes has its hint.
    #[test]
    fn plugin_that_cannot_start_has_a_next_step() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../csid/src/plugin/start_error.rs");
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
                "org.csid1.Manager DetachVolume 'sssa{sv}' ns v 'node 1' 0`",
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
    fn helper_that_closes_files_names_the_private_socket() {
        let text = "csid's helper is still closing earlier descriptors";
        let hint = failed(Kind::RateLimited, text, Details::default(), &tried("mount"));
        assert!(hint.contains("private socket") && !hint.contains("limit"), "{hint}");
    }

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
    fn held_mount_does_not_suggest_forget() {
        let elsewhere = "/p is in use in another mount namespace, by 7 sh";
        for row in [mount("unmounting", IS_HELD), mount("uncertain", IS_HELD), mount("unmounting", elsewhere)]
        {
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
    fn polkit_hint_needs_an_action_in_the_error() {
        let refused =
            |message: &str| failed(Kind::NotAuthorized, message, Details::default(), &tried("mount"));
        assert!(refused("uid 7 may not do org.csid1.inline").contains("polkit allow the action"));
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
    fn a_failed_helper_is_started_by_its_socket() {
        let message = "csid's helper did not answer for /p: Connection refused";
        let hint = failed(Kind::Internal, message, Details::default(), &tried("unmount"));
        assert!(hint.contains("`systemctl reset-failed csid-helper.socket"), "{hint}");
        assert_eq!(ends(&mount("uncertain", message)), hint);
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
