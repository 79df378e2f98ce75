//! Reads `volumes.d`: a file per volume, with the arguments of RegisterVolume. The name of the file is the id of the volume, unless
//! it gives another. An error names the file, the line and the key, never a value: mount flags and contexts are not for logs.

use std::collections::BTreeMap;
use std::path::Path;

use serde::de::DeserializeOwned;
use toml::Spanned;

use crate::config::{FileError, read_each};
use crate::error::Result;
use crate::names::{self, DEFAULT_NAMESPACE, Word};
use crate::plugin::validate_id;
use crate::store::registry::{Capability, VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;
use crate::volume::api::requests::Declared;
use crate::volume::lifecycle::refuse_nonsense;

const TEXT: &str = "a string";
const FLAG: &str = "true or false";
const TABLE: &str = "a table of strings";

/// The keys of a file, and the types of their values.
const KEYS: [(&str, &str); 16] = [
    ("namespace", TEXT),
    ("id", TEXT),
    ("plugin", TEXT),
    ("external-id", TEXT),
    ("name", TEXT),
    ("capabilities", "a list of tables of strings"),
    ("fs-type", TEXT),
    ("mount-flags", "a list of strings"),
    ("mount-group", TEXT),
    ("context", TABLE),
    ("parameters", TABLE),
    ("topologies", "a list of tables of strings"),
    ("credential", TEXT),
    ("heal", TEXT),
    ("suid", FLAG),
    ("dev", FLAG),
];

type Texts = BTreeMap<String, String>;

/// Reads and checks every file of a directory.
pub fn load(directory: &Path) -> Result<Vec<Declared>, FileError> {
    load_each(directory)?.into_iter().collect()
}

/// Reads like [`load`], with a result for each file. Of two files with the same volume the second is wrong.
pub fn load_each(directory: &Path) -> Result<Vec<Result<Declared, FileError>>, FileError> {
    let mut files = read_each(directory, read)?;
    let (mut names, mut volumes) = (BTreeMap::new(), BTreeMap::new());
    for file in &mut files {
        let Ok(Declared { file: path, name, volume, .. }) = file else { continue };
        let by_name = names.insert(name.clone(), path.clone());
        if let Some(other) = by_name.or(volumes.insert(volume.clone(), path.clone())) {
            let message = format!("{name}, or its external-id, is declared by {}, too", other.display());
            *file = Err(FileError::Wrong { path: path.clone(), message });
        }
    }
    Ok(files)
}

fn read(path: &Path, id: &str, text: &str) -> Result<Declared, String> {
    let mut keys = Keys::read(text)?;
    let namespace = keys.text("namespace", names::optional_name)?.filter(|text| !text.is_empty());
    let namespace = namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
    let id = match keys.text("id", names::name)? {
        Some(id) => id,
        None => {
            names::name("id, which is the file's name,", id).map(|()| id.to_owned()).map_err(message_of)?
        }
    };
    let plugin = keys.text("plugin", |_, id| validate_id(id))?.ok_or("plugin is missing")?;
    let external_id = keys.text("external-id", names::external_id)?.ok_or("external-id is missing")?;
    let spec = VolumeSpec {
        name: keys.text("name", names::name)?.unwrap_or_default(),
        capabilities: keys.take("capabilities", capabilities)?.ok_or("capabilities is missing")?,
        fs_type: keys.text("fs-type", |_, text| names::fs_type(text))?.unwrap_or_default(),
        mount_flags: keys
            .take("mount-flags", |f: Vec<_>| names::mount_flags(&f).map(|()| f))?
            .unwrap_or_default(),
        mount_group: keys.text("mount-group", names::optional_name)?.unwrap_or_default(),
        context: keys.map("context")?,
        parameters: keys.map("parameters")?,
        topologies: keys
            .take("topologies", |t: Vec<_>| names::topologies(&t).map(|()| t))?
            .unwrap_or_default(),
        credential: keys.text("credential", |_, text| names::credential(text))?,
        heal: keys.take("heal", |text: String| Word::read("heal", &text))?.unwrap_or_default(),
        suid: keys.take("suid", Ok)?.unwrap_or_default(),
        dev: keys.take("dev", Ok)?.unwrap_or_default(),
        ..VolumeSpec::default()
    };
    refuse_nonsense(&spec).map_err(message_of)?;
    let (name, volume) = (VolumeName { namespace, volume: id }, VolumeKey::new(plugin, external_id));
    Ok(Declared { file: path.into(), name, volume, spec })
}

fn capabilities(said: Vec<Texts>) -> Result<Vec<Capability>> {
    const MODES: [&str; 2] = ["access-mode", "attachment-mode"];
    if said.iter().flat_map(Texts::keys).any(|key| !MODES.contains(&key.as_str())) {
        return Err(crate::Error::invalid(
            "capabilities has another key than access-mode and attachment-mode",
        ));
    }
    names::capabilities(said.iter().map(|of| MODES.map(|mode| of.get(mode).map(String::as_str))))
}

fn message_of(error: crate::Error) -> String {
    error.message
}

/// The keys of a file that were not read yet.
struct Keys<'t> {
    text: &'t str,
    left: BTreeMap<String, Spanned<toml::Value>>,
}

