//! Predicates on the record of a volume: its lifecycle from creation to deletion, and which uid may change it.

use crate::error::{Error, Kind, Result};
use crate::store::event_kind::EventKind;
use crate::store::registry::{
    AttachSecrets, Attachment, Capability, Claim, ClaimState, Creation, Heal, Origin, Record, Registration,
    SnapshotWish, Standing, Use, VolumeName, VolumeSpec,
};
use crate::store::rows::{AccessMode, AttachmentMode, VolumeKey};
use crate::store::volume_handle::VolumeHandle;
use crate::volume::errors::claim::ClaimError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::model::claim::{ClaimAction, ClaimEffect};
use crate::volume::model::subject::{ClaimKey, Subject};

/// Returns whether the volume is being created and its external id is unknown.
pub(in crate::volume) fn is_unborn(record: &Record) -> bool {
    let standing = record.registration.as_ref().map(|registration| &registration.standing);
    matches!(standing, Some(Standing::Creating(_))) && record.volume.handle.is_creating()
}

/// Returns whether the plugin was never asked to create the volume.
pub(in crate::volume) fn is_unasked(record: &Record) -> bool {
    let standing = record.registration.as_ref().map(|registration| &registration.standing);
    matches!(standing, Some(Standing::Creating(Creation { unasked: true, .. })))
}

/// Returns whether the creation in `record` belongs to the queue `task`. After a forced Forget another creation may use the name.
pub(in crate::volume) fn is_asked_for_by(record: &Record, task: &VolumeKey) -> bool {
    is_unborn(record) && record.volume == *task
}

/// Returns the id by which an RPC names the volume. An error: no RPC can name it.
pub(in crate::volume) fn known_id<'a>(volume: &'a VolumeKey, subject: &Subject) -> Result<&'a str> {
    match &volume.handle {
        VolumeHandle::Known(id) => Ok(id),
        VolumeHandle::Creating { .. } => Err(VolumeError::InTransition { name: subject.volume() }.into()),
        VolumeHandle::Lost { .. } => Err(VolumeError::unidentified(volume, subject).into()),
    }
}

/// Refuses a uid that is neither root nor the owner of the registration.
pub(in crate::volume) fn refuse_anothers(record: &Record, uid: u32) -> Result<()> {
    match &record.registration {
        Some(registration) if uid != 0 && uid != registration.uid => {
            Err(VolumeError::OtherOwner { name: record.name.clone() }.into())
        }
        _ => Ok(()),
    }
}

/// Refuses a CreateVolume whose arguments differ from those of the volume under that name. The credential may differ.
pub(in crate::volume) fn refuse_other(record: &Record, plugin: &str, wanted: &Registration) -> Result<()> {
    let (Some(present), Standing::Creating(asked)) = (&record.registration, &wanted.standing) else {
        return Ok(());
    };
    refuse_anothers(record, wanted.uid)?;
    let short = match &present.standing {
        Standing::Deleting { .. } => {
            return Err(VolumeError::InTransition { name: record.name.clone() }.into());
        }
        Standing::Creating(creation) if creation.to_delete && !asked.to_delete => {
            return Err(VolumeError::InTransition { name: record.name.clone() }.into());
        }
        Standing::Creating(creation) => {
            let is_other = [
                ("capacity-min", creation.capacity_min != asked.capacity_min),
                ("capacity-max", creation.capacity_max != asked.capacity_max),
                ("register", creation.register != asked.register),
            ];
            is_other.into_iter().find_map(|(option, differs)| differs.then_some(option))
        }
        Standing::Registered => {
            let is_over = |has: u64| asked.capacity_max > 0 && has > asked.capacity_max;
            let is_other = [
                ("capacity-min", present.capacity.is_some_and(|has| has < asked.capacity_min)),
                ("capacity-max", present.capacity.is_some_and(is_over)),
                ("register", !asked.register),
            ];
            is_other.into_iter().find_map(|(option, differs)| differs.then_some(option))
        }
    };
    let wants = &wanted.spec;
    // The plugin gives the context, and the credential may differ.
    let VolumeSpec {
        name,
        capabilities,
        fs_type,
        mount_flags,
        mount_group,
        context: _,
        parameters,
        topologies,
        credential: _,
        heal,
        suid,
        dev,
        snapshot,
        clone,
    } = &present.spec;
    let is_other = [
        ("plugin", record.volume.plugin != plugin),
        ("name", *name != wants.name),
        ("capabilities", *capabilities != wants.capabilities),
        ("fs-type", *fs_type != wants.fs_type),
        ("mount-flags", *mount_flags != wants.mount_flags),
        ("mount-group", *mount_group != wants.mount_group),
        ("parameters", *parameters != wants.parameters),
        // The plugin has answered with the topology, so the requested one is not compared.
        ("topologies", is_unborn(record) && *topologies != wants.topologies),
        ("heal", *heal != wants.heal),
        ("suid", *suid != wants.suid),
        ("dev", *dev != wants.dev),
        ("snapshot", *snapshot != wants.snapshot),
        ("clone", *clone != wants.clone),
    ];
    let other = is_other.into_iter().find_map(|(option, differs)| differs.then_some(option));
    match short.or(other) {
        None => Ok(()),
        Some(option) => Err(VolumeError::CreatedOtherwise { name: record.name.clone(), option }.into()),
    }
}

