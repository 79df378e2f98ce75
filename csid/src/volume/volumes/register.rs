//! Registers, changes and deregisters volumes. A change is one compare-and-swap of the record of the volume. The plugin is called
//! before it, never after it.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::plugin::{Can, Service, is_gone};
use crate::secret::Secrets;
use crate::store::registry::{Origin, Record, Registration, Standing, VolumeName};
use crate::store::rows::VolumeKey;
use crate::store::{Durability, MountFilter};
use crate::volume::api::operation_kind::OperationKind;
use crate::volume::api::requests::{RegisterRequest, VolumeRequest, Wait};
use crate::volume::api::views::VolumeView;
use crate::volume::context::Context;
use crate::volume::errors::volume::VolumeError;
use crate::volume::lifecycle::{is_unasked, new_registration, refuse_nonsense};
use crate::volume::manager::Volumes;
use crate::volume::operation::message::Message;
use crate::volume::operation::request::{CallTarget, ControllerRequest, OperationRequest, OperationResponse};

impl Volumes {
    pub async fn register_volume(&self, request: RegisterRequest) -> Result<VolumeView> {
        let registered = self.shared.register(request).await?;
        Ok(self.shared.view(registered, Vec::new()))
    }

    /// Deregisters a volume; the plugin keeps it. With `force` also a volume with claims, which are dropped. `forget` and `force`
    /// give up a creation or deletion for good.
    pub async fn deregister_volume(&self, request: VolumeRequest, force: bool, forget: bool) -> Result<()> {
        self.shared.changeable()?;
        if let Some(servers) = &self.shared.records.servers {
            return self.deregister_at_servers(servers.as_ref(), request, force || forget).await;
        }
        let record = self.shared.records.registry.record(request.name.clone()).await?;
        let standing = record.registration.as_ref().map(|registration| &registration.standing);
        let is_on_its_way = standing.is_some_and(|standing| *standing != Standing::Registered);
        if is_on_its_way && (force || forget || is_unasked(&record)) {
            let (name, by) = (&record.name, Origin::Bus);
            self.shared.deregister(name, request.uid, force || forget, by).await?;
            // Nothing is left to create or delete, so operations that still ask the plugin are ended.
            self.shared
                .directory
                .tell(&record.volume, Message::GiveUp(name.clone(), OperationKind::Deregister));
            return Ok(());
        }
        // Without `force` the volume must be unused, so its actor does not interfere.
        if !force || record.registration.is_none() {
            return self.shared.deregister(&record.name, request.uid, force, Origin::Bus).await;
        }
        match self.call(request, ControllerRequest::Forget).await {
            // Another call has deregistered the volume meanwhile.
            Err(error) if error.kind == Kind::NotFound => self.shared.records.synced().await,
            done => done.map(drop),
        }
    }
}

impl Context {
    /// Refuses a volume of this name that is mounted here.
    pub(in crate::volume) async fn refuse_mounted(&self, name: &VolumeName) -> Result<()> {
        self.changeable()?;
        let filter = MountFilter {
            namespace: Some(name.namespace.clone()),
            volume: Some(name.volume.clone()),
            ..MountFilter::default()
        };
        let mounts = self.store.mounts(filter).await?;
        match mounts.is_empty() {
            true => Ok(()),
            false => {
                let holders = mounts.into_iter().map(|(row, _)| row.key.consumer).collect();
                Err(VolumeError::Mounted { name: name.clone(), holders }.into())
            }
        }
    }

    /// Deregisters a volume that is not mounted here (`Records::deregister`).
    pub(in crate::volume) async fn deregister(
        &self,
        name: &VolumeName,
        uid: u32,
        force: bool,
        by: Origin,
    ) -> Result<()> {
        self.refuse_mounted(name).await?;
        self.records.deregister(name, None, uid, force, by).await
    }

    /// Registers a volume, for a call or because a file declares it.
    pub(in crate::volume) async fn register(self: &Arc<Self>, request: RegisterRequest) -> Result<Record> {
        let RegisterRequest { name, volume, spec, uid, origin, secrets, wait } = request;
        self.changeable()?;
        refuse_nonsense(&spec)?;
        if self.plugins.view(&volume.plugin).is_none() {
            return Err(VolumeError::UnknownPlugin { plugin: volume.plugin }.into());
        }
        self.refuse_in_use_otherwise(&name, &volume)?;
        let new = new_registration(uid, spec, origin);
        if let Some(servers) = &self.records.servers {
            if uid != 0 {
                // The servers know this host as the owner, and none of its users.
                let text = "in a cluster root alone registers volumes on a host";
                return Err(Error::new(Kind::NotAuthorized, text));
            }
            self.confirm(&name, &volume, &new, secrets, wait).await?;
            return servers.register(name, volume, new.spec).await;
        }
        let put = |record: &mut Record| self.records.put(record, &volume, &new);
        let present = self.records.registry.record(name.clone()).await?;
        if put(&mut present.clone())?.is_none() {
            return Ok(present);
        }
        self.confirm(&name, &volume, &new, secrets, wait).await?;
        // The declaration may have been removed meanwhile, so it is checked again under the lock.
        let _held = self.records.declarations.hold().await;
        if origin == Origin::File && !self.records.declarations.say(&name, &volume, &new.spec) {
            return Err(self.records.not_registered(&name));
        }
        self.records.amend(&name, Durability::Disk, put).await
    }

    /// Checks that the plugin runs, has the volume and confirms its capabilities. A plugin without a controller cannot be asked
    /// for the volume.
    async fn confirm(
        self: &Arc<Self>,
        name: &VolumeName,
        volume: &VolumeKey,
        registration: &Registration,
        secrets: Option<Secrets>,
        wait: Wait,
    ) -> Result<()> {
        let patience = Instant::now() + self.config.borrow().deadlines.operation;
        let deadline = wait.deadline.map_or(patience, |deadline| deadline.min(patience));
        let ready = |service| self.plugins.ready(&volume.plugin, service, deadline);
        tokio::select! {
            node = ready(Service::Node) => drop(node?),
            controller = ready(Service::Controller) => drop(controller?),
        }
        if !self.plugins.known(&volume.plugin, Can::Plugin("CONTROLLER_SERVICE"), deadline).await? {
            return Ok(());
        }
        let (uid, registration) = (registration.uid, registration.clone());
        let call = ControllerRequest::Validate { capabilities: registration.spec.capabilities.clone() };
        let target = Box::new(CallTarget { name: name.clone(), uid, registration, is_registered: false });
        let answer = self.ask(volume, uid, OperationRequest::Call { target, call, secrets }, wait)?;
        match self.answered(answer).await {
            Ok(OperationResponse::Validated(Err(why))) => {
                Err(VolumeError::NotConfirmed { name: name.clone(), why }.into())
            }
            Ok(_) => Ok(()),
            Err(error)
                if error.details.grpc_code.is_some_and(|code| is_gone(tonic::Code::from(code as i32))) =>
            {
                Err(Error { kind: Kind::NotFound, ..error })
            }
            Err(error) => Err(error),
        }
    }

    /// Refuses a name in use for another external id, and an external id in use under another name. Inline volumes count.
    pub(in crate::volume) fn refuse_in_use_otherwise(
        &self,
        name: &VolumeName,
        volume: &VolumeKey,
    ) -> Result<()> {
        match self.directory.in_use(name, volume) {
            None => Ok(()),
            Some(text) => Err(Error::new(Kind::Busy, format!("{text} as long as it is in use"))),
        }
    }
}
