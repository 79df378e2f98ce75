//! Whether the host sees what a plugin mounts: looked at once for each start of a plugin with a node service, before anything is
//! asked of it. What its unit says is what a process was started with that csid has started; of another one it may say what the
//! next one will be started with, so that one is looked at itself.

use crate::host::units::{Units, UnitsError};
use crate::plugin::profile::Profile;
use crate::plugin::spec::PluginSpec;
use crate::plugin::unit_settings;

/// Why the host does not see a plugin's mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HidingSetting {
    pub why: String,
    /// Whether settings of the plugin's unit do it, not its definition.
    pub by_unit: bool,
}

/// Returns why the host does not. `None`: it does.
pub(super) async fn hidden(
    units: &Units,
    id: &str,
    spec: &PluginSpec,
    unit: &str,
    adopted: Option<u32>,
) -> Result<Option<HidingSetting>, UnitsError> {
    let settings = units.hiding(unit).await?;
    if settings.is_empty() {
        return Ok(None);
    }
    let hidden = why(spec, unit, &settings);
    if let Some(pid) = adopted
        && units.is_in_hosts_namespaces(pid).await?
    {
        let why = hidden.why;
        tracing::warn!(plugin = %id, pid, "plugin {id}: this process was started without what the next one would be: {why}");
        return Ok(None);
    }
    Ok(Some(hidden))
}

fn why(spec: &PluginSpec, unit: &str, settings: &[String]) -> HidingSetting {
    let text = "so the host would not see what it mounts";
    let by_definition = if spec.profile == Some(Profile::Controller) {
        Some(format!(
            "it has a node service, and its profile `controller` a mount namespace of its own, {text}; choose a node- profile"
        ))
    } else {
        unit_settings::apart(spec).map(|propagation| {
            format!(
                "it has a node service, and its propagation is `{propagation}`, {text}; that of a node plugin is \
                 bidirectional"
            )
        })
    };
    match by_definition {
        Some(why) => HidingSetting { why, by_unit: false },
        None => HidingSetting {
            why: format!("{} gives {unit} a mount namespace of its own, {text}", settings.join(", ")),
            by_unit: true,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::rows::Propagation;

    #[test]
    fn origin_of_hiding_setting_is_named() {
        let of = |spec: PluginSpec| why(&spec, "u.service", &["PrivateTmp=yes".to_owned()]);
        let theirs = of(PluginSpec::default());
        assert!(theirs.why.starts_with("PrivateTmp=yes gives u.service a mount namespace"), "{theirs:?}");
        assert!(theirs.by_unit, "{theirs:?}");
        let own = of(PluginSpec { propagation: Some(Propagation::HostToTask), ..PluginSpec::default() });
        assert!(own.why.contains("propagation is `host-to-task`") && !own.by_unit, "{own:?}");
        let own = of(PluginSpec { profile: Some(Profile::Controller), ..PluginSpec::default() });
        assert!(own.why.contains("profile `controller`") && !own.by_unit, "{own:?}");
    }
}
