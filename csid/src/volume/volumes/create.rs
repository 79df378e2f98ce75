//! The call CreateVolume, up to the queue of the volume.

use crate::error::{Error, Result};
use crate::plugin::Can;
use crate::secret::Secrets;
use crate::store::Durability;
use crate::store::registry::{Creation, Origin, Record, Registration, Standing, VolumeName};
use crate::store::rows::VolumeKey;
use crate::volume::api::requests::{CreateRequest, Wait};
use crate::volume::api::views::VolumeView;
use crate::volume::context::Context;
use crate::volume::errors::volume::VolumeError;
use crate::volume::lifecycle::{new_registration, refuse_nonsense};
use crate::volume::manager::Volumes;
use crate::volume::model::paths;
use crate::volume::operation::request::{CallTarget, ControllerRequest, OperationRequest, OperationResponse};

impl Volumes {
    pub async fn create_volume(&self, request: CreateRequest) -> Result<VolumeView> {
        if let Some(servers) = &self.shared.records.servers {
            return self.create_at_servers(servers.as_ref(), request).await;
        }
        let CreateRequest {
            name,
            plugin,
            mut spec,
            capacity_min,
            capacity_max,
            register,
            uid,
            secrets,
            wait,
        } = request;
        let shared = &self.shared;
        shared.changeable()?;
        refuse_nonsense(&spec)?;
        if spec.name.is_empty() {
            spec.name = paths::name_at_plugin(&shared.records.node, &name);
        }
        let secrets_given = secrets.is_some();
        let creation = Creation {
            capacity_min,
            capacity_max,
            register,
            secrets_given,
            source: None,
            sourceless: false,
            ..Creation::default()
        };
        let record = shared.records.registry.record(name.clone()).await?;
        shared.records.refuse_other_origin(&record, Origin::Bus)?;
        // A volume that exists can be returned without its plugin.
        if record.registration.is_none() {
            shared.refuse_if_it_cannot(&plugin)?;
            let volume = VolumeKey::creating(&plugin, &spec.name);
            shared.refuse_in_use_otherwise(&name, &volume)?;
        }
        let registration = Registration {
            standing: Standing::Creating(creation),
            ..new_registration(uid, spec, Origin::Bus)
        };
        let create = ControllerRequest::Create { to_delete: false };
        let record = self.creation(name, &plugin, create, registration, secrets, (uid, wait)).await?;
        if !register {
            self.forget_fetched(&record.name).await?;
        }
        Ok(shared.view(record, Vec::new()))
    }

    /// Runs a creation by [`ControllerRequest::Create`], and returns its record.
    pub(in crate::volume) async fn creation(
        &self,
        name: VolumeName,
        plugin: &str,
        call: ControllerRequest,
        registration: Registration,
        secrets: Option<Secrets>,
        by: (u32, Wait),
    ) -> Result<Record> {
        let (uid, wait) = by;
        let task = VolumeKey::creating(plugin, &registration.spec.name);
        let target = Box::new(CallTarget { name: name.clone(), uid, registration, is_registered: false });
        let work = OperationRequest::Call { target, call, secrets };
        let answer = self.shared.ask(&task, uid, work, wait)?;
        match self.shared.answered(answer).await? {
            OperationResponse::Created(record) => Ok(*record),
            _ => Err(Error::internal("a creation was answered without its volume")),
        }
    }

    /// Removes the row of a created volume; the caller keeps its own. If the answer is lost, the caller repeats the call, and the
    /// plugin returns the same volume for the same name.
    async fn forget_fetched(&self, name: &VolumeName) -> Result<()> {
        let forget = |record: &mut Record| {
            if let Some(Registration { standing: Standing::Creating(_), .. }) = &record.registration
                && !record.volume.handle.is_creating()
            {
                record.registration = None;
            }
            Ok(None)
        };
        self.shared.records.amend(name, Durability::Disk, forget).await.map(drop)
    }
}

impl Context {
    /// Refuses at once a plugin that is unknown, or known not to create volumes.
    fn refuse_if_it_cannot(&self, plugin: &str) -> Result<()> {
        if self.plugins.view(plugin).is_none() {
            return Err(VolumeError::UnknownPlugin { plugin: plugin.to_owned() }.into());
        }
        for what @ (Can::Plugin(name) | Can::Node(name) | Can::Controller(name)) in
            [Can::Plugin("CONTROLLER_SERVICE"), Can::Controller("CREATE_DELETE_VOLUME")]
        {
            if self.plugins.can(plugin, what) == Some(false) {
                return Err(VolumeError::NotOffered { plugin: plugin.to_owned(), capability: name }.into());
            }
        }
        Ok(())
    }
}
