//! A healthy plugin as `volume` sees it: what its node service can do, the four calls of a mount, and those of what is
//! mounted. One call is one RPC; paths are given as the plugin sees them (CSI rule 30).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use csi_proto::csi::v1;
use csi_proto::csi::v1::volume_usage::Unit;
use tonic::{Response, Status};

use crate::host::part_below;
use crate::plugin::instance::{Hand, Instance, capability, condition, gone, opaque};
use crate::plugin::rpc::{Hidden, RpcError, sent};
use crate::plugin::rpc_outcome::Class;
use crate::plugin::wire::Wire;
use crate::secret::Secrets;
use crate::store::rows::Usage;

/// A plugin that was healthy when it was asked for: a snapshot, cheap to clone. Its calls fail with
/// [`Class::NotSent`](super::Class::NotSent) when the plugin is gone since. An instance that another one replaces is not stopped
/// before what was given out of it is dropped.
#[derive(Clone)]
pub struct Ready(pub(super) Arc<Instance>, pub(super) Option<Hand>);

/// The arguments that the RPCs of a mount have in common. The caller's frame owns the secrets.
pub struct NodeCall<'a> {
    pub external_id: &'a str,
    /// The staging path on the host. `None`: the volume has none.
    pub staging: Option<&'a str>,
    /// The published path on the host.
    pub target: &'a str,
    pub usage: &'a Usage,
    pub read_only: bool,
    /// The uid of the mount's owner, and so of its secrets.
    pub uid: u32,
    pub secrets: Option<&'a Secrets>,
    /// The volume is or was used with secrets that are not at hand: a removal needs none, and others have their own.
    pub secrets_forgotten: bool,
    /// How long it waits for its turn at the plugin, and from then on for the answer, which the RPC's own deadline bounds, too.
    pub patience: Duration,
    /// Set when the call has its turn: from then on the plugin may have been asked.
    pub asked: Option<&'a AtomicBool>,
}

/// How a published volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    pub usage: Vec<Measure>,
    /// Whether the plugin calls it abnormal, and its words; only of plugins with VOLUME_CONDITION.
    pub abnormal: Option<(bool, String)>,
}

/// A measure of a published volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measure {
    /// `BYTES` or `INODES`.
    pub unit: &'static str,
    pub available: u64,
    pub total: u64,
    pub used: u64,
}

impl Ready {
    pub fn id(&self) -> &str {
        &self.0.peer.id
    }

    /// The uid that registered the plugin.
    pub fn owner(&self) -> u32 {
        self.0.owner
    }

    /// A NodeServiceCapability by CSI's name for it.
    pub fn can(&self, capability: &str) -> bool {
        self.0.print.node.contains(&capability)
    }

    pub fn stages(&self) -> bool {
        self.can("STAGE_UNSTAGE_VOLUME")
    }

    pub fn single_node_multi_writer(&self) -> bool {
        self.can("SINGLE_NODE_MULTI_WRITER")
    }

    pub fn mount_group(&self) -> bool {
        self.can("VOLUME_MOUNT_GROUP")
    }

    /// This node as the plugin calls it, verbatim (CSI rule 27); empty where it gives none.
    pub fn node_id(&self) -> &str {
        &self.0.print.identity.node_id
    }

    /// How many volumes may be attached to this node; 0: no limit given (CSI rule 38).
    pub fn max_volumes(&self) -> i64 {
        self.0.print.identity.max_volumes
    }

    /// Returns the topology of this node.
    pub fn topology(&self) -> &BTreeMap<String, String> {
        &self.0.print.identity.topology
    }

    /// The host directory below which this plugin's staging and published paths are made.
    pub fn host_root(&self) -> &Path {
        &self.0.root
    }

    pub async fn stage(&self, call: NodeCall<'_>) -> Result<(), RpcError> {
        self.0.may_read_secrets("NodeStageVolume", call.uid, call.secrets)?;
        let request = v1::NodeStageVolumeRequest {
            volume_id: call.external_id.to_owned(),
            publish_context: call.usage.publish_context.clone(),
            staging_target_path: self.staging(&call),
            volume_capability: Some(capability(call.usage, &self.0.print.node)),
            secrets: sent(call.secrets),
            volume_context: call.usage.context.clone(),
        };
        let send = async |wire: Wire, request| wire.node().node_stage_volume(request).await;
        self.call("NodeStageVolume", &call, request, send).await.map(drop)
    }

    pub async fn publish(&self, call: NodeCall<'_>) -> Result<(), RpcError> {
        self.0.may_read_secrets("NodePublishVolume", call.uid, call.secrets)?;
        let request = v1::NodePublishVolumeRequest {
            volume_id: call.external_id.to_owned(),
            publish_context: call.usage.publish_context.clone(),
            staging_target_path: self.staged(&call),
            target_path: self.seen(call.target),
            volume_capability: Some(capability(call.usage, &self.0.print.node)),
            readonly: call.read_only,
            secrets: sent(call.secrets),
            volume_context: call.usage.context.clone(),
        };
        let send = async |wire: Wire, request| wire.node().node_publish_volume(request).await;
        self.call("NodePublishVolume", &call, request, send).await.map(drop)
    }

