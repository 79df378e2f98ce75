//! Waiting for csid: the spinner with the current step, and the effect of Ctrl-C and SIGTERM.

use std::{future::Future, time::Duration};

use csid_client::Client;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};

/// The time without a spinner, so that a fast answer needs no further calls.
const PATIENCE: Duration = Duration::from_millis(300);

/// Ctrl-C or SIGTERM during an operation, which ended only csictl's wait.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; the operation goes on in csid")]
pub struct Interrupted {
    pub operation: String,
    /// The exit code that a shell uses for the signal.
    pub code: u8,
}

/// Awaits `call`, an operation of that id, with a spinner if standard error is a terminal.
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

/// Awaits `call`, which is not an operation. Ctrl-C ends csictl as usual.
pub async fn quietly<T>(what: &str, call: impl Future<Output = T>) -> T {
    tokio::select! {
        answer = call => answer,
        never = spin(what, async || None) => match never {},
    }
}

/// Awaits `call`, which csid lists under that id and cannot cancel. Ctrl-C ends csictl as usual.
pub async fn watched<T>(client: &Client, id: &str, what: &str, call: impl Future<Output = T>) -> T {
    tokio::select! {
        answer = call => answer,
        never = spin(what, || step(client, id)) => match never {},
    }
}

/// Returns the operation's current step. `None`: there is none, or csid did not answer.
async fn step(client: &Client, id: &str) -> Option<String> {
    let operations = client.list_operations().await.ok()?;
    operations.into_iter().find(|operation| operation.id == id).map(|operation| operation.step)
}

async fn spin(what: &str, step: impl AsyncFn() -> Option<String>) -> std::convert::Infallible {
    tokio::time::sleep(PATIENCE).await;
    // It is hidden if standard error is not a terminal.
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
