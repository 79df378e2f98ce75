//! csi-witness: the program. Its exit codes are documented in README.md.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use csi_witness::report::Report;
use csi_witness::{Mark, Script, Setup, Sockets, Witness};
use tokio::signal::unix::{SignalKind, signal};

const BREACHES: u8 = 1;
/// The exit status of a failure. clap uses the same one for a usage error.
const FAILED: u8 = 2;

/// Stands between a CO and a CSI plugin and finds which rules for COs were broken
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Forward calls, record them, and play a script of faults, until SIGTERM or SIGINT
    Run {
        /// The socket that the CO is given instead of the plugin's; once for each of the plugin's sockets
        #[arg(long, value_name = "SOCKET", required = true)]
        listen: Vec<PathBuf>,
        /// The plugin's socket; the plugin may come later, go, and come back
        #[arg(long, value_name = "SOCKET", required = true)]
        plugin: Vec<PathBuf>,
        /// Replaced: one JSON record a line, secrets masked
        #[arg(long, value_name = "FILE")]
        log: PathBuf,
        /// Faults to inject, as in README.md
        #[arg(long, value_name = "FILE")]
        script: Option<PathBuf>,
    },
    /// Check a log, of a witness that runs or of one that ran; exits with 1 when a rule was broken
    Report {
        /// As `run` writes it; several are those of one plugin's hosts, judged together
        #[arg(required = true)]
        log: Vec<PathBuf>,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Tell a log what cannot be seen on the wire
    Mark {
        mark: What,
        /// As `run` writes it
        log: PathBuf,
        /// Whose attachment is forgotten
        #[arg(required_if_eq("mark", "forgotten"))]
        volume: Option<String>,
        /// The plugin's name of the node
        #[arg(required_if_eq("mark", "forgotten"))]
        node: Option<String>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// The node rebooted: nothing is staged or published any more
    Reboot,
    /// The CO is done with every volume: what is still there was forgotten
    Rest,
    /// The CO has lost its record of an attachment, as by an older backup
    Forgotten,
}

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(failure) => {
            let causes = std::iter::successors(Some(&*failure), |error| error.source());
            let text: Vec<String> = causes.map(ToString::to_string).collect();
            eprintln!("csi-witness: {}", text.join(": "));
            ExitCode::from(FAILED)
        }
    }
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Run { listen, plugin, log, script } => {
            if listen.len() != plugin.len() {
                return Err("each --listen needs a --plugin, and each --plugin a --listen".into());
            }
            let script = script.as_deref().map(Script::read).transpose()?.unwrap_or_default();
            let sockets = listen.into_iter().zip(plugin);
            let sockets = sockets.map(|(listen, plugin)| Sockets { listen, plugin }).collect();
            stand(Setup { sockets, log, script })?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Report { log, json } => {
            let report = Report::read(&log)?;
            if json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                println!("{report}");
            }
            Ok(if report.breaches.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(BREACHES) })
        }
        Command::Mark { mark, log, volume, node } => {
            let [volume, node] = [volume, node].map(Option::unwrap_or_default);
            let mark = match mark {
                What::Reboot => Mark::Reboot,
                What::Rest => Mark::Rest,
                What::Forgotten => Mark::Forgotten { volume, node },
            };
            csi_witness::mark(&log, mark)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A witness that cannot write proves nothing and ends.
#[tokio::main(flavor = "current_thread")]
async fn stand(setup: Setup) -> Result<(), Failure> {
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("csi-witness: {panic}");
        std::process::exit(i32::from(FAILED));
    }));
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let sockets = setup.sockets.clone();
    let _witness = Witness::start(setup)?;
    for Sockets { listen, .. } in sockets {
        println!("listening on {}", listen.display());
    }
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}
