//! Looks with a time limit.

use std::{future::Future, io, process::Stdio, time::Duration};

use tokio::{process::Command, time::timeout};

/// The limit of one look.
pub const LIMIT: Duration = Duration::from_secs(10);

/// Makes a call to csid. The error is a text.
pub async fn ask<T>(call: impl Future<Output = csid_client::Result<T>>) -> Result<T, String> {
    match timeout(LIMIT, call).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {} s", LIMIT.as_secs())),
    }
}

/// How a program ended.
pub struct Ended {
    pub succeeded: bool,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a program, and kills it at the limit. One that waits for a file system's server survives that until the server answers; it is not
/// waited for.
pub async fn run(command: &mut Command) -> io::Result<Ended> {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(LIMIT, command.output()).await;
    let output = output.map_err(|_| {
        io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", LIMIT.as_secs()))
    })??;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    Ok(Ended {
        succeeded: output.status.success(),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
    })
}
