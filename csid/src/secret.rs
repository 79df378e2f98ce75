//! Secrets of one call: they live in the request's frame and are wiped with it. The type has no Debug, no Display and no
//! Serialize, so that no log line, event or row can hold one by accident.

use std::collections::BTreeMap;

use zeroize::Zeroizing;

use crate::error::{Error, Result};

/// The largest secret document csid reads (CSI rule 11 bounds a map to 4 KiB; JSON quotes it).
pub const MAX_BYTES: usize = 16 * 1024;

#[derive(Clone)]
pub struct Secrets {
    map: BTreeMap<String, Zeroizing<String>>,
    is_credential: bool,
}

impl Secrets {
    /// Read a JSON object of strings. Keys are `[A-Za-z0-9._-]+` (CSI rule 17).
    pub fn from_json(document: &[u8]) -> Result<Self> {
        let wrong = || Error::invalid("the secrets are no JSON object of strings");
        if document.len() > MAX_BYTES {
            return Err(Error::invalid(format!("the secrets are larger than {MAX_BYTES} bytes")));
        }
        // serde_json's own messages may quote the document; they are dropped.
        let map: BTreeMap<String, Zeroizing<String>> =
            serde_json::from_slice::<BTreeMap<String, String>>(document)
                .map_err(|_| wrong())?
                .into_iter()
                .map(|(key, value)| (key, Zeroizing::new(value)))
                .collect();
        let plain = |key: &String| {
            !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        if !map.keys().all(plain) {
            return Err(Error::invalid("a secret's key is not of [A-Za-z0-9._-]"));
        }
        Ok(Secrets { map, is_credential: false })
    }

    /// The host's, out of a systemd credential, whoever named that.
    pub fn of_credential(document: &[u8]) -> Result<Self> {
        Ok(Secrets { is_credential: true, ..Self::from_json(document)? })
    }

    /// They are not the caller's own: root put them where systemd finds them.
    pub fn is_credential(&self) -> bool {
        self.is_credential
    }

    /// The map as an RPC carries it.
    pub fn for_rpc(&self) -> BTreeMap<String, String> {
        self.map.iter().map(|(key, value)| (key.clone(), value.to_string())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_object_of_strings_is_refused_without_quoting_it() {
        for wrong in
            [&b"hunter2"[..], b"[\"hunter2\"]", b"{\"a\":{\"hunter2\":1}}", b"{\"hunter2 \":\"x\"}", b"\xff"]
        {
            let error = Secrets::from_json(wrong).err().unwrap();
            assert!(!error.message.contains("hunter2"), "{error}");
        }
    }
}
