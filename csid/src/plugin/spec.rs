//! The definition of a plugin: RegisterPlugin's spec and the keys of a file in `plugins.d`, and its checks.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Component, Path};
use std::time::Duration;

use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};

use crate::config;
use crate::names;
use crate::plugin::common::NODE_CALLS;
use crate::plugin::errors::spec::SpecError;
use crate::plugin::network::Network;
use crate::plugin::profile::Profile;
use crate::plugin::trust;
use crate::store::rows::Propagation;

const DEFAULT_INSTANCE: &str = "default";
pub(super) const ENDPOINT: &str = "CSI_ENDPOINT";
/// `sockaddr_un` has room for 108 bytes, the last a NUL.
pub(super) const SOCKET_BYTES: usize = 107;
/// All of argv, or all of the environment.
const TEXT_BYTES: usize = 64 * 1024;
const UNIT_NAME_BYTES: usize = 255;
const CREDENTIAL_NAME_BYTES: usize = 128;
/// Node calls in flight.
const AT_ONCE: RangeInclusive<u32> = 1..=1024;

/// RegisterPlugin's spec, and the keys of a file in `plugins.d`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct PluginSpec {
    pub supervision: Supervision,
    #[serde(default)]
    pub argv: Vec<String>,
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// `NAME` or `NAME:PATH`, as in LoadCredential=.
    #[serde(default)]
    pub credentials: Vec<String>,
    /// The service that a `unit` plugin runs in, which somebody else has defined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    #[serde(default)]
    pub socket: Option<String>,
    #[serde(default)]
    pub instance: Option<String>,
    /// The host directory of the volumes' paths; default: `plugins/ID` below csid's state directory.
    #[serde(default)]
    pub plugin_root: Option<String>,
    /// The same directory as the plugin sees it (CSI rule 30).
    #[serde(default)]
    pub plugin_view: Option<String>,
    #[serde(default)]
    pub log: Log,
    /// The deadline of one RPC, in systemd's spelling; default: csid.toml's.
    #[serde(default)]
    pub rpc_deadline: Option<String>,
    /// How many node calls of the plugin are in flight at most, those of all its volumes together; default: 32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_calls_at_once: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
    /// Between the host's mounts and the plugin's; default: bidirectional, they are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub propagation: Option<Propagation>,
    #[serde(default, skip_serializing_if = "Network::is_host")]
    pub network: Network,
    /// In files only: what makes the network namespace before the plugin starts, and takes it away after it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network_prestart: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network_poststop: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Supervision {
    /// csid defines its unit.
    #[default]
    Managed,
    /// A unit that is there, of a file or made by a generator as a Quadlet's: csid starts and watches it, and never stops it
    /// but to restart it.
    Unit,
    External,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Log {
    #[default]
    Journal,
    None,
}

/// Plugin ids become directories and parts of unit names (design: Names).
pub fn validate_id(id: &str) -> crate::Result<()> {
    Ok(check_id(id)?)
}

fn check_id(id: &str) -> Result<(), SpecError> {
    let bytes = id.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    let good = bytes.len() <= 63
        && ends.iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(b))
        && !id.contains("..");
    if good { Ok(()) } else { Err(SpecError::Id { id: id.to_owned() }) }
}

impl PluginSpec {
    /// Returns a spec with defaults.
    pub fn new(supervision: Supervision) -> Self {
        PluginSpec { supervision, ..PluginSpec::default() }
    }

    /// Checks all that needs no look at the host.
    pub fn validate(&self, id: &str) -> Result<(), SpecError> {
        check_id(id)?;
        names::instance(self.instance()).map_err(|source| SpecError::Instance { source })?;
        match self.supervision {
            Supervision::Managed => self.validate_managed(id)?,
            Supervision::Unit => self.validate_unit()?,
            Supervision::External => self.validate_external()?,
        }
        if self.unit.is_some() && self.supervision != Supervision::Unit {
            return Err(SpecError::ForUnit);
        }
        if self.supervision != Supervision::Managed && self.has_settings() {
            return Err(SpecError::ForManaged { keys: "profile, propagation and network" });
        }
        for (key, path) in [("plugin-root", &self.plugin_root), ("plugin-view", &self.plugin_view)] {
            if let Some(path) = path.as_ref().filter(|path| !is_plain_path(path)) {
                return Err(SpecError::Path { key, path: path.clone() });
            }
        }
        let value = self.node_calls_at_once();
        if !AT_ONCE.contains(&value) {
            return Err(SpecError::NodeCalls { value, least: *AT_ONCE.start(), most: *AT_ONCE.end() });
        }
        self.rpc_deadline().map(drop)
    }

