//! Claim and Release.

use std::ffi::c_char;

use csid_client::{ClaimOptions, Client, ReleaseOptions};

use crate::arguments::{Volume, csi_call, csi_volume};
use crate::border::{Extensible, extensible, flag, known_flags, optional_text, text, word};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::mounts::{CSI_FORCE, CSI_FORGET};
use crate::op::{csi_op, nothing, one, start};

/// How a registered volume is claimed. NULL or all zeroes: on this node, without waiting for other claims, as
/// it is used or registered.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_claim_options {
    /// sizeof(csi_claim_options), in bytes.
    pub struct_size: usize,
    /// "read" or "write". NULL: "read" with a reader-only access mode, else "write".
    pub mode: *const c_char,
    /// An access mode as in csi_capability. NULL: that in which the volume is used, else its first capability
    /// that fits.
    pub access_mode: *const c_char,
    /// "file-system" or "block-device". NULL: as for access_mode.
    pub attachment_mode: *const c_char,
    /// The node that claims. NULL: csid's own. csid refuses any other with CSI_E_DENIED.
    pub node: *const c_char,
    /// How long to wait while a claim or an expansion is in the way, or the plugin takes no more volumes on this
    /// node, in microseconds. 0: do not wait; the operation fails with CSI_E_CLAIM_CONFLICT.
    pub wait_usec: u64,
    /// "unit:NAME": the claim ends when that systemd unit ends. NULL: it ends with csi_release.
    pub bind: *const c_char,
    /// How long after the unit's end the claim lasts, in microseconds. 0: ends at once. Needs bind.
    pub grace_usec: u64,
}

// SAFETY: repr(C), struct_size first, pointers and integers of eight bytes only.
unsafe impl Extensible for csi_claim_options {}

/// Claims a registered volume for a consumer, and attaches it to this node where its plugin attaches. Result:
/// one row with the volume as in csi_get_volume, publish-context, external-node-id and state. The same call
/// again returns the same claim.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. Only ns and id are used.
/// @param consumer  Who claims. Not NULL.
/// @param options  How to claim. NULL: the defaults.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_NOT_FOUND: the volume is not registered, or the unit of bind does not run.
/// - CSI_E_EXISTS: the consumer has claimed the volume with other options.
/// - CSI_E_CLAIM_CONFLICT: other claims are in the way, the node has no room for another volume of the plugin,
///   or cannot reach this one.
/// - CSI_E_BUSY: the volume is being created or deleted; or, in a cluster, this host drains.
/// - CSI_E_UNSUPPORTED: the end of the unit of bind cannot be watched.
/// - CSI_E_DENIED: also for another user's claim, or another node.
///
/// Threads: any thread; never blocks. Cancelling the operation rolls the claim back. One that
///   was complete at that moment stays: release it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_claim(
    client: *mut csi_client,
    volume: *const csi_volume,
    consumer: *const c_char,
    options: *const csi_claim_options,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_claim", (client, call), (op, error), || {
            let (namespace, id) = Volume::name(volume)?;
            let consumer = text("consumer", consumer)?;
            let given = extensible("options", options)?;
            let options = ClaimOptions {
                mode: word("options.mode", given.mode)?,
                access_mode: word("options.access_mode", given.access_mode)?,
                attachment_mode: word("options.attachment_mode", given.attachment_mode)?,
                node: optional_text("options.node", given.node)?,
                wait_usec: (given.wait_usec != 0).then_some(given.wait_usec),
                bind: optional_text("options.bind", given.bind)?,
                grace_usec: (given.grace_usec != 0).then_some(given.grace_usec),
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (namespace, id, consumer) = (namespace.clone(), id.clone(), consumer.clone());
                let options = options.clone().with(common);
                async move { client.claim(&namespace, &id, &consumer, options).await.map(one) }
            })
        })
    }
}

/// Releases a claim: unmounts what the consumer has mounted here, then detaches the volume. A missing claim is
/// success. No result row.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. Only ns and id are used.
/// @param consumer  The consumer of the claim. Not NULL.
/// @param node  The node that the claim has to be on. NULL: any node.
/// @param flags  0, or CSI_FORCE (drop the claim as it is) and CSI_FORGET (root only: drop the claim and the
///   consumer's mounts without an answer of the plugin).
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_BUSY: processes use a mount of the consumer; nothing was changed. With CSI_FORGET: any mount
///   namespace shows one.
/// - CSI_E_DENIED: the claim is another user's, or the flag is root's.
/// - CSI_E_SECRET_REQUIRED: the plugin needs the secrets to detach.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_release(
    client: *mut csi_client,
    volume: *const csi_volume,
    consumer: *const c_char,
    node: *const c_char,
    flags: u64,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_release", (client, call), (op, error), || {
            let (namespace, id) = Volume::name(volume)?;
            let consumer = text("consumer", consumer)?;
            known_flags("release", flags, CSI_FORCE | CSI_FORGET)?;
            let options = ReleaseOptions {
                force: flag(flags, CSI_FORCE),
                forget: flag(flags, CSI_FORGET),
                node: optional_text("node", node)?,
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (namespace, id, consumer) = (namespace.clone(), id.clone(), consumer.clone());
                let options = options.clone().with(common);
                async move { client.release(&namespace, &id, &consumer, options).await.map(nothing) }
            })
        })
    }
}
