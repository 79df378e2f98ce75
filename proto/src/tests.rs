//! Every message is filled through the descriptor, so a field that a later csi.proto adds is tested too.

use protox::prost_reflect::prost::Message;
use protox::prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value,
};

use crate::csi::v1::debug_of;

const CANARY: &str = "canary-7f3a";
const PLAIN: &str = "plain-51c2";

fn pool() -> DescriptorPool {
    DescriptorPool::decode(crate::FILE_DESCRIPTOR_SET).unwrap()
}

fn messages(pool: &DescriptorPool) -> Vec<MessageDescriptor> {
    pool.all_messages().filter(|m| m.package_name() == "csi.v1" && !m.is_map_entry()).collect()
}

fn is_secret(pool: &DescriptorPool, field: &FieldDescriptor) -> bool {
    let option = pool.get_extension_by_name("csi.v1.csi_secret").unwrap();
    field.options().get_extension(&option).as_bool() == Some(true)
}

fn must_be_hidden(pool: &DescriptorPool, field: &FieldDescriptor) -> bool {
    is_secret(pool, field) || field.name() == "mount_flags" || field.name().ends_with("_context")
}

/// Every field set, those that must be hidden to the canary; `shown` counts the strings that may be seen.
fn fill(pool: &DescriptorPool, message: &MessageDescriptor, shown: &mut usize) -> DynamicMessage {
    let mut filled = DynamicMessage::new(message.clone());
    for field in message.fields() {
        let hide = must_be_hidden(pool, &field);
        let text = || Value::String(if hide { CANARY } else { PLAIN }.to_owned());
        let value = if field.is_map() {
            Value::Map([(MapKey::String(text().as_str().unwrap().to_owned()), text())].into())
        } else {
            let one = match field.kind() {
                Kind::String => {
                    *shown += usize::from(!hide && field.containing_oneof().is_none());
                    text()
                }
                Kind::Message(inner) => Value::Message(fill(pool, &inner, shown)),
                kind => Value::default_value(&kind),
            };
            if field.is_list() { Value::List(vec![one]) } else { one }
        };
        filled.set_field(&field, value);
    }
    filled
}

#[test]
fn co_rule_17_debug_shows_no_secret_context_or_mount_flag() {
    let pool = pool();
    for message in messages(&pool) {
        let mut shown = 0;
        let bytes = fill(&pool, &message, &mut shown).encode_to_vec();
        let debug = debug_of(message.full_name(), &bytes).expect("every message has its Debug");
        assert!(!debug.contains(CANARY), "{}: {debug}", message.full_name());
        if shown > 0 {
            assert!(debug.contains(PLAIN), "{} hides all: {debug}", message.full_name());
        }
    }
}

#[test]
fn the_secret_option_survives_the_build() {
    let pool = pool();
    let secrets: Vec<_> = messages(&pool)
        .iter()
        .flat_map(|m| m.fields().collect::<Vec<_>>())
        .filter(|f| is_secret(&pool, f))
        .collect();
    // The interface's convention, so that a lost option is noticed: what is called `secrets` is one.
    let named = messages(&pool).iter().filter(|m| m.get_field_by_name("secrets").is_some()).count();
    assert_eq!(secrets.len(), named);
    assert!(secrets.len() > 20, "{}", secrets.len());
}
