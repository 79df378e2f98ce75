//! The secrets of a mount that names a systemd credential instead of giving them.

use std::path::Path;

use crate::error::{Error, Kind, Result};
use crate::secret::Secrets;
use crate::volume::Shared;

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
