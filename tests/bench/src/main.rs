//! `csid-bench`: what a durable mount costs against the bare RPCs, all in one run on one machine, with csid's real binary, a
//! plugin whose publish makes one bind mount, and the journal on a real disk. It prints the medians of interleaved rounds and
//! the targets, and writes `report.json`. Absolute times mean little; ratios within one run hold.

mod host;
mod load;
mod parts;
mod paths;
mod plugin;
mod report;

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
    /// Of the cycles only these ways to a mount, in one list: floor, floor-commit, private, bus.
    #[arg(long, value_delimiter = ',', value_parser = WAYS.map(|(way, _)| way))]
    ways: Vec<String>,
    /// Of the cycles only these numbers of callers, in one list: 1, 16, 64.
    #[arg(long, value_delimiter = ',')]
    callers: Vec<u32>,
    /// Interleaved rounds of each measurement.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Of one measurement of cycles.
    #[arg(long, default_value_t = 1000)]
    milliseconds: u64,
    /// Where the journal lies while it is measured, and report.json afterwards: on a real disk.
    #[arg(long, default_value = "target/bench")]
    directory: PathBuf,
    /// The csid to be measured [default: beside this program].
    #[arg(long)]
    csid: Option<PathBuf>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Cycles,
    Start,
    Adopt,
    Remount,
    Foreign,
    Idle,
}

/// What this program is for itself.
#[derive(Subcommand)]
enum Role {
    #[command(hide = true)]
    ServePlugin { socket: PathBuf },
    #[command(hide = true)]
    Inside { host: PathBuf },
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
    match &args.role {
        None => outside(args),
        Some(Role::ServePlugin { socket }) => plugin::serve(socket).map(|()| ExitCode::SUCCESS),
        Some(Role::Inside { host }) => inside(args, host).map(|()| ExitCode::SUCCESS),
    }
}

/// Run this once more in a mount namespace of its own: whatever it mounts ends with it.
fn outside(args: &Args) -> Result<ExitCode> {
    ensure!(rustix::process::geteuid().is_root(), "mounting needs root");
    std::fs::create_dir_all(&args.directory)?;
    let directory = std::path::absolute(&args.directory)?;
    let host = tempfile::Builder::new().prefix("host-").tempdir_in(directory)?;
    let status = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--"])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg("inside")
        .arg(host.path())
        .env("DBUS_SYSTEM_BUS_ADDRESS", host::bus_address(host.path()))
        .status()
        .context("cannot start unshare")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[tokio::main(worker_threads = 2)]
async fn inside(args: &Args, directory: &Path) -> Result<()> {
    let beside = std::env::current_exe()?.with_file_name("csid");
    let host = Host::new(directory, args.csid.as_ref().unwrap_or(&beside))?;
    let (rounds, time) = (args.rounds, Duration::from_millis(args.milliseconds));
    let mut report = Report::default();
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
                parts::cycles(&host, &mut report, rounds, time, chosen).await
            }
            Part::Start => parts::start(&host, &mut report, rounds).await,
            Part::Adopt => parts::adopt(&host, &mut report, rounds).await,
            Part::Remount => parts::remount(&host, &mut report, rounds).await,
            Part::Foreign => parts::foreign(&host, &mut report, rounds, time).await,
            Part::Idle => parts::idle(&host, &mut report).await,
        }?;
    }
    report.print();
    report.write(&args.directory.join("report.json"))
}
