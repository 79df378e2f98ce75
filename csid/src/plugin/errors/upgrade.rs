//! Errors of upgrades.

use tokio::task::JoinError;

use crate::error::{Details, Error, Kind, Obstacle};

/// Why an instance is not replaced by another one.
#[derive(Debug, thiserror::Error)]
pub(in crate::plugin) enum UpgradeError {
    #[error("the plugin {id} has several instances, and option `instance` is absent")]
    SeveralInstances { id: String },
    #[error("the plugin {id} has no instance `{instance}`")]
    NoInstance { id: String, instance: String },
    /// `now`: the instance that an earlier upgrade put in the place of `old`.
    #[error("instance `{old}` of the plugin {id} was replaced by `{now}`")]
    Replaced { id: String, old: String, now: String },
    #[error("instance `{instance}` of the plugin {id} is another uid's, or the plugin is")]
    OtherUid { id: String, instance: String },
    #[error("the plugin {id} is being upgraded")]
    UnderWay { id: String },
    #[error("{key} cannot change in an upgrade")]
    FixedKey { key: &'static str },
    #[error("the plugin {id} has an instance `{instance}` already")]
    InstanceExists { id: String, instance: String },
    /// `instance`: the one that has the socket.
    #[error("instance `{instance}` of the plugin {id} has that socket")]
    SocketInUse { id: String, instance: String },
    /// The same for a managed plugin, whose environment or argument names the socket.
    #[error(
        "CSI_ENDPOINT of the environment, or an argument, is the socket of instance `{instance}`, where no two can listen"
    )]
    EndpointInUse { instance: String },
    /// `why`: the text of the new instance's health. `hiding`: its unit, where settings of that hide the mounts.
    #[error("instance `{new}` did not become healthy: {why}; instance `{old}` goes on as before")]
    NotHealthy { id: String, old: String, new: String, why: String, hiding: Option<String> },
    #[error(
        "instance `{new}` cannot take the place of `{old}`: {source}; instance `{old}` goes on as before"
    )]
    Unfit { id: String, old: String, new: String, source: InstanceLack },
    #[error("csid is stopping; the next csid continues the upgrade")]
    Stopping,
    #[error("the upgrade was not ended: {source}")]
    Interrupted { source: JoinError },
}

/// What an instance lacks to take over the mounts and attachments of another one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::plugin) enum InstanceLack {
    #[error("it is {found}, and not {before}")]
    Provider { found: String, before: String },
    #[error("it offers no {service} service")]
    Service { service: String },
    /// `negation`: the call that csid could not make for what the other instance has `done`.
    #[error("it does not offer {capability}, and could not {negation} what is {done}")]
    Capability { capability: &'static str, negation: &'static str, done: &'static str },
    #[error("it calls this node {found:?}, and not {before:?}, and volumes are attached by that name")]
    NodeId { found: String, before: String },
}

impl UpgradeError {
    fn kind(&self) -> Kind {
        match self {
            UpgradeError::SeveralInstances { .. }
            | UpgradeError::FixedKey { .. }
            | UpgradeError::SocketInUse { .. }
            | UpgradeError::EndpointInUse { .. }
            | UpgradeError::Unfit { .. } => Kind::InvalidArgument,
            UpgradeError::NoInstance { .. } | UpgradeError::Replaced { .. } => Kind::NotFound,
            UpgradeError::OtherUid { .. } => Kind::NotAuthorized,
            UpgradeError::UnderWay { .. } => Kind::Busy,
            UpgradeError::InstanceExists { .. } => Kind::AlreadyExists,
            UpgradeError::NotHealthy { .. } => Kind::PluginUnavailable,
            UpgradeError::Stopping => Kind::PluginShutdown,
            UpgradeError::Interrupted { .. } => Kind::Internal,
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        match self {
            UpgradeError::SeveralInstances { .. } => Some(Obstacle::SeveralInstances),
            UpgradeError::Replaced { .. } => Some(Obstacle::ReplacedInstance),
            UpgradeError::UnderWay { .. } => Some(Obstacle::Upgrade),
            UpgradeError::FixedKey { .. } => Some(Obstacle::FixedKey),
            UpgradeError::SocketInUse { .. } | UpgradeError::EndpointInUse { .. } => {
                Some(Obstacle::InstanceSocket)
            }
            UpgradeError::NotHealthy { hiding: Some(_), .. } => Some(Obstacle::Hidden),
            UpgradeError::Stopping => Some(Obstacle::Stopping),
            _ => None,
        }
    }

    fn fill(self, details: &mut Details) {
        details.obstacle = self.obstacle();
        match self {
            UpgradeError::UnderWay { id } | UpgradeError::Unfit { id, .. } => details.plugin = Some(id),
            UpgradeError::NotHealthy { id, hiding, .. } => {
                details.plugin = Some(id);
                details.retryable = false;
                details.holders = Vec::from_iter(hiding);
            }
            _ => {}
        }
    }
}

impl From<UpgradeError> for Error {
    fn from(error: UpgradeError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_healthy(hiding: Option<&str>) -> Error {
        let [id, old, new, why] = ["p", "a", "b", "it exited with status 1"].map(str::to_owned);
        UpgradeError::NotHealthy { id, old, new, why, hiding: hiding.map(str::to_owned) }.into()
    }

    #[test]
    fn unhealthy_instance_is_no_reason_to_repeat_an_upgrade() {
        let error = not_healthy(None);
        assert_eq!((error.kind, error.details.retryable), (Kind::PluginUnavailable, false));
        assert_eq!((error.details.obstacle, error.details.plugin.as_deref()), (None, Some("p")));
        let hidden = not_healthy(Some("p.service"));
        assert_eq!(hidden.details.obstacle, Some(Obstacle::Hidden));
        assert_eq!(hidden.details.holders, ["p.service"]);
    }

    #[test]
    fn upgrade_error_has_its_kind_and_obstacle() {
        let [id, instance] = ["p", "i"].map(str::to_owned);
        let (id, instance) = (|| id.clone(), || instance.clone());
        for (error, kind, obstacle) in [
            (
                UpgradeError::SeveralInstances { id: id() },
                Kind::InvalidArgument,
                Some(Obstacle::SeveralInstances),
            ),
            (UpgradeError::FixedKey { key: "supervision" }, Kind::InvalidArgument, Some(Obstacle::FixedKey)),
            (
                UpgradeError::EndpointInUse { instance: instance() },
                Kind::InvalidArgument,
                Some(Obstacle::InstanceSocket),
            ),
            (UpgradeError::UnderWay { id: id() }, Kind::Busy, Some(Obstacle::Upgrade)),
            (UpgradeError::Stopping, Kind::PluginShutdown, Some(Obstacle::Stopping)),
            (
                UpgradeError::Replaced { id: id(), old: instance(), now: "j".to_owned() },
                Kind::NotFound,
                Some(Obstacle::ReplacedInstance),
            ),
            (UpgradeError::InstanceExists { id: id(), instance: instance() }, Kind::AlreadyExists, None),
            (UpgradeError::OtherUid { id: id(), instance: instance() }, Kind::NotAuthorized, None),
        ] {
            let error = Error::from(error);
            assert_eq!((error.kind, error.details.obstacle), (kind, obstacle), "{error}");
        }
    }
}
