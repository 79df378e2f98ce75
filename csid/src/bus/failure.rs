//! Errors as answers: csid's own and those of D-Bus, each bounded in length.

use std::borrow::Cow;

use tracing::error;
use zbus::Message;

use super::contract::Map;
use crate::error::{Details, Error, Kind, Obstacle, Step};

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

/// The limit of a caller's text in an error.
const SHOWN: usize = 256;
/// The limit of an error's text, and of the plugin's message in its details.
const MAX_TEXT: usize = 4096;
const MAX_HOLDERS: usize = 256;

/// Returns a caller's text as an error shows it.
pub(super) fn shortened(text: &str) -> Cow<'_, str> {
    cut(text, SHOWN)
}

fn cut(text: &str, most: usize) -> Cow<'_, str> {
    const CUT: &str = "…";
    match text.len() <= most {
        true => text.into(),
        false => format!("{}{CUT}", &text[..text.floor_char_boundary(most - CUT.len())]).into(),
    }
}

/// Returns an error's text with at most [`MAX_TEXT`] bytes. A word longer than [`SHOWN`] is shortened, because such a word comes from
/// the caller.
fn bounded(text: &str) -> Cow<'_, str> {
    match text.len() <= SHOWN {
        true => text.into(),
        false => {
            let words: String = text.split_inclusive(char::is_whitespace).map(shortened).collect();
            cut(&words, MAX_TEXT).into_owned().into()
        }
    }
}

/// Encodes an error. Every error is encoded here, so that these limits hold for all.
pub(super) fn encode_failure(message: &Message, failure: Failure) -> Option<Message> {
    let header = message.header();
    let encoded = match failure {
        Failure::Bus(name, text) => {
            Message::error(&header, format!("org.freedesktop.DBus.Error.{name}")).build(&bounded(&text))
        }
        Failure::Ours(error) => Message::error(&header, format!("org.csid1.Error.{}", error.kind.name()))
            .build(&(bounded(&error.message), details(&error.details))),
    };
    encoded.inspect_err(|why| error!(%why, "an error cannot be encoded")).ok()
}

/// Returns the contract's details of an error. A detail that does not apply is absent; `retryable` is always present.
fn details(details: &Details) -> Map {
    let mut map = Map::from([("retryable", details.retryable.into())]);
    let texts = [
        ("rpc", details.rpc, SHOWN),
        ("plugin-message", details.plugin_message.as_deref(), MAX_TEXT),
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
    if !details.holders.is_empty() {
        let holders = details.holders.iter().take(MAX_HOLDERS);
        map.insert(
            "holders",
            holders.map(|holder| shortened(holder).into_owned()).collect::<Vec<_>>().into(),
        );
    }
    if !details.tags.is_empty() {
        map.insert("tags", details.tags.clone().into());
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
    use super::*;

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
