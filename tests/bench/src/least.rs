//! The least that a daemon with csid's promises does for a mount: decode the call, make the two RPCs with one synced row meanwhile, give the
//! consumer a bind of its own with its flags, look at it, and encode the answer. What csid takes beyond this daemon is csid's own; what
//! this daemon takes beyond the floor is the price of the promises with these libraries.
//!
//! It keeps no state that it could recover from, checks nothing, survives no hung file system, and sends no signals.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};
use tokio::net::UnixListener;
use zbus::connection::Builder;
use zbus::message::Type;
use zbus::{Connection, Guid, Message, MessageStream};

use crate::paths::{Floor, Rows};

/// What the daemon works with.
struct Daemon {
    floor: Floor,
    rows: Rows,
    directory: PathBuf,
}

/// Serve Mount and Unmount of the volumes `0..volumes` at `socket`, with the plugin at `plugin`, until killed.
#[tokio::main(worker_threads = 1)]
pub async fn serve(socket: &Path, plugin: &Path, directory: &Path, volumes: u32) -> Result<()> {
    let floor = Floor::new(plugin, directory);
    floor.prepare(volumes)?;
    for n in 0..volumes {
        std::fs::create_dir_all(consumer(directory, n))?;
    }
    let rows = Rows::open(&directory.join("least.db"))?;
    let daemon = Arc::new(Daemon { floor, rows, directory: directory.to_owned() });
    let listener = UnixListener::bind(socket)?;
    loop {
        let (stream, _) = listener.accept().await?;
        let daemon = Arc::clone(&daemon);
        tokio::spawn(async move {
            if let Err(error) = daemon.serve_peer(stream).await {
                eprintln!("csid-bench serve-least: {error:#}");
            }
        });
    }
}

/// Where the consumer has volume `n`.
fn consumer(directory: &Path, n: u32) -> PathBuf {
    directory.join(format!("consumer-{n}"))
}

impl Daemon {
    async fn serve_peer(self: Arc<Self>, stream: tokio::net::UnixStream) -> Result<()> {
        let builder = Builder::unix_stream(stream.into_std()?).server(Guid::generate()).p2p();
        let mut calls: MessageStream = builder.max_queued(NonZeroUsize::MIN).build_message_stream().await?;
        let connection = Connection::from(&calls);
        while let Some(Ok(call)) = calls.next().await {
            if call.message_type() != Type::MethodCall {
                continue;
            }
            let (daemon, connection) = (Arc::clone(&self), connection.clone());
            tokio::spawn(async move {
                let answered = daemon.answer(&connection, &call).await;
                if let Err(error) = answered {
                    let text = format!("{error:#}");
                    let _ = connection.reply_error(&call.header(), "org.csid1.Error.Internal", &text).await;
                }
            });
        }
        Ok(())
    }

    async fn answer(&self, connection: &Connection, call: &Message) -> Result<()> {
        let header = call.header();
        let body = call.body();
        type Arguments<'a> =
            (&'a str, &'a str, &'a str, std::collections::HashMap<&'a str, zbus::Variant<'a>>);
        let (_, volume, _, _options): Arguments<'_> = body.deserialize()?;
        let n = volume.rsplit('-').next().context("no number")?.parse()?;
        match header.member().map(|member| member.as_str()) {
            Some("Mount") => {
                let source = self.mount(n).await?;
                let mounted = csid_client::Mounted { source, is_device: false };
                Ok(connection.reply(&header, &mounted).await?)
            }
            Some("Unmount") => {
                self.unmount(n).await?;
                Ok(connection.reply(&header, &()).await?)
            }
            other => anyhow::bail!("no member {other:?}"),
        }
    }

    async fn mount(&self, n: u32) -> Result<String> {
        let published = async {
            self.floor.mount(n).await?;
            let (target, path) = (self.floor.target(n), consumer(&self.directory, n));
            mount_bind(&target, &path)?;
            mount_remount(&path, MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV, "")?;
            ensure!(place(&path)? == place(Path::new(&target))?, "another mount is at {}", path.display());
            anyhow::Ok(path.to_string_lossy().into_owned())
        };
        let (path, committed) = tokio::join!(published, self.rows.commit(n, true));
        committed?;
        path
    }

    async fn unmount(&self, n: u32) -> Result<()> {
        let path = consumer(&self.directory, n);
        let mounted = place(&path)?;
        let unpublished = async {
            unmount(&path, UnmountFlags::empty())?;
            self.floor.unmount(n).await?;
            ensure!(place(&path)? != mounted, "{} is still mounted", path.display());
            anyhow::Ok(())
        };
        let (unpublished, committed) = tokio::join!(unpublished, self.rows.commit(n, false));
        committed?;
        unpublished
    }
}

/// Returns the number of the file at a path, and of its file system. No file system's server is asked.
fn place(path: &Path) -> Result<(u32, u32, u64)> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let found = statx(CWD, path, flags, StatxFlags::INO)?;
    Ok((found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
}
