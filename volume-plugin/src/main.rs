//! csid-volume-plugin: the volumes of csid for Docker and Podman, as volumes of the driver `csid`. It mounts nothing: csid mounts, and the
//! engine binds the path that csid answers. So it needs no privileges but those of group csid.

mod create;
mod driver;
mod engine;
mod protocol;
mod server;
mod users;

use std::collections::BTreeSet;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use csid_client::{Session, Target};
use sd_notify::NotifyState;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use crate::driver::Driver;
use crate::users::Users;

/// The volumes of csid for Docker and Podman: a volume plugin
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The namespace of csid whose volumes the engines see
    #[arg(long, default_value = "containers")]
    namespace: String,
    /// Let the engines create volumes, and delete the volumes that they created
    #[arg(long)]
    allow_create: bool,
    /// Seconds between two searches for mounts that no container uses
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    sweep: u64,
    /// Where the users of volumes are counted: a directory on a tmpfs [default: RUNTIME_DIRECTORY of systemd]
    #[arg(long, value_name = "DIR", env = "RUNTIME_DIRECTORY")]
    runtime_dir: PathBuf,
}

fn main() -> ExitCode {
    let filter = std::env::var("RUST_LOG").ok().and_then(|filter| filter.parse().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).without_time();
    tracing_subscriber::registry().with(filter).with(log).init();
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("csid-volume-plugin: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn run(arguments: Arguments) -> Result<()> {
    // The volumes of root's, of files, and of a csid that does not say whose a volume is, have uid 0.
    ensure!(
        !(arguments.allow_create && rustix::process::getuid().is_root()),
        "--allow-create is not for root"
    );
    let listener = listener()?;
    // On the private socket no member of group csid creates volumes. On the bus polkit decides.
    let target = if arguments.allow_create { Target::SystemBus } else { Target::from_env() };
    let session = Session::open(target).await.context("csid cannot be reached")?;
    let Arguments { namespace, allow_create, sweep, runtime_dir } = arguments;
    let users = Users::open(&runtime_dir, &namespace);
    let users = users.with_context(|| {
        format!("the uses of volumes of namespace {namespace} in {}", runtime_dir.display())
    })?;
    let driver = Arc::new(Driver::new(session, namespace, allow_create, users));
    let mut terminate = signal(SignalKind::terminate())?;
    sd_notify::notify(&[NotifyState::Ready])?;
    let places = Arc::new(Semaphore::new(server::AT_ONCE as usize));
    tokio::select! {
        () = server::serve(&listener, Arc::clone(&driver), Arc::clone(&places)) => {}
        () = sweeps(&driver, Duration::from_secs(sweep)) => {}
        _ = terminate.recv() => {}
    }
    // systemd keeps the socket: a request that arrives now waits for the next process.
    sd_notify::notify(&[NotifyState::Stopping])?;
    drop(listener);
    // Each request that is under way has a place until it is answered.
    let _ = places.acquire_many(server::AT_ONCE).await;
    Ok(())
}

/// Returns the one socket that systemd passes.
fn listener() -> Result<UnixListener> {
    let mut passed = sd_notify::listen_fds()?;
    let (Some(fd), None) = (passed.next(), passed.next()) else {
        bail!("systemd has to pass one socket: start csid-volume-plugin.socket");
    };
    // SAFETY: systemd passed this descriptor to this process (LISTEN_PID), and nothing else here takes it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let socket = std::os::unix::net::UnixListener::from(socket);
    socket.set_nonblocking(true)?;
    Ok(UnixListener::from_std(socket)?)
}

async fn sweeps(driver: &Driver, pause: Duration) {
    let mut unmatched = BTreeSet::new();
    loop {
        tokio::time::sleep(pause).await;
        match driver.sweep(&unmatched).await {
            Ok(found) => unmatched = found,
            Err(error) => {
                tracing::warn!(%error, "mounts and users cannot be compared");
                unmatched.clear();
            }
        }
    }
}