impl<'t> Keys<'t> {
    fn read(text: &'t str) -> Result<Self, String> {
        let read: BTreeMap<Spanned<String>, Spanned<toml::Value>> =
            toml::from_str(text).map_err(|error| {
                // The message leaves out the text of the line, which the whole error quotes.
                format!("line {}: {}", line(text, error.span().map_or(0, |span| span.start)), error.message())
            })?;
        let mut left = BTreeMap::new();
        for (key, value) in read {
            if !KEYS.iter().any(|(known, _)| known == key.as_ref()) {
                let known = KEYS.map(|(known, _)| known).join(", ");
                let line = line(text, key.span().start);
                return Err(format!("line {line}: unknown key `{}`; there are {known}", key.as_ref()));
            }
            left.insert(key.into_inner(), value);
        }
        Ok(Keys { text, left })
    }

    fn take<T: DeserializeOwned, R>(
        &mut self,
        key: &str,
        check: impl FnOnce(T) -> Result<R>,
    ) -> Result<Option<R>, String> {
        let Some(value) = self.left.remove(key) else { return Ok(None) };
        let line = line(self.text, value.span().start);
        let kind = KEYS.iter().find(|(known, _)| *known == key).map_or(TEXT, |(_, kind)| kind);
        let value = value.into_inner().try_into().map_err(|_| format!("line {line}: {key} is not {kind}"))?;
        check(value).map(Some).map_err(|error| format!("line {line}: {}", error.message))
    }

    fn text(
        &mut self,
        key: &str,
        check: impl FnOnce(&str, &str) -> Result<()>,
    ) -> Result<Option<String>, String> {
        self.take(key, |text: String| check(key, &text).map(|()| text))
    }

    fn map(&mut self, key: &str) -> Result<Texts, String> {
        let map = self.take(key, |map: Texts| names::context(key, &map).map(|()| map))?;
        Ok(map.unwrap_or_default())
    }
}

