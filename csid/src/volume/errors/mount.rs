//! Errors of mounts.

use std::path::PathBuf;

use crate::error::{Details, Error, Kind, Obstacle, Step, shown};
use crate::names::word;
use crate::store::registry::VolumeName;
use crate::store::rows::{MountKey, Phase};
use crate::volume::model::admission::{OF_UID, Refusal};

/// Why a mount is not made, not unmounted or not shown.
#[derive(Debug, thiserror::Error)]
pub(in crate::volume) enum MountError {
    /// Another user's mount was to be unmounted.
    #[error(
        "the mount of {} by {} is another user's; it takes org.csid1.unmount-others",
        VolumeName::of(key), key.consumer
    )]
    NotOwner { key: MountKey },
    /// Another user has a mount of the same identity.
    #[error("{} is mounted by {} for another user", VolumeName::of(key), key.consumer)]
    OtherUser { key: MountKey },
    #[error("{} is mounted by {} with another {option}", VolumeName::of(key), key.consumer)]
    MountedOtherwise { key: MountKey, option: &'static str },
    #[error("an earlier mount of {} by {} is still being unmounted", VolumeName::of(key), key.consumer)]
    TakenDown { key: MountKey },
    #[error("the {what} path of {} for {} is {}, not the one given", VolumeName::of(key), key.consumer, shown(path))]
    OtherPath { key: MountKey, what: &'static str, path: String },
    #[error("the external id is in use as {name} by {}; one name at a time", holders.join(", "))]
    OtherName { name: VolumeName, holders: Vec<String> },
    #[error("{what} conflicts with the use of {} by {}", VolumeName::of(key), holders.join(", "))]
    Conflict { key: MountKey, what: &'static str, holders: Vec<String> },
    #[error("the plugin has no {capability} capability")]
    NoCapability { capability: &'static str },
    #[error("a reader-only access mode needs read-only")]
    ReaderOnly,
    #[error("{} needs its secrets again", VolumeName::of(key))]
    SecretsNeeded { key: MountKey },
    #[error("you have {OF_UID} mounts of {}, as many as one user may", VolumeName::of(key))]
    TooMany { key: MountKey },
    #[error("the row of the operation is gone")]
    NoRow,
    /// `phase`: that of its row; `None`: there is no row, or its phase is wrong.
    #[error("{} is {} for {}", VolumeName::of(key), unmounted(*phase), key.consumer)]
    NotMounted { key: MountKey, phase: Option<Phase> },
    /// A mount that has to exist does not. `tags`: those of the consumer's mounts. `foreign`: the paths where the kernel shows
    /// the volume and no row does.
    #[error("{}", missing(key, tags, foreign))]
    NoMount { key: MountKey, tags: Vec<String>, foreign: Vec<PathBuf> },
    /// `processes` is empty where csid's capabilities do not show them.
    #[error("{} is in use by {}", shown(path), named(processes))]
    InUse { path: PathBuf, consumer: String, processes: Vec<String> },
    /// `holders`: processes of another mount namespace, where a mount of the volume would outlive csid's unmount.
    #[error("{} is in use in another mount namespace, by {}", shown(path), holders.join(", "))]
    InUseElsewhere { path: PathBuf, consumer: String, holders: Vec<String> },
    /// `at`: paths in csid's own mount namespace that no row has, where a mount of the volume would outlive csid's unmount.
    #[error("{} is in use: the volume is also mounted at {}", shown(path), listed(at))]
    BoundHere { path: PathBuf, at: Vec<PathBuf> },
    /// The same for mounts that were found after the unmount.
    #[error(
        "the volume is unpublished, but it is still mounted at {}; it is released when that is unmounted",
        listed(at)
    )]
    StillBoundHere { at: Vec<PathBuf> },
    /// The same as InUseElsewhere for holders that were found after the unmount.
    #[error(
        "the volume is unpublished, but another mount namespace still shows it, by {}; it is released when they have ended",
        holders.join(", ")
    )]
    StillElsewhere { consumer: String, holders: Vec<String> },
    /// No mount table shows the file system on `device`, and yet the device is in use.
    #[error(
        "the volume is unmounted, but its block device {device} is still in use: by an overlay on it, a descriptor of a \
         mount, or a namespace that csid does not see; it is released when that has ended"
    )]
    DeviceInUse { device: String, consumer: String },
    #[error("the file system at {path} is dead or does not answer")]
    Dead { path: String },
    #[error("the file system at {path} does not answer; its server may answer yet")]
    Hung { path: String, consumer: String },
    #[error("the file system at {path} answers with an error ({source}); its server may answer yet")]
    Failing { path: String, consumer: String, source: std::io::Error },
    /// A consumer's target that no row has, and that would still show the volume.
    #[error(
        "the volume is also mounted at {}, for a consumer that only the damaged journal named",
        shown(path)
    )]
    ShownAt { path: PathBuf },
}