    /// NOT_FOUND is success: there is nothing left to take away (CSI rule 36).
    pub async fn unpublish(&self, call: NodeCall<'_>) -> Result<(), RpcError> {
        let request = v1::NodeUnpublishVolumeRequest {
            volume_id: call.external_id.to_owned(),
            target_path: self.seen(call.target),
        };
        let send = async |wire: Wire, request| wire.node().node_unpublish_volume(request).await;
        gone(self.call("NodeUnpublishVolume", &call, request, send).await)
    }

    /// NOT_FOUND is success, as in [`unpublish`](Ready::unpublish).
    pub async fn unstage(&self, call: NodeCall<'_>) -> Result<(), RpcError> {
        let request = v1::NodeUnstageVolumeRequest {
            volume_id: call.external_id.to_owned(),
            staging_target_path: self.staging(&call),
        };
        let send = async |wire: Wire, request| wire.node().node_unstage_volume(request).await;
        gone(self.call("NodeUnstageVolume", &call, request, send).await)
    }

    /// Grows the file system of an expanded volume. Returns its present capacity, if the plugin reports it. `call.target` may be the
    /// staging path of a volume that is not published.
    pub async fn expand(
        &self,
        call: NodeCall<'_>,
        required: u64,
        limit: u64,
    ) -> Result<Option<u64>, RpcError> {
        const RPC: &str = "NodeExpandVolume";
        self.0.gate(RPC, "EXPAND_VOLUME", self.can("EXPAND_VOLUME"))?;
        self.0.may_read_secrets(RPC, call.uid, call.secrets)?;
        let request = v1::NodeExpandVolumeRequest {
            volume_id: call.external_id.to_owned(),
            volume_path: self.seen(call.target),
            capacity_range: self.0.range(RPC, required, limit)?,
            staging_target_path: self.staged(&call),
            volume_capability: Some(capability(call.usage, &self.0.print.node)),
            secrets: sent(call.secrets),
        };
        let send = async |wire: Wire, request| wire.node().node_expand_volume(request).await;
        let answer = self.call(RPC, &call, request, send).await?;
        let capacity = self.0.size(RPC, Class::Unknown, "capacity_bytes", answer.capacity_bytes)?;
        Ok(Some(capacity).filter(|bytes| *bytes > 0))
    }

    /// How full a published volume is, and how it is.
    pub async fn stats(&self, call: NodeCall<'_>) -> Result<Stats, RpcError> {
        const RPC: &str = "NodeGetVolumeStats";
        self.0.gate(RPC, "GET_VOLUME_STATS", self.can("GET_VOLUME_STATS"))?;
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: call.external_id.to_owned(),
            volume_path: self.seen(call.target),
            staging_target_path: self.staged(&call),
        };
        let send = async |wire: Wire, request| wire.node().node_get_volume_stats(request).await;
        let answer = self.call(RPC, &call, request, send).await?;
        let size = |field, size| self.0.size(RPC, Class::Refused, field, size);
        let mut usage = Vec::new();
        for measure in answer.usage {
            // As with capabilities: a number that csid does not know is left out.
            let Ok(unit @ (Unit::Bytes | Unit::Inodes)) = Unit::try_from(measure.unit) else { continue };
            usage.push(Measure {
                unit: unit.as_str_name(),
                available: size("available", measure.available)?,
                total: size("total", measure.total)?,
                used: size("used", measure.used)?,
            });
        }
        let reported = answer.volume_condition.filter(|_| self.can("VOLUME_CONDITION"));
        Ok(Stats { usage, abnormal: condition(reported, &hidden(&call)) })
    }

    /// Waits for a turn, which ends with the call; the call's time counts from the turn.
    async fn call<Q, R, F>(
        &self,
        rpc: &'static str,
        call: &NodeCall<'_>,
        request: Q,
        send: impl FnOnce(Wire, tonic::Request<Q>) -> F,
    ) -> Result<R, RpcError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let _turn = self.0.turn(rpc, call.patience).await?;
        if let Some(asked) = call.asked {
            asked.store(true, Ordering::Relaxed);
        }
        let deadline = Instant::now() + call.patience;
        self.0.peer.call(rpc, deadline, request, || hidden(call), send).await
    }

    /// The staging path as the plugin sees it, if it stages (CSI rule 33).
    fn staged(&self, call: &NodeCall<'_>) -> String {
        if self.stages() { self.staging(call) } else { String::new() }
    }

    /// The staging path as the plugin sees it. Empty: the volume has none.
    fn staging(&self, call: &NodeCall<'_>) -> String {
        call.staging.map(|path| self.seen(path)).unwrap_or_default()
    }

    /// A host path in the plugin's own file-system. One outside its root was journalled under another spec,
    /// and then the plugin saw it as it is.
    fn seen(&self, path: &str) -> String {
        match part_below(Path::new(path), &self.0.root) {
            Some(rest) => self.0.view.join(rest).to_string_lossy().into_owned(),
            None => path.to_owned(),
        }
    }
}

fn hidden(call: &NodeCall<'_>) -> Hidden {
    Hidden::of(call.secrets, call.secrets_forgotten).and(opaque(call.usage))
}
