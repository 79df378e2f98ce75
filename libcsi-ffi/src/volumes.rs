//! Calls about a volume: those of its controller, and those that read its state.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::pin::Pin;

use csid_client::{CallOptions, Client, DeregisterOptions};

use crate::arguments::{Volume, csi_call, csi_map, csi_volume, with_inline};
use crate::border::{Extensible, Result, extensible, flag, known_flags, map, text, word};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::mounts::{CSI_FORCE, CSI_FORGET, CSI_READ_ONLY};
use crate::op::{Answer, csi_op, nothing, one, start};

/// How a volume is or would be used. NULL or all zeroes: to read and write, with no mode given.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_usage {
    /// sizeof(csi_usage), in bytes.
    pub struct_size: usize,
    /// CSI_READ_ONLY, or 0. csi_validate_volume takes 0 only.
    pub flags: u64,
    /// An access mode as in csi_capability. NULL: not given. csi_attach_volume then takes the mode in which the
    /// volume is used, else its first capability that fits.
    pub access_mode: *const c_char,
    /// "file-system" or "block-device". NULL: not given, as for access_mode.
    pub attachment_mode: *const c_char,
}

// SAFETY: repr(C), struct_size first, pointers and integers of eight bytes only.
unsafe impl Extensible for csi_usage {}

/// Attaches a volume to a node, for a scheduler that keeps its own claims. Result: one row with
/// publish-context, which csi_mount_options takes on that node.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
///   external_id.
/// @param node_id  The plugin's name of the node: node-id of csi_get_plugin there. Not NULL.
/// @param usage  How the volume is used there. NULL: read and write, with no mode given. An inline volume needs
///   a mode here or in its capabilities.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_NOT_FOUND: the volume is not registered and was not given inline, or the plugin is unknown.
/// - CSI_E_CLAIM_CONFLICT: the volume is claimed.
/// - CSI_E_EXISTS: it is attached to the node with other options.
/// - CSI_E_UNSUPPORTED: the plugin attaches nothing.
///
/// Threads: any thread; never blocks. Cancelling the operation rolls the attachment back. One that
///   was complete at that moment stays: detach it.
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

/// Detaches a volume from a node. A volume that is not attached is success. No result row.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
///   external_id.
/// @param node_id  The plugin's name of the node. Not NULL.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_BUSY: the volume is staged on this host under that node ID; unmount it first.
/// - CSI_E_CLAIM_CONFLICT: the attachment belongs to a claim.
/// - CSI_E_DENIED: another user attached it.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
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
            let options = with_inline!(DetachOptions, inline);
            Ok(move |client: Client, common| {
                let (namespace, id, node_id) = (namespace.clone(), id.clone(), node_id.clone());
                let options = options.clone().with(common);
                async move { client.detach_volume(&namespace, &id, &node_id, options).await.map(nothing) }
            })
        })
    }
}

/// Asks the plugin whether a volume can be used in a way. Result: one row with confirmed (boolean) and message
/// (why not).
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
///   external_id.
/// @param usage  The way; its flags are 0. NULL: all capabilities of volume.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// CSI_E_NOT_FOUND if the volume is not registered and was not given inline, or the plugin is unknown.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
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

/// Expands a volume. Result: one row with capacity-bytes and node-expansion-required (boolean: a node still has
/// to expand it).
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
///   external_id.
/// @param required  The least size, in bytes.
/// @param limit  The largest size, in bytes. 0: no limit.
/// @param part  "all", "controller" or "node". NULL: "all".
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_INVALID: limit is less than required or than the size of the volume.
/// - CSI_E_UNSUPPORTED: the plugin cannot expand that part.
/// - CSI_E_NOT_FOUND: the volume is not registered and was not given inline, or the plugin is unknown.
/// - CSI_E_BUSY: the volume is being created or deleted.
/// - CSI_E_DEADLINE: also if the plugin expands only volumes that are not in use, and this one stayed in use.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
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

/// Has the plugin delete a volume with its content. A missing volume is success. No result row.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
///   external_id.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_BUSY: the volume is mounted, claimed, attached or being created.
/// - CSI_E_DENIED: another user registered it.
/// - CSI_E_UNSUPPORTED: a file in volumes.d declares the volume.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
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

