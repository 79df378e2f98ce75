//! CreateVolume. What is asked of the plugin is in the registry before, and stays there until the plugin has answered (CSI rule
//! 39): the same name with the same wishes is asked for again, in the call's time and after it, whatever happens to csid. So
//! there is never a volume that no row knows.
//!
//! A volume that is not there yet has no external id to queue by: it queues by its name at the plugin (`paths::unborn`). While
//! its record has no external id, nobody else can use it.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::plugin::{Can, Controller, Create, Created, Source};
use crate::secret::Secrets;
use crate::store::Durability;
use crate::store::registry::{Creation, Origin, Record, Registration, Standing, VolumeName, VolumeSpec};
use crate::store::rows::{Usage, VolumeKey};
use crate::volume::controlling::{Call, Target};
use crate::volume::drive::Drive;
use crate::volume::journalled::Unfinished;
use crate::volume::registering::{new_registration, refuse_nonsense};
use crate::volume::requests::{CreateRequest, VolumeView};
use crate::volume::unanswered::Unanswered;
use crate::volume::work::{Done, Work};
use crate::volume::{Shared, Volumes, Wait, claim_words as words, paths, say};

impl Volumes {
    pub async fn create_volume(&self, request: CreateRequest) -> Result<VolumeView> {
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
            spec.name = paths::name_at_plugin(&shared.node, &name);
        }
        let secrets_given = secrets.is_some();
        let creation = Creation {
            capacity_min,
            capacity_max,
            register,
            secrets_given,
            source: String::new(),
            sourceless: false,
        };
        let record = shared.registry.record(name.clone()).await?;
        shared.refuse_other_origin(&record, Origin::Bus)?;
        // What is there needs no plugin to be told of.
        if record.registration.is_none() {
            shared.refuse_if_it_cannot(&plugin)?;
            let volume = VolumeKey { plugin: plugin.clone(), external_id: String::new() };
            shared.refuse_in_use_otherwise(&name, &volume)?;
        }
        let registration = Registration {
            standing: Standing::Creating(creation),
            ..new_registration(uid, spec, Origin::Bus)
        };
        let create = Call::Create { to_delete: false };
        let record = self.creation(name, &plugin, create, registration, secrets, (uid, wait)).await?;
        if !register {
            self.forget_fetched(&record.name).await?;
        }
        Ok(shared.view(record, Vec::new()))
    }

    /// Have a creation come to its end, by [`Call::Create`]; its record then.
    pub(super) async fn creation(
        &self,
        name: VolumeName,
        plugin: &str,
        call: Call,
        registration: Registration,
        secrets: Option<Secrets>,
        by: (u32, Wait),
    ) -> Result<Record> {
        let (uid, wait) = by;
        let task = paths::unborn(plugin, &registration.spec.name);
        let target = Box::new(Target { key: name.key(""), uid, registration, is_registered: false });
        let work = Work::Call { target, call, secrets };
        let answer = self.shared.ask(&task, uid, work, wait)?;
        match self.shared.answered(answer).await? {
            Done::Created(record) => Ok(*record),
            _ => Err(Error::internal("a creation was answered without its volume")),
        }
    }

    /// The caller keeps the row from here on. Should his answer be lost, he asks again, and the plugin gives the same volume
    /// for the same name.
    async fn forget_fetched(&self, name: &VolumeName) -> Result<()> {
        let forget = |record: &mut Record| {
            if let Some(Registration { standing: Standing::Creating(_), .. }) = &record.registration
                && !record.volume.external_id.is_empty()
            {
                record.registration = None;
            }
            Ok(None)
        };
        self.shared.amend(name, Durability::Disk, forget).await.map(drop)
    }
}

impl Shared {
    /// What a plugin is known not to offer is not waited for.
    fn refuse_if_it_cannot(&self, plugin: &str) -> Result<()> {
        if self.plugins.view(plugin).is_none() {
            return Err(say::unknown_plugin(plugin));
        }
        for what @ (Can::Plugin(name) | Can::Node(name) | Can::Controller(name)) in
            [Can::Plugin("CONTROLLER_SERVICE"), Can::Controller("CREATE_DELETE_VOLUME")]
        {
            if self.plugins.can(plugin, what) == Some(false) {
                return Err(words::cannot_create(plugin, name));
            }
        }
        Ok(())
    }

