//! `csictl doctor`: looks for what is wrong on this machine, and changes nothing. Most looks need no csid.
//!
//! No look waits for a file system of a volume: a mount is known by the mount table and by csid's rows, never by a call at its path.

mod bounded;
mod configuration;
mod consumers;
mod csid;
mod files;
mod finding;
mod mounts;
mod plugins;
mod services;
mod systemctl;
mod units;

use std::process::ExitCode;

use csid_client::Target;

use crate::output::{print, print_json};
use finding::Report;

/// The exit codes: an error was found; csid cannot be reached.
const FOUND: u8 = 1;
const UNREACHABLE: u8 = 2;

pub async fn doctor(target: &Target, json: bool, verbose: bool) -> anyhow::Result<ExitCode> {
    let mut report = Report::default();
    let units = units::look(&mut report).await;
    let state = files::look(&mut report).await;
    let rows = csid::look(target, &units, &state, &mut report).await;
    let has_csid = rows.is_some();
    mounts::look(&units, has_csid, &mut report).await;
    configuration::look(&mut report).await;
    consumers::look(&rows.unwrap_or_default(), &mut report).await;
    report.sort();
    match json {
        true => print_json(&report.json(has_csid, verbose))?,
        false => print(&report.text(verbose))?,
    }
    Ok(match has_csid {
        false => ExitCode::from(UNREACHABLE),
        true if report.errors() > 0 => ExitCode::from(FOUND),
        true => ExitCode::SUCCESS,
    })
}

/// Prints what is below csid's directories, for doctor.
pub fn state() -> std::io::Result<()> {
    print_json(&files::State::look())
}
