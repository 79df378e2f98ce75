//! link.toml, and the files of keys that systemd hands over.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use csi_proto::identity::is_member_name;
use serde::Deserialize;

/// The limit of each file, in bytes.
const FILE: u64 = 1024 * 1024;
const SERVERS: usize = 16;

/// The configuration of a node's link.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub cluster: String,
    /// HOST:PORT of each server.
    pub servers: Vec<String>,
}

impl Config {
    pub fn read(path: &Path) -> Result<Config> {
        let text = String::from_utf8(bytes(path)?);
        let text = text.with_context(|| format!("{} is not UTF-8", path.display()))?;
        Config::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Config> {
        let config: Config = toml::from_str(text)?;
        let Config { cluster, servers } = &config;
        ensure!(is_member_name(cluster), "cluster is not a DNS name of at most 63 bytes: {cluster:?}");
        check_servers(servers)?;
        Ok(config)
    }
}

/// Checks the HOST:PORT of servers: there are 1 to 16, each once.
pub fn check_servers(servers: &[String]) -> Result<()> {
    let count = servers.len();
    ensure!((1..=SERVERS).contains(&count), "servers has {count} entries, and the limit is {SERVERS}");
    for server in servers {
        ensure!(split(server).is_some(), "servers: this is not HOST:PORT: {server:?}");
    }
    let names: BTreeSet<&String> = servers.iter().collect();
    ensure!(names.len() == count, "servers names a server twice");
    Ok(())
}

/// Returns host and port. `None`: the text is not HOST:PORT, or cannot be the name of a socket.
pub fn split(server: &str) -> Option<(&str, u16)> {
    let (host, port) = server.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.:".contains(&byte);
    let is_name = !host.is_empty() && !host.starts_with('.') && host.bytes().all(is_plain);
    // A path of a socket has at most 107 bytes.
    (is_name && server.len() <= 80).then_some((host, port))
}

/// Reads a file of at most 1 MiB.
pub fn bytes(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    file.take(FILE + 1).read_to_end(&mut bytes).with_context(|| path.display().to_string())?;
    ensure!(bytes.len() as u64 <= FILE, "{} is larger than {FILE} bytes", path.display());
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_is_host_and_port_and_no_path() {
        assert_eq!(split("s1.example:7443"), Some(("s1.example", 7443)));
        assert_eq!(split("10.0.0.1:1"), Some(("10.0.0.1", 1)));
        assert_eq!(split("[fd00::1]:7443"), Some(("fd00::1", 7443)));
        for wrong in ["s1", ":1", "s1:0", "s1:65536", "../s1:1", "a/b:1", "s1:x", ".:1", "s 1:1", "s1\0:1"] {
            assert_eq!(split(wrong), None, "{wrong:?}");
        }
        assert_eq!(split(&format!("{}:1", "a".repeat(80))), None);
    }

    #[test]
    fn wrong_file_is_refused() {
        let good = "cluster = \"prod\"\nservers = [\"s1:7443\"]\n";
        assert!(Config::parse(good).is_ok());
        for wrong in [
            "cluster = \"prod\"\nservers = []\n",
            "cluster = \"Prod\"\nservers = [\"s1:7443\"]\n",
            "cluster = \"prod\"\nservers = [\"s1:7443\", \"s1:7443\"]\n",
            "cluster = \"prod\"\nservers = [\"s1:7443\"]\nkey = \"x\"\n",
        ] {
            assert!(Config::parse(wrong).is_err(), "{wrong}");
        }
    }
}
