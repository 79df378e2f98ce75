//! operator.toml, and the operator's key.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use csi_proto::identity::Role;
use csid_link::tls::{TlsClient, client};
use csid_link::{bytes, check_servers};
use serde::Deserialize;
use zeroize::Zeroizing;

use super::failure::OperatorError;

/// The variable that names the file.
const VARIABLE: &str = "CSID_OPERATOR";
/// The file below the home directory.
const DEFAULT: &str = ".config/csid/operator.toml";
/// The limit of a key, in bytes.
const KEY: usize = 64 * 1024;
/// The permissions of others than the owner, and those to write.
const OTHERS: u32 = 0o077;
const WRITERS: u32 = 0o022;

/// The content of operator.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    /// HOST:PORT of each server.
    servers: Vec<String>,
    /// Paths that do not begin with a slash are below the file's directory.
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

/// An operator, and the servers to ask.
pub struct Operator {
    pub servers: Vec<String>,
    pub client: TlsClient,
}

/// Returns the file to read: the given one, or that of the environment, or the default.
pub fn place(given: Option<PathBuf>) -> Result<PathBuf> {
    let named =
        given.or_else(|| std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from));
    match (named, std::env::var_os("HOME").filter(|home| !home.is_empty())) {
        (Some(named), _) => Ok(named),
        (None, Some(home)) => Ok(Path::new(&home).join(DEFAULT)),
        (None, None) => anyhow::bail!("neither --operator=FILE nor {VARIABLE} nor HOME is set"),
    }
}

/// Reads an operator's file, and the files that it names.
pub fn read(path: &Path) -> Result<Operator> {
    let text = std::fs::read_to_string(path).map_err(failed_at(path))?;
    let content: Content = toml::from_str(&text).with_context(|| path.display().to_string())?;
    let Content { servers, ca, certificate, key } = content;
    check_servers(&servers).with_context(|| path.display().to_string())?;
    let directory = path.parent().unwrap_or(Path::new(""));
    let [ca, certificate, key] = [ca, certificate, key].map(|file| directory.join(file));
    for file in [path, &ca, &certificate] {
        bytes(file)?;
        let metadata = std::fs::metadata(file).map_err(failed_at(file))?;
        if metadata.permissions().mode() & WRITERS != 0 || !is_ours(&metadata) {
            return Err(OperatorError::Foreign { path: file.to_owned() }.into());
        }
    }
    let client = client(&ca, &certificate, &key, private, Role::Operator, None)?;
    Ok(Operator { servers, client })
}

fn failed_at(path: &Path) -> impl Fn(std::io::Error) -> OperatorError {
    |source| OperatorError::File { path: path.to_owned(), source }
}

/// Returns whether a file is this user's or root's.
fn is_ours(metadata: &Metadata) -> bool {
    [0, rustix::process::geteuid().as_raw()].contains(&metadata.uid())
}

/// Reads a key. One that others can read is refused.
fn private(path: &Path) -> Result<Zeroizing<Vec<u8>>> {
    let file = File::open(path).map_err(failed_at(path))?;
    let metadata = file.metadata().map_err(failed_at(path))?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(OperatorError::OpenKey { path: path.to_owned(), mode }.into());
    }
    if !is_ours(&metadata) {
        return Err(OperatorError::Foreign { path: path.to_owned() }.into());
    }
    // Allocated once, because a buffer that grows leaves copies of the key.
    let mut pem = Zeroizing::new(Vec::with_capacity(KEY + 1));
    file.take(KEY as u64 + 1).read_to_end(&mut pem).map_err(failed_at(path))?;
    ensure!(pem.len() <= KEY, "key {} is larger than {KEY} bytes", path.display());
    Ok(pem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_that_others_can_read_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("key");
        std::fs::write(&key, "secret").unwrap();
        for (mode, good) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o620, false)] {
            std::fs::set_permissions(&key, PermissionsExt::from_mode(mode)).unwrap();
            match private(&key) {
                Ok(read) => assert!(good && *read == b"secret", "{mode:o}"),
                Err(error) => {
                    let text = format!("{error:#}");
                    assert!(!good && text.contains(&format!("{mode:04o}")), "{mode:o}: {text}");
                    assert!(!text.contains("secret"), "{text}");
                }
            }
        }
        std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(&key, vec![b'a'; KEY + 1]).unwrap();
        assert!(private(&key).unwrap_err().to_string().contains("larger than 65536 bytes"));
    }

    #[test]
    fn wrong_file_is_refused_with_its_line() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("operator.toml");
        let good = "servers = [\"s1:7443\"]\nca = \"ca\"\ncertificate = \"c\"\nkey = \"k\"\n";
        for (text, due) in [
            (good.replace("s1:7443", "s1"), "this is not HOST:PORT: \"s1\""),
            (good.replace("[\"s1:7443\"]", "[]"), "servers has 0 entries"),
            (format!("{good}cluster = \"prod\"\n"), "unknown field `cluster`"),
            (good.replace("key", "keys"), "unknown field `keys`"),
            (good.to_owned(), "/ca: "),
        ] {
            std::fs::write(&file, text).unwrap();
            let Err(error) = read(&file) else { panic!("{due}") };
            assert!(format!("{error:#}").contains(due), "{error:#}");
        }
    }
}
