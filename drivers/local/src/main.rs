//! csi-local: CSI volumes on a plain host, as image files with ext4 or xfs on loop devices, or as raw block devices.
//!
//! `store` owns what is on disk, the kernel owns devices and mounts; the three services only translate. Every call
//! looks before it acts, so that it may be repeated and continues what a killed driver began.

mod caller;
mod capability;
mod controller;
mod copy;
mod dirs;
mod error;
mod format;
mod identity;
mod loops;
mod mounts;
mod node;
mod serve;
mod snapshots;
mod store;
mod sys;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use crate::store::{Content, Range, Store};

/// A CSI driver for plain hosts: volumes are image files on loop devices
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Where the volumes are
    #[arg(long, global = true, value_name = "DIR", default_value = "/var/lib/csi-local")]
    state_dir: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve CSI on a unix socket
    Serve {
        /// The socket, as unix:///path
        #[arg(long, env = "CSI_ENDPOINT")]
        endpoint: String,
        /// This node's id [default: the host's name]
        #[arg(long)]
        node_id: Option<String>,
        /// Have volumes attached to this node before they are staged (PUBLISH_UNPUBLISH_VOLUME); change this only
        /// while none is in use
        #[arg(long)]
        attach: bool,
    },
    /// Create a volume and print its id; one that is there already is left as it is
    Create {
        name: String,
        /// In bytes, or with K, M, G or T for powers of 1024
        #[arg(long, value_parser = parse_size)]
        size: i64,
        /// The file-system, made when the volume is first used
        #[arg(long, value_enum, default_value = "ext4")]
        fs: Filesystem,
        /// A raw block device instead
        #[arg(long, conflicts_with = "fs")]
        block: bool,
    },
    /// Delete a volume and all that is in it; one that is in use is refused
    Delete { id: String },
    /// Delete a snapshot; volumes that were made from it stay
    DeleteSnapshot { id: String },
    /// List the volumes and their snapshots
    List,
}

#[derive(Clone, Copy, ValueEnum)]
enum Filesystem {
    Ext4,
    Xfs,
}

fn parse_size(text: &str) -> Result<i64, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => {
            let shift = "KMGT".find(unit.to_ascii_uppercase()).ok_or("the units are K, M, G and T")?;
            (&text[..at], 10 * (shift as u32 + 1))
        }
        _ => (text, 0),
    };
    let number: i64 = digits.parse().map_err(|_| "a size is a number with K, M, G or T, like 64M")?;
    match number.checked_mul(1 << shift) {
        Some(size) if size > 0 => Ok(size),
        _ => Err("the size is out of range".to_owned()),
    }
}

fn main() -> ExitCode {
    let filter = std::env::var("RUST_LOG").ok().and_then(|filter| filter.parse().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    tracing_subscriber::registry().with(filter).with(log).init();
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("csi-local: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    let store = Store::open(&arguments.state_dir)?;
    match arguments.command {
        Command::Serve { endpoint, node_id, attach } => {
            let node_id = node_id.unwrap_or_else(hostname);
            // Dropping the runtime waits for calls whose callers have gone.
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.context("starting")?.block_on(serve::serve(store, &endpoint, node_id, attach))
        }
        Command::Create { name, size, fs, block } => {
            let content = match fs {
                _ if block => Content::Block,
                Filesystem::Ext4 => Content::Ext4,
                Filesystem::Xfs => Content::Xfs,
            };
            let (id, _) = store.create(&name, content, Range::exactly(size)?, None)?;
            println!("{id}");
            Ok(())
        }
        Command::Delete { id } => {
            if let Err(error::Error::NoVolume(_)) = store.read(&id) {
                eprintln!("csi-local: there is no volume {id:?}");
            }
            Ok(store.delete(&id, false)?)
        }
        Command::DeleteSnapshot { id } => {
            if let Err(error::Error::NoSnapshot(_)) = store.read_snapshot(&id) {
                eprintln!("csi-local: there is no snapshot {id:?}");
            }
            Ok(store.delete_snapshot(&id)?)
        }
        Command::List => {
            println!("{:<40} {:>15} {:>15} {:<6} NAME", "ID", "CAPACITY", "ON DISK", "HOLDS");
            for v in store.list()? {
                let holds = v.meta.content.name();
                println!("{:<40} {:>15} {:>15} {holds:<6} {}", v.id, v.capacity, v.used, v.meta.name);
            }
            let snapshots = store.snapshots()?;
            if !snapshots.is_empty() {
                println!("\n{:<40} {:>15} {:>15} {:<6} OF", "SNAPSHOT", "CAPACITY", "ON DISK", "HOLDS");
            }
            for s in snapshots {
                let holds = s.meta.content.name();
                println!("{:<40} {:>15} {:>15} {holds:<6} {}", s.id, s.capacity, s.used, s.meta.volume);
            }
            Ok(())
        }
    }
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("1g"), Ok(1 << 30));
        assert_eq!(parse_size("4096"), Ok(4096));
        for bad in ["", "M", "-1", "0", "1.5G", "9223372036854775807K", "5X", "5€"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
