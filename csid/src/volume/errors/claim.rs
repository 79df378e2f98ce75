//! Errors of claims.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Error, Kind, Obstacle, Step};
use crate::store::registry::{BoundTo, Claim, Record, VolumeName};
use crate::store::rows::VolumeKey;
use crate::volume::api::views::OperationView;
use crate::volume::model::admission::OF_UID;
use crate::volume::model::claim::ClaimRefusal;
use crate::volume::model::subject::{ClaimKey, Subject};

pub(in crate::volume) fn refusal(refusal: ClaimRefusal, name: &VolumeName, wanted: &Claim) -> Error {
    let consumer = &wanted.consumer;
    match refusal {
        ClaimRefusal::NotOwner => {
            Error::new(Kind::NotAuthorized, format!("the claim of {name} by {consumer} is another user's"))
                .obstructed_by(Obstacle::OtherUser)
        }
        ClaimRefusal::OtherOption { option } => {
            Error::new(Kind::AlreadyExists, format!("{consumer} has claimed {name} with another {option}"))
                .obstructed_by(Obstacle::ClaimedOtherwise)
        }
        ClaimRefusal::Releasing => Error::new(
            Kind::Uncertain,
            format!("an earlier claim of {name} by {consumer} is still being released"),
        ),
        ClaimRefusal::NoCapability => not_capable(name),
        ClaimRefusal::ReaderOnly => Error::invalid("a reader-only access mode is claimed with mode read"),
        ClaimRefusal::Conflict { what, holders } => {
            let who = match holders.is_empty() {
                true => "somebody else".to_owned(),
                false => holders.join(", "),
            };
            let text = format!("{what} conflicts with the claim of {name} by {who}");
            Error::new(Kind::ClaimConflict, text).with(|details| {
                details.holders = holders;
                details.step = Some(Step::Claim);
            })
        }
        ClaimRefusal::TooMany => Error::new(
            Kind::RateLimited,
            format!("you have {OF_UID} claims of {name}, as many as one user may"),
        ),
        ClaimRefusal::NoSuchClaim => Error::internal("the row of the claim is gone"),
    }
}

/// Makes the error for modes that no registered capability has.
pub(in crate::volume) fn not_capable(name: &VolumeName) -> Error {
    let text = format!("{name} was not registered with that access mode and attachment mode");
    Error::invalid(text).obstructed_by(Obstacle::Capability)
}

/// Makes the error for an event of csid itself that the state does not allow.
pub(in crate::volume) fn inner(refusal: ClaimRefusal, name: &VolumeName) -> Error {
    Error::internal(format!("an inner event of {name} was refused: {refusal:?}"))
}

pub(in crate::volume) fn unclaimed(claim: &ClaimKey) -> Error {
    let text = format!("{} is not claimed by {} any more", claim.volume, claim.consumer);
    Error::new(Kind::ClaimConflict, text)
}

pub(in crate::volume) fn secret_required(name: &VolumeName) -> Error {
    let text = format!("to detach {name} the plugin needs its secrets again");
    Error::new(Kind::SecretRequired, text)
}

pub(in crate::volume) fn no_node_id(plugin: &str) -> Error {
    let text =
        format!("plugin {plugin} attaches volumes, but its node service gives no node id (NodeGetInfo)");
    Error::new(Kind::PluginError, text)
}

pub(in crate::volume) fn unwatchable(to: &BoundTo, why: &dyn std::fmt::Display) -> Error {
    Error::new(Kind::NotSupported, format!("bind {to}: its end cannot be watched: {why}"))
}

pub(in crate::volume) fn too_many_units(most: usize) -> Error {
    let text = format!("your claims name {most} units, as many as one user's may");
    Error::new(Kind::RateLimited, text)
}

pub(in crate::volume) fn at_rest(to: &BoundTo) -> Error {
    Error::not_found(format!("bind {to}: that does not run")).obstructed_by(Obstacle::NotRunning)
}

