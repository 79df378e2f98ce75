//! Specs of volumes, from a file, from the command line, or both.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, bail};
use csid_client::{AccessMode, AttachmentMode, Capability, CreateVolume, Heal, RegisterVolume};
use serde::{Deserialize, Deserializer, de::Error as _};

use super::common::{pairs, sealed, some, yes};
use crate::args::{Amount, Create, RegisterVolume as Register, Spec};

/// The keys of the contract and the volume's name: keys of both calls, then RegisterVolume's, then CreateVolume's.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    namespace: Option<String>,
    id: Option<String>,
    plugin: Option<String>,
    name: Option<String>,
    capabilities: Option<Vec<Way>>,
    fs_type: Option<String>,
    mount_flags: Option<Vec<String>>,
    mount_group: Option<String>,
    parameters: Option<BTreeMap<String, String>>,
    topologies: Option<Vec<BTreeMap<String, String>>>,
    heal: Option<Heal>,
    suid: Option<bool>,
    dev: Option<bool>,
    credential: Option<String>,
    external_id: Option<String>,
    context: Option<BTreeMap<String, String>>,
    #[serde(deserialize_with = "amount")]
    capacity_min: Option<u64>,
    #[serde(deserialize_with = "amount")]
    capacity_max: Option<u64>,
    clone: Option<String>,
    snapshot: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Way {
    access_mode: AccessMode,
    #[serde(default = "file_system")]
    attachment_mode: AttachmentMode,
}

fn file_system() -> AttachmentMode {
    AttachmentMode::FileSystem
}

/// Reads bytes, or a text with a unit.
fn amount<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Bytes(u64),
        Text(String),
    }
    match Either::deserialize(deserializer)? {
        Either::Bytes(bytes) => Ok(Some(bytes)),
        Either::Text(text) => text.parse().map(|Amount(bytes)| Some(bytes)).map_err(D::Error::custom),
    }
}

/// A volume and its spec, from whatever source.
pub struct Named<S> {
    pub namespace: String,
    pub volume: String,
    pub spec: S,
}

pub fn register(args: Register) -> anyhow::Result<Named<RegisterVolume>> {
    let (file, deadline_usec) = read(args.spec)?;
    for (key, given) in [
        ("capacity-min", file.file.capacity_min.is_some()),
        ("capacity-max", file.file.capacity_max.is_some()),
        ("clone", file.file.clone.is_some()),
        ("snapshot", file.file.snapshot.is_some()),
    ] {
        if given {
            bail!("{key} is for `csictl volume create`: a registered volume exists already");
        }
    }
    let Merged { file, secrets } = file;
    let spec = RegisterVolume {
        deadline_usec,
        secrets,
        credential: file.credential,
        plugin: file.plugin,
        external_id: args.external_id.or(file.external_id),
        name: file.name,
        capabilities: capabilities(file.capabilities),
        fs_type: file.fs_type,
        mount_flags: file.mount_flags,
        mount_group: file.mount_group,
        context: pairs(args.context).or(file.context),
        parameters: file.parameters,
        topologies: file.topologies,
        heal: file.heal,
        suid: file.suid,
        dev: file.dev,
        ..RegisterVolume::default()
    };
    named(file.namespace, file.id, spec)
}

pub fn create(args: Create) -> anyhow::Result<Named<CreateVolume>> {
    let (file, deadline_usec) = read(args.spec)?;
    for (key, given) in
        [("external-id", file.file.external_id.is_some()), ("context", file.file.context.is_some())]
    {
        if given {
            bail!("{key} is for `csictl volume register`: a created volume gets it from the plugin's answer");
        }
    }
    let Merged { file, secrets } = file;
    let spec = CreateVolume {
        deadline_usec,
        secrets,
        credential: file.credential,
        plugin: file.plugin,
        name: file.name,
        capabilities: capabilities(file.capabilities),
        fs_type: file.fs_type,
        mount_flags: file.mount_flags,
        mount_group: file.mount_group,
        parameters: file.parameters,
        topologies: file.topologies,
        heal: file.heal,
        suid: file.suid,
        dev: file.dev,
        capacity_min: args.capacity.map(|Amount(bytes)| bytes).or(file.capacity_min),
        capacity_max: args.capacity_max.map(|Amount(bytes)| bytes).or(file.capacity_max),
        clone: args.clone_of.or(file.clone),
        snapshot: args.snapshot.or(file.snapshot),
        ..CreateVolume::default()
    };
    named(file.namespace, file.id, spec)
}

struct Merged {
    file: File,
    secrets: Option<csid_client::SealedSecrets>,
}

