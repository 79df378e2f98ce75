//! polkit, asked about callers on the bus. The subject is always the caller's bus name, from the message's header as the
//! bus daemon wrote it: a pid could belong to another process by the time polkit looks. Whatever is not a plain yes is a no.

use std::collections::HashMap;
use std::time::Duration;

use zbus::{Connection, Variant};

const NAME: &str = "org.freedesktop.PolicyKit1";
const PATH: &str = "/org/freedesktop/PolicyKit1/Authority";
const AUTHORITY: &str = "org.freedesktop.PolicyKit1.Authority";
const DBUS: &str = "org.freedesktop.DBus";
const ALLOW_USER_INTERACTION: u32 = 1;

/// How long an answer may take; with a person asked, as long as polkit's own agents wait.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    pub machine: Duration,
    pub person: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { machine: Duration::from_secs(25), person: Duration::from_secs(300) }
    }
}

/// Asks over a connection of its own: answers must come even while csid does not read calls.
#[derive(Clone)]
pub(super) struct Polkit {
    asker: Connection,
    patience: Patience,
}

impl Polkit {
    pub fn new(asker: Connection, patience: Patience) -> Self {
        Polkit { asker, patience }
    }

    /// Whether polkit runs or would be started by being asked. Asked each time: it may be installed or purged meanwhile.
    pub async fn present(&self) -> Result<bool, String> {
        let owned: bool = self.bus("NameHasOwner", &(NAME,)).await?;
        if owned {
            return Ok(true);
        }
        let activatable: Vec<String> = self.bus("ListActivatableNames", &()).await?;
        Ok(activatable.iter().any(|name| name == NAME))
    }

    pub async fn check(&self, sender: &str, action: &str, interactive: bool) -> Result<bool, String> {
        let subject = ("system-bus-name", HashMap::from([("name", Variant::from(sender))]));
        let details: HashMap<&str, &str> = HashMap::new();
        let (flags, patience) = match interactive {
            true => (ALLOW_USER_INTERACTION, self.patience.person),
            false => (0, self.patience.machine),
        };
        let body = (subject, action, details, flags, "");
        let call = self.asker.call_method(Some(NAME), PATH, Some(AUTHORITY), "CheckAuthorization", &body);
        let reply = tokio::time::timeout(patience, call)
            .await
            .map_err(|_| format!("polkit did not answer within {} s", patience.as_secs()))?
            .map_err(|error| format!("polkit could not be asked: {error}"))?;
        let body = reply.body();
        if body.signature().to_string() != "(bba{ss})"
            && body.signature().to_string_no_parens() != "(bba{ss})"
        {
            return Err("polkit's answer is malformed".to_owned());
        }
        type Answer = (bool, bool, HashMap<String, String>);
        let ((authorised, challenge, _),): (Answer,) =
            body.deserialize().map_err(|_| "polkit's answer is malformed".to_owned())?;
        if !authorised && challenge {
            return Err("polkit wants a person to be asked, which the call does not allow".to_owned());
        }
        Ok(authorised)
    }

    async fn bus<B, R>(&self, member: &str, body: &B) -> Result<R, String>
    where
        B: serde::Serialize + zbus::DynamicType,
        R: serde::de::DeserializeOwned + zbus::Type,
    {
        let failed = |error: zbus::Error| format!("the bus could not be asked about polkit: {error}");
        let call = self.asker.call_method(Some(DBUS), "/org/freedesktop/DBus", Some(DBUS), member, body);
        let reply = tokio::time::timeout(self.patience.machine, call)
            .await
            .map_err(|_| "the bus did not answer".to_owned())?
            .map_err(failed)?;
        reply.body().deserialize().map_err(failed)
    }
}
