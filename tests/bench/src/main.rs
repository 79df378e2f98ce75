//! `csid-bench`: what a durable mount costs against the bare RPCs, all in one run on one machine, with csid's real binary, a
//! plugin whose publish makes one bind mount, and the journal on a real disk. It prints the medians of interleaved rounds and
//! the targets, and writes `report.json`. Absolute times mean little; ratios within one run hold.

#[cfg(target_arch = "x86_64")]
mod count;
mod curves;
mod host;
mod least;
mod load;
mod neighbours;
mod parts;
mod paths;
mod pictures;
mod plugin;
mod report;
#[cfg(target_arch = "x86_64")]
mod stacks;
#[cfg(target_arch = "x86_64")]
mod trace;
mod units;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand, ValueEnum};

use host::Host;
use report::{Report, WAYS};

#[derive(Parser)]
#[command(about = "csid against the bare RPCs of a mount, in one table (root)")]
struct Args {
    /// Only these parts, in one list.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Of the cycles only these ways to a mount, in one list: floor, floor-commit, least, private, bus, c, cgo, go.
    #[arg(long, value_delimiter = ',', value_parser = WAYS.map(|(way, _)| way))]
    ways: Vec<String>,
    /// Of the cycles only these numbers of callers, in one list: 1, 16, 64.
    #[arg(long, value_delimiter = ',')]
    callers: Vec<u32>,
    /// Of the curves only those whose names contain one of these, in one list: volumes, waiters, consumers, units.
    #[arg(long, value_delimiter = ',')]
    curves: Vec<String>,
    /// Interleaved rounds of each measurement.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Of one measurement of cycles.
    #[arg(long, default_value_t = 1000)]
    milliseconds: u64,
    /// Where the journal lies while it is measured, and report.json afterwards: on a real disk. Not of `count`.
    #[arg(long, default_value = "target/bench")]
    directory: PathBuf,
    /// The csid to be measured [default: next to this program].
    #[arg(long)]
    csid: Option<PathBuf>,
    /// End csid by SIGTERM, not by SIGKILL: a csid that counts its branches writes them at its end.
    #[arg(long)]
    stop: bool,
    /// In the mount namespace that this program made for itself.
    #[arg(long, hide = true, global = true)]
    inside: Option<PathBuf>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Cycles,
    Claims,
    Start,
    Adopt,
    Remount,
    Foreign,
    Curves,
    Elsewhere,
    Idle,
}

