//! Controller calls that servers send to this node. A server is believed about volumes, and not about this host's secrets.

use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, CallEnded, ControllerCall, CreateSnapshot, CreateVolume, CreatedVolume, DeleteSnapshot,
    DeleteVolume, ExpandVolume, ExpandedVolume, Hidden, Publish, Topology, Unpublish,
};
use csi_proto::cluster::{CALL, HIDE};
use prost::Message;

use crate::cluster::answers::{LONGEST, failure, known_credential, snapshot_row};
use crate::cluster::node::Node;
use crate::cluster::orders::NoTurn;
use crate::cluster::permits::CallPlace;
use crate::cluster::questions::is_question;
use crate::error::{Error, Kind, Result};
use crate::store::registry::{Registration, VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;
use crate::volume::Volumes;
use crate::volume::forwarded::{
    ForwardedAnswer, ForwardedCall, ForwardedCreation, ForwardedFailure, ForwardedRpc, ForwardedSource,
};
use crate::volume::rules::{self, ClaimOutcome, Created};

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
        let changes_volumes =
            !is_question(call) && !matches!(call.method, Some(Method::Publish(_) | Method::Unpublish(_)));
        self.permits.admit(&call.plugin, &call.credential, changes_volumes)
    }

    /// Makes a controller call when its turn has come, and returns how it ended.
    pub(super) async fn make_call(self: Arc<Self>, call: ControllerCall, volumes: Volumes) -> CallEnded {
        if is_question(&call) {
            return ended(&call, self.ask(&call, &volumes).await);
        }
        let forwarded = match read(&call, &self.cluster) {
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
                if let Some(left_out) = self.refusals.next() {
                    tracing::warn!(volume = %forwarded.name, epoch = call.epoch, left_out, "a stale controller call came");
                }
                return ended(&call, How::Stale(true));
            }
            Err(NoTurn::Late) => return ended(&call, How::NotStarted(true)),
        };
        match volumes.call_controller(forwarded).await {
            Ok(ForwardedAnswer::Attached(publish_context)) => {
                match rules::check_publish_context(&publish_context) {
                    Ok(()) => ended(&call, How::Answer(Answer { publish_context, ..Answer::default() })),
                    Err(error) => {
                        let outcome = ClaimOutcome::Hopeless(error.message.clone());
                        ended(&call, failure(ForwardedFailure { outcome, error }))
                    }
                }
            }
            Ok(ForwardedAnswer::Created(created)) => ended(&call, answer_created(created)),
            Ok(ForwardedAnswer::Expanded(capacity, node_expansion_required)) => {
                let expanded = ExpandedVolume { capacity: capacity.unwrap_or(0), node_expansion_required };
                ended(&call, How::Answer(Answer { expanded: Some(expanded), ..Answer::default() }))
            }
            Ok(ForwardedAnswer::Snapshot(snapshot)) => {
                let snapshot = Some(snapshot_row(snapshot));
                ended(&call, How::Answer(Answer { snapshot, ..Answer::default() }))
            }
            Ok(ForwardedAnswer::Done) => ended(&call, How::Answer(Answer::default())),
            Ok(_) => {
                let error = Error::internal("a controller call was answered with another's answer");
                ended(&call, failure(ForwardedFailure { outcome: ClaimOutcome::Unknown, error }))
            }
            Err(failed) => ended(&call, failure(failed)),
        }
    }
}

/// Returns the answer with a created volume. The server judges it. An answer that is too large for a message is none: the volume is there.
fn answer_created(created: Created) -> How {
    let topologies = created.topologies.into_iter().map(|segments| Topology { segments });
    let created = CreatedVolume {
        external_id: created.external_id,
        volume_context: created.context,
        capacity: created.capacity.unwrap_or(0),
        topologies: topologies.collect(),
        from_source: created.from_source,
    };
    let bytes = created.encoded_len();
    if bytes > CALL {
        let text = format!("the plugin's answer to CreateVolume has {bytes} bytes, and the limit is {CALL}");
        let error = Error::new(Kind::PluginError, text);
        return failure(ForwardedFailure { outcome: ClaimOutcome::Unknown, error });
    }
    How::Answer(Answer { created: Some(created), ..Answer::default() })
}

