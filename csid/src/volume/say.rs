//! The volume room's words: errors that say what to do next, and events.

use std::path::Path;

use serde_json::Value;

use crate::error::{Details, Error, Kind};
use crate::names::word;
use crate::store::rows::{EventDetails, MountKey, MountRow, NewEvent, Phase, VolumeKey};
use crate::volume::admission::{OF_UID, Refusal};
use crate::volume::state::{Volume, Wanted};

pub(super) fn name(key: &MountKey) -> String {
    format!("{}/{}", key.namespace, key.volume)
}

pub(super) fn not_owner(key: &MountKey) -> Error {
    let text = format!(
        "the mount of {} by {} is another user's; it takes org.csid1.unmount-others",
        name(key),
        key.consumer
    );
    Error::new(Kind::NotAuthorized, text)
}

/// `unmount` ends a Mount of the same identity, `release` a Claim.
pub(super) fn ended_by(kind: &str) -> Error {
    let text = match kind {
        "release" => "a Release of the same claim came in",
        _ => "an Unmount of the same mount came in",
    };
    Error::new(Kind::Cancelled, text)
}

pub(super) fn refusal(refusal: Refusal, wanted: &Wanted) -> Error {
    let key = &wanted.key;
    match refusal {
        Refusal::NotOwner => Error::new(
            Kind::NotAuthorized,
            format!(
                "{} is mounted by {} for another user; choose another consumer or tag",
                name(key),
                key.consumer
            ),
        ),
        Refusal::OtherOptions => Error::new(
            Kind::AlreadyExists,
            format!(
                "{} is mounted by {} with other options; unmount it first, or give this mount a tag of its own",
                name(key),
                key.consumer
            ),
        ),
        Refusal::Unsettled => Error::new(
            Kind::Uncertain,
            format!("an earlier mount of {} by {} is still being taken down", name(key), key.consumer),
        ),
        Refusal::OtherName { namespace, volume, holders } => conflict(
            format!(
                "the external id is in use as {namespace}/{volume} by {}; one name at a time",
                holders.join(", ")
            ),
            holders,
        ),
        Refusal::Conflict { what, holders } => conflict(
            format!(
                "{what} conflicts with the use of {} by {}; unmount it there first",
                name(key),
                holders.join(", ")
            ),
            holders,
        ),
        Refusal::NotSupported { capability } => {
            Error::new(Kind::NotSupported, format!("the plugin has no {capability} capability; ask for less"))
        }
        Refusal::ReaderOnly => Error::invalid("a reader-only access mode needs read-only"),
        Refusal::SecretRequired => secret_required(key),
        Refusal::TooMany => Error::new(
            Kind::RateLimited,
            format!("you have {OF_UID} mounts of {}, as many as one user may; unmount one first", name(key)),
        ),
        Refusal::NoSuchMount => Error::internal("the row of the operation is gone"),
    }
}

/// `phase`: what its row says; absent: there is none, or what it says is not so.
pub(super) fn not_mounted(key: &MountKey, phase: Option<Phase>) -> Error {
    let is = phase.map_or_else(|| "not mounted".to_owned(), |phase| format!("{}, not mounted", word(phase)));
    let text = format!("{} is {is} for {}; mount it first", name(key), key.consumer);
    Error::not_found(text)
}

pub(super) fn not_claimant(key: &MountKey) -> Error {
    let text = format!(
        "the claim of {} by {} is another user's; it takes org.csid1.unmount-others",
        name(key),
        key.consumer
    );
    Error::new(Kind::NotAuthorized, text)
}

pub(super) fn unknown_plugin(plugin: &str) -> Error {
    let text = format!(
        "no plugin `{plugin}` is registered; see `csictl plugin list`, or wait for it with `csictl wait {plugin}`"
    );
    Error::not_found(text)
}

pub(super) fn not_registered(key: &MountKey) -> Error {
    let text = format!(
        "volume {:?} of namespace {:?} is not registered: register it (`csictl volume register`), or give the \
         options plugin and external-id",
        key.volume, key.namespace
    );
    Error::not_found(text).with(|details| {
        details.namespace = Some(key.namespace.clone());
        details.volume = Some(key.volume.clone());
    })
}

pub(super) fn secret_required(key: &MountKey) -> Error {
    let text =
        format!("{} needs its secrets again: repeat Mount with `secrets`, or use a `credential`", name(key));
    Error::new(Kind::SecretRequired, text)
}

fn conflict(text: String, holders: Vec<String>) -> Error {
    Error::new(Kind::ClaimConflict, text).with(|details| details.holders = holders)
}

