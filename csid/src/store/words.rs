//! Between a row's types and SQLite's: words for enums, JSON for what has parts, the same bits for u64.

use rusqlite::Row;
use rusqlite::types::Type;
use serde::de::value::{Error as WordError, StrDeserializer};
use serde::de::{DeserializeOwned, IntoDeserializer};
use serde::{Deserialize, Serialize};

pub(super) fn json<T: Serialize>(value: &T) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))
}

/// A unit variant's name in `rows.rs`.
pub(super) fn word<T: Serialize>(value: &T) -> rusqlite::Result<String> {
    Ok(json(value)?.trim_matches('"').to_owned())
}

pub(super) fn from_json<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str()?;
    serde_json::from_str(text)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(column, Type::Text, error.into()))
}

pub(super) fn from_word<'de, T: Deserialize<'de>>(row: &'de Row<'_>, column: usize) -> rusqlite::Result<T> {
    let word: StrDeserializer<'de, WordError> = row.get_ref(column)?.as_str()?.into_deserializer();
    T::deserialize(word)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(column, Type::Text, error.into()))
}

/// A text, or `None` for an empty one, as which each csid has written it.
pub(super) fn from_text(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<String>> {
    Ok(Some(row.get(column)?).filter(|text: &String| !text.is_empty()))
}

/// The text of an optional value, as [`from_text`] reads it.
pub(super) fn text(value: &Option<String>) -> &str {
    value.as_deref().unwrap_or_default()
}

pub(super) fn from_bits(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(column)? as u64)
}

/// An optional value in JSON: `None` is written as the type's default, that is "" or 0, as each csid has written it.
pub(super) mod or_default {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<T, S>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error>
    where
        T: Default + Serialize,
        S: Serializer,
    {
        match value {
            Some(value) => value.serialize(serializer),
            None => T::default().serialize(serializer),
        }
    }

    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: Default + Deserialize<'de> + PartialEq,
        D: Deserializer<'de>,
    {
        let value = T::deserialize(deserializer)?;
        Ok((value != T::default()).then_some(value))
    }
}
