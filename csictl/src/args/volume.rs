//! Arguments of the commands about volumes and claims.

use std::{path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, Subcommand};
use csid_client::{AccessMode, ClaimMode, Heal, Part};

use super::common::{Deadline, Name, Pair, Wait, span, words};

#[derive(Subcommand)]
pub enum Volume {
    /// List volumes, also those that files declare and that are not registered yet
    List(Volumes),
    /// Show one volume
    Show {
        #[command(flatten)]
        volume: OneVolume,
    },
    /// Register an existing volume of a plugin, or change a registered one
    ///
    /// Everything can be in a file too, with the keys of the D-Bus contract. The command line takes precedence.
    Register(RegisterVolume),
    /// Have the plugin make a volume, and register it
    ///
    /// Repeating the command is safe: it makes no second volume. Everything can be given in a file too, with the keys of
    /// the D-Bus contract; the command line takes precedence.
    Create(Create),
    /// Ask the plugin whether the volume can be used in a way
    ///
    /// Exits with 0 if the plugin confirms it, with 1 if it does not, and with 3 if there was no answer.
    Validate {
        #[command(flatten)]
        volume: OneVolume,
        /// A way in which it shall be usable, each once; all that the volume was registered with, when absent
        #[arg(long, value_name = "MODE", value_parser = words::<AccessMode>(AccessMode::WORDS))]
        access_mode: Vec<AccessMode>,
        /// All these ways as a raw block device
        #[arg(long, requires = "access_mode")]
        block: bool,
        #[command(flatten)]
        secrets: Secrets,
        #[command(flatten)]
        wait: Wait,
    },
    /// Make a volume larger
    Expand(Expand),
    /// Make a snapshot of a volume, and print the plugin's id for it
    Snapshot(Snapshot),
    /// Show how full a mounted volume is
    Stats {
        #[command(flatten)]
        volume: OneVolume,
        #[command(flatten)]
        wait: Wait,
    },
    /// Have the plugin delete a volume and everything on it
    Delete {
        #[command(flatten)]
        volume: OneVolume,
        #[command(flatten)]
        confirm: Confirm,
        #[command(flatten)]
        secrets: Secrets,
        #[command(flatten)]
        wait: Wait,
    },
    /// Attach a volume to a node without a claim, as a scheduler does by AttachVolume
    Attach(Attach),
    /// Detach a volume that a scheduler attached by AttachVolume
    Detach {
        #[command(flatten)]
        volume: OneVolume,
        /// The plugin's id of the node that the volume is attached to
        node: String,
        /// The last resort, as root or an operator: drop the attachment though the plugin never acknowledged the detach
        #[arg(long)]
        forget: bool,
        #[command(flatten)]
        confirm: Confirm,
        #[command(flatten)]
        secrets: Secrets,
        #[command(flatten)]
        wait: Wait,
    },
    /// Become the owner of a volume whose owner is gone (needs --operator)
    Own {
        #[command(flatten)]
        volume: OneVolume,
        /// The owner until now, as `volume show --json` has it: operator/NAME or node/NAME
        #[arg(long, value_name = "OWNER")]
        from: String,
    },
    /// Forget a volume; the plugin keeps it
    Deregister {
        #[command(flatten)]
        volume: OneVolume,
        /// Although it is claimed; its claims are dropped as they are
        #[arg(long)]
        force: bool,
        /// The last resort, as root: give up for good a creation or deletion that never ends
        #[arg(long, conflicts_with = "force")]
        forget: bool,
        #[command(flatten)]
        confirm: Confirm,
        #[command(flatten)]
        wait: Wait,
    },
}

#[derive(Args)]
pub struct OneVolume {
    /// The volume's namespace
    pub namespace: String,
    /// The volume's name in the namespace
    pub volume: String,
}

#[derive(Args)]
pub struct Attach {
    #[command(flatten)]
    pub volume: OneVolume,
    /// The plugin's id of the node
    pub node: String,
    /// Attach read-only
    #[arg(long)]
    pub read_only: bool,
    /// Who may use the volume at the same time; the volume's first capability when absent
    #[arg(long, value_name = "MODE", value_parser = words::<AccessMode>(AccessMode::WORDS))]
    pub access_mode: Option<AccessMode>,
    /// As a raw block device
    #[arg(long)]
    pub block: bool,
    #[command(flatten)]
    pub secrets: Secrets,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Args)]
