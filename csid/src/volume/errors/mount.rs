//! Errors of mounts.

use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Obstacle, Step};
use crate::names::word;
use crate::store::registry::VolumeName;
use crate::store::rows::{MountKey, MountRow, Phase, VolumeKey};
use crate::volume::model::admission::{OF_UID, Refusal};
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::model::volume::DesiredMount;

pub(in crate::volume) fn not_owner(key: &MountKey) -> Error {
    let text = format!(
        "the mount of {} by {} is another user's; it takes org.csid1.unmount-others",
        VolumeName::of(key),
        key.consumer
    );
    Error::new(Kind::NotAuthorized, text)
}

pub(in crate::volume) fn refusal(refusal: Refusal, wanted: &DesiredMount) -> Error {
    let key = &wanted.key;
    match refusal {
        Refusal::NotOwner => Error::new(
            Kind::NotAuthorized,
            format!("{} is mounted by {} for another user", VolumeName::of(key), key.consumer),
        )
        .obstructed_by(Obstacle::OtherUser),
        Refusal::OtherOption { option } => Error::new(
            Kind::AlreadyExists,
            format!("{} is mounted by {} with another {option}", VolumeName::of(key), key.consumer),
        )
        .obstructed_by(Obstacle::MountedOtherwise),
        Refusal::Unsettled => Error::new(
            Kind::Uncertain,
            format!(
                "an earlier mount of {} by {} is still being taken down",
                VolumeName::of(key),
                key.consumer
            ),
        ),
        Refusal::OtherPath { what, path } => Error::new(
            Kind::AlreadyExists,
            format!(
                "the {what} path of {} for {} is {path}, not the one given",
                VolumeName::of(key),
                key.consumer
            ),
        ),
        Refusal::OtherName { namespace, volume, holders } => conflict(
            format!(
                "the external id is in use as {namespace}/{volume} by {}; one name at a time",
                holders.join(", ")
            ),
            holders,
        ),
        Refusal::Conflict { what, holders } => conflict(
            format!("{what} conflicts with the use of {} by {}", VolumeName::of(key), holders.join(", ")),
            holders,
        ),
        Refusal::NotSupported { capability } => {
            Error::new(Kind::NotSupported, format!("the plugin has no {capability} capability"))
        }
        Refusal::ReaderOnly => Error::invalid("a reader-only access mode needs read-only"),
        Refusal::SecretRequired => secret_required(key),
        Refusal::TooMany => Error::new(
            Kind::RateLimited,
            format!("you have {OF_UID} mounts of {}, as many as one user may", VolumeName::of(key)),
        ),
        Refusal::NoSuchMount => Error::internal("the row of the operation is gone"),
    }
}

