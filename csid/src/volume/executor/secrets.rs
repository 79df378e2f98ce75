//! Loads the secrets of systemd credentials, and determines whether a plugin may still know others.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Instant;

use zeroize::Zeroizing;

use crate::config::Config;
use crate::error::Result;
use crate::host::credential::CredentialError;
use crate::host::units::UnitsError;
use crate::plugin::EarlierSecrets;
use crate::secret::{MAX_BYTES, Secrets};
use crate::store::MountFilter;
use crate::store::registry::{Creation, Record, RecordFilter, Registry, Standing};
use crate::store::rows::{MountKey, MountRow};
use crate::volume::context::Context;
use crate::volume::errors::credential::SecretsError;
use crate::volume::model::volume::{Volume, may_have_had_secrets};

impl Context {
    /// Returns the secrets of a systemd credential. systemd is queried at each use. If it does not find the credential, or there
    /// is no systemd, those of csid's start are used.
    pub(in crate::volume) async fn credential(&self, name: &str) -> Result<Secrets> {
        if name.is_empty() || name.starts_with('.') || name.contains('/') {
            return Err(SecretsError::NoName { name: name.to_owned() }.into());
        }
        let (found, unknown) = match self.units.credential(name, MAX_BYTES).await {
            Ok(found) => (found, SecretsError::Unknown { name: name.to_owned() }),
            Err(CredentialError::Units(UnitsError::NoManager { .. })) => {
                (None, SecretsError::NotGiven { name: name.to_owned() })
            }
            Err(source) => {
                return Err(SecretsError::NotLoaded { name: name.to_owned(), source: source.into() }.into());
            }
        };
        let document = match found {
            Some(document) => document,
            None => given_at_start(name)
                .map_err(|source| SecretsError::Unreadable { name: name.to_owned(), source })?
                .ok_or(unknown)?,
        };
        Secrets::of_credential(&document)
    }

    /// Returns whether an earlier csid may have sent the plugin secrets. That of a volume's row may have been sent. Calls for other hosts leave no row, so each
    /// credential that csid.toml permits them may have been sent, too.
    pub(in crate::volume) async fn may_have_sent_secrets(&self, plugin: &str) -> Result<bool> {
        if has_credentials(&self.config.borrow()) {
            return Ok(true);
        }
        let plugin = Some(plugin.to_owned());
        let mounts = MountFilter { plugin: plugin.clone(), ..MountFilter::default() };
        if self.store.mounts(mounts).await?.iter().any(|(row, _)| may_have_had_secrets(row)) {
            return Ok(true);
        }
        let filter = RecordFilter { plugin, ..RecordFilter::default() };
        Ok(self.records.registry.records(filter).await?.0.iter().any(tells_of_secrets))
    }

    /// Returns the secrets of a call, or those of the credential that it names, within the call's deadline. `None`: it has
    /// neither.
    pub(in crate::volume) async fn given(
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
            Err(_) => Err(SecretsError::Late { name }.into()),
        }
    }
}

/// Returns the plugins to which an earlier csid may have sent secrets, by the rows that csid finds at its start. If the records cannot
/// be read, that is each plugin.
pub async fn earlier_secrets(
    config: &Config,
    mounts: &[MountRow],
    registry: &dyn Registry,
) -> EarlierSecrets {
    if has_credentials(config) {
        return EarlierSecrets::OfAll;
    }
    let records = match registry.records(RecordFilter::default()).await {
        Ok((records, _)) => records,
        Err(error) => {
            tracing::warn!(%error, "csid does not know which plugins had secrets, and withholds their messages");
            return EarlierSecrets::OfAll;
        }
    };
    let of_mounts = mounts.iter().filter(|row| may_have_had_secrets(row)).map(|row| &row.volume.plugin);
    let of_records =
        records.iter().filter(|record| tells_of_secrets(record)).map(|record| &record.volume.plugin);
    EarlierSecrets::Of(of_mounts.chain(of_records).cloned().collect::<BTreeSet<_>>())
}

/// Returns whether the plugins may get secrets in calls for other hosts.
fn has_credentials(config: &Config) -> bool {
    config.cluster.as_ref().is_some_and(|cluster| !cluster.controller_credentials.is_empty())
}

/// Reads a credential that systemd gave csid at its start. `None`: there is none of that name.
fn given_at_start(name: &str) -> std::io::Result<Option<Zeroizing<Vec<u8>>>> {
    let Some(directory) = std::env::var_os("CREDENTIALS_DIRECTORY") else { return Ok(None) };
    match File::open(Path::new(&directory).join(name)) {
        Ok(file) => read(file).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads one byte more than the limit at most; a longer document is then refused. The buffer never grows, so no copy stays in
/// memory.
fn read(file: File) -> std::io::Result<Zeroizing<Vec<u8>>> {
    let mut document = Zeroizing::new(Vec::with_capacity(MAX_BYTES + 1));
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut document)?;
    Ok(document)
}

impl Volume {
    /// Returns whether messages of a plugin about this mount may repeat secrets that are not at hand. These are the mount's own,
    /// unless `given`, and those of other users of the volume, past or present.
    pub(in crate::volume) fn has_forgotten_secrets(&self, key: &MountKey, given: bool) -> bool {
        self.mounts.iter().any(|mount| {
            mount.status.secrets_beside || (may_have_had_secrets(mount) && !(given && mount.key == *key))
        })
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
    let attached = record.attachments.iter().any(|at| {
        // An attachment by a claim notes, too, that it had none.
        let had = at.secrets.as_ref().is_some_and(|had| had.given || had.credential.is_some());
        had || at.by_call.as_ref().is_some_and(|call| call.secrets_given)
    });
    registered || claimed || attached
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;
    use crate::secret::freed::{self, SECRET};
    use crate::store::Store;
    use crate::store::registry::{AttachSecrets, Attachment, VolumeName};
    use crate::store::rows::Leg;
    use crate::volume::model::step::tests::begun;

    #[tokio::test]
    async fn row_with_secrets_names_its_plugin() {
        let root = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(&root.path().join("journal"), root.path(), None).unwrap();
        let mut mount = MountRow::clone(&begun().mounts[0]);
        let found = async |store: &Store, mount: &MountRow| {
            earlier_secrets(&Config::default(), std::slice::from_ref(mount), store).await
        };
        assert_eq!(found(&store, &mount).await, EarlierSecrets::default());
        mount.spec.secrets_given = true;
        assert_eq!(found(&store, &mount).await, EarlierSecrets::Of(BTreeSet::from(["p".to_owned()])));
    }

    #[test]
    fn attachment_without_secrets_says_nothing_of_any() {
        let of = |credential: Option<&str>, given| {
            let secrets = Some(AttachSecrets { credential: credential.map(str::to_owned), given });
            let at = Attachment { secrets, ..Attachment::new("n1", Leg::Present) };
            let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
            tells_of_secrets(&Record { attachments: vec![at], ..Record::none(name) })
        };
        assert_eq!([of(None, false), of(Some("c"), false), of(None, true)], [false, true, true]);
    }

    #[test]
    fn secret_file_is_read_to_its_bound_and_wiped() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(SECRET.as_bytes()).unwrap();
        file.set_len(10 * MAX_BYTES as u64).unwrap();
        file.rewind().unwrap();
        let found = freed::with_the_secret(|| assert_eq!(read(file).unwrap().len(), MAX_BYTES + 1));
        assert_eq!(found, 0);
    }
}
