//! CreateVolume. The request is in the registry before the plugin is called, and stays until the plugin has answered (CSI rule
//! 39). After a time-out and after a restart csid requests the same name with the same arguments. So every volume has a row.
//!
//! A volume in creation has no external id. Its operations queue by its name at the plugin (`VolumeKey::creating`), and its
//! record cannot be used until the id is known.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::error::{Error, Kind, Result, Step};
use crate::plugin::{Controller, Create, Created, Service, Source};
use crate::store::Durability;
use crate::store::event_kind::EventKind;
use crate::store::registry::{Blocked, Creation, Record, Registration, Standing, VolumeName, VolumeSpec};
use crate::store::rows::{Usage, VolumeKey};
use crate::volume::control::engine::Engine;
use crate::volume::control::tries::RpcFailure;
use crate::volume::errors::operation::OperationError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::events::{claim as claim_events, registration as registration_events};
use crate::volume::lifecycle::{is_asked_for_by, is_being_deleted, is_unborn, known_id, refuse_anothers};
use crate::volume::model::subject::Subject;
use crate::volume::operation::request::CallTarget;
use crate::volume::operation::running::Unfinished;
use crate::volume::operation::table::Progress;
use crate::volume::seam::Site;
use crate::volume::transitions::{
    AfterCreation, begin_creation, doom, enter_created, join_creation, not_created, refuse_unfit,
};
use crate::volume::waits::PluginWaits;

