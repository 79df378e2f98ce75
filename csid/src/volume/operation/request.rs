//! The requests to the actor of a volume, its responses, and which requests join, refuse or end one another.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::error::{Error, Kind, Result, Step};
use crate::host::TargetFd;
use crate::plugin::{Snapshot, Stats};
use crate::secret::Secrets;
use crate::store::registry::{
    AttachCall, Bound, Capability, Claim, Record, Registration, Standing, VolumeName,
};
use crate::store::rows::{MountKey, Phase};
use crate::volume::api::operation_kind::OperationKind;
use crate::volume::api::requests::{Authority, Part, Uncovered, Unmounting};
use crate::volume::api::views::Mounted;
use crate::volume::errors::claim::ClaimError;
use crate::volume::errors::mount::MountError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::model::volume::{DesiredMount, Paths, Volume};
use crate::volume::operation::orders::Order;
use crate::volume::operation::table::Ticket;
use crate::volume::servers::RegistrationMark;

#[derive(Clone)]
pub(in crate::volume) enum OperationRequest {
    Mount {
        wanted: DesiredMount,
        /// The claim to take for a registered volume if the consumer has none.
        claim: Option<Arc<Claim>>,
        /// The paths of another manager's mount to adopt; absent: csid makes the mount.
        adopted: Option<Box<Paths>>,
        target_fd: Option<Arc<TargetFd>>,
        /// How long to wait for the claims and mounts that are in the way.
        wait_until: Option<Instant>,
        secrets: Option<Secrets>,
        /// What a server has answered to this call about the volume. `None`: no server was asked.
        answer: Option<Arc<ServersAnswer>>,
    },
    Unmount {
        key: MountKey,
        authority: Authority,
        how: Unmounting,
        uncovered: Option<Uncovered>,
    },
    /// Finishes the unfinished work of the rows.
    Settle {
        key: MountKey,
    },
    /// Mounts a row that waits.
    Restore {
        wanted: DesiredMount,
    },
    /// Mounts again a mount whose server is gone, for this uid.
    Heal {
        key: MountKey,
        uid: u32,
    },
    Claim {
        key: ClaimKey,
        claim: Arc<Claim>,
        /// How long to wait for the claims that are in the way.
        wait_until: Option<Instant>,
        secrets: Option<Secrets>,
        /// As of a Mount.
        answer: Option<Arc<ServersAnswer>>,
    },
    Release {
        key: ClaimKey,
        authority: Authority,
        force: bool,
        secrets: Option<Secrets>,
        /// The name that a server gave the claim. `None`: any.
        id: Option<String>,
    },
    /// Makes a call that concerns the volume as a whole.
    Call {
        target: Box<CallTarget>,
        call: ControllerRequest,
        secrets: Option<Secrets>,
    },
    /// Releases a claim of `uid` whose unit or connection has ended.
    Unbind {
        key: ClaimKey,
        uid: u32,
        bound: Bound,
    },
    /// Finishes the expansion of a volume that `uid` has just mounted, with the secrets of that call.
    Enlarge {
        key: MountKey,
        uid: u32,
        secrets: Option<Secrets>,
    },
    /// Retries the release of a claim, or a call that has to be completed.
    Continue {
        subject: Subject,
        uid: u32,
    },
}

/// The volume that a server has answered, without claims: to this call, or to an earlier one.
pub(in crate::volume) struct ServersAnswer {
    record: Record,
    /// When this call got it. A remembered answer may be older.
    came: Instant,
    /// The mark of a remembered one. `None`: a server was asked by this call.
    mark: Option<RegistrationMark>,
    /// Whether a server has found the mark to be the volume's, or may have.
    is_compared: AtomicBool,
}

impl ServersAnswer {
    /// The age up to which an answer is used. An operation that waits longer asks again: another volume may have the name by then.
    const RECENT: Duration = Duration::from_secs(1);

    pub(in crate::volume) fn new(record: Record) -> ServersAnswer {
        ServersAnswer { record, came: Instant::now(), mark: None, is_compared: AtomicBool::new(false) }
    }

    /// Makes an answer of what an earlier call was answered.
    pub(in crate::volume) fn remembered(record: Record, mark: RegistrationMark) -> ServersAnswer {
        ServersAnswer { mark: Some(mark), ..ServersAnswer::new(record) }
    }

