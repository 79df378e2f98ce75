//! The registry of volumes: what may be registered, changed and forgotten. A change is one compare-and-swap of the volume's
//! record; a plugin is asked before, never after.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::plugin::{Can, Service};
use crate::secret::Secrets;
use crate::store::registry::{Origin, Record, Registration, Standing, Swap, VolumeName, VolumeSpec};
use crate::store::rows::{AttachmentMode, NewEvent, VolumeKey};
use crate::store::{Durability, MountFilter, StoreError};
use crate::volume::controlling::{Call, Target};
use crate::volume::creating::{is_unborn, refuse_anothers};
use crate::volume::requests::{RegisterRequest, VolumeRequest, VolumeView};
use crate::volume::work::{Done, Work};
use crate::volume::{Shared, Volumes, Wait, claim_words as words, say};

impl Volumes {
    pub async fn register_volume(&self, request: RegisterRequest) -> Result<VolumeView> {
        let registered = self.shared.register(request).await?;
        Ok(self.shared.view(registered, Vec::new()))
    }

    /// Forget a volume; the plugin keeps it. `force`: also one that is in use, with its claims.
    pub async fn deregister_volume(&self, request: VolumeRequest, force: bool) -> Result<()> {
        self.shared.changeable()?;
        let record = self.shared.registry.record(request.name.clone()).await?;
        // What is not in use is not touched by what its task does; what is not there yet nobody uses.
        if !force || record.registration.is_none() || is_unborn(&record) {
            return self.shared.deregister(&record.name, None, request.uid, force, Origin::Bus).await;
        }
        match self.call(request, Call::Forget).await {
            // Somebody else was faster.
            Err(error) if error.kind == Kind::NotFound => self.shared.synced().await,
            done => done.map(drop),
        }
    }
}