    /// Say in the record what a creation or deletion failed of, and whether it rests for that.
    pub(super) async fn note_failure(&self, name: &VolumeName, error: &Error) -> Result<()> {
        let noted = |record: &mut Record| {
            let Some(registration) = &mut record.registration else { return Ok(None) };
            let parked = if error.details.retryable { "" } else { error.message.as_str() };
            let is_news = !parked.is_empty() && registration.parked != parked;
            parked.clone_into(&mut registration.parked);
            registration.error.clone_from(&error.message);
            Ok(is_news.then(|| words::parked(record, error)))
        };
        self.amend(name, Durability::Process, noted).await.map(drop)
    }

    /// The plugin's id of the volume that is to be cloned. A source is the caller's own, and of the volume's namespace
    /// (CVE-2019-11255): a clone's is registered there; a snapshot is its volume's, but root may name any.
    async fn find_source(
        &self,
        name: &VolumeName,
        plugin: &str,
        spec: &VolumeSpec,
        uid: u32,
        secrets: Option<&Secrets>,
        deadline: Instant,
    ) -> Result<String> {
        if !spec.clone.is_empty() {
            let source = VolumeName { namespace: name.namespace.clone(), volume: spec.clone.clone() };
            let source = self.registered(&source.key("")).await?;
            if source.volume.plugin != plugin {
                let text = format!(
                    "{} is of plugin {}, and {plugin} cannot clone it",
                    source.name, source.volume.plugin
                );
                return Err(Error::invalid(text));
            }
            refuse_anothers(&source, uid)?;
            return Ok(source.volume.external_id);
        }
        if spec.snapshot.is_empty() {
            return Ok(String::new());
        }
        let namespace = Some(name.namespace.as_str());
        match self.is_own_snapshot(plugin, namespace, &spec.snapshot, uid, secrets, deadline).await? {
            true => Ok(String::new()),
            false => Err(words::not_own_snapshot(&spec.snapshot)),
        }
    }
}

/// The plugin has not told its id yet.
pub(super) fn is_unborn(record: &Record) -> bool {
    let standing = record.registration.as_ref().map(|registration| &registration.standing);
    matches!(standing, Some(Standing::Creating(_))) && record.volume.external_id.is_empty()
}

/// The task that a record's volume has.
pub(super) fn task_of(record: &Record) -> VolumeKey {
    match &record.registration {
        Some(registration) if is_unborn(record) => {
            paths::unborn(&record.volume.plugin, &registration.spec.name)
        }
        _ => record.volume.clone(),
    }
}

/// This task has the plugin make it. A creation that was forgotten by force may find another one under its name.
fn is_asked_for_by(record: &Record, task: &VolumeKey) -> bool {
    is_unborn(record) && task_of(record) == *task
}

/// What is another's is managed by him and by root.
pub(super) fn refuse_anothers(record: &Record, uid: u32) -> Result<()> {
    match &record.registration {
        Some(registration) if uid != 0 && uid != registration.uid => Err(words::anothers(&record.name)),
        _ => Ok(()),
    }
}

/// Why what is there is not what the same CreateVolume made, or makes. The credential is a common key.
fn refuse_other(record: &Record, plugin: &str, wanted: &Registration) -> Result<()> {
    let (Some(present), Standing::Creating(asked)) = (&record.registration, &wanted.standing) else {
        return Ok(());
    };
    refuse_anothers(record, wanted.uid)?;
    let fits = match &present.standing {
        Standing::Deleting { .. } => return Err(words::on_its_way(&record.name)),
        Standing::Creating(creation) => {
            let options = |of: &Creation| (of.capacity_min, of.capacity_max, of.register);
            options(creation) == options(asked)
        }
        Standing::Registered => {
            let has = present.capacity;
            let fits = has >= asked.capacity_min && (asked.capacity_max == 0 || has <= asked.capacity_max);
            asked.register && (has == 0 || fits)
        }
    };
    let mut spec = VolumeSpec {
        context: BTreeMap::new(),
        credential: wanted.spec.credential.clone(),
        ..present.spec.clone()
    };
    // The plugin has answered where it is.
    if !is_unborn(record) {
        spec.topologies.clone_from(&wanted.spec.topologies);
    }
    match fits && record.volume.plugin == plugin && spec == wanted.spec {
        true => Ok(()),
        false => Err(words::created_otherwise(&record.name)),
    }
}

