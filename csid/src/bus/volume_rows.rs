//! Rows of volumes, for GetVolume and ListVolumes.

use std::collections::HashMap;

use zbus::Variant;

use super::contract::Map;
use super::cursor;
use crate::names::word;
use crate::store::claim_set::ClaimSet;
use crate::store::registry::{Capability, ClaimMode, Standing, VolumeName};
use crate::store::rows::VolumeKey;
use crate::volume::api::views::VolumeView;

/// Returns a row of ListVolumes: a row of GetVolume without context and parameters. Monitors log whole lists, and a context may have
/// data that its plugin should have kept secret. `of_one`: all rows are of one namespace.
pub(super) fn listed(view: VolumeView, of_one: bool) -> Map {
    let VolumeName { namespace, volume } = &view.record.name;
    let cursor = if of_one { volume.clone() } else { cursor::of(&[namespace, volume]) };
    let mut row = row(view);
    row.insert("cursor", cursor.into());
    row.remove("context");
    row.remove("parameters");
    row
}

fn standing(standing: &Standing) -> &'static str {
    match standing {
        Standing::Creating(_) => "creating",
        Standing::Registered => "registered",
        Standing::Deleting { .. } => "deleting",
    }
}

/// Returns the row of a registered volume. It has no mount flags or secrets.
pub(super) fn row(view: VolumeView) -> Map {
    let record = view.record;
    let VolumeKey { plugin, handle } = record.volume;
    let mut row = Map::from([
        ("namespace", record.name.namespace.into()),
        ("id", record.name.volume.into()),
        ("external-id", handle.to_string().into()),
        ("plugin", plugin.into()),
        ("provider", view.provider.into()),
        ("provider-version", view.provider_version.into()),
        ("controller-required", view.controller_required.into()),
        ("schedulable", view.schedulable.into()),
        // The modes of the first claim hold until the last claim is free.
        ("access-mode", record.claims.first().map_or("", |of| word(of.usage.capability.access_mode)).into()),
        (
            "attachment-mode",
            record.claims.first().map_or("", |of| word(of.usage.capability.attachment_mode)).into(),
        ),
        ("read-claims", consumers(&record.claims, ClaimMode::Read).into()),
        ("write-claims", consumers(&record.claims, ClaimMode::Write).into()),
        ("past-claims", view.past.into()),
        ("modify-index", record.revision.into()),
    ]);
    if let Some(registration) = record.registration {
        let standing = if view.only_declared { "declared" } else { standing(&registration.standing) };
        let spec = registration.spec;
        let capabilities: Vec<HashMap<String, Variant<'static>>> =
            spec.capabilities.iter().map(modes).collect();
        row.extend([
            ("uid", registration.uid.into()),
            ("standing", standing.into()),
            ("name", spec.name.into()),
            ("context", spec.context.into()),
            ("capabilities", capabilities.into()),
            ("parameters", spec.parameters.into()),
            ("topologies", spec.topologies.into()),
            ("credential", spec.credential.unwrap_or_default().into()),
            ("fs-type", spec.fs_type.into()),
            ("mount-group", spec.mount_group.into()),
            ("heal", word(spec.heal).into()),
            ("capacity", registration.capacity.unwrap_or(0).into()),
            ("pending-expand", registration.pending_expansion.map_or(0, |pending| pending.required).into()),
        ]);
    }
    row
}

fn consumers(claims: &ClaimSet, mode: ClaimMode) -> Vec<String> {
    let of_mode = claims.iter().filter(|claim| claim.usage.mode == mode);
    of_mode.map(|claim| claim.consumer.clone()).collect()
}

fn modes(capability: &Capability) -> HashMap<String, Variant<'static>> {
    HashMap::from([
        ("access-mode".to_owned(), word(capability.access_mode).into()),
        ("attachment-mode".to_owned(), word(capability.attachment_mode).into()),
    ])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::bus::claims;
    use crate::names;
    use crate::store::registry::Claim;
    use crate::store::registry::{Expansion, Origin, Record, Registration, Use, VolumeName, VolumeSpec};

    fn view() -> VolumeView {
        let capability = names::capability(None, None);
        let claim = |consumer: &str, mode| Claim {
            consumer: consumer.into(),
            usage: Use { mode, capability },
            ..claims::tests::claim()
        };
        let map = BTreeMap::from([("k".to_owned(), "v".to_owned())]);
        let spec = VolumeSpec {
            capabilities: vec![capability],
            mount_flags: vec!["password=hunter2".into()],
            context: map.clone(),
            parameters: map,
            ..VolumeSpec::default()
        };
        let registration = Registration {
            uid: 0,
            owner: String::new(),
            id: String::new(),
            spec,
            standing: Standing::Registered,
            origin: Origin::Bus,
            capacity: Some(7),
            pending_expansion: Some(Expansion { required: 9, limit: 0, by_controller: false }),
            owed_expansion: None,
            expanded_here: None,
            snapshot: None,
            blocked: None,
            error: None,
        };
        let record = Record {
            name: VolumeName { namespace: "ns".into(), volume: "v".into() },
            volume: VolumeKey::new("p", "x"),
            registration: Some(registration),
            claims: vec![claim("reader", ClaimMode::Read), claim("writer", ClaimMode::Write)].into(),
            attachments: Vec::new(),
            driver: None,
            queue: Vec::new(),
            serial: 0,
            ended_attaches: Default::default(),
            revision: 3,
        };
        VolumeView {
            record,
            provider: "P".into(),
            provider_version: "1".into(),
            controller_required: false,
            schedulable: true,
            past: vec!["gone".into()],
            only_declared: false,
        }
    }

    #[test]
    fn row_has_contract_keys_and_no_mount_flags() {
        let of_volume = row(view());
        let mut keys: Vec<String> =
            of_volume.iter().map(|(key, value)| format!("{key} {}", value.value_signature())).collect();
        keys.sort();
        let wanted = "access-mode s,attachment-mode s,capabilities aa{sv},capacity t,context a{ss},\
                      controller-required b,credential s,external-id s,fs-type s,heal s,id s,modify-index t,\
                      mount-group s,name s,namespace s,parameters a{ss},past-claims as,pending-expand t,plugin s,\
                      provider s,provider-version s,read-claims as,schedulable b,standing s,topologies aa{ss},uid u,write-claims as";
        assert_eq!(keys.join(","), wanted);
        assert!(!format!("{of_volume:?}").contains("hunter2"));
        for (key, value) in [
            ("read-claims", Variant::from(vec!["reader".to_owned()])),
            ("write-claims", vec!["writer".to_owned()].into()),
            ("access-mode", "single-node-writer".into()),
            ("pending-expand", 9u64.into()),
            ("standing", "registered".into()),
        ] {
            assert_eq!(of_volume[key], value, "{key}");
        }
        let free = VolumeView { record: Record { claims: ClaimSet::default(), ..view().record }, ..view() };
        assert_eq!(row(free)["access-mode"], Variant::from(""));
    }

    #[test]
    fn listed_rows_have_no_contexts() {
        let mut whole: Vec<&str> = row(view()).into_keys().collect();
        whole.retain(|key| !["context", "parameters"].contains(key));
        whole.push("cursor");
        whole.sort_unstable();
        for (of_one, cursor) in [(false, "ns/v"), (true, "v")] {
            let row = listed(view(), of_one);
            assert_eq!(row["cursor"], Variant::from(cursor));
            assert_eq!(row.into_keys().collect::<Vec<_>>(), whole);
        }
    }
}
