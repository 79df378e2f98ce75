//! `plugins.d`: one file per plugin, its name the id. A reload takes the whole directory, or nothing of it; at csid's start one
//! wrong file must not keep the other plugins' volumes away. A program may be on a mount that comes after csid's start, so the
//! supervisor looks at it before each start of its plugin.

use std::path::Path;

use crate::config::{FileError, read_each};
use crate::plugin::errors::spec::SpecError;
use crate::plugin::spec::PluginSpec;

/// A file's plugin: its id and its spec.
pub type PluginFile = Result<(String, PluginSpec), FileError>;

/// Reads and checks every file of a directory, by id, and the programs that the files name.
pub fn load(directory: &Path) -> Result<Vec<(String, PluginSpec)>, FileError> {
    read(directory, PluginSpec::check_start)?.into_iter().collect()
}

/// Reads and checks each file for itself, but no program.
pub fn load_each(directory: &Path) -> Result<Vec<PluginFile>, FileError> {
    read(directory, |_| Ok(()))
}

fn read(
    directory: &Path,
    check: impl Fn(&PluginSpec) -> Result<(), SpecError>,
) -> Result<Vec<PluginFile>, FileError> {
    read_each(directory, |_, id, text| {
        let spec: PluginSpec = toml::from_str(text).map_err(|error| error.to_string())?;
        spec.validate(id).and_then(|()| check(&spec)).map_err(|error| error.to_string())?;
        Ok((id.to_owned(), spec))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    const EXTERNAL: &str = "supervision = \"external\"\nsocket = \"/run/a.sock\"\n";
    const MANAGED: &str = "supervision = \"managed\"\nargv = [\"/bin/sh\", \"-c\", \"true\"]\n";

    #[test]
    fn a_file_is_a_plugin_by_its_name() {
        let good = directory(&[
            ("b.toml", EXTERNAL),
            ("a-1.toml", MANAGED),
            ("README", "no"),
            (".a.toml", "no"),
            ("c.toml.bak", "no"),
        ]);
        let plugins = load(good.path()).unwrap();
        let ids: Vec<_> = plugins.iter().map(|(id, _)| id.as_str()).collect();
        assert_eq!(ids, ["a-1", "b"]);
        assert_eq!(plugins[1].1.socket.as_deref(), Some("/run/a.sock"));
        assert!(load(&good.path().join("none")).unwrap().is_empty());
    }

    #[test]
    fn wrong_file_is_named_and_no_file_applied() {
        let table = [
            ("x.toml", format!("{EXTERNAL}sokket = \"/run/b.sock\"\n"), vec!["line 3", "sokket"]),
            ("x.toml", "supervision = \"pod\"\n".into(), vec!["line 1", "pod"]),
            ("x.toml", "socket = \"/run/a.sock\"\n".into(), vec!["supervision"]),
            ("x.toml", "supervision = \"external\"\n".into(), vec!["needs socket"]),
            ("x y.toml", EXTERNAL.into(), vec!["plugin id"]),
        ];
        for (name, text, expected) in table {
            let directory = directory(&[("good.toml", EXTERNAL), (name, &text)]);
            let error = load(directory.path()).unwrap_err().to_string();
            let each = load_each(directory.path()).unwrap();
            assert_eq!(
                each.iter().filter(|file| file.is_ok()).count(),
                1,
                "the good one is there all the same"
            );
            assert!(error.contains(name), "{error}");
            for word in expected {
                assert!(error.contains(word), "{word}: {error}");
            }
        }
    }

    #[test]
    fn missing_program_is_an_error_of_a_reload_alone() {
        let text = MANAGED.replace("/bin/sh", "/bin/no-such-program");
        let directory = directory(&[("good.toml", EXTERNAL), ("x.toml", &text)]);
        let error = load(directory.path()).unwrap_err().to_string();
        assert!(error.contains("x.toml") && error.contains("argv[0]"), "{error}");
        let each = load_each(directory.path()).unwrap();
        assert_eq!(each.iter().filter(|file| file.is_ok()).count(), 2, "csid's start takes it");
    }
}
