//! Registrations, and what callers ask of one volume.

use csi_proto::cluster::v1::{Deregister, OwnAsk, Register, VolumeAsk, VolumeRow};
use csi_proto::identity::Identity;
use csid::cluster::rows::read_spec;
use csid::error::shortened;
use csid::store::registry::{
    Claim, Conflict, Record, RecordFilter, Registration, Registry, RegistryError, VolumeName,
};
use csid::store::rows::VolumeKey;
use csid::volume::rules::{self, check_name};
use csid::{Error, Kind};

use crate::cluster::Cluster;
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::random;
use crate::records::{TRIES, busy};
use crate::view;

impl Cluster {
    /// Reads and checks a registration that a caller may make.
    pub fn registration(
        &self,
        caller: &Identity,
        ask: &Register,
    ) -> Result<(VolumeName, VolumeKey, Registration)> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Register)?;
        let spec = read_spec(ask.spec.clone().unwrap_or_default())?;
        rules::check_volume(&ask.plugin, &ask.external_id, &spec)?;
        if spec.has_source() {
            return Err(Error::invalid(
                "snapshot and clone are of volumes that are created, not of registered ones",
            )
            .into());
        }
        // The volume's context says which storage gets the secrets.
        if let Some(credential) = &spec.credential {
            rules::check_credential(&name.namespace, credential)?;
        }
        let volume = VolumeKey::new(ask.plugin.clone(), ask.external_id.clone());
        let new = rules::new_registration(&caller.to_string(), spec);
        Ok((name, volume, Registration { id: random::name(), ..new }))
    }

    /// Registers a volume, or changes its registration.
    pub async fn register(&self, caller: &Identity, ask: Register) -> Result<VolumeRow> {
        let (name, volume, new) = self.registration(caller, &ask)?;
        for _ in 0..TRIES {
            let guards = self.guards_of(caller).await?;
            let record = self.registry.record(name.clone()).await?;
            is_owner(&record, &new)?;
            let is_left = !record.claims.is_empty() || !record.queue.is_empty();
            if record.registration.is_none() && is_left {
                // They are of an earlier volume of the name.
                rules::refuse_used(&record).map_err(|error| holders_of(&record, error))?;
            }
            if record.registration.is_none() {
                self.refuse_more_volumes(caller).await?;
            }
            let mut after = record.clone();
            if rules::put_registration(&mut after, &volume, &new)?.is_none() {
                return Ok(view::row(&record, caller));
            }
            match self.swap(&record, after, guards).await {
                Ok(Some(after)) => {
                    tracing::info!(%caller, volume = %name, "a volume was registered or changed");
                    return Ok(view::row(&after, caller));
                }
                Ok(None) => {}
                Err(error) => return Err(self.hide_name(caller, error)),
            }
        }
        Err(busy(&name))
    }

    /// Refuses a further volume of an identity that has registered or created as many as it may have.
    pub(crate) async fn refuse_more_volumes(&self, caller: &Identity) -> Result<()> {
        let most = self.config.max_volumes;
        let count = self.registry.registered_by(&caller.to_string()).await?;
        match count >= most {
            true => {
                let text = format!(
                    "no further volume: {caller} has registered or created {count}, and max-volumes is {most}"
                );
                Err(Error::new(Kind::RateLimited, text).into())
            }
            false => Ok(()),
        }
    }

    /// Refuses a registration of a volume that is another's, or that has another name.
    pub async fn refuse_of_others(
        &self,
        caller: &Identity,
        present: &Record,
        volume: &VolumeKey,
        new: &Registration,
    ) -> Result<()> {
        is_owner(present, new)?;
        match self.known_as_other(&present.name, volume).await? {
            Some(other) => Err(self.hide_name(caller, RegistryError::Conflict(Conflict::Taken(other.name)))),
            None => Ok(()),
        }
    }

    /// Returns the plugin's volume, if it has another name.
    async fn known_as_other(&self, name: &VolumeName, volume: &VolumeKey) -> Result<Option<Record>> {
        let filter = RecordFilter {
            plugin: Some(volume.plugin.clone()),
            external_id: Some(volume.handle.text().into_owned()),
            ..RecordFilter::default()
        };
        let (records, _) = self.registry.records(filter).await?;
        Ok(records.into_iter().find(|other| other.name != *name))
    }

    /// Returns the volume of a name. If there is none, and the caller asks for that, returns the plugin's volume under another name.
    pub async fn volume(&self, caller: &Identity, ask: VolumeAsk) -> Result<VolumeRow> {
        let record = match self.seen_record(caller, &ask).await {
            Err(ServerError::Refused(error))
                if error.kind == Kind::NotFound && !ask.external_id.is_empty() =>
            {
                check_name("plugin", &ask.plugin)?;
                rules::check_external_id(&ask.external_id)?;
                let name = rules::volume_name(&ask.namespace, &ask.volume)?;
                let volume = VolumeKey::new(&ask.plugin, &ask.external_id);
                let Some(other) = self.known_as_other(&name, &volume).await? else {
                    return Err(error.into());
                };
                if !self.sees(caller, &other.name.namespace) {
                    return Err(self.hide_name(caller, RegistryError::Conflict(Conflict::Taken(other.name))));
                }
                other
            }
            found => found?,
        };
        Ok(VolumeRow { mark: view::mark(&record), ..view::row(&record, caller) })
    }

    /// Reads the record of a volume for a caller that sees its namespace. Fails if there is none.
    pub(crate) async fn seen_record(&self, caller: &Identity, ask: &VolumeAsk) -> Result<Record> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require_sight(caller, &name.namespace)?;
        self.presence.here()?;
        self.require_unblocked(caller).await?;
        let record = self.registry.record(name).await?;
        if record.is_empty() {
            // The error of a volume that is not registered.
            rules::registered(&record)?;
        }
        Ok(record)
    }

    /// Makes an operator the owner of a volume that another identity has registered or created. That identity may be gone. Claims, attachments and work
    /// that is not done stay.
    pub async fn own(&self, caller: &Identity, ask: OwnAsk) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Register)?;
        self.require_operator(caller, May::Admit)?;
        for _ in 0..TRIES {
            let guards = self.guards_of(caller).await?;
            let record = self.registry.record(name.clone()).await?;
            let present = match &record.registration {
                Some(present) => present,
                None => rules::registered(&record)?,
            };
            if present.owner == caller.to_string() {
                return Ok(view::row(&record, caller));
            }
            if present.owner != ask.from {
                let text = format!("{name} has another owner than {:?}", shortened(&ask.from));
                return Err(Error::new(Kind::Busy, text).into());
            }
            self.refuse_more_volumes(caller).await?;
            let registration = Registration { owner: caller.to_string(), ..present.clone() };
            let after = Record { registration: Some(registration), ..record.clone() };
            // Nothing else keeps the earlier owner.
            tracing::warn!(%caller, volume = %name, from = present.owner, "a volume gets another owner");
            if let Some(after) = self.swap(&record, after, guards).await? {
                return Ok(view::row(&after, caller));
            }
        }
        Err(busy(&name))
    }

    /// Ends a registration of the caller's own. A volume that is not registered is deregistered already. Or returns the ID of the registration, if
    /// that is what is asked for.
    pub async fn deregister(&self, caller: &Identity, ask: Deregister) -> Result<VolumeRow> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        self.require(caller, &name.namespace, May::Register)?;
        if ask.asks_id {
            return self.registration_to_end(caller, name).await;
        }
        for _ in 0..TRIES {
            let guards = self.guards_of(caller).await?;
            let record = self.registry.record(name.clone()).await?;
            if record.registration.is_none() || has_other_id(&record, &ask.id) {
                return Ok(view::row(&Record::none(name), caller));
            }
            refuse_of_another(&record, caller)?;
            let after = rules::without_registration(&record).map_err(|error| holders_of(&record, error))?;
            // The record's revision is compared, so no claim is taken meanwhile.
            if self.swap(&record, after, guards).await?.is_some() {
                tracing::info!(%caller, volume = %name, "a volume was deregistered");
                return Ok(view::row(&Record::none(name), caller));
            }
        }
        Err(busy(&name))
    }

    /// Returns a row with the ID of the registration that a deletion or deregistration of the caller would end. Nothing else of the volume but its
    /// plugin is in the row. Without a plugin there is none.
    pub(crate) async fn registration_to_end(&self, caller: &Identity, name: VolumeName) -> Result<VolumeRow> {
        // Nothing is written. They are what a change would compare.
        self.guards_of(caller).await?;
        let record = self.registry.record(name).await?;
        refuse_of_another(&record, caller)?;
        let Record { name: VolumeName { namespace, volume }, volume: key, registration, .. } = record;
        let found = VolumeRow { namespace, volume, ..VolumeRow::default() };
        Ok(match registration {
            Some(of) => VolumeRow { plugin: key.plugin, registration_id: of.id, ..found },
            None => found,
        })
    }

    /// Returns the error of a registration whose plugin's volume has another name. The name is another namespace's business, unless the
    /// caller sees that.
    pub fn hide_name(&self, caller: &Identity, error: RegistryError) -> ServerError {
        match error {
            RegistryError::Conflict(Conflict::Taken(name)) if !self.sees(caller, &name.namespace) => {
                Error::new(Kind::AlreadyExists, "the plugin's volume is known under another name already")
                    .into()
            }
            error => error.into(),
        }
    }
}