pub struct Volumes {
    /// Only this namespace
    #[arg(long)]
    pub namespace: Option<String>,
    /// Only this plugin's
    #[arg(long)]
    pub plugin: Option<String>,
    /// Only those that this node has claimed
    #[arg(long)]
    pub node: Option<String>,
    /// Only volumes whose names begin so
    #[arg(long)]
    pub prefix: Option<String>,
}

/// Options of both register and create.
#[derive(Args)]
pub struct Spec {
    /// The volume's namespace
    #[arg(required_unless_present = "file", requires = "volume")]
    pub namespace: Option<String>,
    /// The volume's name in the namespace
    pub volume: Option<String>,
    /// A TOML file with the same, and `namespace` and `id`
    #[arg(long, short, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The plugin that has the volume
    #[arg(long, value_name = "ID")]
    pub plugin: Option<String>,
    /// A name for people, and for the plugin that makes the volume
    #[arg(long)]
    pub name: Option<String>,
    /// A way in which the volume can be used; required, unless FILE has `capabilities`
    #[arg(long, value_name = "MODE", value_parser = words::<AccessMode>(AccessMode::WORDS))]
    pub access_mode: Vec<AccessMode>,
    /// All these ways as a raw block device
    #[arg(long, requires = "access_mode")]
    pub block: bool,
    /// File system, such as ext4; the plugin's own default when absent
    #[arg(long, value_name = "TYPE")]
    pub fs_type: Option<String>,
    /// A mount option for the file system, such as noatime
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    pub mount_flag: Vec<String>,
    /// The group that shall own the volume's files
    #[arg(long, value_name = "GROUP")]
    pub mount_group: Option<String>,
    /// A parameter of the plugin's
    #[arg(long, value_name = "KEY=VALUE")]
    pub parameter: Vec<Pair>,
    /// Where it can be had: segments of one topology, such as zone=a,rack=1
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub topology: Vec<Topology>,
    /// The action for a dead mount
    #[arg(long, value_name = "WHAT", value_parser = words::<Heal>(Heal::WORDS))]
    pub heal: Option<Heal>,
    /// Let set-uid programs on targets work; root only
    #[arg(long)]
    pub suid: bool,
    /// Let device nodes on targets work; root only
    #[arg(long)]
    pub dev: bool,
    #[command(flatten)]
    pub secrets: Secrets,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Args)]
pub struct RegisterVolume {
    #[command(flatten)]
    pub spec: Spec,
    /// The plugin's ID of the volume
    #[arg(long, value_name = "ID")]
    pub external_id: Option<String>,
    /// An entry of the volume's context
    #[arg(long, value_name = "KEY=VALUE")]
    pub context: Vec<Pair>,
}

#[derive(Args)]
pub struct Create {
    #[command(flatten)]
    pub spec: Spec,
    /// At least so large, such as 10GiB
    #[arg(long, value_name = "SIZE")]
    pub capacity: Option<Amount>,
    /// At most so large
    #[arg(long, value_name = "SIZE")]
    pub capacity_max: Option<Amount>,
    /// Copy the data of this snapshot, by the plugin's ID of it
    #[arg(long, value_name = "ID", conflicts_with = "clone_of")]
    pub snapshot: Option<String>,
    /// Copy the data of this volume of the namespace
    #[arg(long = "clone", value_name = "VOLUME")]
    pub clone_of: Option<String>,
}

#[derive(Args)]
pub struct Expand {
    #[command(flatten)]
    pub volume: OneVolume,
    /// At least so large, such as 20GiB
    pub capacity: Amount,
    /// At most so large
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<Amount>,
    /// Only this part of the work
    #[arg(long, value_parser = words::<Part>(Part::WORDS))]
    pub part: Option<Part>,
    #[command(flatten)]
    pub secrets: Secrets,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Args)]
pub struct Snapshot {
    #[command(flatten)]
    pub volume: OneVolume,
    /// The snapshot's name: the same one again is the same snapshot
    pub name: String,
    /// A parameter of the plugin's
    #[arg(long, value_name = "KEY=VALUE")]
    pub parameter: Vec<Pair>,
    /// Return when the plugin has answered, though the snapshot may not be ready to use yet (`ready` of --json)
    #[arg(long)]
    pub no_wait: bool,
    #[command(flatten)]
    pub secrets: Secrets,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Args)]
