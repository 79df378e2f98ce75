//! Who may do what: the one place that answers. Root may do all. On the bus, where polkit is there, polkit answers for everybody
//! else; without it, and on the private socket, members of group csid may do what is marked here, and others nothing.

use std::sync::Arc;

use tracing::info;

use super::caller::{Caller, Way};
use super::polkit::Polkit;
use crate::error::{Error, Kind, Result};

/// polkit's actions, `org.csid1.NAME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Read,
    Mount,
    Unmount,
    UnmountOthers,
    Inline,
    ManageVolumes,
    ManagePlugins,
    PluginExec,
    Manage,
}

impl Action {
    pub fn id(self) -> &'static str {
        match self {
            Action::Read => "org.csid1.read",
            Action::Mount => "org.csid1.mount",
            Action::Unmount => "org.csid1.unmount",
            Action::UnmountOthers => "org.csid1.unmount-others",
            Action::Inline => "org.csid1.inline",
            Action::ManageVolumes => "org.csid1.manage-volumes",
            Action::ManagePlugins => "org.csid1.manage-plugins",
            Action::PluginExec => "org.csid1.plugin-exec",
            Action::Manage => "org.csid1.manage",
        }
    }

    /// What members of group csid may do where polkit is not asked.
    fn members_may(self) -> bool {
        matches!(self, Action::Read | Action::Mount | Action::Unmount)
    }
}

/// Proof that this caller may do this; it is made here alone.
pub(super) struct Permit {
    caller: Arc<Caller>,
}

impl Permit {
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    pub fn uid(&self) -> u32 {
        self.caller.uid
    }
}

/// Answers for one way in: the private socket has no polkit.
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

    pub async fn permit(&self, caller: &Arc<Caller>, action: Action) -> Result<Permit> {
        match self.allowed(caller, action).await {
            Ok(true) => Ok(Permit { caller: caller.clone() }),
            Ok(false) => Err(refusal(caller, action, "")),
            Err(why) => Err(refusal(caller, action, &why)),
        }
    }

    /// A second permit for the same caller: what the arguments ask for needs another action too.
    pub async fn also(&self, permit: &Permit, action: Action) -> Result<Permit> {
        self.permit(&permit.caller, action).await
    }

    async fn allowed(&self, caller: &Caller, action: Action) -> Result<bool, String> {
        if caller.is_root() {
            return Ok(true);
        }
        if let (Some(polkit), Way::Bus { sender, interactive }) = (&self.polkit, &caller.way)
            && polkit.present().await?
        {
            return polkit.check(sender, action.id(), *interactive).await;
        }
        Ok(caller.member && action.members_may())
    }
}

fn refusal(caller: &Caller, action: Action, why: &str) -> Error {
    info!(uid = caller.uid, action = action.id(), why, "refused");
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    let ask = match (&caller.way, action.members_may()) {
        (Way::Bus { .. }, true) => "be root, a member of group csid, or one whom polkit allows it",
        (Way::Bus { .. }, false) => "be root, or one whom polkit allows it",
        (Way::Socket, true) => "be root or a member of group csid",
        (Way::Socket, false) => "be root, or ask on the system bus, where polkit may allow it",
    };
    Error::new(Kind::NotAuthorized, format!("uid {} may not do {}{why}: {ask}", caller.uid, action.id()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::socket::Credentials;

    #[tokio::test]
    async fn the_table_of_the_socket() {
        let all = [
            Action::Read,
            Action::Mount,
            Action::Unmount,
            Action::UnmountOthers,
            Action::Inline,
            Action::ManageVolumes,
            Action::ManagePlugins,
            Action::Manage,
        ];
        let authoriser = Authoriser::for_socket();
        for (uid, groups, may) in [
            (0, vec![], &all[..]),
            (1000, vec![100, 990], &[Action::Read, Action::Mount, Action::Unmount]),
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