    pub(in crate::volume) fn record(&self) -> &Record {
        &self.record
    }

    /// Returns whether the answer is used. A server is asked again instead of an older one.
    pub(in crate::volume) fn is_recent(&self) -> bool {
        self.came.elapsed() < ServersAnswer::RECENT
    }

    pub(in crate::volume) fn mark(&self) -> Option<&RegistrationMark> {
        self.mark.as_ref()
    }

    /// Notes whether a server has compared the mark, or may have, and has found it to be the volume's.
    pub(in crate::volume) fn set_compared(&self, is_compared: bool) {
        self.is_compared.store(is_compared, Ordering::Relaxed);
    }

    /// Returns whether a call may have failed because the volume is registered otherwise than an earlier call was answered.
    pub(in crate::volume) fn may_mislead(&self, error: &Error) -> bool {
        let is_by_time = matches!(
            error.kind,
            Kind::TimedOut
                | Kind::Cancelled
                | Kind::ShuttingDown
                | Kind::Unavailable
                | Kind::PluginUnavailable
                | Kind::PluginShutdown
        );
        self.mark.is_some() && !self.is_compared.load(Ordering::Relaxed) && !is_by_time
    }
}

/// A call on a volume that is neither a mount nor a claim.
#[derive(Clone, PartialEq, Eq)]
pub(in crate::volume) enum ControllerRequest {
    /// Creates the volume of the target's registration. `to_delete`: for a DeleteVolume, which needs the external id.
    Create {
        to_delete: bool,
    },
    Validate {
        capabilities: Vec<Capability>,
    },
    Stats,
    Expand {
        required: u64,
        limit: u64,
        part: Part,
    },
    Snapshot {
        name: String,
        parameters: BTreeMap<String, String>,
        /// Whether to wait until the snapshot can be used.
        wait: bool,
    },
    Attach {
        node_id: String,
        call: AttachCall,
    },
    Detach {
        node_id: String,
        /// Whether the call gives the volume with its plugin and its ID at the plugin.
        is_inline: bool,
    },
    Delete,
    /// DeregisterVolume by force.
    Forget,
}

impl ControllerRequest {
    /// Returns whether the call is rolled back when its last caller leaves.
    pub(in crate::volume) fn is_undone(&self) -> bool {
        matches!(self, ControllerRequest::Attach { .. })
    }

    /// Returns whether the call changes nothing. Any caller may make it.
    pub(in crate::volume) fn only_looks(&self) -> bool {
        matches!(self, ControllerRequest::Validate { .. } | ControllerRequest::Stats)
    }

    /// Refuses the call if the uid may not make it, or the volume is not in the right state. A volume in creation or deletion can
    /// only be deleted, detached (once it has an external id) or, by force, deregistered.
    pub(in crate::volume) fn refuse(
        &self,
        name: &VolumeName,
        registration: &Registration,
        uid: u32,
    ) -> Result<()> {
        if uid != 0 && uid != registration.uid && !self.only_looks() {
            return Err(VolumeError::OtherOwner { name: name.clone() }.into());
        }
        match (&registration.standing, self) {
            (Standing::Registered, _)
            | (
                Standing::Creating(_) | Standing::Deleting { .. },
                ControllerRequest::Delete | ControllerRequest::Detach { .. } | ControllerRequest::Forget,
            ) => Ok(()),
            (Standing::Creating(_) | Standing::Deleting { .. }, _) => {
                Err(VolumeError::InTransition { name: name.clone() }.into())
            }
        }
    }

    pub(in crate::volume) fn kind(&self) -> OperationKind {
        match self {
            ControllerRequest::Create { to_delete: false } => OperationKind::Create,
            ControllerRequest::Validate { .. } => OperationKind::Validate,
            ControllerRequest::Stats => OperationKind::Stats,
            ControllerRequest::Expand { .. } => OperationKind::Expand,
            ControllerRequest::Snapshot { .. } => OperationKind::Snapshot,
            ControllerRequest::Attach { .. } => OperationKind::Attach,
            ControllerRequest::Detach { .. } => OperationKind::Detach,
            ControllerRequest::Create { to_delete: true } | ControllerRequest::Delete => {
                OperationKind::Delete
            }
            ControllerRequest::Forget => OperationKind::Deregister,
        }
    }
}

