//! The names of etcd's keys. A segment of a name is made of letters, digits, `_` and `-`; any other byte is `%XX`.

use csid::store::registry::{Attachment, VolumeName};
use csid::store::rows::VolumeKey;
use csid::store::volume_handle::VolumeHandle;
use sha2::{Digest, Sha256};

/// The version of the layout.
const VERSION: &str = "v1/";
/// Past claims kept of each volume.
pub(crate) const PAST: u64 = 16;

/// The keys below the cluster's prefix.
#[derive(Clone)]
pub(crate) struct Keys {
    root: String,
}

/// A key that is not a volume's, or the head of a volume that another volume's change depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RowKey {
    /// The cluster's own row.
    Meta,
    /// A server that runs, by its ID.
    Server(String),
    Node(String),
    /// A plugin that has a controller on some node.
    Plugin(String),
    /// A node's session with a server.
    Session {
        node: String,
        server: String,
    },
    /// The count of a node's volumes of a plugin.
    Used {
        node: String,
        plugin: String,
    },
    /// What a node that drains has left.
    Report(String),
    /// What a node has said after a restore of etcd.
    Heard(String),
    /// The head of a volume's record. It is in no list of rows.
    Volume(VolumeName),
}

/// Rows that are read together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    Servers,
    /// Nodes after one, in the order of their keys. An empty name is before all nodes.
    Nodes {
        after: String,
    },
    Sessions {
        node: String,
    },
    AllSessions,
    /// The counts of a node's volumes.
    Used {
        node: String,
    },
    /// What nodes have said after a restore of etcd.
    Heard,
}

/// A key of a volume, below its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Head,
    Registration,
    /// Of the node and the consumer.
    Claim(String, String),
    /// The name of the key below `at/`.
    Attachment(String),
    /// The slot of a past claim.
    Past(u64),
    /// The place of a claim that waits. Keys are in the order of the places.
    Queue(u64),
    /// A key of a later version.
    Other(String),
}

impl Keys {
    pub fn new(prefix: &str) -> Self {
        Keys { root: format!("{prefix}{VERSION}") }
    }

    /// Returns the range of the keys that the cache follows: of the nodes, so that their changes are known, of the servers, so that their beats
    /// come, of all volumes, and what is between these.
    pub fn followed(&self) -> (Vec<u8>, Vec<u8>) {
        let (_, end) = range(format!("{}vol/", self.root));
        (format!("{}node/", self.root).into_bytes(), end)
    }

    /// Returns the range of all keys.
    pub fn all(&self) -> (Vec<u8>, Vec<u8>) {
        range(self.root.clone())
    }

    /// Returns whether a key has the one name of a plugin's volume.
    pub fn is_external(&self, key: &[u8]) -> bool {
        self.below_folder(key, "ext/").is_some()
    }

