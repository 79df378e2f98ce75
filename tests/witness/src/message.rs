//! CSI's messages by their descriptors: which RPC a path names, and a message as JSON with everything masked that no log
//! may show. Numbers, types and the secret option come from csi.proto; nothing here names an RPC.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use prost_reflect::{
    DescriptorPool, DynamicMessage, ExtensionDescriptor, FieldDescriptor, Kind, MessageDescriptor,
    ReflectMessage, Value,
};
use serde_json::{Map, Value as Json, json};

/// An RPC of CSI.
pub(crate) struct Method {
    pub(crate) name: String,
    pub(crate) input: MessageDescriptor,
    pub(crate) output: MessageDescriptor,
    /// Whether the RPC streams. Its messages are forwarded as they come, and not recorded.
    pub(crate) streams: bool,
}

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    DescriptorPool::decode(csi_proto::FILE_DESCRIPTOR_SET).expect("csi.proto's descriptors are whole")
});

static SECRET: LazyLock<ExtensionDescriptor> =
    LazyLock::new(|| POOL.get_extension_by_name("csi.v1.csi_secret").expect("csi.proto declares csi_secret"));

static METHODS: LazyLock<HashMap<String, Method>> = LazyLock::new(|| {
    let methods = POOL.services().flat_map(|service| service.methods().collect::<Vec<_>>());
    let named = methods.map(|method| {
        let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
        let known = Method {
            name: method.name().to_owned(),
            input: method.input(),
            output: method.output(),
            streams: method.is_client_streaming() || method.is_server_streaming(),
        };
        (path, known)
    });
    named.collect()
});

/// The RPC that an HTTP/2 `:path` names.
pub(crate) fn method(path: &str) -> Option<&'static Method> {
    METHODS.get(path)
}

/// Whether faults can be put into it.
pub(crate) fn is_unary(name: &str) -> bool {
    METHODS.values().any(|method| method.name == name && !method.streams)
}

/// The one message of a unary body: a byte that says whether it is compressed, four of length, the message.
pub(crate) fn decode(descriptor: &MessageDescriptor, mut body: Bytes) -> Option<DynamicMessage> {
    let length = u32::from_be_bytes(body.get(1..5)?.try_into().ok()?) as usize;
    if body[0] != 0 || body.len() != 5 + length {
        return None;
    }
    DynamicMessage::decode(descriptor.clone(), body.split_off(5)).ok()
}

pub(crate) fn encode(message: &DynamicMessage) -> Bytes {
    let mut body = BytesMut::with_capacity(5 + message.encoded_len());
    body.put_u8(0);
    body.put_u32(message.encoded_len().try_into().expect("it was no longer when it was decoded"));
    body.put(message.encode_to_vec().as_slice());
    body.freeze()
}

/// Hides values, and lets them be compared: the digest is keyed with what only this process knows, so equal values of a
/// field look alike in one log and nobody can search for a value with it.
#[derive(Default)]
pub(crate) struct Mask(RandomState);

impl Mask {
    /// The fields that are set, in CSI's names; enums by name. A masked map or list is `{"bytes": …, "values": …}`.
    pub(crate) fn show(&self, message: &DynamicMessage) -> Json {
        let fields = message.fields().map(|(field, value)| {
            let shown = match is_hidden(&field) {
                true => self.hide(field.name(), value),
                false => self.plain(&field, value),
            };
            (field.name().to_owned(), shown)
        });
        Json::Object(fields.collect())
    }

    fn hide(&self, field: &str, value: &Value) -> Json {
        let digest = |text: &str| format!("{:016x}", self.0.hash_one((field, text)));
        match value {
            Value::Map(map) => {
                let pairs = map.iter().filter_map(|(key, value)| Some((key.as_str()?, value.as_str()?)));
                let bytes: usize = pairs.clone().map(|(key, value)| key.len() + value.len()).sum();
                let values: Map<_, _> =
                    pairs.map(|(key, value)| (key.to_owned(), digest(value).into())).collect();
                json!({"bytes": coarse(bytes), "values": values})
            }
            Value::List(list) => {
                let texts = list.iter().filter_map(Value::as_str);
                let bytes: usize = texts.clone().map(str::len).sum();
                json!({"bytes": coarse(bytes), "values": texts.map(digest).collect::<Vec<_>>()})
            }
            other => other.as_str().map_or(Json::Null, |text| digest(text).into()),
        }
    }

    fn plain(&self, field: &FieldDescriptor, value: &Value) -> Json {
        match value {
            Value::List(list) => list.iter().map(|one| self.plain(field, one)).collect(),
            Value::Map(map) => {
                let pairs = map.iter().filter_map(|(key, value)| Some((key.as_str()?, value.as_str()?)));
                pairs.map(|(key, value)| (key.to_owned(), Json::from(value))).collect()
            }
            Value::Message(message) => self.show(message),
            Value::EnumNumber(number) => {
                let kind = field.kind();
                let named = kind.as_enum().and_then(|kind| kind.get_value(*number));
                named.map_or_else(|| (*number).into(), |value| value.name().into())
            }
            Value::String(text) => text.as_str().into(),
            Value::Bool(flag) => (*flag).into(),
            Value::I32(number) => (*number).into(),
            Value::I64(number) => (*number).into(),
            Value::U32(number) => (*number).into(),
            Value::U64(number) => (*number).into(),
            Value::F32(_) | Value::F64(_) | Value::Bytes(_) => Json::Null,
        }
    }
}

