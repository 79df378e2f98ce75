//! What a plugin has and could have: capacity, volumes and snapshots.

use std::ffi::c_char;

use csid_client::{CapacityOptions, Client, SnapshotFilter};
use serde_json::json;

use crate::border::{map, optional_text, text};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::given::{capabilities as read_capabilities, csi_call, csi_capabilities, csi_map};
use crate::op::{csi_op, nothing, one, start};

/// How much a plugin could still make: volumes that can be used so, made with these parameters, there; without all of these, any. One
/// row: available, in bytes.
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

/// A page of the volumes that a plugin has, registered here or not. token: next-token of the page before; NULL: from the beginning.
/// max: of the page; 0: the plugin's choice. One row: volumes, a row each of external-id, capacity, published-node-ids, abnormal,
/// message; and next-token, empty after the last page. Pages are no consistent view.
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

/// A page of the snapshots that a plugin has; snapshot and external_id, the plugin's for a snapshot and for a volume: only those; NULL:
/// all. token and max as csi_list_external_volumes has them. One row: snapshots, a row each as csi_create_snapshot's, and next-token.
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

/// Have the plugin delete a snapshot of its. What is not there is gone already. No row.
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