fn line(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::Heal;
    use crate::store::rows::{AccessMode, AttachmentMode};

    const LEAST: &str = "plugin = \"p\"\nexternal-id = \"x\"\ncapabilities = [{}]\n";

    fn least(external_id: &str) -> String {
        LEAST.replace("\"x\"", &format!("{external_id:?}"))
    }

    fn load_texts(files: &[(&str, &str)]) -> Vec<Result<Declared, FileError>> {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        load_each(directory.path()).unwrap()
    }

    fn refused(text: &str) -> String {
        let files = load_texts(&[("bad.toml", text), ("good.toml", &least("y"))]);
        assert!(files[1].is_ok(), "the other file is read all the same");
        files[0].as_ref().err().unwrap_or_else(|| panic!("it was taken: {text}")).to_string()
    }

    #[test]
    fn volume_file_has_every_register_field() {
        let whole = "namespace = \"prod\"\nid = \"pg/1\"\nplugin = \"p\"\nexternal-id = \"x\"\nname = \"disk\"\n\
            fs-type = \"xfs\"\nmount-flags = [\"noatime\"]\nmount-group = \"26\"\ncredential = \"csid.prod.pg\"\n\
            heal = \"remount\"\nsuid = true\ndev = true\ntopologies = [{ zone = \"a\" }]\n\
            [[capabilities]]\naccess-mode = \"multi-node-multi-writer\"\nattachment-mode = \"block-device\"\n\
            [[capabilities]]\n[context]\npool = \"ssd\"\n[parameters]\ntier = \"1\"\n";
        let files = load_texts(&[("a.toml", whole), ("b.toml", &least("y")), (".c.toml", "no")]);
        let Declared { file, name, volume, spec } = files[0].as_ref().unwrap();
        assert!(file.ends_with("a.toml"));
        assert_eq!((name.to_string(), &*volume.handle.text()), ("prod/pg/1".to_owned(), "x"));
        let of = |key: &str, value: &str| Texts::from([(key.to_owned(), value.to_owned())]);
        let texts = [&spec.name, &spec.fs_type, &spec.mount_flags[0], &spec.mount_group];
        assert_eq!(texts, ["disk", "xfs", "noatime", "26"]);
        assert_eq!((&spec.context, &spec.parameters), (&of("pool", "ssd"), &of("tier", "1")));
        assert_eq!(spec.topologies, [of("zone", "a")]);
        assert_eq!(spec.credential.as_deref(), Some("csid.prod.pg"));
        assert!(spec.heal == Heal::Remount && spec.suid && spec.dev);
        let modes: Vec<_> = spec.capabilities.iter().map(|of| (of.access_mode, of.attachment_mode)).collect();
        let block = (AccessMode::MultiNodeMultiWriter, AttachmentMode::BlockDevice);
        assert_eq!(modes, [block, (AccessMode::SingleNodeWriter, AttachmentMode::FileSystem)]);
        assert_eq!((files.len(), files[1].as_ref().unwrap().name.to_string().as_str()), (2, "default/b"));
    }

    #[test]
    fn packaged_example_is_a_valid_volume_file() {
        let example = include_str!("../../../../packaging/etc/volumes.d/pg.toml.example");
        let uncommented =
            example.replace("\n#fs", "\nfs").replace("\n#mount", "\nmount").replace("\n#cred", "\ncred");
        for text in [example, &uncommented] {
            let read = load_texts(&[("b.toml", text), ("pg.toml.example", "not toml")]);
            assert_eq!(read.len(), 1);
            assert_eq!(read[0].as_ref().unwrap().name.to_string(), "prod/pg");
        }
    }

    #[test]
    fn wrong_field_is_reported_with_its_line() {
        let long = "x".repeat(129);
        let large = format!("context = {{ k = \"{}\" }}", "v".repeat(4096));
        for (said, why) in [
            ("id = \"\"", "id is empty"),
            ("namespace = 1", "namespace is not a string"),
            (&format!("id = \"{long}\""), "id is longer than 128 bytes"),
            ("name = \"a\\nb\"", "name has a control character"),
            ("mount-group = [\"a\"]", "mount-group is not a string"),
            ("fs-type = \"a b\"", "fs-type is at most"),
            ("mount-flags = \"noatime\"", "mount-flags is not a list of strings"),
            ("mount-flags = [\"\"]", "a mount flag is empty"),
            ("context = [\"a\"]", "context is not a table of strings"),
            (&large, "context is larger than 4 KiB"),
            ("parameters = { a = 1 }", "parameters is not a table of strings"),
            ("topologies = [{}]", "topologies has an empty one"),
            ("topologies = { zone = \"a\" }", "topologies is not a list of tables of strings"),
            ("credential = \"a/b\"", "credential is no name"),
            ("heal = \"never\"", "heal is none of report, remount"),
            ("suid = \"yes\"", "suid is not true or false"),
            ("dev = 1", "dev is not true or false"),
            ("secrets = { password = \"hunter2\" }", "unknown key `secrets`"),
            ("sokket = 1", "unknown key `sokket`"),
            ("plugin = \"q\"", "duplicate key"),
            ("not toml", "key with no value"),
        ] {
            let error = refused(&format!("{LEAST}# and\n{said}\n"));
            assert!(error.contains("bad.toml: line 5: ") && error.contains(why), "{said}: {error}");
        }
        for (from, to, line, why) in [
            ("plugin = \"p\"", "", "", "plugin is missing"),
            ("external-id = \"x\"", "", "", "external-id is missing"),
            ("capabilities = [{}]", "", "", "capabilities is missing"),
            ("\"p\"", "\"a b\"", "line 1", "plugin id"),
            ("\"x\"", "\"\"", "line 2", "external-id is empty"),
            ("[{}]", "[]", "line 3", "capabilities is empty"),
            ("[{}]", "[{}, {}]", "line 3", "capability twice"),
            ("[{}]", "[{ access-mode = \"rw\" }]", "line 3", "access-mode is none of"),
            ("[{}]", "[{ mode = \"rw\" }]", "line 3", "another key than access-mode"),
            ("[{}]", "[{ attachment-mode = \"block-device\" }]\nfs-type = \"xfs\"", "", "fs-type means"),
        ] {
            let error = refused(&LEAST.replace(from, to));
            assert!(error.contains("bad.toml: ") && error.contains(line) && error.contains(why), "{error}");
        }
        let unnamed = load_texts(&[(&format!("{long}.toml"), LEAST)]).remove(0).err().unwrap();
        assert!(unnamed.to_string().contains("the file's name"), "{unnamed}");
    }

    #[test]
    fn secret_in_a_file_is_not_quoted() {
        for said in [
            "mount-flags = \"password=hunter2\"",
            "mount-flags = [\"a\" \"password=hunter2\"]",
            "mount-flags = [password=hunter2]",
            "mount-flags = hunter2",
            "mount-flags = \"\"\"hunter2",
            "context = { a = [\"hunter2\"] }",
            "context.a = \"hunter2\"\ncontext.a = \"hunter2\"",
            "parameters = \"hunter2\"",
            "secrets = \"hunter2\"",
        ] {
            let error = refused(&format!("{LEAST}{said}\n"));
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_volume_is_declared_once() {
        let other = least("y");
        let again = format!("id = \"a\"\n{}", least("z"));
        let files =
            load_texts(&[("a.toml", LEAST), ("b.toml", &again), ("c.toml", LEAST), ("d.toml", &other)]);
        let wrong: Vec<String> =
            files.iter().filter_map(|file| Some(file.as_ref().err()?.to_string())).collect();
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        for (error, file) in wrong.iter().zip(["b.toml: default/a", "c.toml: default/c"]) {
            assert!(error.contains(file) && error.contains("a.toml, too"), "{error}");
        }
    }
}
