//! An instance of a plugin that was healthy when it was chosen, and what its node and controller calls share. Calls that it
//! does not offer are not sent, secrets only to an owner who may read them, and an answer that breaks CSI is an error.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use csi_proto::csi::v1;
use csi_proto::csi::v1::volume_capability::{
    AccessMode as Mode, AccessType, BlockVolume, MountVolume, access_mode,
};
use tokio::sync::mpsc;
use tonic::Code;

use crate::plugin::common::Turn;
use crate::plugin::fingerprint::Fingerprint;
use crate::plugin::rpc::{Hidden, Peer, RpcError};
use crate::plugin::rpc_outcome::{Class, is_gone};
use crate::plugin::view::Service;
use crate::secret::Secrets;
use crate::store::rows::{AccessMode, AttachmentMode, Usage};

pub(super) struct Instance {
    pub peer: Peer,
    /// The uid that registered it.
    pub owner: u32,
    pub print: Fingerprint,
    /// The host directory below which its volumes' paths are made, and the same as it sees it.
    pub root: PathBuf,
    pub view: PathBuf,
    pub load: Arc<Load>,
}

/// A reference of a caller that may call an instance.
pub(super) type Hand = mpsc::Sender<Infallible>;

/// The references to an instance.
pub(super) struct Hands {
    give: Hand,
    back: mpsc::Receiver<Infallible>,
}

impl Default for Hands {
    fn default() -> Self {
        let (give, back) = mpsc::channel(1);
        Hands { give, back }
    }
}

impl Hands {
    pub fn give(&self) -> Hand {
        self.give.clone()
    }

    /// Waits until all references are dropped.
    pub async fn empty(mut self) {
        drop(self.give);
        // The channel carries no message: it closes when the last one is dropped.
        let _ = self.back.recv().await;
    }
}

/// The load of an instance's controller service. It outlives the [`Instance`], which each probe replaces.
#[derive(Default)]
pub(super) struct Load {
    calls: AtomicUsize,
    /// The turn of its last choice: a count, not a time.
    chosen: AtomicU64,
}

impl Load {
    /// Counts a call until the returned value is dropped.
    pub fn begin(&self) -> Busy<'_> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Busy(self)
    }

    /// Returns a rank: the least is chosen next. It has the fewest calls, and among equals the oldest turn.
    pub fn rank(&self) -> (usize, u64) {
        (self.calls.load(Ordering::Relaxed), self.chosen.load(Ordering::Relaxed))
    }

    pub fn choose(&self, turn: u64) {
        self.chosen.store(turn, Ordering::Relaxed);
    }
}

pub(super) struct Busy<'a>(&'a Load);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Instance {
    pub fn offers(&self, service: Service) -> bool {
        self.print.services.contains(&service.name())
    }

