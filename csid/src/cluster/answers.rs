//! What calls and questions of servers have in common: their bounds, and how they fail.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::{CallClass, CallFailure, ExternalSnapshot};

use crate::error::{Result, cut};
use crate::plugin::Snapshot;
use crate::store::registry::VolumeName;
use crate::volume::forwarded::ForwardedFailure;
use crate::volume::rules::{self, ClaimOutcome};

/// The longest time that a call may wait, and that it may take.
pub(super) const LONGEST: Duration = Duration::from_secs(600);
/// The limit of a message that is sent to a server, in bytes.
const MESSAGE: usize = 2048;

/// Returns the end of a call that failed.
pub(super) fn failure(ForwardedFailure { outcome, error }: ForwardedFailure) -> How {
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
        code: error.details.grpc_code,
    })
}

/// Checks the credential of a call. A server must not choose which of this host's secrets the plugin gets.
pub(super) fn known_credential(name: &VolumeName, credential: &str) -> Result<Option<String>> {
    if credential.is_empty() {
        return Ok(None);
    }
    rules::check_credential(&name.namespace, credential)?;
    Ok(Some(credential.to_owned()))
}

/// Returns a snapshot as messages have it.
pub(super) fn snapshot_row(of: Snapshot) -> ExternalSnapshot {
    ExternalSnapshot {
        id: of.id,
        external_id: of.external_id,
        size: of.size,
        created_usec: of.created_usec,
        ready: of.ready,
    }
}