impl<S: Site> Engine<'_, S> {
    /// Enters the target's registration, or finds it, and has the plugin create the volume. `to_delete`: only the deletion of the volume
    /// needs it, so without a registration nothing is created.
    pub(in crate::volume::control) async fn create(
        &mut self,
        target: &CallTarget,
        to_delete: bool,
    ) -> Result<Record> {
        let (plugin, given) = (self.plugin(), self.site.operation().secrets.is_some());
        let name = target.name.clone();
        let wanted = &target.registration;
        // An existing record already has its source.
        let found = match self.records.registry.record(name.clone()).await?.registration {
            None if to_delete => return Err(VolumeError::NotRegistered { name }.into()),
            None => {
                let (step, abandoned) = self.until_asked();
                Some(unasked(step, abandoned, self.with_source(target)).await?)
            }
            Some(_) => None,
        };
        self.site.operation().step.set(Step::Create);
        // An absent plugin was not asked yet. A row that says so can be removed at once.
        let ready = self.records.plugins.ready(&plugin, Service::Controller, Instant::now());
        let unasked = ready.await.is_err();
        let place = self.place_of_node(&wanted.spec).await;
        let mut is_new = false;
        let entered = |record: &mut Record| {
            is_new = record.registration.is_none();
            if is_new {
                let mut new =
                    found.clone().ok_or_else(|| VolumeError::Replaced { name: record.name.clone() })?;
                if let Standing::Creating(creation) = &mut new.standing {
                    creation.unasked = unasked;
                    creation.place.clone_from(&place);
                }
                return begin_creation(record, &plugin, new).map(|()| None);
            }
            join_creation(record, &plugin, wanted, given)?;
            if to_delete {
                doom(record);
            }
            Ok(None)
        };
        let record = self.records.amend(&name, Durability::Disk, entered).await?;
        if is_unborn(&record) {
            return self.ask_for(record, is_new).await;
        }
        self.records.synced().await?;
        refuse_unfit(&record).map(|()| record)
    }

    /// Returns the target's registration with its source, after a check that the source may be used.
    async fn with_source(&self, target: &CallTarget) -> Result<Registration> {
        let (name, mut wanted) = (target.name.clone(), target.registration.clone());
        let found = self.find_source(&name, &self.plugin(), &wanted.spec, target.uid).await?;
        if let Standing::Creating(creation) = &mut wanted.standing {
            creation.source = found;
        }
        Ok(wanted)
    }

    /// Returns the external id of the volume to clone. `None`: there is none. A source must belong to the caller and to the
    /// volume's namespace (CVE-2019-11255). The source of a clone must be registered there. A snapshot belongs to the owner of
    /// its volume, but root may name any.
    async fn find_source(
        &self,
        name: &VolumeName,
        plugin: &str,
        spec: &VolumeSpec,
        uid: u32,
    ) -> Result<Option<String>> {
        if !spec.clone.is_empty() {
            let source = VolumeName { namespace: name.namespace.clone(), volume: spec.clone.clone() };
            let source = self.records.registered(&source).await?;
            if source.volume.plugin != plugin {
                let text = format!(
                    "{} is of plugin {}, and {plugin} cannot clone it",
                    source.name, source.volume.plugin
                );
                return Err(Error::invalid(text));
            }
            refuse_anothers(&source, uid)?;
            return Ok(Some(known_id(&source.volume, &Subject::Volume(source.name))?.to_owned()));
        }
        if spec.snapshot.is_empty() {
            return Ok(None);
        }
        let deadline = self.site.operation().signals.borrow().give_up;
        match self.site.is_own_snapshot(&name.namespace, &spec.snapshot, uid, deadline).await? {
            true => Ok(None),
            false => Err(VolumeError::NotOwnSnapshot { snapshot: spec.snapshot.clone() }.into()),
        }
    }

    /// Has the plugin create the volume of the record. `is_new`: the plugin was never asked for it.
    pub(in crate::volume::control) async fn ask_for(
        &mut self,
        record: Record,
        is_new: bool,
    ) -> Result<Record> {
        let name = record.name.clone();
        let Some(registration) = record.registration else {
            return Err(VolumeError::NotRegistered { name }.into());
        };
        let Standing::Creating(mut creation) = registration.standing.clone() else {
            return Err(Error::internal("what is there was to be made"));
        };
        let uid = registration.uid;
        let target = CallTarget { name: name.clone(), uid, registration, is_registered: false };
        let asked_before = !(is_new || creation.unasked);
        let begun = match creation.unasked {
            true => self.before_first_asking(&name, &target, &mut creation).await,
            false => Ok(()),
        };
        let answered = match begun {
            Ok(()) => self.ask_plugin(&target, &creation, asked_before).await,
            Err(error) => Err(RpcFailure::before(error)),
        };
        let ended = match answered {
            Ok(created) => self.born(&target, created).await,
            Err(unanswered) if unanswered.is_no(asked_before) || !(asked_before || unanswered.is_sent) => {
                self.not_born(&name).await.and(Err(unanswered.error))
            }
            Err(unanswered) => Err(unanswered.error),
        };
        // This includes an answer that the journal could not store. The retry finds the volume.
        let there = self.records.registry.record(name.clone()).await;
        let task = &self.site.volume();
        let error = match ended {
            Err(error) if there.as_ref().map_or(true, |there| is_asked_for_by(there, task)) => error,
            ended => {
                self.site.set_unfinished(Subject::Volume(target.name), None);
                return ended;
            }
        };
        let parked = !error.details.retryable;
        self.site.set_unfinished(Subject::Volume(target.name), Some(Unfinished { uid, parked }));
        self.records.note_failure(&name, &error).await?;
        Err(if parked { error } else { VolumeError::CreationGoesOn { source: error }.into() })
    }

    /// Waits for the plugin as long as a caller waits, then notes that the plugin is asked. On error it was not asked.
    async fn before_first_asking(
        &mut self,
        name: &VolumeName,
        target: &CallTarget,
        creation: &mut Creation,
    ) -> Result<()> {
        let (step, abandoned) = self.until_asked();
        unasked(step, abandoned, self.site.controller("CreateVolume")).await?;
        creation.place = self.place_of_node(&target.registration.spec).await;
        let task = self.site.volume().clone();
        let asked = |record: &mut Record| {
            let is_mine = is_asked_for_by(record, &task);
            match &mut record.registration {
                Some(Registration { standing: Standing::Creating(asked), .. }) if is_mine => {
                    asked.unasked = false;
                    asked.place.clone_from(&creation.place);
                    Ok(None)
                }
                _ => Err(VolumeError::Replaced { name: record.name.clone() }.into()),
            }
        };
        self.records.amend(name, Durability::Disk, asked).await.map(drop)
    }

    /// Returns the topology that the plugin reports for this node, for a volume whose caller requires none. Empty: the caller
    /// requires one, or the plugin reports none.
    async fn place_of_node(&self, spec: &VolumeSpec) -> BTreeMap<String, String> {
        if !spec.topologies.is_empty() {
            return BTreeMap::new();
        }
        let node = self.records.plugins.ready(&self.plugin(), Service::Node, Instant::now()).await;
        let place = node.map(|node| node.topology().clone()).unwrap_or_default();
        // As no volume can be in such a place: its row could not be sent.
        let is_carried = place.iter().all(|(key, value)| !key.contains('\0') && !value.contains('\0'));
        if is_carried { place } else { BTreeMap::new() }
    }

    /// Returns the step of the operation, and a future that ends when it is abandoned ([`unasked`]).
    fn until_asked(&self) -> (Progress, impl Future<Output = Kind> + Send + use<S>) {
        (self.site.operation().step.clone(), self.site.operation().abandoned())
    }

    async fn ask_plugin(
        &mut self,
        target: &CallTarget,
        creation: &Creation,
        asked_before: bool,
    ) -> Result<Created, RpcFailure> {
        let spec = &target.registration.spec;
        let secrets = match asked_before {
            true => self.target_secrets(target).await,
            false => {
                let (step, abandoned) = self.until_asked();
                unasked(step, abandoned, self.target_secrets(target)).await
            }
        };
        let secrets = secrets.map_err(RpcFailure::before)?;
        if creation.secrets_given && secrets.is_none() {
            let error = VolumeError::SecretsNeeded { name: target.name.clone(), call: "CreateVolume" };
            return Err(RpcFailure::before(error.into()));
        }
        let usages: Vec<Usage> =
            spec.capabilities.iter().map(|capability| target.registration.usage(*capability)).collect();
        let source = match (spec.snapshot.as_str(), creation.source.as_deref()) {
            ("", volume) => volume.map(Source::Volume),
            (snapshot, _) => Some(Source::Snapshot(snapshot)),
        };
        let place = std::slice::from_ref(&creation.place);
        let create = Create {
            name: &spec.name,
            required: creation.capacity_min,
            limit: creation.capacity_max,
            usages: &usages,
            parameters: &spec.parameters,
            source,
            topologies: match creation.place.is_empty() {
                true => &spec.topologies,
                false => place,
            },
        };
        let call = |controller: Controller, request| async move { controller.create(create, request).await };
        self.making(Step::Create, "CreateVolume", target, secrets.as_ref(), call).await
    }

    /// Enters the volume that the plugin has created.
    async fn born(&mut self, target: &CallTarget, created: Created) -> Result<Record> {
        let name = target.name.clone();
        let volume = VolumeKey::new(self.plugin(), created.external_id.as_str());
        let task = self.site.volume().clone();
        let entered = |record: &mut Record| {
            Ok(match enter_created(record, &task, &created)? {
                AfterCreation::Registered => {
                    Some(registration_events::registered(EventKind::VolumeRegistered, record))
                }
                AfterCreation::Unfit => {
                    // The volume may have existed before. csid neither uses nor deletes it without a request.
                    let Err(doubt) = refuse_unfit(record) else { return Ok(None) };
                    if let Some(registration) = &mut record.registration {
                        registration.blocked = Some(Blocked { reason: doubt.message.clone() });
                    }
                    Some(registration_events::parked(record, &doubt))
                }
                AfterCreation::Deleting | AfterCreation::NotRegistered => None,
            })
        };
        match self.records.amend(&name, Durability::Disk, entered).await {
            Ok(record) if is_being_deleted(&record) => {
                // The caller may no longer wait.
                self.site.go_on(&volume, Subject::Volume(name), target.uid);
                Ok(record)
            }
            Ok(record) => refuse_unfit(&record).map(|()| record),
            // The plugin's volume of that name is already known under another name.
            Err(error) if error.kind == Kind::AlreadyExists => {
                claim_events::log(&name, "", &error);
                self.not_born(&name).await.and(Err(error))
            }
            Err(error) => Err(error),
        }
    }

    /// Removes the row of a creation: the plugin has no such volume, or another row has it.
    pub(in crate::volume::control) async fn not_born(&mut self, name: &VolumeName) -> Result<()> {
        let task = self.site.volume().clone();
        let gone = |record: &mut Record| {
            not_created(record, &task);
            Ok(None)
        };
        self.records.amend(name, Durability::Disk, gone).await.map(drop)
    }
}

/// Waits for what is needed before the plugin is first asked. The operation ends with its last caller meanwhile.
async fn unasked<T>(
    step: Progress,
    abandoned: impl Future<Output = Kind>,
    wait: impl Future<Output = Result<T>>,
) -> Result<T> {
    step.set_unasked(true);
    let done = tokio::select! {
        biased;
        kind = abandoned => Err(OperationError::Stopped { kind }.into()),
        done = wait => done,
    };
    step.set_unasked(false);
    done
}
