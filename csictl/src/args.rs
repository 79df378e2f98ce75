//! The command line: commands and options, and their meaning in the contract.

mod cluster;
mod common;
mod plugin;
mod volume;

use std::{path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, CommandFactory, Parser, Subcommand, error::ErrorKind};
use clap_complete::Shell;
use csid_client::{AccessMode, Propagation, Restore, Target};

pub use cluster::{
    Accept, Block, Cluster, DrainNode, Fence, Join, Node, Restored, Resume, Server, ServerUpgrade,
};
pub use common::{Deadline, Name, Pair, Wait, span};
pub use plugin::{
    Capacity, DeleteSnapshot, Drain, Exec, Logs, Plugin, PluginWait, Register, Snapshots, Top, Upgrade,
};
pub use volume::{
    Amount, Attach, Bind, Claim, Claims, Confirm, Create, OneVolume, RegisterVolume, Release, Secrets,
    Snapshot, Spec, Topology, Volume, Volumes,
};

use common::words;

/// The file systems that systemd mounts at a boot.
pub const FSTAB: &str = "/etc/fstab";

const TROUBLE: &str = "What a state or an error means, and what ends it: `csictl explain NAMESPACE VOLUME`, and\n\
                       /usr/share/doc/csid/docs/troubleshooting.md";

/// Control csid, the CSI volume manager
///
/// csictl talks to csid over its private socket, or over the system bus when that socket cannot be reached.
#[derive(Parser)]
#[command(name = "csictl", version, disable_help_subcommand = true, max_term_width = 100, after_help = TROUBLE)]
pub struct Cli {
    /// Print JSON, with the names of the D-Bus contract as keys; errors too
    #[arg(long, global = true, display_order = 900)]
    pub json: bool,

    /// Talk to csid on this private socket and nowhere else
    #[arg(long, global = true, display_order = 901, value_name = "PATH", conflicts_with = "bus")]
    csid_socket: Option<PathBuf>,

    /// Talk to csid on the system bus and nowhere else
    #[arg(long, global = true, display_order = 902)]
    bus: bool,

    /// Ask the cluster's servers as an operator, whose keys this file names
    ///
    /// `csictl node` and `csictl server` do that anyway. With it, `volume list`, `volume show`, `volume register`, `volume deregister`,
    /// `volume own`, `volume create`, `volume delete`, `volume expand`, `volume validate`, `volume snapshot`, `volume attach`, `volume detach`, `plugin volumes`,
    /// `plugin capacity`, `plugin delete-snapshot`, `snapshots`, `cluster status`, `explain`, `claims` and `release` do it, too. Without FILE it is
    /// $CSID_OPERATOR, or ~/.config/csid/operator.toml.
    #[arg(long, global = true, display_order = 903, value_name = "FILE", require_equals = true, conflicts_with_all = ["csid_socket", "bus"])]
    #[allow(clippy::option_option, reason = "the option may stand without a file")]
    operator: Option<Option<PathBuf>>,

    /// Show more: what doctor found in order, and what a command waits for where standard error is no terminal
    #[arg(long, short, global = true, display_order = 904)]
    pub verbose: bool,

    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Returns the operator's file that the command line names.
    pub fn operator(&self) -> Option<PathBuf> {
        self.operator.clone().flatten()
    }

    /// Returns whether the command line says that an operator asks.
    pub fn is_by_operator(&self) -> bool {
        self.operator.is_some()
    }

