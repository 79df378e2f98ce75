//! Errors of plugins that do not offer a service.

use std::sync::Arc;

use crate::error::{Details, Error, Kind, Obstacle, Step};
use crate::plugin::view::{PluginView, Service};

/// Why a call of a plugin's service is not sent. `kind` is what it means for the caller: PluginUnavailable, PluginShutdown, or
/// TimedOut for a wait.
#[derive(Debug, thiserror::Error)]
pub(in crate::plugin) enum ServiceError {
    #[error("no plugin {id} is registered")]
    Unregistered { id: String, kind: Kind },
    /// All instances are healthy. `offered` may be empty.
    #[error("the plugin {id} offers no {} service (it offers: {})", service.name(), listed(offered))]
    NotOffered { id: String, kind: Kind, service: Service, offered: Vec<String> },
    /// `view`: of the instance that should offer the service. `is_only`: whether the plugin has no other instance.
    #[error("the plugin {id}{} is {}: {}", named(view, *is_only), view.state, seen(view))]
    Unhealthy { id: String, kind: Kind, view: Arc<PluginView>, is_only: bool },
    #[error("the plugin {id} has not answered Probe within the deadline")]
    ProbeTimedOut { id: String },
}

fn listed(offered: &[String]) -> String {
    if offered.is_empty() { "none".to_owned() } else { offered.join(", ") }
}

fn named(view: &PluginView, is_only: bool) -> String {
    match is_only {
        true => String::new(),
        false => format!(" (instance {})", view.instances.join(", ")),
    }
}

fn seen(view: &PluginView) -> String {
    let message = if view.health_message.is_empty() { "not contacted yet" } else { &view.health_message };
    match view.unit.as_str() {
        "" => format!("{message} (socket {})", view.socket),
        unit => format!("{message} (unit {unit})"),
    }
}

impl ServiceError {
    fn kind(&self) -> Kind {
        match self {
            ServiceError::Unregistered { kind, .. }
            | ServiceError::NotOffered { kind, .. }
            | ServiceError::Unhealthy { kind, .. } => *kind,
            ServiceError::ProbeTimedOut { .. } => Kind::TimedOut,
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        match self {
            ServiceError::Unregistered { .. } => Some(Obstacle::UnknownPlugin),
            ServiceError::Unhealthy { view, .. } if view.hidden_by_unit => Some(Obstacle::Hidden),
            _ => None,
        }
    }

    fn fill(self, details: &mut Details) {
        details.obstacle = self.obstacle();
        if let ServiceError::Unhealthy { view, .. } = &self
            && view.hidden_by_unit
        {
            details.holders = vec![view.unit.clone()];
        }
        match self {
            ServiceError::ProbeTimedOut { id } => details.plugin = Some(id),
            ServiceError::Unregistered { id, .. }
            | ServiceError::NotOffered { id, .. }
            | ServiceError::Unhealthy { id, .. } => {
                details.step = Some(Step::WaitingForPlugin);
                details.plugin = Some(id);
            }
        }
    }
}

impl From<ServiceError> for Error {
    fn from(error: ServiceError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unhealthy(view: PluginView, is_only: bool) -> Error {
        ServiceError::Unhealthy { id: "p".to_owned(), kind: Kind::TimedOut, view: view.into(), is_only }
            .into()
    }

    #[test]
    fn unhealthy_plugin_is_named_with_its_unit_or_socket() {
        let view = || PluginView {
            state: "unhealthy",
            instances: vec!["i2".to_owned()],
            socket: "/run/p.sock".to_owned(),
            ..PluginView::default()
        };
        let external = unhealthy(view(), true);
        assert_eq!(external.message, "the plugin p is unhealthy: not contacted yet (socket /run/p.sock)");
        assert_eq!((external.kind, external.details.step), (Kind::TimedOut, Some(Step::WaitingForPlugin)));
        let health_message = "PrivateTmp=yes hides its mounts".to_owned();
        let hidden =
            PluginView { unit: "p.service".to_owned(), health_message, hidden_by_unit: true, ..view() };
        let hidden = unhealthy(hidden, false);
        let text =
            "the plugin p (instance i2) is unhealthy: PrivateTmp=yes hides its mounts (unit p.service)";
        assert_eq!(hidden.message, text);
        assert_eq!(hidden.details.obstacle, Some(Obstacle::Hidden));
        assert_eq!(hidden.details.holders, ["p.service"]);
    }

    #[test]
    fn unregistered_plugin_is_an_obstacle_of_the_wait() {
        let kind = Kind::PluginUnavailable;
        let error = Error::from(ServiceError::Unregistered { id: "p".to_owned(), kind });
        assert_eq!((error.kind, error.details.obstacle), (kind, Some(Obstacle::UnknownPlugin)));
        assert_eq!(error.details.step, Some(Step::WaitingForPlugin));
        let late = Error::from(ServiceError::ProbeTimedOut { id: "p".to_owned() });
        assert_eq!((late.kind, late.details.step), (Kind::TimedOut, None));
    }
}
