//! The limits of every string that a caller or a file gives, and the contract's words. Names are data and become no path; they are bounded so that logs, rows and the
//! plugin can hold them (CSI rules 11-13).

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};
use crate::store::registry::{Capability, ClaimMode, Heal};
use crate::store::rows::{AccessMode, AttachmentMode, Phase, Propagation, Restore};

/// CSI's general bound of a string (CSI rule 11).
const NAME: usize = 128;
/// Volume and snapshot ids are the plugin's own answers, and drivers answer longer ones than CSI's 128 bytes. csid takes these
/// from a plugin with a warning, so it takes them back from a caller.
const EXTERNAL_ID: usize = 1024;
const INSTANCE: usize = 64;
/// The namespace of a caller that has no namespaces.
pub(crate) const DEFAULT_NAMESPACE: &str = "default";
const NODE_ID: usize = 256;
const MAP: usize = 4096;
const TOKEN: usize = 4096;
/// PATH_MAX without its NUL.
pub(crate) const PATH: usize = 4095;

/// A namespace, volume, consumer, operation id: 1-128 bytes without control characters.
pub(crate) fn name(what: &str, text: &str) -> Result<()> {
    match text.is_empty() {
        true => Err(Error::invalid(format!("{what} is empty"))),
        false => optional_name(what, text),
    }
}

/// Returns the namespace; an empty one is `default`.
pub(crate) fn namespace(text: String) -> Result<String> {
    match text.is_empty() {
        true => Ok(DEFAULT_NAMESPACE.to_owned()),
        false => optional_name("namespace", &text).map(|()| text),
    }
}

/// A plugin's id of a volume or a snapshot: 1-1024 bytes without control characters.
pub(crate) fn external_id(what: &str, text: &str) -> Result<()> {
    match text.is_empty() || text.len() > EXTERNAL_ID {
        true => Err(Error::invalid(format!("{what} is empty or longer than {EXTERNAL_ID} bytes"))),
        false => plain(what, text),
    }
}

/// A tag, mount group: as a name, or empty.
pub(crate) fn optional_name(what: &str, text: &str) -> Result<()> {
    if text.len() > NAME {
        return Err(Error::invalid(format!("{what} is longer than {NAME} bytes")));
    }
    plain(what, text)
}

/// A plugin's name of a node: 1-256 bytes (CSI rule 11).
pub(crate) fn node_id(text: &str) -> Result<()> {
    match text.is_empty() || text.len() > NODE_ID {
        true => Err(Error::invalid(format!("node_id is empty or longer than {NODE_ID} bytes"))),
        false => plain("node_id", text),
    }
}

/// Checks the token with which a list continues. It is the plugin's own, and opaque.
pub(crate) fn token(text: &str) -> Result<()> {
    match text.len() > TOKEN {
        true => Err(Error::invalid(format!("token is longer than {TOKEN} bytes"))),
        false => Ok(()),
    }
}

pub(crate) fn plain(what: &str, text: &str) -> Result<()> {
    match text.chars().any(char::is_control) {
        true => Err(Error::invalid(format!("{what} has a control character in it"))),
        false => Ok(()),
    }
}

pub(crate) fn instance(text: &str) -> Result<()> {
    let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    match plain && (1..=INSTANCE).contains(&text.len()) && !text.starts_with('.') {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "instance is not 1 to {INSTANCE} characters of [A-Za-z0-9._-] without a leading dot"
        ))),
    }
}

pub(crate) fn fs_type(text: &str) -> Result<()> {
    let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    match plain && text.len() <= 64 {
        true => Ok(()),
        false => Err(Error::invalid("fs-type is at most 64 letters, digits, `.`, `_`, `-`")),
    }
}

/// An absolute path of at most 4095 bytes that says where it leads: no `.`, `..`, empty component or control character.
pub(crate) fn path(what: &str, text: &str) -> Result<()> {
    match text.strip_prefix('/') {
        Some(rest) => subpath(what, rest),
        None => Err(Error::invalid(format!("{what} is no absolute path"))),
    }
}

