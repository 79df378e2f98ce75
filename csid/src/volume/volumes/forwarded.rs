//! Calls to a controller that a server of the cluster sends to this host. csid keeps nothing of them: the servers have the volume's record,
//! repeat what has to be repeated, and say what is due next.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result, Step};
use crate::fault;
use crate::plugin::{
    CallContext, Controller, Create, Created, External, RpcError, RpcKind, Snapshot, Source,
};
use crate::secret::Secrets;
use crate::store::registry::VolumeName;
use crate::store::rows::Usage;
use crate::volume::control::claim_effects::failed;
use crate::volume::errors::volume::VolumeError;
use crate::volume::manager::Volumes;
use crate::volume::model::claim::ClaimOutcome;

/// How long a call waits for a healthy controller.
const CONTROLLER: Duration = Duration::from_secs(5);

/// A call to a plugin's controller, for a volume that another host may have, or for a plugin.
pub struct ForwardedCall {
    pub name: VolumeName,
    pub plugin: String,
    /// The plugin's ID of the volume, or the name of a volume that is created.
    pub external_id: String,
    /// `None`: the call has no secrets.
    pub credential: Option<String>,
    /// Values that the plugin had in other calls for the volume. No message may repeat them.
    pub hide: Vec<String>,
    /// Whether there are more such values than are known here. No message of the plugin is shown.
    pub is_silent: bool,
    pub rpc: ForwardedRpc,
    /// How long the plugin has for its answer.
    pub deadline: Duration,
}

pub enum ForwardedRpc {
    /// ControllerPublishVolume. `node_id`: the plugin's name of the node that is attached.
    Publish { node_id: String, usage: Box<Usage>, read_only: bool },
    /// ControllerUnpublishVolume.
    Unpublish { node_id: String },
    /// CreateVolume.
    Create(Box<ForwardedCreation>),
    /// DeleteVolume.
    Delete,
    /// ControllerExpandVolume. `in_use`: a host has claimed the volume.
    Expand { required: u64, limit: u64, usage: Box<Usage>, in_use: bool },
    /// CreateSnapshot, by its name at the plugin.
    Snapshot { name: String, parameters: BTreeMap<String, String> },
    /// DeleteSnapshot, by the plugin's ID.
    DeleteSnapshot { snapshot: String },
    /// ValidateVolumeCapabilities.
    Validate { usages: Vec<Usage>, parameters: BTreeMap<String, String> },
    /// ListVolumes, of no volume in particular.
    Volumes(ForwardedPage),
    /// ListSnapshots.
    Snapshots(ForwardedPage),
    /// GetCapacity.
    Capacity { usages: Vec<Usage>, parameters: BTreeMap<String, String>, topology: BTreeMap<String, String> },
}

/// A page of a list. Empty IDs stand for any.
pub struct ForwardedPage {
    pub token: String,
    /// 0: the plugin chooses.
    pub max: u32,
    pub snapshot: String,
    pub external_id: String,
}

/// A volume that another host wants, as CreateVolume has it.
pub struct ForwardedCreation {
    pub capacity_min: u64,
    /// 0: no limit.
    pub capacity_max: u64,
    pub usages: Vec<Usage>,
    pub parameters: BTreeMap<String, String>,
    pub topologies: Vec<BTreeMap<String, String>>,
    /// `None`: the volume is empty.
    pub source: Option<ForwardedSource>,
}

/// The source of a new volume, by the plugin's ID.
pub enum ForwardedSource {
    Snapshot(String),
    Volume(String),
}

impl ForwardedSource {
    fn of_call(&self) -> Source<'_> {
        match self {
            ForwardedSource::Snapshot(id) => Source::Snapshot(id),
            ForwardedSource::Volume(id) => Source::Volume(id),
        }
    }
}

/// What the plugin has answered.
pub enum ForwardedAnswer {
    /// The publish context.
    Attached(BTreeMap<String, String>),
    Created(Created),
    /// The capacity, and whether a node has to expand the volume, too. `None`: the plugin does not report it.
    Expanded(Option<u64>, bool),
    Snapshot(Snapshot),
    /// The inner error is the plugin's reason.
    Validated(Result<(), String>),
    /// The page, and the token of the next one. Empty: there is none.
    Volumes(Vec<External>, String),
    Snapshots(Vec<Snapshot>, String),
    /// Bytes.
    Available(u64),
    /// The volume is detached or deleted.
    Done,
}

