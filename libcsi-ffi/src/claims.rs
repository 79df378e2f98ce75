//! Claim and Release.

use std::ffi::c_char;

use csid_client::{ClaimOptions, Client, ReleaseOptions};

use crate::border::{Extensible, extensible, flag, known_flags, optional_text, text, word};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::given::{Volume, csi_call, csi_volume};
use crate::mounts::CSI_FORCE;
use crate::op::{csi_op, nothing, one, start};

/// How a registered volume is claimed; NULL, or all zeroes: to write, on this node, without waiting for other claims.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_claim_options {
    pub struct_size: usize,
    /// "read", "write"
    pub mode: *const c_char,
    pub access_mode: *const c_char,
    pub attachment_mode: *const c_char,
    pub node: *const c_char,
    /// How long to wait for the claims that are in the way.
    pub wait_usec: u64,
    /// "unit:NAME": what ends the claim in place of csi_release.
    pub bind: *const c_char,
    /// How long after that.
    pub grace_usec: u64,
}

// SAFETY: repr(C), struct_size first, pointers and integers of eight bytes only.
unsafe impl Extensible for csi_claim_options {}

/// Claim a registered volume, of which ns and id are looked at alone, for a consumer. One row: the volume, publish-context, external-node-id, state.
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

/// Let a claim go: unmounted and detached first. One that is not there is free already. node NULL: this one. flags: CSI_FORCE, the
/// claim is dropped as it is. No row.
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
            known_flags("release", flags, CSI_FORCE)?;
            let options = ReleaseOptions {
                force: flag(flags, CSI_FORCE),
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
