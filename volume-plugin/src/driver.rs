//! What the engines ask for, done by csid. csid's rows are the truth about a mount. The files of users say only who is left.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use csid_client::{
    Error, Kind, MountFilter, MountOptions, MountRow, Mounted, Restore, Session, UnmountOptions,
    VolumeFilter, VolumeOptions, VolumeRow, operation_id,
};
use serde_json::Value;
use tokio::sync::oneshot;

use crate::create;
use crate::engine::{ENGINES, Engine};
use crate::protocol::{Answer, Body, Request, Volume};
use crate::users::{Users, VolumeHash};

/// Begins the names of this program's operations.
const PROGRAM: &str = "volume-plugin";
/// How long csid may take for a mount or an unmount. Podman waits for 120 s, by the package's containers.conf.d.
const PATIENCE: Duration = Duration::from_secs(110);
/// How long csid may take for an answer about rows.
const FOR_ROWS: Duration = Duration::from_secs(20);
/// The same after a failed unmount, which may have taken all of [`PATIENCE`].
const AFTER_FAILURE: Duration = Duration::from_secs(5);

/// A failure, as the engine shows it to its user.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("no such volume")]
    NoVolume,
    #[error("csid: volume {namespace}/{volume} is not registered: csictl volume register --help")]
    NotRegistered { namespace: String, volume: String },
    #[error("csid: volume {namespace}/{volume} is a block device, and a container's volume is a directory")]
    BlockDevice { namespace: String, volume: String },
    #[error("csid: {0}")]
    Options(String),
    #[error("csid: {0}")]
    Csid(#[from] Error),
    #[error("csid-volume-plugin: the file of a use in /run: {0}")]
    Users(#[from] std::io::Error),
    #[error("csid-volume-plugin: the request ended without an answer; its log says why")]
    Ended,
}

pub type Result<T> = std::result::Result<T, Failure>;

/// A volume that lacks a row or a user. A second sweep that finds the same mends it.
type Unmatched = BTreeSet<(VolumeHash, &'static str)>;

/// The volumes of one namespace, for the engines of this host.
pub struct Driver {
    session: Session,
    namespace: String,
    /// Whether an engine may create volumes, and delete those that were created by this process' user.
    allow_create: bool,
    users: Users,
    /// A lock for each volume with a request under way.
    locks: Mutex<HashMap<VolumeHash, Arc<tokio::sync::Mutex<()>>>>,
}

impl Driver {
    pub fn new(session: Session, namespace: String, allow_create: bool, users: Users) -> Self {
        Driver { session, namespace, allow_create, users, locks: Mutex::default() }
    }

    /// Answers a request.
    pub async fn answer(self: &Arc<Self>, request: Request, body: Body) -> Result<Answer> {
        match request {
            Request::Activate => Ok(Answer::activate()),
            Request::Capabilities => Ok(Answer::capabilities()),
            Request::Create => self.create(&body).await.map(|()| Answer::default()),
            Request::Remove => self.remove(&body.name).await.map(|()| Answer::default()),
            Request::Get => {
                let volume = self.volume(&body.name).await?.ok_or(Failure::NoVolume)?;
                let mounts = self.mounts(Some(&body.name)).await?;
                Ok(Answer { volume: Some(described(volume, &mounts)), ..Answer::default() })
            }
            Request::List => {
                let mounts = self.mounts(None).await?;
                let volumes = self.volumes(None).await?.into_iter();
                let volumes = volumes.map(|volume| described(volume, &mounts)).collect();
                Ok(Answer { volumes: Some(volumes), ..Answer::default() })
            }
            Request::Path => {
                let mounts = self.mounts(Some(&body.name)).await?;
                Ok(Answer::mountpoint(mountpoint(&mounts, &body.name)))
            }
            Request::Mount => self.to_its_end(body, Self::mount).await.map(Answer::mountpoint),
            Request::Unmount => self.to_its_end(body, Self::unmount).await.map(|()| Answer::default()),
        }
    }

    /// Runs `work` to its end, also if the engine closes the connection meanwhile.
    async fn to_its_end<T: Send + 'static, F>(
        self: &Arc<Self>,
        body: Body,
        work: impl FnOnce(Arc<Self>, Body, oneshot::Sender<Result<T>>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        tokio::spawn(work(Arc::clone(self), body, answer));
        answered.await.unwrap_or(Err(Failure::Ended))
    }

    async fn create(&self, body: &Body) -> Result<()> {
        if self.volume(&body.name).await?.is_some() {
            return Ok(());
        }
        let (namespace, volume) = (self.namespace.clone(), body.name.clone());
        if !self.allow_create {
            return Err(Failure::NotRegistered { namespace, volume });
        }
        let options = create::options(&body.opts).map_err(Failure::Options)?;
        let operation = operation_id(PROGRAM)?;
        let create = self.session.ask(Some(Instant::now() + PATIENCE), |client, deadline_usec| {
            let operation_id = Some(operation.clone());
            let options = csid_client::CreateVolume { deadline_usec, operation_id, ..options.clone() };
            let (namespace, volume) = (namespace.clone(), volume.clone());
            async move { client.create_volume(&namespace, &volume, options).await }
        });
        create.await?;
        Ok(())
    }

    /// Has the engine forget the volume. The volume and its data stay, unless this process may create volumes and made this one. A
    /// mount that a reboot has ended is given up: its engine does not send Unmount any more.
    async fn remove(&self, name: &str) -> Result<()> {
        let volume = VolumeHash::of(name);
        let lock = self.lock(&volume);
        let _locked = lock.lock().await;
        let rows = self.mounts(Some(name)).await?;
        for engine in ENGINES {
            let is_lost = |row: &MountRow| row.consumer == engine.consumer() && row.state == "lost";
            if rows.iter().any(is_lost) && !self.users.has(&volume, engine)? {
                self.unmounted(name, engine, Instant::now() + PATIENCE).await?;
            }
        }
        let own = self.volume(name).await?.filter(|volume| self.allow_create && volume.uid == own_uid());
        let Some(volume) = own else {
            tracing::info!(volume = name, "the engine has removed the volume; csid keeps it, and its data");
            return Ok(());
        };
        let operation = operation_id(PROGRAM)?;
        let delete = self.session.ask(Some(Instant::now() + PATIENCE), |client, deadline_usec| {
            let operation_id = Some(operation.clone());
            let options = VolumeOptions { deadline_usec, operation_id, ..VolumeOptions::default() };
            let (namespace, volume) = (volume.namespace.clone(), volume.id.clone());
            async move { client.delete_volume(&namespace, &volume, options).await }
        });
        Ok(delete.await?)
    }

    async fn mount(self: Arc<Self>, body: Body, answer: oneshot::Sender<Result<String>>) {
        let end = Instant::now() + PATIENCE;
        let (volume, engine) = (VolumeHash::of(&body.name), Engine::of(&body.id));
        let lock = self.lock(&volume);
        let _locked = lock.lock().await;
        // The engine gave up while another request for the volume was under way.
        if answer.is_closed() {
            return;
        }
        let mounted = async {
            // Uses of a mount that is gone: those from before `csictl unmount`, or from before csid lost the mount.
            if !self.is_mounted(&body.name, engine).await? {
                self.users.clear(&volume, engine)?;
            }
            let mounted = self.mounted(&body.name, engine, end).await?;
            if mounted.is_device {
                self.unmounted(&body.name, engine, end).await?;
                let (namespace, volume) = (self.namespace.clone(), body.name.clone());
                return Err(Failure::BlockDevice { namespace, volume });
            }
            // Until here the mount has no user. If this process dies, the next one unmounts it.
            Ok((mounted.source, self.users.add(&volume, &body.id)?))
        };
        let (mounted, added) = match mounted.await {
            Ok((source, added)) => (Ok(source), Some(added)),
            Err(failure) => (Err(failure), None),
        };
        // An engine that has closed the connection does not know that the volume is mounted.
        if answer.send(mounted).is_err()
            && let Some(added) = added
            && let Err(error) = self.users.undo(&volume, &added)
        {
            tracing::warn!(volume = body.name, %error, "the file of a use stays");
        }
    }

    async fn unmount(self: Arc<Self>, body: Body, answer: oneshot::Sender<Result<()>>) {
        let end = Instant::now() + PATIENCE;
        let (volume, engine) = (VolumeHash::of(&body.name), Engine::of(&body.id));
        let lock = self.lock(&volume);
        let _locked = lock.lock().await;
        let unmounted = match engine {
            Engine::Docker => self.unmount_of_docker(&body, &volume, end).await,
            Engine::Podman => self.unmount_of_podman(&body, &volume, end).await,
        };
        let _ = answer.send(unmounted);
    }

    /// Removes one use, and unmounts after the last one. Docker forgets the use whatever the answer is, and the sweep repeats a failed
    /// unmount.
    async fn unmount_of_docker(&self, body: &Body, volume: &VolumeHash, end: Instant) -> Result<()> {
        self.users.remove(volume, &body.id)?;
        match self.users.has(volume, Engine::Docker)? {
            true => Ok(()),
            false => self.unmounted(&body.name, Engine::Docker, end).await,
        }
    }

    /// Unmounts, and then removes the use. If this process dies before csid has the Unmount, the use is there, as Podman counts. After an
    /// error Podman's count still has the use, and Podman sends no Mount for the next container. So Podman gets an error only if csid
    /// keeps the mount. The use stays with the mount.
    async fn unmount_of_podman(&self, body: &Body, volume: &VolumeHash, end: Instant) -> Result<()> {
        let operation = operation_id(PROGRAM)?;
        let unmounted = self.unmounted_as(&operation, &body.name, Engine::Podman, end).await;
        if let Err(failure) = unmounted {
            // A csid that does not answer may have the Unmount. If it has none, the mount has no use from here on, and the sweep unmounts.
            if self.keeps(&operation, &body.name, Engine::Podman).await.unwrap_or(false) {
                if let Err(error) = self.users.add(volume, &body.id) {
                    tracing::warn!(volume = body.name, %error, "a use of Podman is not counted");
                }
                return Err(failure);
            }
            tracing::warn!(volume = body.name, error = %failure, "csid goes on with the unmount");
        }
        // A sweep removes what stays: a use without a mount.
        if let Err(error) = self.users.remove(volume, &body.id) {
            tracing::warn!(volume = body.name, %error, "the file of a use stays");
        }
        Ok(())
    }

    /// Returns whether csid keeps a mount whose unmount has failed. After most failures csid goes on by itself.
    async fn keeps(&self, operation: &str, name: &str, engine: Engine) -> Result<bool> {
        let until = Instant::now() + AFTER_FAILURE;
        let operations =
            self.session.ask(Some(until), |client, _| async move { client.list_operations().await });
        // Asked first: the row of an operation that has ended is final.
        let goes_on = operations.await?.iter().any(|row| row.id == operation && row.uid == own_uid());
        Ok(!goes_on && self.mounts_until(Some(name), until).await?.iter().any(|row| is_up(row, engine)))
    }

    /// Unmounts what has no user, and removes users of what is not mounted, if the last sweep found the same. Returns what this sweep
    /// found and did not mend.
    pub async fn sweep(&self, last: &Unmatched) -> Result<Unmatched> {
        let found = self.unmatched().await?;
        for (volume, consumer) in found.intersection(last) {
            let lock = self.lock(volume);
            let _locked = lock.lock().await;
            // A request may have changed it since.
            let rows = self.mounts(None).await?;
            let row = rows.iter().find(|row| is_of(row, volume, consumer));
            let engine = ENGINES.into_iter().find(|engine| engine.consumer() == *consumer);
            let Some(engine) = engine else { continue };
            match row {
                None => self.users.clear(volume, engine)?,
                Some(row) if row.state == "mounted" && !self.users.has(volume, engine)? => {
                    tracing::info!(
                        volume = row.volume,
                        consumer,
                        "unmounting a volume that no container uses"
                    );
                    let end = Instant::now() + PATIENCE;
                    if let Err(error) = self.unmounted(&row.volume, engine, end).await {
                        tracing::warn!(volume = row.volume, consumer, %error, "it stays mounted");
                    }
                }
                Some(_) => {}
            }
        }
        Ok(found.difference(last).cloned().collect())
    }

    /// Returns the mounted volumes without a user, and the volumes with users and without a row.
    async fn unmatched(&self) -> Result<Unmatched> {
        let rows = self.mounts(None).await?;
        let users = self.users.all()?;
        let with_rows: BTreeMap<(VolumeHash, &'static str), &MountRow> = rows
            .iter()
            .filter_map(|row| Some(((VolumeHash::of(&row.volume), consumer(row)?), row)))
            .collect();
        // What waits or is lost after a reboot waits for its engine.
        let unused = with_rows.iter().filter(|(key, row)| row.state == "mounted" && !users.contains(key));
        let unused = unused.map(|(key, _)| key.clone());
        Ok(users.iter().filter(|key| !with_rows.contains_key(key)).cloned().chain(unused).collect())
    }

    async fn mounted(&self, name: &str, engine: Engine, end: Instant) -> Result<Mounted> {
        let operation = operation_id(PROGRAM)?;
        let mount = self.session.ask(Some(end), |client, deadline_usec| {
            let options = MountOptions {
                restore: Some(Restore::Hold),
                operation_id: Some(operation.clone()),
                deadline_usec,
                ..MountOptions::default()
            };
            let (namespace, name) = (self.namespace.clone(), name.to_owned());
            async move { client.mount(&namespace, &name, engine.consumer(), options).await }
        });
        mount.await.map_err(|error| self.explained(error, name))
    }

    async fn unmounted(&self, name: &str, engine: Engine, end: Instant) -> Result<()> {
        self.unmounted_as(&operation_id(PROGRAM)?, name, engine, end).await
    }

    /// Unmounts by an operation of this name.
    async fn unmounted_as(&self, operation: &str, name: &str, engine: Engine, end: Instant) -> Result<()> {
        let unmount = self.session.ask(Some(end), |client, deadline_usec| {
            let operation_id = Some(operation.to_owned());
            let options = UnmountOptions { operation_id, deadline_usec, ..UnmountOptions::default() };
            let (namespace, name) = (self.namespace.clone(), name.to_owned());
            async move { client.unmount(&namespace, &name, engine.consumer(), options).await }
        });
        Ok(unmount.await?)
    }

    fn explained(&self, error: Error, name: &str) -> Failure {
        match error.csid() {
            Some(csid) if csid.kind == Kind::NotFound => {
                Failure::NotRegistered { namespace: self.namespace.clone(), volume: name.to_owned() }
            }
            _ => error.into(),
        }
    }

    async fn is_mounted(&self, name: &str, engine: Engine) -> Result<bool> {
        Ok(self.mounts(Some(name)).await?.iter().any(|row| is_up(row, engine)))
    }

    /// Returns the rows of both engines' mounts. `only`: those of this volume.
    async fn mounts(&self, only: Option<&str>) -> Result<Vec<MountRow>> {
        self.mounts_until(only, Instant::now() + FOR_ROWS).await
    }

    async fn mounts_until(&self, only: Option<&str>, end: Instant) -> Result<Vec<MountRow>> {
        let filter = MountFilter {
            namespace: Some(self.namespace.clone()),
            volume: only.map(str::to_owned),
            uid: Some(own_uid()),
            ..MountFilter::default()
        };
        let list = self.session.ask(Some(end), |client, _| {
            let filter = filter.clone();
            async move { client.list_mounts(filter).await }
        });
        let mut rows = list.await?;
        rows.retain(|row| consumer(row).is_some());
        Ok(rows)
    }

    /// Returns the volumes of the namespace, registered or declared by a file. `only`: the beginning of their names.
    async fn volumes(&self, only: Option<&str>) -> Result<Vec<VolumeRow>> {
        let filter = VolumeFilter {
            namespace: Some(self.namespace.clone()),
            prefix: only.map(str::to_owned),
            declared: Some(true),
            ..VolumeFilter::default()
        };
        let list = self.session.ask(Some(Instant::now() + FOR_ROWS), |client, _| {
            let filter = filter.clone();
            async move { client.list_volumes(filter).await }
        });
        Ok(list.await?)
    }

    async fn volume(&self, name: &str) -> Result<Option<VolumeRow>> {
        Ok(self.volumes(Some(name)).await?.into_iter().find(|volume| volume.id == name))
    }

    fn lock(&self, volume: &VolumeHash) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(volume.clone()).or_default())
    }
}

fn own_uid() -> u32 {
    rustix::process::getuid().as_raw()
}

/// Returns the engine's name, if a mount is an engine's.
fn consumer(row: &MountRow) -> Option<&'static str> {
    let of = ENGINES.into_iter().map(Engine::consumer).find(|consumer| row.consumer == *consumer);
    of.filter(|_| row.tag.is_empty())
}

/// Returns whether csid has an engine's volume mounted.
fn is_up(row: &MountRow, engine: Engine) -> bool {
    row.consumer == engine.consumer() && row.state == "mounted"
}

fn is_of(row: &MountRow, volume: &VolumeHash, engine: &str) -> bool {
    row.consumer == engine && VolumeHash::of(&row.volume) == *volume
}

/// Returns where a volume is mounted. Empty: nowhere.
fn mountpoint(mounts: &[MountRow], name: &str) -> String {
    let row = mounts.iter().find(|row| row.volume == name && row.state == "mounted");
    row.map(|row| row.source.clone()).unwrap_or_default()
}

fn described(volume: VolumeRow, mounts: &[MountRow]) -> Volume {
    let mut status = BTreeMap::from([("plugin", Value::from(volume.plugin))]);
    if !volume.provider.is_empty() {
        status.insert("provider", Value::from(volume.provider));
    }
    status.insert("state", Value::from(volume.standing));
    if volume.capacity > 0 {
        status.insert("capacity", Value::from(volume.capacity));
    }
    Volume { mountpoint: mountpoint(mounts, &volume.id), name: volume.id, status }
}