    /// Refuses what an operator cannot ask the servers for, and what an operator alone can.
    pub fn check(&self) -> Result<(), clap::Error> {
        if self.operator.is_none() {
            return match &self.command {
                Command::Volume(command) if matches!(**command, Volume::Own { .. }) => {
                    Err(Cli::command().error(ErrorKind::MissingRequiredArgument, OWN))
                }
                _ => Ok(()),
            };
        }
        let refused = |text: &str| Err(Cli::command().error(ErrorKind::ArgumentConflict, text));
        let option = match &self.command {
            Command::Node(_) | Command::Server(_) | Command::Explain { .. } => None,
            Command::Cluster(Cluster::Status) => None,
            Command::Volume(command) => match &**command {
                Volume::List(_) | Volume::Show { .. } => None,
                Volume::Register(args) => of_operations(&args.spec.wait, args.spec.wait.deadline.usec()),
                Volume::Own { .. } => None,
                Volume::Deregister { force: true, .. } => Some("--force"),
                Volume::Deregister { forget: true, .. } => Some("--forget"),
                Volume::Deregister { wait, .. } => of_operations(wait, wait.deadline.usec()),
                Volume::Create(args) => of_operations(&args.spec.wait, None),
                Volume::Delete { secrets, .. } if secrets.secrets_file.is_some() => Some("--secrets-file"),
                Volume::Delete { secrets, .. } if secrets.credential.is_some() => Some("--credential"),
                Volume::Delete { wait, .. } => of_operations(wait, None),
                Volume::Expand(args) if args.part.is_some() => Some("--part"),
                Volume::Expand(args) if args.secrets.secrets_file.is_some() => Some("--secrets-file"),
                Volume::Expand(args) if args.secrets.credential.is_some() => Some("--credential"),
                Volume::Expand(args) => of_operations(&args.wait, None),
                Volume::Snapshot(args) if args.secrets.secrets_file.is_some() => Some("--secrets-file"),
                Volume::Snapshot(args) if args.secrets.credential.is_some() => Some("--credential"),
                Volume::Snapshot(args) => of_operations(&args.wait, None),
                Volume::Validate { secrets, .. } if secrets.secrets_file.is_some() => Some("--secrets-file"),
                Volume::Validate { secrets, .. } if secrets.credential.is_some() => Some("--credential"),
                Volume::Validate { wait, .. } => of_operations(wait, wait.deadline.usec()),
                Volume::Attach(args) if args.secrets.secrets_file.is_some() => Some("--secrets-file"),
                Volume::Attach(args) if args.secrets.credential.is_some() => Some("--credential"),
                Volume::Attach(args) => of_operations(&args.wait, None),
                Volume::Detach { secrets, .. } if secrets.secrets_file.is_some() => Some("--secrets-file"),
                Volume::Detach { secrets, .. } if secrets.credential.is_some() => Some("--credential"),
                Volume::Detach { wait, .. } => of_operations(wait, None),
                _ => return refused(OPERATORS),
            },
            Command::Plugin(command) => match &**command {
                Plugin::Volumes { .. } => None,
                Plugin::DeleteSnapshot(args) if args.secrets.secrets_file.is_some() => Some("--secrets-file"),
                Plugin::DeleteSnapshot(args) if args.secrets.credential.is_some() => Some("--credential"),
                Plugin::DeleteSnapshot(_) => None,
                Plugin::Capacity(args) => args.deadline.usec().map(|_| "--deadline"),
                _ => return refused(OPERATORS),
            },
            Command::Snapshots(args) if args.secrets.secrets_file.is_some() => Some("--secrets-file"),
            Command::Snapshots(args) if args.secrets.credential.is_some() => Some("--credential"),
            Command::Snapshots(_) => None,
            Command::Claims(args) => args.past.then_some("--past"),
            Command::Release(args) if args.forget => Some("--forget"),
            Command::Release(args) if args.secrets.secrets_file.is_some() => Some("--secrets-file"),
            Command::Release(args) if args.secrets.credential.is_some() => Some("--credential"),
            Command::Release(args) => of_operations(&args.wait, None),
            _ => return refused(OPERATORS),
        };
        match option {
            None => Ok(()),
            Some(option) => refused(&format!("{option} is for csid on a host, and not for --operator")),
        }
    }

    pub fn target(&self) -> Target {
        match &self.csid_socket {
            Some(path) => Target::Socket(path.clone()),
            None if self.bus => Target::SystemBus,
            None => Target::from_env(),
        }
    }
}

/// The refusal of `volume own` without an operator.
pub const OWN: &str = "`volume own` asks the servers of a cluster, and needs --operator";
/// The commands with --operator.
const OPERATORS: &str = "--operator is for `csictl node`, `csictl server`, `volume list`, `volume show`, `volume register`, `volume deregister`, \
                         `volume own`, `volume create`, `volume delete`, `volume expand`, `volume validate`, `volume snapshot`, \
                         `volume attach`, `volume detach`, `plugin volumes`, \
                         `plugin capacity`, `plugin delete-snapshot`, `snapshots`, \
                         `cluster status`, `explain`, `claims` and `release`; other commands ask csid on this host";

