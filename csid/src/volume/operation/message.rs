//! Messages to the actor of a volume.

use std::time::Instant;

use tokio::sync::oneshot;

use crate::secret::Secrets;
use crate::store::registry::{Bound, VolumeName};
use crate::store::rows::MountKey;
use crate::volume::api::operation_kind::OperationKind;
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::operation::orders::Order;
use crate::volume::operation::request::{OperationRequest, Waiter};
use crate::volume::operation::table::Recovering;

#[expect(clippy::large_enum_variant, reason = "most messages are the large one")]
pub(in crate::volume) enum Message {
    Ask(OperationRequest, Waiter),
    /// CancelOperation for the caller with this number.
    Withdraw(u64),
    /// Retry rows that wait or are unsettled, at once.
    Wake,
    /// The rows were loaded at csid's start.
    Recover(Recovering),
    /// Continue this unfinished work, for this uid.
    Continue(Subject, u32),
    /// The server of this mount, of this uid, is gone.
    Heal(MountKey, u32),
    /// Explain asks for the next retry of work without a caller. `None`: none is due.
    NextTry(oneshot::Sender<Option<Instant>>),
    /// The unit or connection of this claim, of this uid, has ended.
    Unbind(ClaimKey, u32, Bound),
    /// The Mount of this key, of this uid, is answered. The rest of an expansion is tried now.
    Enlarge(MountKey, u32, Option<Secrets>),
    /// A call of this kind has removed the row of this volume's creation or deletion.
    GiveUp(VolumeName, OperationKind),
    /// Root orders rows to be forgotten.
    Forget(Order),
    /// csid stops: answer every caller.
    Stop,
}