    /// Waits until the plugin has fewer calls of this kind than it may have.
    pub async fn turn(&self, rpc: &'static str, patience: Duration) -> Result<Turn<'_>, RpcError> {
        let (turns, kind) = self.peer.common.turns(rpc);
        turns.take(patience).await.ok_or_else(|| {
            let most = turns.most();
            let message = format!(
                "the plugin has not answered {most} {kind} yet, so it was not asked in {patience:.1?}"
            );
            self.peer.error(rpc, Code::DeadlineExceeded, message, Class::NotSent)
        })
    }

    /// CSI rule 19: an RPC that the plugin does not offer is not sent.
    pub fn gate(&self, rpc: &'static str, capability: &str, offered: bool) -> Result<(), RpcError> {
        if offered {
            return Ok(());
        }
        let message = format!("the plugin does not offer {capability}, so it was not asked");
        Err(self.peer.error(rpc, Code::Unimplemented, message, Class::Unimplemented))
    }

    /// The plugin's owner reads what it is sent: a secret goes to root's plugins and to those of its own user. Of a systemd
    /// credential that is root, whose call it is does not matter: who may have it used may not read it.
    pub fn may_read_secrets(
        &self,
        rpc: &'static str,
        uid: u32,
        secrets: Option<&Secrets>,
    ) -> Result<(), RpcError> {
        let (owner, Some(secrets)) = (self.owner, secrets) else { return Ok(()) };
        if owner == 0 || (owner == uid && !secrets.is_credential()) {
            self.peer.common.had_secrets.store(true, Ordering::Release);
            return Ok(());
        }
        let message = match secrets.is_credential() {
            true => format!(
                "the plugin belongs to uid {owner}, so it is sent no secrets of a systemd credential; give them with \
                 the call, or have root register the plugin"
            ),
            false => format!(
                "the plugin belongs to uid {owner}, so it is sent no secrets of uid {uid}; call without secrets, or \
                 have root register the plugin"
            ),
        };
        Err(self.peer.error(rpc, Code::PermissionDenied, message, Class::Forbidden))
    }

    /// CSI rule 14: at least one bound, none negative. 0 is no bound.
    pub fn range(
        &self,
        rpc: &'static str,
        required: u64,
        limit: u64,
    ) -> Result<Option<v1::CapacityRange>, RpcError> {
        let bytes = |bytes: u64| {
            i64::try_from(bytes).map_err(|_| {
                let message =
                    format!("capacity {bytes} exceeds CSI's limit (2^63-1 bytes); the plugin was not called");
                self.peer.error(rpc, Code::OutOfRange, message, Class::Refused)
            })
        };
        let range = v1::CapacityRange { required_bytes: bytes(required)?, limit_bytes: bytes(limit)? };
        Ok((required > 0 || limit > 0).then_some(range))
    }

    /// Returns the error of an OK that breaks CSI. `class`: whether the call may have had an effect.
    pub fn breach(&self, rpc: &'static str, class: Class, what: &str) -> RpcError {
        self.peer.error(rpc, Code::Ok, format!("the answer breaks CSI: {what}"), class)
    }

    /// Turns a finding of [`answer`](super::answer) about a field into an error.
    pub fn taken(
        &self,
        rpc: &'static str,
        class: Class,
        field: &str,
        checked: Result<(), String>,
    ) -> Result<(), RpcError> {
        checked.map_err(|why| self.breach(rpc, class, &format!("its {field} {why}")))
    }

    /// Returns a number of bytes in an answer; an error where it is negative.
    pub fn size(&self, rpc: &'static str, class: Class, field: &str, size: i64) -> Result<u64, RpcError> {
        u64::try_from(size).map_err(|_| self.breach(rpc, class, &format!("{field} is negative")))
    }
}

/// Returns the capability of a use, for a service with these capabilities (CSI rule 19).
pub(super) fn capability(usage: &Usage, offered: &[&'static str]) -> v1::VolumeCapability {
    let access_type = match usage.attachment_mode {
        AttachmentMode::BlockDevice => AccessType::Block(BlockVolume {}),
        AttachmentMode::FileSystem => AccessType::Mount(MountVolume {
            fs_type: usage.fs_type.clone(),
            mount_flags: usage.mount_flags.clone(),
            volume_mount_group: match offered.contains(&"VOLUME_MOUNT_GROUP") {
                true => usage.mount_group.clone(),
                false => String::new(),
            },
        }),
    };
    let mode = mode(usage.access_mode, offered).into();
    v1::VolumeCapability { access_mode: Some(Mode { mode }), access_type: Some(access_type) }
}

/// Without SINGLE_NODE_MULTI_WRITER a plugin knows only the older word for one writer; several it is never asked for.
fn mode(mode: AccessMode, offered: &[&'static str]) -> access_mode::Mode {
    match mode {
        AccessMode::SingleNodeSingleWriter if !offered.contains(&"SINGLE_NODE_MULTI_WRITER") => {
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

/// Returns a volume's health as a plugin of v1.12 reports it: whether it is abnormal, and the message.
pub(super) fn condition(condition: Option<v1::VolumeCondition>, hidden: &Hidden) -> Option<(bool, String)> {
    condition.map(|condition| (condition.abnormal, hidden.clean(&condition.message)))
}

/// Returns the values of a usage that a plugin may repeat and that must not be shown.
pub(super) fn opaque(usage: &Usage) -> impl Iterator<Item = &String> {
    usage.context.values().chain(usage.publish_context.values()).chain(&usage.mount_flags)
}

/// Returns the answer to a removal. It has succeeded if its object is gone.
pub(super) fn gone<T>(answer: Result<T, RpcError>) -> Result<(), RpcError> {
    match answer {
        Err(error) if !is_gone(error.code) => Err(error),
        _ => Ok(()),
    }
}
