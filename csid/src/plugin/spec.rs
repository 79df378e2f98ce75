//! The definition of a plugin: RegisterPlugin's spec and the keys of a file in `plugins.d`, and its checks.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Component, Path};
use std::time::Duration;

use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};

use crate::config;
use crate::error::{Error, Result};
use crate::names;
use crate::plugin::common::NODE_CALLS;
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
pub fn validate_id(id: &str) -> Result<()> {
    let bytes = id.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    let good = bytes.len() <= 63
        && ends.iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(b))
        && !id.contains("..");
    if good {
        return Ok(());
    }
    Err(Error::invalid(
        "the plugin id is not 1 to 63 of [A-Za-z0-9._-], a letter or digit first and last, without `..`",
    ))
}

impl PluginSpec {
    /// Returns a spec with defaults.
    pub fn new(supervision: Supervision) -> Self {
        PluginSpec { supervision, ..PluginSpec::default() }
    }

    /// Checks all that needs no look at the host.
    pub fn validate(&self, id: &str) -> Result<()> {
        validate_id(id)?;
        names::instance(self.instance())?;
        match self.supervision {
            Supervision::Managed => self.validate_managed(id)?,
            Supervision::Unit => self.validate_unit()?,
            Supervision::External => self.validate_external()?,
        }
        if self.unit.is_some() && self.supervision != Supervision::Unit {
            return Err(Error::invalid("unit is for supervision = \"unit\""));
        }
        if self.supervision != Supervision::Managed && self.has_settings() {
            return Err(Error::invalid(
                "profile, propagation and network are for managed plugins; another is run as its own unit or \
                 container says",
            ));
        }
        for (key, path) in [("plugin-root", &self.plugin_root), ("plugin-view", &self.plugin_view)] {
            if path.as_ref().is_some_and(|path| !is_plain_path(path)) {
                return Err(Error::invalid(format!("{key} is not an absolute path without `..`")));
            }
        }
        if !AT_ONCE.contains(&self.node_calls_at_once()) {
            let (least, most) = (AT_ONCE.start(), AT_ONCE.end());
            return Err(Error::invalid(format!(
                "node-calls-at-once: {} is not {least} to {most}",
                self.node_calls_at_once()
            )));
        }
        self.rpc_deadline().map(drop)
    }

    fn validate_managed(&self, id: &str) -> Result<()> {
        if self.socket.is_some() {
            return Err(Error::invalid(format!(
                "socket is for external plugins; a managed one listens at csid's own path, or at {ENDPOINT} \
                 of its environment"
            )));
        }
        if self.argv.is_empty() {
            return Err(Error::invalid("a managed plugin needs argv: the program and its arguments"));
        }
        check_command("argv", &self.argv)?;
        for (key, value) in &self.environment {
            let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
            if key.is_empty() || !key.bytes().all(word) || key.as_bytes()[0].is_ascii_digit() {
                return Err(Error::invalid("an environment key is not [A-Za-z_][A-Za-z0-9_]*"));
            }
            if key.starts_with("CSI_") && key != ENDPOINT {
                return Err(Error::invalid(format!("environment: {key}: the prefix CSI_ is reserved")));
            }
            if !is_text(value) {
                return Err(Error::invalid(format!("environment: {key} holds control characters")));
            }
        }
        if self.environment.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>() > TEXT_BYTES {
            return Err(Error::invalid("environment is longer than 64 KiB"));
        }
        if let Some(endpoint) = self.environment.get(ENDPOINT) {
            let path = endpoint.strip_prefix("unix://").unwrap_or_default();
            check_socket(path, "environment: CSI_ENDPOINT is not unix:// and")?;
        }
        for credential in &self.credentials {
            let (name, path) = split_credential(credential);
            let named = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
            if name.is_empty() || name.len() > 128 || name.starts_with('.') || !name.bytes().all(named) {
                return Err(Error::invalid("a credential is not NAME or NAME:PATH, NAME of [A-Za-z0-9._-]"));
            }
            if path.is_some_and(|path| !is_plain_path(path)) {
                return Err(Error::invalid(format!(
                    "credentials: {name}: its path is not absolute, or holds `..`"
                )));
            }
        }
        self.validate_network()?;
        if unit_name(id, self.instance()).len() > UNIT_NAME_BYTES {
            return Err(Error::invalid(
                "the plugin id and the instance are too long for a unit name: each `-` takes four bytes there",
            ));
        }
        Ok(())
    }