impl ForwardedRpc {
    /// Returns the step of an operation that the call is. `None`: it is about no volume.
    fn step(&self) -> Option<Step> {
        Some(match self {
            ForwardedRpc::Publish { .. } => Step::Attach,
            ForwardedRpc::Unpublish { .. } => Step::Detach,
            ForwardedRpc::Create(_) => Step::Create,
            ForwardedRpc::Delete => Step::Delete,
            ForwardedRpc::Expand { .. } => Step::Expand,
            ForwardedRpc::Snapshot { .. } | ForwardedRpc::DeleteSnapshot { .. } => Step::Snapshot,
            ForwardedRpc::Validate { .. } => Step::Validate,
            ForwardedRpc::Volumes(_) | ForwardedRpc::Snapshots(_) | ForwardedRpc::Capacity { .. } => {
                return None;
            }
        })
    }

    /// Returns the name of the RPC.
    fn name(&self) -> &'static str {
        match self {
            ForwardedRpc::Publish { .. } => "ControllerPublishVolume",
            ForwardedRpc::Unpublish { .. } => "ControllerUnpublishVolume",
            ForwardedRpc::Create(_) => "CreateVolume",
            ForwardedRpc::Delete => "DeleteVolume",
            ForwardedRpc::Expand { .. } => "ControllerExpandVolume",
            ForwardedRpc::Snapshot { .. } => "CreateSnapshot",
            ForwardedRpc::DeleteSnapshot { .. } => "DeleteSnapshot",
            ForwardedRpc::Validate { .. } => "ValidateVolumeCapabilities",
            ForwardedRpc::Volumes(_) => "ListVolumes",
            ForwardedRpc::Snapshots(_) => "ListSnapshots",
            ForwardedRpc::Capacity { .. } => "GetCapacity",
        }
    }

    fn kind(&self) -> RpcKind {
        match self {
            ForwardedRpc::Publish { .. } => RpcKind::Attach,
            ForwardedRpc::Unpublish { .. } => RpcKind::Detach,
            _ => RpcKind::Controller,
        }
    }

    /// Returns the capability without which a change of a volume or snapshot is not asked for. `None`: the call is no such change.
    fn needed(&self) -> Option<&'static str> {
        match self {
            ForwardedRpc::Create(_) | ForwardedRpc::Delete => Some("CREATE_DELETE_VOLUME"),
            ForwardedRpc::Expand { .. } => Some("EXPAND_VOLUME"),
            ForwardedRpc::Snapshot { .. } | ForwardedRpc::DeleteSnapshot { .. } => {
                Some("CREATE_DELETE_SNAPSHOT")
            }
            _ => None,
        }
    }

    /// Refuses what the plugin does not offer.
    fn refuse_unoffered(&self, plugin: &str, controller: &Controller) -> Result<()> {
        match self.needed().filter(|capability| !controller.can(capability)) {
            Some(capability) => Err(VolumeError::NotOffered { plugin: plugin.to_owned(), capability }.into()),
            None => Ok(()),
        }
    }

    /// Refuses an expansion of a volume that must not be in use meanwhile (CSI rule 26).
    fn refuse_in_use(&self, controller: &Controller) -> Result<()> {
        let is_offline = controller.can("OFFLINE") && !controller.can("ONLINE");
        match self {
            ForwardedRpc::Expand { in_use: true, .. } if is_offline => {
                let text = "the plugin expands volumes OFFLINE alone, and the volume is claimed or attached";
                Err(Error::new(Kind::Busy, text))
            }
            _ => Ok(()),
        }
    }

    /// Calls the plugin.
    async fn call(
        &self,
        controller: &Controller,
        external_id: &str,
        context: CallContext<'_>,
    ) -> Result<ForwardedAnswer, RpcError> {
        match self {
            ForwardedRpc::Publish { node_id, usage, read_only } => {
                let publish = controller.publish(external_id, node_id, usage, *read_only, context);
                let published = fault::around("ControllerPublishVolume", publish).await;
                published.map(ForwardedAnswer::Attached)
            }
            ForwardedRpc::Unpublish { node_id } => {
                let unpublish = controller.unpublish(external_id, node_id, context);
                let done = fault::around("ControllerUnpublishVolume", unpublish).await;
                done.map(|()| ForwardedAnswer::Done)
            }
            ForwardedRpc::Create(creation) => {
                let create = Create {
                    name: external_id,
                    required: creation.capacity_min,
                    limit: creation.capacity_max,
                    usages: &creation.usages,
                    parameters: &creation.parameters,
                    source: creation.source.as_ref().map(ForwardedSource::of_call),
                    topologies: &creation.topologies,
                };
                let created = fault::around("CreateVolume", controller.create(create, context)).await;
                created.map(ForwardedAnswer::Created)
            }
            ForwardedRpc::Delete => {
                let done = fault::around("DeleteVolume", controller.delete(external_id, context)).await;
                done.map(|()| ForwardedAnswer::Done)
            }
            ForwardedRpc::Expand { required, limit, usage, .. } => {
                let expand = controller.expand(external_id, *required, *limit, usage, context);
                let expanded = fault::around("ControllerExpandVolume", expand).await;
                expanded.map(|(capacity, of_node)| ForwardedAnswer::Expanded(capacity, of_node))
            }
            ForwardedRpc::Snapshot { name, parameters } => {
                let made = controller.snapshot(external_id, name, parameters, context);
                fault::around("CreateSnapshot", made).await.map(ForwardedAnswer::Snapshot)
            }
            ForwardedRpc::DeleteSnapshot { snapshot } => {
                let done = fault::around("DeleteSnapshot", controller.delete_snapshot(snapshot, context));
                done.await.map(|()| ForwardedAnswer::Done)
            }
            ForwardedRpc::Validate { usages, parameters } => {
                let validated = controller.validate(external_id, usages, parameters, context).await;
                validated.map(ForwardedAnswer::Validated)
            }
            ForwardedRpc::Volumes(page) => {
                let listed = controller.volumes(&page.token, page.max, context).await;
                listed.map(|(volumes, next)| ForwardedAnswer::Volumes(volumes, next))
            }
            ForwardedRpc::Snapshots(ForwardedPage { token, max, snapshot, external_id }) => {
                let listed = controller.snapshots(snapshot, external_id, token, *max, context).await;
                listed.map(|(snapshots, next)| ForwardedAnswer::Snapshots(snapshots, next))
            }
            ForwardedRpc::Capacity { usages, parameters, topology } => {
                let available = controller.capacity(usages, parameters, topology, context).await;
                available.map(ForwardedAnswer::Available)
            }
        }
    }
}