/// The volume of a [`ControllerRequest`], registered or inline.
#[derive(Clone, PartialEq, Eq)]
pub(in crate::volume) struct CallTarget {
    pub(in crate::volume) name: VolumeName,
    pub(in crate::volume) uid: u32,
    pub(in crate::volume) registration: Registration,
    pub(in crate::volume) is_registered: bool,
}

impl CallTarget {
    /// Returns whether `subject` is the attachment of this volume to the node.
    fn is_attached_as(&self, subject: &Subject, node: &str) -> bool {
        match subject {
            Subject::Attachment { volume, node_id } => *volume == self.name && node_id == node,
            _ => false,
        }
    }
}

/// The outcome of an operation.
#[derive(Clone)]
pub(in crate::volume) enum OperationResponse {
    /// The mount, claim or volume is gone.
    Gone,
    Mounted(Mounted),
    /// The record with the claim.
    Claimed(Box<Record>),
    /// Whether the plugin confirms the capabilities, and its message if not.
    Validated(Result<(), String>),
    Stats(Stats),
    Created(Box<Record>),
    /// The capacity, and whether a node still has to expand the volume.
    Expanded(Option<u64>, bool),
    Snapshot(Snapshot),
    /// The publish context.
    Attached(BTreeMap<String, String>),
}

pub(in crate::volume) struct Waiter {
    pub(in crate::volume) ticket: Ticket,
    pub(in crate::volume) arrived: Option<Instant>,
    pub(in crate::volume) deadline: Option<Instant>,
    pub(in crate::volume) hold: Option<Arc<dyn Send + Sync>>,
    /// Receives a message when the request is in the queue, or has joined an operation. A refused request sends none. `None`: no caller
    /// waits for that.
    pub(in crate::volume) taken: Option<oneshot::Sender<()>>,
    pub(in crate::volume) reply: oneshot::Sender<Result<OperationResponse>>,
}

impl OperationRequest {
    pub(in crate::volume) fn subject(&self) -> Subject {
        match self {
            OperationRequest::Mount { wanted, .. } | OperationRequest::Restore { wanted } => {
                Subject::Mount(wanted.key.clone())
            }
            OperationRequest::Unmount { key, .. }
            | OperationRequest::Settle { key }
            | OperationRequest::Heal { key, .. }
            | OperationRequest::Enlarge { key, .. } => Subject::Mount(key.clone()),
            OperationRequest::Claim { key, .. }
            | OperationRequest::Release { key, .. }
            | OperationRequest::Unbind { key, .. } => Subject::Claim(key.clone()),
            OperationRequest::Continue { subject, .. } => subject.clone(),
            OperationRequest::Call { target, .. } => Subject::Volume(target.name.clone()),
        }
    }

    pub(in crate::volume) fn target(&self) -> Option<&str> {
        match self {
            OperationRequest::Mount { wanted, .. } | OperationRequest::Restore { wanted } => {
                wanted.spec.target.as_deref()
            }
            _ => None,
        }
    }

    pub(in crate::volume) fn kind(&self) -> OperationKind {
        match self {
            OperationRequest::Mount { adopted: Some(_), .. } => OperationKind::Adopt,
            OperationRequest::Mount { .. } => OperationKind::Mount,
            OperationRequest::Unmount { .. } => OperationKind::Unmount,
            OperationRequest::Settle { .. } => OperationKind::Settle,
            OperationRequest::Restore { .. } => OperationKind::Restore,
            OperationRequest::Heal { .. } => OperationKind::Heal,
            OperationRequest::Claim { .. } => OperationKind::Claim,
            OperationRequest::Release { .. } => OperationKind::Release,
            OperationRequest::Unbind { .. } => OperationKind::Unbind,
            OperationRequest::Enlarge { .. } => OperationKind::Enlarge,
            OperationRequest::Continue { .. } => OperationKind::Continue,
            OperationRequest::Call { call, .. } => call.kind(),
        }
    }