fn unmounted(phase: Option<Phase>) -> String {
    phase.map_or_else(|| "not mounted".to_owned(), |phase| format!("{}, not mounted", word(phase)))
}

fn missing(key: &MountKey, tags: &[String], foreign: &[PathBuf]) -> String {
    let MountKey { consumer, tag, .. } = key;
    let mut text = format!("{consumer} has no mount of {}", VolumeName::of(key));
    if !tags.is_empty() {
        text += &format!(" with the tag {tag:?}; it has {tags:?}");
    }
    if let Some(path) = foreign.first() {
        text += &format!("; the volume is mounted at {}, which is not csid's mount", shown(path));
    }
    text
}

fn named(processes: &[String]) -> String {
    match processes.is_empty() {
        true => "processes that csid may not see".to_owned(),
        false => processes.join(", "),
    }
}

/// Number of paths that an error names.
const NAMED: usize = 16;

fn listed(paths: &[PathBuf]) -> String {
    let named: Vec<String> = paths.iter().take(NAMED).map(shown).collect();
    named.join(", ")
}

fn first_and(consumer: String, holders: Vec<String>) -> Vec<String> {
    std::iter::once(consumer).chain(holders).collect()
}

impl MountError {
    pub(in crate::volume) fn refused(refusal: Refusal, key: &MountKey) -> Self {
        let key = key.clone();
        match refusal {
            Refusal::NotOwner => MountError::OtherUser { key },
            Refusal::OtherOption { option } => MountError::MountedOtherwise { key, option },
            Refusal::Unsettled => MountError::TakenDown { key },
            Refusal::OtherPath { what, path } => MountError::OtherPath { key, what, path },
            Refusal::OtherName { namespace, volume, holders } => {
                MountError::OtherName { name: VolumeName { namespace, volume }, holders }
            }
            Refusal::Conflict { what, holders } => MountError::Conflict { key, what, holders },
            Refusal::NotSupported { capability } => MountError::NoCapability { capability },
            Refusal::ReaderOnly => MountError::ReaderOnly,
            Refusal::SecretRequired => MountError::SecretsNeeded { key },
            Refusal::TooMany => MountError::TooMany { key },
            Refusal::NoSuchMount => MountError::NoRow,
        }
    }

