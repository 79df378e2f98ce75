//! CreateVolume, DeleteVolume and ControllerExpandVolume of a volume, driven as attaches are. The volume's standing says what is due.
//!
//! ```text
//!             created                        deleted
//!   creating ─────────▶ registered ─▶ deleting ─────▶ gone
//!      │ refused            ▲            │ refused
//!      ▼                    └────────────┘
//!     gone
//! ```
//!
//! A call without an answer is made again, until the plugin has answered. A plugin makes one volume of a name, and a volume that is not
//! there is deleted. So each call may be repeated by any server, on any host.

use std::time::Duration;

use csi_proto::cluster::v1::CallClass;
use csid::store::registry::{
    Blocked, Conflict, DrivenCall, DrivenRpc, Driver, Expansion, Record, Registration, Registry,
    RegistryError, SnapshotError, VolumeName,
};
use csid::volume::rules;
use csid::{Error, Kind};
use csid_etcd::Guard;

use crate::cluster::meta_guard;
use crate::drive::{Driving, Intended, NOTHING, Next, SHORT, Sent, Turn, intent};
use crate::failure::Result;
use crate::pace::{BLOCKED, Memory, Wish};
use crate::records::{TRIES, busy};
use crate::volume_calls::{VolumeCall, VolumeEnd, VolumeFailure, is_unasked, leaves_claims, word};

/// Returns the name under which the failure of a volume's call is kept for the callers that wait.
pub fn failure_name(rpc: DrivenRpc, name: &VolumeName) -> String {
    format!("{} {name}", word(rpc))
}

fn wish_of(record: &Record, rpc: DrivenRpc) -> Wish {
    let is_blocked = record.registration.as_ref().is_some_and(|of| of.blocked.is_some());
    Wish::of_volume(word(rpc), is_blocked)
}

impl Driving {
    /// Makes the call that a volume's standing asks for, if it is time.
    pub(crate) async fn turn_of_volume(
        &self,
        record: &Record,
        rpc: DrivenRpc,
        memory: &mut Memory,
        mut guards: Vec<Guard>,
    ) -> Result<Turn> {
        let wish = wish_of(record, rpc);
        // Claims have their failures while the volume is expanded or a snapshot is made, and else none.
        memory.failed.retain(|of, _| *of == wish || (leaves_claims(rpc) && !of.is_of_volume()));
        if let Some(left) = memory.pause(&wish) {
            return Ok(if left < SHORT { Turn::Wait(left) } else { Turn::Rest(left) });
        }
        let plugin = &record.volume.plugin;
        let nodes = match rpc {
            DrivenRpc::Snapshot | DrivenRpc::DeleteSnapshot => self.sessions.answering(plugin),
            _ => self.sessions.all_controllers(plugin),
        };
        let hosts = self.cluster.hosts(record, nodes);
        let Next { host, may_run } = self.choose(record, &hosts, memory);
        let Some(host) = host else { return Ok(Turn::Rest(may_run.unwrap_or(NOTHING))) };
        let Some(_calling) = self.calls.begin_for_volume(plugin) else { return Ok(Turn::Rest(SHORT)) };
        // What is blocked by any server is sent nothing.
        let Some(of_host) = self.cluster.host_guard(host).await? else { return Ok(Turn::Rest(NOTHING)) };
        guards.push(of_host);
        match self.call_for_volume(record, rpc, host, guards).await? {
            None => {}
            // The plugin has created a volume that the record cannot take.
            Some((VolumeEnd::Created(_), false)) => {
                memory.has_failed(Wish::of_volume(word(rpc), true), BLOCKED);
            }
            // It is asked for again, until it is ready.
            Some((VolumeEnd::Snapshot(made), _)) if !made.ready => memory.has_failed(wish, SHORT),
            Some((VolumeEnd::Failed(failed), _)) if failed.is_retried() => {
                memory.has_failed(wish, Duration::ZERO);
            }
            // A refused expansion is over, and so is a snapshot.
            Some((VolumeEnd::Failed(_), _)) if !leaves_claims(rpc) => {
                memory.has_failed(Wish::of_volume(word(rpc), true), BLOCKED);
            }
            Some(_) => drop(memory.failed.remove(&wish)),
        }
        Ok(Turn::Again)
    }