    fn validate_managed(&self, id: &str) -> Result<(), SpecError> {
        if self.socket.is_some() {
            return Err(SpecError::ForExternal { endpoint: ENDPOINT });
        }
        if self.argv.is_empty() {
            return Err(missing("a managed plugin", "argv", "the program and its arguments"));
        }
        check_command("argv", &self.argv)?;
        for (key, value) in &self.environment {
            let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
            if key.is_empty() || !key.bytes().all(word) || key.as_bytes()[0].is_ascii_digit() {
                return Err(SpecError::Variable);
            }
            if key.starts_with("CSI_") && key != ENDPOINT {
                return Err(SpecError::ReservedVariable { name: key.clone() });
            }
            if !is_text(value) {
                return Err(SpecError::ControlCharacters { text: format!("environment: {key}") });
            }
        }
        let bytes = self.environment.iter().map(|(key, value)| key.len() + value.len()).sum();
        check_length("environment", bytes)?;
        if let Some(value) = self.environment.get(ENDPOINT)
            && !value.strip_prefix("unix://").is_some_and(is_socket)
        {
            let value = value.clone();
            return Err(SpecError::Endpoint { key: ENDPOINT, value, limit: SOCKET_BYTES });
        }
        for credential in &self.credentials {
            let (name, path) = split_credential(credential);
            let named = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
            let is_short = (1..=CREDENTIAL_NAME_BYTES).contains(&name.len());
            if !is_short || name.starts_with('.') || !name.bytes().all(named) {
                return Err(SpecError::Credential { limit: CREDENTIAL_NAME_BYTES });
            }
            if path.is_some_and(|path| !is_plain_path(path)) {
                return Err(SpecError::CredentialPath { name: name.to_owned() });
            }
        }
        self.validate_network()?;
        match unit_name(id, self.instance()).len() {
            bytes if bytes > UNIT_NAME_BYTES => Err(SpecError::UnitName { bytes, limit: UNIT_NAME_BYTES }),
            _ => Ok(()),
        }
    }

    fn validate_unit(&self) -> Result<(), SpecError> {
        const PLUGIN: &str = "a plugin in a unit";
        let unit = self.unit.as_ref().ok_or_else(|| missing(PLUGIN, "unit", "the name of a service"))?;
        check_service(unit)?;
        self.validate_defined_elsewhere(PLUGIN)
    }

    fn validate_external(&self) -> Result<(), SpecError> {
        self.validate_defined_elsewhere("an external plugin")
    }

    fn validate_defined_elsewhere(&self, plugin: &'static str) -> Result<(), SpecError> {
        if !self.argv.is_empty() || !self.environment.is_empty() || !self.credentials.is_empty() {
            return Err(SpecError::ForManaged { keys: "argv, environment and credentials" });
        }
        let key = "socket";
        match &self.socket {
            Some(path) if is_socket(path) => Ok(()),
            Some(path) => Err(SpecError::Socket { key, path: path.clone(), limit: SOCKET_BYTES }),
            None => Err(missing(plugin, key, "the path where it listens")),
        }
    }

    fn validate_network(&self) -> Result<(), SpecError> {
        let commands =
            [("network-prestart", &self.network_prestart), ("network-poststop", &self.network_poststop)];
        let mut given = commands.into_iter().filter(|(_, command)| !command.is_empty());
        let Some((key, _)) = given.next() else { return Ok(()) };
        if !matches!(self.network, Network::Namespace(_)) {
            return Err(SpecError::WithoutNamespace { key });
        }
        if self.network_prestart.is_empty() {
            return Err(SpecError::WithoutPrestart);
        }
        commands
            .into_iter()
            .filter(|(_, command)| !command.is_empty())
            .try_for_each(|(key, command)| check_command(key, command))
    }

    /// Checks what a start needs: a socket where the plugin's user can listen, and programs that exist and that only root can change,
    /// because root runs them. A spec that an older csid has journaled may fail here.
    pub fn check_start(&self) -> Result<(), SpecError> {
        if self.profile == Some(Profile::Controller) && self.environment.contains_key(ENDPOINT) {
            return Err(SpecError::ControllerEndpoint { key: ENDPOINT });
        }
        let commands = [
            ("argv", &self.argv),
            ("network-prestart", &self.network_prestart),
            ("network-poststop", &self.network_poststop),
        ];
        for (key, command) in commands {
            let Some(program) = command.first() else { continue };
            trust::check(Path::new(program)).map_err(|source| SpecError::Distrusted { key, source })?;
        }
        Ok(())
    }

    /// Returns whether a key is set by which a caller could make csid run or reach what belongs to others.
    pub(super) fn needs_root(&self) -> bool {
        !self.argv.is_empty()
            || !self.environment.is_empty()
            || self.unit.is_some()
            || self.plugin_root.is_some()
            || self.plugin_view.is_some()
            || self.has_settings()
    }

    fn has_settings(&self) -> bool {
        self.profile.is_some()
            || self.propagation.is_some()
            || !self.network.is_host()
            || !self.network_prestart.is_empty()
            || !self.network_poststop.is_empty()
    }

