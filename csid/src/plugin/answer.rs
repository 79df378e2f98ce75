//! Checks plugins' answers before they go into rows, logs and D-Bus. CSI rule 11 limits the plugin; csid accepts longer answers up to
//! limits of its own. It refuses a text that D-Bus cannot carry, because each later answer with that text would cost csid its
//! connection. Each function returns the fault as a text that follows the field's name.

use std::collections::BTreeMap;

use crate::plugin::rpc::map_bytes;
use crate::store::volume_handle::WITHOUT_ID;

const ID_BYTES: usize = 1024;
const BYTES: usize = 64 * 1024;
/// The bytes that an entry of a map takes besides its text.
const PLACE_BYTES: usize = 16;

type Checked = Result<(), String>;

/// An id of a volume, snapshot or node. Nor is it one that csid itself gives to a volume whose id it does not know.
pub fn id(id: &str) -> Checked {
    match id {
        "" => Err("is empty".to_owned()),
        id if id.starts_with(WITHOUT_ID) => Err(format!("begins with csid's own {WITHOUT_ID}")),
        id => plain(id, ID_BYTES),
    }
}

/// A list's next token.
pub fn token(token: &str) -> Checked {
    plain(token, BYTES)
}

/// Contexts, or places. A value may be of several lines.
pub fn maps<'a>(maps: impl IntoIterator<Item = &'a BTreeMap<String, String>>) -> Checked {
    let mut bytes = 0;
    for map in maps {
        bytes += map_bytes(map) + PLACE_BYTES;
        if map.keys().any(|key| key.contains(char::is_control)) {
            return Err("has a key with a control character in it".to_owned());
        }
        if map.values().any(|value| value.contains('\0')) {
            return Err("has a value with a NUL in it".to_owned());
        }
    }
    bounded(bytes, BYTES)
}

fn plain(text: &str, most: usize) -> Checked {
    match text.contains(char::is_control) {
        true => Err("has a control character in it".to_owned()),
        false => bounded(text.len(), most),
    }
}

fn bounded(bytes: usize, most: usize) -> Checked {
    match bytes > most {
        true => Err(format!("is longer than the {most} bytes that csid takes")),
        false => Ok(()),
    }
}
