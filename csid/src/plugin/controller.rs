//! A plugin's controller service as `volume` calls it. One call is one RPC, and csid keeps nothing of it: what is repeated,
//! and when, is the caller's. What the plugin does not offer is not asked (CSI rule 19).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use csi_proto::csi::v1;
use csi_proto::csi::v1::volume_content_source::{SnapshotSource, Type as ContentSource, VolumeSource};
use tonic::{Code, Response, Status};

use crate::plugin::answer;
use crate::plugin::instance::{Hand, Instance, capability, condition, gone, opaque};
use crate::plugin::node::Ready;
use crate::plugin::rpc::{Hidden, MAP_BYTES, RpcError, STRING_BYTES, map_bytes, sent};
use crate::plugin::rpc_outcome::Class;
use crate::plugin::wire::Wire;
use crate::secret::Secrets;
use crate::store::rows::Usage;

/// A controller service of a plugin that was healthy when it was asked for; a call counts as its load until it is answered.
#[derive(Clone)]
pub struct Controller(pub(super) Arc<Instance>, Arc<[String]>, Option<Hand>);

/// The arguments that every controller call has. The caller's frame owns the secrets.
#[derive(Clone, Copy)]
pub struct CallContext<'a> {
    /// The uid of the call, and of its secrets.
    pub uid: u32,
    pub secrets: Option<&'a Secrets>,
    /// The volume is or was used with secrets that are not at hand, or it is about no volume and the plugin had some.
    pub secrets_forgotten: bool,
    /// How long it waits for its turn at the plugin, and from then on for the answer, which the RPC's own deadline bounds, too.
    pub patience: Duration,
}

/// A volume to be made; the same name and the same wishes give the same volume (CSI rule 39).
#[derive(Clone, Copy)]
pub struct Create<'a> {
    pub name: &'a str,
    pub required: u64,
    /// 0: none.
    pub limit: u64,
    pub usages: &'a [Usage],
    pub parameters: &'a BTreeMap<String, String>,
    pub source: Option<Source<'a>>,
    /// The topologies from which the volume must be reachable, the best first. They are sent only with
    /// VOLUME_ACCESSIBILITY_CONSTRAINTS.
    pub topologies: &'a [BTreeMap<String, String>],
}

/// The source of a new volume, by the plugin's id.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    Snapshot(&'a str),
    Volume(&'a str),
}

#[derive(Clone, PartialEq, Eq)]
pub struct Created {
    pub external_id: String,
    pub context: BTreeMap<String, String>,
    /// Bytes. `None`: the plugin does not report it.
    pub capacity: Option<u64>,
    pub topologies: Vec<BTreeMap<String, String>>,
    /// False where a source was asked for and the answer does not name it: the volume may be empty.
    pub from_source: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub id: String,
    /// The volume's.
    pub external_id: String,
    /// 0: the plugin does not say.
    pub size: u64,
    /// Since 1970; 0: the plugin does not say.
    pub created_usec: u64,
    /// CreateSnapshot is repeated until it is (CSI rule 42).
    pub ready: bool,
}

/// A volume as the plugin lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct External {
    pub external_id: String,
    pub capacity: u64,
    /// Only of plugins with LIST_VOLUMES_PUBLISHED_NODES.
    pub published_node_ids: Vec<String>,
    /// Whether the plugin calls it abnormal, and its words; only of plugins with VOLUME_CONDITION.
    pub abnormal: Option<(bool, String)>,
}

/// Returns the controller capability without which this RPC is not sent (CSI rule 19). `None`: every controller has the RPC.
pub(super) fn needed_by(rpc: &str) -> Option<&'static str> {
    match rpc {
        "ControllerPublishVolume" | "ControllerUnpublishVolume" => Some("PUBLISH_UNPUBLISH_VOLUME"),
        "CreateVolume" | "DeleteVolume" => Some("CREATE_DELETE_VOLUME"),
        "ControllerExpandVolume" => Some("EXPAND_VOLUME"),
        "CreateSnapshot" | "DeleteSnapshot" => Some("CREATE_DELETE_SNAPSHOT"),
        "ListSnapshots" => Some("LIST_SNAPSHOTS"),
        "ListVolumes" => Some("LIST_VOLUMES"),
        "GetCapacity" => Some("GET_CAPACITY"),
        _ => None,
    }
}