/// Has the plugin create a snapshot, and waits until it is ready. The same name again is the same snapshot.
/// Result: one row with id, external-id (of the volume), size (bytes), created (microseconds since 1970) and
/// ready.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
///   external_id.
/// @param name  The name that the plugin gives the snapshot. Not NULL.
/// @param parameters  Parameters for the plugin. items NULL: none.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// CSI_E_NOT_FOUND if the volume is not registered and was not given inline, or the plugin is unknown;
/// CSI_E_DEADLINE also if the snapshot exists but is not ready yet.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
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
            snapshot((volume, name, parameters), None)
        })
    }
}

/// Has the plugin create a snapshot, and ends as soon as the plugin has answered. The same call again returns
/// the progress. Result: as of csi_create_snapshot, with ready false if the snapshot cannot be used yet.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
///   external_id.
/// @param name  The name that the plugin gives the snapshot. Not NULL.
/// @param parameters  Parameters for the plugin. items NULL: none.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation: those of csi_create_snapshot.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_begin_snapshot(
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
        start("csi_begin_snapshot", (client, call), (op, error), || {
            snapshot((volume, name, parameters), Some(false))
        })
    }
}

type Ending = Pin<Box<dyn Future<Output = csid_client::Result<Answer>> + Send>>;

/// Returns the call that makes a snapshot. `wait`: until it can be used.
///
/// # Safety
///
/// The arguments are as csi.h says.
unsafe fn snapshot(
    (volume, name, parameters): (*const csi_volume, *const c_char, csi_map),
    wait: Option<bool>,
) -> Result<impl Fn(Client, CallOptions) -> Ending + Send + Sync + 'static> {
    // SAFETY: as the caller has promised.
    unsafe {
        let Volume { namespace, id, inline } = Volume::read(volume)?;
        let name = text("name", name)?;
        let parameters = map("parameters", parameters)?;
        let options = with_inline!(SnapshotOptions, inline, parameters: parameters, wait: wait);
        Ok(move |client: Client, common| {
            let (namespace, id, name) = (namespace.clone(), id.clone(), name.clone());
            let options = options.clone().with(common);
            Box::pin(async move { client.create_snapshot(&namespace, &id, &name, options).await.map(one) })
                as Ending
        })
    }
}

/// Asks the plugin for the usage of a volume that is mounted here. Result: one row with usage, a list of rows
/// (unit "BYTES" or "INODES", available, total, used), abnormal (boolean) and message (the plugin's).
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. Only ns and id are used.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// CSI_E_NOT_FOUND if the volume is not mounted here.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
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

/// Reads a registered volume. Result: one row with context, parameters, capabilities, claims, and all else of
/// GetVolume in org.csid1.xml.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. Only ns and id are used.
/// @param call  Only its deadline is used. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file): CSI_E_NOT_FOUND if the volume
/// is not registered.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
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

/// Deregisters a volume, which the plugin keeps. A missing one is success. No result row.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. Only ns and id are used.
/// @param flags  0, or CSI_FORCE (although it is claimed) and CSI_FORGET (root only: give up a creation or
///   deletion that never ends).
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file):
/// - CSI_E_BUSY: the volume is mounted, or claimed and CSI_FORCE was not given, or its creation or deletion has
///   not ended.
/// - CSI_E_DENIED: another user registered it, or the flag is root's.
/// - CSI_E_UNSUPPORTED: a file in volumes.d declares it.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
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
            known_flags("deregister", flags, CSI_FORCE | CSI_FORGET)?;
            let options = DeregisterOptions {
                force: flag(flags, CSI_FORCE),
                forget: flag(flags, CSI_FORGET),
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (namespace, id) = (namespace.clone(), id.clone());
                let options = options.clone().with(common);
                async move { client.deregister_volume(&namespace, &id, options).await.map(nothing) }
            })
        })
    }
}

/// Explains why a volume is not in the wanted state. Result: one row with waiting-for, the lists holders and
/// steps, last-error, and next-try (microseconds since 1970).
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. Only ns and id are used.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file): CSI_E_NOT_FOUND if csid does
/// not know the volume.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
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