    fn kind(&self) -> Kind {
        match self {
            MountError::NotOwner { .. } | MountError::OtherUser { .. } => Kind::NotAuthorized,
            MountError::MountedOtherwise { .. } | MountError::OtherPath { .. } => Kind::AlreadyExists,
            MountError::TakenDown { .. } => Kind::Uncertain,
            MountError::OtherName { .. } | MountError::Conflict { .. } => Kind::ClaimConflict,
            MountError::NoCapability { .. } => Kind::NotSupported,
            MountError::ReaderOnly => Kind::InvalidArgument,
            MountError::SecretsNeeded { .. } => Kind::SecretRequired,
            MountError::TooMany { .. } => Kind::RateLimited,
            MountError::NoRow => Kind::Internal,
            MountError::NotMounted { .. } | MountError::NoMount { .. } => Kind::NotFound,
            MountError::InUse { .. }
            | MountError::InUseElsewhere { .. }
            | MountError::StillElsewhere { .. }
            | MountError::BoundHere { .. }
            | MountError::StillBoundHere { .. }
            | MountError::DeviceInUse { .. }
            | MountError::Hung { .. }
            | MountError::Failing { .. }
            | MountError::ShownAt { .. } => Kind::Busy,
            MountError::Dead { .. } => Kind::PluginError,
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        match self {
            MountError::OtherUser { .. } => Some(Obstacle::OtherUser),
            MountError::MountedOtherwise { .. } => Some(Obstacle::MountedOtherwise),
            MountError::NotMounted { .. } => Some(Obstacle::NotMounted),
            MountError::ShownAt { .. } | MountError::BoundHere { .. } | MountError::StillBoundHere { .. } => {
                Some(Obstacle::UnknownTarget)
            }
            _ => None,
        }
    }

    fn fill(self, details: &mut Details) {
        details.obstacle = self.obstacle();
        match self {
            MountError::OtherName { holders, .. } | MountError::Conflict { holders, .. } => {
                details.holders = holders;
            }
            MountError::NoMount { tags, foreign, .. } => {
                details.tags = tags;
                details.holders = foreign.iter().map(|path| format!("mount {}", path.display())).collect();
            }
            MountError::InUse { consumer, processes: holders, .. }
            | MountError::InUseElsewhere { consumer, holders, .. }
            | MountError::StillElsewhere { consumer, holders } => {
                details.holders = first_and(consumer, holders);
            }
            MountError::DeviceInUse { consumer, .. } => details.holders = vec![consumer],
            MountError::Dead { .. } => details.step = Some(Step::Verify),
            MountError::Hung { consumer, .. } | MountError::Failing { consumer, .. } => {
                details.step = Some(Step::Verify);
                details.holders = vec![consumer];
            }
            MountError::ShownAt { path } => details.holders = vec![path.display().to_string()],
            MountError::BoundHere { at, .. } | MountError::StillBoundHere { at, .. } => {
                details.holders = at.iter().take(NAMED).map(|path| path.display().to_string()).collect();
            }
            _ => {}
        }
    }
}

impl From<MountError> for Error {
    fn from(error: MountError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_mount_in_use_names_its_users() {
        let error = |processes| {
            Error::from(MountError::InUse { path: "/srv/pg".into(), consumer: "job".to_owned(), processes })
        };
        assert_eq!(error(Vec::new()).message, "/srv/pg is in use by processes that csid may not see");
        let seen = error(vec!["psql (7)".to_owned()]);
        assert_eq!(seen.message, "/srv/pg is in use by psql (7)");
        assert_eq!(seen.details.holders, ["job", "psql (7)"]);
    }

    #[test]
    fn mount_error_echoes_256_bytes_of_a_path() {
        let path = || PathBuf::from(format!("/srv{}", "/a b".repeat(1000)));
        let [namespace, volume, consumer, tag] = ["n", "v", "c", ""].map(str::to_owned);
        let key = MountKey { namespace, volume, consumer: consumer.clone(), tag };
        for error in [
            MountError::InUse { path: path(), consumer: consumer.clone(), processes: Vec::new() },
            MountError::InUseElsewhere { path: path(), consumer, holders: Vec::new() },
            MountError::OtherPath { key: key.clone(), what: "target", path: path().display().to_string() },
            MountError::NoMount { key, tags: Vec::new(), foreign: vec![path()] },
            MountError::ShownAt { path: path() },
            MountError::BoundHere { path: path(), at: vec!["/mnt".into()] },
            MountError::BoundHere { path: "/srv".into(), at: vec![path()] },
            MountError::StillBoundHere { at: vec![path()] },
        ] {
            let text = error.to_string();
            assert!(text.matches("/a b").count() * 4 <= 256 && text.len() < 512, "{text:.512}");
        }
    }
}
