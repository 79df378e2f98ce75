//! Names of instances that registered themselves by a socket.

use std::path::Path;

use sha2::{Digest, Sha256};

/// The prefix of an instance's name. `BYTES` bytes of a digest follow, in hexadecimal.
const PREFIX: &str = "reg";
const BYTES: usize = 6;

/// The same for a socket of the same name, also after csid's restart; nobody else names one like it.
pub(super) fn instance(socket: &Path) -> String {
    let name = Sha256::digest(socket.file_name().unwrap_or_default().as_encoded_bytes());
    name.iter().take(BYTES).fold(PREFIX.to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

/// Whether an instance of this name registered itself.
pub(super) fn is_name(instance: &str) -> bool {
    let digest = instance.strip_prefix(PREFIX);
    digest.is_some_and(|hex| hex.len() == 2 * BYTES && hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
}
