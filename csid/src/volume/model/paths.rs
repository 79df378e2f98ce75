//! Paths of a volume's staging and of a mount's publish, below the plugin's root. The names are hashes of csid's own keys. No
//! string of a caller or plugin becomes part of a path. A lost intent leads to the same path again.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::store::registry::VolumeName;
use crate::store::rows::{AccessMode, MountKey, VolumeKey};
use crate::store::volume_handle::{VolumeHandle, bytes, directory_in, last_of};

pub use crate::store::volume_handle::{KINDS, LIVE, PRIVATE, PUBLISH, STAGING, directory_of, is_ours};

/// Name of the publish inside a directory that belongs to one mount.
pub const VOLUME: &str = "volume";

/// Returns the staging path, below the plugin's root (CSI rule 28: one per volume).
pub fn staging(key: &VolumeKey) -> PathBuf {
    Path::new(STAGING).join(name(key))
}

/// Returns the directory of all publishes of a volume.
pub fn published(key: &VolumeKey) -> PathBuf {
    Path::new(PUBLISH).join(name(key))
}

/// Returns the path where consumers find one mount. The directory above it belongs to this mount alone, or to the volume if the
/// access mode allows one user at a time.
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

/// Returns the path at which the plugin publishes the mount that consumers find at `source` (CSI rule 29: unique for each
/// mount). `None`: csid makes no path like `source`.
pub fn private(source: &Path) -> Option<PathBuf> {
    let of_volume = of_volume(source)?;
    let own = bytes(source).get(bytes(of_volume).len() + 1..).filter(|rest| !rest.is_empty())?;
    let own = own.split(|byte| *byte == b'/').next().map(OsStr::from_bytes)?;
    let mut path = of_volume.parent()?.parent()?.join(PRIVATE);
    path.extend([of_volume.file_name()?, own]);
    Some(path)
}

/// Returns the source paths whose [`private`] path may be `path`. Empty: `path` is no such path.
pub fn found_at(path: &Path) -> Vec<PathBuf> {
    let Some((directory, own)) = path.parent().zip(path.file_name()) else { return Vec::new() };
    let kind = directory.parent().filter(|kind| kind.ends_with(PRIVATE));
    let Some((root, of_volume)) = kind.and_then(Path::parent).zip(directory.file_name()) else {
        return Vec::new();
    };
    let source = root.join(PUBLISH).join(of_volume).join(own);
    vec![source.join(VOLUME), source]
}

/// Returns the directory of all publishes of the volume that is published at `source`. `None`: `source` is not below such a
/// directory.
pub fn of_volume(source: &Path) -> Option<&Path> {
    let kind = last_of(source.parent()?, &[PUBLISH])?;
    directory_in(source, kind)
}

/// Returns the plugin's root, below which `source` is published. `None`: `source` is below no directory of publishes.
pub fn root(source: &Path) -> Option<&Path> {
    of_volume(source)?.parent()?.parent()
}

/// Returns the plugin's root if `directory` has the name of the tmpfs in it. `None`: it has another name.
pub fn root_of_live(directory: &Path) -> Option<&Path> {
    directory.parent().filter(|_| directory.ends_with(LIVE))
}

/// Returns the directory of stagings or of publishes that `path` is in or that it is. `None`: there is none.
pub fn kind(path: &Path) -> Option<&Path> {
    last_of(path, &KINDS)
}

/// Returns whether csid chose `path` to stage or to publish the volume. For several paths [`OwnDirectories`] is cheaper.
pub fn is_own(volume: &VolumeKey, path: &Path) -> bool {
    OwnDirectories::of(volume).have(path)
}

/// The directories that csid chooses to stage and to publish a volume.
pub struct OwnDirectories {
    /// The name of each. It is a hash, and worth keeping for a few questions.
    name: String,
}

impl OwnDirectories {
    pub fn of(volume: &VolumeKey) -> OwnDirectories {
        let name = match &volume.handle {
            VolumeHandle::Lost { directory } => directory.clone(),
            VolumeHandle::Known(_) | VolumeHandle::Creating { .. } => name(volume),
        };
        OwnDirectories { name }
    }

    /// Returns whether csid chose `path`. Any other path belongs to another manager. csid uses the mount there, and makes and
    /// removes nothing at that path itself.
    pub fn have(&self, path: &Path) -> bool {
        let ends_with = |path: &Path, kind: &str| {
            let above = bytes(path).strip_suffix(self.name.as_bytes());
            let above = above.and_then(|rest| rest.strip_suffix(b"/"));
            above.and_then(|rest| rest.strip_suffix(kind.as_bytes())).is_some_and(|rest| rest.ends_with(b"/"))
        };
        ends_with(path, STAGING)
            || path.parent().is_some_and(|directory| ends_with(directory, PRIVATE))
            || of_volume(path).is_some_and(|directory| ends_with(directory, PUBLISH))
    }
}