pub(in crate::volume) fn out_of_reach(name: &VolumeName, topology: &BTreeMap<String, String>) -> Error {
    let here: Vec<String> = topology.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let here = if here.is_empty() { "no topology".to_owned() } else { here.join(", ") };
    let text = format!("{name} is not reachable from this node ({here})");
    // Waiting does not change the topology.
    Error::new(Kind::ClaimConflict, text).with(|details| {
        details.step = Some(Step::Topology);
        details.retryable = false;
    })
}

pub(in crate::volume) fn too_many(plugin: &str, most: i64, volumes: &[VolumeName]) -> Error {
    let holders: Vec<String> = volumes.iter().map(VolumeName::to_string).collect();
    let text = format!("plugin {plugin} takes at most {most} volumes on this node");
    Error::new(Kind::ClaimConflict, text).with(|details| {
        details.holders = holders;
        details.step = Some(Step::VolumeLimit);
    })
}

pub(in crate::volume) fn in_use(record: &Record) -> Error {
    let holders: Vec<String> = record.claims.iter().map(|claim| claim.consumer.clone()).collect();
    let text = format!("{} is claimed by {}", record.name, holders.join(", "));
    Error::new(Kind::Busy, text).with(|details| details.holders = holders)
}

pub(in crate::volume) fn mounted(name: &VolumeName, holders: Vec<String>) -> Error {
    let text = format!("{name} is mounted by {}", holders.join(", "));
    Error::new(Kind::Busy, text).with(|details| details.holders = holders)
}

pub(in crate::volume) fn attached_to(name: &VolumeName, nodes: Vec<String>) -> Error {
    let text = format!("{name} is attached to {}", nodes.join(", "));
    Error::new(Kind::Busy, text).with(|details| details.holders = nodes)
}

/// Makes the error for a volume without users that is still staged on this host.
pub(in crate::volume) fn still_staged(name: &VolumeName) -> Error {
    let text = format!("{name} is still being taken off this host");
    Error::new(Kind::Busy, text)
}

pub(in crate::volume) fn expands_first(name: &VolumeName) -> Error {
    let text = format!("an expansion of {name}, which came before, waits until the volume is not in use");
    Error::new(Kind::ClaimConflict, text).obstructed_by(Obstacle::Expansion)
}

pub(in crate::volume) fn not_confirmed(name: &VolumeName, why: &str) -> Error {
    let why = if why.is_empty() { "it does not say why" } else { why };
    Error::invalid(format!("the plugin does not confirm that {name} can be used so: {why}"))
}

pub(in crate::volume) fn not_mounted(name: &VolumeName) -> Error {
    Error::not_found(format!("{name} is not mounted on this node")).obstructed_by(Obstacle::NotMounted)
}

pub(in crate::volume) fn not_ready(name: &str, id: &str) -> Error {
    let text = format!("snapshot {name} (`{id}`) is not ready to use yet");
    Error::new(Kind::TimedOut, text).with(|details| details.retryable = true)
}

/// Refuses AttachVolume and DetachVolume of a volume with claims.
pub(in crate::volume) fn refuse_claimed(record: &Record) -> Result<(), Error> {
    if record.claims.is_empty() {
        return Ok(());
    }
    let holders: Vec<String> = record.claims.iter().map(|claim| claim.consumer.clone()).collect();
    let text = format!("{} is claimed by {}", record.name, holders.join(", "));
    Err(Error::new(Kind::ClaimConflict, text).with(|details| details.holders = holders))
}

pub(in crate::volume) fn not_attacher(name: &VolumeName, node_id: &str) -> Error {
    let text = format!("another user has attached {name} to {node_id}");
    Error::new(Kind::NotAuthorized, text)
}

pub(in crate::volume) fn does_not_attach(plugin: &str) -> Error {
    let text = format!(
        "plugin {plugin} attaches nothing (no PUBLISH_UNPUBLISH_VOLUME): its volumes are mounted as they are"
    );
    Error::new(Kind::NotSupported, text)
}

pub(in crate::volume) fn attached_otherwise(name: &VolumeName, node_id: &str, option: &str) -> Error {
    let text = format!("{name} is attached to {node_id} with another {option}");
    Error::new(Kind::AlreadyExists, text)
}