    fn validate_unit(&self) -> Result<()> {
        let Some(unit) = &self.unit else {
            return Err(Error::invalid("supervision = \"unit\" needs unit: the name of a service"));
        };
        check_service(unit)?;
        self.refuse_what_defines()?;
        match &self.socket {
            Some(socket) => check_socket(socket, "socket is not"),
            None => Err(Error::invalid("a plugin in a unit needs socket: the path where it listens")),
        }
    }

    fn refuse_what_defines(&self) -> Result<()> {
        if !self.argv.is_empty() || !self.environment.is_empty() || !self.credentials.is_empty() {
            return Err(Error::invalid(
                "argv, environment and credentials are for managed plugins; csid defines how no other one runs",
            ));
        }
        Ok(())
    }

    fn validate_external(&self) -> Result<()> {
        self.refuse_what_defines()?;
        match &self.socket {
            Some(socket) => check_socket(socket, "socket is not"),
            None => Err(Error::invalid("an external plugin needs socket: the path where it listens")),
        }
    }

    fn validate_network(&self) -> Result<()> {
        let commands =
            [("network-prestart", &self.network_prestart), ("network-poststop", &self.network_poststop)];
        let mut given = commands.into_iter().filter(|(_, command)| !command.is_empty());
        let Some((key, _)) = given.next() else { return Ok(()) };
        if !matches!(self.network, Network::Namespace(_)) {
            return Err(Error::invalid(format!("{key} needs network = \"netns:NAME\": what it makes")));
        }
        if self.network_prestart.is_empty() {
            return Err(Error::invalid("network-poststop needs network-prestart, which makes the namespace"));
        }
        commands
            .into_iter()
            .filter(|(_, command)| !command.is_empty())
            .try_for_each(|(key, command)| check_command(key, command))
    }

    /// Checks what a start needs: a socket where the plugin's user can listen, and programs that exist and that only root can change,
    /// because root runs them. A spec that an older csid has journaled may fail here.
    pub fn check_start(&self) -> Result<()> {
        if self.profile == Some(Profile::Controller) && self.environment.contains_key(ENDPOINT) {
            return Err(Error::invalid(format!(
                "environment: {ENDPOINT}: a plugin of profile `controller` has a user of its own, which listens only in the directory \
                 that csid makes for it"
            )));
        }
        let commands = [
            ("argv", &self.argv),
            ("network-prestart", &self.network_prestart),
            ("network-poststop", &self.network_poststop),
        ];
        for (key, command) in commands {
            let Some(program) = command.first() else { continue };
            trust::check(Path::new(program)).map_err(|error| Error::invalid(format!("{key}[0]: {error}")))?;
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
    pub fn rpc_deadline(&self) -> Result<Option<Duration>> {
        let Some(text) = &self.rpc_deadline else { return Ok(None) };
        let text: serde::de::value::StrDeserializer<'_, serde::de::value::Error> =
            text.as_str().into_deserializer();
        config::duration(text).map(Some).map_err(|error| Error::invalid(format!("rpc-deadline: {error}")))
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

/// A program and its arguments.
fn check_command(key: &str, command: &[String]) -> Result<()> {
    if !command.first().is_some_and(|program| is_plain_path(program)) {
        return Err(Error::invalid(format!("{key}[0] is not an absolute path without `..`")));
    }
    if command.iter().map(String::len).sum::<usize>() > TEXT_BYTES || !command.iter().all(|a| is_text(a)) {
        return Err(Error::invalid(format!("{key} is longer than 64 KiB or holds control characters")));
    }
    Ok(())
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
fn check_service(unit: &str) -> Result<()> {
    let stem = unit.strip_suffix(".service").unwrap_or_default();
    let named = |b: u8| b.is_ascii_alphanumeric() || b":-_.\\@".contains(&b);
    if stem.is_empty() || unit.len() > UNIT_NAME_BYTES || !stem.bytes().all(named) {
        return Err(Error::invalid("unit is not the name of a service, NAME.service"));
    }
    if stem.starts_with('@') || stem.ends_with('@') {
        return Err(Error::invalid(format!("unit: {unit} is a template, not an instance of one")));
    }
    let own = ["csi-plugin-", "csi-exec-", "csid-network-", "csid-log-", "csid-credential-", "csid-look-"];
    if stem == "csid" || own.iter().any(|own| stem.starts_with(own)) {
        return Err(Error::invalid(format!("unit: {unit} is csid's own")));
    }
    Ok(())
}

/// CSI rule 1: a Unix socket whose name ends in `.sock`.
fn check_socket(path: &str, what: &str) -> Result<()> {
    if is_plain_path(path) && path.ends_with(".sock") && path.len() <= SOCKET_BYTES {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{what} an absolute path without `..` of at most {SOCKET_BYTES} bytes that ends in .sock"
    )))
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