impl Shared {
    /// `volume`: only as long as it is this one.
    pub(super) async fn deregister(
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
            return Err(words::mounted(name, holders));
        }
        let gone = |record: &mut Record| {
            refuse_anothers(record, uid)?;
            self.refuse_other_origin(record, by)?;
            match &record.registration {
                None => return Ok(None),
                Some(_) if volume.is_some_and(|volume| record.volume != *volume) => {
                    return Err(words::changed_meanwhile(&record.name));
                }
                Some(Registration {
                    standing: Standing::Creating(_) | Standing::Deleting { .. }, ..
                }) if !force => {
                    return Err(words::on_its_way(&record.name));
                }
                Some(_) => {}
            }
            if !record.claims.is_empty() && !force {
                return Err(words::in_use(record, "release it first, or use force"));
            }
            record.registration = None;
            record.claims.clear();
            record.attachments.retain(|at| at.by_call.is_some());
            Ok(Some(words::registered("volume-deregistered", record)))
        };
        self.amend(name, Durability::Disk, gone).await?;
        self.synced().await
    }

    /// Have a volume registered so: by a call, or because a file declares it.
    pub(super) async fn register(self: &Arc<Self>, request: RegisterRequest) -> Result<Record> {
        let RegisterRequest { name, volume, spec, uid, origin, secrets, wait } = request;
        self.changeable()?;
        refuse_nonsense(&spec)?;
        if self.plugins.view(&volume.plugin).is_none() {
            return Err(say::unknown_plugin(&volume.plugin));
        }
        self.refuse_in_use_otherwise(&name, &volume)?;
        let new = new_registration(uid, spec, origin);
        let put = |record: &mut Record| self.put(record, &volume, &new);
        let present = self.registry.record(name.clone()).await?;
        if put(&mut present.clone())?.is_none() {
            return Ok(present);
        }
        self.confirm(&name, &volume, &new, secrets, wait).await?;
        // Who waited for a volume that is to be used is not the one who keeps it declared.
        let _held = self.declarations.hold().await;
        if origin == Origin::File && !self.declarations.say(&name, &volume, &new.spec) {
            return Err(self.not_registered(&name));
        }
        self.amend(&name, Durability::Disk, put).await
    }

    /// Make a record say this; `None`: it does already. An error says why it cannot.
    pub(super) fn put(
        &self,
        record: &mut Record,
        volume: &VolumeKey,
        new: &Registration,
    ) -> Result<Option<NewEvent>> {
        self.refuse_other_origin(record, new.origin)?;
        let Some(present) = &mut record.registration else {
            if record.volume != *volume {
                words::refuse_attached(record)?;
            }
            record.volume = volume.clone();
            record.registration = Some(new.clone());
            return Ok(Some(words::registered("volume-registered", record)));
        };
        may_change(&record.name, &record.volume, present, volume, new)?;
        if present.spec == new.spec {
            return Ok(None);
        }
        if !record.claims.is_empty() {
            return Err(words::in_use(record, "its registration cannot change"));
        }
        present.spec = new.spec.clone();
        Ok(Some(words::registered("volume-changed", record)))
    }

    /// What a file declares is changed there; what was registered by a call is not the file's.
    pub(super) fn refuse_other_origin(&self, record: &Record, by: Origin) -> Result<()> {
        let (name, present) = (&record.name, record.registration.as_ref().map(|present| present.origin));
        let file = self.declarations.file(name);
        match (by, present) {
            (Origin::Bus, Some(Origin::File)) => Err(words::of_file(name, file.as_deref())),
            (Origin::Bus, None) if file.is_some() => Err(words::of_file(name, file.as_deref())),
            (Origin::File, Some(Origin::Bus)) => Err(words::of_call(name)),
            _ => Ok(()),
        }
    }

    /// Change a record, read again as often as somebody else was faster; `Ok(None)`: there is nothing to change. An error
    /// changes nothing.
    pub(super) async fn amend(
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
            let past = words::past(&before, &after);
            let events = event.into_iter().collect();
            let swap = Swap { before, after: after.clone(), past, events, durability };
            match fault::around("registration", self.registry.swap(swap)).await {
                Ok(revision) => return Ok(Record { revision, ..after }),
                Err(StoreError::Stale) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The plugin runs, has the volume, and confirms its capabilities. One without a controller cannot be asked.
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
        let call = Call::Validate { capabilities: registration.spec.capabilities.clone() };
        let target = Box::new(Target { key: name.key(""), uid, registration, is_registered: false });
        let answer = self.ask(volume, uid, Work::Call { target, call, secrets }, wait)?;
        match self.answered(answer).await {
            Ok(Done::Validated(Err(why))) => Err(words::not_confirmed(name, &why)),
            Ok(_) => Ok(()),
            Err(error) if error.details.grpc_code == Some(tonic::Code::NotFound as u32) => {
                Err(Error { kind: Kind::NotFound, ..error })
            }
            Err(error) => Err(error),
        }
    }

    /// One name for one external id, and one external id for one name, also of what is in use inline.
    pub(super) fn refuse_in_use_otherwise(&self, name: &VolumeName, volume: &VolumeKey) -> Result<()> {
        match self.directory.in_use(name, volume) {
            None => Ok(()),
            Some(text) => Err(Error::new(
                Kind::Busy,
                format!("{text}, and in use so; ask for it by that name, or end that use first"),
            )),
        }
    }
}

pub(super) fn new_registration(uid: u32, spec: VolumeSpec, origin: Origin) -> Registration {
    Registration {
        uid,
        spec,
        standing: Standing::Registered,
        origin,
        capacity: 0,
        pending_expansion: None,
        parked: String::new(),
        error: String::new(),
    }
}

/// What is known of a volume that is only attached.
pub(super) fn unregistered(uid: u32) -> Registration {
    new_registration(uid, VolumeSpec::default(), Origin::Bus)
}