/// Returns an option of csid's operations that is given, and which servers do not have.
fn of_operations(wait: &Wait, deadline: Option<u64>) -> Option<&'static str> {
    match (&wait.operation_id, deadline) {
        (Some(_), _) => Some("--operation-id"),
        (None, Some(_)) => Some("--deadline"),
        (None, None) => None,
    }
}

#[derive(Subcommand)]
pub enum Command {
    /// Show csid's state, plugins, mounts and operations
    Status,
    /// List, show, register, unregister, restart, upgrade, drain plugins, wait for one, read its log, run a command in one, show its usage, volumes and capacity
    #[command(subcommand)]
    Plugin(Box<Plugin>),
    /// Register, create, list, show, validate, expand, snapshot, attach, detach, deregister, delete volumes, see how full one is
    #[command(subcommand)]
    Volume(Box<Volume>),
    /// Claim a registered volume for a consumer, until it is released
    Claim(Claim),
    /// Release a consumer's claim; one that is not there is released already
    Release(Release),
    /// List claims
    Claims(Claims),
    /// List the snapshots that a plugin has
    Snapshots(Snapshots),
    /// Show what a volume waits for, its holders, the last error and the next try
    ///
    /// On a host of a cluster the holders on other hosts, too. With --operator the servers say it: who has the volume, what each claim waits
    /// for, which server calls which controller, and which node is away.
    Explain {
        #[command(flatten)]
        volume: OneVolume,
    },
    /// Wait until a plugin is ready (short for `csictl plugin wait`)
    Wait(PluginWait),
    /// Wait until csid has made the mounts again that come back after a reboot
    ///
    /// Exits with 1 if some are missing at the deadline, and lists them. csi-volumes.service runs this.
    WaitVolumes(WaitVolumes),
    /// Mount a volume for a consumer, and print the path where it is
    ///
    /// The volume is registered, or inline with its plugin and the plugin's ID of it. Repeating the command is safe: it
    /// joins a mount in progress, and prints the same path for an existing mount.
    Mount(Box<Mount>),
    /// Unmount a consumer's volume; one that is not mounted is unmounted already
    Unmount(Unmount),
    /// Take over a mount that another manager made, as root, and print the path where it is
    ///
    /// The kernel has to show the mount at both paths. No plugin is called, and consumers continue to run. From then on csid
    /// keeps the mount like one that it made: `csictl unmount` unpublishes and unstages it at these paths. Repeating the
    /// command is safe.
    AdoptMount(Box<AdoptMount>),
    /// Show this host as a node of its cluster, or the whole cluster to an operator
    #[command(subcommand)]
    Cluster(Cluster),
    /// List, show, accept, block, fence, drain, undrain, forget nodes of a cluster, as an operator: csictl asks the cluster's servers
    #[command(subcommand)]
    Node(Node),
    /// List the servers of a cluster, audit its etcd, begin and end its recovery, raise the version of its values, as an operator
    #[command(subcommand)]
    Server(Server),
    /// List mounts
    Mounts(Mounts),
    /// Check whether a published path is mounted
    ///
    /// Exits with 0 if it is, with 1 if it is not, and with 3 if csid did not answer.
    HasMount {
        /// The path that `csictl mount` printed
        path: String,
    },
    /// List operations in progress
    Operations,
    /// Cancel an operation; csid rolls back a mount in progress
    Cancel {
        /// The operation's id, as `csictl operations` lists it
        id: String,
    },
    /// Show events, one per line; with --json each line is an object
    Events(Events),
    /// Compare the journal with the mounts, and repair the differences
    Reconcile(Reconcile),
    /// Make csid read its configuration again; an error in it changes nothing
    Reload,
    /// Check csid's configuration, and the lines of fstab with the type csi, without touching the running csid
    CheckConfig {
        /// The file to check in place of fstab
        #[arg(long, value_name = "PATH", default_value = FSTAB)]
        fstab: PathBuf,
    },
    /// Look for what is wrong with csid on this machine, also while csid does not run
    ///
    /// It changes nothing. For each finding it prints what was found and what to do. --verbose lists what is in order, too. Exits
    /// with 1 if it found an error, and with 2 if csid cannot be reached.
    Doctor,
    /// Print completions for a shell
    Completions { shell: Shell },
}