    /// Returns the unit or connection whose end releases the claim of a Mount. `None`: there is none.
    fn bound(&self) -> Option<&Bound> {
        match self {
            OperationRequest::Mount { claim, .. } => claim.as_ref()?.bound.as_ref(),
            _ => None,
        }
    }

    /// Returns whether the caller gave a descriptor of the target.
    fn has_target_fd(&self) -> bool {
        matches!(
            self,
            OperationRequest::Mount { target_fd: Some(_), .. }
                | OperationRequest::Unmount { uncovered: Some(_), .. }
        )
    }

    fn adopted(&self) -> Option<&Paths> {
        match self {
            OperationRequest::Mount { adopted, .. } => adopted.as_deref(),
            _ => None,
        }
    }

    /// Returns whether `asked` is the same call, so that its caller can join this one.
    pub(in crate::volume) fn covers(&self, asked: &OperationRequest) -> bool {
        match (self, asked) {
            (
                OperationRequest::Mount { wanted: a, .. } | OperationRequest::Restore { wanted: a },
                OperationRequest::Mount { wanted: b, .. },
            ) => {
                let same = a.key == b.key && a.uid == b.uid && a.spec.other_option(&b.spec).is_none();
                let same = same && self.adopted() == asked.adopted();
                // A call without a descriptor may wait for the automount that the other caller's mount serves.
                let same = same && (self.has_target_fd() || !asked.has_target_fd());
                // A caller that binds the claim to something else, such as another connection, needs its own operation for that.
                let waits = self.waits_until().is_some() == asked.waits_until().is_some();
                same && waits && self.bound() == asked.bound()
            }
            (
                OperationRequest::Unmount { key: a, authority: x, how: f, .. },
                OperationRequest::Unmount { key: b, authority: y, how: g, .. },
            ) => a == b && x == y && f == g && self.has_target_fd() == asked.has_target_fd(),
            (
                OperationRequest::Call { target: a, call: x, secrets: s },
                OperationRequest::Call { target: b, call: y, secrets: t },
            ) => a == b && x == y && s.is_some() == t.is_some(),
            _ => false,
        }
    }
}

impl OperationRequest {
    /// Returns why `asked` is refused while this is under way: it is of another uid, or has other options. `None`: it is not
    /// refused.
    pub(in crate::volume) fn refuses(&self, asked: &OperationRequest) -> Option<Error> {
        if let (
            OperationRequest::Claim { key, claim, .. },
            OperationRequest::Release { key: asked, authority: Authority::Own(uid), .. },
        ) = (self, asked)
        {
            return (key == asked && *uid != claim.uid)
                .then(|| ClaimError::NotOwner { claim: asked.clone() }.into());
        }
        let (OperationRequest::Mount { wanted, .. } | OperationRequest::Restore { wanted }) = self else {
            return None;
        };
        match asked {
            _ if asked.subject().mount() != Some(&wanted.key) => None,
            OperationRequest::Mount { wanted: other, .. } if other.uid != wanted.uid => {
                Some(MountError::OtherUser { key: other.key.clone() }.into())
            }
            // A restore of a row that is lost: its turn comes with the attachment of now.
            OperationRequest::Mount { wanted: other, .. }
                if self.is_restore() && other.spec.other_option_but_attached(&wanted.spec).is_none() =>
            {
                None
            }
            OperationRequest::Mount { wanted: other, .. }
                if let Some(option) = other.spec.other_option(&wanted.spec) =>
            {
                Some(MountError::MountedOtherwise { key: other.key.clone(), option }.into())
            }
            OperationRequest::Unmount { key, authority: Authority::Own(uid), .. } if *uid != wanted.uid => {
                Some(MountError::NotOwner { key: key.clone() }.into())
            }
            _ => None,
        }
    }

    pub(in crate::volume) fn is_restore(&self) -> bool {
        matches!(self, OperationRequest::Restore { .. })
    }

    /// Brings a request that csid made from a row up to date. Returns false if the row is gone, or has work left that another request
    /// finishes.
    pub(in crate::volume) fn renew(&mut self, volume: &Volume) -> bool {
        match self {
            OperationRequest::Restore { wanted } => {
                let row = volume.mount(&wanted.key);
                // A restore of another row of the volume may have put this one to rest as lost.
                let row =
                    row.filter(|row| matches!(row.phase, Phase::Mounted | Phase::Waiting | Phase::Lost));
                row.map(|row| *wanted = DesiredMount::of(row)).is_some()
            }
            OperationRequest::Settle { key } => volume.mount(key).is_some(),
            _ => true,
        }
    }

