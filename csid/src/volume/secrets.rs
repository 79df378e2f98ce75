//! The secrets of a mount: those of the systemd credential that it names instead of giving them, and whether there were others,
//! which a plugin may still know.

use std::path::Path;

use crate::error::{Error, Kind, Result};
use crate::secret::Secrets;
use crate::store::rows::{MountKey, MountRow, MountSpec};
use crate::volume::Shared;
use crate::volume::record::UNKNOWN;
use crate::volume::state::Volume;

impl Shared {
    /// The secrets that a systemd credential of csid's holds.
    pub(super) fn credential(&self, name: &str) -> Result<Secrets> {
        let required = |why: String| {
            let text = format!(
                "credential {name}: {why}; add LoadCredential={name}:PATH to csid.service and restart csid"
            );
            Error::new(Kind::SecretRequired, text)
        };
        if name.is_empty() || name.starts_with('.') || name.contains('/') {
            return Err(Error::invalid(format!("`{name}` is no credential's name")));
        }
        let directory = std::env::var_os("CREDENTIALS_DIRECTORY")
            .ok_or_else(|| required("csid was started without credentials".into()))?;
        let document =
            std::fs::read(Path::new(&directory).join(name)).map_err(|error| required(error.to_string()))?;
        Secrets::from_json(&zeroize::Zeroizing::new(document))
    }
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

/// What was recorded from the kernel alone may have been made with any.
pub(super) fn may_have_had_secrets(mount: &MountRow) -> bool {
    let MountSpec { credential, secrets_given, secrets_beside, .. } = &mount.spec;
    *secrets_given || *secrets_beside || credential.is_some() || mount.key.consumer == UNKNOWN
}