#[derive(Args)]
pub struct WaitVolumes {
    /// Give up after this time, such as 30s or 2min
    #[arg(long, value_name = "TIME", default_value = "80s", value_parser = span)]
    pub deadline: Duration,
    /// Wait for these volumes only: a namespace and a name each
    #[arg(value_name = "NAMESPACE VOLUME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub volumes: Vec<String>,
}

#[derive(Args)]
pub struct Mount {
    #[command(flatten)]
    pub name: Name,
    /// The plugin that has the volume, when it is not registered
    #[arg(long, value_name = "ID", requires = "external_id")]
    pub plugin: Option<String>,
    /// The plugin's ID of the volume, when it is not registered
    #[arg(long, value_name = "ID", requires = "plugin")]
    pub external_id: Option<String>,
    /// An entry of the volume's context, when it is not registered
    #[arg(long, value_name = "KEY=VALUE", requires = "plugin")]
    pub context: Vec<Pair>,
    /// An entry of the publish context, when another manager attached the volume
    #[arg(long, value_name = "KEY=VALUE", requires = "plugin")]
    pub publish_context: Vec<Pair>,
    /// After a reboot: mount again (auto, the default of a registered volume), or keep the row as lost until a new mount
    /// (hold, the default of another)
    #[arg(long, value_name = "WHAT", value_parser = words::<Restore>(Restore::WORDS))]
    pub restore: Option<Restore>,
    /// File system, such as ext4; the volume's or the plugin's own default when absent
    #[arg(long, value_name = "TYPE")]
    pub fs_type: Option<String>,
    /// A mount option for the file system, such as noatime
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    pub mount_flag: Vec<String>,
    /// The group that shall own the volume's files
    #[arg(long, value_name = "GROUP")]
    pub mount_group: Option<String>,
    /// Who may use the volume at the same time
    #[arg(long, value_name = "MODE", value_parser = words::<AccessMode>(AccessMode::WORDS))]
    pub access_mode: Option<AccessMode>,
    /// Mount read-only
    #[arg(long)]
    pub read_only: bool,
    /// Publish the raw block device instead of a file system
    #[arg(long)]
    pub block: bool,
    /// A name that distinguishes several mounts of the volume by this consumer
    #[arg(long)]
    pub tag: Option<String>,
    /// Bind the volume to this path too
    #[arg(long, value_name = "PATH")]
    pub target: Option<String>,
    /// How mounts that are made inside the target reach the host and back
    #[arg(long, value_name = "MODE", value_parser = words::<Propagation>(Propagation::WORDS))]
    pub propagation: Option<Propagation>,
    /// Let set-uid programs on the mount work
    #[arg(long)]
    pub suid: bool,
    /// Let device nodes on the target work
    #[arg(long)]
    pub dev: bool,
    /// Wait at most this long while claims or mounts are in the way, or the plugin takes no more volumes on this node
    #[arg(id = "wait_for", long = "wait", value_name = "TIME", value_parser = span)]
    pub wait_for: Option<Duration>,
    #[command(flatten)]
    pub bind: Bind,
    #[command(flatten)]
    pub secrets: Secrets,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Args)]
pub struct AdoptMount {
    /// Where the volume is published for the consumer
    #[arg(long, value_name = "PATH")]
    pub published_path: String,
    /// Where the volume is staged; required exactly where the plugin stages
    #[arg(long, value_name = "PATH")]
    pub staging_path: Option<String>,
    #[command(flatten)]
    pub mount: Mount,
}