/// The same from somewhere on.
pub(crate) fn subpath(what: &str, text: &str) -> Result<()> {
    let wrong = |why: &str| Err(Error::invalid(format!("{what} {why}")));
    if text.len() >= PATH {
        return wrong("is longer than 4095 bytes");
    }
    plain(what, text)?;
    if text.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return wrong("has an empty, `.` or `..` component, or is `/`");
    }
    Ok(())
}

/// A systemd credential's name; a caller other than root may only name `csid.NAMESPACE.*`.
pub(crate) fn credential(text: &str) -> Result<()> {
    plain("credential", text)?;
    match !text.is_empty() && text.len() <= 255 && !text.contains('/') && !matches!(text, "." | "..") {
        true => Ok(()),
        false => {
            Err(Error::invalid("credential is no name of a systemd credential (1-255 bytes without `/`)"))
        }
    }
}

/// A systemd unit's whole name, no template's: systemd answers nothing to a list with a wrong one in it.
pub(crate) fn unit(what: &str, text: &str) -> Result<()> {
    const TYPES: [&str; 11] = [
        "service",
        "scope",
        "socket",
        "target",
        "slice",
        "mount",
        "automount",
        "swap",
        "path",
        "timer",
        "device",
    ];
    let good = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
    let whole = |(name, kind): (&str, &str)| {
        !name.is_empty() && !name.starts_with('@') && !name.ends_with('@') && TYPES.contains(&kind)
    };
    match text.len() <= 255 && text.chars().all(good) && text.rsplit_once('.').is_some_and(whole) {
        true => Ok(()),
        false => {
            Err(Error::invalid(format!("{what} is not the whole name of a systemd unit (NAME.service)")))
        }
    }
}

/// Mount flags: their text is bounded together, and never quoted in an error.
pub(crate) fn mount_flags(flags: &[String]) -> Result<()> {
    if flags.iter().map(|flag| flag.len() + 1).sum::<usize>() > MAP {
        return Err(Error::invalid("mount-flags are longer than 4 KiB together"));
    }
    flags.iter().try_for_each(|flag| match flag.is_empty() {
        true => Err(Error::invalid("a mount flag is empty")),
        false => plain("a mount flag", flag),
    })
}

/// A context map: at most 4 KiB (CSI rule 11); values may hold anything, and are never quoted in an error.
pub(crate) fn context(what: &str, map: &BTreeMap<String, String>) -> Result<()> {
    if map.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>() > MAP {
        return Err(Error::invalid(format!("{what} is larger than 4 KiB")));
    }
    map.keys().try_for_each(|key| name(&format!("a key of {what}"), key))
}

/// Checks topologies. Each has at least one segment, and its keys are unique ignoring case (CSI rules 12, 15).
pub(crate) fn topologies(maps: &[BTreeMap<String, String>]) -> Result<()> {
    if maps.iter().flatten().map(|(key, value)| key.len() + value.len()).sum::<usize>() > MAP {
        return Err(Error::invalid("topologies are larger than 4 KiB together"));
    }
    for (place, map) in maps.iter().enumerate() {
        let mut keys = BTreeSet::new();
        for (key, value) in map {
            name("a key of topologies", key)?;
            name("a value of topologies", value)?;
            if !keys.insert(key.to_lowercase()) {
                return Err(Error::invalid("a topology has a key twice; upper and lower case are the same"));
            }
        }
        if keys.is_empty() || maps[..place].contains(map) {
            return Err(Error::invalid("topologies has an empty one, or one twice"));
        }
    }
    Ok(())
}

pub(crate) fn capability(access: Option<AccessMode>, attachment: Option<AttachmentMode>) -> Capability {
    Capability {
        access_mode: access.unwrap_or(AccessMode::SingleNodeWriter),
        attachment_mode: attachment.unwrap_or(AttachmentMode::FileSystem),
    }
}

