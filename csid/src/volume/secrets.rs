//! The secrets of a mount: those of the systemd credential that it names instead of giving them, and whether there were others,
//! which a plugin may still know.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Instant;

use zeroize::Zeroizing;

use crate::error::{Error, Kind, Result};
use crate::host::credential::CredentialError;
use crate::host::units::UnitsError;
use crate::secret::{MAX_BYTES, Secrets};
use crate::store::MountFilter;
use crate::store::registry::{Attachment, Creation, Record, RecordFilter, Registration, Standing};
use crate::store::rows::{MountKey, MountRow, MountSpec};
use crate::volume::Shared;
use crate::volume::drive::Drive;
use crate::volume::record::UNKNOWN;
use crate::volume::state::Volume;

impl Shared {
    /// The secrets that a systemd credential holds now: systemd is asked at each use. What it does not find may be what csid was
    /// started with, and without systemd that is all there is.
    pub(super) async fn credential(&self, name: &str) -> Result<Secrets> {
        if name.is_empty() || name.starts_with('.') || name.contains('/') {
            return Err(Error::invalid(format!("`{name}` is no credential's name")));
        }
        let required = |why: &dyn std::fmt::Display| {
            let text = format!(
                "credential {name}: {why}; put it into /etc/credstore/{name} (root's, mode 0600), or say where it is by \
                 LoadCredential={name}:PATH in csid.service, then `systemctl daemon-reload`"
            );
            Error::new(Kind::SecretRequired, text)
        };
        let (found, otherwise) = match self.units.credential(name, MAX_BYTES).await {
            Ok(found) => (found, "systemd has none of that name"),
            Err(CredentialError::Units(UnitsError::NoManager { .. })) => {
                (None, "no systemd answers, and csid was started without it")
            }
            Err(error) => return Err(required(&error)),
        };
        let document = match found {
            Some(document) => document,
            None => {
                given_at_start(name).map_err(|error| required(&error))?.ok_or_else(|| required(&otherwise))?
            }
        };
        Secrets::of_credential(&document)
    }

    /// Whether the plugin was given secrets, as far as rows still say; a volume's credential may have been.
    pub(super) async fn rows_tell_of_secrets(&self, plugin: &str) -> Result<bool> {
        let plugin = Some(plugin.to_owned());
        let mounts = MountFilter { plugin: plugin.clone(), ..MountFilter::default() };
        if self.store.mounts(mounts).await?.iter().any(|(row, _)| may_have_had_secrets(row)) {
            return Ok(true);
        }
        let filter = RecordFilter { plugin, ..RecordFilter::default() };
        Ok(self.registry.records(filter).await?.0.iter().any(tells_of_secrets))
    }

    /// What a call has before it is queued: its secrets, or those of the credential that it names, in the call's time.
    pub(super) async fn given(
        &self,
        secrets: Option<Secrets>,
        credential: Option<String>,
        deadline: Option<Instant>,
    ) -> Result<Option<Secrets>> {
        let Some(name) = credential else { return Ok(secrets) };
        let found = self.credential(&name);
        let Some(deadline) = deadline else { return found.await.map(Some) };
        match tokio::time::timeout_at(deadline.into(), found).await {
            Ok(found) => found.map(Some),
            Err(_) => {
                let text = format!("the deadline passed before systemd handed over the credential {name}");
                Err(Error::new(Kind::TimedOut, text))
            }
        }
    }
}

/// What systemd gave csid at its start.
fn given_at_start(name: &str) -> std::io::Result<Option<Zeroizing<Vec<u8>>>> {
    let Some(directory) = std::env::var_os("CREDENTIALS_DIRECTORY") else { return Ok(None) };
    match File::open(Path::new(&directory).join(name)) {
        Ok(file) => read(file).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// At most one byte too much, which is then refused; into a buffer that never grows, so that no copy stays behind.
fn read(file: File) -> std::io::Result<Zeroizing<Vec<u8>>> {
    let mut document = Zeroizing::new(Vec::with_capacity(MAX_BYTES + 1));
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut document)?;
    Ok(document)
}

impl Volume {
    /// Whether what a plugin says of this mount may repeat secrets that are not at hand: its own, unless they are `given`, or
    /// those of whoever uses or has used the volume beside it.
    pub(super) fn has_forgotten_secrets(&self, key: &MountKey, given: bool) -> bool {
        self.mounts.iter().any(|mount| match mount.key == *key {
            true if given => mount.spec.secrets_beside,
            _ => may_have_had_secrets(mount),
        })
    }
}

impl Drive<'_> {
    /// Whether the plugin may have heard secrets of the volume that a controller's call does not have: then its words are
    /// withheld. At hand are, when they are `given`, those of `own`, the consumer whose claim it is, or of the credential.
    pub(super) fn others_secrets(
        &self,
        record: &Record,
        own: Option<&str>,
        at_hand: Option<&String>,
        given: bool,
    ) -> bool {
        let mounts = self.rows.volume().mounts.iter().any(|mount| {
            let MountSpec { credential, secrets_given, secrets_beside, .. } = &mount.spec;
            let is_own = given && own == Some(mount.key.consumer.as_str());
            let is_at_hand = given && credential.as_ref() == at_hand;
            *secrets_beside || (*secrets_given && !is_own) || (credential.is_some() && !is_own && !is_at_hand)
        });
        let claims = record.claims.iter().any(|claim| {
            let is_own = given && own == Some(claim.consumer.as_str());
            claim.secrets_given && !is_own
        });
        let attached = record.attachments.iter().any(|at| {
            let by_claims = at.secrets.as_ref().is_some_and(|had| had.given);
            by_claims || at.by_call.as_ref().is_some_and(|call| call.secrets_given)
        });
        mounts || claims || (attached && !given)
    }
}

fn tells_of_secrets(record: &Record) -> bool {
    let registered = record.registration.iter().any(|of| {
        let given = match &of.standing {
            Standing::Registered => false,
            Standing::Creating(Creation { secrets_given, .. }) | Standing::Deleting { secrets_given, .. } => {
                *secrets_given
            }
        };
        given || of.spec.credential.is_some()
    });
    let claimed = record.claims.iter().any(|claim| claim.secrets_given || claim.credential.is_some());
    let attached = record
        .attachments
        .iter()
        .any(|at| at.secrets.is_some() || at.by_call.as_ref().is_some_and(|call| call.secrets_given));
    registered || claimed || attached
}

/// What a plugin was told of a registered volume beside secrets, and may repeat: a secret may stand there, too.
pub(super) fn told(registration: &Registration, attachments: &[Attachment]) -> Vec<String> {
    let spec = &registration.spec;
    let of_volume = spec.context.values().chain(spec.parameters.values()).chain(&spec.mount_flags);
    of_volume.chain(attachments.iter().flat_map(|at| at.publish_context.values())).cloned().collect()
}

/// What was recorded from the kernel alone may have been made with any.
pub(super) fn may_have_had_secrets(mount: &MountRow) -> bool {
    let MountSpec { credential, secrets_given, secrets_beside, .. } = &mount.spec;
    *secrets_given || *secrets_beside || credential.is_some() || mount.key.consumer == UNKNOWN
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;
    use crate::secret::freed::{self, SECRET};

    #[test]
    fn a_file_is_read_no_further_than_its_bound_and_leaves_nothing_behind() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(SECRET.as_bytes()).unwrap();
        file.set_len(10 * MAX_BYTES as u64).unwrap();
        file.rewind().unwrap();
        let found = freed::with_the_secret(|| assert_eq!(read(file).unwrap().len(), MAX_BYTES + 1));
        assert_eq!(found, 0);
    }
}