    /// Makes one call: writes its intent, sends it, and writes its outcome. Returns the outcome, and whether the record has taken it. `None`: the
    /// record has changed, so nothing was sent.
    async fn call_for_volume(
        &self,
        record: &Record,
        rpc: DrivenRpc,
        host: &str,
        guards: Vec<Guard>,
    ) -> Result<Option<(VolumeEnd, bool)>> {
        let here = self.cluster.presence.here()?;
        let mut call = VolumeCall::new(record, rpc, host, self.cluster.config.controller_time)?;
        let mut after = record.clone();
        set_asked(&mut after, rpc);
        // The host may still run the call before, which has no answer.
        let before = record.driver.as_ref().filter(|driver| driver.host == host);
        let (node, consumer, node_id) = Default::default();
        let driven = DrivenCall { id: call.message.call.clone(), rpc, node, consumer, node_id };
        after.driver = Some(intent(before, &here.id, host, driven, call.message.deadline_ms));
        let intended = Intended::now(here, before.cloned());
        let Some(after) = self.cluster.swap(record, after, guards).await? else { return Ok(None) };
        call.message.epoch = after.revision;
        let sent = match self.refuse_late(&intended, host) {
            Ok(()) => self.sent(host, &call.message).await,
            Err(error) => Sent::Not(error),
        };
        let ended = match sent {
            Sent::Not(error) => VolumeEnd::Failed(VolumeFailure::not_sent(error)),
            Sent::Ended(ended) => call.read(&after, *ended),
            Sent::Lost => VolumeEnd::Failed(VolumeFailure::lost(host)),
        };
        if let VolumeEnd::Failed(VolumeFailure { error, .. }) = &ended {
            tracing::warn!(volume = %record.name, host, call = word(rpc), %error, "a controller call has failed");
        }
        let is_taken = self.finish_for_volume(&call, record, &ended).await?;
        self.cluster.was_driven(&record.name);
        Ok(Some((ended, is_taken)))
    }