impl Drive<'_> {
    /// Enter the target's registration, or find it, and have the plugin make the volume.
    pub(super) async fn create(&mut self, target: &Target) -> Result<Record> {
        let (plugin, given) = (self.plugin(), self.secrets.is_some());
        let name = VolumeName::of(&target.key);
        let wanted = &target.registration;
        // What is there already has its source.
        let found = match self.shared.registry.record(name.clone()).await?.registration {
            None => Some(self.with_source(target).await?),
            Some(_) => None,
        };
        let mut is_new = false;
        let entered = |record: &mut Record| {
            is_new = record.registration.is_none();
            if is_new {
                // What is attached under this name is another volume.
                words::refuse_attached(record)?;
                let new = found.clone().ok_or_else(|| words::changed_meanwhile(&record.name))?;
                record.volume = VolumeKey { plugin: plugin.clone(), external_id: String::new() };
                record.registration = Some(new);
                return Ok(None);
            }
            refuse_other(record, &plugin, wanted)?;
            if is_unborn(record)
                && let Some(Registration { spec, standing: Standing::Creating(creation), parked, .. }) =
                    &mut record.registration
            {
                creation.secrets_given |= given;
                parked.clear();
                if wanted.spec.credential.is_some() {
                    spec.credential.clone_from(&wanted.spec.credential);
                }
            }
            Ok(None)
        };
        let record = self.shared.amend(&name, Durability::Disk, entered).await?;
        if is_unborn(&record) {
            return self.ask_for(record, is_new).await;
        }
        self.shared.synced().await?;
        match record.registration.as_ref().map(|registration| &registration.standing) {
            Some(Standing::Creating(creation)) if creation.sourceless => {
                Err(words::not_from_source(&record.name, &record.volume.external_id))
            }
            _ => Ok(record),
        }
    }

    /// What is wanted, with its source as it is found, and may be used, now.
    async fn with_source(&self, target: &Target) -> Result<Registration> {
        let (name, mut wanted) = (VolumeName::of(&target.key), target.registration.clone());
        let (plugin, give_up) = (self.plugin(), self.control.borrow().give_up);
        let secrets = self.secrets.as_ref();
        let found =
            self.shared.find_source(&name, &plugin, &wanted.spec, target.uid, secrets, give_up).await?;
        if let Standing::Creating(creation) = &mut wanted.standing {
            creation.source = found;
        }
        Ok(wanted)
    }

    /// Have the plugin make what the record says; `is_new`: it was never asked for it.
    pub(super) async fn ask_for(&mut self, record: Record, is_new: bool) -> Result<Record> {
        let name = record.name.clone();
        let Some(registration) = record.registration else { return Err(say::not_registered(&name.key(""))) };
        let Standing::Creating(creation) = registration.standing.clone() else {
            return Err(Error::internal("what is there was to be made"));
        };
        let (key, uid) = (name.key(""), registration.uid);
        let target = Target { key, uid, registration, is_registered: false };
        let ended = match self.ask_plugin(&target, &creation).await {
            Ok(created) => self.born(&target, created).await,
            Err(unanswered) if unanswered.is_no(!is_new) => {
                self.not_born(&name).await.and(Err(unanswered.error))
            }
            Err(unanswered) => Err(unanswered.error),
        };
        // Also one that the journal could not take: it is asked for again, and found.
        let there = self.shared.registry.record(name.clone()).await;
        let task = &self.rows.volume().row.key;
        let error = match ended {
            Err(error) if there.as_ref().map_or(true, |there| is_asked_for_by(there, task)) => error,
            ended => {
                self.rows.set_unfinished(target.key, None);
                return ended;
            }
        };
        let parked = !error.details.retryable;
        self.rows.set_unfinished(target.key, Some(Unfinished { uid, parked }));
        self.shared.note_failure(&name, &error).await?;
        Err(if parked { error } else { words::goes_on(error) })
    }

    async fn ask_plugin(&mut self, target: &Target, creation: &Creation) -> Result<Created, Unanswered> {
        let spec = &target.registration.spec;
        let secrets = self.target_secrets(target).await.map_err(Unanswered::before)?;
        if creation.secrets_given && secrets.is_none() {
            let error = words::secrets_again(&VolumeName::of(&target.key), "CreateVolume");
            return Err(Unanswered::before(error));
        }
        let usages: Vec<Usage> =
            spec.capabilities.iter().map(|capability| target.registration.usage(*capability)).collect();
        let source = match (spec.snapshot.as_str(), creation.source.as_str()) {
            ("", "") => None,
            ("", volume) => Some(Source::Volume(volume)),
            (snapshot, _) => Some(Source::Snapshot(snapshot)),
        };
        let create = Create {
            name: &spec.name,
            required: creation.capacity_min,
            limit: creation.capacity_max,
            usages: &usages,
            parameters: &spec.parameters,
            source,
            topologies: &spec.topologies,
        };
        let call = |controller: Controller, request| async move { controller.create(create, request).await };
        self.controlled("create", "CreateVolume", target, secrets.as_ref(), call).await
    }

    /// The plugin has answered: the volume is there.
    async fn born(&mut self, target: &Target, created: Created) -> Result<Record> {
        let name = VolumeName::of(&target.key);
        let volume = VolumeKey { plugin: self.plugin(), external_id: created.external_id.clone() };
        let task = self.rows.volume().row.key.clone();
        let entered = |record: &mut Record| {
            let not_needed = || words::made_and_not_needed(&name, &volume.external_id);
            let is_anothers = record.registration.is_some() && !is_asked_for_by(record, &task);
            // Forgotten by force, its name may have become that of what is attached.
            if is_anothers || !record.attachments.is_empty() || !record.claims.is_empty() {
                return Err(not_needed());
            }
            // One that was forgotten by force meanwhile is there all the same.
            let registration = record.registration.get_or_insert_with(|| target.registration.clone());
            let Standing::Creating(creation) = &mut registration.standing else { return Err(not_needed()) };
            let register = creation.register;
            creation.sourceless = !created.from_source;
            registration.spec.context.clone_from(&created.context);
            registration.spec.topologies.clone_from(&created.topologies);
            registration.capacity = created.capacity;
            registration.parked.clear();
            registration.error.clear();
            record.volume = volume.clone();
            if !created.from_source {
                // It may be empty, and it may have been there before: it is neither used nor deleted without being asked.
                let doubt = words::not_from_source(&name, &volume.external_id);
                registration.parked.clone_from(&doubt.message);
                return Ok(Some(words::parked(record, &doubt)));
            }
            if !register {
                return Ok(None);
            }
            registration.standing = Standing::Registered;
            Ok(Some(words::registered("volume-registered", record)))
        };
        match self.shared.amend(&name, Durability::Disk, entered).await {
            Ok(record) if created.from_source => Ok(record),
            Ok(_) => Err(words::not_from_source(&name, &volume.external_id)),
            // The plugin's volume of that name is known as another one.
            Err(error) if error.kind == Kind::AlreadyExists => {
                words::log(&target.key, &error);
                self.not_born(&name).await.and(Err(error))
            }
            Err(error) => Err(error),
        }
    }

    /// It is known that there is no volume, or that it is another row's.
    async fn not_born(&mut self, name: &VolumeName) -> Result<()> {
        let task = self.rows.volume().row.key.clone();
        let gone = |record: &mut Record| {
            if is_asked_for_by(record, &task) {
                record.registration = None;
            }
            Ok(None)
        };
        self.shared.amend(name, Durability::Disk, gone).await.map(drop)
    }
}

#[cfg(test)]
#[path = "creating_tests.rs"]
mod tests;