    /// Returns whether the operation is rolled back when its last caller leaves. All others are completed.
    pub(in crate::volume) fn is_undone(&self) -> bool {
        match self {
            OperationRequest::Mount { .. } | OperationRequest::Claim { .. } => true,
            OperationRequest::Call { call, .. } => call.is_undone(),
            _ => false,
        }
    }

    /// Drops secrets that the running operation has and that no later try needs. A try of a Mount that waits, of a Claim or of a
    /// Call may be repeated.
    pub(in crate::volume) fn drop_used_secrets(&mut self) {
        match self {
            OperationRequest::Mount { wait_until: None, secrets, .. }
            | OperationRequest::Release { secrets, .. }
            | OperationRequest::Enlarge { secrets, .. } => *secrets = None,
            _ => {}
        }
    }

    /// Returns whether the operation has the plugin create a volume.
    pub(in crate::volume) fn creates(&self) -> bool {
        matches!(self, OperationRequest::Call { call: ControllerRequest::Create { .. }, .. })
    }

    /// Returns whether the operation is the creation or deletion of this volume, also one without a caller.
    pub(in crate::volume) fn makes_or_deletes(&self, name: &VolumeName) -> bool {
        match self {
            OperationRequest::Call {
                target,
                call: ControllerRequest::Create { .. } | ControllerRequest::Delete,
                ..
            } => target.name == *name,
            OperationRequest::Continue { subject: Subject::Volume(continued), .. } => continued == name,
            _ => false,
        }
    }

    /// Returns the claim that the operation takes. `None`: it takes none.
    pub(in crate::volume) fn claim(&self) -> Option<&Arc<Claim>> {
        match self {
            OperationRequest::Claim { claim, .. } => Some(claim),
            OperationRequest::Mount { claim, .. } => claim.as_ref(),
            _ => None,
        }
    }

    /// Returns whether claims or the volume limit refuse the operation, and not existing mounts.
    pub(in crate::volume) fn lacks_claim(&self, result: &Result<OperationResponse>) -> bool {
        let refused = result.as_ref().err().and_then(|error| error.details.step);
        self.claim().is_some() && matches!(refused, Some(Step::Claim | Step::VolumeLimit))
    }

    /// Returns the step of an operation that waits after this result, instead of answering its callers. It waits for other
    /// claims to end. An OFFLINE expansion waits until the volume is not in use (CSI rule 26). `None`: the callers are answered.
    pub(in crate::volume) fn waits(&self, result: &Result<OperationResponse>, now: Instant) -> Option<Step> {
        let error = result.as_ref().err()?;
        match (self, error.kind) {
            (
                OperationRequest::Claim { wait_until, .. } | OperationRequest::Mount { wait_until, .. },
                Kind::ClaimConflict,
            ) => {
                wait_until.filter(|until| *until > now)?;
                match error.details.step {
                    // Waiting does not change the topology.
                    Some(Step::Topology) => None,
                    Some(Step::VolumeLimit) => Some(Step::WaitingForAnotherVolume),
                    _ => Some(Step::WaitingForClaims),
                }
            }
            (OperationRequest::Call { call: ControllerRequest::Expand { .. }, .. }, Kind::Busy) => {
                Some(Step::WaitingUntilUnused)
            }
            _ => None,
        }
    }

    /// Returns whether the caller waits for the first try only.
    pub(in crate::volume) fn is_tried_once(&self) -> bool {
        matches!(self, OperationRequest::Unmount { how: Unmounting { once: true, .. }, .. })
    }

    /// Returns whether `once`, which is tried once, has its turn between two tries of this operation.
    pub(in crate::volume) fn gives_way_to(&self, once: &OperationRequest) -> bool {
        matches!(self, OperationRequest::Unmount { .. }) && !self.is_tried_once() && once.is_tried_once()
    }