/// Makes the error for a volume that is not mounted. `phase`: that of its row; `None`: there is no row, or its phase is wrong.
pub(in crate::volume) fn not_mounted(key: &MountKey, phase: Option<Phase>) -> Error {
    let is = phase.map_or_else(|| "not mounted".to_owned(), |phase| format!("{}, not mounted", word(phase)));
    let text = format!("{} is {is} for {}", VolumeName::of(key), key.consumer);
    Error::not_found(text).obstructed_by(Obstacle::NotMounted)
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

pub(in crate::volume) fn secret_required(key: &MountKey) -> Error {
    let text = format!("{} needs its secrets again", VolumeName::of(key));
    Error::new(Kind::SecretRequired, text)
}

/// Makes the error for an Unmount of a mount that has to exist. `tags`: those of the consumer's mounts. `foreign`: the paths
/// where the kernel shows the volume and no row does.
pub(in crate::volume) fn no_mount(key: &MountKey, tags: Vec<String>, foreign: Vec<PathBuf>) -> Error {
    let volume = format!("{}/{}", key.namespace, key.volume);
    let text = match tags.is_empty() {
        true => format!("{} has no mount of {volume}", key.consumer),
        false => {
            format!("{} has no mount of {volume} with the tag {:?}; it has {tags:?}", key.consumer, key.tag)
        }
    };
    let text = match foreign.first() {
        None => text,
        Some(path) => {
            format!("{text}; the volume is mounted at {}, which is not csid's mount", path.display())
        }
    };
    Error::not_found(text).with(|details| {
        details.tags = tags;
        details.holders = foreign.iter().map(|path| format!("mount {}", path.display())).collect();
    })
}

fn conflict(text: String, holders: Vec<String>) -> Error {
    Error::new(Kind::ClaimConflict, text).with(|details| details.holders = holders)
}

/// Makes the error for a mount in use.
pub(in crate::volume) fn busy(path: &Path, consumer: &str, processes: Vec<String>) -> Error {
    let who = match processes.is_empty() {
        // Others' are not for csid's capabilities.
        true => "processes that csid may not see".to_owned(),
        false => processes.join(", "),
    };
    let text = format!("{} is in use by {who}", path.display());
    Error::new(Kind::Busy, text).with(|details| {
        details.holders = std::iter::once(consumer.to_owned()).chain(processes).collect();
    })
}

/// Makes the error for a mount in use in another mount namespace. `holders`: processes there, where a mount of the volume would
/// outlive csid's unmount.
pub(in crate::volume) fn busy_elsewhere(path: &Path, consumer: &str, holders: Vec<String>) -> Error {
    let text = format!("{} is in use in another mount namespace, by {}", path.display(), holders.join(", "));
    Error::new(Kind::Busy, text).with(|details| {
        details.holders = std::iter::once(consumer.to_owned()).chain(holders).collect();
    })
}

/// Makes the same error for holders found after the unmount.
pub(in crate::volume) fn still_elsewhere(consumer: &str, holders: Vec<String>) -> Error {
    let text = format!(
        "the volume is unpublished, but another mount namespace still shows it, by {}; it is released when they have \
         ended",
        holders.join(", ")
    );
    Error::new(Kind::Busy, text).with(|details| {
        details.holders = std::iter::once(consumer.to_owned()).chain(holders).collect();
    })
}

/// Makes the error for a file system on `device` that is mounted where no mount table shows it.
pub(in crate::volume) fn still_held(device: &str, consumer: &str) -> Error {
    let text = format!(
        "the volume is unmounted, but its block device {device} is still in use: by an overlay on it, a descriptor of a \
         mount, or a namespace that csid does not see; it is released when that has ended"
    );
    Error::new(Kind::Busy, text).with(|details| details.holders = vec![consumer.to_owned()])
}

pub(in crate::volume) fn dead(row: &MountRow) -> Error {
    let text = format!("the file system at {} is dead or does not answer", row.source);
    Error::new(Kind::PluginError, text).with(|details| details.step = Some(Step::Verify))
}

pub(in crate::volume) fn hung(row: &MountRow) -> Error {
    let text = format!("the file system at {} does not answer; its server may answer yet", row.source);
    Error::new(Kind::Busy, text).with(|details| {
        details.step = Some(Step::Verify);
        details.retryable = true;
        details.holders = vec![row.key.consumer.clone()];
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

/// Makes the error for a consumer's target that no row has, and that would still show the volume.
pub(in crate::volume) fn shown_elsewhere(path: &Path) -> Error {
    let text = format!(
        "the volume is mounted at {}, too, and what for was in the damaged journal alone; unmount that, then unmount \
         again",
        path.display()
    );
    Error::new(Kind::Busy, text).with(|details| details.holders = vec![path.display().to_string()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_mount_in_use_names_its_users() {
        let error = |processes| busy(Path::new("/srv/pg"), "job", processes);
        assert_eq!(error(Vec::new()).message, "/srv/pg is in use by processes that csid may not see");
        let seen = error(vec!["psql (7)".to_owned()]);
        assert_eq!(seen.message, "/srv/pg is in use by psql (7)");
        assert_eq!(seen.details.holders, ["job", "psql (7)"]);
    }
}
