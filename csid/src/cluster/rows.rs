//! Volumes as the protocol of a cluster has them, and as csid has them.

use std::collections::BTreeMap;

use csi_proto::cluster::v1::{Capability, NodeExpansion, Spec, Topology, VolumeRow};

use crate::error::{Error, Result};
use crate::store::registry::{Expansion, Record, Registration, VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;
use crate::volume::rules;
use crate::volume::servers::{Attached, KnownVolume};

/// Reads the spec of a volume.
pub fn read_spec(of: Spec) -> Result<VolumeSpec> {
    let mut capabilities = Vec::new();
    for capability in &of.capabilities {
        capabilities.push(rules::read_capability(&capability.access_mode, &capability.attachment_mode)?);
    }
    Ok(VolumeSpec {
        name: of.name,
        capabilities,
        fs_type: of.fs_type,
        mount_flags: of.mount_flags,
        mount_group: of.mount_group,
        context: of.volume_context,
        parameters: of.parameters,
        topologies: of.topologies.into_iter().map(|topology| topology.segments).collect(),
        credential: (!of.credential.is_empty()).then_some(of.credential),
        heal: rules::read_heal(&of.heal)?,
        snapshot: of.snapshot,
        clone: of.clone,
        ..VolumeSpec::default()
    })
}

/// Returns the spec of a volume. `suid` and `dev` are no part of the message: on each host root alone decides about them.
pub fn write_spec(of: &VolumeSpec) -> Spec {
    let capabilities = of.capabilities.iter().map(|capability| {
        let [access_mode, attachment_mode] = rules::words_of_capability(*capability).map(str::to_owned);
        Capability { access_mode, attachment_mode }
    });
    Spec {
        name: of.name.clone(),
        capabilities: capabilities.collect(),
        fs_type: of.fs_type.clone(),
        mount_flags: of.mount_flags.clone(),
        mount_group: of.mount_group.clone(),
        volume_context: of.context.clone(),
        parameters: of.parameters.clone(),
        credential: of.credential.clone().unwrap_or_default(),
        heal: rules::heal_word(of.heal).to_owned(),
        topologies: of.topologies.iter().map(|segments| Topology { segments: segments.clone() }).collect(),
        snapshot: of.snapshot.clone(),
        clone: of.clone.clone(),
    }
}

/// Reads a server's row of the volume `name`. Returns it without its claims, at revision 0.
pub(super) fn read_record(name: &VolumeName, row: VolumeRow) -> Result<Record> {
    if (&row.namespace, &row.volume) != (&name.namespace, &name.volume) {
        return Err(Error::internal(format!("a server answered a call for {name} with another volume")));
    }
    let spec = match row.spec {
        Some(spec) if row.standing == "registered" => read_spec(spec)?,
        _ => return rules::registered(&Record::none(name.clone())).map(|_| Record::none(name.clone())),
    };
    rules::check_volume(&row.plugin, &row.external_id, &spec)?;
    rules::check_name("owner", &row.owner)?;
    rules::check_capacity(row.capacity, 0)?;
    let pending_expansion = match row.expansion {
        Some(NodeExpansion { required, limit, nodes: _ }) => {
            rules::check_capacity(required, limit)?;
            Some(Expansion { required, limit, by_controller: true })
        }
        None => None,
    };
    // A server must not choose which of this host's secrets the plugin gets.
    if let Some(credential) = &spec.credential {
        rules::check_credential(&name.namespace, credential)?;
    }
    Ok(Record {
        volume: VolumeKey::new(row.plugin, row.external_id),
        registration: Some(Registration {
            capacity: Some(row.capacity).filter(|bytes| *bytes > 0),
            pending_expansion,
            ..rules::new_registration(&row.owner, spec)
        }),
        ..Record::none(name.clone())
    })
}

/// Reads a volume that the servers know, under any name.
pub(super) fn read_known(row: VolumeRow) -> Result<KnownVolume> {
    rules::check_name("plugin", &row.plugin)?;
    // A volume that is being created has no ID yet.
    if !row.external_id.is_empty() {
        rules::check_external_id(&row.external_id)?;
    }
    Ok(KnownVolume {
        name: rules::volume_name(&row.namespace, &row.volume)?,
        volume: VolumeKey::new(row.plugin, row.external_id),
        is_registered: !row.standing.is_empty(),
    })
}

/// Reads the attachment of a grant. `None`: the servers have attached nothing.
pub(super) fn read_attached(
    node_id: String,
    publish_context: BTreeMap<String, String>,
) -> Result<Option<Attached>> {
    if node_id.is_empty() {
        return match publish_context.is_empty() {
            true => Ok(None),
            false => Err(Error::internal("a server granted a claim with a publish context of no node")),
        };
    }
    rules::check_node_id(&node_id)?;
    rules::check_publish_context(&publish_context)?;
    Ok(Some(Attached { node_id, publish_context }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::Heal;

    #[test]
    fn spec_is_read_as_it_was_written() {
        let map = |key: &str| [(key.to_owned(), "value".to_owned())].into();
        let spec = VolumeSpec {
            name: "disk".into(),
            capabilities: vec![rules::read_capability("single-node-writer", "file-system").unwrap()],
            fs_type: "ext4".into(),
            mount_flags: vec!["noatime".into()],
            mount_group: "7".into(),
            context: map("context"),
            parameters: map("parameter"),
            topologies: vec![map("zone"), map("rack")],
            credential: Some("csid.prod.key".into()),
            heal: Heal::Remount,
            ..VolumeSpec::default()
        };
        assert!(read_spec(write_spec(&spec)).unwrap() == spec);
    }

    #[test]
    fn row_of_another_volume_is_refused() {
        let name = VolumeName { namespace: "default".into(), volume: "data".into() };
        let capability =
            Capability { access_mode: "single-node-writer".into(), attachment_mode: "file-system".into() };
        let spec = Spec { capabilities: vec![capability], ..Spec::default() };
        let row = VolumeRow {
            namespace: "default".into(),
            volume: "data".into(),
            plugin: "p".into(),
            external_id: "ext".into(),
            standing: "registered".into(),
            owner: "operator/a".into(),
            spec: Some(spec.clone()),
            ..VolumeRow::default()
        };
        let record = read_record(&name, row.clone()).unwrap();
        assert_eq!((record.volume, record.revision), (VolumeKey::new("p", "ext"), 0));
        assert_eq!(record.registration.map(|of| (of.uid, of.owner)), Some((0, "operator/a".to_owned())));
        for other in [
            VolumeRow { volume: "other".into(), ..row.clone() },
            VolumeRow { plugin: String::new(), ..row.clone() },
            VolumeRow { external_id: "x".repeat(10_000), ..row.clone() },
            VolumeRow { standing: "deleting".into(), ..row.clone() },
            VolumeRow { owner: "a\nb".into(), ..row.clone() },
            VolumeRow { capacity: u64::MAX, ..row.clone() },
            VolumeRow {
                expansion: Some(NodeExpansion { required: 9, limit: 8, nodes: Vec::new() }),
                ..row.clone()
            },
            VolumeRow {
                spec: Some(Spec { credential: "csid.other.key".into(), ..spec.clone() }),
                ..row.clone()
            },
            VolumeRow { spec: None, ..row },
        ] {
            assert!(read_record(&name, other).is_err());
        }
    }
}
