//! Controller calls of the servers that change nothing. They have no epoch: an answer that is lost is asked for again.

use std::time::Duration;

use csi_proto::cluster::CALL;
use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, AvailableCapacity, Capability, ControllerCall, ExternalVolume, ListExternal, Listed,
    MeasureCapacity, ValidateCapabilities, Validated,
};
use prost::Message;

use crate::cluster::answers::{LONGEST, failure, known_credential, snapshot_row};
use crate::cluster::node::Node;
use crate::cluster::orders::CallTurn;
use crate::error::{Error, Kind, Result, cut};
use crate::plugin::External;
use crate::store::registry::{Capability as Mode, VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;
use crate::volume::Volumes;
use crate::volume::forwarded::{
    ForwardedAnswer, ForwardedCall, ForwardedFailure, ForwardedPage, ForwardedRpc,
};
use crate::volume::rules::{self, ClaimOutcome};

/// The limit of the plugin's reason for which it does not confirm a capability, in bytes.
const REASON: usize = 1024;

/// Returns whether a call changes nothing.
pub(super) fn is_question(call: &ControllerCall) -> bool {
    matches!(call.method, Some(Method::Validate(_) | Method::List(_) | Method::Capacity(_)))
}

impl Node {
    /// Asks the controller here, and returns what it says. A question about a volume waits for the volume's other calls.
    pub(super) async fn ask(&self, call: &ControllerCall, volumes: &Volumes) -> How {
        let withheld = |error: Error| {
            failure(ForwardedFailure { outcome: ClaimOutcome::NotSent(Some(error.message.clone())), error })
        };
        let forwarded = match read(call) {
            Ok(forwarded) => forwarded,
            Err(error) => return withheld(error),
        };
        let _turn: Option<CallTurn> = match call.order.is_empty() {
            true => None,
            false => {
                let within = Duration::from_millis(call.start_within_ms.into()).min(LONGEST);
                match self.orders.turn_of_question(&call.plugin, &call.order, within).await {
                    Ok(turn) => Some(turn),
                    Err(_) => return How::NotStarted(true),
                }
            }
        };
        match volumes.call_controller(forwarded).await {
            Ok(answer) => match answered(answer) {
                Ok(answer) => How::Answer(answer),
                Err(error) => failure(ForwardedFailure { outcome: ClaimOutcome::Unknown, error }),
            },
            Err(failed) => failure(failed),
        }
    }
}

/// Makes the answer to a question. One that is too large for a message is an error.
fn answered(answer: ForwardedAnswer) -> Result<Answer> {
    let answer = match answer {
        ForwardedAnswer::Validated(validated) => {
            let message = validated.as_ref().err().map(|why| cut(why, REASON).into_owned());
            let validated = Validated { confirmed: validated.is_ok(), message: message.unwrap_or_default() };
            Answer { validated: Some(validated), ..Answer::default() }
        }
        ForwardedAnswer::Volumes(volumes, next) => {
            let volumes = volumes.into_iter().map(|of: External| ExternalVolume {
                external_id: of.external_id,
                capacity: of.capacity,
                published_node_ids: of.published_node_ids,
                abnormal: of.abnormal.is_some_and(|(abnormal, _)| abnormal),
            });
            let listed = Listed { volumes: volumes.collect(), snapshots: Vec::new(), next };
            Answer { listed: Some(listed), ..Answer::default() }
        }
        ForwardedAnswer::Snapshots(snapshots, next) => {
            let snapshots = snapshots.into_iter().map(snapshot_row);
            let listed = Listed { volumes: Vec::new(), snapshots: snapshots.collect(), next };
            Answer { listed: Some(listed), ..Answer::default() }
        }
        ForwardedAnswer::Available(bytes) => {
            Answer { available: Some(AvailableCapacity { bytes }), ..Answer::default() }
        }
        _ => return Err(Error::internal("a question was answered with another's answer")),
    };
    let bytes = answer.encoded_len();
    if bytes > CALL {
        let text = format!("the plugin's answer has {bytes} bytes, and the limit is {CALL}");
        return Err(Error::new(Kind::PluginError, text));
    }
    Ok(answer)
}

/// Reads a question, and checks each field.
fn read(call: &ControllerCall) -> Result<ForwardedCall> {
    for (what, text) in [("call", &call.call), ("plugin", &call.plugin)] {
        rules::check_name(what, text)?;
    }
    let unknown = || Error::invalid("this csid does not know the question");
    let nothing = || VolumeName { namespace: String::new(), volume: String::new() };
    let (name, rpc) = match call.method.clone().ok_or_else(unknown)? {
        Method::Validate(validate) => {
            let name = rules::volume_name(&call.namespace, &call.volume)?;
            rules::check_external_id(&call.order)?;
            (name, validating(call, validate)?)
        }
        _ if !call.order.is_empty() || !call.credential.is_empty() => {
            return Err(Error::invalid("a question about a plugin has an order or a credential"));
        }
        Method::List(ListExternal { snapshots, snapshot, external_id, token, max }) => {
            rules::check_page(&token, &snapshot, &external_id)?;
            let page = ForwardedPage { token, max, snapshot, external_id };
            (nothing(), if snapshots { ForwardedRpc::Snapshots(page) } else { ForwardedRpc::Volumes(page) })
        }
        Method::Capacity(capacity) => (nothing(), measuring(call, capacity)?),
        _ => return Err(unknown()),
    };
    let hidden = call.hidden.clone().unwrap_or_default();
    Ok(ForwardedCall {
        credential: known_credential(&name, &call.credential)?,
        // A message about no volume may repeat what the plugin had for any.
        is_silent: hidden.more || !matches!(rpc, ForwardedRpc::Validate { .. }),
        name,
        external_id: VolumeKey::new(&call.plugin, &call.order).handle.to_string(),
        plugin: call.plugin.clone(),
        hide: hidden.hide,
        rpc,
        deadline: Duration::from_millis(call.deadline_ms.into()).min(LONGEST),
    })
}

fn modes(capabilities: &[Capability]) -> Result<Vec<Mode>> {
    let mode = |of: &Capability| rules::read_capability(&of.access_mode, &of.attachment_mode);
    capabilities.iter().map(mode).collect()
}

fn validating(call: &ControllerCall, of: ValidateCapabilities) -> Result<ForwardedRpc> {
    let capabilities = modes(&of.capabilities)?;
    let spec = VolumeSpec {
        capabilities: capabilities.clone(),
        fs_type: of.fs_type,
        mount_flags: of.mount_flags,
        mount_group: of.mount_group,
        context: of.volume_context,
        parameters: of.parameters,
        ..VolumeSpec::default()
    };
    rules::check_volume(&call.plugin, &call.order, &spec)?;
    let registration = rules::new_registration("", spec);
    let usages = capabilities.into_iter().map(|mode| registration.usage(mode)).collect();
    Ok(ForwardedRpc::Validate { usages, parameters: registration.spec.parameters })
}

fn measuring(call: &ControllerCall, of: MeasureCapacity) -> Result<ForwardedRpc> {
    let capabilities = modes(&of.capabilities)?;
    let topology = of.topology.unwrap_or_default().segments;
    let topologies = if topology.is_empty() { Vec::new() } else { vec![topology.clone()] };
    let spec = VolumeSpec { parameters: of.parameters, topologies, ..VolumeSpec::default() };
    rules::check_capacity_question(&call.plugin, &spec)?;
    let registration = rules::new_registration("", spec);
    let usages = capabilities.into_iter().map(|mode| registration.usage(mode)).collect();
    Ok(ForwardedRpc::Capacity { usages, parameters: registration.spec.parameters, topology })
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::Topology;

    use super::*;

    fn validate() -> ControllerCall {
        let capability =
            Capability { access_mode: "single-node-writer".into(), attachment_mode: "file-system".into() };
        let of = ValidateCapabilities { capabilities: vec![capability], ..ValidateCapabilities::default() };
        ControllerCall {
            call: "call".into(),
            plugin: "p".into(),
            order: "ext".into(),
            namespace: "prod".into(),
            volume: "data".into(),
            credential: "csid.prod.key".into(),
            method: Some(Method::Validate(of)),
            ..ControllerCall::default()
        }
    }

    fn about_plugin(method: Method) -> ControllerCall {
        ControllerCall {
            call: "call".into(),
            plugin: "p".into(),
            method: Some(method),
            ..ControllerCall::default()
        }
    }

    #[test]
    fn message_about_a_plugin_is_never_shown() {
        assert!(!read(&validate()).unwrap().is_silent);
        for method in [Method::List(ListExternal::default()), Method::Capacity(MeasureCapacity::default())] {
            assert!(read(&about_plugin(method)).unwrap().is_silent);
        }
    }

    /// A server may be of an attacker.
    #[test]
    fn lie_in_a_question_is_refused() {
        let long = "x".repeat(10_000);
        let list = |change: &dyn Fn(&mut ListExternal)| {
            let mut list = ListExternal::default();
            change(&mut list);
            about_plugin(Method::List(list))
        };
        let segments = [("zo\nne".to_owned(), "a".to_owned())].into();
        let topology = Some(Topology { segments });
        for lie in [
            ControllerCall { order: String::new(), ..validate() },
            ControllerCall { order: long.clone(), ..validate() },
            ControllerCall { volume: String::new(), ..validate() },
            ControllerCall { credential: "csid.other.key".into(), ..validate() },
            ControllerCall { plugin: "a\nb".into(), ..validate() },
            ControllerCall { method: Some(Method::Validate(ValidateCapabilities::default())), ..validate() },
            ControllerCall { method: None, ..validate() },
            list(&|list| list.token = long.clone()),
            list(&|list| list.snapshot = long.clone()),
            list(&|list| list.external_id = "a\nb".into()),
            ControllerCall { credential: "csid.prod.key".into(), ..list(&|_| {}) },
            ControllerCall { order: "ext".into(), ..list(&|_| {}) },
            about_plugin(Method::Capacity(MeasureCapacity { topology, ..MeasureCapacity::default() })),
        ] {
            assert!(read(&lie).is_err(), "{lie:?}");
        }
    }

    #[test]
    fn page_that_is_too_large_is_an_error() {
        let external = |n: usize| External {
            external_id: format!("{n}{}", "x".repeat(900)),
            capacity: 1,
            published_node_ids: Vec::new(),
            abnormal: Some((true, "of the plugin".into())),
        };
        let page = |count| ForwardedAnswer::Volumes((0..count).map(external).collect(), "next".into());
        let listed = answered(page(100)).unwrap().listed.unwrap();
        assert!(listed.volumes.len() == 100 && listed.volumes[0].abnormal && listed.next == "next");
        assert_eq!(answered(page(200)).err().map(|error| error.kind), Some(Kind::PluginError));
    }
}
