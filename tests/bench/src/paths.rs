//! The ways to a mount that are compared. Each is one connection that all callers share.

use std::path::{Path, PathBuf};
use std::sync::mpsc;

use anyhow::{Context, Result};
use csi_proto::csi::v1;
use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode};
use csid_client::{
    AttachmentMode, Capability, ClaimOptions, Client, MountOptions, RegisterVolume, ReleaseOptions, Restore,
    UnmountOptions,
};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tonic::transport::{Channel, Endpoint, Uri};

/// One way to mount and unmount volume number `n`.
#[derive(Clone)]
pub enum Way {
    Floor(Floor),
    FloorCommit(Floor, Rows),
    Csid(Client),
    /// A registered volume, whose claim the mount takes and the unmount gives back.
    Registered(Client),
    /// No mount: a claim and its release.
    Claim(Client),
}

impl Way {
    pub async fn mount(&self, n: u32) -> Result<()> {
        match self {
            Way::Floor(floor) => floor.mount(n).await,
            Way::FloorCommit(floor, rows) => {
                floor.mount(n).await?;
                rows.commit(n, true).await
            }
            Way::Csid(client) => {
                let options = MountOptions {
                    plugin: Some("bench".to_owned()),
                    external_id: Some(format!("volume-{n}")),
                    restore: Some(Restore::Auto),
                    ..MountOptions::default()
                };
                client.mount("bench", &format!("volume-{n}"), "consumer", options).await?;
                Ok(())
            }
            Way::Registered(client) => {
                client.mount("bench", &registered(n), "consumer", MountOptions::default()).await?;
                Ok(())
            }
            Way::Claim(client) => {
                client.claim("bench", &registered(n), "consumer", ClaimOptions::default()).await?;
                Ok(())
            }
        }
    }

    pub async fn unmount(&self, n: u32) -> Result<()> {
        match self {
            Way::Floor(floor) => floor.unmount(n).await,
            Way::FloorCommit(floor, rows) => {
                floor.unmount(n).await?;
                rows.commit(n, false).await
            }
            Way::Csid(client) => {
                let volume = format!("volume-{n}");
                Ok(client.unmount("bench", &volume, "consumer", UnmountOptions::default()).await?)
            }
            Way::Registered(client) => {
                Ok(client.unmount("bench", &registered(n), "consumer", UnmountOptions::default()).await?)
            }
            Way::Claim(client) => {
                Ok(client.release("bench", &registered(n), "consumer", ReleaseOptions::default()).await?)
            }
        }
    }
}

fn registered(n: u32) -> String {
    format!("registered-{n}")
}

/// Register what [`Way::Registered`] and [`Way::Claim`] use.
pub async fn register(client: &Client, volumes: u32) -> Result<()> {
    for n in 0..volumes {
        let capability = Capability {
            access_mode: csid_client::AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        };
        let spec = RegisterVolume {
            plugin: Some("bench".to_owned()),
            external_id: Some(registered(n)),
            capabilities: Some(vec![capability]),
            ..RegisterVolume::default()
        };
        client.register_volume("bench", &registered(n), spec).await?;
    }
    Ok(())
}

/// A bare tonic client: the two RPCs and nothing before, between or after them.
#[derive(Clone)]
pub struct Floor {
    channel: Channel,
    directory: PathBuf,
}

impl Floor {
    pub fn new(socket: &Path, directory: &Path) -> Self {
        let socket = socket.to_owned();
        let connect = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(connect);
        Floor { channel, directory: directory.to_owned() }
    }

    /// The directories that the CO has to give: made once, so that the floor does not pay for them.
    pub fn prepare(&self, volumes: u32) -> Result<()> {
        for n in 0..volumes {
            for path in [self.staging(n), self.directory.join(format!("publish-{n}"))] {
                std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
    }

    fn staging(&self, n: u32) -> PathBuf {
        self.directory.join(format!("staging-{n}"))
    }

    pub fn target(&self, n: u32) -> String {
        self.directory.join(format!("publish-{n}/mount")).to_string_lossy().into_owned()
    }

    pub async fn mount(&self, n: u32) -> Result<()> {
        let staging = self.staging(n).to_string_lossy().into_owned();
        let capability = v1::VolumeCapability {
            access_mode: Some(AccessMode { mode: access_mode::Mode::SingleNodeWriter.into() }),
            access_type: Some(AccessType::Mount(MountVolume::default())),
        };
        let mut client = NodeClient::new(self.channel.clone());
        let stage = v1::NodeStageVolumeRequest {
            volume_id: format!("volume-{n}"),
            staging_target_path: staging.clone(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        client.node_stage_volume(stage).await?;
        let publish = v1::NodePublishVolumeRequest {
            volume_id: format!("volume-{n}"),
            staging_target_path: staging,
            target_path: self.target(n),
            volume_capability: Some(capability),
            ..Default::default()
        };
        client.node_publish_volume(publish).await?;
        Ok(())
    }

    pub async fn unmount(&self, n: u32) -> Result<()> {
        let mut client = NodeClient::new(self.channel.clone());
        let unpublish =
            v1::NodeUnpublishVolumeRequest { volume_id: format!("volume-{n}"), target_path: self.target(n) };
        client.node_unpublish_volume(unpublish).await?;
        let unstage = v1::NodeUnstageVolumeRequest {
            volume_id: format!("volume-{n}"),
            staging_target_path: self.staging(n).to_string_lossy().into_owned(),
        };
        client.node_unstage_volume(unstage).await?;
        Ok(())
    }
}

/// One synced row a mount, one deleted an unmount; who waits together is committed together.
#[derive(Clone)]
pub struct Rows(mpsc::Sender<Commit>);

/// The volume, whether it is mounted, and where the commit's error goes.
type Commit = (u32, bool, oneshot::Sender<Result<(), String>>);

impl Rows {
    pub fn open(file: &Path) -> Result<Self> {
        let db = rusqlite::Connection::open(file)?;
        db.execute_batch(
            "PRAGMA locking_mode = exclusive; PRAGMA journal_mode = wal; PRAGMA synchronous = full;
             CREATE TABLE mounts (volume INTEGER PRIMARY KEY, path TEXT NOT NULL) STRICT;",
        )?;
        let (sender, inbox) = mpsc::channel();
        std::thread::spawn(move || commit_together(db, &inbox));
        Ok(Rows(sender))
    }

    pub async fn commit(&self, n: u32, is_mount: bool) -> Result<()> {
        let (answer, answered) = oneshot::channel();
        self.0.send((n, is_mount, answer))?;
        answered.await?.map_err(anyhow::Error::msg)
    }
}

fn commit_together(mut db: rusqlite::Connection, inbox: &mpsc::Receiver<Commit>) {
    while let Ok(first) = inbox.recv() {
        let group: Vec<Commit> = std::iter::once(first).chain(inbox.try_iter()).collect();
        let mut commit = || -> rusqlite::Result<()> {
            let tx = db.transaction()?;
            for (n, is_mount, _) in &group {
                if *is_mount {
                    tx.prepare_cached("INSERT INTO mounts VALUES (?1, ?2)")?.execute((
                        n,
                        "/var/lib/csid/plugins/bench/publish/0123456789abcdef/0123456789abcdef",
                    ))?;
                } else {
                    tx.prepare_cached("DELETE FROM mounts WHERE volume = ?1")?.execute([n])?;
                }
            }
            tx.commit()
        };
        let result = commit().map_err(|error| error.to_string());
        for (_, _, answer) in group {
            // A caller who has gone needs no answer.
            let _ = answer.send(result.clone());
        }
    }
}
