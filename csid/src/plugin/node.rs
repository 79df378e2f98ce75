//! A healthy plugin as `volume` sees it: what it can do, and the four node calls of a mount. One call is one
//! RPC; paths are given as the plugin sees them (CSI rule 30).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use csi_proto::csi::v1;
use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::volume_capability::{
    AccessMode as Mode, AccessType, BlockVolume, MountVolume, access_mode,
};
use tonic::Code;

use super::Service;
use super::rpc::{Class, Hidden, Peer, RpcError};
use crate::secret::Secrets;
use crate::store::rows::{AccessMode, AttachmentMode, Usage};

/// A plugin that was healthy when it was asked for: a snapshot, cheap to clone. Its calls fail with
/// [`Class::NotSent`](super::Class::NotSent) when the plugin is gone since.
#[derive(Clone)]
pub struct Ready(Arc<Inner>);

struct Inner {
    peer: Peer,
    owner: u32,
    abilities: Abilities,
    root: PathBuf,
    view: PathBuf,
}

/// What the fingerprint found that matters to a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    pub node: bool,
    pub controller: bool,
    pub stages: bool,
    pub single_node_multi_writer: bool,
    pub mount_group: bool,
}

/// One node call: what the RPCs of a mount have in common. Secrets live in the caller's frame.
pub struct Call<'a> {
    pub external_id: &'a str,
    /// The staging path on the host.
    pub staging: &'a str,
    /// The published path on the host.
    pub target: &'a str,
    pub usage: &'a Usage,
    pub read_only: bool,
    /// Whose mount it is, and so whose secrets.
    pub uid: u32,
    pub secrets: Option<&'a Secrets>,
    /// The volume is or was used with secrets that are not at hand: a removal needs none, and others have their own.
    pub secrets_forgotten: bool,
    pub deadline: Instant,
}

impl Ready {
    pub(super) fn new(peer: Peer, owner: u32, abilities: Abilities, root: PathBuf, view: PathBuf) -> Self {
        Ready(Arc::new(Inner { peer, owner, abilities, root, view }))
    }

    pub(super) fn offers(&self, service: Service) -> bool {
        match service {
            Service::Node => self.0.abilities.node,
            Service::Controller => self.0.abilities.controller,
        }
    }

    pub fn id(&self) -> &str {
        &self.0.peer.id
    }

    /// Who registered the plugin.
    pub fn owner(&self) -> u32 {
        self.0.owner
    }

    /// STAGE_UNSTAGE_VOLUME.
    pub fn stages(&self) -> bool {
        self.0.abilities.stages
    }

    /// SINGLE_NODE_MULTI_WRITER.
    pub fn single_node_multi_writer(&self) -> bool {
        self.0.abilities.single_node_multi_writer
    }

    /// VOLUME_MOUNT_GROUP.
    pub fn mount_group(&self) -> bool {
        self.0.abilities.mount_group
    }

    /// The host directory below which this plugin's staging and published paths are made.
    pub fn host_root(&self) -> &Path {
        &self.0.root
    }

    pub async fn stage(&self, call: Call<'_>) -> Result<(), RpcError> {
        self.may_read_secrets("NodeStageVolume", &call)?;
        let request = v1::NodeStageVolumeRequest {
            volume_id: call.external_id.to_owned(),
            publish_context: call.usage.publish_context.clone(),
            staging_target_path: self.seen(call.staging),
            volume_capability: Some(self.capability(call.usage)),
            secrets: secrets(&call),
            volume_context: call.usage.context.clone(),
        };
        let send = async |channel, request| NodeClient::new(channel).node_stage_volume(request).await;
        self.0.peer.call("NodeStageVolume", call.deadline, request, || hidden(&call), send).await.map(drop)
    }

    pub async fn publish(&self, call: Call<'_>) -> Result<(), RpcError> {
        self.may_read_secrets("NodePublishVolume", &call)?;
        let request = v1::NodePublishVolumeRequest {
            volume_id: call.external_id.to_owned(),
            publish_context: call.usage.publish_context.clone(),
            staging_target_path: if self.stages() { self.seen(call.staging) } else { String::new() },
            target_path: self.seen(call.target),
            volume_capability: Some(self.capability(call.usage)),
            readonly: call.read_only,
            secrets: secrets(&call),
            volume_context: call.usage.context.clone(),
        };
        let send = async |channel, request| NodeClient::new(channel).node_publish_volume(request).await;
        self.0.peer.call("NodePublishVolume", call.deadline, request, || hidden(&call), send).await.map(drop)
    }

