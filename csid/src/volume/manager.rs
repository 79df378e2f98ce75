//! The handle of all volumes: their mounts, and the operations under way.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::config::{Config, Directories};
use crate::error::{Error, Result};
use crate::histogram::Durations;
use crate::host::{Host, Look, TargetFd, Tree};
use crate::plugin::Plugins;
use crate::store::registry::{Registry, VolumeName};
use crate::store::rows::{MountKey, MountRow, Phase};
use crate::store::{MountFilter, Store};
use crate::volume::actor::VolumeActor;
use crate::volume::api::operation_kind::OperationKind;
use crate::volume::api::requests::{Authority, MountRequest, Uncovered, UnmountRequest, Unmounting, Wait};
use crate::volume::api::views::{MountView, Mounted, OperationView};
use crate::volume::context::Context;
use crate::volume::control::records::Records;
use crate::volume::control::records::UsableVolume;
use crate::volume::errors::mount::MountError;
use crate::volume::model::subject::ClaimKey;
use crate::volume::model::volume::{DesiredMount, Observed};
use crate::volume::operation::message::Message;
use crate::volume::operation::request::{OperationRequest, OperationResponse};
use crate::volume::operation::table::OfPlugin;
use crate::volume::probe::{healthy, why};
use crate::volume::servers::Servers;

/// The handle of all volumes.
#[derive(Clone)]
pub struct Volumes {
    pub(in crate::volume) shared: Arc<Context>,
}

impl Volumes {
    /// Makes the handle. `registry`: the registry of the volumes, which may be another one than the journal's. `servers`: those of
    /// the cluster; `None`: csid is alone.
    pub fn new(
        store: Store,
        registry: Arc<dyn Registry>,
        plugins: Plugins,
        host: Host,
        config: tokio::sync::watch::Receiver<Arc<Config>>,
        directories: Directories,
        servers: Option<Arc<dyn Servers>>,
    ) -> Self {
        let records =
            Records::new(registry, plugins.clone(), config.clone(), store.node().to_owned(), servers);
        // The directory is part of the context and starts the actors, as long as the context exists.
        let new = |shared: &Weak<Context>| {
            let shared = shared.clone();
            let spawn = Box::new(move |volume, inbox| {
                if let Some(shared) = shared.upgrade() {
                    tokio::spawn(VolumeActor::run(shared, volume, inbox));
                }
            });
            Context::new(store, records, plugins, host, config, directories, spawn)
        };
        Volumes { shared: Arc::new_cyclic(new) }
    }

    /// Takes a descriptor that came with a call; the helper closes it.
    pub fn keep(&self, fd: OwnedFd) -> Tree {
        self.shared.host.keep(fd)
    }

    /// Takes a descriptor of a target that came with a call; the helper closes it.
    pub fn target_fd(&self, fd: OwnedFd) -> Arc<TargetFd> {
        Arc::new(self.shared.host.target_fd(fd))
    }

    pub async fn mount(&self, request: MountRequest) -> Result<Mounted> {
        if let (Some(fd), Some(target)) = (&request.target_fd, &request.options.target) {
            self.shared.host.is_free(fd, Path::new(target))?;
        }
        if request.adopted.is_some() {
            // A server may have granted the volume to another host.
            self.shared.refuse_in_cluster("AdoptMount")?;
        }
        if request.inline.is_some() {
            return self.mount_used(request, None).await;
        }
        let (name, deadline) = (VolumeName::of(&request.key), request.wait.deadline);
        let used = Box::pin(self.shared.to_be_used(&name, deadline, true)).await?;
        if !used.is_remembered() {
            return self.mount_used(request, Some(used)).await;
        }
        let answer = used.answer.clone();
        match self.mount_used(request.clone(), Some(used)).await {
            Err(error) if answer.is_some_and(|answer| answer.may_mislead(&error)) => {
                let used = Box::pin(self.shared.to_be_used(&name, deadline, false)).await?;
                self.mount_used(request, Some(used)).await
            }
            mounted => mounted,
        }
    }

