//! Arguments of the commands about plugins, and their volumes and snapshots.

use std::time::Duration;

use clap::{Args, Subcommand};
use csid_client::{AccessMode, PluginService, Propagation};

use super::common::{Deadline, Pair, span, words};
use super::volume::{Secrets, Topology};

#[derive(Subcommand)]
pub enum Plugin {
    /// List plugins
    List,
    /// Show one plugin, and the consumers of its volumes
    Show { plugin: String },
    /// Register a plugin: one that csid runs, by its command, one in a systemd unit, or one that runs already, by its socket
    Register(Register),
    /// Forget a plugin, and stop it if csid runs it
    Unregister {
        plugin: String,
        /// Only this instance; it may go under mounts that another one serves
        #[arg(long)]
        instance: Option<String>,
        /// Although volumes of it are mounted
        #[arg(long)]
        force: bool,
    },
    /// Wait until a plugin is ready
    Wait(PluginWait),
    /// Show the journal's log of a plugin that runs in a unit
    Logs(Logs),
    /// Show a plugin's resource usage, and the times of csid's calls
    Stats { plugin: String },
    /// Show the resource usage of all plugins, updated on a terminal
    Top(Top),
    /// Stop a plugin that runs in a unit, start it again and wait until it is ready; its mounts stay
    ///
    /// Without --deadline it waits for two minutes. csid restarts the plugin after that too, until it is ready.
    Restart {
        plugin: String,
        #[command(flatten)]
        deadline: Deadline,
    },
    /// Let volumes be attached to this node under the new name that the plugin has for it
    AcceptNodeId {
        plugin: String,
        /// The name, as `csictl plugin show` has it
        node_id: String,
    },
    /// Run a command in a plugin that csid runs, if `exec = true` in csid.toml: in its namespaces and control group, with its
    /// environment, as root
    ///
    /// Standard input, output and error are the command's own. Ctrl-C and SIGTERM end it, with SIGTERM. Exits as the command
    /// does: with its status, with 128 and the signal's number when a signal ended it, with 127 or 126 when there is no such
    /// program or it cannot be run, and with 125 when it could not be begun.
    Exec(Exec),
    /// Start a new version of a plugin, and stop the old one when the new one is ready; its mounts stay
    ///
    /// Absent options keep their values. If the new version does not become ready, or is not the same plugin, csid stops it, and the
    /// old one stays in use.
    Upgrade(Upgrade),
    /// Unmount every mount of a plugin on this host, for good
    ///
    /// The plugin continues to run; it can be unregistered or stopped then. New mounts of it are refused meanwhile. What is in use
    /// by processes stays, and is listed.
    Drain(Drain),
    /// Show the plugin's available capacity for new volumes
    Capacity(Capacity),
    /// List the volumes that the plugin has, registered or not
    Volumes { plugin: String },
    /// Have the plugin delete a snapshot; one that is not there is deleted
    DeleteSnapshot(DeleteSnapshot),
}

#[derive(Args)]
pub struct PluginWait {
    pub plugin: String,
    /// The service to wait for
    #[arg(long, default_value = "node", value_parser = words::<PluginService>(PluginService::WORDS))]
    pub service: PluginService,
    #[command(flatten)]
    pub deadline: Deadline,
}

#[derive(Args)]
pub struct Logs {
    pub plugin: String,
    /// Continue with new lines as they are written
    #[arg(short, long)]
    pub follow: bool,
    /// Only the lines of this last time, such as 30s, 2min or 1h
    #[arg(long, value_name = "TIME", value_parser = span)]
    pub since: Option<Duration>,
    /// At most so many lines, the newest
    #[arg(short = 'n', long)]
    pub lines: Option<u32>,
}

#[derive(Args)]
pub struct Top {
    /// Show it once, as everywhere but on a terminal
    #[arg(long)]
    pub once: bool,
    /// The time between two updates, such as 2s or 1min
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = span)]
    pub interval: Duration,
}

#[derive(Args)]
pub struct Exec {
    pub plugin: String,
    /// The command and its arguments, after `--`
    #[arg(last = true, required = true)]
    pub argv: Vec<String>,
    /// Run it on a terminal of its own, as this one is
    #[arg(short, long)]
    pub tty: bool,
    /// Where it begins, as the plugin sees it; / when absent
    #[arg(short = 'C', long, value_name = "DIR")]
    pub directory: Option<String>,
}