/// Rounded up, so that CSI's limit can be checked and no secret's length is shown.
fn coarse(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}

/// CO rule 17: secrets by their option; mount flags, the opaque contexts and parameters by name, as drivers put
/// credentials into them; and a plugin's own words, which may repeat any of it.
fn is_hidden(field: &FieldDescriptor) -> bool {
    field.options().get_extension(&SECRET).as_bool() == Some(true)
        || matches!(
            field.name(),
            "mount_flags"
                | "volume_context"
                | "publish_context"
                | "parameters"
                | "mutable_parameters"
                | "message"
                | "reason"
        )
}

/// An answer that no plugin should give, made from one that it gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alteration {
    /// Every string is empty: names, ids.
    EmptyStrings,
    /// Every string is 64 KiB long.
    LongStrings,
    /// Every enum has a number that CSI does not know.
    UnknownEnums,
}

impl Alteration {
    /// Applies the change to a message. The entries of maps stay as they are.
    pub(crate) fn apply(self, message: &mut DynamicMessage) {
        let descriptor = message.descriptor();
        for field in descriptor.fields().filter(|field| !field.is_map()) {
            // An empty string is not set, and can still be made long; the arms of a oneof cannot all be.
            let missing = !message.has_field(&field);
            if missing
                && (field.containing_oneof().is_some() || field.kind() != Kind::String || field.is_list())
            {
                continue;
            }
            match message.get_field_mut(&field) {
                Value::List(list) => list.iter_mut().for_each(|value| self.value(value)),
                value => self.value(value),
            }
        }
    }

    fn value(self, value: &mut Value) {
        match (self, value) {
            (_, Value::Message(message)) => self.apply(message),
            (Alteration::EmptyStrings, Value::String(text)) => text.clear(),
            (Alteration::LongStrings, Value::String(text)) => *text = "long".repeat(16 * 1024),
            (Alteration::UnknownEnums, Value::EnumNumber(number)) => *number = 9999,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use csi_proto::csi::v1::{
        ControllerPublishVolumeRequest, DeleteVolumeRequest, NodeGetVolumeStatsResponse, VolumeCondition,
    };

    use super::*;

    fn shown(mask: &Mask, rpc: &str, message: &impl Message) -> Json {
        let method = method(&format!("/csi.v1.Controller/{rpc}")).unwrap();
        let bytes = message.encode_to_vec();
        mask.show(&DynamicMessage::decode(method.input.clone(), bytes.as_slice()).unwrap())
    }

    #[test]
    fn of_a_secret_only_key_and_limit_are_shown() {
        let mask = Mask::default();
        for (length, told) in [(1, 64), (4095, 4096), (4096, 4160)] {
            let secrets = [("k".to_owned(), "s".repeat(length))].into();
            let request = DeleteVolumeRequest { volume_id: "v".into(), secrets };
            let shown = shown(&mask, "DeleteVolume", &request);
            assert_eq!((&shown["volume_id"], &shown["secrets"]["bytes"]), (&"v".into(), &told.into()));
            assert!(shown["secrets"]["values"]["k"].is_string());
            assert!(!shown.to_string().contains("ss"), "{shown}");
        }
    }

    #[test]
    fn plugin_messages_are_not_shown() {
        let condition = VolumeCondition { abnormal: true, message: "no login with hunter2".into() };
        let answer = NodeGetVolumeStatsResponse { volume_condition: Some(condition), ..Default::default() };
        let output = method("/csi.v1.Node/NodeGetVolumeStats").unwrap().output.clone();
        let answer = DynamicMessage::decode(output, answer.encode_to_vec().as_slice()).unwrap();
        let shown = Mask::default().show(&answer);
        assert_eq!(shown["volume_condition"]["abnormal"], true);
        assert!(!shown.to_string().contains("hunter2"), "{shown}");
    }

    #[test]
    fn equal_values_match_within_one_field_of_a_run() {
        let map = || [("k".to_owned(), "value".to_owned())].into();
        let request =
            ControllerPublishVolumeRequest { secrets: map(), volume_context: map(), ..Default::default() };
        let (mask, other) = (Mask::default(), Mask::default());
        let [first, again, elsewhere] =
            [&mask, &mask, &other].map(|mask| shown(mask, "ControllerPublishVolume", &request));
        assert_eq!(first, again);
        assert_ne!(first["secrets"], first["volume_context"]);
        assert_ne!(first["secrets"], elsewhere["secrets"]);
    }
}
