//! The rules that servers of a cluster share with csid: all that they need of this crate besides the types of `store`. The rules are
//! pure. They use no mount, plugin or journal, so they run where csid does not.

use std::collections::BTreeMap;

use crate::error::{Error, Kind, Result};
use crate::names;
use crate::names::Word;
use crate::store::registry::{
    AttachCall, Capability, Claim, ClaimMode, Creation, Heal, Origin, Record, Registration, Standing, Use,
    VolumeName, VolumeSpec,
};
use crate::store::rows::{AccessMode, AttachmentMode, VolumeKey};
use crate::store::volume_handle::VolumeHandle;
use crate::volume::errors::claim::ClaimError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::lifecycle::{self, ModeFilter};
use crate::volume::model::claim;

pub use crate::plugin::{Created, proves_no_effect};
pub use crate::store::event_kind::EventKind;
pub use crate::volume::lifecycle::{enter_attach_secrets, given_values, refuse_nonsense};
pub use crate::volume::model::call_name::name_call;
pub use crate::volume::model::claim::{
    ClaimAction, ClaimEffect, ClaimEvent, ClaimNext, ClaimOutcome, ClaimRefusal, Claims, admit, fits,
    reader_only, step,
};
pub use crate::volume::model::paths::{name_at_plugin, snapshot_at_plugin};
pub use crate::volume::transitions::{
    AfterCreation, begin_creation, begin_deletion, begin_snapshot, deletion_refused, doom, enter_created,
    enter_expanded, enter_snapshot, expanded_by_node, expansion_refused, falls_short, is_unfinished,
    join_creation, not_created, owes, refuse_expanding, refuse_unfit, refuse_used, set_snapshot_unasked,
    set_unasked, settle_owed, snapshot_deleted, snapshot_failed,
};

/// The limit of a publish context in a cluster, in bytes. A plugin's longer answer is refused.
const PUBLISH_CONTEXT: usize = 24 * 1024;
/// The limit of the entries of a publish context.
const ENTRIES: usize = 1000;

/// Returns the error of a refused claim.
pub fn refused(refusal: ClaimRefusal, name: &VolumeName, consumer: &str) -> Error {
    ClaimError::refused(refusal, name, consumer).into()
}

/// Returns the registration of a volume that can be used.
pub fn registered(record: &Record) -> Result<&Registration> {
    lifecycle::refuse_in_transition(record)?;
    let missing = || VolumeError::NotRegistered { name: record.name.clone() }.into();
    record.registration.as_ref().ok_or_else(missing)
}

/// Changes a record to this registration, and returns the kind of the event. `None`: the record has it already.
pub fn put_registration(
    record: &mut Record,
    volume: &VolumeKey,
    new: &Registration,
) -> Result<Option<EventKind>> {
    lifecycle::put(record, volume, new)
}

/// Makes the registration of a volume for an identity of a cluster. On each host root alone may use it otherwise than registered.
pub fn new_registration(owner: &str, spec: VolumeSpec) -> Registration {
    Registration { owner: owner.to_owned(), ..lifecycle::new_registration(0, spec, Origin::Bus) }
}

/// Makes the registration of a volume that a plugin is to create for an identity of a cluster. The plugin was not asked for it yet.
pub fn new_creation(owner: &str, spec: VolumeSpec, capacity_min: u64, capacity_max: u64) -> Registration {
    let creation =
        Creation { capacity_min, capacity_max, register: true, unasked: true, ..Creation::default() };
    Registration { standing: Standing::Creating(creation), ..new_registration(owner, spec) }
}

/// Checks the capacities of a volume in bytes. 0: no limit. CSI's numbers are signed (CSI rule 14).
pub fn check_capacity(least: u64, most: u64) -> Result<()> {
    if [least, most].into_iter().any(|bytes| i64::try_from(bytes).is_err()) {
        return Err(Error::invalid("capacity exceeds CSI's limit (2^63-1 bytes)"));
    }
    match most > 0 && most < least {
        true => Err(Error::invalid(format!("capacity-max {most} is less than capacity-min {least}"))),
        false => Ok(()),
    }
}

