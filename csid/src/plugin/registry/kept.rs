//! What the journal keeps of an instance: its spec, and, while it is tried, whose place it is to have.

use serde_json::Value;

use crate::error::{Error, Result};
use crate::plugin::PluginSpec;
use crate::store::rows::PluginRow;

/// Beside the keys of the spec, none of which has this name.
const REPLACES: &str = "replaces";

pub(super) struct Kept {
    pub spec: PluginSpec,
    /// The instance in whose place it is to be.
    pub replaces: Option<String>,
}

impl Kept {
    pub fn row(&self, id: &str, number: u64, uid: u32) -> Result<PluginRow> {
        let unwritten = |error| Error::internal(format!("the spec cannot be written: {error}"));
        let mut spec = serde_json::to_value(&self.spec).map_err(unwritten)?;
        if let (Some(spec), Some(replaces)) = (spec.as_object_mut(), &self.replaces) {
            spec.insert(REPLACES.to_owned(), Value::from(replaces.clone()));
        }
        let (id, instance) = (id.to_owned(), self.spec.instance().to_owned());
        Ok(PluginRow { id, instance, number, uid, spec: spec.to_string() })
    }

    pub fn read(row: &PluginRow) -> Result<Kept, String> {
        let mut spec: Value = serde_json::from_str(&row.spec).map_err(|error| error.to_string())?;
        let replaces = spec.as_object_mut().and_then(|spec| spec.remove(REPLACES));
        let replaces = replaces.as_ref().and_then(Value::as_str).map(str::to_owned);
        let spec: PluginSpec = serde_json::from_value(spec).map_err(|error| error.to_string())?;
        spec.validate(&row.id).map_err(|error| error.message)?;
        Ok(Kept { spec, replaces })
    }
}
