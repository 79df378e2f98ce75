//! Fields of a JSON value that this version does not know. They are written back with the value, whatever else of it has changed.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The unknown fields of an object and of the objects in it. Objects in arrays have none: nothing names them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Rest {
    fields: Map<String, Value>,
    below: BTreeMap<String, Rest>,
}

impl Rest {
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.below.is_empty()
    }

    /// Returns what `known` does not have of `all`.
    fn of(all: &Value, known: &Value) -> Rest {
        let mut rest = Rest::default();
        let (Value::Object(all), Value::Object(known)) = (all, known) else { return rest };
        for (name, value) in all {
            match known.get(name) {
                None => drop(rest.fields.insert(name.clone(), value.clone())),
                Some(known) => {
                    let below = Rest::of(value, known);
                    if !below.is_empty() {
                        rest.below.insert(name.clone(), below);
                    }
                }
            }
        }
        rest
    }

    /// Adds the fields to an object that has none of these names.
    fn add_to(&self, value: &mut Value) {
        let Value::Object(object) = value else { return };
        for (name, field) in &self.fields {
            object.entry(name.clone()).or_insert_with(|| field.clone());
        }
        for (name, rest) in &self.below {
            if let Some(value) = object.get_mut(name) {
                rest.add_to(value);
            }
        }
    }
}

/// Reads a value, and what of it is unknown.
pub(crate) fn read<T: Serialize + DeserializeOwned>(value: &[u8]) -> serde_json::Result<(T, Rest)> {
    let known: T = serde_json::from_slice(value)?;
    // As a rule this version has written it.
    if serde_json::to_vec(&known)? == value {
        return Ok((known, Rest::default()));
    }
    let rest = Rest::of(&serde_json::from_slice(value)?, &serde_json::to_value(&known)?);
    Ok((known, rest))
}

/// Writes a value with the unknown fields of the value in whose place it comes.
pub(crate) fn write<T: Serialize>(value: &T, rest: Option<&Rest>) -> serde_json::Result<Vec<u8>> {
    let Some(rest) = rest.filter(|rest| !rest.is_empty()) else { return serde_json::to_vec(value) };
    let mut value = serde_json::to_value(value)?;
    rest.add_to(&mut value);
    serde_json::to_vec(&value)
}

#[cfg(test)]
mod tests {
    use csid::store::registry::{Creation, Registration, Standing};
    use csid::store::testing::samples::record;
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_fields_are_written_back() {
        let mut registration = record("data", &[]).registration.unwrap();
        registration.standing = Standing::Creating(Creation::default());
        let mut all = serde_json::to_value(&registration).unwrap();
        all["new"] = json!({"a": [1, 2]});
        all["spec"]["new"] = json!(7);
        all["standing"]["creating"]["new"] = json!(8);
        let (known, rest) = read::<Registration>(&serde_json::to_vec(&all).unwrap()).unwrap();
        assert!(known == registration);

        registration.capacity = Some(9);
        all["capacity"] = json!(9);
        let written = |registration: &Registration| -> Value {
            serde_json::from_slice(&write(registration, Some(&rest)).unwrap()).unwrap()
        };
        assert_eq!(written(&registration), all);
        // What was in a part that is gone goes with it.
        registration.standing = Standing::Registered;
        all["standing"] = json!("registered");
        assert_eq!(written(&registration), all);
    }

    #[test]
    fn known_field_is_not_kept_as_unknown() {
        let creation = Creation { unasked: true, ..Creation::default() };
        let (_, rest) = read::<Creation>(&serde_json::to_vec(&creation).unwrap()).unwrap();
        assert!(rest.is_empty());
        // The field is left out of the JSON while it is false.
        let written = write(&Creation::default(), Some(&rest)).unwrap();
        assert!(!serde_json::from_slice::<Creation>(&written).unwrap().unasked);
    }
}
