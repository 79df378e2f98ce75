//! Errors as answers: csid's own and those of D-Bus, each bounded in length.

use std::borrow::Cow;

use tracing::error;
use zbus::Message;

use super::contract::Map;
use crate::error::{Details, Error, Kind, Obstacle, SHOWN, Step, cut, shortened};

/// The failure of a call: an error of the contract, or one of D-Bus' own with its last name and a message.
pub(super) enum Failure {
    Ours(Error),
    Bus(&'static str, String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Ours(error)
    }
}

/// The limit of an error's text. The texts of callers in it are shortened where they are put in, and there are few.
const MAX_TEXT: usize = 2048;
/// The limit of an error's text with a plugin's message, and of that message in the details.
const MAX_PLUGIN_TEXT: usize = 4096;
/// The limit of a list in the details.
const MAX_LIST: usize = 256;

/// Returns an error's text with at most `most` bytes. A word longer than [`SHOWN`] is shortened, because such a word comes from
/// the caller.
fn bounded(text: &str, most: usize) -> Cow<'_, str> {
    match text.len() <= SHOWN {
        true => text.into(),
        false => {
            let words: String = text.split_inclusive(char::is_whitespace).map(shortened).collect();
            cut(&words, most).into_owned().into()
        }
    }
}

/// Encodes an error. Every error is encoded here, so that these limits hold for all.
pub(super) fn encode_failure(message: &Message, failure: Failure) -> Option<Message> {
    let header = message.header();
    let encoded = match failure {
        Failure::Bus(name, text) => Message::error(&header, format!("org.freedesktop.DBus.Error.{name}"))
            .build(&bounded(&text, MAX_TEXT)),
        Failure::Ours(error) => {
            let most = if error.details.rpc.is_some() { MAX_PLUGIN_TEXT } else { MAX_TEXT };
            Message::error(&header, format!("org.csid1.Error.{}", error.kind.name()))
                .build(&(bounded(&error.message, most), details(&error.details)))
        }
    };
    encoded.inspect_err(|why| error!(%why, "an error cannot be encoded")).ok()
}

/// Returns the contract's details of an error. A detail that does not apply is absent; `retryable` is always present.
fn details(details: &Details) -> Map {
    let mut map = Map::from([("retryable", details.retryable.into())]);
    let texts = [
        ("rpc", details.rpc, SHOWN),
        ("plugin-message", details.plugin_message.as_deref(), MAX_PLUGIN_TEXT),
        ("operation", details.operation.as_deref(), SHOWN),
        ("namespace", details.namespace.as_deref(), SHOWN),
        ("volume", details.volume.as_deref(), SHOWN),
        ("plugin", details.plugin.as_deref(), SHOWN),
        ("step", details.step.map(Step::name), SHOWN),
        ("obstacle", details.obstacle.map(Obstacle::name), SHOWN),
    ];
    for (key, text, most) in texts {
        if let Some(text) = text {
            map.insert(key, cut(text, most).into_owned().into());
        }
    }
    if let Some(code) = details.grpc_code {
        map.insert("grpc-code", code.into());
    }
    for (key, list) in [("holders", &details.holders), ("tags", &details.tags)] {
        if !list.is_empty() {
            let shown = list.iter().take(MAX_LIST).map(|text| shortened(text).into_owned());
            map.insert(key, shown.collect::<Vec<_>>().into());
        }
    }
    map
}

/// Returns the answer to a call whose answer has a descriptor, on a connection that passes none.
pub(super) fn without_descriptors(call: &Message) -> Option<Message> {
    let text = "the answer has a descriptor, and this connection did not negotiate descriptors";
    encode_failure(call, Error::new(Kind::NotSupported, text).into())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use zbus::OwnedVariant;

    use super::*;

    /// The answer's message and details, as the caller reads them.
    fn answer(failure: Error) -> (String, BTreeMap<String, OwnedVariant>) {
        let call = Message::method_call("/org/csid1", "Mount").build(&()).unwrap();
        encode_failure(&call, failure.into()).unwrap().body().deserialize().unwrap()
    }

    #[test]
    fn errors_text_and_lists_are_bounded() {
        let long = || Error::internal("a b ".repeat(1024));
        assert!(answer(long()).0.len() <= 2048, "csid's own");
        let plugins = long().with(|details| details.rpc = Some("NodeStageVolume"));
        assert_eq!(answer(plugins).0.len(), 4096, "the plugin's");
        let (_, details) = answer(Error::not_found("x").with(|details| {
            details.tags = (0..300).map(|n| format!("{n} {}", "t".repeat(300))).collect();
            details.holders.clone_from(&details.tags);
        }));
        for key in ["tags", "holders"] {
            let list = Vec::<String>::try_from(details[key].try_clone().unwrap()).unwrap();
            assert_eq!(list.len(), 256, "{key}");
            assert!(list.iter().all(|tag| tag.len() <= SHOWN), "{key}");
        }
    }

    #[test]
    fn details_have_the_types_of_the_contract() {
        let error = Error::internal("x").with(|details| {
            details.rpc = Some("NodeStageVolume");
            details.grpc_code = Some(9);
            details.holders = vec!["a".into()];
        });
        let map = details(&error.details);
        let types: Vec<_> =
            map.iter().map(|(key, value)| (*key, value.value_signature().to_string())).collect();
        let wanted = [("grpc-code", "u"), ("holders", "as"), ("retryable", "b"), ("rpc", "s")];
        assert_eq!(types, wanted.map(|(key, signature)| (key, signature.to_owned())));
    }
}
