//! A plugin's capacity, volumes and snapshots.

use std::ffi::c_char;

use csid_client::{CapacityOptions, Client, SnapshotFilter};
use serde_json::json;

use crate::arguments::{capabilities as read_capabilities, csi_call, csi_capabilities, csi_map};
use crate::border::{map, optional_text, text};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::op::{csi_op, nothing, one, start};

/// Asks a plugin for the capacity available to new volumes with the given capabilities, parameters and
/// topology. Empty arguments match anything. Result: one row with available, in bytes.
///
/// @param client  The connection. Not NULL.
/// @param plugin  The plugin's ID. Not NULL.
/// @param capabilities  How the volumes would be used. items NULL: any way.
/// @param parameters  Parameters of the volumes. items NULL: none.
/// @param topology  The segments of one place. items NULL: any place. Sent only to a plugin that has
///   topologies.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// CSI_E_NOT_FOUND if no such plugin is registered, CSI_E_UNSUPPORTED if it has no controller.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_get_capacity(
    client: *mut csi_client,
    plugin: *const c_char,
    capabilities: csi_capabilities,
    parameters: csi_map,
    topology: csi_map,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_get_capacity", (client, call), (op, error), || {
            let plugin = text("plugin", plugin)?;
            let options = CapacityOptions {
                capabilities: read_capabilities(capabilities)?,
                parameters: map("parameters", parameters)?,
                topology: map("topology", topology)?,
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (plugin, options) = (plugin.clone(), options.clone().with(common));
                async move {
                    let available = client.capacity(&plugin, options).await?;
                    Ok(one(json!({ "available": available })))
                }
            })
        })
    }
}

/// Lists a page of the volumes that a plugin has, registered or not. Result: one row with volumes, a list of
/// rows with external-id, capacity (bytes), published-node-ids, abnormal and message; and next-token, empty
/// after the last page. The pages are not one consistent view.
///
/// @param client  The connection. Not NULL.
/// @param plugin  The plugin's ID. Not NULL.
/// @param token  next-token of the page before. NULL: the first page.
/// @param max  The most volumes of the page. 0: the plugin's choice.
/// @param call  Only its deadline is used. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// CSI_E_NOT_FOUND if no such plugin is registered, CSI_E_UNSUPPORTED if it has no controller. CSI_E_PLUGIN with
/// gRPC code 10 (ABORTED): start again without a token.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_list_external_volumes(
    client: *mut csi_client,
    plugin: *const c_char,
    token: *const c_char,
    max: u32,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_list_external_volumes", (client, call), (op, error), || {
            let plugin = text("plugin", plugin)?;
            let token = optional_text("token", token)?.unwrap_or_default();
            Ok(move |client: Client, _| {
                let (plugin, token) = (plugin.clone(), token.clone());
                async move {
                    let (volumes, next) = client.list_external_volumes(&plugin, &token, max).await?;
                    Ok(one(json!({ "volumes": volumes, "next-token": next })))
                }
            })
        })
    }
}

/// Lists a page of the snapshots that a plugin has. Result: one row with snapshots, a list of rows as of
/// csi_create_snapshot, and next-token, empty after the last page. The pages are not one consistent view.
///
/// @param client  The connection. Not NULL.
/// @param plugin  The plugin's ID. Not NULL.
/// @param snapshot  The plugin's ID of a snapshot: only this one. NULL: all.
/// @param external_id  The plugin's ID of a volume: only its snapshots. NULL: all.
/// @param token  next-token of the page before. NULL: the first page.
/// @param max  The most snapshots of the page. 0: the plugin's choice.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// CSI_E_NOT_FOUND if no such plugin is registered, CSI_E_UNSUPPORTED if it has no controller. CSI_E_PLUGIN with
/// gRPC code 10 (ABORTED): start again without a token.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_list_snapshots(
    client: *mut csi_client,
    plugin: *const c_char,
    snapshot: *const c_char,
    external_id: *const c_char,
    token: *const c_char,
    max: u32,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_list_snapshots", (client, call), (op, error), || {
            let plugin = text("plugin", plugin)?;
            let filter = SnapshotFilter {
                snapshot: optional_text("snapshot", snapshot)?,
                volume: optional_text("external_id", external_id)?,
                token: optional_text("token", token)?,
                max: Some(max),
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (plugin, filter) = (plugin.clone(), filter.clone().with(common));
                async move {
                    let (snapshots, next) = client.list_snapshots(&plugin, filter).await?;
                    Ok(one(json!({ "snapshots": snapshots, "next-token": next })))
                }
            })
        })
    }
}

/// Has the plugin delete a snapshot. A missing one is success. No result row.
///
/// @param client  The connection. Not NULL.
/// @param plugin  The plugin's ID. Not NULL.
/// @param snapshot  The plugin's ID of the snapshot. Not NULL.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// CSI_E_NOT_FOUND if no such plugin is registered, CSI_E_UNSUPPORTED if it has no controller, CSI_E_DENIED also
/// if the snapshot is of no volume that the caller registered.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_delete_snapshot(
    client: *mut csi_client,
    plugin: *const c_char,
    snapshot: *const c_char,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_delete_snapshot", (client, call), (op, error), || {
            let (plugin, snapshot) = (text("plugin", plugin)?, text("snapshot", snapshot)?);
            Ok(move |client: Client, common| {
                let (plugin, snapshot) = (plugin.clone(), snapshot.clone());
                async move { client.delete_snapshot(&plugin, &snapshot, common).await.map(nothing) }
            })
        })
    }
}
