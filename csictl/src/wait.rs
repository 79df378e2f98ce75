//! Waiting for csid: the progress on standard error, and the effect of Ctrl-C and SIGTERM.

use std::{
    convert::Infallible,
    future::Future,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use csid_client::{CallOptions, Client, OperationRow};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};

use crate::output::plain;

/// The time without progress, so that a fast answer needs no further calls, and the time between two looks.
const PATIENCE: Duration = Duration::from_secs(1);
/// The limit of one look. csid may not answer it.
const LOOK: Duration = Duration::from_secs(10);

/// Whether progress is shown where standard error is no terminal: `--verbose`.
static VERBOSE: AtomicBool = AtomicBool::new(false);

pub fn set_verbose(verbose: bool) {
    VERBOSE.store(verbose, Ordering::Relaxed);
}

/// Ctrl-C or SIGTERM during an operation, which ended only csictl's wait.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; the operation goes on in csid")]
pub struct Interrupted {
    pub operation: String,
    /// The exit code that a shell uses for the signal.
    pub code: u8,
}

/// The progress of what csictl waits for.
#[derive(Debug, PartialEq, Eq)]
pub struct Progress {
    pub step: String,
    /// The last error. Empty: none.
    pub error: String,
}

impl Progress {
    fn text(&self) -> String {
        let error =
            if self.error.is_empty() { String::new() } else { format!("; last error: {}", self.error) };
        plain(&format!("{}{error}", self.step))
    }
}

/// Awaits `call`, an operation of that id, and shows its progress.
pub async fn operation<T>(
    client: &Client,
    id: &str,
    what: &str,
    call: impl Future<Output = csid_client::Result<T>>,
) -> anyhow::Result<T> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let code = tokio::select! {
        answer = call => return Ok(answer?),
        never = show(what, || of_operation(client, id)) => match never {},
        _ = interrupt.recv() => 130,
        _ = terminate.recv() => 143,
    };
    Err(Interrupted { operation: id.to_owned(), code }.into())
}

/// Awaits `call`, of which no progress is known. Ctrl-C ends csictl as usual.
pub async fn quietly<T>(what: &str, call: impl Future<Output = T>) -> T {
    watched(what, async || None, call).await
}

/// Awaits `call`, and shows what `progress` returns. Ctrl-C ends csictl as usual.
pub async fn watched<T>(
    what: &str,
    progress: impl AsyncFn() -> Option<Progress>,
    call: impl Future<Output = T>,
) -> T {
    tokio::select! {
        answer = call => answer,
        never = show(what, progress) => match never {},
    }
}

/// Returns the state of a plugin. `None`: csid did not answer.
pub async fn of_plugin(client: &Client, id: &str) -> Option<Progress> {
    let plugin = client.plugin(id).await.ok()?;
    let error = if plugin.healthy { String::new() } else { plugin.health_message };
    Some(Progress { step: plugin.state, error })
}

/// Returns the operation's step. `None`: there is none, or csid did not answer.
pub async fn of_operation(client: &Client, id: &str) -> Option<Progress> {
    let operations = client.list_operations().await.ok()?;
    let OperationRow { step, subject, .. } = operations.into_iter().find(|operation| operation.id == id)?;
    let error = match subject.split_once('/') {
        Some((namespace, volume)) => {
            let explained = client.explain(namespace, volume, CallOptions::default()).await;
            explained.map(|explained| explained.last_error).unwrap_or_default()
        }
        None => of_plugin(client, &subject).await.map(|plugin| plugin.error).unwrap_or_default(),
    };
    Some(Progress { step, error })
}

/// Shows the progress: on a terminal in a line that is written again and again, else a line for each change if that is asked for.
async fn show(what: &str, progress: impl AsyncFn() -> Option<Progress>) -> Infallible {
    let begun = Instant::now();
    tokio::time::sleep(PATIENCE).await;
    // It is hidden if standard error is not a terminal.
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())
        .with_finish(ProgressFinish::AndClear)
        .with_elapsed(begun.elapsed());
    if bar.is_hidden() && !VERBOSE.load(Ordering::Relaxed) {
        return std::future::pending().await;
    }
    if let Ok(style) = ProgressStyle::with_template("{spinner} [{elapsed}] {wide_msg}") {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(100));
    let mut shown = None;
    loop {
        let now = tokio::time::timeout(LOOK, progress()).await.ok().flatten();
        if let Some(now) = now
            && shown.as_ref() != Some(&now)
        {
            let (text, seconds) = (now.text(), begun.elapsed().as_secs());
            match bar.is_hidden() {
                true => eprintln!("csictl: {}: {text} [{seconds}s]", plain(what)),
                // The line is as long as the terminal is wide: the error has the space of the command.
                false => bar.set_message(text),
            }
            shown = Some(now);
        }
        tokio::time::sleep(PATIENCE).await;
    }
}