/// Makes the error for a volume that this host has staged. `disputed`: why it is unknown whether that node id is this host's.
pub(in crate::volume) fn staged_here(
    name: &VolumeName,
    holders: Vec<String>,
    disputed: Option<&Error>,
) -> Error {
    let text = match disputed {
        None => format!("this host has {name} staged under that node id"),
        Some(why) => {
            format!("this host has {name} staged, perhaps under that node id. {why}")
        }
    };
    Error::new(Kind::Busy, text).with(|details| {
        details.holders = holders;
        details.obstacle = disputed.and_then(|why| why.details.obstacle);
    })
}

pub(in crate::volume) fn of_file(name: &VolumeName, file: Option<&Path>) -> Error {
    let text = match file {
        Some(file) => format!("{name} is declared by {}", file.display()),
        None => format!("{name} was declared by a file of volumes.d that is gone or wrong"),
    };
    Error::new(Kind::NotSupported, text).obstructed_by(Obstacle::DeclaredByFile)
}

/// Makes the error for a declared volume that a call has registered.
pub(in crate::volume) fn of_call(name: &VolumeName) -> Error {
    let text = format!("{name} was registered by a call, and a file does not take it over");
    Error::new(Kind::AlreadyExists, text).obstructed_by(Obstacle::RegisteredByCall).with(|details| {
        details.namespace = Some(name.namespace.clone());
        details.volume = Some(name.volume.clone());
    })
}

/// Makes the error for a declared volume that is not registered yet. A call that uses the volume registers it first.
pub(in crate::volume) fn not_yet(name: &VolumeName, file: &Path) -> Error {
    let text = format!("{name} is declared by {}, and not registered yet", file.display());
    let error = Error::not_found(text).obstructed_by(Obstacle::DeclaredVolume);
    error.with(|details| details.retryable = true)
}

/// Adds the name of the file to an error about a declared volume.
pub(in crate::volume) fn declared(file: &Path, error: Error) -> Error {
    Error { message: format!("{}: {}", file.display(), error.message), ..error }
}

pub(in crate::volume) fn anothers(name: &VolumeName) -> Error {
    Error::new(Kind::NotAuthorized, format!("{name} was registered by another uid"))
}

pub(in crate::volume) fn as_registered(name: &VolumeName, option: &str, uid: u32) -> Error {
    let text = format!("{option} differs from the registration of {name} by uid {uid}");
    Error::new(Kind::NotAuthorized, text)
}

pub(in crate::volume) fn created_otherwise(name: &VolumeName, option: &str) -> Error {
    let text = format!("{name} is there, or on its way, with another {option}");
    Error::new(Kind::AlreadyExists, text)
}

pub(in crate::volume) fn cannot_create(plugin: &str, capability: &str) -> Error {
    Error::new(Kind::NotSupported, format!("the plugin {plugin} does not offer {capability}"))
}

/// Makes the error for a controller call to a plugin without a controller.
pub(in crate::volume) fn no_controller(plugin: &str) -> Error {
    Error::new(Kind::NotSupported, format!("the plugin {plugin} does not offer CONTROLLER_SERVICE"))
}

/// Makes the error for a DeleteVolume of a volume in creation.
pub(in crate::volume) fn being_created(name: &VolumeName, under_way: &OperationView) -> Error {
    let OperationView { id, uid, step, said, .. } = under_way;
    let said = if said.is_empty() { String::new() } else { format!(", the plugin's last answer was {said}") };
    let text = format!(
        "{name} is being created, and uid {uid} waits for it in the operation {id} (at `{step}`{said})"
    );
    let error = Error::new(Kind::Busy, text).obstructed_by(Obstacle::Creation);
    error.with(|details| details.holders = vec![id.clone()])
}

/// Makes the error for a CreateVolume without an answer, which csid retries.
pub(in crate::volume) fn goes_on(error: Error) -> Error {
    let message = format!("{}; csid goes on asking for it", error.message);
    Error { message, ..error }
}

pub(in crate::volume) fn secrets_again(name: &VolumeName, call: &str) -> Error {
    let text = format!("for {call} of {name} the plugin needs the secrets again, which csid does not keep");
    Error::new(Kind::SecretRequired, text)
}

