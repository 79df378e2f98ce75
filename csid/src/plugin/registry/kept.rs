//! The journal's row of an instance: its spec, the instance that it replaced, and, while it is on trial, the instance that it is to
//! replace with that one's facts. An instance that a file defines has a row only where it runs under another name than the file gives.

use serde_json::Value;

use crate::plugin::errors::registry::{KeptSpecError, RegistrationError};
use crate::plugin::registry::facts::InstanceFacts;
use crate::plugin::spec::PluginSpec;
use crate::store::rows::PluginRow;

/// Keys in addition to those of the spec, none of which has these names.
const REPLACES: &str = "replaces";
const BEFORE: &str = "before";
const REPLACED: &str = "replaced";
const FILED: &str = "filed";

#[derive(Default)]
pub(super) struct Kept {
    pub spec: PluginSpec,
    /// The instance in whose place it is to be, as long as it is only tried.
    pub replaces: Option<String>,
    /// The facts of that instance. `None`: it was never seen.
    pub before: Option<InstanceFacts>,
    /// The instance that it replaced. A repeated upgrade is recognised by it.
    pub replaced: Option<String>,
    /// The instance's name in the file that defines it.
    pub filed: Option<String>,
}

impl Kept {
    pub fn new(spec: &PluginSpec) -> Kept {
        Kept { spec: spec.clone(), ..Kept::default() }
    }

    pub fn row(&self, id: &str, number: u64, uid: u32) -> Result<PluginRow, RegistrationError> {
        let unwritten = |source| RegistrationError::Unwritten { source };
        let mut spec = serde_json::to_value(&self.spec).map_err(unwritten)?;
        let texts = [(REPLACES, &self.replaces), (REPLACED, &self.replaced), (FILED, &self.filed)];
        if let Some(spec) = spec.as_object_mut() {
            let texts =
                texts.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value.clone()?.into())));
            spec.extend(texts);
            if let Some(before) = &self.before {
                spec.insert(BEFORE.to_owned(), serde_json::to_value(before).map_err(unwritten)?);
            }
        }
        let (id, instance) = (id.to_owned(), self.spec.instance().to_owned());
        Ok(PluginRow { id, instance, number, uid, spec: spec.to_string() })
    }

    pub fn read(row: &PluginRow) -> Result<Kept, KeptSpecError> {
        let mut spec: Value = serde_json::from_str(&row.spec)?;
        let before = spec.as_object_mut().and_then(|spec| spec.remove(BEFORE));
        let before = before.map(serde_json::from_value).transpose()?;
        let mut text = |key| match spec.as_object_mut()?.remove(key)? {
            Value::String(text) => Some(text),
            _ => None,
        };
        let (replaces, replaced, filed) = (text(REPLACES), text(REPLACED), text(FILED));
        let spec: PluginSpec = serde_json::from_value(spec)?;
        spec.validate(&row.id)?;
        Ok(Kept { spec, replaces, before, replaced, filed })
    }
}