/// Reads capabilities, each of an access mode and an attachment mode. There has to be at least one, and none twice.
pub(crate) fn capabilities<'a>(said: impl Iterator<Item = [Option<&'a str>; 2]>) -> Result<Vec<Capability>> {
    let mut read: Vec<Capability> = Vec::new();
    for [access, attachment] in said {
        let access = access.map(|text| Word::read("access-mode", text)).transpose()?;
        let attachment = attachment.map(|text| Word::read("attachment-mode", text)).transpose()?;
        let capability = capability(access, attachment);
        if read.contains(&capability) {
            return Err(Error::invalid("capabilities has a capability twice"));
        }
        read.push(capability);
    }
    match read.is_empty() {
        true => Err(Error::invalid("capabilities is empty; at least one is needed")),
        false => Ok(read),
    }
}

/// A word of the contract.
pub(crate) trait Word: Sized + Copy + 'static {
    const WORDS: &'static [(&'static str, Self)];

    fn read(what: &str, text: &str) -> Result<Self> {
        Self::WORDS.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
            let words: Vec<&str> = Self::WORDS.iter().map(|(word, _)| *word).collect();
            Error::invalid(format!("{what} is none of {}", words.join(", ")))
        })
    }
}

/// The word of a value; each value of a [`Word`] has one.
pub(crate) fn word<W: Word + PartialEq>(value: W) -> &'static str {
    W::WORDS.iter().find(|(_, of)| *of == value).map_or("", |(word, _)| word)
}

impl Word for AccessMode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("single-node-writer", AccessMode::SingleNodeWriter),
        ("single-node-reader-only", AccessMode::SingleNodeReaderOnly),
        ("single-node-single-writer", AccessMode::SingleNodeSingleWriter),
        ("single-node-multi-writer", AccessMode::SingleNodeMultiWriter),
        ("multi-node-reader-only", AccessMode::MultiNodeReaderOnly),
        ("multi-node-single-writer", AccessMode::MultiNodeSingleWriter),
        ("multi-node-multi-writer", AccessMode::MultiNodeMultiWriter),
    ];
}

impl Word for AttachmentMode {
    const WORDS: &'static [(&'static str, Self)] =
        &[("file-system", AttachmentMode::FileSystem), ("block-device", AttachmentMode::BlockDevice)];
}

impl Word for Propagation {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("private", Propagation::Private),
        ("host-to-task", Propagation::HostToTask),
        ("bidirectional", Propagation::Bidirectional),
    ];
}

impl Word for Restore {
    const WORDS: &'static [(&'static str, Self)] = &[("auto", Restore::Auto), ("hold", Restore::Hold)];
}

impl Word for Heal {
    const WORDS: &'static [(&'static str, Self)] = &[("report", Heal::Report), ("remount", Heal::Remount)];
}

impl Word for ClaimMode {
    const WORDS: &'static [(&'static str, Self)] = &[("read", ClaimMode::Read), ("write", ClaimMode::Write)];
}

impl Word for Phase {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("mounting", Phase::Mounting),
        ("mounted", Phase::Mounted),
        ("unmounting", Phase::Unmounting),
        ("uncertain", Phase::Uncertain),
        ("lost", Phase::Lost),
        ("waiting", Phase::Waiting),
    ];
}