/// Checks a plugin's answer to CreateVolume, as a node of the cluster checks the volume before its first use.
pub fn check_created(plugin: &str, spec: &VolumeSpec, created: &Created) -> Result<()> {
    if VolumeHandle::of(created.external_id.clone()).is_lost() {
        return Err(Error::invalid("external-id has the form of an ID that csid makes itself"));
    }
    check_capacity(created.capacity.unwrap_or(0), 0)?;
    let spec = VolumeSpec {
        context: created.context.clone(),
        topologies: created.topologies.clone(),
        ..spec.clone()
    };
    check_volume(plugin, &created.external_id, &spec)
}

/// Returns a record without its registration. A volume that is claimed, attached, or being created or deleted keeps it.
pub fn without_registration(record: &Record) -> Result<Record> {
    lifecycle::refuse_in_transition(record)?;
    if !record.claims.is_empty() || !record.queue.is_empty() {
        return Err(VolumeError::in_use(record).into());
    }
    VolumeError::refuse_attached(record)?;
    if record.driver.is_some() {
        let text = format!("a controller call of {} is under way, or has had no answer", record.name);
        return Err(Error::new(Kind::Busy, text));
    }
    Ok(Record { registration: None, ..record.clone() })
}

/// Makes a claim for which nothing was done yet.
pub fn new_claim(consumer: &str, node: &str, uid: u32, usage: Use) -> Claim {
    lifecycle::new_claim(consumer, node, uid, usage)
}

/// Returns whether two claims of a volume exclude each other. They may be of different nodes.
pub fn exclude_each_other(one: &Claim, other: &Claim) -> bool {
    claim::conflict(one, other)
}

/// Refuses AttachVolume and DetachVolume of a volume with claims.
pub fn refuse_claimed(record: &Record) -> Result<()> {
    ClaimError::refuse_claimed(record)
}

/// Makes the call AttachVolume of an identity of a cluster. The modes are words of the contract. Empty: any that the volume is registered with.
pub fn new_attach(
    record: &Record,
    read_only: bool,
    access_mode: &str,
    attachment_mode: &str,
) -> Result<AttachCall> {
    let access = (!access_mode.is_empty()).then(|| AccessMode::read("access-mode", access_mode));
    let attachment =
        (!attachment_mode.is_empty()).then(|| AttachmentMode::read("attachment-mode", attachment_mode));
    let modes = ModeFilter { access_mode: access.transpose()?, attachment_mode: attachment.transpose()? };
    let capability = modes.choose(record)?;
    Ok(AttachCall { uid: 0, read_only, capability, secrets_given: false })
}

/// Refuses an AttachVolume of a volume that another one has attached to the node otherwise.
pub fn refuse_attached_otherwise(
    name: &VolumeName,
    node_id: &str,
    present: &AttachCall,
    wanted: &AttachCall,
) -> Result<()> {
    ClaimError::refuse_attached_otherwise(name, node_id, present, wanted)
}

/// Returns the acknowledged claims that a change removes.
pub fn past(before: &Record, after: &Record) -> Vec<Claim> {
    lifecycle::past(before, after)
}

/// Reads a volume's name. An empty namespace is `default`.
pub fn volume_name(namespace: &str, volume: &str) -> Result<VolumeName> {
    names::name("volume", volume)?;
    Ok(VolumeName { namespace: names::namespace(namespace.to_owned())?, volume: volume.to_owned() })
}

/// Checks a name of 1 to 128 bytes without control characters. `what` is its name in the error.
pub fn check_name(what: &str, text: &str) -> Result<()> {
    names::name(what, text)
}

/// Checks the name of a systemd credential, and that it is one of this namespace.
pub fn check_credential(namespace: &str, name: &str) -> Result<()> {
    names::credential(name)?;
    match names::credential_namespace(name) == Some(namespace) {
        true => Ok(()),
        false => Err(Error::invalid(format!("credential is not csid.{namespace}.NAME, NAME without a dot"))),
    }
}

/// Checks a plugin's ID of a volume.
pub fn check_external_id(id: &str) -> Result<()> {
    names::external_id("external-id", id)
}

/// Checks what names a page of a plugin's list. Empty IDs stand for any.
pub fn check_page(token: &str, snapshot: &str, external_id: &str) -> Result<()> {
    names::token(token)?;
    for (what, id) in [("snapshot", snapshot), ("volume", external_id)] {
        if !id.is_empty() {
            names::external_id(what, id)?;
        }
    }
    Ok(())
}