    fn below_folder<'a>(&self, key: &'a [u8], folder: &str) -> Option<&'a str> {
        std::str::from_utf8(key).ok()?.strip_prefix(&self.root)?.strip_prefix(folder)
    }

    /// Returns the key of a row.
    pub fn row(&self, key: &RowKey) -> Vec<u8> {
        let below = match key {
            RowKey::Meta => "meta".to_owned(),
            RowKey::Server(id) => format!("server/{}", segment(id)),
            RowKey::Node(node) => format!("node/{}", segment(node)),
            RowKey::Plugin(plugin) => format!("plugin/{}", segment(plugin)),
            RowKey::Session { node, server } => format!("session/{}/{}", segment(node), segment(server)),
            RowKey::Used { node, plugin } => format!("used/{}/{}", segment(node), segment(plugin)),
            RowKey::Report(node) => format!("report/{}", segment(node)),
            RowKey::Heard(node) => format!("heard/{}", segment(node)),
            RowKey::Volume(name) => return self.part(name, &Part::Head),
        };
        format!("{}{below}", self.root).into_bytes()
    }

    /// Returns the range of the keys of some rows.
    pub fn rows(&self, of: &Rows) -> (Vec<u8>, Vec<u8>) {
        match of {
            Rows::Servers => range(format!("{}server/", self.root)),
            Rows::Nodes { after } => {
                let (folder, end) = range(format!("{}node/", self.root));
                // The least key that is greater than a key ends with a byte of 0.
                let first = [&folder, segment(after).as_bytes(), &[0]].concat();
                (first, end)
            }
            Rows::Heard => range(format!("{}heard/", self.root)),
            Rows::Used { node } => range(format!("{}used/{}/", self.root, segment(node))),
            Rows::Sessions { node } => range(format!("{}session/{}/", self.root, segment(node))),
            Rows::AllSessions => range(format!("{}session/", self.root)),
        }
    }

    /// Reads the key of a row. `None`: it is another key.
    pub fn read_row(&self, key: &[u8]) -> Option<RowKey> {
        let below = std::str::from_utf8(key).ok()?.strip_prefix(&self.root)?;
        let mut parts = below.splitn(3, '/');
        match (parts.next()?, parts.next(), parts.next()) {
            ("meta", None, None) => Some(RowKey::Meta),
            ("server", Some(id), None) => Some(RowKey::Server(text(id)?)),
            ("node", Some(node), None) => Some(RowKey::Node(text(node)?)),
            ("plugin", Some(plugin), None) => Some(RowKey::Plugin(text(plugin)?)),
            ("report", Some(node), None) => Some(RowKey::Report(text(node)?)),
            ("heard", Some(node), None) => Some(RowKey::Heard(text(node)?)),
            ("session", Some(node), Some(server)) => {
                Some(RowKey::Session { node: text(node)?, server: text(server)? })
            }
            ("used", Some(node), Some(plugin)) => {
                Some(RowKey::Used { node: text(node)?, plugin: text(plugin)? })
            }
            _ => None,
        }
    }

    /// Returns the range of all keys of a volume.
    pub fn volume(&self, name: &VolumeName) -> (Vec<u8>, Vec<u8>) {
        range(self.below(name))
    }

    pub fn part(&self, name: &VolumeName, part: &Part) -> Vec<u8> {
        (self.below(name) + &part.name()).into_bytes()
    }

    /// Returns the key that has the one name of a plugin's volume.
    pub fn external(&self, volume: &VolumeKey) -> Vec<u8> {
        let (mark, text) = match &volume.handle {
            VolumeHandle::Creating { name } => ("+", name.as_str().into()),
            known => ("", known.text()),
        };
        let digest = Sha256::digest(text.as_bytes());
        let mut key = format!("{}ext/{}/{mark}", self.root, segment(&volume.plugin));
        for byte in digest {
            key += &format!("{byte:02x}");
        }
        key.into_bytes()
    }

    /// Returns the key that each deletion of this key writes: of a head, or of a plugin's volume. It is one of 256.
    pub fn gone(&self, key: &[u8]) -> Vec<u8> {
        format!("{}gone/{:02x}", self.root, Sha256::digest(key)[0]).into_bytes()
    }

    /// Reads the key of a volume. `None`: it is another key.
    pub fn read(&self, key: &[u8]) -> Option<(VolumeName, Part)> {
        let below = std::str::from_utf8(key).ok()?.strip_prefix(&self.root)?.strip_prefix("vol/")?;
        let mut parts = below.splitn(3, '/');
        let (namespace, volume, part) = (parts.next()?, parts.next()?, parts.next()?);
        let name = VolumeName { namespace: text(namespace)?, volume: text(volume)? };
        Some((name, Part::read(part)))
    }

    fn below(&self, VolumeName { namespace, volume }: &VolumeName) -> String {
        format!("{}vol/{}/{}/", self.root, segment(namespace), segment(volume))
    }
}

impl Part {
    /// The key of an attachment: by csid's name of the node, or by the plugin's where AttachVolume made it.
    pub fn attachment(attachment: &Attachment) -> Part {
        let node_id = attachment.node_id.as_deref().unwrap_or_default();
        Part::Attachment(match attachment.by_call {
            Some(_) => format!("@/{}", segment(node_id)),
            None => segment(&attachment.node),
        })
    }

