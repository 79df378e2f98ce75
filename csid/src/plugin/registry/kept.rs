//! What the journal keeps of an instance: its spec, and, while it is tried, whose place it is to have. Of one that a file defines
//! it is kept only where it does not run by the name that it has there.

use serde_json::Value;

use crate::error::{Error, Result};
use crate::plugin::PluginSpec;
use crate::store::rows::PluginRow;

/// Beside the keys of the spec, none of which has these names.
const REPLACES: &str = "replaces";
const FILED: &str = "filed";

pub(super) struct Kept {
    pub spec: PluginSpec,
    /// The instance in whose place it is to be.
    pub replaces: Option<String>,
    /// The instance's name in the file that defines it.
    pub filed: Option<String>,
}

impl Kept {
    pub fn new(spec: &PluginSpec) -> Kept {
        Kept { spec: spec.clone(), replaces: None, filed: None }
    }

    pub fn row(&self, id: &str, number: u64, uid: u32) -> Result<PluginRow> {
        let unwritten = |error| Error::internal(format!("the spec cannot be written: {error}"));
        let mut spec = serde_json::to_value(&self.spec).map_err(unwritten)?;
        let more = [(REPLACES, &self.replaces), (FILED, &self.filed)];
        if let Some(spec) = spec.as_object_mut() {
            let more =
                more.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value.clone()?.into())));
            spec.extend(more);
        }
        let (id, instance) = (id.to_owned(), self.spec.instance().to_owned());
        Ok(PluginRow { id, instance, number, uid, spec: spec.to_string() })
    }

    pub fn read(row: &PluginRow) -> Result<Kept, String> {
        let mut spec: Value = serde_json::from_str(&row.spec).map_err(|error| error.to_string())?;
        let mut more = |key| match spec.as_object_mut()?.remove(key)? {
            Value::String(text) => Some(text),
            _ => None,
        };
        let (replaces, filed) = (more(REPLACES), more(FILED));
        let spec: PluginSpec = serde_json::from_value(spec).map_err(|error| error.to_string())?;
        spec.validate(&row.id).map_err(|error| error.message)?;
        Ok(Kept { spec, replaces, filed })
    }
}