#[derive(Args)]
pub struct Unmount {
    #[command(flatten)]
    pub name: Name,
    /// The tag that the mount was made with
    #[arg(long)]
    pub tag: Option<String>,
    /// All mounts of the consumer, with any tag
    #[arg(long, conflicts_with = "tag")]
    pub all_tags: bool,
    /// Fail where there is no such mount
    #[arg(long)]
    pub must_exist: bool,
    /// Detach a mount lazily if its server is gone, even while processes have its files open
    #[arg(long)]
    pub force: bool,
    /// As root: detach also a mount whose server does not answer a probe that csid makes now
    #[arg(long)]
    pub force_hung: bool,
    /// Return after the first try, with its error; csid keeps trying
    #[arg(long)]
    pub no_wait: bool,
    /// The last resort, as root: drop the row though the plugin never acknowledged
    #[arg(long, conflicts_with_all = ["force", "force_hung", "no_wait"])]
    pub forget: bool,
    #[command(flatten)]
    pub confirm: Confirm,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Args)]
pub struct Mounts {
    /// Only this namespace
    #[arg(long)]
    pub namespace: Option<String>,
    /// Only this volume: its name, without the namespace (--namespace)
    #[arg(long)]
    pub volume: Option<String>,
    /// Only this consumer
    #[arg(long)]
    pub consumer: Option<String>,
    /// Only this tag
    #[arg(long)]
    pub tag: Option<String>,
    /// Only this plugin's
    #[arg(long)]
    pub plugin: Option<String>,
    /// Only the one that is bound at this path
    #[arg(long, value_name = "PATH")]
    pub target: Option<String>,
    /// Only in this state: mounting, mounted, unmounting, uncertain, lost or waiting
    #[arg(long)]
    pub state: Option<String>,
    /// Only this user's
    #[arg(long)]
    pub uid: Option<u32>,
    /// Show csid's own paths of the volumes, too
    #[arg(long)]
    pub wide: bool,
}

#[derive(Args)]
pub struct Events {
    /// Continue with new events; alone it shows no old ones
    #[arg(long, short)]
    pub follow: bool,
    /// Begin after this sequence number, or this long ago, such as 30min or 2h
    #[arg(long, value_name = "SEQUENCE|TIME")]
    pub since: Option<Since>,
    /// Only those of a volume
    #[arg(long, value_name = "NAMESPACE/VOLUME", value_parser = full_name)]
    pub volume: Option<String>,
}

/// Reads a volume's namespace and name, as events have them.
fn full_name(text: &str) -> Result<String, String> {
    match text.split_once('/') {
        Some((namespace, volume)) if !namespace.is_empty() && !volume.is_empty() => Ok(text.to_owned()),
        _ => Err("give the namespace, a slash, and the volume's name".to_owned()),
    }
}

/// Where a list of events begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Since {
    Sequence(u64),
    Ago(Duration),
}

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(sequence) => Ok(Since::Sequence(sequence)),
            Err(_) => span(text).map(Since::Ago),
        }
    }
}

