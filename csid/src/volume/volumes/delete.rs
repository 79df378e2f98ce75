//! The call DeleteVolume, up to the queue of the volume.

use tokio::sync::oneshot;

use crate::error::{Kind, Result};
use crate::store::Durability;
use crate::store::registry::{Origin, Record};
use crate::volume::api::operation_kind::OperationKind;
use crate::volume::api::requests::VolumeRequest;
use crate::volume::context::Context;
use crate::volume::lifecycle::{is_asked_for_by, is_unasked, is_unborn, refuse_anothers};
use crate::volume::manager::Volumes;
use crate::volume::operation::message::Message;
use crate::volume::operation::request::{CallTarget, ControllerRequest, OperationRequest};
use crate::volume::transitions;

impl Volumes {
    /// Deletes a volume. A volume in creation is first created, since it cannot be deleted by its name (CSI rule 39). Callers
    /// that wait for the creation are answered. If the plugin was never asked for it, its row is removed at once.
    pub async fn delete_volume(&self, mut request: VolumeRequest) -> Result<()> {
        if request.inline.is_some() {
            return self.call(request, ControllerRequest::Delete).await.map(drop);
        }
        self.shared.changeable()?;
        if let Some(servers) = &self.shared.records.servers {
            return self.delete_at_servers(servers.as_ref(), request).await;
        }
        let record = self.shared.records.registry.record(request.name.clone()).await?;
        if record.registration.is_none() {
            // A file may declare a volume that is not registered yet.
            self.shared.records.refuse_other_origin(&record, Origin::Bus)?;
            return self.shared.records.synced().await;
        }
        if is_unborn(&record) {
            refuse_anothers(&record, request.uid)?;
            if self.shared.drop_unasked(&record).await? {
                return Ok(());
            }
            let (secrets, credential) = (request.secrets.take(), request.credential.take());
            request.secrets = self.shared.given(secrets, credential, request.wait.deadline).await?;
            let name = &request.name;
            let made = self.create_to_delete(&record, &request).await;
            let now = self.shared.records.registry.record(name.clone()).await?;
            match made {
                // The plugin has no volume of that name.
                Err(_) if now.registration.is_none() => return Ok(()),
                // The id is still unknown. In every other case the volume exists, perhaps not as it was wanted.
                Err(error) if is_unborn(&now) => return Err(error),
                _ => {}
            }
        }
        let name = request.name.clone();
        match self.call(request, ControllerRequest::Delete).await {
            // An earlier call has completed the deletion meanwhile.
            Err(error) if error.kind == Kind::NotFound => {
                let now = self.shared.records.registry.record(name).await?;
                if now.registration.is_none() { self.shared.records.synced().await } else { Err(error) }
            }
            done => done.map(drop),
        }
    }

    /// Has the plugin create a volume that is to be deleted. Notes the deletion when the volume's queue has taken the request, so
    /// a refused call changes nothing.
    async fn create_to_delete(&self, record: &Record, request: &VolumeRequest) -> Result<()> {
        let mut doomed = record.clone();
        transitions::doom(&mut doomed);
        let Some(registration) = doomed.registration else { return Ok(()) };
        let VolumeRequest { name, uid, secrets, wait, .. } = request;
        let target =
            Box::new(CallTarget { name: name.clone(), uid: *uid, registration, is_registered: false });
        let call = ControllerRequest::Create { to_delete: true };
        let work = OperationRequest::Call { target, call, secrets: secrets.clone() };
        let (taken, is_taken) = oneshot::channel();
        let answer = self.shared.ask_and_note(&record.volume, *uid, work, wait.clone(), Some(taken))?;
        if is_taken.await.is_ok() {
            self.shared.doom(record).await?;
        }
        self.shared.answered(answer).await.map(drop)
    }
}

impl Context {
    /// Removes the row of a creation that the plugin was never asked for, and ends the operation that waits to ask. Returns
    /// whether there was such a row.
    async fn drop_unasked(&self, record: &Record) -> Result<bool> {
        let mut dropped = false;
        let gone = |record: &mut Record| {
            dropped = is_unasked(record);
            record.registration = record.registration.take().filter(|_| !dropped);
            Ok(None)
        };
        self.records.amend(&record.name, Durability::Disk, gone).await?;
        if dropped {
            self.directory.tell(&record.volume, Message::GiveUp(record.name.clone(), OperationKind::Delete));
        }
        Ok(dropped)
    }

    /// Notes that a volume is created only to be deleted, even if the caller leaves or csid restarts. A creation that has the name since
    /// then is not changed.
    async fn doom(&self, record: &Record) -> Result<()> {
        let doomed = |now: &mut Record| {
            if is_asked_for_by(now, &record.volume) {
                transitions::doom(now);
            }
            Ok(None)
        };
        self.records.amend(&record.name, Durability::Disk, doomed).await.map(drop)
    }
}