/// Returns whether `path` is `above` or below it. Both are as csid keeps paths: absolute, without an empty part, `.` or `..`.
/// The comparison is of bytes: a volume may have thousands of paths.
pub fn is_at_or_below(path: &str, above: &str) -> bool {
    path.starts_with('/') && above == "/" || is_in(Path::new(path), Path::new(above))
}

/// Returns whether `path` is `directory` or in it, as [`is_at_or_below`] does. The directory is not the root.
pub fn is_in(path: &Path, directory: &Path) -> bool {
    let rest = bytes(path).strip_prefix(bytes(directory));
    rest.is_some_and(|rest| rest.first().is_none_or(|next| *next == b'/'))
}

/// Returns the name of a volume's directories.
pub fn name(key: &VolumeKey) -> String {
    match &key.handle {
        VolumeHandle::Creating { name } => digest(&[&key.plugin, "", name]),
        handle @ (VolumeHandle::Known(_) | VolumeHandle::Lost { .. }) => {
            digest(&[&key.plugin, &handle.text()])
        }
    }
}

/// Returns the name to give the plugin for a volume whose caller gives no name. The name is always the same for the same
/// volume. It differs on every node, because a plugin returns the same volume for the same name.
pub fn name_at_plugin(node: &str, name: &VolumeName) -> String {
    format!("csid-{}", digest(&[node, &name.namespace, &name.volume]))
}

/// Returns the name at the plugin of a volume's snapshot in a cluster.
pub fn snapshot_at_plugin(cluster: &str, volume: &VolumeName, name: &str) -> String {
    format!("csid-{}", digest(&[cluster, &volume.namespace, &volume.volume, "snapshot", name]))
}

/// Returns half of a SHA-256 over the parts. The length of each part precedes it, so two different lists of parts never form
/// the same text.
fn digest(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let hash = hash.finalize();
    format!("{:032x}", u128::from_be_bytes(std::array::from_fn(|at| hash[at])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ours_whatever_the_strings_are() {
        let volume = VolumeKey::new("local", "../../etc");
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
        for path in [&path, &beside] {
            let path = Path::new("/publish/plugin").join(path);
            assert_eq!(of_volume(&path), Some(&*Path::new("/publish/plugin").join(published(&volume))));
            assert_eq!(root(&path), Some(Path::new("/publish/plugin")));
            let own = path.iter().find(|part| *part == parts[2]).unwrap();
            let private_path = Path::new("/publish/plugin/private").join(parts[1]).join(own);
            assert_eq!(private(&path).as_ref(), Some(&private_path));
            assert!(found_at(&private_path).contains(&path) && found_at(&path).is_empty());
        }
        assert_eq!(private(Path::new("/publish/plugin/publish/volume")), None);
    }

    #[test]
    fn only_paths_of_the_volumes_own_hash_are_own() {
        let volume = VolumeKey::new("local", "v");
        let mount =
            MountKey { namespace: "ns".into(), volume: "v".into(), consumer: "c".into(), tag: String::new() };
        let root = Path::new("/srv/plugin");
        let recorded = VolumeKey::lost("local", &name(&volume));
        for mode in [AccessMode::SingleNodeWriter, AccessMode::MultiNodeMultiWriter] {
            let own = root.join(publish(&volume, &mount, mode));
            let private = private(&own).unwrap();
            for own in [&own, &private] {
                assert!(is_own(&volume, own) && is_own(&recorded, own), "{own:?}");
            }
        }
        let own = root.join(staging(&volume));
        assert!(is_own(&volume, &own) && is_own(&recorded, &own), "{own:?}");

        let other = VolumeKey::new("local", "w");
        let md5 = "d41d8cd98f00b204e9800998ecf8427e";
        for foreign in [
            root.join(staging(&other)),
            root.join(publish(&other, &mount, AccessMode::SingleNodeWriter)),
            root.join(STAGING).join(md5),
            root.join(PUBLISH).join(md5).join(md5),
            own.join("below"),
            "/var/lib/other/publish/v/c".into(),
            "/".into(),
        ] {
            assert!(!is_own(&volume, &foreign), "{foreign:?}");
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
    }

    #[test]
    fn no_two_identities_share_a_path() {
        let names = [VolumeKey::new("p", "x"), VolumeKey::creating("p", "x"), VolumeKey::lost("p", "x")];
        let names = names.map(|key| name(&key));
        assert!(names[0] != names[1] && names[1] != names[2] && names[2] != names[0], "{names:?}");
        assert_ne!(digest(&["ab", "c"]), digest(&["a", "bc"]));
        assert_ne!(digest(&["a", ""]), digest(&["", "a"]));
    }
}
