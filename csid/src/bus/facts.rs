//! Details of a call for polkit's rules, besides its action: the namespace, the volume, the plugin, the unit and the owner's uid, if
//! the call names them. The arguments are decoded with the handlers' types, so both see the same values, even if a map has a key twice.
//! An empty namespace is `default` here as it is for the handlers.

use std::collections::{BTreeMap, HashMap};

use serde::de::DeserializeOwned;
use zbus::{Message, OwnedVariant, Type};

use super::contract::{MANAGER, Method, Object};
use super::rooms::Rooms;
use crate::names::DEFAULT_NAMESPACE;

pub(super) type CallFacts = BTreeMap<&'static str, String>;

type Options = HashMap<String, OwnedVariant>;

/// The limit of a value; every name of the contract is shorter. A longer value is left out, as a part of it could be another name.
const LONGEST: usize = 1024;

/// Returns the details of a call. `message` has the method's signature.
pub(super) fn of(method: &Method, object: &Object, message: &Message, rooms: &Rooms) -> CallFacts {
    let mut facts = CallFacts::new();
    if let Object::Plugin(id) = object {
        add(&mut facts, "plugin", id);
        if let Some(view) = rooms.plugins.view(id) {
            add(&mut facts, "unit", &view.unit);
        }
        return facts;
    }
    if method.interface != MANAGER {
        return facts;
    }
    let (names, options) = arguments(method.takes, message).unwrap_or_default();
    for key in ["namespace", "volume", "plugin", "unit"] {
        if let Some(text) = text(&options, key) {
            add(&mut facts, key, text);
        }
    }
    if let Some(unit) = text(&options, "bind").and_then(|bind| bind.strip_prefix("unit:")) {
        add(&mut facts, "unit", unit);
    }
    for (key, name) in positions(method).iter().zip(&names) {
        facts.remove(key);
        add(&mut facts, key, name);
    }
    facts
}

fn add(facts: &mut CallFacts, key: &'static str, text: &str) {
    let text = if key == "namespace" && text.is_empty() { DEFAULT_NAMESPACE } else { text };
    if !text.is_empty() && text.len() <= LONGEST {
        facts.insert(key, text.to_owned());
    }
}

/// Returns the text of an option. `None`: the call does not have the option, or not as a text.
fn text<'o>(options: &'o Options, key: &str) -> Option<&'o str> {
    options.get(key).and_then(|value| <&str>::try_from(&**value).ok())
}

/// Returns the meanings of a method's first strings.
fn positions(method: &Method) -> &'static [&'static str] {
    match method.name {
        "RegisterPlugin" | "UnregisterPlugin" | "WaitForPlugin" => &["plugin"],
        _ if method.takes.starts_with("ss") => &["namespace", "volume"],
        _ => &[],
    }
}

/// Returns the leading strings and the options.
fn arguments(takes: &str, message: &Message) -> Option<(Vec<String>, Options)> {
    fn read<T: DeserializeOwned + Type>(message: &Message) -> Option<T> {
        message.body().deserialize().ok()
    }
    Some(match takes {
        "a{sv}" => (Vec::new(), read(message)?),
        "ss" => {
            let (a, b): (String, String) = read(message)?;
            (vec![a, b], Options::new())
        }
        "sa{sv}" => {
            let (a, options): (String, Options) = read(message)?;
            (vec![a], options)
        }
        "ssa{sv}" => {
            let (a, b, options): (String, String, Options) = read(message)?;
            (vec![a, b], options)
        }
        "sssa{sv}" => {
            let (a, b, _, options): (String, String, String, Options) = read(message)?;
            (vec![a, b], options)
        }
        "sstta{sv}" => {
            let (a, b, _, _, options): (String, String, u64, u64, Options) = read(message)?;
            (vec![a, b], options)
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::dispatch::MEMBERS;

    #[test]
    fn every_signature_of_the_manager_is_known() {
        for method in MEMBERS.iter().map(|member| &member.method).filter(|method| method.interface == MANAGER)
        {
            let nameless = ["", "s", "tu"].contains(&method.takes);
            let known = ["a{sv}", "ss", "sa{sv}", "ssa{sv}", "sssa{sv}", "sstta{sv}"].contains(&method.takes);
            assert!(nameless || known, "{} takes {}", method.name, method.takes);
        }
    }
}