    /// NOT_FOUND is success: there is nothing left to take away (CSI rule 36).
    pub async fn unpublish(&self, call: Call<'_>) -> Result<(), RpcError> {
        let request = v1::NodeUnpublishVolumeRequest {
            volume_id: call.external_id.to_owned(),
            target_path: self.seen(call.target),
        };
        let send = async |channel, request| NodeClient::new(channel).node_unpublish_volume(request).await;
        gone(self.0.peer.call("NodeUnpublishVolume", call.deadline, request, || hidden(&call), send).await)
    }

    /// NOT_FOUND is success, as in [`unpublish`](Ready::unpublish).
    pub async fn unstage(&self, call: Call<'_>) -> Result<(), RpcError> {
        let request = v1::NodeUnstageVolumeRequest {
            volume_id: call.external_id.to_owned(),
            staging_target_path: self.seen(call.staging),
        };
        let send = async |channel, request| NodeClient::new(channel).node_unstage_volume(request).await;
        gone(self.0.peer.call("NodeUnstageVolume", call.deadline, request, || hidden(&call), send).await)
    }

    /// The plugin's owner reads what it is sent: a secret goes to root's plugins and to those of its own user.
    fn may_read_secrets(&self, rpc: &'static str, call: &Call<'_>) -> Result<(), RpcError> {
        let (owner, uid) = (self.owner(), call.uid);
        if call.secrets.is_none() || owner == 0 || owner == uid {
            return Ok(());
        }
        let message = format!(
            "the plugin belongs to uid {owner}, so it is sent no secrets of uid {uid}; mount without secrets, or \
             have root register the plugin"
        );
        let plugin = self.0.peer.id.clone();
        Err(RpcError { plugin, rpc, code: Code::PermissionDenied, message, class: Class::Forbidden })
    }

    /// A host path in the plugin's own file-system. One outside its root was journalled under another spec,
    /// and then the plugin saw it as it is.
    fn seen(&self, path: &str) -> String {
        match Path::new(path).strip_prefix(&self.0.root) {
            Ok(rest) => self.0.view.join(rest).to_string_lossy().into_owned(),
            Err(_) => path.to_owned(),
        }
    }

    fn capability(&self, usage: &Usage) -> v1::VolumeCapability {
        let access_type = match usage.attachment_mode {
            AttachmentMode::BlockDevice => AccessType::Block(BlockVolume {}),
            AttachmentMode::FileSystem => AccessType::Mount(MountVolume {
                fs_type: usage.fs_type.clone(),
                mount_flags: usage.mount_flags.clone(),
                // The field belongs to the capability (CSI rule 19).
                volume_mount_group: if self.mount_group() {
                    usage.mount_group.clone()
                } else {
                    String::new()
                },
            }),
        };
        let mode = self.mode(usage.access_mode).into();
        v1::VolumeCapability { access_mode: Some(Mode { mode }), access_type: Some(access_type) }
    }

    /// Without SINGLE_NODE_MULTI_WRITER a plugin knows only the older word for one writer; several it is
    /// never asked for.
    fn mode(&self, mode: AccessMode) -> access_mode::Mode {
        match mode {
            AccessMode::SingleNodeSingleWriter if !self.single_node_multi_writer() => {
                access_mode::Mode::SingleNodeWriter
            }
            AccessMode::SingleNodeWriter => access_mode::Mode::SingleNodeWriter,
            AccessMode::SingleNodeReaderOnly => access_mode::Mode::SingleNodeReaderOnly,
            AccessMode::SingleNodeSingleWriter => access_mode::Mode::SingleNodeSingleWriter,
            AccessMode::SingleNodeMultiWriter => access_mode::Mode::SingleNodeMultiWriter,
            AccessMode::MultiNodeReaderOnly => access_mode::Mode::MultiNodeReaderOnly,
            AccessMode::MultiNodeSingleWriter => access_mode::Mode::MultiNodeSingleWriter,
            AccessMode::MultiNodeMultiWriter => access_mode::Mode::MultiNodeMultiWriter,
        }
    }
}

fn secrets(call: &Call<'_>) -> BTreeMap<String, String> {
    call.secrets.map(|secrets| secrets.for_rpc().into_iter().collect()).unwrap_or_default()
}

fn hidden(call: &Call<'_>) -> Hidden {
    let mut hidden = Hidden::default();
    if call.secrets_forgotten {
        hidden.all();
    }
    secrets(call).values().for_each(|value| hidden.secret(value));
    let usage = call.usage;
    let opaque = usage.context.values().chain(usage.publish_context.values()).chain(&usage.mount_flags);
    opaque.for_each(|value| hidden.opaque(value));
    hidden
}

fn gone<T>(answer: Result<T, RpcError>) -> Result<(), RpcError> {
    match answer {
        Err(error) if error.code != Code::NotFound => Err(error),
        _ => Ok(()),
    }
}
