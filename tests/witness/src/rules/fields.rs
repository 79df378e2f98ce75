//! Rules 11 to 15 and 17: what a request looks like by itself.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Call, Outcome, Verdict};

const STRING_BYTES: usize = 128;
const NODE_ID_BYTES: usize = 256;
const MAP_BYTES: u64 = 4096;

/// Lists and maps that CSI calls required.
const REQUIRED: &[(&str, &str)] = &[
    ("CreateVolume", "volume_capabilities"),
    ("ValidateVolumeCapabilities", "volume_capabilities"),
    ("ControllerModifyVolume", "mutable_parameters"),
    ("CreateVolumeGroupSnapshot", "source_volume_ids"),
    ("DeleteVolumeGroupSnapshot", "snapshot_ids"),
    ("GetVolumeGroupSnapshot", "snapshot_ids"),
];

#[derive(Default)]
pub(super) struct Fields {
    /// Over-long values of the plugin's own answers: a CO gives them back as they came.
    given: BTreeSet<String>,
}

impl Fields {
    pub(super) fn begin(&self, call: &Call, verdict: &mut Verdict) {
        let request = &call.request;
        let mut long = Vec::new();
        too_long("", request, &mut long);
        long.retain(|(_, value)| !self.given.contains(&value.to_string()));
        verdict.check(11, long.is_empty(), &[call.id], || {
            let fields: Vec<&str> = long.iter().map(|(field, _)| *field).collect();
            format!("{} with a longer {} than CSI allows", call.rpc, fields.join(", "))
        });

        for (_, field) in REQUIRED.iter().filter(|(rpc, _)| *rpc == call.rpc) {
            verdict.check(12, !request[*field].is_null(), &[call.id], || {
                format!("{} without {field}", call.rpc)
            });
        }
        if let ("CreateVolume" | "CreateSnapshot" | "CreateVolumeGroupSnapshot", name) =
            (call.rpc.as_str(), call.text("name"))
        {
            verdict.check(13, !name.contains(is_control), &[call.id], || {
                format!("{} with the name {name:?}", call.rpc)
            });
        }
        if let Value::Object(range) = &request["capacity_range"] {
            let holds = !range.is_empty() && range.values().all(|bound| bound.as_i64() >= Some(0));
            verdict.check(14, holds, &[call.id], || {
                format!("{} with the capacity_range {}", call.rpc, request["capacity_range"])
            });
        }
        if let Some(secrets) = request["secrets"]["values"].as_object() {
            let odd = secrets.keys().find(|key| key.is_empty() || key.contains(is_odd_in_a_key));
            verdict.check(17, odd.is_none(), &[call.id], || {
                format!("{} with the secret key {:?}", call.rpc, odd.map_or("", String::as_str))
            });
        }
        self.topology(call, verdict);
    }

    /// A preferred list alone is allowed by csi.proto's text: it is among the requisite where there is one.
    fn topology(&self, call: &Call, verdict: &mut Verdict) {
        let mut say = |holds, what: &str| {
            verdict.check(15, holds, &[call.id], || format!("{} with {what}", call.rpc));
        };
        let required = &call.request["accessibility_requirements"];
        let list = |field: &str| required[field].as_array().map_or(&[] as &[Value], Vec::as_slice);
        let (requisite, preferred) = (list("requisite"), list("preferred"));
        if required.is_object() {
            say(
                !requisite.is_empty() || !preferred.is_empty(),
                "a topology requirement that names no topology",
            );
            let is_among = requisite.is_empty() || preferred.iter().all(|one| requisite.contains(one));
            say(is_among, "a preferred topology that is not requisite");
        }
        let single = &call.request["accessible_topology"];
        for one in requisite.iter().chain(preferred).chain(single.is_object().then_some(single)) {
            let keys = one["segments"].as_object().into_iter().flatten();
            let keys: Vec<String> = keys.map(|(key, _)| key.to_lowercase()).collect();
            let unique: BTreeSet<&String> = keys.iter().collect();
            say(unique.len() == keys.len(), "topology keys that differ in case only");
        }
    }

    pub(super) fn end(&mut self, outcome: &Outcome) {
        if let Outcome::Ok(answer) = outcome {
            let mut long = Vec::new();
            too_long("", answer, &mut long);
            self.given.extend(long.iter().map(|(_, value)| value.to_string()));
        }
    }
}

/// Every string, map and list of flags in `value` that is longer than CSI allows.
fn too_long<'a>(field: &'a str, value: &'a Value, found: &mut Vec<(&'a str, &'a Value)>) {
    let is_long = match value {
        Value::String(_) if field.ends_with("_path") => false,
        Value::String(text) => text.len() > if field == "node_id" { NODE_ID_BYTES } else { STRING_BYTES },
        // Masked: `{"bytes": …, "values": …}`.
        Value::Object(map) if map.contains_key("values") => value["bytes"].as_u64() > Some(MAP_BYTES),
        Value::Object(map) if field == "segments" => {
            let bytes: usize =
                map.iter().map(|(key, value)| key.len() + value.as_str().map_or(0, str::len)).sum();
            bytes as u64 > MAP_BYTES
        }
        Value::Object(map) => {
            map.iter().for_each(|(field, value)| too_long(field, value, found));
            false
        }
        Value::Array(list) => {
            list.iter().for_each(|value| too_long(field, value, found));
            false
        }
        _ => false,
    };
    if is_long {
        found.push((field, value));
    }
}

/// CSI forbids these in names; it does not forbid tabs and line ends.
fn is_control(c: char) -> bool {
    c.is_control() && !matches!(c, '\t' | '\n' | '\r') || c == '\u{feff}'
}

fn is_odd_in_a_key(c: char) -> bool {
    !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
}