    pub(super) fn same_settings(&self, other: &PluginSpec) -> bool {
        self.profile == other.profile
            && self.propagation() == other.propagation()
            && self.network == other.network
            && self.network_prestart == other.network_prestart
            && self.network_poststop == other.network_poststop
    }

    pub(super) fn propagation(&self) -> Propagation {
        self.propagation.unwrap_or(Propagation::Bidirectional)
    }

    pub fn instance(&self) -> &str {
        self.instance.as_deref().unwrap_or(DEFAULT_INSTANCE)
    }

    /// The plugin's own deadline of an RPC, if it has one.
    pub fn rpc_deadline(&self) -> Result<Option<Duration>, SpecError> {
        let Some(text) = &self.rpc_deadline else { return Ok(None) };
        let text: serde::de::value::StrDeserializer<'_, serde::de::value::Error> =
            text.as_str().into_deserializer();
        config::duration(text).map(Some).map_err(|source| SpecError::Deadline { source })
    }

    pub(super) fn node_calls_at_once(&self) -> u32 {
        self.node_calls_at_once.unwrap_or(NODE_CALLS)
    }

    /// Whether `self` describes the same plugin as `other`; a default that is written out changes nothing.
    pub(super) fn same(&self, other: &PluginSpec) -> bool {
        let spelled = |spec: &PluginSpec| PluginSpec {
            instance: Some(spec.instance().to_owned()),
            propagation: Some(spec.propagation()),
            node_calls_at_once: Some(spec.node_calls_at_once()),
            ..spec.clone()
        };
        spelled(self) == spelled(other)
    }

    /// Whether a process started by `other` is also one of `self`.
    pub(super) fn same_process(&self, other: &PluginSpec) -> bool {
        self.supervision == other.supervision
            && self.instance() == other.instance()
            && self.unit == other.unit
            && self.argv == other.argv
            && self.environment == other.environment
            && self.credentials == other.credentials
            && self.log == other.log
            && self.same_settings(other)
    }
}

/// `csi-plugin-ID-INSTANCE.service`. A `-` of the id or the instance is written as systemd-escape does: drop-ins apply by
/// prefix, and those for `csi-plugin-a-` must not change the plugin `a-b`.
pub(super) fn unit_name(id: &str, instance: &str) -> String {
    let escaped = |text: &str| text.replace('-', "\\x2d");
    format!("csi-plugin-{}-{}.service", escaped(id), escaped(instance))
}

fn missing(plugin: &'static str, key: &'static str, meaning: &'static str) -> SpecError {
    SpecError::Missing { plugin, key, meaning }
}

/// A program and its arguments.
fn check_command(key: &'static str, command: &[String]) -> Result<(), SpecError> {
    if !command.first().is_some_and(|program| is_plain_path(program)) {
        return Err(SpecError::Program { key });
    }
    check_length(key, command.iter().map(String::len).sum())?;
    match command.iter().all(|argument| is_text(argument)) {
        true => Ok(()),
        false => Err(SpecError::ControlCharacters { text: key.to_owned() }),
    }
}

fn check_length(key: &'static str, bytes: usize) -> Result<(), SpecError> {
    match bytes > TEXT_BYTES {
        true => Err(SpecError::TooLong { key, bytes, limit: TEXT_BYTES }),
        false => Ok(()),
    }
}

/// `NAME` or `NAME:PATH`.
pub(super) fn split_credential(credential: &str) -> (&str, Option<&str>) {
    match credential.split_once(':') {
        Some((name, path)) => (name, Some(path)),
        None => (credential, None),
    }
}

fn is_text(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

fn is_plain_path(path: &str) -> bool {
    path.len() < 4096
        && is_text(path)
        && Path::new(path).is_absolute()
        && !Path::new(path).components().any(|c| c == Component::ParentDir)
}

/// The name of a service that can be started, and that csid does not define itself.
fn check_service(unit: &str) -> Result<(), SpecError> {
    let stem = unit.strip_suffix(".service").unwrap_or_default();
    let named = |b: u8| b.is_ascii_alphanumeric() || b":-_.\\@".contains(&b);
    let of = || unit.to_owned();
    if stem.is_empty() || unit.len() > UNIT_NAME_BYTES || !stem.bytes().all(named) {
        return Err(SpecError::NoService { unit: of(), limit: UNIT_NAME_BYTES });
    }
    if stem.starts_with('@') || stem.ends_with('@') {
        return Err(SpecError::Template { unit: of() });
    }
    let own = ["csi-plugin-", "csi-exec-", "csid-network-", "csid-log-", "csid-credential-", "csid-look-"];
    if stem == "csid" || own.iter().any(|own| stem.starts_with(own)) {
        return Err(SpecError::OwnUnit { unit: of() });
    }
    Ok(())
}

/// CSI rule 1: a Unix socket whose name ends in `.sock`.
fn is_socket(path: &str) -> bool {
    is_plain_path(path) && path.ends_with(".sock") && path.len() <= SOCKET_BYTES
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
