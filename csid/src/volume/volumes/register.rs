//! Registers, changes and deregisters volumes. A change is one compare-and-swap of the record of the volume. The plugin is called
//! before it, never after it.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::plugin::{Can, Service};
use crate::secret::Secrets;
use crate::store::claim_set::ClaimSet;
use crate::store::registry::{
    Conflict, Origin, Record, Registration, RegistryError, Standing, Swap, VolumeName,
};
use crate::store::rows::{NewEvent, VolumeKey};
use crate::store::{Durability, MountFilter};
use crate::volume::api::operation_kind::OperationKind;
use crate::volume::api::requests::{RegisterRequest, VolumeRequest, Wait};
use crate::volume::api::views::VolumeView;
use crate::volume::context::Context;
use crate::volume::errors::{claim as claim_errors, mount as mount_errors};
use crate::volume::lifecycle::{
    is_unasked, may_change, new_registration, queue_key, refuse_anothers, refuse_nonsense,
};
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
        let record = self.shared.registry.record(request.name.clone()).await?;
        let standing = record.registration.as_ref().map(|registration| &registration.standing);
        let is_on_its_way = standing.is_some_and(|standing| *standing != Standing::Registered);
        if is_on_its_way && (force || forget || is_unasked(&record)) {
            let (name, by) = (&record.name, Origin::Bus);
            self.shared.deregister(name, None, request.uid, force || forget, by).await?;
            // Nothing is left to create or delete, so operations that still ask the plugin are ended.
            self.shared
                .directory
                .tell(&queue_key(&record), Message::GiveUp(name.clone(), OperationKind::Deregister));
            return Ok(());
        }
        // Without `force` the volume must be unused, so its actor does not interfere.
        if !force || record.registration.is_none() {
            return self.shared.deregister(&record.name, None, request.uid, force, Origin::Bus).await;
        }
        match self.call(request, ControllerRequest::Forget).await {
            // Another call has deregistered the volume meanwhile.
            Err(error) if error.kind == Kind::NotFound => self.shared.synced().await,
            done => done.map(drop),
        }
    }
}

impl Context {
    /// Deregisters a volume. With `volume`, only while the name means that volume.
    pub(in crate::volume) async fn deregister(
        &self,
        name: &VolumeName,
        volume: Option<&VolumeKey>,
        uid: u32,
        force: bool,
        by: Origin,
    ) -> Result<()> {
        self.changeable()?;
        let filter = MountFilter {
            namespace: Some(name.namespace.clone()),
            volume: Some(name.volume.clone()),
            ..MountFilter::default()
        };
        let mounts = self.store.mounts(filter).await?;
        if !mounts.is_empty() {
            let holders = mounts.into_iter().map(|(row, _)| row.key.consumer).collect();
            return Err(claim_errors::mounted(name, holders));
        }
        let gone = |record: &mut Record| {
            refuse_anothers(record, uid)?;
            self.refuse_other_origin(record, by)?;
            match &record.registration {
                None => return Ok(None),
                Some(_) if volume.is_some_and(|volume| record.volume != *volume) => {
                    return Err(claim_errors::changed_meanwhile(&record.name));
                }
                Some(Registration {
                    standing: Standing::Creating(_) | Standing::Deleting { .. }, ..
                }) if !force && !is_unasked(record) => {
                    return Err(claim_errors::on_its_way(&record.name));
                }
                Some(_) => {}
            }
            if !record.claims.is_empty() && !force {
                return Err(claim_errors::in_use(record, "release it first, or use force"));
            }
            record.registration = None;
            record.claims = ClaimSet::default();
            record.attachments.retain(|at| at.by_call.is_some());
            Ok(Some(claim_errors::registered("volume-deregistered", record)))
        };
        self.amend(name, Durability::Disk, gone).await?;
        self.synced().await
    }

