//! Errors of a plugin's spec: of a call, of a file, or of a row of the journal.

use crate::error::{Error, shortened};
use crate::plugin::trust::Distrust;

/// Why a spec is refused. Texts that may be secrets are not shown: arguments, values of the environment, and names that are none.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    #[error(
        "the plugin id {:?} is not 1 to 63 of [A-Za-z0-9._-], a letter or digit first and last, without `..`",
        shortened(id)
    )]
    Id { id: String },
    #[error("{}", source.message)]
    Instance { source: Error },
    /// Id and instance are within their own limits.
    #[error(
        "the plugin id and the instance are too long for a unit name: {bytes} bytes exceed {limit}; each `-` takes four bytes \
         there"
    )]
    UnitName { bytes: usize, limit: usize },
    /// A key that the supervision does not have. `keys` is a plural.
    #[error("{keys} are for managed plugins; csid does not define how another one runs")]
    ForManaged { keys: &'static str },
    #[error("unit is for supervision = \"unit\"")]
    ForUnit,
    /// `endpoint`: the variable of the environment.
    #[error(
        "socket is for external plugins and those in units; a managed one listens at csid's own path, or at {endpoint} of its \
         environment"
    )]
    ForExternal { endpoint: &'static str },
    /// `plugin`: of which supervision.
    #[error("{plugin} needs {key}: {meaning}")]
    Missing { plugin: &'static str, key: &'static str, meaning: &'static str },
    #[error("{key} is not an absolute path without `..`: {:?}", shortened(path))]
    Path { key: &'static str, path: String },
    #[error(
        "{key} is not an absolute path without `..` of at most {limit} bytes that ends in .sock: {:?}",
        shortened(path)
    )]
    Socket { key: &'static str, path: String, limit: usize },
    #[error(
        "environment: {key} is not unix:// and an absolute path without `..` of at most {limit} bytes that ends in .sock: {:?}",
        shortened(value)
    )]
    Endpoint { key: &'static str, value: String, limit: usize },
    /// The user of a plugin of profile `controller` cannot listen there.
    #[error(
        "environment: {key}: a plugin of profile `controller` has a user of its own, which listens only in the directory that \
         csid makes for it"
    )]
    ControllerEndpoint { key: &'static str },
    #[error("{key}[0] is not an absolute path without `..`")]
    Program { key: &'static str },
    #[error("{key}[0]: {source}")]
    Distrusted { key: &'static str, source: Distrust },
    #[error("{key} is longer than {limit} bytes: it has {bytes}")]
    TooLong { key: &'static str, bytes: usize, limit: usize },
    /// `text`: the key, with the name of a variable.
    #[error("{text} holds control characters")]
    ControlCharacters { text: String },
    #[error("an environment key is not [A-Za-z_][A-Za-z0-9_]*")]
    Variable,
    #[error("environment: {name}: the prefix CSI_ is reserved")]
    ReservedVariable { name: String },
    #[error(
        "a credential is not NAME or NAME:PATH, NAME of at most {limit} of [A-Za-z0-9._-] without a leading dot"
    )]
    Credential { limit: usize },
    #[error("credentials: {name}: its path is not absolute, or holds `..`")]
    CredentialPath { name: String },
    #[error(
        "unit is not the name of a service, NAME.service of at most {limit} bytes: {:?}",
        shortened(unit)
    )]
    NoService { unit: String, limit: usize },
    #[error("unit: {unit} is a template, not an instance of one")]
    Template { unit: String },
    #[error("unit: {unit} is csid's own")]
    OwnUnit { unit: String },
    #[error("network is none of host, none, netns:NAME")]
    Network,
    #[error("network: the namespace's name is not 1 to {limit} of [A-Za-z0-9._-], a letter or digit first")]
    Namespace { limit: usize },
    #[error("{key} needs network = \"netns:NAME\": what it makes")]
    WithoutNamespace { key: &'static str },
    #[error("network-poststop needs network-prestart, which makes the namespace")]
    WithoutPrestart,
    #[error("node-calls-at-once: {value} is not {least} to {most}")]
    NodeCalls { value: u32, least: u32, most: u32 },
    #[error("rpc-deadline: {source}")]
    Deadline { source: serde::de::value::Error },
}

impl From<SpecError> for Error {
    fn from(error: SpecError) -> Self {
        Error::invalid(error.to_string())
    }
}
