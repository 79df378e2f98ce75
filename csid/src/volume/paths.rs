//! Where a volume's staging and a mount's publish stand below the plugin's root. The names are hashes of csid's own keys:
//! no caller's or plugin's string ever becomes part of a path, and a lost intent finds the same path again.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::store::registry::VolumeName;
use crate::store::rows::{AccessMode, MountKey, VolumeKey, WITHOUT_ID};

pub const STAGING: &str = "staging";
pub const PUBLISH: &str = "publish";
/// What is published in a directory of the mount's own.
pub const VOLUME: &str = "volume";

/// The staging path, below the plugin's root (CSI rule 28: one a volume).
pub fn staging(key: &VolumeKey) -> PathBuf {
    Path::new(STAGING).join(name(key))
}

/// The directory of all publishes of a volume.
pub fn published(key: &VolumeKey) -> PathBuf {
    Path::new(PUBLISH).join(name(key))
}

/// The published path of one mount (CSI rule 29: unique for each). The directory that it is in is the mount's alone, to be closed
/// as long as the mount is not restricted: of a volume that has one user at a time the volume's.
pub fn publish(volume: &VolumeKey, mount: &MountKey, mode: AccessMode) -> PathBuf {
    let path =
        published(volume).join(digest(&[&mount.namespace, &mount.volume, &mount.consumer, &mount.tag]));
    match mode {
        AccessMode::SingleNodeWriter
        | AccessMode::SingleNodeReaderOnly
        | AccessMode::SingleNodeSingleWriter => path,
        AccessMode::SingleNodeMultiWriter
        | AccessMode::MultiNodeReaderOnly
        | AccessMode::MultiNodeSingleWriter
        | AccessMode::MultiNodeMultiWriter => path.join(VOLUME),
    }
}

/// The directory of all publishes of the volume that is published at `source`.
pub fn of_volume(source: &Path) -> Option<&Path> {
    source.ancestors().find(|path| path.parent().is_some_and(|parent| parent.ends_with(PUBLISH)))
}

/// The plugin's root, below which `source` is published.
pub fn root(source: &Path) -> Option<&Path> {
    of_volume(source)?.parent()?.parent()
}

/// Whether `name` has the form of the names made here.
pub fn is_ours(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// What a volume's directories are called.
pub fn name(key: &VolumeKey) -> String {
    digest(&[&key.plugin, &key.external_id])
}

/// The key of a volume of which no more is known than what its directories are called.
pub fn without_id(plugin: &str, name: &str) -> VolumeKey {
    VolumeKey { plugin: plugin.to_owned(), external_id: format!("{WITHOUT_ID}{name}") }
}

pub fn lacks_id(key: &VolumeKey) -> bool {
    key.external_id.strip_prefix(WITHOUT_ID).is_some_and(is_ours)
}

/// The key of a volume that the plugin is to make under this name: it has no external id yet, and no caller can give one with
/// a control character in it. Who makes the same name waits his turn.
pub fn unborn(plugin: &str, name: &str) -> VolumeKey {
    VolumeKey { plugin: plugin.to_owned(), external_id: format!("{UNBORN}{name}") }
}

pub fn is_unborn(key: &VolumeKey) -> bool {
    key.external_id.starts_with(UNBORN)
}

/// What a plugin is to call a volume for which its caller gives no name: always the same for the same volume, and another one
/// on every node, for a plugin gives the same volume for the same name.
pub fn name_at_plugin(node: &str, name: &VolumeName) -> String {
    format!("csid-{}", digest(&[node, &name.namespace, &name.volume]))
}

const UNBORN: &str = "\u{1}unborn:";

/// Half of a SHA-256 over the parts, each with its length before it, so that no two lists of parts are one text.
fn digest(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ours_whatever_the_strings_are() {
        let volume = VolumeKey { plugin: "local".into(), external_id: "../../etc".into() };
        let mount = MountKey {
            namespace: "a/b".into(),
            volume: "..".into(),
            consumer: "vol[0]".into(),
            tag: "\u{1f980}".into(),
        };
        let path = publish(&volume, &mount, AccessMode::SingleNodeWriter);
        let parts: Vec<&str> = path.iter().map(|part| part.to_str().unwrap()).collect();
        assert!(
            parts[0] == PUBLISH && parts.len() == 3 && is_ours(parts[1]) && is_ours(parts[2]),
            "{parts:?}"
        );
        assert!(!is_ours("..") && !is_ours(&"A".repeat(32)));

        let beside = publish(&volume, &mount, AccessMode::MultiNodeMultiWriter);
        assert_eq!(beside, path.join(VOLUME), "a directory of the mount's own");
        for path in [path, beside] {
            let path = Path::new("/publish/plugin").join(path);
            assert_eq!(of_volume(&path), Some(&*Path::new("/publish/plugin").join(published(&volume))));
            assert_eq!(root(&path), Some(Path::new("/publish/plugin")));
        }
    }

    #[test]
    fn a_made_name_is_stable_and_each_nodes_own() {
        let name = |volume: &str| VolumeName { namespace: "ns".into(), volume: volume.into() };
        let made = name_at_plugin("n1", &name("a/\u{1f980}"));
        assert_eq!(made, name_at_plugin("n1", &name("a/\u{1f980}")));
        assert!(is_ours(made.strip_prefix("csid-").unwrap()), "{made}");
        assert_ne!(made, name_at_plugin("n2", &name("a/\u{1f980}")));
        assert_ne!(made, name_at_plugin("n1", &name("b")));
        assert!(is_unborn(&unborn("p", "x")) && !is_unborn(&without_id("p", "x")));
    }

    #[test]
    fn no_two_identities_share_a_path() {
        assert_ne!(digest(&["ab", "c"]), digest(&["a", "bc"]));
        assert_ne!(digest(&["a", ""]), digest(&["", "a"]));
    }
}