    /// Writes the outcome of a call, unless another server has taken over. `had`: the record before the call's intent.
    /// Returns `false` if the record cannot take a volume that was created.
    async fn finish_for_volume(&self, call: &VolumeCall, had: &Record, ended: &VolumeEnd) -> Result<bool> {
        let name = &had.name;
        let had_driver = had.driver.as_ref().filter(|driver| driver.host == call.host);
        let unanswered = match ended {
            VolumeEnd::Created(_)
            | VolumeEnd::Deleted
            | VolumeEnd::Expanded { .. }
            | VolumeEnd::Snapshot(_)
            | VolumeEnd::SnapshotGone => None,
            VolumeEnd::Failed(failed) => match failed.class {
                // The plugin may go on with it after its time. Another host's plugin would not wait for that.
                CallClass::Unknown | CallClass::Again => Some(call.message.call.clone()),
                // A host that has not made this call may still run the one before.
                CallClass::NotSent | CallClass::Withheld => {
                    had_driver.map(|driver| driver.unanswered.clone())
                }
                CallClass::Refused => None,
            },
        };
        let mut conflict = None;
        for _ in 0..TRIES {
            let here = self.cluster.presence.here()?;
            let meta = self.cluster.normal().await?;
            let record = self.cluster.registry.record(name.clone()).await?;
            let is_mine = |driver: &Driver| driver.call.as_ref().is_some_and(|of| of.id == call.message.call);
            if !record.driver.as_ref().is_some_and(is_mine) {
                return Ok(true);
            }
            let mut after = record.clone();
            let mut failed: Option<Error> = None;
            let mut is_taken = true;
            match (ended, &conflict) {
                // The plugin's volume has another name in the cluster. Nothing is deleted: it is that record's.
                (VolumeEnd::Created(_), Some(other)) => {
                    rules::not_created(&mut after, &record.volume);
                    failed = Some(is_anothers(name, other));
                }
                (VolumeEnd::Created(created), None) => {
                    match rules::enter_created(&mut after, &record.volume, created) {
                        Ok(_) => block_unfit(&mut after),
                        Err(error) => {
                            note(&mut after, &error);
                            is_taken = false;
                        }
                    }
                }
                (VolumeEnd::Deleted, _) => after.registration = None,
                (VolumeEnd::Expanded { capacity, node_is_due }, _) => {
                    if let Some(asked) = pending(had) {
                        rules::enter_expanded(&mut after, asked, *capacity, *node_is_due);
                    }
                }
                (VolumeEnd::Snapshot(made), _) => {
                    rules::enter_snapshot(&mut after, &call.snapshot, made.clone());
                }
                (VolumeEnd::SnapshotGone, _) => rules::snapshot_deleted(&mut after, &call.snapshot),
                (VolumeEnd::Failed(of), _) if !call.snapshot.is_empty() => {
                    enter_snapshot_failure(&mut after, &call.snapshot, of, had);
                }
                (VolumeEnd::Failed(of), _) => failed = enter_failure(&mut after, call.rpc, of, had),
            }
            after.driver = record.driver.as_ref().zip(unanswered.clone()).map(|(driver, unanswered)| {
                Driver { server: String::new(), call: None, unanswered, ..driver.clone() }
            });
            match self.cluster.swap(&record, after, vec![meta_guard(&meta), here.guard()]).await {
                Ok(Some(_)) => {
                    if let Some(error) = failed {
                        self.cluster.note_failure(&failure_name(call.rpc, name), error);
                    }
                    return Ok(is_taken);
                }
                Ok(None) => {}
                Err(RegistryError::Conflict(Conflict::Taken(other))) if conflict.is_none() => {
                    tracing::warn!(volume = %name, %other, host = call.host, "the plugin answered CreateVolume with the volume of another record");
                    conflict = Some(other);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(busy(name))
    }
}

/// Returns the error of a plugin that answers with another record's volume. Its name is not this caller's business.
fn is_anothers(name: &VolumeName, other: &VolumeName) -> Error {
    let text = match name.namespace == other.namespace {
        true => format!("the plugin answered CreateVolume of {name} with the volume of {other}"),
        false => format!("the plugin answered CreateVolume of {name} with a volume of another namespace"),
    };
    Error::new(Kind::AlreadyExists, text)
}

/// Blocks a volume that the plugin has made otherwise than it was asked for. It may be empty, or too large. Nobody uses or deletes it without a request.
fn block_unfit(record: &mut Record) {
    let doubt = rules::refuse_unfit(record).err();
    if let (Some(doubt), Some(registration)) = (doubt, &mut record.registration) {
        tracing::warn!(volume = %record.name, "{doubt}");
        registration.blocked = Some(Blocked { reason: doubt.message });
    }
}

/// Returns the expansion that a record asks for.
fn pending(record: &Record) -> Option<Expansion> {
    record.registration.as_ref().and_then(|of| of.pending_expansion)
}

/// Enters that a call has failed. Returns the error if nothing is left to do for the volume. `had`: the record before the call's intent.
fn enter_failure(record: &mut Record, rpc: DrivenRpc, failed: &VolumeFailure, had: &Record) -> Option<Error> {
    if rpc == DrivenRpc::Expand {
        // An expansion may be asked for again, whatever an earlier call has done.
        if let (false, Some(asked)) = (failed.is_retried(), pending(had)) {
            rules::expansion_refused(record, asked, &failed.error.message);
            return Some(failed.error.clone());
        }
        note(record, &failed.error);
        return None;
    }
    let asked_before = !is_unasked(had);
    if failed.is_no(asked_before) {
        match rpc {
            DrivenRpc::Delete => rules::deletion_refused(record),
            _ => rules::not_created(record, &record.volume.clone()),
        }
        return Some(failed.error.clone());
    }
    note(record, &failed.error);
    if let Some(Registration { blocked, .. }) = &mut record.registration {
        *blocked = (!failed.is_retried()).then(|| Blocked { reason: failed.error.message.clone() });
    }
    if failed.class == CallClass::NotSent && !asked_before {
        rules::set_unasked(record, true);
    }
    None
}

/// Notes that the plugin is asked.
fn set_asked(record: &mut Record, rpc: DrivenRpc) {
    match rpc {
        DrivenRpc::Snapshot | DrivenRpc::DeleteSnapshot => rules::set_snapshot_unasked(record, false),
        _ => rules::set_unasked(record, false),
    }
}

/// Enters that a call for a snapshot has failed. A refusal after a call without an answer proves nothing.
fn enter_snapshot_failure(record: &mut Record, call: &str, failed: &VolumeFailure, had: &Record) {
    let asked_before = had.wanted_snapshot().is_some_and(|task| !task.unasked);
    let is_open = !failed.is_retried() && !failed.is_no(asked_before);
    let kind = if is_open { Kind::Uncertain } else { failed.error.kind };
    let error = SnapshotError { kind: kind.name().to_owned(), message: failed.error.message.clone() };
    rules::snapshot_failed(record, call, error, !failed.is_retried());
    if failed.class == CallClass::NotSent && !asked_before {
        rules::set_snapshot_unasked(record, true);
    }
}

fn note(record: &mut Record, error: &Error) {
    if let Some(registration) = &mut record.registration {
        registration.error = Some(error.message.clone());
    }
}
