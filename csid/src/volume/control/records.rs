//! The records of all volumes: their registrations, claims and attachments. Each change is one compare-and-swap of a record.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::plugin::Plugins;
use crate::store::Durability;
use crate::store::claim_set::ClaimSet;
use crate::store::event_kind::EventKind;
use crate::store::registry::{
    Blocked, Conflict, Origin, Record, RecordFilter, Registration, Registry, RegistryError, Standing, Swap,
    VolumeName,
};
use crate::store::rows::{NewEvent, VolumeKey};
use crate::volume::control::declarations::Declarations;
use crate::volume::errors::volume::VolumeError;
use crate::volume::events::registration as registration_events;
use crate::volume::lifecycle::{
    is_being_deleted, is_unasked, past, put, refuse_anothers, refuse_in_transition,
};
use crate::volume::operation::request::{ControllerRequest, ServersAnswer};
use crate::volume::servers::{KnownVolume, Servers};

/// A volume that can be used.
pub(in crate::volume) struct UsableVolume {
    pub(in crate::volume) record: Record,
    /// The answer of a server that this is. `None`: the journal has the volume.
    pub(in crate::volume) answer: Option<Arc<ServersAnswer>>,
}

impl UsableVolume {
    /// Returns whether the volume is as a server has answered it to an earlier call.
    pub(in crate::volume) fn is_remembered(&self) -> bool {
        self.answer.as_ref().is_some_and(|answer| answer.mark().is_some())
    }
}

/// The registry, and what changes of its records depend on. It has no mounts.
pub(in crate::volume) struct Records {
    pub(in crate::volume) registry: Arc<dyn Registry>,
    pub(in crate::volume) plugins: Plugins,
    pub(in crate::volume) config: tokio::sync::watch::Receiver<Arc<Config>>,
    /// The name of this host in claims.
    pub(in crate::volume) node: String,
    pub(in crate::volume) declarations: Declarations,
    /// The servers of the cluster. The registry has then the volumes that this node has claimed, and no other. `None`: csid is alone.
    pub(in crate::volume) servers: Option<Arc<dyn Servers>>,
    /// The id of this boot; empty until recovery has loaded the journal.
    boot: Mutex<String>,
    /// Per-plugin lock for the volume limit, held until the new claim is recorded.
    counting: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

impl Records {
    pub(in crate::volume) fn new(
        registry: Arc<dyn Registry>,
        plugins: Plugins,
        config: tokio::sync::watch::Receiver<Arc<Config>>,
        node: String,
        servers: Option<Arc<dyn Servers>>,
    ) -> Self {
        let (declarations, boot, counting) = Default::default();
        Records { registry, plugins, config, node, declarations, servers, boot, counting }
    }

