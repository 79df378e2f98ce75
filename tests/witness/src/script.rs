//! Faults: what is done to which call. The n-th call of an RPC is counted over all connections, from 1.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

use serde::Deserialize;

use crate::message::{self, Alteration};

/// A list of faults, in TOML as in README.md.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    #[serde(default)]
    fault: Vec<Fault>,
    #[serde(skip)]
    seen: Mutex<HashMap<String, u64>>,
}

/// A fault. Without `nth` it applies to every call of the RPC.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Fault {
    rpc: String,
    nth: Option<u64>,
    /// The plugin does its work first; `alter` always comes after it.
    #[serde(default)]
    after: bool,
    #[serde(rename = "do")]
    act: Act,
}

/// The action of a fault.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Act {
    /// Answer with a gRPC code, by its name.
    Code(Code),
    DelayMs(u64),
    /// Never answer.
    Hang,
    /// Break the CO's connection.
    Drop,
    Alter(Alteration),
}

/// Names of the gRPC codes by number.
pub const GRPC_CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// A gRPC code: a number on the wire, a name in logs and scripts.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub(crate) struct Code(pub(crate) usize);

impl Code {
    /// Reads `grpc-status`. A number that gRPC does not know means UNKNOWN.
    pub(crate) fn from_wire(status: &[u8]) -> Self {
        let number = std::str::from_utf8(status).ok().and_then(|text| text.parse().ok());
        Code(number.filter(|number| *number < GRPC_CODES.len()).unwrap_or(2))
    }

    pub(crate) fn name(self) -> &'static str {
        GRPC_CODES[self.0]
    }
}

impl TryFrom<String> for Code {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let number = GRPC_CODES.iter().position(|code| **code == name);
        number
            .map(Code)
            .ok_or_else(|| format!("{name} is no gRPC code; the codes are {}", GRPC_CODES.join(", ")))
    }
}

/// Why a script cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    #[error("cannot read the script")]
    Read(#[from] std::io::Error),
    #[error("the script is not as README.md describes it")]
    Parse(#[from] toml::de::Error),
    #[error("the script names {0}, which is no unary RPC of CSI")]
    UnknownRpc(String),
}

/// The faults of one call.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) before: Vec<Act>,
    pub(crate) after: Vec<Act>,
}

impl Script {
    pub fn read(path: &Path) -> Result<Self, ScriptError> {
        Self::parse(&std::fs::read_to_string(path)?)
    }

    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let script: Script = toml::from_str(text)?;
        match script.fault.iter().find(|fault| !message::is_unary(&fault.rpc)) {
            Some(fault) => Err(ScriptError::UnknownRpc(fault.rpc.clone())),
            None => Ok(script),
        }
    }

    /// Count a call, and find what is to be done to it.
    pub(crate) fn plan(&self, rpc: &str) -> Plan {
        if self.fault.is_empty() {
            return Plan::default();
        }
        let nth = {
            let mut seen = self.seen.lock().expect("counting does not panic");
            let count = seen.entry(rpc.to_owned()).or_default();
            *count += 1;
            *count
        };
        let mut plan = Plan::default();
        for fault in &self.fault {
            if fault.rpc == rpc && fault.nth.is_none_or(|wanted| wanted == nth) {
                let late = fault.after || matches!(fault.act, Act::Alter(_));
                if late { &mut plan.after } else { &mut plan.before }.push(fault.act.clone());
            }
        }
        plan
    }
}
