//! `csid-bench-cluster`: what a cluster does on one machine, against raw compare-and-swaps of its etcd in the same run. It starts three
//! members of etcd and three servers with TLS on loopback, plays the nodes, prints each figure with its goal, and writes cluster.json.
//! Absolute figures mean little on a shared machine; ratios of one run hold.

#[path = "../../../server/tests/cluster/certificates.rs"]
#[allow(dead_code, reason = "the tests of the servers use more of it")]
mod certificates;
mod failures;
#[path = "../../bench/src/host.rs"]
#[allow(dead_code, reason = "csid-bench uses more of it")]
mod host;
mod hosts;
mod load;
mod many;
mod nodes;
mod parts;
#[path = "../../bench/src/plugin.rs"]
mod plugin;
mod process;
mod raw;
mod report;
mod site;
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use crate::parts::Bench;
use crate::report::{Run, load as machine_load};

/// Descriptors of this program: the connections of each node.
const DESCRIPTORS: u64 = 16 * 1024;

#[derive(Parser)]
#[command(about = "a cluster of csid against raw transactions of its etcd, in one table (root)")]
pub struct Args {
    /// Only these parts, in one list.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Nodes that are played.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(2..=5000))]
    nodes: u16,
    /// Claims of each node, of a volume each, in the parts with many volumes.
    #[arg(long, default_value_t = 100)]
    claims: usize,
    /// Claims that are taken again after the reboot of all nodes, at most.
    #[arg(long, default_value_t = 10_000)]
    again: usize,
    /// Rounds of each measurement, by turns with the floor.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Of one round.
    #[arg(long, default_value_t = 3000)]
    milliseconds: u64,
    /// Where etcd has its data and csid its journal while they are measured, and cluster.json afterwards: on a real disk.
    #[arg(long, default_value = "target/bench")]
    directory: PathBuf,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Claims,
    Attach,
    Lag,
    Hosts,
    Idle,
    Failures,
    Many,
    OneVolume,
}

#[derive(Subcommand)]
enum Role {
    /// What this program is for itself.
    #[command(hide = true)]
    Hosts(hosts::HostsArgs),
    #[command(hide = true)]
    ServePlugin {
        socket: PathBuf,
        /// Volumes that it takes on a node; 0: any number.
        #[arg(default_value_t = 0)]
        most: i64,
    },
}

impl Args {
    fn nodes(&self) -> usize {
        self.nodes.into()
    }

    fn time(&self) -> Duration {
        Duration::from_millis(self.milliseconds)
    }
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("csid-bench-cluster: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<()> {
    match &args.role {
        Some(Role::ServePlugin { socket, most }) => plugin::serve(socket, *most),
        Some(Role::Hosts(of)) => hosts::measure(of),
        None => {
            ensure!(rustix::process::geteuid().is_root(), "mounting needs root");
            let limit = getrlimit(Resource::Nofile);
            let current = limit.maximum.map_or(DESCRIPTORS, |most| most.min(DESCRIPTORS));
            setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum: limit.maximum })?;
            measure(args)
        }
    }
}

/// Measures. A signal ends the run, and what it has started.
#[tokio::main(worker_threads = 2)]
async fn measure(args: Args) -> Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        measured = all(args) => measured,
        _ = terminate.recv() => bail!("ended by SIGTERM"),
        _ = interrupt.recv() => bail!("ended by SIGINT"),
    }
}

async fn all(args: Args) -> Result<()> {
    std::fs::create_dir_all(&args.directory).with_context(|| args.directory.display().to_string())?;
    let directory = std::path::absolute(&args.directory)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let run = Run { begun: now.as_secs(), load: machine_load()? };
    let only = args.only.clone();
    let mut bench = Bench::start(args, &directory).await?;
    let mut failed = 0;
    for part in Part::value_variants() {
        if !only.is_empty() && !only.contains(part) {
            continue;
        }
        let measured = match part {
            Part::Claims => bench.claims().await,
            Part::Attach => bench.attach().await,
            Part::Lag => bench.lag().await,
            Part::Hosts => bench.hosts().await,
            Part::Idle => bench.idle().await,
            Part::Failures => bench.failures().await,
            Part::Many => bench.many().await,
            Part::OneVolume => bench.one_volume().await,
        };
        if let Err(error) = measured {
            // The other parts have their figures.
            eprintln!("csid-bench-cluster: {error:#}");
            failed += 1;
            bench.stop()?;
        }
    }
    bench.report.print();
    bench.report.write(&directory.join("cluster.json"), &run)?;
    ensure!(failed == 0, "{failed} parts have failed");
    Ok(())
}
