//! Records as callers see them.

use csi_proto::cluster::v1::{Capability, ClaimRow, Spec, Use, VolumeRow};
use csi_proto::identity::{Identity, Role};
use csid::store::registry::{Claim, ClaimState, Record, Standing, VolumeSpec};
use csid::volume::rules::{words_of, words_of_capability};

/// Returns a record as this caller may see it. The maps and flags of a spec may contain a secret, so a node sees those of a volume
/// that it has claimed, and no other caller sees any.
pub fn row(record: &Record, caller: &Identity) -> VolumeRow {
    let registration = record.registration.as_ref();
    let is_own = |claim: &Claim| caller.role == Role::Node && claim.node == caller.name;
    let is_holder = record.claims.iter().any(is_own);
    let handle = &record.volume.handle;
    let claims = record.claims.iter().map(|claim| {
        let [mode, access_mode, attachment_mode] = words_of(claim.usage).map(str::to_owned);
        ClaimRow {
            node: claim.node.clone(),
            consumer: claim.consumer.clone(),
            r#use: Some(Use { mode, access_mode, attachment_mode }),
            state: state(claim.state).to_owned(),
            releasing: claim.releasing,
            claim: if is_own(claim) { claim.id.clone() } else { String::new() },
        }
    });
    VolumeRow {
        namespace: record.name.namespace.clone(),
        volume: record.name.volume.clone(),
        plugin: record.volume.plugin.clone(),
        external_id: if handle.is_creating() { String::new() } else { handle.text().into_owned() },
        standing: match registration.map(|of| &of.standing) {
            None => String::new(),
            Some(Standing::Registered) => "registered".to_owned(),
            Some(Standing::Creating(_)) => "creating".to_owned(),
            Some(Standing::Deleting { .. }) => "deleting".to_owned(),
        },
        owner: registration.map(|of| of.owner.clone()).unwrap_or_default(),
        spec: registration.map(|of| spec(&of.spec, is_holder)),
        claims: claims.collect(),
        revision: record.revision,
    }
}

fn spec(of: &VolumeSpec, whole: bool) -> Spec {
    let capabilities = of.capabilities.iter().map(|capability| {
        let [access_mode, attachment_mode] = words_of_capability(*capability).map(str::to_owned);
        Capability { access_mode, attachment_mode }
    });
    let shown = Spec {
        name: of.name.clone(),
        capabilities: capabilities.collect(),
        fs_type: of.fs_type.clone(),
        mount_group: of.mount_group.clone(),
        credential: of.credential.clone().unwrap_or_default(),
        heal: csid::volume::rules::heal_word(of.heal).to_owned(),
        ..Spec::default()
    };
    match whole {
        true => Spec {
            mount_flags: of.mount_flags.clone(),
            volume_context: of.context.clone(),
            parameters: of.parameters.clone(),
            ..shown
        },
        false => shown,
    }
}

fn state(state: ClaimState) -> &'static str {
    match state {
        ClaimState::Pending => "pending",
        ClaimState::Taken => "taken",
        ClaimState::NodeDetached => "node-detached",
        ClaimState::ControllerDetached => "controller-detached",
    }
}
