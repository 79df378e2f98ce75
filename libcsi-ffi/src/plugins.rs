//! Plugins: those that a scheduler runs itself, and waiting for one.

use std::ffi::c_char;
use std::mem::offset_of;

use csid_client::{Client, PluginSpec, UnregisterOptions};

use crate::arguments::{csi_call, csi_map, csi_strings};
use crate::border::{
    Extensible, extensible, flag, known_flags, map, object, optional_text, text, texts, word,
};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::mounts::CSI_FORCE;
use crate::op::{csi_op, nothing, one, start};

/// A plugin, by who runs it. "managed": csid does, with argv. "unit": an existing systemd unit, with unit and
/// socket. "external": anything else, with socket.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_plugin {
    /// sizeof(csi_plugin), in bytes.
    pub struct_size: usize,
    /// The plugin's ID: 1 to 63 of [A-Za-z0-9._-]. Not NULL.
    pub id: *const c_char,
    /// "external", "unit" or "managed". Required.
    pub supervision: *const c_char,
    /// The path where an external plugin or a unit listens. NULL for a managed one.
    pub socket: *const c_char,
    /// Which of several processes of the plugin. NULL: "default".
    pub instance: *const c_char,
    /// The directory on the host for the volumes' paths. Root only. NULL: csid's own.
    pub plugin_root: *const c_char,
    /// The same directory as the plugin sees it. Root only. NULL: as plugin_root.
    pub plugin_view: *const c_char,
    /// Program (absolute path) and arguments of a managed plugin. Root only. items NULL: none.
    pub argv: csi_strings,
    /// Environment of a managed plugin. It is stored and public: no secrets here. Root only. items NULL: none.
    pub environment: csi_map,
    /// Systemd credentials of a managed plugin, each as LoadCredential= has it. items NULL: none.
    pub credentials: csi_strings,
    /// "journal" or "none". NULL: "journal".
    pub log: *const c_char,
    /// The service in which the plugin runs, with supervision "unit". Root only. NULL: none.
    pub unit: *const c_char,
    /// Of a managed plugin: "node-block", "node-fuse", "node-net" or "controller". Root only. NULL: all devices
    /// and capabilities.
    pub profile: *const c_char,
    /// Of a managed plugin's mounts: "private", "host-to-task" or "bidirectional". Root only. NULL:
    /// "bidirectional".
    pub propagation: *const c_char,
    /// Of a managed plugin: "host", "none" or "netns:NAME". Root only. NULL: "host".
    pub network: *const c_char,
}

// SAFETY: repr(C), struct_size first, pointers and sizes only.
unsafe impl Extensible for csi_plugin {
    const FIRST: usize = offset_of!(csi_plugin, unit);
}

/// Registers a plugin with csid, or another instance of one. The same call again changes nothing. No result
/// row.
///
/// @param client  The connection. Not NULL.
/// @param plugin  The plugin. Not NULL.
/// @param call  Deadline and operation ID; secrets have no use here. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file):
/// - CSI_E_EXISTS: the instance is registered with another specification, or the socket belongs to another
///   plugin.
/// - CSI_E_DENIED: the ID belongs to another user, or a member is root's.
/// - CSI_E_PLUGIN_SHUTDOWN: csid is stopping.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_register_plugin(
    client: *mut csi_client,
    plugin: *const csi_plugin,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_register_plugin", (client, call), (op, error), || {
            object("plugin", plugin)?;
            let given = extensible("plugin", plugin)?;
            let id = text("plugin.id", given.id)?;
            let spec = PluginSpec {
                supervision: word("plugin.supervision", given.supervision)?,
                socket: optional_text("plugin.socket", given.socket)?,
                instance: optional_text("plugin.instance", given.instance)?,
                plugin_root: optional_text("plugin.plugin_root", given.plugin_root)?,
                plugin_view: optional_text("plugin.plugin_view", given.plugin_view)?,
                argv: texts("plugin.argv", given.argv)?,
                environment: map("plugin.environment", given.environment)?,
                credentials: texts("plugin.credentials", given.credentials)?,
                log: optional_text("plugin.log", given.log)?,
                unit: optional_text("plugin.unit", given.unit)?,
                profile: optional_text("plugin.profile", given.profile)?,
                propagation: word("plugin.propagation", given.propagation)?,
                network: optional_text("plugin.network", given.network)?,
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (id, spec) = (id.clone(), spec.clone().with(common));
                async move { client.register_plugin(&id, spec).await.map(|_| nothing(())) }
            })
        })
    }
}

