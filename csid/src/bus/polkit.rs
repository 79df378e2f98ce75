//! Questions to polkit about callers on the bus. The subject is always the caller's bus name, which the bus daemon writes into the
//! message's header. A pid could belong to another process when polkit reads it. Every answer other than yes is a refusal.

use std::collections::HashMap;
use std::time::Duration;

use zbus::{Connection, Variant};

use super::facts::CallFacts;

const NAME: &str = "org.freedesktop.PolicyKit1";
const PATH: &str = "/org/freedesktop/PolicyKit1/Authority";
const AUTHORITY: &str = "org.freedesktop.PolicyKit1.Authority";
const DBUS: &str = "org.freedesktop.DBus";
const ALLOW_USER_INTERACTION: u32 = 1;

/// Timeouts of an answer. If a user authenticates it is that of polkit's own agents.
#[derive(Clone, Copy)]
pub(super) struct Timeouts {
    pub unattended: Duration,
    pub interactive: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts { unattended: Duration::from_secs(25), interactive: Duration::from_secs(300) }
    }
}

/// A client of polkit with its own connection, because answers must arrive even while csid reads no calls.
#[derive(Clone)]
pub(super) struct Polkit {
    asker: Connection,
    timeouts: Timeouts,
}

impl Polkit {
    pub fn new(asker: Connection, timeouts: Timeouts) -> Self {
        Polkit { asker, timeouts }
    }

    /// Returns whether polkit runs or can be started. Nothing is cached, because polkit may be installed or removed meanwhile.
    pub async fn present(&self) -> Result<bool, String> {
        let owned: bool = self.bus("NameHasOwner", &(NAME,)).await?;
        if owned {
            return Ok(true);
        }
        let activatable: Vec<String> = self.bus("ListActivatableNames", &()).await?;
        Ok(activatable.iter().any(|name| name == NAME))
    }

    /// Returns whether polkit authorises the sender. `facts`: the details that a rule reads with `action.lookup`.
    pub async fn check(
        &self,
        sender: &str,
        action: &str,
        facts: &CallFacts,
        interactive: bool,
    ) -> Result<bool, String> {
        let subject = ("system-bus-name", HashMap::from([("name", Variant::from(sender))]));
        let (flags, timeout) = match interactive {
            true => (ALLOW_USER_INTERACTION, self.timeouts.interactive),
            false => (0, self.timeouts.unattended),
        };
        let body = (subject, action, facts, flags, "");
        let call = self.asker.call_method(Some(NAME), PATH, Some(AUTHORITY), "CheckAuthorization", &body);
        let reply = tokio::time::timeout(timeout, call)
            .await
            .map_err(|_| format!("polkit did not answer within {} s", timeout.as_secs()))?
            .map_err(|error| format!("polkit failed: {error}"))?;
        let body = reply.body();
        if body.signature().to_string() != "(bba{ss})"
            && body.signature().to_string_no_parens() != "(bba{ss})"
        {
            return Err("polkit's answer is malformed".to_owned());
        }
        type Answer = (bool, bool, HashMap<String, String>);
        let ((authorised, challenge, _),): (Answer,) =
            body.deserialize().map_err(|error| format!("polkit's answer is malformed: {error}"))?;
        if !authorised && challenge {
            return Err("polkit requires authentication, which the call does not allow".to_owned());
        }
        Ok(authorised)
    }

    async fn bus<B, R>(&self, member: &str, body: &B) -> Result<R, String>
    where
        B: serde::Serialize + zbus::DynamicType,
        R: serde::de::DeserializeOwned + zbus::Type,
    {
        let failed = |error: zbus::Error| format!("the bus failed to look up polkit: {error}");
        let call = self.asker.call_method(Some(DBUS), "/org/freedesktop/DBus", Some(DBUS), member, body);
        let reply = tokio::time::timeout(self.timeouts.unattended, call)
            .await
            .map_err(|_| "the bus did not answer".to_owned())?
            .map_err(failed)?;
        reply.body().deserialize().map_err(failed)
    }
}