/// Checks the name of a snapshot and its parameters.
pub fn check_snapshot(name: &str, parameters: &BTreeMap<String, String>) -> Result<()> {
    names::name("the snapshot's name", name)?;
    names::context("parameters", parameters)
}

/// Checks a question about a plugin's capacity: its parameters and its topology.
pub fn check_capacity_question(plugin: &str, spec: &VolumeSpec) -> Result<()> {
    names::name("plugin", plugin)?;
    names::context("parameters", &spec.parameters)?;
    names::topologies(&spec.topologies)
}

/// Returns the error of a registration whose capabilities the plugin does not confirm. `why`: the plugin's reason.
pub fn not_confirmed(name: &VolumeName, why: String) -> Error {
    VolumeError::NotConfirmed { name: name.clone(), why }.into()
}

/// Returns whether a plugin's status of gRPC says that the volume or snapshot is not there.
pub fn is_gone(code: u32) -> bool {
    i32::try_from(code).is_ok_and(|code| crate::plugin::is_gone(tonic::Code::from(code)))
}

/// Returns whether the gRPC code of a refused attach says that the node has the volume attached with other arguments.
pub fn is_attached_otherwise(code: u32) -> bool {
    i32::try_from(code).is_ok_and(|code| crate::plugin::is_attached_otherwise(tonic::Code::from(code)))
}

/// Checks a plugin's name of a node.
pub fn check_node_id(node_id: &str) -> Result<()> {
    names::node_id(node_id)
}

/// Checks the size of a publish context.
pub fn check_publish_context(context: &BTreeMap<String, String>) -> Result<()> {
    let bytes: usize = context.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > PUBLISH_CONTEXT || context.len() > ENTRIES {
        let text = format!(
            "publish context has {} entries and {bytes} bytes; the limits are {ENTRIES} and {PUBLISH_CONTEXT}",
            context.len()
        );
        return Err(Error::invalid(text));
    }
    Ok(())
}

/// Reads a claim's use of a volume from the words of the contract.
pub fn read_use(mode: &str, access_mode: &str, attachment_mode: &str) -> Result<Use> {
    let mode = ClaimMode::read("mode", mode)?;
    Ok(Use { mode, capability: read_capability(access_mode, attachment_mode)? })
}

/// Reads a capability from the words of the contract.
pub fn read_capability(access_mode: &str, attachment_mode: &str) -> Result<Capability> {
    let words = [Some(access_mode), Some(attachment_mode)];
    Ok(names::capabilities([words].into_iter())?.remove(0))
}

/// Returns the words of a use: mode, access mode, attachment mode.
pub fn words_of(usage: Use) -> [&'static str; 3] {
    let [access, attachment] = words_of_capability(usage.capability);
    [names::word(usage.mode), access, attachment]
}

/// Returns the words of a capability: access mode, attachment mode.
pub fn words_of_capability(capability: Capability) -> [&'static str; 2] {
    [names::word(capability.access_mode), names::word(capability.attachment_mode)]
}

/// Reads a heal policy from the contract's word. Empty: the default.
pub fn read_heal(word: &str) -> Result<Heal> {
    if word.is_empty() { Ok(Heal::default()) } else { Heal::read("heal", word) }
}

/// Checks a plugin's volume and its spec, as RegisterVolume does.
pub fn check_volume(plugin: &str, external_id: &str, spec: &VolumeSpec) -> Result<()> {
    names::name("plugin", plugin)?;
    names::external_id("external-id", external_id)?;
    let VolumeSpec { name, fs_type, mount_flags, mount_group, context, parameters, topologies, .. } = spec;
    names::optional_name("name", name)?;
    names::fs_type(fs_type)?;
    names::mount_flags(mount_flags)?;
    names::optional_name("mount-group", mount_group)?;
    names::context("volume-context", context)?;
    names::context("parameters", parameters)?;
    names::topologies(topologies)?;
    if let Some(credential) = &spec.credential {
        names::credential(credential)?;
    }
    if spec.capabilities.iter().enumerate().any(|(at, one)| spec.capabilities[..at].contains(one)) {
        return Err(Error::invalid("capabilities has a capability twice"));
    }
    refuse_nonsense(spec)
}

/// Returns the contract's word for a heal policy.
pub fn heal_word(heal: Heal) -> &'static str {
    names::word(heal)
}
