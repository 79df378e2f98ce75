//! Names of the D-Bus contract: paths, interfaces, objects and methods.

use std::collections::BTreeMap;

use zbus::{ObjectPath, Variant};

/// An `a{sv}` of the contract.
pub(super) type Map = BTreeMap<&'static str, Variant<'static>>;

pub(super) const PATH: &str = "/org/csid1";
pub(super) const PLUGINS: &str = "/org/csid1/plugin";
pub(super) const MANAGER: &str = "org.csid1.Manager";
pub(super) const PLUGIN: &str = "org.csid1.Plugin";
pub(super) const CLUSTER: &str = "org.csid1.Cluster";
pub(super) const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
pub(super) const OBJECT_MANAGER: &str = "org.freedesktop.DBus.ObjectManager";
pub(super) const INTROSPECTABLE: &str = "org.freedesktop.DBus.Introspectable";
pub(super) const PEER: &str = "org.freedesktop.DBus.Peer";

/// A method that is served, and the signature of its arguments.
pub(super) struct Method {
    pub interface: &'static str,
    pub name: &'static str,
    pub takes: &'static str,
}

/// An object of the contract, by its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Object {
    /// A node that has only children.
    Node(&'static str),
    Manager,
    /// A plugin's id. The plugin may not exist, which only authorised callers learn.
    Plugin(String),
}

impl Object {
    pub fn at(path: &str) -> Option<Object> {
        match path {
            "/" => Some(Object::Node("org")),
            "/org" => Some(Object::Node("csid1")),
            PATH => Some(Object::Manager),
            PLUGINS => Some(Object::Node("")),
            _ => {
                let label = path.strip_prefix(PLUGINS)?.strip_prefix('/')?;
                id_of_label(label).map(Object::Plugin)
            }
        }
    }

    pub fn interfaces(&self) -> &'static [&'static str] {
        match self {
            Object::Node(_) => &[PEER, INTROSPECTABLE],
            Object::Manager => &[MANAGER, CLUSTER, PROPERTIES, OBJECT_MANAGER, PEER, INTROSPECTABLE],
            Object::Plugin(_) => &[PLUGIN, PROPERTIES, PEER, INTROSPECTABLE],
        }
    }
}

/// Returns the id as an element of a path, as sd_bus_path_encode encodes it: `_` and two hex digits replace a leading digit and every
/// character other than letters and digits.
pub(super) fn plugin_label(id: &str) -> String {
    let mut label = String::with_capacity(id.len());
    for (place, byte) in id.bytes().enumerate() {
        match byte.is_ascii_alphabetic() || (place > 0 && byte.is_ascii_digit()) {
            true => label.push(byte.into()),
            false => label.push_str(&format!("_{byte:02x}")),
        }
    }
    match label.is_empty() {
        true => "_".to_owned(),
        false => label,
    }
}

/// Returns the id that a path's element encodes. `None`: no id has this element.
fn id_of_label(text: &str) -> Option<String> {
    let mut id = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'_' {
            let hex = rest.get(..2)?;
            id.push(u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?);
            rest = &rest[2..];
        } else {
            id.push(*first);
        }
    }
    let id = String::from_utf8(id).ok()?;
    (plugin_label(&id) == text).then_some(id)
}

pub(super) fn plugin_path(id: &str) -> ObjectPath<'static> {
    // Only letters, digits, `_` and `/`: always a valid path.
    ObjectPath::from_string_unchecked(format!("{PLUGINS}/{}", plugin_label(id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_and_their_paths() {
        assert_eq!(Object::at("/org/csid1"), Some(Object::Manager));
        assert_eq!(Object::at("/org/csid1/plugin/a_2eb"), Some(Object::Plugin("a.b".into())));
        for nothing in ["/org/csid1/", "/org/csid1/plugin/", "/org/csid1/plugin/a/b", "/org/csid", "/com"] {
            assert_eq!(Object::at(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn labels_are_escaped_as_sd_bus_does() {
        for (id, escaped) in
            [("local", "local"), ("ebs.csi-1_x", "ebs_2ecsi_2d1_5fx"), ("9p", "_39p"), ("", "_")]
        {
            assert_eq!(plugin_label(id), escaped);
            if !id.is_empty() {
                assert_eq!(id_of_label(escaped).as_deref(), Some(id));
            }
        }
    }

    #[test]
    fn other_labels_of_an_id_are_refused() {
        for wrong in ["", "_", "_6", "_6c", "_2E", "a_61", "_ff", "9p", "a.b", "_+1"] {
            assert_eq!(id_of_label(wrong), None, "{wrong:?}");
        }
    }
}