/// A call that failed, with its outcome for the claim or volume.
pub struct ForwardedFailure {
    pub outcome: ClaimOutcome,
    pub error: Error,
}

impl Volumes {
    /// Makes a call to this host's controller.
    pub async fn call_controller(&self, call: ForwardedCall) -> Result<ForwardedAnswer, ForwardedFailure> {
        let step = call.rpc.step();
        let answered = tokio::time::timeout(call.deadline, self.try_call_controller(&call)).await;
        let answered = answered.unwrap_or_else(|_| {
            let text = format!("plugin {} did not answer within {:?}", call.plugin, call.deadline);
            Err(ForwardedFailure { outcome: ClaimOutcome::Unknown, error: Error::new(Kind::TimedOut, text) })
        });
        answered.map_err(|ForwardedFailure { mut outcome, mut error }| {
            if call.is_silent && is_plugins(&outcome) {
                error.message = "the plugin's message is withheld, for it may repeat a context".to_owned();
                if let ClaimOutcome::Hopeless(message) = &mut outcome {
                    message.clone_from(&error.message);
                }
            }
            tracing::warn!(volume = %call.name, plugin = call.plugin, step = step.map(Step::name), %error,
                "a controller call of the cluster failed");
            ForwardedFailure { outcome, error: error.with(|details| details.step = step) }
        })
    }