/// Refuses a change of another's registration.
fn is_owner(record: &Record, new: &Registration) -> Result<()> {
    match record.registration.as_ref().is_some_and(|present| present.owner != new.owner) {
        true => Err(another_owner(&record.name)),
        false => Ok(()),
    }
}

/// Refuses a change of a volume that another identity has registered or created.
pub fn refuse_of_another(record: &Record, caller: &Identity) -> Result<()> {
    match record.registration.as_ref().is_some_and(|present| present.owner != caller.to_string()) {
        true => Err(another_owner(&record.name)),
        false => Ok(()),
    }
}

/// Returns whether a volume has another registration than the one with this ID. It has none if the ID is empty. Servers of an earlier version gave
/// registrations no IDs.
pub fn has_other_id(record: &Record, id: &str) -> bool {
    let is_other = |of: &Registration| !id.is_empty() && !of.id.is_empty() && of.id != id;
    record.registration.as_ref().is_some_and(is_other)
}

pub fn another_owner(name: &VolumeName) -> ServerError {
    ServerError::denied(format!("{name} was registered by another identity"))
}

/// Names the holders of a volume in an error as NODE/CONSUMER.
pub fn holders_of(record: &Record, error: Error) -> Error {
    match error.details.holders.is_empty() {
        true => error,
        false => error.with(|details| {
            let holder = |claim: &Claim| format!("{}/{}", claim.node, claim.consumer);
            details.holders = record.claims.iter().map(holder).collect();
        }),
    }
}