/// Reads a call of the cluster, and checks each field.
fn read(call: &ControllerCall, cluster: &str) -> Result<ForwardedCall> {
    let name = rules::volume_name(&call.namespace, &call.volume)?;
    for (what, text) in [("call", &call.call), ("plugin", &call.plugin)] {
        rules::check_name(what, text)?;
    }
    let credential = known_credential(&name, &call.credential)?;
    let Hidden { hide, more } = call.hidden.clone().unwrap_or_default();
    let unknown = || Error::invalid("this csid does not know the controller call");
    let mut external_id = VolumeKey::new(&call.plugin, &call.order).handle.to_string();
    let rpc = match call.method.clone().ok_or_else(unknown)? {
        Method::Publish(publish) => publishing(&name, call, publish)?,
        Method::Unpublish(Unpublish { node_id }) => {
            rules::check_node_id(&node_id)?;
            rules::check_external_id(&call.order)?;
            ForwardedRpc::Unpublish { node_id }
        }
        Method::Create(create) => {
            let made = call.order.strip_prefix('+').unwrap_or_default();
            rules::check_name("the name of a created volume", made)?;
            // A plugin answers with the volume that has the name already, also another cluster's.
            if made != rules::name_at_plugin(cluster, &name) {
                return Err(Error::invalid(format!("the name of a created volume is not that of {name}")));
            }
            external_id = made.to_owned();
            ForwardedRpc::Create(Box::new(creating(call, create)?))
        }
        Method::Delete(DeleteVolume {}) => {
            rules::check_external_id(&call.order)?;
            ForwardedRpc::Delete
        }
        Method::Expand(expand) => expanding(&name, call, expand)?,
        Method::Snapshot(CreateSnapshot { name: of, parameters }) => {
            rules::check_external_id(&call.order)?;
            rules::check_snapshot(&of, &parameters)?;
            ForwardedRpc::Snapshot { name: rules::snapshot_at_plugin(cluster, &name, &of), parameters }
        }
        Method::DeleteSnapshot(DeleteSnapshot { snapshot }) => {
            rules::check_external_id(&call.order)?;
            rules::check_external_id(&snapshot)?;
            ForwardedRpc::DeleteSnapshot { snapshot }
        }
        Method::Validate(_) | Method::List(_) | Method::Capacity(_) => return Err(unknown()),
    };
    Ok(ForwardedCall {
        name,
        external_id,
        plugin: call.plugin.clone(),
        credential,
        hide,
        is_silent: more,
        rpc,
        deadline: Duration::from_millis(call.deadline_ms.into()).min(LONGEST),
    })
}

fn publishing(name: &VolumeName, call: &ControllerCall, publish: Publish) -> Result<ForwardedRpc> {
    rules::check_node_id(&publish.node_id)?;
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
    rules::check_volume(&call.plugin, &call.order, &spec)?;
    let registration: Registration = rules::new_registration("", spec);
    let usage = Box::new(registration.usage(capability));
    Ok(ForwardedRpc::Publish { node_id: publish.node_id, usage, read_only: publish.read_only })
}

fn expanding(name: &VolumeName, call: &ControllerCall, expand: ExpandVolume) -> Result<ForwardedRpc> {
    let of = expand.capability.ok_or_else(|| Error::invalid(format!("{name}: capability is missing")))?;
    let capability = rules::read_capability(&of.access_mode, &of.attachment_mode)?;
    let (required, limit) = (expand.required, expand.limit);
    rules::check_capacity(required, limit)?;
    let spec = VolumeSpec {
        capabilities: vec![capability],
        fs_type: expand.fs_type,
        mount_flags: expand.mount_flags,
        mount_group: expand.mount_group,
        ..VolumeSpec::default()
    };
    rules::check_volume(&call.plugin, &call.order, &spec)?;
    let usage = Box::new(rules::new_registration("", spec).usage(capability));
    Ok(ForwardedRpc::Expand { required, limit, usage, in_use: expand.in_use })
}

fn creating(call: &ControllerCall, create: CreateVolume) -> Result<ForwardedCreation> {
    let mut capabilities = Vec::new();
    for of in &create.capabilities {
        capabilities.push(rules::read_capability(&of.access_mode, &of.attachment_mode)?);
    }
    let (capacity_min, capacity_max) = (create.capacity_min, create.capacity_max);
    rules::check_capacity(capacity_min, capacity_max)?;
    let spec = VolumeSpec {
        capabilities: capabilities.clone(),
        fs_type: create.fs_type,
        mount_flags: create.mount_flags,
        mount_group: create.mount_group,
        parameters: create.parameters,
        topologies: create.topologies.into_iter().map(|topology| topology.segments).collect(),
        ..VolumeSpec::default()
    };
    rules::check_volume(&call.plugin, &call.order, &spec)?;
    let registration: Registration = rules::new_registration("", spec);
    let usages = capabilities.into_iter().map(|of| registration.usage(of)).collect();
    let VolumeSpec { parameters, topologies, .. } = registration.spec;
    let source = read_source(create.source_snapshot, create.source_volume)?;
    Ok(ForwardedCreation { capacity_min, capacity_max, usages, parameters, topologies, source })
}