impl Controller {
    pub(super) fn of(Ready(instance, hand): Ready) -> Self {
        Controller(instance, Arc::default(), hand)
    }

    /// Hides values of contexts and parameters that other calls gave the plugin for this volume. No message may repeat them.
    pub fn hiding(self, given: Vec<String>) -> Self {
        Controller(self.0, given.into(), self.2)
    }

    /// Returns whether the plugin was sent secrets, by this csid or, as `before` returns, by an earlier one. Answers to calls
    /// about no volume in particular may repeat any of them.
    pub async fn had_secrets<F, E>(&self, before: impl FnOnce() -> F) -> Result<bool, E>
    where
        F: Future<Output = Result<bool, E>>,
    {
        let common = &self.0.peer.common;
        Ok(common.had_secrets.load(Ordering::Acquire)
            || *common.had_secrets_before.get_or_try_init(before).await?)
    }

    pub fn id(&self) -> &str {
        &self.0.peer.id
    }

    /// A ControllerServiceCapability or a PluginCapability by CSI's name for it: `PUBLISH_UNPUBLISH_VOLUME`, `OFFLINE`.
    pub fn can(&self, capability: &str) -> bool {
        self.0.print.controller.contains(&capability) || self.0.print.plugin.contains(&capability)
    }

    /// Attach; the publish context. Read-only only where the plugin knows PUBLISH_READONLY (CSI rule 32).
    pub async fn publish(
        &self,
        external_id: &str,
        node_id: &str,
        usage: &Usage,
        read_only: bool,
        request: CallContext<'_>,
    ) -> Result<BTreeMap<String, String>, RpcError> {
        const RPC: &str = "ControllerPublishVolume";
        self.allow(RPC, "PUBLISH_UNPUBLISH_VOLUME", request)?;
        self.refuse_no_node(RPC, node_id)?;
        let message = v1::ControllerPublishVolumeRequest {
            volume_id: external_id.to_owned(),
            node_id: node_id.to_owned(),
            volume_capability: Some(self.capability(usage)),
            readonly: read_only && self.can("PUBLISH_READONLY"),
            secrets: sent(request.secrets),
            volume_context: usage.context.clone(),
        };
        let send = async |wire: Wire, message| wire.controller().controller_publish_volume(message).await;
        let answer = self.call(RPC, request, message, opaque(usage), send).await?;
        self.0.peer.warn_if_long("publish_context", map_bytes(&answer.publish_context), MAP_BYTES);
        self.0.taken(RPC, Class::Unknown, "publish_context", answer::maps([&answer.publish_context]))?;
        Ok(answer.publish_context)
    }

    /// Detach, with the secrets of the attach (CSI rule 33). NOT_FOUND is success.
    pub async fn unpublish(
        &self,
        external_id: &str,
        node_id: &str,
        request: CallContext<'_>,
    ) -> Result<(), RpcError> {
        const RPC: &str = "ControllerUnpublishVolume";
        self.allow(RPC, "PUBLISH_UNPUBLISH_VOLUME", request)?;
        self.refuse_no_node(RPC, node_id)?;
        let message = v1::ControllerUnpublishVolumeRequest {
            volume_id: external_id.to_owned(),
            node_id: node_id.to_owned(),
            secrets: sent(request.secrets),
        };
        let send = async |wire: Wire, message| wire.controller().controller_unpublish_volume(message).await;
        gone(self.call(RPC, request, message, [], send).await)
    }

