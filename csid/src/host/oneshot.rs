//! Commands around a service, as a unit that stays active between them: one when it starts, and one when it has stopped,
//! or could not be started. systemd runs them, so the second is not forgotten when csid is away.

use std::time::Duration;

use zbus::Variant;

use crate::host::units::{Units, UnitsError, command};

/// A command that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Debug)]
pub struct Oneshot {
    pub unit: String,
    pub description: String,
    /// argv, as [`Service`](super::units::Service)'s.
    pub start: Vec<String>,
    /// Empty: none.
    pub stop: Vec<String>,
    pub log_field: String,
    pub syslog_identifier: String,
}

impl Units {
    /// Start it; answered when systemd has taken it on. One that is loaded is started by the definition it has.
    pub async fn start_oneshot(&self, oneshot: &Oneshot) -> Result<(), UnitsError> {
        let usec = u64::try_from(PATIENCE.as_micros()).unwrap_or(u64::MAX);
        let mut properties: Vec<(&str, Variant<'_>)> = vec![
            ("Description", oneshot.description.as_str().into()),
            ("Type", "oneshot".into()),
            ("RemainAfterExit", true.into()),
            ("ExecStart", command(&oneshot.start).into()),
            ("LogExtraFields", vec![oneshot.log_field.as_bytes().to_vec()].into()),
            ("SyslogIdentifier", oneshot.syslog_identifier.as_str().into()),
            ("TimeoutStartUSec", usec.into()),
            ("TimeoutStopUSec", usec.into()),
            ("StartLimitIntervalUSec", 0_u64.into()),
        ];
        if !oneshot.stop.is_empty() {
            properties.push(("ExecStopPost", command(&oneshot.stop).into()));
        }
        let unit = oneshot.unit.as_str();
        match self.start_transient_unit(unit, &properties).await {
            Err(UnitsError::Exists { .. }) => self.start(unit).await,
            started => started,
        }
    }

    /// Whether a unit that requires this one runs.
    pub async fn is_required(&self, unit: &str) -> Result<bool, UnitsError> {
        let Some(path) = self.path(unit).await? else { return Ok(false) };
        let users: Vec<String> = self.property(unit, &path, "Unit", "RequiredBy").await?;
        let users: Vec<&str> = users.iter().map(String::as_str).collect();
        Ok(!users.is_empty() && !self.running(&users).await?.is_empty())
    }
}