    /// Mounts a volume. `used`: the registered one. `None`: the request has it.
    async fn mount_used(&self, request: MountRequest, used: Option<UsableVolume>) -> Result<Mounted> {
        let MountRequest { key, inline, uid, options, adopted, target_fd, wait_until, secrets, wait } =
            request;
        let (volume, mut spec, claim, answer) = match (inline, used) {
            (Some(volume), _) => {
                self.shared.refuse_inline(uid)?;
                let name = VolumeName::of(&key);
                self.shared.records.refuse_registered(&name, &volume).await?;
                // Alone csid has nobody to ask, and need not read its rows.
                if self.shared.records.servers.is_some() && !self.shared.is_mounted(&key, &volume).await? {
                    let refused = self.shared.records.refuse_known(&name, &volume);
                    self.shared.before(wait.deadline, &name, refused).await?;
                }
                (volume, options.spec(None)?, None, None)
            }
            (None, Some(used)) => {
                let given = secrets.is_some();
                let (spec, claim) = self.shared.mount_registered(&key, uid, options, given, &used).await?;
                (used.record.volume, spec, Some(claim), used.answer)
            }
            (None, None) => return Err(Error::internal("a mount of no volume")),
        };
        spec.secrets_given = secrets.is_some();
        if let Some(target) = &spec.target {
            self.shared.refuse_own_target(Path::new(target))?;
            if uid != 0 && self.mounts_of(&key, false).await?.is_empty() {
                self.shared.refuse_others_target(&volume.plugin, Path::new(target), uid, &spec).await?;
            }
        }
        self.shared.identify(&volume).await?;
        let wanted = DesiredMount { key, uid, spec, operations: Vec::new() };
        let adopted = adopted.map(Box::new);
        let work = OperationRequest::Mount { wanted, claim, adopted, target_fd, wait_until, secrets, answer };
        let answer = self.shared.ask(&volume, uid, work, wait)?;
        match self.shared.answered(answer).await? {
            OperationResponse::Mounted(mounted) => Ok(mounted),
            _ => Err(Error::internal("a mount was answered without its path")),
        }
    }

    pub async fn unmount(&self, request: UnmountRequest) -> Result<()> {
        let UnmountRequest { key, authority, all_tags, how, uncovered, wait } = request;
        if !all_tags {
            return self.unmount_one(key, authority, how, uncovered, wait).await;
        }
        // Each Mount that has no row yet is cancelled at once. The Unmount of a row may wait for the plugin.
        let mut keys = self.mounting(&key, true);
        let rows = self.mounts_of(&key, true).await?;
        keys.retain(|(of, _)| rows.iter().all(|row| row.key != *of));
        let keys = keys.into_iter().map(|(key, _)| key).chain(rows.into_iter().map(|row| row.key));
        let keys: Vec<MountKey> = keys.collect();
        if keys.is_empty() {
            return self.unmount_one(key, authority, how, None, wait).await;
        }
        // The calls share one operation id, so they run one after another. A failure does not stop the others.
        let mut failed = None;
        for key in keys {
            let how = Unmounting { must_exist: false, ..how };
            let ended = self.unmount_one(key, authority, how, None, wait.clone()).await;
            failed = failed.or(ended.err());
        }
        failed.map_or(Ok(()), Err)
    }

    async fn unmount_one(
        &self,
        key: MountKey,
        authority: Authority,
        how: Unmounting,
        uncovered: Option<Uncovered>,
        wait: Wait,
    ) -> Result<()> {
        self.shared.changeable()?;
        let Some(volume) = self.shared.volume_of(&key).await? else {
            self.shared.synced().await?;
            return if how.must_exist {
                Err(MountError::NoMount { key, tags: Vec::new(), foreign: Vec::new() }.into())
            } else {
                Ok(())
            };
        };
        let (Authority::Own(uid) | Authority::Any(uid)) = authority;
        let answer = self.shared.ask(
            &volume,
            uid,
            OperationRequest::Unmount { key, authority, how, uncovered },
            wait,
        )?;
        self.shared.answered(answer).await.map(drop)
    }

    /// Lists an operation on a plugin as `kind`; its subject is the plugin's id.
    pub fn list_of_plugin(
        &self,
        kind: OperationKind,
        plugin: &str,
        uid: u32,
        wait: &Wait,
    ) -> Result<OfPlugin> {
        self.shared.operations.of_plugin(kind, plugin, uid, wait)
    }

    /// Returns the registry of volumes and claims.
    pub fn registry(&self) -> Arc<dyn Registry> {
        Arc::clone(&self.shared.records.registry)
    }

    /// Returns how many operations of each kind have begun since csid's start.
    pub fn operations_begun(&self) -> BTreeMap<OperationKind, u64> {
        self.shared.operations.begun()
    }