fn read_source(snapshot: String, volume: String) -> Result<Option<ForwardedSource>> {
    match (snapshot.is_empty(), volume.is_empty()) {
        (true, true) => Ok(None),
        (false, true) => {
            rules::check_external_id(&snapshot).map(|()| Some(ForwardedSource::Snapshot(snapshot)))
        }
        (true, false) => rules::check_external_id(&volume).map(|()| Some(ForwardedSource::Volume(volume))),
        (false, false) => Err(Error::invalid("a created volume has a snapshot and a volume as its source")),
    }
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::{CallClass, Capability};

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

    fn created() -> CreateVolume {
        let capability =
            Capability { access_mode: "single-node-writer".into(), attachment_mode: "file-system".into() };
        CreateVolume { capabilities: vec![capability], capacity_min: 4096, ..CreateVolume::default() }
    }

    #[test]
    fn call_is_read_with_its_usage() {
        let call = read(&good(), "prod").unwrap();
        assert_eq!(call.external_id, "ext");
        assert_eq!((call.credential.as_deref(), call.deadline), (Some("csid.prod.key"), LONGEST));
        let ForwardedRpc::Publish { usage, node_id, .. } = call.rpc else { panic!("another call") };
        assert_eq!((usage.fs_type.as_str(), usage.context["share"].as_str()), ("ext4", "hunter2"));
        assert_eq!(node_id, "node");
        let unpublish = Method::Unpublish(Unpublish { node_id: "node".into() });
        assert!(read(&ControllerCall { method: Some(unpublish), ..good() }, "prod").is_ok());
    }

    /// The host's session goes on.
    #[tokio::test]
    async fn call_that_is_too_large_is_refused() {
        let config = Cluster {
            name: "prod".into(),
            inline: false,
            on_fenced: Default::default(),
            link: "/run/csid-link".into(),
            controllers: vec!["p".into()],
            controller_credentials: vec!["csid.prod.*".into()],
            controller_volumes: Vec::new(),
        };
        let node = Node::new(&config, "n1", "journal", "boot", None);
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
        let creation = |order: &str, change: &dyn Fn(&mut CreateVolume)| {
            let mut create = created();
            change(&mut create);
            ControllerCall { order: order.into(), method: Some(Method::Create(create)), ..good() }
        };
        let deletion = |order: &str| ControllerCall {
            order: order.into(),
            method: Some(Method::Delete(DeleteVolume {})),
            ..good()
        };
        let made = rules::volume_name(&good().namespace, &good().volume).unwrap();
        let order = format!("+{}", rules::name_at_plugin("prod", &made));
        assert!(read(&creation(&order, &|_| {}), "prod").is_ok_and(|call| call.external_id == order[1..]));
        assert!(read(&deletion("ext"), "prod").is_ok());
        let expansion = |order: &str, change: &dyn Fn(&mut ExpandVolume)| {
            let capability = created().capabilities.pop();
            let mut expand = ExpandVolume { capability, required: 8192, ..ExpandVolume::default() };
            change(&mut expand);
            ControllerCall { order: order.into(), method: Some(Method::Expand(expand)), ..good() }
        };
        assert!(read(&expansion("ext", &|_| {}), "prod").is_ok());
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
            ("a creation by no name", creation("ext", &|_| {})),
            ("a creation by another volume's name", creation("+name", &|_| {})),
            ("a creation by an empty name", creation("+", &|_| {})),
            ("a creation by a long name", creation(&format!("+{}", long()), &|_| {})),
            ("a creation of no use", creation(&order, &|of| of.capabilities.clear())),
            ("a creation below nothing", creation(&order, &|of| of.capacity_max = of.capacity_min - 1)),
            ("a creation above CSI", creation(&order, &|of| of.capacity_min = u64::MAX)),
            (
                "a creation with large parameters",
                creation(&order, &|of| drop(of.parameters.insert("k".into(), "x".repeat(100_000)))),
            ),
            (
                "a creation in a topology of nothing",
                creation(&order, &|of| of.topologies.push(Topology::default())),
            ),
            ("an expansion of no volume", expansion("", &|_| {})),
            ("an expansion of no use", expansion("ext", &|of| of.capability = None)),
            ("an expansion above CSI", expansion("ext", &|of| of.required = u64::MAX)),
            ("an expansion below itself", expansion("ext", &|of| of.limit = 1)),
            (
                "an expansion with many flags",
                expansion("ext", &|of| of.mount_flags = vec!["x".repeat(100); 1000]),
            ),
            ("a deletion of no volume", deletion("")),
            ("a deletion of a long id", deletion(&long())),
        ] {
            assert!(read(&call, "prod").is_err(), "{lie}");
        }
    }
}
