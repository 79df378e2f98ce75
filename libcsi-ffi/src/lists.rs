//! csid's own properties, and its lists.

use std::collections::BTreeMap;
use std::ffi::c_char;

use csid_client::{ClaimFilter, Client, MountFilter, VolumeFilter};

use crate::arguments::{csi_call, csi_map};
use crate::border::{Result, invalid, map, text};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::op::{csi_op, many, one, start};

/// The kind of a list, and its filter.
#[derive(Clone)]
enum List {
    Plugins,
    Operations,
    Volumes(VolumeFilter),
    Claims(ClaimFilter),
    Mounts(MountFilter),
}

impl List {
    fn of(kind: &str, mut filter: BTreeMap<String, String>) -> Result<Self> {
        let mut take = |key: &str| filter.remove(key);
        let list = match kind {
            "plugins" => Self::Plugins,
            "operations" => Self::Operations,
            "volumes" => Self::Volumes(VolumeFilter {
                namespace: take("namespace"),
                plugin: take("plugin"),
                node: take("node"),
                prefix: take("prefix"),
                declared: value("declared", take("declared"))?,
                after: take("after"),
                max: value("max", take("max"))?,
            }),
            "claims" => Self::Claims(ClaimFilter {
                namespace: take("namespace"),
                volume: take("volume"),
                consumer: take("consumer"),
                node: take("node"),
                past: value("past", take("past"))?,
                after: take("after"),
                max: value("max", take("max"))?,
            }),
            "mounts" => Self::Mounts(MountFilter {
                namespace: take("namespace"),
                volume: take("volume"),
                consumer: take("consumer"),
                tag: take("tag"),
                plugin: take("plugin"),
                state: take("state"),
                uid: value("uid", take("uid"))?,
                target: take("target"),
                after: take("after"),
                max: value("max", take("max"))?,
            }),
            _ => return Err(invalid("kind is none of plugins, volumes, claims, mounts, operations")),
        };
        match filter.keys().next() {
            Some(key) => Err(invalid(format!("{kind} have no filter `{key}`"))),
            None => Ok(list),
        }
    }
}

fn value<T: std::str::FromStr>(key: &str, text: Option<String>) -> Result<Option<T>> {
    let read =
        |text: String| text.parse().map_err(|_| invalid(format!("the filter {key} cannot be `{text}`")));
    text.map(read).transpose()
}

/// Lists "plugins", "volumes", "claims", "mounts" or "operations". Result: one row per object, with the names
/// of org.csid1.xml.
///
/// @param client  The connection. Not NULL.
/// @param kind  One of the words above. Not NULL.
/// @param filter  Only objects that match all of these. volumes: namespace, plugin, node, prefix, declared
///   ("true": also those that files of volumes.d declare and that are not registered yet). claims: namespace,
///   volume, consumer, node, past ("true": those that ended). mounts: namespace, volume, consumer, tag, plugin,
///   state, uid, target. plugins and operations take none. items NULL: no filter. volumes, claims and mounts also
///   come in pages: max is the number of rows, after is the cursor of the last row of the page before, with the
///   same filter (if the features of csi_get_manager contain "pages").
/// @param call  Only its deadline is used. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID (also for an unknown kind or filter),
///   CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL: it was not.
///
/// Errors of the operation: those of every operation; see the top of this file.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_list(
    client: *mut csi_client,
    kind: *const c_char,
    filter: csi_map,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_list", (client, call), (op, error), || {
            let (kind, filter) = (text("kind", kind)?, map("filter", filter)?.unwrap_or_default());
            let list = List::of(&kind, filter)?;
            Ok(move |client: Client, _| {
                let list = list.clone();
                async move {
                    match list {
                        List::Plugins => client.list_plugins().await.map(many),
                        List::Operations => client.list_operations().await.map(many),
                        List::Volumes(filter) => client.list_volumes(filter).await.map(many),
                        List::Claims(filter) => client.list_claims(filter).await.map(many),
                        List::Mounts(filter) => client.list_mounts(filter).await.map(many),
                    }
                }
            })
        })
    }
}

/// Reads csid's own properties. Result: one row with features (a list of what this csid can do), state,
/// version, journal-id, event-sequence and modify-index.
///
/// @param client  The connection. Not NULL.
/// @param call  Only its deadline is used. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation: those of every operation; see the top of this file.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_get_manager(
    client: *mut csi_client,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_get_manager", (client, call), (op, error), || {
            Ok(|client: Client, _| async move { client.manager().await.map(one) })
        })
    }
}