    pub fn name(&self) -> String {
        match self {
            Part::Head => "head".into(),
            Part::Registration => "reg".into(),
            Part::Claim(node, consumer) => format!("claim/{}/{}", segment(node), segment(consumer)),
            Part::Attachment(name) => format!("at/{name}"),
            Part::Past(slot) => format!("past/{slot:x}"),
            Part::Queue(serial) => format!("queue/{serial:016x}"),
            Part::Other(name) => name.clone(),
        }
    }

    fn read(name: &str) -> Part {
        let known = match name.split_once('/') {
            None if name == "head" => Some(Part::Head),
            None if name == "reg" => Some(Part::Registration),
            Some(("claim", below)) => below
                .split_once('/')
                .and_then(|(node, consumer)| Some(Part::Claim(text(node)?, text(consumer)?))),
            Some(("at", below)) => Some(Part::Attachment(below.into())),
            Some(("past", slot)) => {
                u64::from_str_radix(slot, 16).ok().filter(|slot| *slot < PAST).map(Part::Past)
            }
            Some(("queue", place)) => {
                let serial = u64::from_str_radix(place, 16).ok().map(Part::Queue);
                serial.filter(|serial| serial.name() == name)
            }
            _ => None,
        };
        known.unwrap_or_else(|| Part::Other(name.into()))
    }
}

/// Returns the range of all keys that begin with this text, which ends with a slash.
fn range(prefix: String) -> (Vec<u8>, Vec<u8>) {
    let mut end = prefix.clone().into_bytes();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    (prefix.into_bytes(), end)
}

fn segment(text: &str) -> String {
    let mut segment = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => segment.push(char::from(byte)),
            other => segment += &format!("%{other:02X}"),
        }
    }
    segment
}