/// Returns the namespace that a credential belongs to: the part between `csid.` and the last dot. Namespaces may have dots and names
/// may not, so `csid.a.b.key` belongs to `a.b` and never to `a`. No two namespaces share a credential.
pub(crate) fn credential_namespace(credential: &str) -> Option<&str> {
    credential.strip_prefix("csid.")?.rsplit_once('.').map(|(namespace, _)| namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_named_as_a_whole() {
        for good in ["db.service", "db@1.service", "dev-sda1.device", "a\\x2db.mount", "run-u1.scope"] {
            assert!(unit("bind", good).is_ok(), "{good}");
        }
        for bad in ["", "db", ".service", "@.service", "db@.service", "db.exe", "a/b.service", "a b.service"]
        {
            assert!(unit("bind", bad).is_err(), "{bad}");
        }
        assert!(unit("bind", &format!("{}.service", "x".repeat(248))).is_err());
    }

    #[test]
    fn name_is_any_text_of_128_bytes_without_controls() {
        for good in ["a", "vol[0]", "a/b", "../..", "Größe", &"x".repeat(128)] {
            assert!(name("it", good).is_ok(), "{good:?}");
        }
        for bad in ["", "a\nb", "\u{7f}", "\u{85}", "\0", &"x".repeat(129)] {
            assert!(name("it", bad).is_err(), "{bad:?}");
        }
        assert!(optional_name("it", "").is_ok());
    }

    #[test]
    fn external_id_is_longer_than_a_name() {
        for good in ["a", &"x".repeat(147), &"x".repeat(1024)] {
            assert!(external_id("it", good).is_ok(), "{} bytes", good.len());
        }
        for bad in ["", "a\nb", &"x".repeat(1025)] {
            assert!(external_id("it", bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_empty_namespace_is_the_default() {
        assert_eq!(namespace(String::new()).unwrap(), "default");
        assert_eq!(namespace("prod".to_owned()).unwrap(), "prod");
        assert!(namespace("x".repeat(129)).is_err() && namespace("a\nb".to_owned()).is_err());
    }

    #[test]
    fn instances_are_file_names() {
        for good in ["a", "i1", "Node_1.b-2", "-", &"x".repeat(64)] {
            assert!(instance(good).is_ok(), "{good:?}");
        }
        for bad in ["", ".", "..", ".a", "a/b", "a b", "ü", &"x".repeat(65)] {
            assert!(instance(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn target_path_is_absolute_and_normal() {
        for good in ["/a", "/srv/jobs/1 2/ü"] {
            assert!(path("target", good).is_ok(), "{good:?}");
        }
        for bad in ["", "a", "/", "/a/", "//a", "/a/../b", "/a/.", "/a\n", &format!("/{}", "x".repeat(PATH))]
        {
            assert!(path("target", bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn possible_secret_is_not_quoted() {
        let flags = ["user=x\n,password=hunter2".to_owned()];
        assert!(!mount_flags(&flags).unwrap_err().message.contains("hunter2"));
        let long = BTreeMap::from([("key".to_owned(), "hunter2".repeat(1000))]);
        assert!(!context("volume-context", &long).unwrap_err().message.contains("hunter2"));
        assert!(mount_flags(&["x".repeat(4096)]).is_err());
    }

    #[test]
    fn topologies_have_segments_with_keys_of_their_own() {
        let topology = |keys: &[&str]| {
            BTreeMap::from_iter(keys.iter().map(|key| ((*key).to_owned(), "eu-1".to_owned())))
        };
        assert!(topologies(&[topology(&["zone", "rack"]), topology(&["zone"])]).is_ok());
        for wrong in [
            vec![topology(&[])],
            vec![topology(&["zone", "Zone"])],
            vec![topology(&["zone"]), topology(&["zone"])],
            vec![topology(&["zo\nne"])],
            vec![BTreeMap::from([("zone".to_owned(), String::new())])],
            (0..40).map(|n| topology(&[&format!("{n}{}", "x".repeat(120))])).collect(),
        ] {
            assert!(topologies(&wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn every_word_is_in_the_contract() {
        assert_eq!(
            AccessMode::read("it", "multi-node-multi-writer").ok(),
            Some(AccessMode::MultiNodeMultiWriter)
        );
        let error = Restore::read("restore", "AUTO").unwrap_err();
        assert_eq!(error.message, "restore is none of auto, hold");
        assert_eq!(word(Phase::Uncertain), "uncertain");
    }

    #[test]
    fn credential_belongs_to_one_namespace() {
        for (credential, namespace) in [
            ("csid.a.key", Some("a")),
            ("csid.a.b.key", Some("a.b")),
            ("csid.key", None),
            ("csida.key", None),
        ] {
            assert_eq!(credential_namespace(credential), namespace, "{credential}");
        }
    }
}