/// Merges the file with the command line, which takes precedence.
fn read(args: Spec) -> anyhow::Result<(Merged, Option<u64>)> {
    let file = args.file.as_deref().map_or_else(|| Ok(File::default()), load)?;
    let attachment_mode = if args.block { AttachmentMode::BlockDevice } else { AttachmentMode::FileSystem };
    let ways = args.access_mode.into_iter().map(|access_mode| Way { access_mode, attachment_mode });
    let topologies = args.topology.into_iter().map(|of| pairs(of.0).unwrap_or_default());
    let merged = File {
        namespace: args.namespace.or(file.namespace),
        id: args.volume.or(file.id),
        plugin: args.plugin.or(file.plugin),
        name: args.name.or(file.name),
        capabilities: some(ways.collect()).or(file.capabilities),
        fs_type: args.fs_type.or(file.fs_type),
        mount_flags: some(args.mount_flag).or(file.mount_flags),
        mount_group: args.mount_group.or(file.mount_group),
        parameters: pairs(args.parameter).or(file.parameters),
        topologies: some(topologies.collect()).or(file.topologies),
        heal: args.heal.or(file.heal),
        suid: yes(args.suid).or(file.suid),
        dev: yes(args.dev).or(file.dev),
        // Secrets on the command line replace the file's credential.
        credential: match args.secrets.secrets_file {
            Some(_) => None,
            None => args.secrets.credential.or(file.credential),
        },
        ..file
    };
    let secrets = sealed(args.secrets.secrets_file.as_deref())?;
    Ok((Merged { file: merged, secrets }, args.wait.deadline.usec()))
}

fn load(path: &Path) -> anyhow::Result<File> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot open {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("{} is not a volume's spec", path.display()))
}

fn capabilities(ways: Option<Vec<Way>>) -> Option<Vec<Capability>> {
    let capability =
        |way: Way| Capability { access_mode: way.access_mode, attachment_mode: way.attachment_mode };
    ways.map(|ways| ways.into_iter().map(capability).collect())
}

fn named<S>(namespace: Option<String>, volume: Option<String>, spec: S) -> anyhow::Result<Named<S>> {
    match (namespace, volume) {
        (Some(namespace), Some(volume)) => Ok(Named { namespace, volume, spec }),
        _ => bail!("no volume: give NAMESPACE and VOLUME, or `namespace` and `id` in the file"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command, Volume};

    const FILE: &str = r#"
namespace = "prod"
id = "db"
plugin = "ebs"
external-id = "vol-1"
fs-type = "xfs"
topologies = [{ zone = "a" }]
capabilities = [{ access-mode = "single-node-writer" }]
"#;

    /// Parses a command line with a file, which exists as long as its directory.
    fn volume(directory: &tempfile::TempDir, words: &str, file: &str) -> Volume {
        let path = directory.path().join("volume.toml");
        std::fs::write(&path, file).unwrap();
        let words = words.replace("FILE", path.to_str().unwrap());
        match Cli::try_parse_from(["csictl", "volume"].into_iter().chain(words.split(' '))).unwrap().command {
            Command::Volume(volume) => *volume,
            _ => unreachable!(),
        }
    }

    fn registered(words: &str, file: &str) -> anyhow::Result<Named<RegisterVolume>> {
        let directory = tempfile::tempdir().unwrap();
        match volume(&directory, words, file) {
            Volume::Register(args) => register(args),
            _ => unreachable!(),
        }
    }

    #[test]
    fn command_line_precedes_the_file() {
        let named = registered("register -f FILE", FILE).unwrap();
        assert_eq!((named.namespace.as_str(), named.volume.as_str()), ("prod", "db"));
        assert_eq!(named.spec.external_id.as_deref(), Some("vol-1"));
        assert_eq!(named.spec.capabilities.unwrap()[0].attachment_mode, AttachmentMode::FileSystem);
        let words = "register test db2 -f FILE --fs-type ext4 --access-mode multi-node-reader-only --block";
        let named = registered(words, FILE).unwrap();
        assert_eq!((named.namespace.as_str(), named.volume.as_str()), ("test", "db2"));
        assert_eq!(named.spec.fs_type.as_deref(), Some("ext4"));
        let capabilities = named.spec.capabilities.unwrap();
        assert_eq!((capabilities.len(), capabilities[0].access_mode), (1, AccessMode::MultiNodeReaderOnly));
        assert_eq!(capabilities[0].attachment_mode, AttachmentMode::BlockDevice);
    }

    #[test]
    fn invalid_files_are_refused() {
        for (file, why) in [
            ("namespace = \"prod\"", "no volume: give"),
            ("colour = \"red\"", "is not a volume's spec"),
            ("capacity-min = \"10GiB\"\nnamespace = \"a\"\nid = \"b\"", "volume create"),
            ("capacity-min = \"lots\"", "is not a volume's spec"),
        ] {
            let error = format!("{:#}", registered("register -f FILE", file).map(|_| ()).unwrap_err());
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_capacity_has_a_unit_in_a_file_too() {
        let file = "namespace = \"a\"\nid = \"b\"\ncapacity-min = \"10GiB\"\ncapacity-max = 99";
        let directory = tempfile::tempdir().unwrap();
        for (words, least) in [("create -f FILE", 10 << 30), ("create -f FILE --capacity 1K", 1024)] {
            let Volume::Create(args) = volume(&directory, words, file) else { unreachable!() };
            let spec = create(args).unwrap().spec;
            assert_eq!((spec.capacity_min, spec.capacity_max), (Some(least), Some(99)));
        }
        let Volume::Create(args) = volume(&directory, "create -f FILE", FILE) else { unreachable!() };
        let error = create(args).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("volume register"), "{error}");
    }
}