    /// Refuses a claim or a mount that the cluster does not want here. What a fenced node has claimed may be another node's. A mount on a node
    /// that drains would be unmounted again.
    pub(in crate::volume) fn refuse_here(&self) -> Result<()> {
        let servers = self.servers.as_ref();
        match servers.and_then(|servers| servers.fence().or_else(|| servers.drain())) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Refuses what only a drain of this node wants, when the node drains no more.
    pub(in crate::volume) fn require_drain(&self) -> Result<()> {
        match self.servers.as_ref().and_then(|servers| servers.drain()) {
            Some(_) => Ok(()),
            None => Err(Error::new(Kind::Cancelled, "this node drains no more")),
        }
    }

    pub(in crate::volume) fn boot(&self) -> String {
        self.boot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(in crate::volume) fn set_boot(&self, boot: String) {
        *self.boot.lock().unwrap_or_else(PoisonError::into_inner) = boot;
    }

    /// Returns the lock of a plugin's volume limit.
    pub(in crate::volume) fn counting(&self, plugin: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(counting.entry(plugin.to_owned()).or_default())
    }

    /// Makes earlier changes durable. An answer that repeats an earlier one has to be as durable.
    pub(in crate::volume) async fn synced(&self) -> Result<()> {
        Ok(self.registry.sync().await?)
    }

    /// Returns the record of a volume that can be used. In a cluster a server is asked for a volume that this node has not claimed.
    pub(in crate::volume) async fn registered(&self, name: &VolumeName) -> Result<Record> {
        self.usable(name, None).await.map(|volume| volume.record)
    }

    /// Returns the volume as [`Records::registered`] does. `answer`: what a server has answered before. No server is asked again if
    /// the answer is recent, or if the server is to compare its mark.
    pub(in crate::volume) async fn usable(
        &self,
        name: &VolumeName,
        answer: Option<Arc<ServersAnswer>>,
    ) -> Result<UsableVolume> {
        let mut volume = UsableVolume { record: self.registry.record(name.clone()).await?, answer: None };
        let record = &mut volume.record;
        if let Some(servers) = self.servers.as_ref().filter(|_| record.registration.is_none()) {
            let revision = record.revision;
            let answer = match answer.filter(|answer| answer.is_recent() || answer.mark().is_some()) {
                Some(answer) => answer,
                None => Arc::new(ServersAnswer::new(servers.volume(name.clone()).await?)),
            };
            *record = answer.record().clone();
            record.revision = revision;
            volume.answer = Some(answer);
        }
        match record.registration {
            Some(_) => refuse_in_transition(record).map(|()| volume),
            None => Err(self.not_registered(&record.name)),
        }
    }

    /// Returns what a server has answered last for a volume. The server compares it with the claim. `None`: a server has to be asked.
    pub(in crate::volume) fn remembered(&self, name: &VolumeName) -> Option<Arc<ServersAnswer>> {
        let (record, mark) = self.servers.as_ref()?.remembered(name)?;
        Some(Arc::new(ServersAnswer::remembered(record, mark)))
    }

    pub(in crate::volume) fn not_registered(&self, name: &VolumeName) -> Error {
        match self.declarations.file(name) {
            Some(file) => VolumeError::NotRegisteredYet { name: name.clone(), file }.into(),
            None => VolumeError::NotRegistered { name: name.clone() }.into(),
        }
    }

    /// Returns the volumes that this node has claimed, and those attached for a scheduler.
    pub(in crate::volume) async fn claimed_here(&self, plugin: Option<&str>) -> Result<Vec<Record>> {
        let mut found = Vec::new();
        // Attachments by AttachVolume belong to no node of csid, so their node is empty.
        for node in [self.node.clone(), String::new()] {
            let (plugin, node) = (plugin.map(str::to_owned), Some(node));
            let filter = RecordFilter { plugin, node, ..RecordFilter::default() };
            found.extend(self.registry.records(filter).await?.0);
        }
        Ok(found)
    }

    /// Refuses an inline volume that is registered. An attachment of it under the same name is allowed.
    pub(in crate::volume) async fn refuse_registered(
        &self,
        name: &VolumeName,
        volume: &VolumeKey,
    ) -> Result<()> {
        let own = self.registry.record(name.clone()).await?;
        if own.registration.is_some() {
            return Err(VolumeError::Registered { name: name.clone() }.into());
        }
        if own.volume != *volume {
            VolumeError::refuse_attached(&own)?;
        }
        let filter = RecordFilter {
            plugin: Some(volume.plugin.clone()),
            external_id: Some(volume.handle.to_string()),
            ..RecordFilter::default()
        };
        match self.registry.records(filter).await?.0.into_iter().find(|record| record.name != *name) {
            Some(record) => {
                let how = if record.registration.is_some() { "registered" } else { "attached" };
                Err(VolumeError::KnownAs { name: record.name, volume: volume.clone(), how }.into())
            }
            None => Ok(()),
        }
    }

    /// Refuses an inline volume that the servers know. Nothing attaches it for an inline mount (CSI rule 20).
    pub(in crate::volume) async fn refuse_known(&self, name: &VolumeName, volume: &VolumeKey) -> Result<()> {
        let Some(servers) = &self.servers else { return Ok(()) };
        match servers.known(name.clone(), volume.clone()).await? {
            None => Ok(()),
            Some(known) if known.is_registered && known.name == *name => {
                Err(VolumeError::Registered { name: known.name }.into())
            }
            Some(KnownVolume { name, volume, is_registered }) => {
                let how = if is_registered { "registered" } else { "attached" };
                Err(VolumeError::KnownAs { name, volume, how }.into())
            }
        }
    }

    /// Refuses likewise for a call. A Delete may continue the deletion of a volume that an earlier call gave inline.
    pub(in crate::volume) async fn refuse_given(
        &self,
        own: &Record,
        volume: &VolumeKey,
        call: &ControllerRequest,
    ) -> Result<()> {
        match *call == ControllerRequest::Delete && own.volume == *volume && is_being_deleted(own) {
            true => Ok(()),
            false => self.refuse_registered(&own.name, volume).await,
        }
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
        Ok(put(record, volume, new)?.map(|kind| registration_events::registered(kind, record)))
    }

    /// Refuses a call that changes a volume of a file, and a file that changes a volume of a call.
    pub(in crate::volume) fn refuse_other_origin(&self, record: &Record, by: Origin) -> Result<()> {
        let (name, present) = (&record.name, record.registration.as_ref().map(|present| present.origin));
        let file = self.declarations.file(name);
        match (by, present) {
            (Origin::Bus, Some(Origin::File)) => Err(VolumeError::OfFile { name: name.clone(), file }.into()),
            (Origin::Bus, None) if file.is_some() => {
                Err(VolumeError::OfFile { name: name.clone(), file }.into())
            }
            (Origin::File, Some(Origin::Bus)) => Err(VolumeError::OfCall { name: name.clone() }.into()),
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
            let past = past(&before, &after);
            let events = event.into_iter().collect();
            let swap = Swap { before, after: after.clone(), past, durability };
            match fault::around("registration", self.registry.swap(swap, events)).await {
                Ok(revision) => return Ok(Record { revision, ..after }),
                Err(RegistryError::Conflict(Conflict::Stale)) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Deregisters a volume without mounts. With `volume`, only while the name means that volume.
    pub(in crate::volume) async fn deregister(
        &self,
        name: &VolumeName,
        volume: Option<&VolumeKey>,
        uid: u32,
        force: bool,
        by: Origin,
    ) -> Result<()> {
        let gone = |record: &mut Record| {
            refuse_anothers(record, uid)?;
            self.refuse_other_origin(record, by)?;
            match &record.registration {
                None => return Ok(None),
                Some(_) if volume.is_some_and(|volume| record.volume != *volume) => {
                    return Err(VolumeError::Replaced { name: record.name.clone() }.into());
                }
                Some(Registration {
                    standing: Standing::Creating(_) | Standing::Deleting { .. }, ..
                }) if !force && !is_unasked(record) => {
                    return Err(VolumeError::InTransition { name: record.name.clone() }.into());
                }
                Some(_) => {}
            }
            if !record.claims.is_empty() && !force {
                return Err(VolumeError::in_use(record).into());
            }
            record.registration = None;
            record.claims = ClaimSet::default();
            record.attachments.retain(|at| at.by_call.is_some());
            Ok(Some(registration_events::registered(EventKind::VolumeDeregistered, record)))
        };
        self.amend(name, Durability::Disk, gone).await?;
        self.synced().await
    }

    /// Notes the error of a creation or deletion in the record, and whether the error blocks further retries.
    pub(in crate::volume) async fn note_failure(&self, name: &VolumeName, error: &Error) -> Result<()> {
        let noted = |record: &mut Record| {
            let Some(registration) = &mut record.registration else { return Ok(None) };
            let blocked = (!error.details.retryable).then(|| Blocked { reason: error.message.clone() });
            let is_news = blocked.is_some() && registration.blocked != blocked;
            registration.blocked = blocked;
            registration.error = Some(error.message.clone());
            Ok(is_news.then(|| registration_events::parked(record, error)))
        };
        self.amend(name, Durability::Process, noted).await.map(drop)
    }
}