#[derive(Subcommand)]
enum Role {
    /// Count the instructions and the system calls of a mount and an unmount, against the kept figures
    Count {
        /// Keep what is counted now.
        #[arg(long)]
        renew: bool,
        /// Write mount.folded and unmount.folded into this directory instead: the instructions of each call stack.
        #[arg(long, conflicts_with = "renew")]
        stacks: Option<PathBuf>,
    },
    /// Write the time that a mount spends in each step, for the pictures in docs/
    Pictures { directory: PathBuf },
    /// What this program is for itself.
    #[command(hide = true)]
    ServePlugin {
        socket: PathBuf,
        /// Volumes that it takes on a node; 0: any number.
        #[arg(default_value_t = 0)]
        most: i64,
    },
    #[command(hide = true)]
    ServeLeast { socket: PathBuf, plugin: PathBuf, directory: PathBuf, volumes: u32 },
    #[command(hide = true)]
    ServeNeighbours { directory: PathBuf, processes: usize, namespaces: usize, mounts: usize },
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("csid-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<ExitCode> {
    if let Some(Role::ServePlugin { socket, most }) = &args.role {
        return plugin::serve(socket, *most).map(|()| ExitCode::SUCCESS);
    }
    if let Some(Role::ServeNeighbours { directory, processes, namespaces, mounts }) = &args.role {
        return neighbours::serve(directory, *processes, *namespaces, *mounts).map(|()| ExitCode::SUCCESS);
    }
    if let Some(Role::ServeLeast { socket, plugin, directory, volumes }) = &args.role {
        return least::serve(socket, plugin, directory, *volumes).map(|()| ExitCode::SUCCESS);
    }
    let Some(directory) = &args.inside else { return outside(args) };
    let beside = std::env::current_exe()?.with_file_name("csid");
    let mut host = Host::new(directory, args.csid.as_ref().unwrap_or(&beside))?;
    host.stops = args.stop;
    match args.role {
        Some(Role::Count { renew, ref stacks }) => count(&host, renew, stacks.as_deref()),
        Some(Role::Pictures { ref directory }) => {
            let time = Duration::from_millis(args.milliseconds);
            pictures(&host, directory, time).map(|()| ExitCode::SUCCESS)
        }
        _ => measure(args, &host).map(|()| ExitCode::SUCCESS),
    }
}

/// Run this once more in a mount namespace of its own: whatever it mounts ends with it.
fn outside(args: &Args) -> Result<ExitCode> {
    ensure!(rustix::process::geteuid().is_root(), "mounting needs root");
    let directory = match args.role {
        // The same on each machine: no disk, and paths of one length, for they are in messages.
        Some(Role::Count { .. }) => PathBuf::from("/dev/shm"),
        _ => std::path::absolute(&args.directory)?,
    };
    std::fs::create_dir_all(&directory)?;
    let host = tempfile::Builder::new().prefix("host-").tempdir_in(directory)?;
    // An unmount looks at the namespaces of all processes, so the count sees no other processes than its own.
    let alone: &[&str] = match args.role {
        Some(Role::Count { .. }) => &["--pid", "--fork", "--kill-child", "--mount-proc"],
        _ => &[],
    };
    let status = Command::new("unshare")
        .args(["--mount", "--propagation", "private"])
        .args(alone)
        .arg("--")
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg("--inside")
        .arg(host.path())
        .env("DBUS_SYSTEM_BUS_ADDRESS", host::bus_address(host.path()))
        .status()
        .context("cannot start unshare")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(target_arch = "x86_64")]
use count::run as count;

#[cfg(not(target_arch = "x86_64"))]
fn count(_: &Host, _: bool, stacks: Option<&Path>) -> Result<ExitCode> {
    ensure!(stacks.is_none(), "call stacks are counted on x86-64 only");
    println!("not counted: instructions are counted on x86-64 only");
    Ok(ExitCode::SUCCESS)
}

#[tokio::main(worker_threads = 2)]
async fn pictures(host: &Host, directory: &Path, time: Duration) -> Result<()> {
    pictures::write(host, directory, time).await
}

#[tokio::main(worker_threads = 2)]
async fn measure(args: &Args, host: &Host) -> Result<()> {
    let (rounds, time) = (args.rounds, Duration::from_millis(args.milliseconds));
    let mut report = Report::default();
    host.evict_csid()?;
    for part in Part::value_variants() {
        if !args.only.is_empty() && !args.only.contains(part) {
            continue;
        }
        match part {
            Part::Cycles => {
                let chosen = |way: &str, callers| {
                    (args.ways.is_empty() || args.ways.iter().any(|chosen| chosen == way))
                        && (args.callers.is_empty() || args.callers.contains(&callers))
                };
                parts::cycles(host, &mut report, rounds, time, chosen).await
            }
            Part::Claims => parts::claims(host, &mut report, rounds, time).await,
            Part::Start => parts::start(host, &mut report, rounds).await,
            Part::Adopt => parts::adopt(host, &mut report, rounds).await,
            Part::Remount => parts::remount(host, &mut report, rounds).await,
            Part::Foreign => parts::foreign(host, &mut report, rounds, time).await,
            Part::Curves => {
                let chosen = |name: &str| {
                    args.curves.is_empty() || args.curves.iter().any(|part| name.contains(part.as_str()))
                };
                curves::curves(host, &mut report, rounds, time / 5, chosen).await
            }
            Part::Elsewhere => parts::elsewhere(host, &mut report, rounds).await,
            Part::Idle => parts::idle(host, &mut report).await,
        }?;
    }
    report.print();
    report.write(&args.directory.join("report.json"))
}
