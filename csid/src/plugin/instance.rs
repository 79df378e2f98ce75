//! An instance of a plugin that was healthy when it was asked for, and what its node and its controller calls share: what
//! it cannot do is not asked of it, a secret goes only to whom it may, and an answer that breaks CSI is an error.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use csi_proto::csi::v1;
use csi_proto::csi::v1::volume_capability::{
    AccessMode as Mode, AccessType, BlockVolume, MountVolume, access_mode,
};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit, mpsc};
use tonic::Code;

use super::Service;
use super::fingerprint::Fingerprint;
use super::rpc::{Class, Hidden, Peer, RpcError};
use super::tally::Tally;
use crate::secret::Secrets;
use crate::store::rows::{AccessMode, AttachmentMode, Usage};

pub(super) struct Instance {
    pub peer: Peer,
    /// Who registered it.
    pub owner: u32,
    pub print: Fingerprint,
    /// The host directory below which its volumes' paths are made, and the same as it sees it.
    pub root: PathBuf,
    pub view: PathBuf,
    pub load: Arc<Load>,
}

/// How many controller calls of one plugin are in flight at most, whatever the number of its volumes and instances.
pub(super) const CALLS: usize = 64;

/// How many that only look, beside them: no flood of these delays a detach.
pub(super) const LOOKS: usize = 16;

/// What the instances of a plugin have together: whose turn it is at their controllers, and what they know.
pub(super) struct Common {
    calls: Semaphore,
    looks: Semaphore,
    pub tally: Tally,
    /// This csid sent secrets.
    pub had_secrets: AtomicBool,
    /// The rows of an earlier csid's tell of some.
    pub had_secrets_before: OnceCell<bool>,
}

impl Default for Common {
    fn default() -> Self {
        Common {
            calls: Semaphore::new(CALLS),
            looks: Semaphore::new(LOOKS),
            tally: Tally::default(),
            had_secrets: AtomicBool::new(false),
            had_secrets_before: OnceCell::new(),
        }
    }
}

impl Common {
    fn turns(&self, rpc: &str) -> (&Semaphore, usize) {
        match rpc {
            "ListVolumes" | "ListSnapshots" | "GetCapacity" | "ValidateVolumeCapabilities" => {
                (&self.looks, LOOKS)
            }
            _ => (&self.calls, CALLS),
        }
    }
}

/// Somebody has an instance in hand, who may call it.
pub(super) type Hand = mpsc::Sender<Infallible>;

/// Who has an instance in hand.
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

    /// When nobody has it any more, who was given it.
    pub async fn empty(mut self) {
        drop(self.give);
        // Nothing is sent: this is the end of the last one.
        let _ = self.back.recv().await;
    }
}

/// How busy an instance's controller service is; it outlives the [`Instance`], which is made anew by each look at the plugin.
#[derive(Default)]
pub(super) struct Load {
    calls: AtomicUsize,
    /// When it was chosen last: a count, not a time.
    chosen: AtomicU64,
}

impl Load {
    /// A call is under way until what is returned is dropped.
    pub fn begin(&self) -> Busy<'_> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Busy(self)
    }

    /// The least is the next: the fewest calls, and of equals who has waited longest for a turn.
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

    /// Wait until the plugin has one controller call less of this kind than it may have.
    pub async fn turn(&self, rpc: &'static str, patience: Duration) -> Result<SemaphorePermit<'_>, RpcError> {
        let (turns, most) = self.peer.common.turns(rpc);
        let turn = tokio::time::timeout(patience, turns.acquire()).await;
        turn.ok().and_then(Result::ok).ok_or_else(|| {
            let message = format!("{most} calls of the plugin's controllers are not answered yet");
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
                let message = format!("{bytes} bytes are more than CSI can say, so the plugin was not asked");
                self.peer.error(rpc, Code::OutOfRange, message, Class::Refused)
            })
        };
        let range = v1::CapacityRange { required_bytes: bytes(required)?, limit_bytes: bytes(limit)? };
        Ok((required > 0 || limit > 0).then_some(range))
    }

    /// The plugin said OK, but not what CSI has it say. `class` says whether there may have been an effect.
    pub fn breach(&self, rpc: &'static str, class: Class, what: &str) -> RpcError {
        self.peer.error(rpc, Code::Ok, format!("the answer breaks CSI: {what}"), class)
    }

    /// What [`answer`](super::answer) says of a field.
    pub fn taken(
        &self,
        rpc: &'static str,
        class: Class,
        field: &str,
        checked: Result<(), String>,
    ) -> Result<(), RpcError> {
        checked.map_err(|why| self.breach(rpc, class, &format!("its {field} {why}")))
    }

    /// A number of bytes in an answer.
    pub fn size(&self, rpc: &'static str, class: Class, field: &str, size: i64) -> Result<u64, RpcError> {
        u64::try_from(size).map_err(|_| self.breach(rpc, class, &format!("{field} is negative")))
    }
}

/// How a volume is used, in the words of a service with these capabilities (CSI rule 19).
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

/// What a plugin of v1.12 says of a volume's health: whether it is abnormal, and its words.
pub(super) fn condition(condition: Option<v1::VolumeCondition>, hidden: &Hidden) -> Option<(bool, String)> {
    condition.map(|condition| (condition.abnormal, hidden.clean(&condition.message)))
}

/// What a plugin may repeat of a usage and must not be seen.
pub(super) fn opaque(usage: &Usage) -> impl Iterator<Item = &String> {
    usage.context.values().chain(usage.publish_context.values()).chain(&usage.mount_flags)
}

/// NOT_FOUND is success where something is taken away (CSI rule 36).
pub(super) fn gone<T>(answer: Result<T, RpcError>) -> Result<(), RpcError> {
    match answer {
        Err(error) if error.code != Code::NotFound => Err(error),
        _ => Ok(()),
    }
}
