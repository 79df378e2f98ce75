//! Waiting for csid: the spinner with the current step, and what Ctrl-C and SIGTERM mean meanwhile.

use std::{
    future::Future,
    io::{self, Read},
    time::Duration,
};

use csid_client::Client;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};

/// A fast answer shows no spinner, and asks csid nothing more.
const PATIENCE: Duration = Duration::from_millis(300);

/// Ctrl-C or SIGTERM while csid works: only the waiting has ended.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; the operation goes on in csid")]
pub struct Interrupted {
    pub operation: String,
    /// As a shell tells of who was ended by the signal.
    pub code: u8,
}

/// A name for an operation whose caller gave none, so that it can be cancelled by it.
pub fn operation_id() -> io::Result<String> {
    let mut random = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(format!("csictl-{:016x}", u64::from_ne_bytes(random)))
}

/// Awaits `call`, an operation of csid's of that id, with a spinner when standard error is a terminal.
pub async fn operation<T>(
    client: &Client,
    id: &str,
    what: &str,
    call: impl Future<Output = csid_client::Result<T>>,
) -> anyhow::Result<T> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let code = tokio::select! {
        answer = call => return Ok(answer?),
        never = spin(what, || step(client, id)) => match never {},
        _ = interrupt.recv() => 130,
        _ = terminate.recv() => 143,
    };
    Err(Interrupted { operation: id.to_owned(), code }.into())
}

/// Awaits `call`, which is no operation: Ctrl-C ends csictl as usual.
pub async fn quietly<T>(what: &str, call: impl Future<Output = T>) -> T {
    tokio::select! {
        answer = call => answer,
        never = spin(what, async || None) => match never {},
    }
}

/// The step csid is at. No answer is no reason to fail: the operation's own answer will tell.
async fn step(client: &Client, id: &str) -> Option<String> {
    let operations = client.list_operations().await.ok()?;
    operations.into_iter().find(|operation| operation.id == id).map(|operation| operation.step)
}

async fn spin(what: &str, step: impl AsyncFn() -> Option<String>) -> std::convert::Infallible {
    tokio::time::sleep(PATIENCE).await;
    // Hidden when standard error is no terminal.
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())
        .with_finish(indicatif::ProgressFinish::AndClear);
    if bar.is_hidden() {
        return std::future::pending().await;
    }
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} [{elapsed}]") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar.set_message(what.to_owned());
    loop {
        if let Some(step) = step().await {
            bar.set_message(format!("{what}: {}", crate::output::plain(&step)));
        }
        tokio::time::sleep(PATIENCE).await;
    }
}
