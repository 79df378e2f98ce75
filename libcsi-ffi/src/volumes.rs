//! What a controller does for a volume, and what is known of one.

use std::collections::BTreeMap;
use std::ffi::c_char;

use csid_client::{Client, DeregisterOptions};

use crate::border::{Extensible, extensible, flag, known_flags, map, text, word};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::given::{Volume, csi_call, csi_map, csi_volume, with_inline};
use crate::mounts::{CSI_FORCE, CSI_READ_ONLY};
use crate::op::{csi_op, nothing, one, start};

/// How a volume is, or would be, used; NULL, or all zeroes: to write, as a file system, by a single node.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_usage {
    pub struct_size: usize,
    /// CSI_READ_ONLY
    pub flags: u64,
    pub access_mode: *const c_char,
    pub attachment_mode: *const c_char,
}

// SAFETY: repr(C), struct_size first, pointers and integers of eight bytes only.
unsafe impl Extensible for csi_usage {}

/// Attach a volume to a node, for a scheduler that keeps its own claims; node_id is csi_get_plugin's node-id there. One row:
/// publish-context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_attach_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    node_id: *const c_char,
    usage: *const csi_usage,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_attach_volume", (client, call), (op, error), || {
            let Volume { namespace, id, inline } = Volume::read(volume)?;
            let node_id = text("node_id", node_id)?;
            let given = extensible("usage", usage)?;
            known_flags("usage", given.flags, CSI_READ_ONLY)?;
            let options = with_inline!(AttachOptions, inline,
                read_only: flag(given.flags, CSI_READ_ONLY),
                access_mode: word("usage.access_mode", given.access_mode)?,
                attachment_mode: word("usage.attachment_mode", given.attachment_mode)?);
            Ok(move |client: Client, common| {
                let (namespace, id, node_id) = (namespace.clone(), id.clone(), node_id.clone());
                let options = options.clone().with(common);
                async move {
                    let context = client.attach_volume(&namespace, &id, &node_id, options).await?;
                    Ok(one(BTreeMap::from([("publish-context", context)])))
                }
            })
        })
    }
}

/// Detach a volume from a node: CSI_E_BUSY while it is staged here under that node's id. What is not attached is detached already.
/// No row.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_detach_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    node_id: *const c_char,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_detach_volume", (client, call), (op, error), || {
            let Volume { namespace, id, inline } = Volume::read(volume)?;
            let node_id = text("node_id", node_id)?;
            Ok(move |client: Client, common| {
                let (namespace, id, node_id) = (namespace.clone(), id.clone(), node_id.clone());
                let options = inline.clone().with(common);
                async move { client.detach_volume(&namespace, &id, &node_id, options).await.map(nothing) }
            })
        })
    }
}

/// Ask the plugin whether a volume can be used so. One row: confirmed, and message, why not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_validate_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    usage: *const csi_usage,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_validate_volume", (client, call), (op, error), || {
            let Volume { namespace, id, inline } = Volume::read(volume)?;
            let given = extensible("usage", usage)?;
            known_flags("usage", given.flags, 0)?;
            let options = with_inline!(ValidateOptions, inline,
                access_mode: word("usage.access_mode", given.access_mode)?,
                attachment_mode: word("usage.attachment_mode", given.attachment_mode)?);
            Ok(move |client: Client, common| {
                let (namespace, id) = (namespace.clone(), id.clone());
                let options = options.clone().with(common);
                async move { client.validate_volume(&namespace, &id, options).await.map(one) }
            })
        })
    }
}

/// Make a volume larger: to required bytes at least and, unless that is 0, limit at most. part: "all" (NULL), "controller", "node".
/// One row: capacity-bytes, node-expansion-required.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_expand_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    required: u64,
    limit: u64,
    part: *const c_char,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_expand_volume", (client, call), (op, error), || {
            let Volume { namespace, id, inline } = Volume::read(volume)?;
            let options = with_inline!(ExpandOptions, inline, part: word("part", part)?);
            Ok(move |client: Client, common| {
                let (namespace, id) = (namespace.clone(), id.clone());
                let options = options.clone().with(common);
                async move { client.expand_volume(&namespace, &id, required, limit, options).await.map(one) }
            })
        })
    }
}

/// Have the plugin delete a volume, and what is on it. What is not there is gone already. No row.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_delete_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_delete_volume", (client, call), (op, error), || {
            let Volume { namespace, id, inline } = Volume::read(volume)?;
            Ok(move |client: Client, common| {
                let (namespace, id) = (namespace.clone(), id.clone());
                let options = inline.clone().with(common);
                async move { client.delete_volume(&namespace, &id, options).await.map(nothing) }
            })
        })
    }
}

/// Have the plugin make a snapshot. One row: id, external-id (the volume's), size, created (microseconds since 1970), ready.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_create_snapshot(
    client: *mut csi_client,
    volume: *const csi_volume,
    name: *const c_char,
    parameters: csi_map,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_create_snapshot", (client, call), (op, error), || {
            let Volume { namespace, id, inline } = Volume::read(volume)?;
            let name = text("name", name)?;
            let options = with_inline!(SnapshotOptions, inline, parameters: map("parameters", parameters)?);
            Ok(move |client: Client, common| {
                let (namespace, id, name) = (namespace.clone(), id.clone(), name.clone());
                let options = options.clone().with(common);
                async move { client.create_snapshot(&namespace, &id, &name, options).await.map(one) }
            })
        })
    }
}

/// What a volume that is mounted here has used. One row: usage, a row each of BYTES and INODES with unit, available, total, used;
/// abnormal, and message, the plugin's words for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_volume_stats(
    client: *mut csi_client,
    volume: *const csi_volume,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_volume_stats", (client, call), (op, error), || {
            let (namespace, id) = Volume::name(volume)?;
            Ok(move |client: Client, common| {
                let (namespace, id) = (namespace.clone(), id.clone());
                async move { client.volume_stats(&namespace, &id, common).await.map(one) }
            })
        })
    }
}

/// A registered volume: its context, parameters, capabilities, claims, and all else of GetVolume. One row.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_get_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_get_volume", (client, call), (op, error), || {
            let (namespace, id) = Volume::name(volume)?;
            Ok(move |client: Client, _| {
                let (namespace, id) = (namespace.clone(), id.clone());
                async move { client.volume(&namespace, &id).await.map(one) }
            })
        })
    }
}

/// Forget a registered volume, which the plugin keeps. flags: CSI_FORCE, whatever claims it. No row.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_deregister_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    flags: u64,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_deregister_volume", (client, call), (op, error), || {
            let (namespace, id) = Volume::name(volume)?;
            known_flags("deregister", flags, CSI_FORCE)?;
            let options = DeregisterOptions { force: flag(flags, CSI_FORCE), ..Default::default() };
            Ok(move |client: Client, common| {
                let (namespace, id) = (namespace.clone(), id.clone());
                let options = options.clone().with(common);
                async move { client.deregister_volume(&namespace, &id, options).await.map(nothing) }
            })
        })
    }
}

/// Why a volume is not where it is wanted. One row: waiting-for, holders, last-error, next-try, steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_explain(
    client: *mut csi_client,
    volume: *const csi_volume,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_explain", (client, call), (op, error), || {
            let (namespace, id) = Volume::name(volume)?;
            Ok(move |client: Client, common| {
                let (namespace, id) = (namespace.clone(), id.clone());
                async move { client.explain(&namespace, &id, common).await.map(one) }
            })
        })
    }
}
