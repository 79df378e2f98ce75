//! The csid that is installed, which may be another one than the csid that runs.

use std::process::Command;

/// Returns the command of the csid that is installed. Its directory is not in every user's PATH.
pub fn csid() -> anyhow::Result<Command> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut path = std::env::split_paths(&path).collect::<Vec<_>>();
    path.push("/usr/sbin".into());
    let mut csid = Command::new("csid");
    csid.env("PATH", std::env::join_paths(path)?);
    Ok(csid)
}