pub struct Claim {
    #[command(flatten)]
    pub name: Name,
    /// To read, or to write too (the default, where the access mode has writers)
    #[arg(long, value_parser = words::<ClaimMode>(ClaimMode::WORDS))]
    pub mode: Option<ClaimMode>,
    /// Who may use the volume at the same time; by default as it is claimed already, or its first capability
    #[arg(long, value_name = "MODE", value_parser = words::<AccessMode>(AccessMode::WORDS))]
    pub access_mode: Option<AccessMode>,
    /// As a raw block device
    #[arg(long)]
    pub block: bool,
    /// This host's name in claims; another one is refused
    #[arg(long)]
    pub node: Option<String>,
    /// Wait at most this long while claims are in the way, or the plugin takes no more volumes on this node
    #[arg(long, value_name = "TIME", value_parser = span)]
    pub queue: Option<Duration>,
    #[command(flatten)]
    pub bind: Bind,
    #[command(flatten)]
    pub secrets: Secrets,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Args)]
pub struct Release {
    #[command(flatten)]
    pub name: Name,
    /// The node that the claim has to be on; any node when absent
    #[arg(long)]
    pub node: Option<String>,
    /// Drop the claim as it is: only if you know that its consumer is gone
    #[arg(long)]
    pub force: bool,
    /// The last resort, as root: drop the claim and its mounts though the plugin never acknowledged
    #[arg(long, conflicts_with = "force")]
    pub forget: bool,
    #[command(flatten)]
    pub confirm: Confirm,
    #[command(flatten)]
    pub secrets: Secrets,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Args)]
pub struct Claims {
    /// Only this namespace
    #[arg(long)]
    pub namespace: Option<String>,
    /// Only this volume: its name, without the namespace (--namespace)
    #[arg(long)]
    pub volume: Option<String>,
    /// Only this consumer
    #[arg(long)]
    pub consumer: Option<String>,
    /// Only this node's
    #[arg(long)]
    pub node: Option<String>,
    /// Only of this plugin's volumes
    #[arg(long)]
    pub plugin: Option<String>,
    /// Those that ended, instead of those that are
    #[arg(long)]
    pub past: bool,
}

/// Confirmation of a command that cannot be undone.
#[derive(Args)]
pub struct Confirm {
    /// Do not ask: the volume that is meant, once more
    #[arg(long, value_name = "NAMESPACE/VOLUME")]
    pub yes: Option<String>,
}

/// Options that bind a claim's lifetime, and that of its mounts, to a unit.
#[derive(Args)]
pub struct Bind {
    /// Unmount and release when this systemd unit, such as db.service, has stopped
    #[arg(long, value_name = "UNIT")]
    pub bind_unit: Option<String>,
    /// Wait this long after that, unless the unit runs again
    #[arg(long, value_name = "TIME", value_parser = span, requires = "bind_unit")]
    pub grace: Option<Duration>,
}

impl Bind {
    /// As the option of the contract has it.
    pub fn unit(&self) -> Option<String> {
        self.bind_unit.as_ref().map(|unit| format!("unit:{unit}"))
    }
}

#[derive(Args)]
pub struct Secrets {
    /// A file with the volume's secrets, a JSON object of strings; `-` is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "credential")]
    pub secrets_file: Option<PathBuf>,
    /// The systemd credential with the volume's secrets: csid can load it again after a reboot
    #[arg(long, value_name = "NAME")]
    pub credential: Option<String>,
}

/// Bytes, with a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount(pub u64);

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        // Only powers of two, because `GB` has two meanings.
        let shift = ["", "K", "M", "G", "T", "P"]
            .iter()
            .position(|of| unit == *of || (!of.is_empty() && unit == format!("{of}iB")))
            .map(|place| 10 * place as u32);
        let bytes = number.parse::<u64>().ok().zip(shift).and_then(|(number, shift)| {
            number.checked_mul(1 << shift).filter(|bytes| *bytes > 0 && i64::try_from(*bytes).is_ok())
        });
        bytes
            .map(Amount)
            .ok_or_else(|| "it is no size, such as 512MiB, 10GiB or 1TiB (or M, G, T)".to_owned())
    }
}

/// `KEY=VALUE,...`
#[derive(Clone)]
pub struct Topology(pub Vec<Pair>);

impl FromStr for Topology {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Topology)
    }
}

impl Deadline {
    pub fn usec_of(span: Option<Duration>) -> Option<u64> {
        span.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two() {
        for (text, bytes) in
            [("1", 1), ("1K", 1024), ("512MiB", 512 << 20), ("10GiB", 10 << 30), ("2T", 2 << 40)]
        {
            assert_eq!(text.parse(), Ok(Amount(bytes)), "{text}");
        }
        for wrong in ["", "0", "G", "10GB", "10 G", "1.5G", "-1", "10g", "8388608T", "18446744073709551615"] {
            assert!(wrong.parse::<Amount>().is_err(), "{wrong}");
        }
    }
}
