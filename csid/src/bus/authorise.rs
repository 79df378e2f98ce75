//! Authorization of callers. Root may do everything. On the bus polkit decides about every other caller. Without polkit, and on the
//! private socket, members of group csid have the actions that are marked here, and other callers have none.

use std::sync::Arc;

use tracing::info;

use super::caller::{Caller, Way};
use super::facts::CallFacts;
use super::polkit::Polkit;
use crate::error::{Error, Kind, Result};

/// polkit's actions, `org.csid1.NAME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolkitAction {
    Read,
    Mount,
    Unmount,
    UnmountOthers,
    Inline,
    ManageVolumes,
    ManagePlugins,
    PluginExec,
    PluginLog,
    Manage,
}

impl PolkitAction {
    pub fn id(self) -> &'static str {
        match self {
            PolkitAction::Read => "org.csid1.read",
            PolkitAction::Mount => "org.csid1.mount",
            PolkitAction::Unmount => "org.csid1.unmount",
            PolkitAction::UnmountOthers => "org.csid1.unmount-others",
            PolkitAction::Inline => "org.csid1.inline",
            PolkitAction::ManageVolumes => "org.csid1.manage-volumes",
            PolkitAction::ManagePlugins => "org.csid1.manage-plugins",
            PolkitAction::PluginExec => "org.csid1.plugin-exec",
            PolkitAction::PluginLog => "org.csid1.plugin-log",
            PolkitAction::Manage => "org.csid1.manage",
        }
    }

    /// Returns whether members of group csid have the action where polkit is not asked.
    fn members_may(self) -> bool {
        matches!(self, PolkitAction::Read | PolkitAction::Mount | PolkitAction::Unmount)
    }
}

/// Proof that a caller may do something. Only the authoriser makes one.
pub(super) struct Permit {
    caller: Arc<Caller>,
    facts: CallFacts,
}

impl Permit {
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    pub fn uid(&self) -> u32 {
        self.caller.uid
    }
}

/// The authorization of one way to csid. The private socket has no polkit.
#[derive(Clone)]
pub(super) struct Authoriser {
    polkit: Option<Polkit>,
}

impl Authoriser {
    pub fn for_socket() -> Self {
        Authoriser { polkit: None }
    }

    pub fn for_bus(polkit: Polkit) -> Self {
        Authoriser { polkit: Some(polkit) }
    }

    /// Returns whether polkit may be asked about this caller. Only polkit needs the facts of a call.
    pub fn asks_about(&self, caller: &Caller) -> bool {
        self.polkit.is_some() && !caller.is_root()
    }

    pub async fn permit(&self, caller: &Arc<Caller>, action: PolkitAction) -> Result<Permit> {
        self.permit_with(caller, action, CallFacts::new()).await
    }

    /// Returns a permit for the caller. `facts`: details of the call, for polkit's rules.
    pub async fn permit_with(
        &self,
        caller: &Arc<Caller>,
        action: PolkitAction,
        facts: CallFacts,
    ) -> Result<Permit> {
        match self.allowed(caller, action, &facts).await {
            Ok(true) => Ok(Permit { caller: caller.clone(), facts }),
            Ok(false) => Err(refusal(caller, action, "")),
            Err(why) => Err(refusal(caller, action, &why)),
        }
    }

    /// Returns a second permit for the same caller, for arguments that need another action too.
    pub async fn also(&self, permit: &Permit, action: PolkitAction) -> Result<Permit> {
        self.permit_with(&permit.caller, action, permit.facts.clone()).await
    }

    /// Returns a second permit for something of another uid. `owner`: that uid, `None` if it is not known.
    pub async fn also_of(&self, permit: &Permit, action: PolkitAction, owner: Option<u32>) -> Result<Permit> {
        let mut facts = permit.facts.clone();
        facts.extend(owner.map(|uid| ("uid", uid.to_string())));
        self.permit_with(&permit.caller, action, facts).await
    }

    async fn allowed(
        &self,
        caller: &Caller,
        action: PolkitAction,
        facts: &CallFacts,
    ) -> Result<bool, String> {
        if caller.is_root() {
            return Ok(true);
        }
        if let (Some(polkit), Way::Bus { sender, interactive }) = (&self.polkit, &caller.way)
            && polkit.present().await?
        {
            return polkit.check(sender, action.id(), facts, *interactive).await;
        }
        Ok(caller.member && action.members_may())
    }
}

fn refusal(caller: &Caller, action: PolkitAction, why: &str) -> Error {
    info!(uid = caller.uid, action = action.id(), why, "refused");
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    let required = match (&caller.way, action.members_may()) {
        (Way::Bus { .. }, true) => "requires root, group csid or polkit authorization",
        (Way::Bus { .. }, false) => "requires root or polkit authorization",
        (Way::Socket, true) => "requires root or group csid",
        (Way::Socket, false) => "requires root, or polkit authorization on the system bus",
    };
    Error::new(Kind::NotAuthorized, format!("uid {} may not do {}{why}: {required}", caller.uid, action.id()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::socket::Credentials;

    #[tokio::test]
    async fn group_has_three_actions_on_the_socket() {
        let all = [
            PolkitAction::Read,
            PolkitAction::Mount,
            PolkitAction::Unmount,
            PolkitAction::UnmountOthers,
            PolkitAction::Inline,
            PolkitAction::ManageVolumes,
            PolkitAction::ManagePlugins,
            PolkitAction::PluginExec,
            PolkitAction::PluginLog,
            PolkitAction::Manage,
        ];
        let authoriser = Authoriser::for_socket();
        for (uid, groups, may) in [
            (0, vec![], &all[..]),
            (1000, vec![100, 990], &[PolkitAction::Read, PolkitAction::Mount, PolkitAction::Unmount]),
            (1000, vec![100], &[]),
            (65534, vec![], &[]),
        ] {
            let caller = Arc::new(Caller::on_socket(&Credentials { uid, groups }, Some(990)));
            for action in all {
                let allowed = authoriser.permit(&caller, action).await;
                assert_eq!(allowed.is_ok(), may.contains(&action), "uid {uid}, {action:?}");
                if let Err(error) = allowed {
                    assert_eq!(error.kind, Kind::NotAuthorized);
                    assert!(error.message.contains(action.id()), "{error}");
                }
            }
        }
    }
}
