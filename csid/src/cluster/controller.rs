//! Controller calls that servers send to this node. A server is believed about volumes, and not about this host's secrets.

use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, CallClass, CallEnded, CallFailure, ControllerCall, Hidden, Publish, Unpublish,
};
use csi_proto::cluster::{CALL, HIDE};
use prost::Message;

use crate::cluster::node::Node;
use crate::cluster::orders::NoTurn;
use crate::cluster::permits::CallPlace;
use crate::error::{Error, Result, cut};
use crate::store::registry::{Registration, VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;
use crate::volume::Volumes;
use crate::volume::forwarded::{ForwardedCall, ForwardedFailure, ForwardedRpc};
use crate::volume::rules::{self, ClaimOutcome};

/// The longest time that a call may wait, and that it may take.
const LONGEST: Duration = Duration::from_secs(600);
/// The limit of a message that is sent to a server, in bytes.
const MESSAGE: usize = 2048;

/// Returns the end of a call that this host does not begin.
pub(super) fn refused(call: &ControllerCall, error: Error) -> CallEnded {
    ended(call, failure(ForwardedFailure { outcome: ClaimOutcome::NotSent(None), error }))
}

fn ended(call: &ControllerCall, how: How) -> CallEnded {
    CallEnded { call: call.call.clone(), epoch: call.epoch, how: Some(how) }
}

impl Node {
    /// Takes the place of a call, or refuses the call before anything is loaded for it.
    pub(super) fn admit(&self, call: &ControllerCall) -> Result<CallPlace> {
        let (bytes, values) =
            (call.encoded_len(), call.hidden.as_ref().map_or(0, |hidden| hidden.hide.len()));
        if bytes > CALL || values > HIDE {
            return Err(Error::invalid(format!(
                "a controller call has {bytes} bytes and {values} values to hide, and the limits are {CALL} and {HIDE}"
            )));
        }
        self.permits.admit(&call.plugin, &call.credential)
    }

    /// Makes a controller call when its turn has come, and returns how it ended.
    pub(super) async fn make_call(self: Arc<Self>, call: ControllerCall, volumes: Volumes) -> CallEnded {
        let forwarded = match read(&call) {
            Ok(forwarded) => forwarded,
            Err(error) => {
                let withheld = ClaimOutcome::NotSent(Some(error.message.clone()));
                return ended(&call, failure(ForwardedFailure { outcome: withheld, error }));
            }
        };
        let within = Duration::from_millis(call.start_within_ms.into()).min(LONGEST);
        let _turn = match self.orders.turn(&call.plugin, &call.order, call.epoch, within).await {
            Ok(turn) => turn,
            Err(NoTurn::Stale) => {
                tracing::warn!(volume = %forwarded.name, epoch = call.epoch, "a stale controller call came");
                return ended(&call, How::Stale(true));
            }
            Err(NoTurn::Late) => return ended(&call, How::NotStarted(true)),
        };
        match volumes.call_controller(forwarded).await {
            Ok(publish_context) => match rules::check_publish_context(&publish_context) {
                Ok(()) => ended(&call, How::Answer(Answer { publish_context })),
                Err(error) => {
                    let outcome = ClaimOutcome::Hopeless(error.message.clone());
                    ended(&call, failure(ForwardedFailure { outcome, error }))
                }
            },
            Err(failed) => ended(&call, failure(failed)),
        }
    }
}

fn failure(ForwardedFailure { outcome, error }: ForwardedFailure) -> How {
    let class = match outcome {
        ClaimOutcome::NotSent(None) => CallClass::NotSent,
        ClaimOutcome::NotSent(Some(_)) => CallClass::Withheld,
        ClaimOutcome::Again => CallClass::Again,
        ClaimOutcome::Hopeless(_) => CallClass::Refused,
        ClaimOutcome::Unknown | ClaimOutcome::Done => CallClass::Unknown,
    };
    How::Failed(CallFailure {
        class: class.into(),
        kind: error.kind.name().to_owned(),
        message: cut(&error.message, MESSAGE).into_owned(),
    })
}

/// Reads a call, and checks each field.
fn read(call: &ControllerCall) -> Result<ForwardedCall> {
    let name = rules::volume_name(&call.namespace, &call.volume)?;
    for (what, text) in [("call", &call.call), ("plugin", &call.plugin)] {
        rules::check_name(what, text)?;
    }
    let credential = (!call.credential.is_empty()).then(|| call.credential.clone());
    // A server must not choose which of this host's secrets the plugin gets.
    if let Some(credential) = &credential {
        rules::check_credential(&name.namespace, credential)?;
    }
    let Hidden { hide, more } = call.hidden.clone().unwrap_or_default();
    let unknown = || Error::invalid("this csid does not know the controller call");
    let (node_id, spec, rpc) = match call.method.clone().ok_or_else(unknown)? {
        Method::Publish(publish) => publishing(&name, publish)?,
        Method::Unpublish(Unpublish { node_id }) => (node_id, VolumeSpec::default(), ForwardedRpc::Unpublish),
    };
    rules::check_node_id(&node_id)?;
    match rpc {
        ForwardedRpc::Publish { .. } => rules::check_volume(&call.plugin, &call.order, &spec)?,
        ForwardedRpc::Unpublish => rules::check_external_id(&call.order)?,
    }
    Ok(ForwardedCall {
        name,
        external_id: VolumeKey::new(&call.plugin, &call.order).handle.to_string(),
        plugin: call.plugin.clone(),
        node_id,
        credential,
        hide,
        is_silent: more,
        rpc,
        deadline: Duration::from_millis(call.deadline_ms.into()).min(LONGEST),
    })
}

fn publishing(name: &VolumeName, publish: Publish) -> Result<(String, VolumeSpec, ForwardedRpc)> {
    let of = publish.capability.ok_or_else(|| Error::invalid(format!("{name}: capability is missing")))?;
    let capability = rules::read_capability(&of.access_mode, &of.attachment_mode)?;
    let spec = VolumeSpec {
        capabilities: vec![capability],
        fs_type: publish.fs_type,
        mount_flags: publish.mount_flags,
        mount_group: publish.mount_group,
        context: publish.volume_context,
        ..VolumeSpec::default()
    };
    let registration: Registration = rules::new_registration("", spec.clone());
    let usage = Box::new(registration.usage(capability));
    let rpc = ForwardedRpc::Publish { usage, read_only: publish.read_only };
    Ok((publish.node_id, spec, rpc))
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::Capability;

    use super::*;
    use crate::config::Cluster;

    fn good() -> ControllerCall {
        let capability =
            Capability { access_mode: "single-node-writer".into(), attachment_mode: "file-system".into() };
        let publish = Publish {
            node_id: "node".into(),
            capability: Some(capability),
            fs_type: "ext4".into(),
            mount_flags: vec!["noatime".into()],
            volume_context: [("share".to_owned(), "hunter2".to_owned())].into(),
            ..Publish::default()
        };
        ControllerCall {
            call: "call".into(),
            epoch: 7,
            start_within_ms: 1000,
            plugin: "p".into(),
            order: "ext".into(),
            credential: "csid.prod.key".into(),
            hidden: Some(Hidden { hide: vec!["value".into()], more: false }),
            deadline_ms: u32::MAX,
            method: Some(Method::Publish(publish)),
            namespace: "prod".into(),
            volume: "data".into(),
        }
    }

    #[test]
    fn call_is_read_with_its_usage() {
        let call = read(&good()).unwrap();
        assert_eq!((call.external_id.as_str(), call.node_id.as_str()), ("ext", "node"));
        assert_eq!((call.credential.as_deref(), call.deadline), (Some("csid.prod.key"), LONGEST));
        let ForwardedRpc::Publish { usage, .. } = call.rpc else { panic!("another call") };
        assert_eq!((usage.fs_type.as_str(), usage.context["share"].as_str()), ("ext4", "hunter2"));
        let unpublish = Method::Unpublish(Unpublish { node_id: "node".into() });
        assert!(read(&ControllerCall { method: Some(unpublish), ..good() }).is_ok());
    }

    /// The host's session goes on.
    #[tokio::test]
    async fn call_that_is_too_large_is_refused() {
        let config = Cluster {
            name: "prod".into(),
            inline: false,
            link: "/run/csid-link".into(),
            controllers: vec!["p".into()],
            controller_credentials: vec!["csid.prod.*".into()],
        };
        let node = Node::new(&config, "n1", "journal", "boot");
        assert!(node.admit(&good()).is_ok());
        let hiding = |hide| ControllerCall { hidden: Some(Hidden { hide, more: false }), ..good() };
        for call in [hiding(vec![String::new(); HIDE + 1]), hiding(vec!["x".repeat(CALL)])] {
            let error = node.admit(&call).err().unwrap();
            let How::Failed(failure) = refused(&call, error).how.unwrap() else { panic!("another end") };
            assert_eq!(failure.class(), CallClass::NotSent);
        }
    }

    /// A server may be of an attacker.
    #[test]
    fn lie_in_a_controller_call_is_refused() {
        let publish = |change: &dyn Fn(&mut Publish)| {
            let mut call = good();
            let Some(Method::Publish(publish)) = &mut call.method else { unreachable!() };
            change(publish);
            call
        };
        let unpublish = |order: &str, node_id: &str| ControllerCall {
            order: order.into(),
            method: Some(Method::Unpublish(Unpublish { node_id: node_id.into() })),
            ..good()
        };
        let long = || "x".repeat(10_000);
        for (lie, call) in [
            ("no method", ControllerCall { method: None, ..good() }),
            ("no name", ControllerCall { call: String::new(), ..good() }),
            ("a long plugin", ControllerCall { plugin: long(), ..good() }),
            ("no volume", ControllerCall { volume: String::new(), ..good() }),
            ("a namespace with a line", ControllerCall { namespace: "a\nb".into(), ..good() }),
            ("no order", ControllerCall { order: String::new(), ..good() }),
            ("a long order", ControllerCall { order: long(), ..good() }),
            ("another's credential", ControllerCall { credential: "csid.other.key".into(), ..good() }),
            ("a credential as a path", ControllerCall { credential: "../shadow".into(), ..good() }),
            ("no node", publish(&|of| of.node_id.clear())),
            ("a long node", publish(&|of| of.node_id = long())),
            ("no capability", publish(&|of| of.capability = None)),
            ("another mode", publish(&|of| of.capability.as_mut().unwrap().access_mode = "own".into())),
            ("many flags", publish(&|of| of.mount_flags = vec!["x".repeat(100); 1000])),
            ("a long file system", publish(&|of| of.fs_type = long())),
            (
                "a large context",
                publish(&|of| drop(of.volume_context.insert("k".into(), "x".repeat(100_000)))),
            ),
            ("an unpublish of no node", unpublish("ext", "")),
            ("an unpublish of no volume", unpublish("", "node")),
        ] {
            assert!(read(&call).is_err(), "{lie}");
        }
    }
}