/// Returns whether a deletion has begun.
pub(in crate::volume) fn is_being_deleted(record: &Record) -> bool {
    let standing = record.registration.as_ref().map(|registration| &registration.standing);
    matches!(standing, Some(Standing::Deleting { .. }))
}

/// Refuses a registered volume that is being created or deleted.
pub(in crate::volume) fn refuse_in_transition(record: &Record) -> Result<()> {
    let busy = |why: &str| Err(Error::new(Kind::Busy, format!("{} {why}", record.name)));
    match record.registration.as_ref().map(|registration| &registration.standing) {
        None | Some(Standing::Registered) => Ok(()),
        Some(Standing::Creating(_)) => busy("is being created"),
        Some(Standing::Deleting { .. }) => busy("is being deleted"),
    }
}

/// Changes a record to this registration, and returns the kind of the event. `None`: the record has it already. An error says why
/// it cannot be changed.
pub(in crate::volume) fn put(
    record: &mut Record,
    volume: &VolumeKey,
    new: &Registration,
) -> Result<Option<EventKind>> {
    let Some(present) = &mut record.registration else {
        if record.volume != *volume {
            VolumeError::refuse_attached(record)?;
        }
        record.volume = volume.clone();
        record.registration = Some(new.clone());
        return Ok(Some(EventKind::VolumeRegistered));
    };
    may_change(&record.name, &record.volume, present, volume, new)?;
    if present.spec == new.spec {
        return Ok(None);
    }
    if !record.claims.is_empty() {
        let (name, holders) = (record.name.clone(), record.consumers());
        return Err(VolumeError::RegistrationInUse { name, holders }.into());
    }
    present.spec = new.spec.clone();
    Ok(Some(EventKind::VolumeChanged))
}

/// Returns the claims that were acknowledged and no longer exist.
pub(in crate::volume) fn past(before: &Record, after: &Record) -> Vec<Claim> {
    let gone = before.claims.differences(&after.claims).into_iter().filter(|(_, has)| has.is_none());
    gone.filter_map(|(had, _)| had).filter(|claim| claim.kept).cloned().collect()
}

pub(in crate::volume) fn new_registration(uid: u32, spec: VolumeSpec, origin: Origin) -> Registration {
    Registration {
        uid,
        owner: String::new(),
        id: String::new(),
        spec,
        standing: Standing::Registered,
        origin,
        capacity: None,
        pending_expansion: None,
        owed_expansion: None,
        expanded_here: None,
        snapshot: None,
        blocked: None,
        error: None,
    }
}

/// Makes the registration of a volume that is only attached.
pub(in crate::volume) fn unregistered(uid: u32) -> Registration {
    new_registration(uid, VolumeSpec::default(), Origin::Bus)
}

