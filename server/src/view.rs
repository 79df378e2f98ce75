//! Records as callers see them.

use csi_proto::cluster::v1::{ClaimRow, Spec, Use, VolumeRow};
use csi_proto::identity::{Identity, Role};
use csid::cluster::rows::write_spec;
use csid::store::registry::{Claim, ClaimState, Record, Standing, VolumeSpec};
use csid::volume::rules::words_of;

/// Returns a record as this caller may see it. The maps and flags of a spec may contain a secret, so a node sees those of a volume
/// that it has claimed, and no other caller sees any.
pub fn row(record: &Record, caller: &Identity) -> VolumeRow {
    let registration = record.registration.as_ref();
    let is_own = |claim: &Claim| caller.role == Role::Node && claim.node == caller.name;
    let is_holder = record.claims.iter().any(is_own);
    let handle = &record.volume.handle;
    let calls_of_own = format!("{caller}/");
    let claims = record.claims.iter().map(|claim| {
        let [mode, access_mode, attachment_mode] = words_of(claim.usage).map(str::to_owned);
        ClaimRow {
            node: claim.node.clone(),
            consumer: claim.consumer.clone(),
            r#use: Some(Use { mode, access_mode, attachment_mode }),
            state: state(claim.state).to_owned(),
            releasing: claim.releasing,
            claim: if is_own(claim) { claim.id.clone() } else { String::new() },
            call: claim.call.strip_prefix(&calls_of_own).unwrap_or_default().to_owned(),
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

/// Returns a spec. Without `whole`, without its maps and flags.
fn spec(of: &VolumeSpec, whole: bool) -> Spec {
    let shown = write_spec(of);
    match whole {
        true => shown,
        false => Spec {
            mount_flags: Vec::new(),
            volume_context: Default::default(),
            parameters: Default::default(),
            ..shown
        },
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
