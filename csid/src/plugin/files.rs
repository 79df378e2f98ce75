//! `plugins.d`: one file per plugin, its name the id. A reload takes the whole directory, or nothing of it; at csid's start one
//! wrong file must not keep the other plugins' volumes away.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use super::PluginSpec;
use crate::error::Error;

/// What is wrong with a directory of plugins; it begins with the file.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// With the line and the key, as the parser tells them.
    #[error("{}: {message}", path.display())]
    Parse { path: PathBuf, message: String },
    #[error("{}: {}", path.display(), reason.message)]
    Wrong { path: PathBuf, reason: Error },
}

/// A file's plugin: its id and its spec.
pub type File = Result<(String, PluginSpec), FilesError>;

/// Read and check every `*.toml` of a directory, by id. A directory that is not there defines no plugin.
pub fn load(directory: &Path) -> Result<Vec<(String, PluginSpec)>, FilesError> {
    load_each(directory)?.into_iter().collect()
}

/// As [`load`], each file for itself.
pub fn load_each(directory: &Path) -> Result<Vec<File>, FilesError> {
    let read = |source| FilesError::Read { path: directory.into(), source };
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(read)?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(read)?.path();
        let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension() == Some(OsStr::new("toml")) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths.into_iter().map(load_file).collect())
}

fn load_file(path: PathBuf) -> File {
    let id = path.file_stem().and_then(OsStr::to_str).unwrap_or_default().to_owned();
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(source) => return Err(FilesError::Read { path, source }),
    };
    let spec: PluginSpec = match toml::from_str(&text) {
        Ok(spec) => spec,
        Err(error) => return Err(FilesError::Parse { path, message: error.to_string() }),
    };
    match spec.validate(&id).and_then(|()| spec.check_program()) {
        Ok(()) => Ok((id, spec)),
        Err(reason) => Err(FilesError::Wrong { path, reason }),
    }
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
    fn one_wrong_file_refuses_all_and_is_named() {
        let table = [
            ("x.toml", format!("{EXTERNAL}sokket = \"/run/b.sock\"\n"), vec!["line 3", "sokket"]),
            ("x.toml", "supervision = \"unit\"\n".into(), vec!["line 1", "unit"]),
            ("x.toml", "socket = \"/run/a.sock\"\n".into(), vec!["supervision"]),
            ("x.toml", "supervision = \"external\"\n".into(), vec!["needs socket"]),
            ("x y.toml", EXTERNAL.into(), vec!["plugin id"]),
            ("x.toml", MANAGED.replace("/bin/sh", "/bin/no-such-program"), vec!["argv[0]"]),
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
}