#[derive(Args)]
pub struct Register {
    pub plugin: String,
    /// The service it runs in, which is there already; csid starts it, and leaves it when the plugin is forgotten; root only
    #[arg(long, value_name = "NAME.service", requires = "socket")]
    pub unit: Option<String>,
    /// The plugin's socket; without --unit csid does not start or stop it
    #[arg(long, value_name = "PATH", conflicts_with = "argv")]
    pub socket: Option<String>,
    /// The command that csid runs as the plugin, after `--`; root only
    #[arg(last = true, required_unless_present = "socket")]
    pub argv: Vec<String>,
    /// A variable of its environment; stored and public, so nothing secret
    #[arg(long, value_name = "NAME=VALUE", requires = "argv")]
    pub env: Vec<Pair>,
    /// A systemd credential for it, as in LoadCredential=
    #[arg(long, value_name = "NAME[:PATH]", requires = "argv")]
    pub load_credential: Vec<String>,
    /// The name of this instance of the plugin
    #[arg(long)]
    pub instance: Option<String>,
    /// The host directory for its volumes
    #[arg(long, value_name = "DIR")]
    pub plugin_root: Option<String>,
    /// The same directory as the plugin sees it
    #[arg(long, value_name = "DIR")]
    pub plugin_view: Option<String>,
    /// Where its output goes
    #[arg(long, value_name = "WHERE", value_parser = ["journal", "none"], requires = "argv")]
    pub log: Option<String>,
    /// The kind of driver, which sets its devices, capabilities and limits
    #[arg(long, value_parser = ["node-block", "node-fuse", "node-net", "controller"], requires = "argv")]
    pub profile: Option<String>,
    /// How its mounts and the host's propagate; one that mounts volumes needs the default, bidirectional
    #[arg(long, value_name = "HOW", value_parser = words::<Propagation>(Propagation::WORDS), requires = "argv")]
    pub propagation: Option<Propagation>,
    /// Its network: host (the default), none, or netns:NAME of `ip netns`
    #[arg(long, requires = "argv")]
    pub network: Option<String>,
}

#[derive(Args)]
pub struct Upgrade {
    pub plugin: String,
    /// The command that csid runs from now on, after `--`; root only
    #[arg(last = true)]
    pub argv: Vec<String>,
    /// All variables of its environment, in place of those that it had; stored and public, so nothing secret
    #[arg(long, value_name = "NAME=VALUE")]
    pub env: Vec<Pair>,
    /// All its systemd credentials, in place of those that it had
    #[arg(long, value_name = "NAME[:PATH]")]
    pub load_credential: Vec<String>,
    /// Where the new version of a plugin listens that csid does not run
    #[arg(long, value_name = "PATH", conflicts_with_all = ["argv", "env", "load_credential"])]
    pub socket: Option<String>,
    /// The name of the new instance; csid gives it one when absent
    #[arg(long)]
    pub instance: Option<String>,
    /// The instance to replace, of a plugin with several
    #[arg(long, value_name = "INSTANCE")]
    pub replace: Option<String>,
    #[command(flatten)]
    pub deadline: Deadline,
}

#[derive(Args)]
pub struct Drain {
    pub plugin: String,
    /// Do not ask: the plugin that is meant, once more
    #[arg(long, value_name = "PLUGIN")]
    pub yes: Option<String>,
    #[command(flatten)]
    pub deadline: Deadline,
}

#[derive(Args)]
pub struct Capacity {
    pub plugin: String,
    /// A way in which the volumes shall be used
    #[arg(long, value_name = "MODE", value_parser = words::<AccessMode>(AccessMode::WORDS))]
    pub access_mode: Vec<AccessMode>,
    /// All these ways as a raw block device
    #[arg(long, requires = "access_mode")]
    pub block: bool,
    /// A parameter of the plugin's
    #[arg(long, value_name = "KEY=VALUE")]
    pub parameter: Vec<Pair>,
    /// Where they shall be: the segments of one topology, such as zone=a,rack=1
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub topology: Option<Topology>,
    #[command(flatten)]
    pub deadline: Deadline,
}

#[derive(Args)]
pub struct Snapshots {
    pub plugin: String,
    /// Only of this volume, by the plugin's id for it
    #[arg(long, value_name = "ID")]
    pub external_id: Option<String>,
    #[command(flatten)]
    pub secrets: Secrets,
}

#[derive(Args)]
pub struct DeleteSnapshot {
    pub plugin: String,
    /// The plugin's id for the snapshot, as `csictl snapshots` lists it
    pub snapshot: String,
    /// Do not ask: the snapshot that is meant, once more
    #[arg(long, value_name = "SNAPSHOT")]
    pub yes: Option<String>,
    #[command(flatten)]
    pub secrets: Secrets,
    #[command(flatten)]
    pub deadline: Deadline,
}
