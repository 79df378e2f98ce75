//! The command line: what there is to say, and what each word means in the contract.

mod plugin;
mod volume;

use std::{path::PathBuf, str::FromStr, time::Duration};

use clap::{
    Args, Parser, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser},
};
use clap_complete::Shell;
use csid_client::{AccessMode, Propagation, Restore, Target};

pub use plugin::{
    Capacity, DeleteSnapshot, Drain, Exec, Logs, Plugin, PluginWait, Register, Snapshots, Top, Upgrade,
};
pub use volume::{
    Amount, Bind, Claim, Claims, Create, OneVolume, Register as RegisterVolume, Release, Secrets, Spec,
    Topology, Volume, Volumes,
};

/// Control csid, the CSI volume manager
///
/// csictl talks to csid over its private socket, or over the system bus when that socket cannot be reached.
#[derive(Parser)]
#[command(name = "csictl", version, disable_help_subcommand = true, max_term_width = 100)]
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

    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    pub fn target(&self) -> Target {
        match &self.csid_socket {
            Some(path) => Target::Socket(path.clone()),
            None if self.bus => Target::SystemBus,
            None => Target::from_env(),
        }
    }
}

#[derive(Subcommand)]
pub enum Command {
    /// Show what csid does: its state, plugins, mounts and operations
    Status,
    /// List, show, register, unregister, restart, upgrade, drain plugins, wait for one, read its log, run a command in one, see what one uses and has
    #[command(subcommand)]
    Plugin(Box<Plugin>),
    /// Register, create, list, show, validate, expand, snapshot, deregister, delete volumes, see how full one is
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
    /// Tell what a volume waits for, who has it, the last error and the next try
    Explain {
        #[command(flatten)]
        volume: OneVolume,
    },
    /// Wait until a plugin is ready (short for `csictl plugin wait`)
    Wait(PluginWait),
    /// Mount a volume for a consumer, and print the path where it is
    ///
    /// The volume is registered, or given inline: which plugin has it and what the plugin calls it. Repeating the
    /// command is safe: a mount that is under way is joined, one that is there is answered alike.
    Mount(Box<Mount>),
    /// Unmount a consumer's volume; one that is not mounted is unmounted already
    Unmount(Unmount),
    /// List mounts
    Mounts(Mounts),
    /// Tell whether a published path is mounted
    ///
    /// Exits with 0 when it is, with 1 when it is not, and with 3 when csid could not be asked.
    HasMount {
        /// The path that `csictl mount` printed
        path: String,
    },
    /// List what csid is doing
    Operations,
    /// Cancel an operation: a mount under way is undone
    Cancel {
        /// The operation's id, as `csictl operations` lists it
        id: String,
    },
    /// Show events, one per line; with --json each line is an object
    Events(Events),
    /// Compare the journal with what is mounted, and repair
    Reconcile(Reconcile),
    /// Make csid read its configuration again; an error in it changes nothing
    Reload,
    /// Check the configuration without touching the running csid
    CheckConfig,
    /// Print completions for a shell
    Completions { shell: Shell },
    /// Write the man pages into a directory
    #[command(hide = true)]
    GenMan { directory: PathBuf },
}

#[derive(Args)]
pub struct Mount {
    #[command(flatten)]
    pub name: Name,
    /// The plugin that has the volume, when it is not registered
    #[arg(long, value_name = "ID", requires = "external_id")]
    pub plugin: Option<String>,
    /// What the plugin calls the volume, when it is not registered
    #[arg(long, value_name = "ID", requires = "plugin")]
    pub external_id: Option<String>,
    /// An entry of the volume's context, when it is not registered
    #[arg(long, value_name = "KEY=VALUE", requires = "plugin")]
    pub context: Vec<Pair>,
    /// An entry of the publish context, when somebody else attached the volume
    #[arg(long, value_name = "KEY=VALUE", requires = "plugin")]
    pub publish_context: Vec<Pair>,
    /// After a reboot: mount again (auto, the default of a registered volume), or keep the row as lost until asked
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
    /// Who may use the volume at once
    #[arg(long, value_name = "MODE", value_parser = words::<AccessMode>(AccessMode::WORDS))]
    pub access_mode: Option<AccessMode>,
    /// Mount read-only
    #[arg(long)]
    pub read_only: bool,
    /// Publish the raw block device instead of a file system
    #[arg(long)]
    pub block: bool,
    /// Tells several mounts of the volume by this consumer apart
    #[arg(long)]
    pub tag: Option<String>,
    /// Bind the volume to this path too
    #[arg(long, value_name = "PATH")]
    pub target: Option<String>,
    /// How mounts inside the target reach the host and back
    #[arg(long, value_name = "MODE", value_parser = words::<Propagation>(Propagation::WORDS))]
    pub propagation: Option<Propagation>,
    /// Let set-uid programs on the target work
    #[arg(long)]
    pub suid: bool,
    /// Let device nodes on the target work
    #[arg(long)]
    pub dev: bool,
    #[command(flatten)]
    pub bind: Bind,
    #[command(flatten)]
    pub secrets: Secrets,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Args)]