    pub async fn create(&self, create: Create<'_>, request: CallContext<'_>) -> Result<Created, RpcError> {
        const RPC: &str = "CreateVolume";
        self.allow(RPC, "CREATE_DELETE_VOLUME", request)?;
        let source = match create.source {
            None => None,
            Some(Source::Snapshot(id)) => {
                self.allow(RPC, "CREATE_DELETE_SNAPSHOT", request)?;
                Some(ContentSource::Snapshot(SnapshotSource { snapshot_id: id.to_owned() }))
            }
            Some(Source::Volume(id)) => {
                self.allow(RPC, "CLONE_VOLUME", request)?;
                Some(ContentSource::Volume(VolumeSource { volume_id: id.to_owned() }))
            }
        };
        let places: Vec<_> = create
            .topologies
            .iter()
            .map(|segments| v1::Topology { segments: segments.clone() })
            .filter(|_| self.can("VOLUME_ACCESSIBILITY_CONSTRAINTS"))
            .collect();
        let places = (!places.is_empty())
            .then(|| v1::TopologyRequirement { requisite: places.clone(), preferred: places });
        let message = v1::CreateVolumeRequest {
            name: create.name.to_owned(),
            capacity_range: self.0.range(RPC, create.required, create.limit)?,
            volume_capabilities: create.usages.iter().map(|usage| self.capability(usage)).collect(),
            parameters: create.parameters.clone(),
            secrets: sent(request.secrets),
            volume_content_source: source
                .clone()
                .map(|source| v1::VolumeContentSource { r#type: Some(source) }),
            accessibility_requirements: places,
            mutable_parameters: BTreeMap::new(),
        };
        let words = create.parameters.values().chain(create.usages.iter().flat_map(opaque));
        let send = async |wire: Wire, message| wire.controller().create_volume(message).await;
        let volume = self.call(RPC, request, message, words, send).await?.volume.unwrap_or_default();
        let external_id = self.named(RPC, Class::Unknown, "volume_id", volume.volume_id)?;
        self.0.peer.warn_if_long("volume_context", map_bytes(&volume.volume_context), MAP_BYTES);
        self.0.taken(RPC, Class::Unknown, "volume_context", answer::maps([&volume.volume_context]))?;
        let capacity = self.0.size(RPC, Class::Unknown, "capacity_bytes", volume.capacity_bytes)?;
        let topologies: Vec<_> = volume.accessible_topology.into_iter().map(|place| place.segments).collect();
        self.0.taken(RPC, Class::Unknown, "accessible_topology", answer::maps(&topologies))?;
        Ok(Created {
            external_id,
            context: volume.volume_context,
            capacity: Some(capacity).filter(|bytes| *bytes > 0),
            topologies,
            from_source: source.is_none() || volume.content_source.and_then(|it| it.r#type) == source,
        })
    }

    /// NOT_FOUND is success.
    pub async fn delete(&self, external_id: &str, request: CallContext<'_>) -> Result<(), RpcError> {
        const RPC: &str = "DeleteVolume";
        self.allow(RPC, "CREATE_DELETE_VOLUME", request)?;
        let message =
            v1::DeleteVolumeRequest { volume_id: external_id.to_owned(), secrets: sent(request.secrets) };
        let send = async |wire: Wire, message| wire.controller().delete_volume(message).await;
        gone(self.call(RPC, request, message, [], send).await)
    }

    /// Returns the present capacity, if the plugin reports it, and whether the node has to expand the volume too. At least one bound is not 0 (CSI rule 14).
    pub async fn expand(
        &self,
        external_id: &str,
        required: u64,
        limit: u64,
        usage: &Usage,
        request: CallContext<'_>,
    ) -> Result<(Option<u64>, bool), RpcError> {
        const RPC: &str = "ControllerExpandVolume";
        self.allow(RPC, "EXPAND_VOLUME", request)?;
        let Some(range) = self.0.range(RPC, required, limit)? else {
            return Err(self.refuse(RPC, "neither a size nor a limit is given"));
        };
        let message = v1::ControllerExpandVolumeRequest {
            volume_id: external_id.to_owned(),
            capacity_range: Some(range),
            secrets: sent(request.secrets),
            volume_capability: Some(self.capability(usage)),
        };
        let send = async |wire: Wire, message| wire.controller().controller_expand_volume(message).await;
        let answer = self.call(RPC, request, message, opaque(usage), send).await?;
        let capacity = self.0.size(RPC, Class::Unknown, "capacity_bytes", answer.capacity_bytes)?;
        Ok((Some(capacity).filter(|bytes| *bytes > 0), answer.node_expansion_required))
    }

    /// Whether the plugin confirms that the volume can be used so; if not, its words.
    pub async fn validate(
        &self,
        external_id: &str,
        usages: &[Usage],
        parameters: &BTreeMap<String, String>,
        request: CallContext<'_>,
    ) -> Result<Result<(), String>, RpcError> {
        const RPC: &str = "ValidateVolumeCapabilities";
        self.0.may_read_secrets(RPC, request.uid, request.secrets)?;
        let asked = v1::ValidateVolumeCapabilitiesRequest {
            volume_id: external_id.to_owned(),
            // All usages of a volume have the same context.
            volume_context: usages.first().map(|usage| usage.context.clone()).unwrap_or_default(),
            volume_capabilities: usages.iter().map(|usage| self.capability(usage)).collect(),
            parameters: parameters.clone(),
            secrets: sent(request.secrets),
            mutable_parameters: BTreeMap::new(),
        };
        let words = || parameters.values().chain(usages.iter().flat_map(opaque));
        let send = async |wire: Wire, message| wire.controller().validate_volume_capabilities(message).await;
        let answer = self.call(RPC, request, asked.clone(), words(), send).await?;
        Ok(match answer.confirmed {
            Some(confirmed) => agrees(&asked, &confirmed),
            None if answer.message.is_empty() => Err("the plugin does not say why".to_owned()),
            None => Err(request.hidden(words()).and(&*self.1).clean(&answer.message)),
        })
    }

    /// Ask for a snapshot once; it is asked for again until it is ready (CSI rule 42).
    pub async fn snapshot(
        &self,
        external_id: &str,
        name: &str,
        parameters: &BTreeMap<String, String>,
        request: CallContext<'_>,
    ) -> Result<Snapshot, RpcError> {
        const RPC: &str = "CreateSnapshot";
        self.allow(RPC, "CREATE_DELETE_SNAPSHOT", request)?;
        let message = v1::CreateSnapshotRequest {
            source_volume_id: external_id.to_owned(),
            name: name.to_owned(),
            secrets: sent(request.secrets),
            parameters: parameters.clone(),
            accessibility_requirements: None,
        };
        let send = async |wire: Wire, message| wire.controller().create_snapshot(message).await;
        let answer = self.call(RPC, request, message, parameters.values(), send).await?;
        self.checked_snapshot(RPC, Class::Unknown, answer.snapshot)
    }

    /// NOT_FOUND is success.
    pub async fn delete_snapshot(&self, id: &str, request: CallContext<'_>) -> Result<(), RpcError> {
        const RPC: &str = "DeleteSnapshot";
        self.allow(RPC, "CREATE_DELETE_SNAPSHOT", request)?;
        let message =
            v1::DeleteSnapshotRequest { snapshot_id: id.to_owned(), secrets: sent(request.secrets) };
        let send = async |wire: Wire, message| wire.controller().delete_snapshot(message).await;
        gone(self.call(RPC, request, message, [], send).await)
    }

    /// Returns a page of snapshots, and the token of the next page. An empty `snapshot` or `external_id` stands for any. 0: the plugin
    /// chooses how many. After ABORTED the list begins again without a token (CSI rule 40).
    pub async fn snapshots(
        &self,
        snapshot: &str,
        external_id: &str,
        token: &str,
        max: u32,
        request: CallContext<'_>,
    ) -> Result<(Vec<Snapshot>, String), RpcError> {
        const RPC: &str = "ListSnapshots";
        self.allow(RPC, "LIST_SNAPSHOTS", request)?;
        let message = v1::ListSnapshotsRequest {
            max_entries: entries(max),
            starting_token: token.to_owned(),
            source_volume_id: external_id.to_owned(),
            snapshot_id: snapshot.to_owned(),
            secrets: sent(request.secrets),
        };
        let send = async |wire: Wire, message| wire.controller().list_snapshots(message).await;
        let answer = self.call(RPC, request, message, [], send).await?;
        let snapshots = answer
            .entries
            .into_iter()
            .map(|entry| self.checked_snapshot(RPC, Class::Refused, entry.snapshot));
        Ok((snapshots.collect::<Result<_, _>>()?, self.next(RPC, answer.next_token)?))
    }

    /// Returns the snapshot of this id. `None`: the plugin has none. Only an empty list proves that. A plugin that does not look for the id
    /// answers with other snapshots, and that is an error.
    pub async fn find_snapshot(
        &self,
        snapshot: &str,
        request: CallContext<'_>,
    ) -> Result<Option<Snapshot>, RpcError> {
        let (listed, next) = self.snapshots(snapshot, "", "", 1, request).await?;
        let is_empty = listed.is_empty() && next.is_empty();
        match listed.into_iter().find(|listed| listed.id == snapshot) {
            None if !is_empty => {
                let text = format!("it was asked for the snapshot {snapshot} alone, and it lists others");
                Err(self.0.breach("ListSnapshots", Class::Refused, &text))
            }
            found => Ok(found),
        }
    }

    /// Returns a page of volumes, as [`snapshots`](Controller::snapshots) does.
    pub async fn volumes(
        &self,
        token: &str,
        max: u32,
        request: CallContext<'_>,
    ) -> Result<(Vec<External>, String), RpcError> {
        const RPC: &str = "ListVolumes";
        self.allow(RPC, "LIST_VOLUMES", request)?;
        let message = v1::ListVolumesRequest { max_entries: entries(max), starting_token: token.to_owned() };
        let send = async |wire: Wire, message| wire.controller().list_volumes(message).await;
        let answer = self.call(RPC, request, message, [], send).await?;
        let external = |entry: v1::list_volumes_response::Entry| {
            let (volume, status) = (entry.volume.unwrap_or_default(), entry.status.unwrap_or_default());
            let reported = status.volume_condition.filter(|_| self.can("VOLUME_CONDITION"));
            let nodes = match self.can("LIST_VOLUMES_PUBLISHED_NODES") {
                true => status.published_node_ids,
                false => Vec::new(),
            };
            let named = |node| self.named(RPC, Class::Refused, "published_node_ids", node);
            Ok(External {
                external_id: self.named(RPC, Class::Refused, "volume_id", volume.volume_id)?,
                capacity: self.0.size(RPC, Class::Refused, "capacity_bytes", volume.capacity_bytes)?,
                published_node_ids: nodes.into_iter().map(named).collect::<Result<_, _>>()?,
                abnormal: condition(reported, &request.hidden([]).and(&*self.1)),
            })
        };
        let volumes = answer.entries.into_iter().map(external).collect::<Result<_, _>>()?;
        Ok((volumes, self.next(RPC, answer.next_token)?))
    }

    /// How many bytes volumes of these usages and parameters could have; `topology`: there, and only sent with
    /// VOLUME_ACCESSIBILITY_CONSTRAINTS.
    pub async fn capacity(
        &self,
        usages: &[Usage],
        parameters: &BTreeMap<String, String>,
        topology: &BTreeMap<String, String>,
        request: CallContext<'_>,
    ) -> Result<u64, RpcError> {
        const RPC: &str = "GetCapacity";
        self.allow(RPC, "GET_CAPACITY", request)?;
        let there = !topology.is_empty() && self.can("VOLUME_ACCESSIBILITY_CONSTRAINTS");
        let message = v1::GetCapacityRequest {
            volume_capabilities: usages.iter().map(|usage| self.capability(usage)).collect(),
            parameters: parameters.clone(),
            accessible_topology: there.then(|| v1::Topology { segments: topology.clone() }),
        };
        let words = parameters.values().chain(usages.iter().flat_map(opaque));
        let send = async |wire: Wire, message| wire.controller().get_capacity(message).await;
        let answer = self.call(RPC, request, message, words, send).await?;
        self.0.size(RPC, Class::Refused, "available_capacity", answer.available_capacity)
    }

    /// Refuses calls that the plugin does not offer, and secrets that its owner may not read.
    fn allow(
        &self,
        rpc: &'static str,
        capability: &'static str,
        request: CallContext<'_>,
    ) -> Result<(), RpcError> {
        self.0.gate(rpc, capability, self.can(capability))?;
        self.0.may_read_secrets(rpc, request.uid, request.secrets)
    }

    async fn call<'w, Q, R, F>(
        &self,
        rpc: &'static str,
        request: CallContext<'_>,
        message: Q,
        words: impl IntoIterator<Item = &'w String>,
        send: impl FnOnce(Wire, tonic::Request<Q>) -> F,
    ) -> Result<R, RpcError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        // A call that waits for its turn counts as load, so the next call goes to another instance.
        let _busy = self.0.load.begin();
        let _turn = self.0.turn(rpc, request.patience).await?;
        let deadline = Instant::now() + request.patience;
        self.0.peer.call(rpc, deadline, message, || request.hidden(words).and(&*self.1), send).await
    }

    fn capability(&self, usage: &Usage) -> v1::VolumeCapability {
        capability(usage, &self.0.print.controller)
    }

    /// An id that an answer must have.
    fn named(&self, rpc: &'static str, class: Class, field: &str, id: String) -> Result<String, RpcError> {
        self.0.peer.warn_if_long(field, id.len(), STRING_BYTES);
        self.0.taken(rpc, class, field, answer::id(&id)).map(|()| id)
    }

    /// The token of a list's next page.
    fn next(&self, rpc: &'static str, token: String) -> Result<String, RpcError> {
        self.0.peer.warn_if_long("next_token", token.len(), STRING_BYTES);
        self.0.taken(rpc, Class::Refused, "next_token", answer::token(&token)).map(|()| token)
    }

    fn checked_snapshot(
        &self,
        rpc: &'static str,
        class: Class,
        snapshot: Option<v1::Snapshot>,
    ) -> Result<Snapshot, RpcError> {
        let snapshot = snapshot.unwrap_or_default();
        let usec = match snapshot.creation_time {
            None => Some(0),
            Some(time) => u64::try_from(time.seconds).ok().and_then(|seconds| {
                seconds.checked_mul(1_000_000)?.checked_add_signed((time.nanos / 1000).into())
            }),
        };
        Ok(Snapshot {
            id: self.named(rpc, class, "snapshot_id", snapshot.snapshot_id)?,
            external_id: self.named(rpc, class, "source_volume_id", snapshot.source_volume_id)?,
            size: self.0.size(rpc, class, "size_bytes", snapshot.size_bytes)?,
            created_usec: usec
                .ok_or_else(|| self.0.breach(rpc, class, "creation_time is no time since 1970"))?,
            ready: snapshot.ready_to_use,
        })
    }

    /// To CSI no node id means every node.
    fn refuse_no_node(&self, rpc: &'static str, node_id: &str) -> Result<(), RpcError> {
        match node_id {
            "" => Err(self.refuse(rpc, "the node id is empty")),
            _ => Ok(()),
        }
    }

    fn refuse(&self, rpc: &'static str, why: &str) -> RpcError {
        let message = format!("{why}, so the plugin was not asked");
        self.0.peer.error(rpc, Code::InvalidArgument, message, Class::Refused)
    }
}

impl CallContext<'_> {
    fn hidden<'w>(self, words: impl IntoIterator<Item = &'w String>) -> Hidden {
        Hidden::of(self.secrets, self.secrets_forgotten).and(words)
    }
}

/// An older plugin may call valid what it has not understood, so that what it confirms is compared with what it was asked
/// (CSI rule 35). It may leave out the context and the parameters.
fn agrees(
    asked: &v1::ValidateVolumeCapabilitiesRequest,
    confirmed: &v1::validate_volume_capabilities_response::Confirmed,
) -> Result<(), String> {
    let other = |what: &str| Err(format!("the plugin confirms {what} than it was asked about"));
    let same = |confirmed: &BTreeMap<_, _>, asked| confirmed.is_empty() || confirmed == asked;
    if !asked.volume_capabilities.iter().all(|asked| confirmed.volume_capabilities.contains(asked)) {
        return other("other or fewer capabilities");
    }
    if !same(&confirmed.volume_context, &asked.volume_context) {
        return other("another context");
    }
    if !same(&confirmed.parameters, &asked.parameters) {
        return other("other parameters");
    }
    Ok(())
}

fn entries(max: u32) -> i32 {
    i32::try_from(max).unwrap_or(i32::MAX)
}