    async fn try_call_controller(&self, call: &ForwardedCall) -> Result<ForwardedAnswer, ForwardedFailure> {
        let ForwardedCall { plugin, external_id, .. } = call;
        let controller =
            self.shared.plugins.roots_controller(plugin, call.rpc.name(), Instant::now() + CONTROLLER).await;
        let controller = controller
            .map_err(|error| ForwardedFailure { outcome: ClaimOutcome::NotSent(None), error })?
            .hiding(call.hide.clone());
        let withheld = |error: Error| {
            let outcome = ClaimOutcome::NotSent(Some(error.message.clone()));
            ForwardedFailure { outcome, error }
        };
        call.rpc.refuse_unoffered(plugin, &controller).map_err(withheld)?;
        call.rpc.refuse_in_use(&controller).map_err(withheld)?;
        let secrets = self.secrets_of(call).await.map_err(withheld)?;
        // The plugin may repeat what an earlier call brought, or a mount here. Only a call's own secrets can be cut out of its message.
        let had_secrets = controller.had_secrets(|| self.shared.may_have_sent_secrets(plugin)).await;
        let secrets_forgotten = had_secrets.unwrap_or_else(|error| {
            // The call itself needs no row.
            tracing::warn!(plugin, %error, "csid does not know whether the plugin had secrets, and withholds its message");
            true
        });
        // A uid of another host is none of this one's. Volumes of the servers are root's here.
        let context =
            CallContext { uid: 0, secrets: secrets.as_ref(), secrets_forgotten, patience: call.deadline };
        if let ForwardedRpc::DeleteSnapshot { snapshot } = &call.rpc
            && !has_snapshot(&controller, snapshot, external_id, context).await?
        {
            return Ok(ForwardedAnswer::Done);
        }
        match call.rpc.call(&controller, external_id, context).await {
            Ok(ForwardedAnswer::Validated(Err(_))) if call.is_silent => {
                let why = "the plugin's message is withheld, for it may repeat a context".to_owned();
                Ok(ForwardedAnswer::Validated(Err(why)))
            }
            Ok(answer) => Ok(answer),
            Err(error) => {
                let failure = failed(error, call.rpc.kind());
                if failure.unimplemented {
                    let deadline = Some(Instant::now() + CONTROLLER);
                    if let Err(error) = self.shared.plugins.probe(plugin, deadline).await {
                        tracing::warn!(plugin, %error, "the plugin does not say what it can do");
                    }
                }
                Err(ForwardedFailure { outcome: failure.outcome, error: failure.error })
            }
        }
    }

    async fn secrets_of(&self, call: &ForwardedCall) -> Result<Option<Secrets>> {
        match &call.credential {
            Some(name) => self.shared.credential(name).await.map(Some),
            None => Ok(None),
        }
    }
}

/// Returns whether the plugin has a snapshot of a volume. Refuses one of another volume: the servers have asked another host which volume it
/// is of, and that host may lie.
async fn has_snapshot(
    controller: &Controller,
    snapshot: &str,
    external_id: &str,
    context: CallContext<'_>,
) -> Result<bool, ForwardedFailure> {
    let found = controller.find_snapshot(snapshot, context).await.map_err(|error| {
        let failure = failed(error, RpcKind::Controller);
        // A list without an answer has changed nothing.
        let outcome = match failure.outcome {
            ClaimOutcome::Unknown => ClaimOutcome::Again,
            outcome => outcome,
        };
        ForwardedFailure { outcome, error: failure.error }
    })?;
    let Some(found) = found else { return Ok(false) };
    if found.external_id == external_id {
        return Ok(true);
    }
    let text = format!("snapshot {snapshot} is not of the volume {external_id}, of which it was said to be");
    let outcome = ClaimOutcome::Hopeless(text.clone());
    Err(ForwardedFailure { outcome, error: Error::new(Kind::NotAuthorized, text) })
}

/// Returns whether a failed call may have a message of the plugin.
fn is_plugins(outcome: &ClaimOutcome) -> bool {
    !matches!(outcome, ClaimOutcome::NotSent(_))
}
