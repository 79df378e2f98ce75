//! Rows of a cluster's servers as csid's own commands have them. A holder's name is NODE/CONSUMER.

use csi_proto::cluster::v1::{ClaimInList, ClaimRow as OfVolume, VolumeRow as Row};
use csid_client::{CapabilityRow, ClaimRow, VolumeRow};

pub fn volume(row: &Row) -> VolumeRow {
    let spec = row.spec.clone().unwrap_or_default();
    let capabilities = spec.capabilities.into_iter();
    let holders = |mode: &str| {
        let claims = row.claims.iter().filter(|claim| mode_of(claim) == mode);
        claims.map(|claim| format!("{}/{}", claim.node, claim.consumer)).collect()
    };
    let used = row.claims.first().and_then(|claim| claim.r#use.clone()).unwrap_or_default();
    VolumeRow {
        namespace: row.namespace.clone(),
        id: row.volume.clone(),
        name: spec.name,
        external_id: row.external_id.clone(),
        plugin: row.plugin.clone(),
        context: spec.volume_context,
        capabilities: capabilities
            .map(|of| CapabilityRow { access_mode: of.access_mode, attachment_mode: of.attachment_mode })
            .collect(),
        parameters: spec.parameters,
        topologies: spec.topologies.into_iter().map(|topology| topology.segments).collect(),
        credential: spec.credential,
        fs_type: spec.fs_type,
        mount_group: spec.mount_group,
        heal: spec.heal,
        // Plugins are on the hosts.
        schedulable: row.standing == "registered",
        capacity: row.capacity,
        access_mode: used.access_mode,
        attachment_mode: used.attachment_mode,
        read_claims: holders("read"),
        write_claims: holders("write"),
        standing: row.standing.clone(),
        modify_index: row.revision,
        ..VolumeRow::default()
    }
}

fn mode_of(claim: &OfVolume) -> &str {
    claim.r#use.as_ref().map_or("", |of| of.mode.as_str())
}

pub fn claim(row: &ClaimInList) -> ClaimRow {
    let of_volume = row.claim.clone().unwrap_or_default();
    let used = of_volume.r#use.unwrap_or_default();
    ClaimRow {
        namespace: row.namespace.clone(),
        volume: row.volume.clone(),
        consumer: of_volume.consumer,
        node: of_volume.node,
        uid: row.uid,
        mode: used.mode,
        access_mode: used.access_mode,
        attachment_mode: used.attachment_mode,
        state: if row.parked { "parked".to_owned() } else { of_volume.state },
        releasing: of_volume.releasing,
        by_mount: row.by_mount,
        error: row.error.clone(),
        since: row.since_usec,
        modify_index: row.revision,
        ..ClaimRow::default()
    }
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::Use;

    use super::*;

    #[test]
    fn holders_of_a_volume_have_their_nodes() {
        let claim_of = |node: &str, mode: &str| OfVolume {
            node: node.into(),
            consumer: "web".into(),
            r#use: Some(Use { mode: mode.into(), access_mode: "a".into(), attachment_mode: "b".into() }),
            state: "taken".into(),
            ..OfVolume::default()
        };
        let row = Row {
            standing: "registered".into(),
            claims: vec![claim_of("n1", "write"), claim_of("n2", "read")],
            ..Row::default()
        };
        let shown = volume(&row);
        assert_eq!((shown.write_claims, shown.read_claims), (vec!["n1/web".into()], vec!["n2/web".into()]));
        assert_eq!((shown.access_mode.as_str(), shown.schedulable), ("a", true));
        let listed =
            ClaimInList { claim: Some(claim_of("n1", "write")), parked: true, ..ClaimInList::default() };
        let shown = claim(&listed);
        assert_eq!(
            (shown.state.as_str(), shown.node.as_str(), shown.mode.as_str()),
            ("parked", "n1", "write")
        );
    }
}
