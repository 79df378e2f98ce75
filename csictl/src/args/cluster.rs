//! Arguments of the commands about a cluster.

use std::time::Duration;

use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};

use super::common::{Pair, span};

#[derive(Subcommand)]
pub enum Cluster {
    /// Show this host's state in its cluster: its name, the server, and what the servers have yet to learn
    ///
    /// With --operator: the whole cluster. Its servers, the nodes by their states, the work that is not done, and what needs an operator, with the
    /// next command.
    Status,
    /// Wait until this host has joined the cluster that csid.toml names
    Join(Join),
    /// Check that this host holds nothing of its cluster, and say how it leaves
    ///
    /// It changes nothing. It is refused while the host has a mount or a claim, or the servers have yet to learn that a claim has ended.
    Leave,
}

#[derive(Args)]
pub struct Join {
    /// First move the volumes that are registered on this host to the servers
    ///
    /// Each is registered at the servers, then forgotten here. Volumes that are claimed, attached or mounted here have to be released first.
    /// If the command is interrupted, repeat it. The host's node needs the grant `register` in the volumes' namespaces.
    #[arg(long)]
    pub import: bool,
}

#[derive(Subcommand)]
pub enum Node {
    /// List the nodes of the cluster, with the servers that they have joined
    List,
    /// Show one node
    Show {
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        node: String,
    },
    /// Accept another machine as a node, or a node that is blocked
    ///
    /// A machine that has the node's certificate, and another machine ID or journal than the node, is refused until it is accepted. It
    /// takes the node's claims over. So the earlier machine has to be off: else two machines may write to a volume.
    Accept(Accept),
    /// Block a node: end its sessions, and refuse all its calls
    ///
    /// Its claims stay, and its mounts. `csictl node accept --unblock` ends it.
    Block(Block),
    /// Say that a node's machine is off: end its sessions and its claims, so that other nodes get the volumes
    ///
    /// The machine has to be off, or cut off from the storage: else two machines may write to a volume. It joins again after its
    /// next boot. If it was not off after all, it mounts nothing until all its volumes are unmounted.
    Fence(Fence),
    /// Empty a node: it gets no more claims and mounts, and unmounts what nobody uses
    ///
    /// A mount that a process uses stays until it is used no more, and so does a claim that was asked for by itself until it is released. `csictl
    /// node show` says what is left, and why. A node that is away begins when it is back. `csictl node undrain` ends it.
    Drain(DrainNode),
    /// Have a node that drains get claims and mounts again
    Undrain {
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        node: String,
    },
    /// Forget a node that drains or is fenced, and that has no session and no claim
    ///
    /// With its certificate and a grant it joins as a new node. No fence is kept: a machine that was fenced must not come back with
    /// what it has mounted.
    Forget {
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        node: String,
    },
}

#[derive(Args)]
pub struct DrainNode {
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub node: String,
    /// Wait until nothing is left. At the deadline it prints what is left, and exits with 1. The drain goes on
    #[arg(long)]
    pub wait: bool,
    /// How long --wait waits, such as 30s, 2min or 1h; without it for as long as something is left
    #[arg(long, value_name = "TIME", value_parser = span, requires = "wait")]
    pub deadline: Option<Duration>,
}

#[derive(Args)]
pub struct Fence {
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub node: String,
    /// Why, for `csictl node show`; at most 256 bytes. A node that is fenced keeps its reason
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Do not run the servers' command that switches the machine off (`[fence]` in csid-server.toml): it is off already
    #[arg(long)]
    pub without_command: bool,
    /// Wait until the node's claims have ended, so that other nodes get all volumes. At the deadline it prints the node, and exits with 1
    #[arg(long)]
    pub wait: bool,
    /// How long --wait waits, such as 30s, 2min or 1h; without it for as long as a claim is left
    #[arg(long, value_name = "TIME", value_parser = span, requires = "wait")]
    pub deadline: Option<Duration>,
    /// Do not ask: the node's name again
    #[arg(long, value_name = "NODE")]
    pub confirm: Option<String>,
}

#[derive(Args)]
pub struct Accept {
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub node: String,
    /// Do not ask: the ID of the machine that is meant, as its /etc/machine-id has it
    #[arg(long, value_name = "ID")]
    pub machine_id: Option<String>,
    /// End a block. A thief of the node's key gets in again, too
    #[arg(long)]
    pub unblock: bool,
    /// Let the node join although it has seen more than etcd has: it forgets that. For a node to which a server has lied, and not
    /// after a restore of etcd
    #[arg(long, conflicts_with = "name")]
    pub forget: bool,
    /// A name that a plugin has for the node. A fence of the node detaches what AttachVolume has attached to that name
    #[arg(long, value_name = "PLUGIN=NAME")]
    pub name: Vec<Pair>,
}

#[derive(Args)]
pub struct Block {
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub node: String,
    /// Why, for `csictl node show`; at most 256 bytes. A node that is blocked keeps its reason
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub reason: String,
}

#[derive(Subcommand)]
pub enum Server {
    /// List the servers of the cluster that run
    List,
    /// Find what does not fit in the cluster's etcd: rows without those that they belong to, and values that cannot be read
    ///
    /// It changes nothing. It exits with 1 if it finds something.
    Audit,
    /// Say that etcd was restored from a backup: the cluster recovers
    ///
    /// The nodes say what they hold, and nothing is granted, attached or detached until each has. Mounts stay. Nothing else begins a
    /// recovery. Nothing changes if the cluster recovers already in a generation after `--past`.
    Restored(Restored),
    /// End a recovery: the cluster grants claims again
    ///
    /// Look at the list of machines first: a node that joins later loses its claims, and keeps its mounts. It is refused while a node has not said
    /// what it holds, and while claims were not brought back. `csictl server list` names both. Nothing else ends a recovery.
    Resume(Resume),
    /// Have the values in etcd get the newest version that the servers know
    ///
    /// Do this when all servers have the new release: no earlier one serves the cluster again. It is refused while a server runs that does not
    /// know the version, and while the cluster recovers from a backup.
    Upgrade(ServerUpgrade),
}

#[derive(Args)]
pub struct Restored {
    /// A generation that a node has seen, as `csictl server audit` shows it: the new one is after it. At most 1000 more than etcd's
    #[arg(long, value_name = "GENERATION", default_value_t = 0, hide_default_value = true)]
    pub past: u64,
    /// Do not ask: the cluster's name
    #[arg(long, value_name = "CLUSTER")]
    pub confirm: Option<String>,
}

#[derive(Args)]
pub struct Resume {
    /// Nodes that do not come back, with commas between them: they are fenced first. Their machines have to be off, or cut off from the
    /// storage: else two machines may write to a volume
    #[arg(long, value_name = "NODES", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    pub without: Vec<String>,
    /// Nodes whose refused claims you have looked at (`csictl server audit`), with commas between them. Their mounts stay, and other nodes may get
    /// the volumes
    #[arg(long, value_name = "NODES", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    pub forget: Vec<String>,
    /// Do not run the servers' command that switches a machine off (`[fence]` in csid-server.toml): all are off already
    #[arg(long, requires = "without")]
    pub without_command: bool,
    /// Do not ask: the nodes once more, as in --without
    #[arg(long, value_name = "NODES", requires = "without")]
    pub confirm: Option<String>,
}

#[derive(Args)]
pub struct ServerUpgrade {
    /// Do not ask: the cluster's name
    #[arg(long, value_name = "CLUSTER")]
    pub confirm: Option<String>,
}
