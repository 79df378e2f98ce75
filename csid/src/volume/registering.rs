//! The registry of volumes: what may be registered, changed and forgotten. A change is one compare-and-swap of the volume's
//! record; a plugin is asked before, never after.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::plugin::Service;
use crate::secret::Secrets;
use crate::store::registry::{Origin, Record, Registration, Standing, Swap, VolumeName, VolumeSpec};
use crate::store::rows::{NewEvent, VolumeKey};
use crate::store::{Durability, MountFilter, StoreError};
use crate::volume::controlling::{Call, Target};
use crate::volume::creating::refuse_anothers;
use crate::volume::registered::{RegisterRequest, VolumeRequest, VolumeView};
use crate::volume::work::{Done, Work};
use crate::volume::{Shared, Volumes, Wait, claim_words as words, say};

impl Volumes {
    pub async fn register_volume(&self, request: RegisterRequest) -> Result<VolumeView> {
        let RegisterRequest { name, volume, spec, uid, secrets, wait } = request;
        self.shared.changeable()?;
        refuse_nonsense(&spec)?;
        if self.shared.plugins.view(&volume.plugin).is_none() {
            return Err(say::unknown_plugin(&volume.plugin));
        }
        self.shared.refuse_in_use_otherwise(&name, &volume)?;
        let present = self.shared.registry.record(name.clone()).await?;
        if let Some(registration) = &present.registration {
            may_change(&name, &present.volume, registration, uid, &volume, &spec)?;
        }
        if present.registration.as_ref().is_none_or(|registration| registration.spec != spec) {
            self.shared.confirm(&name, &volume, &spec, uid, secrets, wait).await?;
        }
        let registered = self
            .shared
            .amend(&name, Durability::Disk, |record| {
                let Some(present) = &mut record.registration else {
                    if record.volume != volume {
                        words::refuse_attached(record)?;
                    }
                    record.volume = volume.clone();
                    record.registration = Some(new_registration(uid, spec.clone(), Origin::Bus));
                    return Ok(Some(words::registered("volume-registered", record)));
                };
                if present.spec == spec && record.volume == volume {
                    return Ok(None);
                }
                may_change(&record.name, &record.volume, present, uid, &volume, &spec)?;
                if !record.claims.is_empty() {
                    return Err(words::in_use(record, "its registration cannot change"));
                }
                present.spec = spec.clone();
                Ok(Some(words::registered("volume-changed", record)))
            })
            .await?;
        Ok(self.shared.view(registered, Vec::new()))
    }

    /// Forget a volume; the plugin keeps it. `force`: also one that is in use, with its claims.
    pub async fn deregister_volume(&self, request: VolumeRequest, force: bool) -> Result<()> {
        self.shared.changeable()?;
        let name = request.name;
        let filter = MountFilter {
            namespace: Some(name.namespace.clone()),
            volume: Some(name.volume.clone()),
            ..MountFilter::default()
        };
        let mounts = self.shared.store.mounts(filter).await?;
        if !mounts.is_empty() {
            let holders = mounts.into_iter().map(|(row, _)| row.key.consumer).collect();
            return Err(words::mounted(&name, holders));
        }
        let gone = |record: &mut Record| {
            refuse_anothers(record, request.uid)?;
            match &record.registration {
                None => return Ok(None),
                Some(registration) if registration.origin == Origin::File => {
                    return Err(words::of_file(&record.name));
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
        self.shared.amend(&name, Durability::Disk, gone).await?;
        self.shared.synced().await
    }
}

impl Shared {
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
        spec: &VolumeSpec,
        uid: u32,
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
        let view = self.plugins.view(&volume.plugin).unwrap_or_default();
        if !view.plugin_capabilities.iter().any(|has| has == "CONTROLLER_SERVICE") {
            return Ok(());
        }
        let registration = new_registration(uid, spec.clone(), Origin::Bus);
        let target = Box::new(Target { key: name.key(""), uid, registration, is_registered: false });
        let call = Call::Validate { capabilities: spec.capabilities.clone() };
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
            Some(text) => Err(Error::new(Kind::Busy, format!("{text}; unmount it first"))),
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
pub(super) fn refuse_nonsense(spec: &VolumeSpec) -> Result<()> {
    if spec.capabilities.is_empty() {
        return Err(Error::invalid(
            "capabilities is empty; give at least one access mode and attachment mode",
        ));
    }
    if !spec.snapshot.is_empty() && !spec.clone.is_empty() {
        return Err(Error::invalid("give snapshot or clone, not both"));
    }
    Ok(())
}

/// What is not in use may change, but for what makes it the volume that it is.
fn may_change(
    name: &VolumeName,
    volume: &VolumeKey,
    present: &Registration,
    uid: u32,
    new_volume: &VolumeKey,
    new: &VolumeSpec,
) -> Result<()> {
    let exists = |what: &str| {
        let text = format!("{name} is registered with another {what}; deregister it first");
        Err(Error::new(Kind::AlreadyExists, text))
    };
    if uid != 0 && uid != present.uid {
        return Err(words::anothers(name));
    }
    if present.origin == Origin::File {
        return Err(words::of_file(name));
    }
    if present.standing != Standing::Registered {
        return Err(words::on_its_way(name));
    }
    let old = &present.spec;
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
            may_change(&name, &volume("p", "x"), present, uid, &to, spec).err().map(|error| error.kind)
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
        let of_file = Registration { origin: Origin::File, ..present.clone() };
        assert_eq!(change(&of_file, 0, volume("p", "x"), &flags), Some(Kind::NotSupported));
        let leaving =
            Registration { standing: Standing::Deleting { secrets_given: false, back: None }, ..present };
        assert_eq!(change(&leaving, 7, volume("p", "x"), &flags), Some(Kind::Busy));
    }
}
