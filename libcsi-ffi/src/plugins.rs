//! Plugins: those that a scheduler runs itself, and waiting for one.

use std::ffi::c_char;
use std::mem::offset_of;

use csid_client::{Client, PluginSpec, UnregisterOptions};

use crate::border::{
    Extensible, extensible, flag, known_flags, map, object, optional_text, text, texts, word,
};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::given::{csi_call, csi_map, csi_strings};
use crate::mounts::CSI_FORCE;
use crate::op::{csi_op, nothing, one, start};

/// A plugin. A managed one, which csid runs, has argv; one in a unit that somebody else has defined has unit and socket; an external
/// one, which somebody else runs, has a socket.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_plugin {
    pub struct_size: usize,
    pub id: *const c_char,
    /// "external", "unit", "managed"
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
    /// The service that it runs in.
    pub unit: *const c_char,
    /// Of a managed one, from here on. "node-block", "node-fuse", "node-net", "controller"
    pub profile: *const c_char,
    /// "private", "host-to-task", "bidirectional": of its mounts.
    pub propagation: *const c_char,
    /// "host", "none", "netns:NAME"
    pub network: *const c_char,
}

// SAFETY: repr(C), struct_size first, pointers and sizes only.
unsafe impl Extensible for csi_plugin {
    const FIRST: usize = offset_of!(csi_plugin, unit);
}

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

/// Have volumes attached under the name that the plugin has for this node now, which node_id says: what was attached under another
/// one keeps that. CSI_E_INVALID where it is not the name that it has now. No row.
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
