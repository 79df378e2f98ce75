//! Plugins: those that a scheduler runs itself, and waiting for one.

use std::ffi::c_char;

use csid_client::{Client, PluginSpec, UnregisterOptions};

use crate::border::{
    Extensible, extensible, flag, known_flags, map, object, optional_text, text, texts, word,
};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::given::{csi_call, csi_map, csi_strings};
use crate::mounts::CSI_FORCE;
use crate::op::{csi_op, nothing, one, start};

/// A plugin. One that runs already has a socket; one that csid is to run as a unit has argv.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_plugin {
    pub struct_size: usize,
    pub id: *const c_char,
    /// "external", "managed"
    pub supervision: *const c_char,
    pub socket: *const c_char,
    /// Which of several processes of the plugin; NULL: its only one.
    pub instance: *const c_char,
    /// The directory on the host, and the same as the plugin sees it.
    pub plugin_root: *const c_char,
    pub plugin_view: *const c_char,
    pub argv: csi_strings,
    /// Stored and public: no secrets here.
    pub environment: csi_map,
    pub credentials: csi_strings,
    /// "journal", "none"
    pub log: *const c_char,
}

// SAFETY: repr(C), struct_size first, pointers and sizes only.
unsafe impl Extensible for csi_plugin {}

/// Tell csid of a plugin, or of another instance of one. No row.
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
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (id, spec) = (id.clone(), spec.clone().with(common));
                async move { client.register_plugin(&id, spec).await.map(|_| nothing(())) }
            })
        })
    }
}

/// Let csid forget a plugin, or one instance of it; NULL: all. Refused with CSI_E_BUSY while it has mounts, unless CSI_FORCE is in
/// flags. What is not there is gone already. No row.
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

/// Wait until a plugin's service, "node" or "controller", is ready; without a deadline for ever. The row of csi_get_plugin.
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

/// A plugin: node-id, the name that its storage has for this node; node-capabilities and controller-capabilities (CSI's own names:
/// STAGE_UNSTAGE_VOLUME, PUBLISH_UNPUBLISH_VOLUME); services, state, healthy, and all else of org.csid1.Plugin.
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
