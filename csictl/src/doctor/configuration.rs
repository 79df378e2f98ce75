//! csid's configuration, checked by the csid that is installed, and the lines of fstab.

use std::{
    io::{self, ErrorKind},
    path::Path,
};

use rustix::process::geteuid;
use tokio::process::Command;

use super::bounded::{self, Ended};
use super::finding::Report;
use crate::args::FSTAB;
use crate::helpers::fstab::faults;
use crate::installed;

pub async fn look(report: &mut Report) {
    installed(report).await;
    let found = faults(Path::new(FSTAB));
    for fault in &found {
        report.error(
            "fstab",
            fault,
            "correct the line, then `csictl check-config` and `systemctl daemon-reload`",
        );
    }
    if found.is_empty() {
        report.ok("fstab", "its lines of the type csi are right");
    }
}

async fn installed(report: &mut Report) {
    let subject = "configuration";
    let version = match run("--version").await {
        Ok(ended) => ended.stdout,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return report.error("csid", "the program csid is not installed", "install the package csid");
        }
        Err(error) => {
            let found = format!("`csid --version` failed: {error}");
            return report.error("csid", &found, "install the package csid again");
        }
    };
    if version != format!("csid {}", env!("CARGO_PKG_VERSION")) {
        let found = format!(
            "the installed csid is {version:?}, and csictl's version is {}",
            env!("CARGO_PKG_VERSION")
        );
        report.warning("csid", &found, "install the same version of both, then `systemctl restart csid`");
    }
    match run("--check-config").await {
        Ok(ended) if ended.succeeded => report.ok(subject, "csid's files are valid"),
        Ok(ended) if ended.stderr.contains("Permission denied") && !geteuid().is_root() => {
            report.ok(subject, "only root can read all of csid's files");
        }
        Ok(ended) => {
            let text = ended.stderr.trim_start_matches("csid: ").to_owned();
            report.error(
                subject,
                &text,
                "correct the file, check it with `csictl check-config`, then `csictl reload`",
            );
        }
        Err(error) => {
            report.error(subject, &format!("`csid --check-config` failed: {error}"), "`csictl check-config`")
        }
    }
}

/// Runs the csid that is installed.
async fn run(argument: &str) -> io::Result<Ended> {
    let csid = installed::csid().map_err(io::Error::other)?;
    bounded::run(Command::from(csid).arg(argument)).await
}