pub struct Unmount {
    #[command(flatten)]
    pub name: Name,
    /// The tag that the mount was made with
    #[arg(long)]
    pub tag: Option<String>,
    /// Detach a dead mount lazily
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub wait: Wait,
}

/// A mount's identity, but for the tag.
#[derive(Args)]
pub struct Name {
    /// The volume's namespace
    pub namespace: String,
    /// The volume's name in the namespace
    pub volume: String,
    /// Who uses it: a job, a unit, a container
    pub consumer: String,
}

#[derive(Args)]
pub struct Wait {
    #[command(flatten)]
    pub deadline: Deadline,
    /// Your own name for the operation, for `csictl cancel`; a random one when absent
    #[arg(long, value_name = "ID")]
    pub operation_id: Option<String>,
}

#[derive(Args)]
pub struct Deadline {
    /// Give up after this time, such as 500ms, 30s, 2min or 1h
    #[arg(long, value_name = "TIME", value_parser = span)]
    deadline: Option<Duration>,
}

impl Deadline {
    pub fn usec(&self) -> Option<u64> {
        self.deadline.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    }
}

#[derive(Args)]
pub struct Mounts {
    /// Only this namespace
    #[arg(long)]
    pub namespace: Option<String>,
    /// Only this volume
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
    /// Only in this state: mounting, mounted, unmounting, uncertain, lost or waiting
    #[arg(long)]
    pub state: Option<String>,
    /// Only this user's
    #[arg(long)]
    pub uid: Option<u32>,
}

#[derive(Args)]
pub struct Events {
    /// Go on with new events as they come; alone it shows no old ones
    #[arg(long, short)]
    pub follow: bool,
    /// Begin after this sequence number
    #[arg(long, value_name = "SEQUENCE")]
    pub since: Option<u64>,
}

#[derive(Args)]
pub struct Reconcile {
    /// Only tell what would be done
    #[arg(long)]
    pub dry_run: bool,
    /// Remove what csid left behind and no row explains, where it is empty or provably csid's
    #[arg(long)]
    pub remove_orphans: bool,
    /// Begin a new journal with what is mounted, after StateCorrupt
    #[arg(long)]
    pub new_journal: bool,
}

/// `KEY=VALUE`
#[derive(Clone)]
pub struct Pair(pub String, pub String);

impl FromStr for Pair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(Self(key.to_owned(), value.to_owned())),
            _ => Err("it is not KEY=VALUE".to_owned()),
        }
    }
}

/// The contract's words, for help and completions too.
fn words<T>(words: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = String> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).try_map(|word| word.parse::<T>())
}

/// A number and one unit, as in csid's configuration.
fn span(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let millis = match unit {
        "ms" => 1,
        "" | "s" => 1_000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        _ => 0,
    };
    let total = number.parse::<u64>().ok().and_then(|number| number.checked_mul(millis));
    total
        .filter(|total| *total > 0)
        .map(Duration::from_millis)
        .ok_or_else(|| "it is no time, such as 500ms, 30s, 2min or 1h".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, error::ErrorKind};

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn times_are_read_as_csid_reads_them() {
        assert_eq!(span("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(span("30"), Ok(Duration::from_secs(30)));
        assert_eq!(span("2min"), Ok(Duration::from_secs(120)));
        for wrong in ["", "s", "0s", "-1s", "1d", "1 s", "99999999999999999h"] {
            assert!(span(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_argument_that_makes_no_sense_is_a_usage_error() {
        let wrong = [
            "mount ns v job --plugin p",
            "mount ns v job --context k=v",
            "volume register ns --plugin p",
            "volume expand ns v 10GB",
            "volume create ns v --capacity lots",
            "mount ns v job --plugin p --external-id x --access-mode everybody",
            "mount ns v job --plugin p --external-id x --context novalue",
            "mount ns v job --plugin p --external-id x --secrets-file f --credential c",
            "plugin register p",
            "plugin register p --socket /s -- /bin/x",
            "plugin capacity p --block",
            "plugin capacity p --topology zone",
            "plugin delete-snapshot p",
            "snapshots",
            "--bus --csid-socket /s status",
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