    /// Returns how long each step of the mounts, restores and unmounts that have ended took, by kind and step.
    pub fn operation_steps(&self) -> BTreeMap<(OperationKind, &'static str), Durations> {
        self.shared.operations.steps()
    }

    /// Returns the uids that own a mount, or all mounts of its consumer. They decide which action to authorise.
    pub async fn owners(&self, key: &MountKey, all_tags: bool) -> Result<Vec<u32>> {
        // A Mount that ends meanwhile has its row by then.
        let mut mounting = self.mounting(key, all_tags);
        let rows = self.mounts_of(key, all_tags).await?;
        // Another user's Mount of a row's key is refused when its turn comes.
        mounting.retain(|(of, _)| rows.iter().all(|row| row.key != *of));
        Ok(mounting.into_iter().map(|(_, uid)| uid).chain(rows.iter().map(|row| row.uid)).collect())
    }

    /// Returns the Mounts under way of a key, or of all tags of its consumer, with the uids of their callers. Each may have no row yet.
    fn mounting(&self, key: &MountKey, all_tags: bool) -> Vec<(MountKey, u32)> {
        let claim = ClaimKey::of(key);
        let is_meant = |of: &MountKey| if all_tags { claim.has_mount(of) } else { of == key };
        self.shared.operations.mounting_where(is_meant)
    }

    pub(in crate::volume) async fn mounts_of(&self, key: &MountKey, all_tags: bool) -> Result<Vec<MountRow>> {
        let mut filter = MountFilter::of(key);
        if all_tags {
            filter.tag = None;
        }
        Ok(self.shared.store.mounts(filter).await?.into_iter().map(|(row, _)| row).collect())
    }

    /// Returns whether a path that csid published has a mount or a device.
    pub async fn has_mount(&self, source: &str) -> Result<bool> {
        let filter = MountFilter { source: Some(source.to_owned()), ..MountFilter::default() };
        match self.shared.store.mounts(filter).await?.first() {
            Some((row, _)) => Ok(self.shared.sight(row).await != Observed::Gone),
            None => Ok(false),
        }
    }

    /// Lists the mounts that match, and probes each of them.
    pub async fn list(&self, filter: MountFilter) -> Result<Vec<MountView>> {
        let rows = self.shared.store.mounts(filter).await?;
        let mounts: Vec<&MountRow> = rows.iter().map(|(row, _)| row).collect();
        let (looks, sights) = self.shared.looks_and_sights(&mounts).await;
        let view = |((row, staging), (look, sight)): ((MountRow, String), (&Look, Observed))| {
            let is_mounted = row.phase == Phase::Mounted;
            let healthy = is_mounted && healthy(&row, look) && sight == Observed::There;
            let error = match sight {
                Observed::Unbound if is_mounted => "nothing is mounted at its target".to_owned(),
                // The error of the row says more: why the mount cannot be healed.
                _ if is_mounted && !healthy && row.error.is_none() => why(look),
                _ => row.error.clone().unwrap_or_default(),
            };
            MountView { row, staging, healthy, error }
        };
        Ok(rows.into_iter().zip(looks.iter().zip(sights)).map(view).collect())
    }

    pub fn operations(&self) -> Vec<OperationView> {
        self.shared.operations.list()
    }

    /// Waits until the status may have changed. Some changes have no event; others are not complete when their event is written.
    pub async fn news(&self) {
        self.shared.operations.news().await;
    }

    /// Returns whether some operations of csid's recovery are not listed yet.
    pub fn is_recovering(&self) -> bool {
        self.shared.operations.is_recovering()
    }

    /// Cancels the calls with this name.
    pub async fn cancel(&self, operation: &str, authority: Authority) -> Result<()> {
        let found = self.shared.operations.find(operation, authority);
        if found.is_empty() {
            let text = format!("no operation `{operation}` of yours is under way");
            return Err(Error::not_found(text));
        }
        for (volume, number) in found {
            self.shared.directory.tell(&volume, Message::Withdraw(number));
        }
        Ok(())
    }

    /// Refuses new requests, waits up to `patience` for the operations with callers, and answers the callers that are left. The
    /// journal has the remaining work.
    pub async fn shutdown(&self, patience: Duration) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.records.declarations.stop();
        let end = Instant::now() + patience;
        while self.shared.operations.are_waited_for() && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.shared.directory.tell_all(|| Message::Stop);
    }
}