/// `call`: what is refused.
pub(super) fn busy(path: &Path, consumer: &str, processes: Vec<String>, call: &str) -> Error {
    let who = match processes.is_empty() {
        // Others' are not for csid's capabilities.
        true => {
            format!("processes that csid may not see (`fuser -vm {}` lists them to root)", path.display())
        }
        false => processes.join(", "),
    };
    let text = format!("{} is in use by {who}; stop them, then {call} again", path.display());
    Error::new(Kind::Busy, text).with(|details| {
        details.holders = std::iter::once(consumer.to_owned()).chain(processes).collect();
    })
}

pub(super) fn dead(row: &MountRow) -> Error {
    let text = format!(
        "the file system at {} is dead or does not answer; unmount it, with `force` if need be, then mount it again",
        row.source
    );
    Error::new(Kind::PluginError, text).with(|details| details.step = Some("verify"))
}

/// What is needed to end it was in the damaged journal alone.
pub(super) fn unidentified(volume: &VolumeKey, key: &MountKey) -> Error {
    let text = format!(
        "the external id of {} could not be read from the damaged journal, and without it the plugin cannot be told \
         which volume to unpublish. Ask once for a Mount of it with plugin {} and its external-id: it is refused, \
         for {} holds the volume, but csid knows the id by it. Then unmount again",
        name(key),
        volume.plugin,
        key.consumer
    );
    Error::new(Kind::Uncertain, text).with(|details| details.retryable = false)
}

/// A consumer's target that no row knows of would go on showing the volume.
pub(super) fn shown_elsewhere(path: &Path) -> Error {
    let text = format!(
        "the volume is mounted at {}, too, and what for was in the damaged journal alone; unmount that, then unmount \
         again",
        path.display()
    );
    Error::new(Kind::Busy, text).with(|details| details.holders = vec![path.display().to_string()])
}

pub(super) fn stopped(kind: Kind) -> Error {
    let text = match kind {
        Kind::TimedOut => "the deadline passed before it was there; it is being undone",
        Kind::ShuttingDown => "csid is stopping; the next csid undoes what was begun",
        _ => "it was cancelled and is being undone",
    };
    Error::new(kind, text)
}

/// What an earlier operation left could not be settled in this one's time.
pub(super) fn unsettled(error: Error) -> Error {
    let text = format!("an earlier operation on this mount has not come to an end: {}", error.message);
    let mut unsettled = Error { kind: Kind::Uncertain, message: text, details: error.details };
    unsettled.details.retryable = true;
    unsettled
}

/// Work that nobody waits for was put off; nobody reads this.
pub(super) fn yielded() -> Error {
    Error::new(Kind::Busy, "put off for another operation")
}

/// What every error of a volume's operation says of itself.
pub(super) fn located(
    error: Error,
    key: &MountKey,
    volume: &VolumeKey,
    operation: &str,
    step: &'static str,
) -> Error {
    error.with(|details: &mut Details| {
        details.namespace.get_or_insert_with(|| key.namespace.clone());
        details.volume.get_or_insert_with(|| key.volume.clone());
        details.plugin.get_or_insert_with(|| volume.plugin.clone());
        details.operation.get_or_insert_with(|| operation.to_owned());
        details.step.get_or_insert(step);
    })
}

/// A failure for journald; what goes well is an event.
pub(super) fn log(key: &MountKey, volume: &Volume, error: &Error) {
    let MountKey { namespace, volume: name, consumer, tag } = key;
    let plugin = &volume.row.key.plugin;
    tracing::warn!(
        namespace,
        volume = name,
        consumer,
        tag,
        plugin,
        kind = error.kind.name(),
        "{}",
        error.message
    );
}

pub(super) fn event(kind: &'static str, row: Option<&MountRow>, error: Option<&Error>) -> Option<NewEvent> {
    let row = row?;
    let mut details = EventDetails::new();
    details.insert("success", Value::from(error.is_none()));
    if let Some(error) = error {
        details.insert("error", Value::from(format!("{}: {}", error.kind.name(), error.message)));
    }
    details.insert("consumer", Value::from(row.key.consumer.clone()));
    if !row.key.tag.is_empty() {
        details.insert("tag", Value::from(row.key.tag.clone()));
    }
    details.insert("uid", Value::from(row.uid));
    details.insert("plugin", Value::from(row.volume.plugin.clone()));
    Some(NewEvent { kind, subject: name(&row.key), details })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_uses_a_mount_unseen_can_be_found() {
        let told = |processes, call| busy(Path::new("/srv/pg"), "job", processes, call);
        let unseen = told(Vec::new(), "release");
        assert!(unseen.message.contains("`fuser -vm /srv/pg`") && unseen.message.ends_with("release again"));
        let seen = told(vec!["psql (7)".to_owned()], "unmount");
        assert!(seen.message.contains("psql (7)") && !seen.message.contains("fuser"), "{}", seen.message);
        assert_eq!(seen.details.holders, ["job", "psql (7)"]);
    }
}