    /// Registers a volume, for a call or because a file declares it.
    pub(in crate::volume) async fn register(self: &Arc<Self>, request: RegisterRequest) -> Result<Record> {
        let RegisterRequest { name, volume, spec, uid, origin, secrets, wait } = request;
        self.changeable()?;
        refuse_nonsense(&spec)?;
        if self.plugins.view(&volume.plugin).is_none() {
            return Err(mount_errors::unknown_plugin(&volume.plugin));
        }
        self.refuse_in_use_otherwise(&name, &volume)?;
        let new = new_registration(uid, spec, origin);
        let put = |record: &mut Record| self.put(record, &volume, &new);
        let present = self.registry.record(name.clone()).await?;
        if put(&mut present.clone())?.is_none() {
            return Ok(present);
        }
        self.confirm(&name, &volume, &new, secrets, wait).await?;
        // The declaration may have been removed meanwhile, so it is checked again under the lock.
        let _held = self.declarations.hold().await;
        if origin == Origin::File && !self.declarations.say(&name, &volume, &new.spec) {
            return Err(self.not_registered(&name));
        }
        self.amend(&name, Durability::Disk, put).await
    }

    /// Changes a record to this registration, and returns the event. `None`: the record has it already. An error says why it
    /// cannot be changed.
    pub(in crate::volume) fn put(
        &self,
        record: &mut Record,
        volume: &VolumeKey,
        new: &Registration,
    ) -> Result<Option<NewEvent>> {
        self.refuse_other_origin(record, new.origin)?;
        let Some(present) = &mut record.registration else {
            if record.volume != *volume {
                claim_errors::refuse_attached(record)?;
            }
            record.volume = volume.clone();
            record.registration = Some(new.clone());
            return Ok(Some(claim_errors::registered("volume-registered", record)));
        };
        may_change(&record.name, &record.volume, present, volume, new)?;
        if present.spec == new.spec {
            return Ok(None);
        }
        if !record.claims.is_empty() {
            return Err(claim_errors::in_use(record, "its registration cannot change"));
        }
        present.spec = new.spec.clone();
        Ok(Some(claim_errors::registered("volume-changed", record)))
    }

    /// Refuses a call that changes a volume of a file, and a file that changes a volume of a call.
    pub(in crate::volume) fn refuse_other_origin(&self, record: &Record, by: Origin) -> Result<()> {
        let (name, present) = (&record.name, record.registration.as_ref().map(|present| present.origin));
        let file = self.declarations.file(name);
        match (by, present) {
            (Origin::Bus, Some(Origin::File)) => Err(claim_errors::of_file(name, file.as_deref())),
            (Origin::Bus, None) if file.is_some() => Err(claim_errors::of_file(name, file.as_deref())),
            (Origin::File, Some(Origin::Bus)) => Err(claim_errors::of_call(name)),
            _ => Ok(()),
        }
    }

    /// Changes a record. Repeats `change` on the new record if another writer was faster. The event that `change` returns is
    /// written with the record; `None`: there is no event. An error changes nothing.
    pub(in crate::volume) async fn amend(
        &self,
        name: &VolumeName,
        durability: Durability,
        mut change: impl FnMut(&mut Record) -> Result<Option<NewEvent>>,
    ) -> Result<Record> {
        loop {
            let before = self.registry.record(name.clone()).await?;
            let mut after = before.clone();
            let event = change(&mut after)?;
            if after == before {
                return Ok(after);
            }
            let past = claim_errors::past(&before, &after);
            let events = event.into_iter().collect();
            let swap = Swap { before, after: after.clone(), past, durability };
            match fault::around("registration", self.registry.swap(swap, events)).await {
                Ok(revision) => return Ok(Record { revision, ..after }),
                Err(RegistryError::Conflict(Conflict::Stale)) => {}
                Err(error) => return Err(error.into()),
            }
        }
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
            Ok(OperationResponse::Validated(Err(why))) => Err(claim_errors::not_confirmed(name, &why)),
            Ok(_) => Ok(()),
            Err(error) if error.details.grpc_code == Some(tonic::Code::NotFound as u32) => {
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
            Some(text) => Err(Error::new(
                Kind::Busy,
                format!("{text}, and in use so; ask for it by that name, or end that use first"),
            )),
        }
    }
}