    /// Marks an Unmount that found its mount: it succeeds if the mount is gone when it continues.
    pub(in crate::volume) fn found_mount(&mut self) {
        if let OperationRequest::Unmount { how, .. } = self {
            how.must_exist = false;
        }
    }

    /// Returns whether later callers are refused the volume while this operation waits.
    pub(in crate::volume) fn expands(&self) -> bool {
        matches!(self, OperationRequest::Call { call: ControllerRequest::Expand { .. }, .. })
    }

    pub(in crate::volume) fn waits_until(&self) -> Option<Instant> {
        match self {
            OperationRequest::Claim { wait_until, .. } | OperationRequest::Mount { wait_until, .. } => {
                *wait_until
            }
            _ => None,
        }
    }

    /// Extends the wait to that of `other`, whose caller joins this operation.
    pub(in crate::volume) fn wait_like(&mut self, other: &OperationRequest) {
        if let OperationRequest::Mount { wait_until, .. } = self {
            *wait_until = (*wait_until).max(other.waits_until());
        }
    }

    /// Returns whether claims that wait may be granted now.
    pub(in crate::volume) fn frees(&self, result: &Result<OperationResponse>) -> bool {
        match self {
            // A failed operation may have released a claim of its consumer.
            OperationRequest::Mount { .. }
            | OperationRequest::Restore { .. }
            | OperationRequest::Heal { .. }
            | OperationRequest::Claim { .. } => result.is_err(),
            OperationRequest::Enlarge { .. } => false,
            _ => true,
        }
    }

    /// Returns whether this request cancels `other`.
    pub(in crate::volume) fn ends(&self, other: &OperationRequest) -> bool {
        match self {
            OperationRequest::Unmount { key, .. } => other.mounts(key),
            OperationRequest::Release { key, .. } => {
                matches!(other, OperationRequest::Claim { key: claimed, .. } if claimed == key)
            }
            OperationRequest::Call {
                target, call: ControllerRequest::Create { to_delete: true }, ..
            } => matches!(
                other,
                OperationRequest::Call { target: made, call: ControllerRequest::Create { to_delete: false }, .. }
                    if made.name == target.name && (target.uid == 0 || target.uid == made.uid)
            ),
            _ => false,
        }
    }

    /// Returns whether the operation makes a mount, claim or attachment that the order forgets.
    pub(in crate::volume) fn is_given_up_by(&self, order: &Order) -> bool {
        match (&order.subject, self) {
            (Subject::Claim(forgotten), OperationRequest::Claim { key, .. }) => key == forgotten,
            (Subject::Claim(forgotten), _) => {
                self.makes_mount().is_some_and(|mount| forgotten.has_mount(mount))
            }
            (Subject::Mount(key), _) if order.all_tags => {
                self.makes_mount().is_some_and(|mount| ClaimKey::of(key).has_mount(mount))
            }
            (Subject::Mount(key), _) => self.makes_mount() == Some(key),
            (attachment @ Subject::Attachment { .. }, _) => self.attaches(attachment),
            (Subject::Volume(_), _) => false,
        }
    }

    /// Returns whether the operation is an AttachVolume of this attachment.
    pub(in crate::volume) fn attaches(&self, attachment: &Subject) -> bool {
        match self {
            OperationRequest::Call { target, call: ControllerRequest::Attach { node_id, .. }, .. } => {
                target.is_attached_as(attachment, node_id)
            }
            _ => false,
        }
    }

    /// Returns whether the operation is a DetachVolume of this attachment.
    pub(in crate::volume) fn detaches(&self, attachment: &Subject) -> bool {
        match self {
            OperationRequest::Call { target, call: ControllerRequest::Detach { node_id, .. }, .. } => {
                target.is_attached_as(attachment, node_id)
            }
            _ => false,
        }
    }

    pub(in crate::volume) fn mounts(&self, key: &MountKey) -> bool {
        self.makes_mount() == Some(key)
    }

    /// Returns the mount that the operation makes. `None`: it makes none.
    fn makes_mount(&self) -> Option<&MountKey> {
        match self {
            OperationRequest::Mount { wanted, .. } | OperationRequest::Restore { wanted } => {
                Some(&wanted.key)
            }
            OperationRequest::Heal { key, .. } => Some(key),
            _ => None,
        }
    }
}