/// Unregisters a plugin, or one instance of it. A missing one is success. No result row.
///
/// @param client  The connection. Not NULL.
/// @param id  The plugin's ID. Not NULL.
/// @param instance  The instance. NULL: all.
/// @param flags  CSI_FORCE, or 0. CSI_FORCE unregisters also a plugin with mounts.
/// @param call  Deadline and operation ID; secrets have no use here. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file):
/// - CSI_E_BUSY: volumes of the plugin are mounted, claimed or attached here, and CSI_FORCE was not given; or
///   it is being unregistered already.
/// - CSI_E_DENIED: another user registered the plugin.
/// - CSI_E_UNSUPPORTED: a file in plugins.d defines the plugin, or it registered itself.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_unregister_plugin(
    client: *mut csi_client,
    id: *const c_char,
    instance: *const c_char,
    flags: u64,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_unregister_plugin", (client, call), (op, error), || {
            let id = text("id", id)?;
            known_flags("unregister", flags, CSI_FORCE)?;
            let options = UnregisterOptions {
                instance: optional_text("instance", instance)?,
                force: flag(flags, CSI_FORCE),
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (id, options) = (id.clone(), options.clone().with(common));
                async move { client.unregister_plugin(&id, options).await.map(nothing) }
            })
        })
    }
}

/// Waits until a service of a plugin is ready, also of a plugin that is not registered yet. Result: the row of
/// csi_get_plugin.
///
/// @param client  The connection. Not NULL.
/// @param id  The plugin's ID. Not NULL.
/// @param service  "node" or "controller". Not NULL.
/// @param call  Deadline and operation ID; secrets have no use here. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file): CSI_E_DEADLINE if it is not
/// ready before the deadline; without one, after csid's own ([deadlines] operation of csid.toml).
///
/// Threads: any thread; never blocks. The operation can be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_wait_for_plugin(
    client: *mut csi_client,
    id: *const c_char,
    service: *const c_char,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_wait_for_plugin", (client, call), (op, error), || {
            let id = text("id", id)?;
            text("service", service)?;
            let Some(service) = word("service", service)? else { unreachable!("it was looked at") };
            Ok(move |client: Client, common| {
                let id = id.clone();
                async move {
                    client.wait_for_plugin(&id, service, common).await?;
                    client.plugin(&id).await.map(one)
                }
            })
        })
    }
}

/// Reads the properties of a plugin. Result: one row with node-id (the plugin's name of this node), the lists
/// node-capabilities and controller-capabilities in CSI's names, such as STAGE_UNSTAGE_VOLUME, the list
/// services, state, healthy, and all else of org.csid1.Plugin.
///
/// @param client  The connection. Not NULL.
/// @param id  The plugin's ID. Not NULL.
/// @param call  Only its deadline is used. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file): CSI_E_NOT_FOUND if no such
/// plugin is registered.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_get_plugin(
    client: *mut csi_client,
    id: *const c_char,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_get_plugin", (client, call), (op, error), || {
            let id = text("id", id)?;
            Ok(move |client: Client, _| {
                let id = id.clone();
                async move { client.plugin(&id).await.map(one) }
            })
        })
    }
}

/// Accepts a changed node ID of a plugin: from now on volumes are attached under it. Existing attachments keep
/// the node ID that they were made with. No result row.
///
/// @param client  The connection. Not NULL.
/// @param id  The plugin's ID. Not NULL.
/// @param node_id  The plugin's current node ID. Not NULL.
/// @param call  Deadline and operation ID; secrets have no use here. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file): CSI_E_INVALID if node_id is not
/// the current one, CSI_E_PLUGIN_UNAVAILABLE if the current one is not known, CSI_E_NOT_FOUND if no such plugin
/// is registered.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_accept_node_id(
    client: *mut csi_client,
    id: *const c_char,
    node_id: *const c_char,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_accept_node_id", (client, call), (op, error), || {
            let (id, node_id) = (text("id", id)?, text("node_id", node_id)?);
            Ok(move |client: Client, common| {
                let (id, node_id) = (id.clone(), node_id.clone());
                async move { client.accept_node_id(&id, &node_id, common).await.map(nothing) }
            })
        })
    }
}
