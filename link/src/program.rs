//! The program: its start and its end.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Parser;
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use crate::config::Config;
use crate::relay::Relay;
use crate::tls;

/// A node's connections to the servers of its csid cluster
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The configuration
    #[arg(long, value_name = "FILE", default_value = "/etc/csid/link.toml")]
    config: PathBuf,
    /// The directory with ca.pem, node.pem and node.key
    #[arg(long, value_name = "DIR", env = "CREDENTIALS_DIRECTORY")]
    credentials: PathBuf,
    /// Where the sockets are
    #[arg(long, value_name = "DIR", env = "RUNTIME_DIRECTORY")]
    runtime_dir: PathBuf,
    /// Read the configuration and the keys, and say what is wrong with them
    #[arg(long)]
    check_config: bool,
}

pub fn main() -> ExitCode {
    let filter = std::env::var("CSID_LOG").ok().and_then(|filter| filter.parse().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).without_time();
    tracing_subscriber::registry().with(filter).with(log).init();
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("csid-link: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn run(arguments: Arguments) -> Result<()> {
    let config = Config::read(&arguments.config)?;
    let tls = Arc::new(tls::node(&arguments.credentials, &config.cluster)?);
    if arguments.check_config {
        return Ok(());
    }
    let mut stops = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    let mut relays = JoinSet::new();
    for server in &config.servers {
        let relay = Relay::new(&arguments.runtime_dir, server, tls.clone());
        let relay = relay.with_context(|| format!("the socket for {server}"))?;
        relays.spawn(Arc::new(relay).run());
    }
    sd_notify::notify(&[NotifyState::Ready])?;
    tracing::info!(servers = config.servers.len(), "csid reaches servers through csid-link");
    let [terminate, interrupt] = &mut stops;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    sd_notify::notify(&[NotifyState::Stopping])?;
    // Connections end with the process, and csid makes new ones.
    relays.shutdown().await;
    Ok(())
}
