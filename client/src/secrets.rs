//! Secrets on their way to csid. They are zeroed when dropped, and the types that hold them have no Debug,
//! Display or Serialize, so that no log or error can hold one by accident.

use std::{collections::BTreeMap, fs::File, io, sync::Arc};

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, memfd_create, seek};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, MapAccess, Visitor},
    ser::SerializeMap,
};
use zbus::Type;
use zeroize::Zeroizing;

/// Names and values for a plugin. The values are zeroed when it is dropped.
#[derive(Default)]
pub struct Secrets(BTreeMap<String, Zeroizing<String>>);

/// The text is not a JSON object of strings. The error has only the place, because the parser's message may
/// quote a value.
#[derive(Debug, thiserror::Error)]
#[error("the secrets are not a JSON object of strings (line {line}, column {column})")]
pub struct BadSecrets {
    /// The line of the error, from 1.
    pub line: usize,
    /// The column of the error, from 1.
    pub column: usize,
}

impl Secrets {
    /// Returns an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Inserts a secret, or replaces the one of that name.
    pub fn insert(&mut self, name: String, value: Zeroizing<String>) {
        self.0.insert(name, value);
    }

    /// Parses a JSON object of strings. The caller zeroes the text.
    ///
    /// # Errors
    ///
    /// [`BadSecrets`] if the text is anything else, or has a name twice.
    pub fn from_json(text: &[u8]) -> Result<Self, BadSecrets> {
        let map: Parsed = serde_json::from_slice(text)
            .map_err(|error| BadSecrets { line: error.line(), column: error.column() })?;
        Ok(Self(map.0))
    }

    /// Writes the secrets into a sealed memfd, which csid accepts.
    ///
    /// # Errors
    ///
    /// An error of the operating system, if the memfd cannot be made.
    pub fn seal(&self) -> io::Result<SealedSecrets> {
        let fd = memfd_create("csid-secrets", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let mut file = File::from(fd);
        // Unbuffered: no copy stays behind on the heap.
        let mut json = serde_json::Serializer::new(&mut file);
        let mut map = (&mut json).serialize_map(Some(self.0.len())).map_err(io::Error::from)?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value.as_str()).map_err(io::Error::from)?;
        }
        map.end().map_err(io::Error::from)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
        seek(&file, SeekFrom::Start(0))?;
        Ok(SealedSecrets(Arc::new(std::os::fd::OwnedFd::from(file).into())))
    }
}

/// A sealed memfd with secrets, for one call, however often it is repeated. csid reads it from its beginning.
#[derive(Clone, Type)]
#[zbus(signature = "h")]
pub struct SealedSecrets(Arc<zbus::OwnedFd>);

impl Serialize for SealedSecrets {
    /// The number of the descriptor in the message, never its content.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

struct Parsed(BTreeMap<String, Zeroizing<String>>);

impl<'de> Deserialize<'de> for Parsed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Parsed;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
                let mut secrets = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if secrets.insert(name, Zeroizing::new(map.next_value::<String>()?)).is_some() {
                        return Err(A::Error::custom("a name twice"));
                    }
                }
                Ok(Parsed(secrets))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_parse_error_quotes_nothing() {
        for text in
            [r#"{"password": 4242}"#, r#""hunter2""#, r#"["hunter2"]"#, "hunter2", r#"{"a":"hunter2""#]
        {
            let error = Secrets::from_json(text.as_bytes()).map(|_| ()).unwrap_err();
            let said = format!("{error} {error:?}");
            assert!(!said.contains("hunter2") && !said.contains("4242"), "{said}");
        }
        assert!(Secrets::from_json(br#"{"a":"1","a":"2"}"#).is_err(), "a name twice");
        assert!(Secrets::from_json(b"{}").is_ok());
    }

    #[test]
    fn the_memfd_holds_the_json_and_is_sealed() {
        let secrets = Secrets::from_json(r#"{"user":"u","password":"a\"b\u0000ä"}"#.as_bytes()).unwrap();
        let sealed = secrets.seal().unwrap();
        let mut file = File::from(sealed.0.as_fd().try_clone_to_owned().unwrap());
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, r#"{"password":"a\"b\u0000ä","user":"u"}"#);
        assert!(file.write(b"x").is_err(), "sealed against writing");
        assert!(file.set_len(0).is_err(), "sealed against shrinking");
    }
}
