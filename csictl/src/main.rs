//! csictl: one call of csid's contract per command, or of a cluster's servers for an operator. It prints the answer for people or, with `--json`, for programs. It keeps no state.
//! An operation that it starts continues in csid if csictl is interrupted.

mod args;
mod commands;
mod doctor;
mod generate;
mod helpers;
mod hints;
mod installed;
mod operator;
mod output;
mod shell;
mod wait;

use std::{ffi::OsString, path::Path, process::ExitCode};

use anyhow::Context;
use args::{Cli, Command, Plugin, Volume};
use clap::Parser;
use commands::Failure;
use helpers::Helper;
use operator::OperatorError;
use serde_json::json;

/// Exit codes, documented in csictl(1). clap uses 2.
const FAILED: u8 = 1;
const UNKNOWN: u8 = 3;
/// The exit code of `plugin exec` if the command did not start. Its other codes come from the command.
const NOT_BEGUN: u8 = 125;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut words = std::env::args_os();
    if let Some(helper) = words.next().and_then(|program| Helper::of(&program)) {
        return helper.run(words.collect()).await;
    }
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(done) = internal(&words) {
        return match done {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("csictl: {error:#}");
                ExitCode::from(FAILED)
            }
        };
    }
    let cli = Cli::parse();
    if let Err(error) = cli.check() {
        error.exit();
    }
    let failed = match &cli.command {
        Command::HasMount { .. } => UNKNOWN,
        Command::Volume(volume) if matches!(**volume, Volume::Validate { .. }) => UNKNOWN,
        Command::Plugin(plugin) if matches!(**plugin, Plugin::Exec(_)) => NOT_BEGUN,
        _ => FAILED,
    };
    let json = cli.json;
    wait::set_verbose(cli.verbose);
    match commands::run(cli).await {
        Ok(code) => code,
        Err(failure) => {
            report(&failure, json);
            let interrupted = failure.error.downcast_ref::<wait::Interrupted>();
            ExitCode::from(interrupted.map_or(failed, |interrupted| interrupted.code))
        }
    }
}

/// Runs a command for doctor or the packages. The command line does not list these, so neither do completions. `None`: it is none of them.
fn internal(words: &[OsString]) -> Option<anyhow::Result<()>> {
    match words {
        // What is below csid's directories, which may hang.
        [command] if command == "doctor-state" => Some(doctor::state().map_err(Into::into)),
        [command, directory] if command == "gen-man" => {
            let at = Path::new(directory);
            Some(generate::man(at).with_context(|| format!("cannot write the man pages to {}", at.display())))
        }
        _ => None,
    }
}

/// Prints the error, the holders in the way and a hint.
fn report(failure: &Failure, json: bool) {
    let client = failure.error.downcast_ref::<csid_client::Error>();
    let csid = client.and_then(csid_client::Error::csid);
    let interrupted = failure.error.downcast_ref::<wait::Interrupted>();
    let operator = failure.error.downcast_ref::<OperatorError>();
    let hint = match interrupted {
        Some(wait) => Some(format!(
            "To see it: `csictl operations`. To cancel it: `csictl cancel {}`.",
            shell::quoted(&wait.operation)
        )),
        None => match operator {
            Some(error) => hints::of_operator(error, &failure.tried),
            None => client.and_then(|error| hints::hint(error, &failure.tried)),
        },
    };
    if json {
        let message = csid.map_or_else(|| format!("{:#}", failure.error), |error| error.message.clone());
        let details = match operator {
            Some(error) => {
                let (retryable, servers, holders) = (error.is_retryable(), error.skipped(), error.holders());
                Some(json!({ "retryable": retryable, "servers": servers, "holders": holders }))
            }
            None => csid.map(|error| json!(error.details)),
        };
        let error = json!({
            "error": client.map(name).or(operator.map(OperatorError::name)),
            "message": message,
            "details": details,
            "operation-id": failure.tried.operation,
            "hint": hint,
        });
        eprintln!("{}", output::json_line(&error));
        return;
    }
    eprintln!("csictl: {}", output::lines(&format!("{:#}", failure.error)));
    let holders = csid.map(|error| &error.details.holders[..]).or(operator.map(OperatorError::holders));
    if let Some(holders) = holders.filter(|holders| !holders.is_empty()) {
        eprintln!("Held by: {}", output::plain(&holders.join(", ")));
    }
    if let Some(hint) = hint {
        eprintln!("{}", output::lines(&hint));
    }
}

/// Returns the error's name for programs: csid's own, or one for a failure of the connection.
fn name(error: &csid_client::Error) -> &str {
    use csid_client::Error;

    match error {
        Error::Csid(error) => error.kind.name(),
        Error::Connect(_) => "Unreachable",
        Error::NotRunning { .. } => "NotRunning",
        Error::Refused(_) => "Refused",
        Error::Disconnected(_) => "Disconnected",
        Error::NotServed { .. } => "NotServed",
        _ => "Failed",
    }
}