/// Reads a segment. `None`: no csid wrote it.
fn text(segment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.as_bytes();
    while let [first, others @ ..] = rest {
        rest = others;
        if *first == b'%' {
            let (digits, others) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = others;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok().filter(|text| self::segment(text) == segment)
}

#[cfg(test)]
mod tests {
    use csid::store::rows::Leg;
    use proptest::prelude::*;

    use super::*;

    fn name() -> VolumeName {
        VolumeName { namespace: "a/b".into(), volume: "é %".into() }
    }

    fn shown(key: Vec<u8>) -> String {
        String::from_utf8(key).unwrap()
    }

    #[test]
    fn row_keys_are_read_back() {
        let keys = Keys::new("/csid/");
        let (node, server) = ("db/1 %".to_owned(), "ab".to_owned());
        for row in [
            RowKey::Meta,
            RowKey::Server(server.clone()),
            RowKey::Node(node.clone()),
            RowKey::Session { node: node.clone(), server },
            RowKey::Report(node.clone()),
            RowKey::Heard(node.clone()),
        ] {
            assert_eq!(keys.read_row(&keys.row(&row)), Some(row));
        }
        let (first, end) = keys.rows(&Rows::Sessions { node: "db".into() });
        let of_another = keys.row(&RowKey::Session { node: "db-1".into(), server: "x".into() });
        assert!(!(first..end).contains(&of_another));
        let session = |node: &str, server: &str| RowKey::Session { node: node.into(), server: server.into() };
        let nodes = |after: &str| Rows::Nodes { after: after.into() };
        let node = |name: &str| RowKey::Node(name.into());
        for (of, key, due) in [
            (nodes(""), node("a"), true),
            (nodes("a"), node("a"), false),
            (nodes("a"), node("a-1"), true),
            (nodes("b"), node("a"), false),
            (nodes(""), session("a", "s"), false),
            (Rows::AllSessions, session("a", "s"), true),
            (Rows::AllSessions, node("b"), false),
        ] {
            let (first, end) = keys.rows(&of);
            assert_eq!((first..end).contains(&keys.row(&key)), due, "{of:?} {key:?}");
        }
        let (first, end) = keys.followed();
        let beat = keys.row(&RowKey::Server("x".into()));
        let volume = keys.part(&name(), &Part::Head);
        assert!((first.clone()..end.clone()).contains(&beat) && (first..end).contains(&volume));
    }

    #[test]
    fn keys_of_a_walk_are_read_by_their_folder() {
        let keys = Keys::new("/csid/");
        let external = keys.external(&VolumeKey::new("p", "x"));
        assert!(keys.is_external(&external) && !keys.is_external(&keys.row(&RowKey::Meta)));
        let used = |key: &str| keys.read_row(key.as_bytes());
        let row = RowKey::Used { node: "n.1".into(), plugin: "p".into() };
        assert_eq!(used("/csid/v1/used/n%2E1/p"), Some(row));
        assert_eq!((used("/csid/v1/used/n"), used("/csid/v1/used/n/p/x")), (None, None));
        let of_node = keys.rows(&Rows::Used { node: "n.1".into() });
        assert!((of_node.0..of_node.1).contains(&b"/csid/v1/used/n%2E1/p".to_vec()));
        let (first, end) = keys.all();
        assert!((first..end).contains(&external));
    }

    #[test]
    fn keys_are_those_of_the_layout() {
        let keys = Keys::new("/csid/");
        let below = "/csid/v1/vol/a%2Fb/%C3%A9%20%25/";
        let mut by_call = Attachment::new("", Leg::Present);
        by_call.node_id = Some("i-1/x".into());
        by_call.by_call = Some(csid::store::registry::AttachCall {
            uid: 0,
            read_only: false,
            capability: csid::store::testing::samples::claim("a", "n").usage.capability,
            secrets_given: false,
        });
        for (part, due) in [
            (Part::Head, "head"),
            (Part::Registration, "reg"),
            (Part::Claim("n.1".into(), "job/1".into()), "claim/n%2E1/job%2F1"),
            (Part::attachment(&Attachment::new("@", Leg::Present)), "at/%40"),
            (Part::attachment(&by_call), "at/@/i-1%2Fx"),
            (Part::Past(15), "past/f"),
            (Part::Queue(26), "queue/000000000000001a"),
        ] {
            assert_eq!(shown(keys.part(&name(), &part)), format!("{below}{due}"));
            assert_eq!(keys.read(&keys.part(&name(), &part)), Some((name(), part)));
        }
        let volume = keys.volume(&name());
        assert_eq!(
            (shown(volume.0), shown(volume.1)),
            (below.into(), format!("{}0", &below[..below.len() - 1]))
        );
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let external = |volume| shown(keys.external(&volume));
        assert_eq!(external(VolumeKey::new("p", "")), format!("/csid/v1/ext/p/{empty}"));
        assert_eq!(external(VolumeKey::creating("p", "")), format!("/csid/v1/ext/p/+{empty}"));
        let gone = keys.gone(&keys.external(&VolumeKey::new("p", "")));
        assert_eq!(shown(gone), "/csid/v1/gone/0a");
    }

    #[test]
    fn key_of_a_later_version_is_kept_apart() {
        let keys = Keys::new("/csid/");
        for key in ["queue/00a", "queue/000000000000001A", "past/10", "claim/n"] {
            let part = key;
            let read = keys.read(format!("/csid/v1/vol/n/v/{key}").as_bytes());
            assert_eq!(read.unwrap().1, Part::Other(part.into()));
        }
        for key in ["/csid/v1/ext/p/00", "/csid/v1/vol/n", "/csid/v2/vol/n/v/head", "/csid/v1/vol/%2f/v/head"]
        {
            assert_eq!(keys.read(key.as_bytes()), None, "{key}");
        }
    }

    proptest! {
        #[test]
        fn segment_is_read_as_it_was_written(text in any::<String>()) {
            let written = segment(&text);
            prop_assert!(written.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-%".contains(&b)));
            prop_assert_eq!(super::text(&written), Some(text));
        }
    }
}