#[derive(Args)]
pub struct Reconcile {
    /// Only show what would be done
    #[arg(long)]
    pub dry_run: bool,
    /// Remove leftovers of csid that have no row, if they are empty or provably csid's
    #[arg(long)]
    pub remove_orphans: bool,
    /// Start a new journal with the present mounts, after StateCorrupt
    #[arg(long)]
    pub new_journal: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn operator_is_for_commands_to_servers_alone() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).unwrap();
        for (line, file) in [
            ("csictl node list", None),
            ("csictl --operator node list", None),
            ("csictl --operator=a.toml server list", Some("a.toml")),
            ("csictl node show n1 --operator=a.toml", Some("a.toml")),
            ("csictl --operator volume list --node n1", None),
            ("csictl volume show ns v --operator=a.toml", Some("a.toml")),
            ("csictl --operator volume register ns v --plugin p --credential c", None),
            ("csictl --operator volume deregister ns v", None),
            ("csictl --operator volume own ns v --from node/n1", None),
            ("csictl --operator volume create ns v --plugin p --capacity 1GiB --deadline 5s", None),
            ("csictl --operator volume delete ns v --yes ns/v --deadline 5s", None),
            ("csictl --operator volume expand ns v 1GiB --limit 2GiB --deadline 5s", None),
            ("csictl --operator volume validate ns v --access-mode single-node-writer", None),
            ("csictl --operator volume snapshot ns v s --no-wait --deadline 5s", None),
            ("csictl --operator volume attach ns v i-1 --read-only --deadline 5s", None),
            ("csictl --operator volume detach ns v i-1 --forget --yes ns/v", None),
            ("csictl --operator plugin delete-snapshot p s --yes s --deadline 5s", None),
            ("csictl --operator plugin volumes p", None),
            ("csictl --operator plugin capacity p --parameter pool=fast", None),
            ("csictl --operator snapshots p --external-id x", None),
            ("csictl --operator volume create ns v --plugin p --snapshot s", None),
            ("csictl --operator volume create ns v --plugin p --clone w", None),
            ("csictl --operator explain ns v", None),
            ("csictl --operator cluster status", None),
            ("csictl server upgrade --confirm prod", None),
            ("csictl --operator claims --volume v", None),
            ("csictl --operator release ns v job --node n1 --force --deadline 5s", None),
        ] {
            let cli = parse(line);
            assert!(cli.check().is_ok() && cli.operator() == file.map(PathBuf::from), "{line}");
        }
        assert!(parse("csictl status").check().is_ok());
        let own = parse("csictl volume own ns v --from node/n1").check().map_err(|error| error.kind());
        assert_eq!(own, Err(ErrorKind::MissingRequiredArgument));
        for line in [
            "csictl --operator status",
            "csictl --operator plugin restart p",
            "csictl --operator plugin capacity p --deadline 5s",
            "csictl --operator volume validate ns v --credential c",
            "csictl --operator volume attach ns v i-1 --credential c",
            "csictl --operator volume detach ns v i-1 --operation-id x",
            "csictl --operator snapshots p --credential c",
            "csictl --operator cluster leave",
            "csictl --operator=a.toml volume delete ns v --credential c",
            "csictl --operator=a.toml volume expand ns v 1GiB --part node",
            "csictl --operator volume create ns v --plugin p --operation-id x",
            "csictl --operator volume deregister ns v --force",
            "csictl --operator volume register ns v --plugin p --deadline 5s",
            "csictl --operator claims --past",
            "csictl --operator claim ns v job",
            "csictl --operator release ns v job --forget",
            "csictl --operator release ns v job --operation-id x",
        ] {
            let refused = parse(line).check().map_err(|error| error.kind());
            assert_eq!(refused, Err(ErrorKind::ArgumentConflict), "{line}");
        }
    }

    #[test]
    fn invalid_arguments_are_usage_errors() {
        let wrong = [
            "mount ns v job --plugin p",
            "mount ns v job --context k=v",
            "volume register ns --plugin p",
            "volume expand ns v 10GB",
            "volume deregister ns v --force --forget",
            "volume attach ns v",
            "--operator volume own ns v",
            "volume detach ns v",
            "release ns v job --force --forget",
            "volume create ns v --capacity lots",
            "mount ns v job --plugin p --external-id x --access-mode everybody",
            "adopt-mount ns v job --plugin p --external-id x --staging-path /s",
            "mount ns v job --plugin p --external-id x --context novalue",
            "mount ns v job --plugin p --external-id x --secrets-file f --credential c",
            "plugin register p",
            "events --volume pg",
            "events --volume prod/",
            "plugin register p --socket /s -- /bin/x",
            "plugin capacity p --block",
            "plugin capacity p --topology zone",
            "plugin delete-snapshot p",
            "snapshots",
            "--bus --csid-socket /s status",
            "--bus --operator node list",
            "node accept",
            "node block",
            "node fence",
            "node drain",
            "node undrain",
            "node forget",
            "server resume --without ,",
            "server resume --confirm n1",
        ];
        for line in wrong {
            let error = Cli::try_parse_from(["csictl"].into_iter().chain(line.split(' '))).map(|_| ());
            let kind = error.map_err(|error| error.kind());
            assert!(
                matches!(
                    kind,
                    Err(ErrorKind::MissingRequiredArgument
                        | ErrorKind::ValueValidation
                        | ErrorKind::InvalidValue
                        | ErrorKind::ArgumentConflict)
                ),
                "{line}: {kind:?}"
            );
        }
    }
}