pub(in crate::volume) fn not_from_source(name: &VolumeName, external_id: &str) -> Error {
    let text = format!(
        "the plugin made {name} (`{external_id}`), but does not say that it comes from the snapshot or volume that was \
         asked for: it may be empty. csid neither uses nor deletes it by itself"
    );
    Error::new(Kind::PluginError, text).obstructed_by(Obstacle::UnconfirmedSource)
}

/// Makes the error for a created volume whose row is gone, and whose name means another volume now.
pub(in crate::volume) fn made_and_not_needed(name: &VolumeName, external_id: &str) -> Error {
    let text = format!(
        "the plugin made `{external_id}` for {name}, which was registered or attached as another volume meanwhile"
    );
    let error = Error::new(Kind::Busy, text).obstructed_by(Obstacle::SpareVolume);
    error.with(|details| details.retryable = false)
}

/// Makes the error for a created volume whose row was given up before.
pub(in crate::volume) fn made_and_given_up(name: &VolumeName, external_id: &str) -> Error {
    let text = format!("the plugin made `{external_id}` for {name}, whose creation was given up");
    Error::new(Kind::Cancelled, text)
}

pub(in crate::volume) fn not_own_snapshot(snapshot: &str) -> Error {
    let text = format!(
        "snapshot `{snapshot}` is of no volume that you have registered (for a new volume: in its namespace)"
    );
    Error::new(Kind::NotAuthorized, text)
}

/// Refuses a name under which AttachVolume has attached a volume that is not registered.
pub(in crate::volume) fn refuse_attached(record: &Record) -> Result<(), Error> {
    if record.attachments.is_empty() {
        return Ok(());
    }
    let nodes: Vec<&str> = record.attachments.iter().map(|at| at.node_id.as_str()).collect();
    let text = format!(
        "{} is external id `{}` of plugin {}, attached to {}",
        record.name,
        record.volume.external_id,
        record.volume.plugin,
        nodes.join(", ")
    );
    Err(Error::new(Kind::Busy, text))
}

pub(in crate::volume) fn changed_meanwhile(name: &VolumeName) -> Error {
    Error::not_found(format!("what was {name} is not registered any more"))
}

pub(in crate::volume) fn on_its_way(name: &VolumeName) -> Error {
    let text = format!("{name} is being created or deleted");
    Error::new(Kind::Busy, text)
}

pub(in crate::volume) fn not_claimant(claim: &ClaimKey) -> Error {
    let text = format!(
        "the claim of {} by {} is another user's; it takes org.csid1.unmount-others",
        claim.volume, claim.consumer
    );
    Error::new(Kind::NotAuthorized, text)
}

pub(in crate::volume) fn unknown_plugin(plugin: &str) -> Error {
    let error = Error::not_found(format!("no plugin `{plugin}` is registered"));
    error.obstructed_by(Obstacle::UnknownPlugin).with(|details| details.plugin = Some(plugin.to_owned()))
}

pub(in crate::volume) fn not_registered(name: &VolumeName) -> Error {
    let text = format!("volume {:?} of namespace {:?} is not registered", name.volume, name.namespace);
    Error::not_found(text).obstructed_by(Obstacle::UnregisteredVolume).with(|details| {
        details.namespace = Some(name.namespace.clone());
        details.volume = Some(name.volume.clone());
    })
}

/// Makes the error for a volume whose external id was only in the damaged journal.
pub(in crate::volume) fn unidentified(volume: &VolumeKey, subject: &Subject) -> Error {
    let holder = match subject {
        Subject::Mount(key) => &key.consumer,
        Subject::Claim(key) => &key.consumer,
        Subject::Volume(_) | Subject::Attachment { .. } => "",
    };
    let text = format!(
        "the external id of {} could not be read from the damaged journal, and without it csid cannot name \
         the volume to unpublish. Ask once for a Mount of it with plugin {} and its external-id: it is refused, \
         for {} holds the volume, but csid knows the id by it. Then unmount again",
        subject.volume(),
        volume.plugin,
        holder
    );
    Error::new(Kind::Uncertain, text).with(|details| details.retryable = false)
}