/// Refuses a spec that contradicts itself.
pub fn refuse_nonsense(spec: &VolumeSpec) -> Result<()> {
    if spec.capabilities.is_empty() {
        return Err(Error::invalid("capabilities is empty; at least one is needed"));
    }
    if !spec.snapshot.is_empty() && !spec.clone.is_empty() {
        return Err(Error::invalid("snapshot and clone are both given; at most one is possible"));
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

/// Refuses a change of a field that identifies the volume, and a change by a uid other than its owner and root. A volume in
/// creation or deletion cannot be changed.
pub(in crate::volume) fn may_change(
    name: &VolumeName,
    volume: &VolumeKey,
    present: &Registration,
    new_volume: &VolumeKey,
    new: &Registration,
) -> Result<()> {
    let exists = |what: &str| {
        let text = format!("{name} is registered with another {what}");
        Err(Error::new(Kind::AlreadyExists, text))
    };
    if new.uid != 0 && new.uid != present.uid {
        return Err(VolumeError::OtherOwner { name: name.clone() }.into());
    }
    if present.standing != Standing::Registered {
        return Err(VolumeError::InTransition { name: name.clone() }.into());
    }
    let (old, new) = (&present.spec, &new.spec);
    match () {
        () if volume.plugin != new_volume.plugin => exists("plugin"),
        () if volume.handle != new_volume.handle => exists("external-id"),
        () if old.snapshot != new.snapshot => exists("snapshot"),
        () if old.clone != new.clone => exists("clone"),
        () if old.parameters != new.parameters => exists("parameters"),
        () => Ok(()),
    }
}

pub(in crate::volume) fn new_claim(consumer: &str, node: &str, uid: u32, usage: Use) -> Claim {
    Claim {
        consumer: consumer.to_owned(),
        node: node.to_owned(),
        uid,
        usage,
        state: ClaimState::Pending,
        kept: false,
        releasing: false,
        blocked: None,
        by_mount: false,
        bound: None,
        credential: None,
        secrets_given: false,
        error: None,
        since_usec: 0,
        released_usec: 0,
        id: String::new(),
        call: String::new(),
        keeper: String::new(),
        adopted: false,
        grant: None,
        modify_index: 0,
    }
}

/// The modes that a claim asks for. `None`: any.
pub(in crate::volume) struct ModeFilter {
    pub(in crate::volume) access_mode: Option<AccessMode>,
    pub(in crate::volume) attachment_mode: Option<AttachmentMode>,
}

impl ModeFilter {
    pub(in crate::volume) fn fits(&self, capability: Capability) -> bool {
        self.access_mode.is_none_or(|mode| mode == capability.access_mode)
            && self.attachment_mode.is_none_or(|mode| mode == capability.attachment_mode)
    }

    /// Refuses a claim with another mode than these.
    pub(in crate::volume) fn refuse_unlike(&self, present: &Claim, name: &VolumeName) -> Result<()> {
        let Capability { access_mode, attachment_mode } = present.usage.capability;
        let option = match () {
            () if self.access_mode.is_some_and(|mode| mode != access_mode) => "access-mode",
            () if self.attachment_mode.is_some_and(|mode| mode != attachment_mode) => "attachment-mode",
            () => return Ok(()),
        };
        Err(ClaimError::ClaimedOtherwise { claim: ClaimKey::new(name, &present.consumer), option }.into())
    }

    /// Chooses the capability that other claims use, else the first registered one that fits.
    pub(in crate::volume) fn choose(&self, record: &Record) -> Result<Capability> {
        let capabilities =
            record.registration.iter().flat_map(|registration| &registration.spec.capabilities);
        let used = record.claims.iter().map(|claim| &claim.usage.capability);
        used.chain(capabilities)
            .copied()
            .find(|capability| self.fits(*capability))
            .ok_or_else(|| ClaimError::NoCapability { name: record.name.clone() }.into())
    }
}

/// Returns whether the volume's policy is to mount it again after its server is gone. An inline volume has no policy.
pub(in crate::volume) fn is_healed(record: &Record) -> bool {
    record.registration.as_ref().is_some_and(|registration| registration.spec.heal == Heal::Remount)
}

pub(in crate::volume) fn is_of_file(record: &Record) -> bool {
    record.registration.as_ref().is_some_and(|registration| registration.origin == Origin::File)
}

/// Enters the secrets that the attach of an effect has into the attachment. The detach needs them, too. `given`: the call has secrets.
pub fn enter_attach_secrets(record: &mut Record, effect: &ClaimEffect, given: bool) {
    let ClaimEffect { action: ClaimAction::Attach, consumer, node, from, .. } = effect else { return };
    // The detach also needs the secrets of an earlier attach.
    let had = match from {
        None => AttachSecrets::default(),
        Some(_) => record.attach_secrets(node),
    };
    let claim = record.claim_at(consumer, node).or(record.claim(consumer));
    let credential = claim.and_then(|claim| claim.credential.clone());
    let secrets = AttachSecrets { credential: credential.or(had.credential), given: had.given || given };
    if let Some(at) = record.attachments.iter_mut().find(|at| at.node == *node) {
        at.secrets = Some(secrets);
    }
}

/// Returns the values other than secrets that a plugin got for a registered volume and may repeat. They may contain a secret.
pub fn given_values(registration: &Registration, attachments: &[Attachment]) -> Vec<String> {
    let spec = &registration.spec;
    let of_snapshot = match registration.snapshot.as_ref().map(|task| &task.what) {
        Some(SnapshotWish::Create { parameters, .. }) => Some(parameters.values()),
        Some(SnapshotWish::Delete { .. }) | None => None,
    };
    let of_volume = spec.context.values().chain(spec.parameters.values()).chain(&spec.mount_flags);
    let of_volume = of_volume.chain(of_snapshot.into_iter().flatten());
    of_volume.chain(attachments.iter().flat_map(|at| at.publish_context.values())).cloned().collect()
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