/// What no volume is.
pub fn refuse_nonsense(spec: &VolumeSpec) -> Result<()> {
    if spec.capabilities.is_empty() {
        return Err(Error::invalid(
            "capabilities is empty; give at least one access mode and attachment mode",
        ));
    }
    if !spec.snapshot.is_empty() && !spec.clone.is_empty() {
        return Err(Error::invalid("give snapshot or clone, not both"));
    }
    if spec.capabilities.iter().any(|of| of.attachment_mode == AttachmentMode::FileSystem) {
        return Ok(());
    }
    let of_file_systems = [
        ("fs-type", spec.fs_type.is_empty()),
        ("mount-flags", spec.mount_flags.is_empty()),
        ("mount-group", spec.mount_group.is_empty()),
    ];
    match of_file_systems.into_iter().find(|(_, absent)| !absent) {
        Some((key, _)) => {
            Err(Error::invalid(format!("{key} means nothing for a volume that is block-device only")))
        }
        None => Ok(()),
    }
}

/// What is not in use may change, but for what makes it the volume that it is.
fn may_change(
    name: &VolumeName,
    volume: &VolumeKey,
    present: &Registration,
    new_volume: &VolumeKey,
    new: &Registration,
) -> Result<()> {
    let exists = |what: &str| {
        let first = match new.origin {
            Origin::Bus => "deregister it first",
            Origin::File => {
                "remove the file and reload first, so that it is deregistered, or give the new one another id"
            }
        };
        let text = format!("{name} is registered with another {what}; {first}");
        Err(Error::new(Kind::AlreadyExists, text))
    };
    if new.uid != 0 && new.uid != present.uid {
        return Err(words::anothers(name));
    }
    if present.standing != Standing::Registered {
        return Err(words::on_its_way(name));
    }
    let (old, new) = (&present.spec, &new.spec);
    match () {
        () if volume.plugin != new_volume.plugin => exists("plugin"),
        () if volume.external_id != new_volume.external_id => exists("external-id"),
        () if old.snapshot != new.snapshot => exists("snapshot"),
        () if old.clone != new.clone => exists("clone"),
        () if old.parameters != new.parameters => exists("parameters"),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_a_volume_what_it_is_never_changes_and_is_its_owners() {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        let volume = |plugin: &str, id: &str| VolumeKey { plugin: plugin.into(), external_id: id.into() };
        let present = new_registration(7, VolumeSpec::default(), Origin::Bus);
        let change = |present: &Registration, uid, to: VolumeKey, spec: &VolumeSpec| {
            let new = new_registration(uid, spec.clone(), Origin::Bus);
            may_change(&name, &volume("p", "x"), present, &to, &new).err().map(|error| error.kind)
        };
        let same = VolumeSpec::default();
        let flags = VolumeSpec { mount_flags: vec!["noatime".into()], ..VolumeSpec::default() };
        let clone = VolumeSpec { clone: "y".into(), ..VolumeSpec::default() };
        let snapshot = VolumeSpec { snapshot: "y".into(), ..VolumeSpec::default() };
        let parameters =
            VolumeSpec { parameters: [("a".into(), "b".into())].into(), ..VolumeSpec::default() };
        for (uid, to, spec, refused) in [
            (7, volume("p", "x"), &flags, None),
            (0, volume("p", "x"), &flags, None),
            (8, volume("p", "x"), &flags, Some(Kind::NotAuthorized)),
            (7, volume("q", "x"), &same, Some(Kind::AlreadyExists)),
            (7, volume("p", "y"), &same, Some(Kind::AlreadyExists)),
            (7, volume("p", "x"), &clone, Some(Kind::AlreadyExists)),
            (7, volume("p", "x"), &snapshot, Some(Kind::AlreadyExists)),
            (7, volume("p", "x"), &parameters, Some(Kind::AlreadyExists)),
        ] {
            assert_eq!(change(&present, uid, to, spec), refused);
        }
        let leaving =
            Registration { standing: Standing::Deleting { secrets_given: false, back: None }, ..present };
        assert_eq!(change(&leaving, 7, volume("p", "x"), &flags), Some(Kind::Busy));
    }
}
