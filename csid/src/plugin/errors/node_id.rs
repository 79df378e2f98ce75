//! Errors of the node id by which a plugin knows this node.

use crate::error::{Details, Error, Kind, Obstacle};

/// Why a node id is not used or not accepted.
#[derive(Debug, thiserror::Error)]
pub(in crate::plugin) enum NodeIdError {
    /// The plugin reports another id than the accepted one. It is also the text of the plugin's health.
    #[error(
        "the plugin {plugin} calls this node `{now}`, which was `{agreed}`; nothing is attached until that is accepted"
    )]
    Disputed { plugin: String, now: String, agreed: String },
    /// `state`: that of the plugin.
    #[error("what the plugin {plugin} calls this node is not known: it is {state}, or says nothing")]
    Unknown { plugin: String, state: &'static str },
    /// A caller accepts another id than the plugin reports.
    #[error("the plugin {plugin} calls this node `{now}`, not `{given}`")]
    NotReported { plugin: String, now: String, given: String },
}

impl NodeIdError {
    pub(in crate::plugin) fn disputed(plugin: &str, now: &str, agreed: &str) -> Self {
        let [plugin, now, agreed] = [plugin, now, agreed].map(str::to_owned);
        NodeIdError::Disputed { plugin, now, agreed }
    }

    fn kind(&self) -> Kind {
        match self {
            NodeIdError::Disputed { .. } | NodeIdError::Unknown { .. } => Kind::PluginUnavailable,
            NodeIdError::NotReported { .. } => Kind::InvalidArgument,
        }
    }

    fn fill(self, details: &mut Details) {
        if let NodeIdError::Disputed { plugin, .. } = self {
            details.obstacle = Some(Obstacle::NodeId);
            details.plugin = Some(plugin);
        }
    }
}

impl From<NodeIdError> for Error {
    fn from(error: NodeIdError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disputed_node_id_alone_is_an_obstacle() {
        let disputed = Error::from(NodeIdError::disputed("p", "b", "a"));
        assert_eq!(
            (disputed.kind, disputed.details.obstacle),
            (Kind::PluginUnavailable, Some(Obstacle::NodeId))
        );
        assert_eq!(disputed.details.plugin.as_deref(), Some("p"));
        let [plugin, now, given] = ["p", "b", "c"].map(str::to_owned);
        let other = Error::from(NodeIdError::NotReported { plugin, now, given });
        assert_eq!((other.kind, other.details.obstacle), (Kind::InvalidArgument, None));
    }
}
