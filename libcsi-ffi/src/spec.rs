//! Volumes that csid is to know, and those that a plugin is to make.

use std::collections::BTreeMap;
use std::ffi::c_char;

use csid_client::{Client, CreateVolume, RegisterVolume};

use crate::arguments::{Volume, csi_call, csi_map, csi_volume};
use crate::border::{
    Extensible, Result, extensible, flag, invalid, items, known_flags, map, optional_text, word,
};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::mounts::{CSI_DEV, CSI_SUID};
use crate::op::{csi_op, one, start};

/// csi_create_volume: csid does not register the volume; the caller keeps the result.
pub const CSI_CREATE_ONLY: u64 = 8;

/// A list of topologies, each a map of segments.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_topologies {
    /// The topologies. NULL: no list; len is then 0.
    pub items: *const csi_map,
    /// The number of topologies.
    pub len: usize,
}

/// What a volume is to be, beyond csi_volume. NULL or all zeroes: nothing else.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_volume_spec {
    /// sizeof(csi_volume_spec), in bytes.
    pub struct_size: usize,
    /// CSI_SUID and CSI_DEV; csi_create_volume also CSI_CREATE_ONLY. 0: none.
    pub flags: u64,
    /// A name for people; csi_create_volume gives it to the plugin as the volume's name. NULL: none; a new
    /// volume's name is then csid's.
    pub name: *const c_char,
    /// The group that the plugin gives the volume to at each mount. NULL: none.
    pub mount_group: *const c_char,
    /// Parameters for the plugin. items NULL: none.
    pub parameters: csi_map,
    /// Where the volume can be used. items NULL: anywhere.
    pub topologies: csi_topologies,
    /// After a mount died: "report" only reports it, "remount" mounts the volume again. NULL: "report".
    pub heal: *const c_char,
    /// csi_create_volume only: the least size in bytes. 0: the plugin's choice.
    pub capacity_min: u64,
    /// csi_create_volume only: the largest size in bytes. 0: no limit.
    pub capacity_max: u64,
    /// csi_create_volume only: the ID of a volume in the same namespace, whose content the new volume has.
    /// NULL: none.
    pub clone: *const c_char,
    /// csi_create_volume only: the plugin's ID of the snapshot whose content the new volume has. NULL: none.
    pub snapshot: *const c_char,
}

// SAFETY: repr(C), struct_size first, pointers, sizes and integers of eight bytes only.
unsafe impl Extensible for csi_volume_spec {}

/// # Safety
/// As csi.h says of every argument.
unsafe fn topologies(list: csi_topologies) -> Result<Option<Vec<BTreeMap<String, String>>>> {
    // SAFETY: the caller's promise.
    let items = unsafe { items("spec.topologies", list.items, list.len) }?;
    // SAFETY: the caller's promise.
    let read = |item: &csi_map| Ok(unsafe { map("spec.topologies", *item) }?.unwrap_or_default());
    items.map(|items| items.iter().map(read).collect()).transpose()
}

/// Registers a volume that its plugin has, or changes the registration. Result: one row as of csi_get_volume.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. plugin, external_id and at least one capability are needed.
/// @param spec  What else csid is to know. NULL: nothing. The members of csi_create_volume only must be 0 or
///   NULL.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_INVALID: also if the plugin does not confirm that the volume can be used so.
/// - CSI_E_NOT_FOUND: the plugin or the volume is unknown.
/// - CSI_E_EXISTS: the name belongs to another volume, or the volume has another name.
/// - CSI_E_BUSY: the volume is in use, and the change is possible only without that.
/// - CSI_E_DENIED: another user registered it, or a flag is root's.
/// - CSI_E_UNSUPPORTED: a file in volumes.d declares it.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_register_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    spec: *const csi_volume_spec,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_register_volume", (client, call), (op, error), || {
            let Volume { namespace, id, inline } = Volume::read(volume)?;
            let given = extensible("spec", spec)?;
            known_flags("spec", given.flags, CSI_SUID | CSI_DEV)?;
            let new = given.capacity_min | given.capacity_max != 0;
            if new || !given.clone.is_null() || !given.snapshot.is_null() {
                return Err(invalid("spec: capacity, clone and snapshot are for csi_create_volume"));
            }
            let spec = RegisterVolume {
                plugin: inline.plugin,
                external_id: inline.external_id,
                capabilities: inline.capabilities,
                fs_type: inline.fs_type,
                mount_flags: inline.mount_flags,
                context: inline.volume_context,
                name: optional_text("spec.name", given.name)?,
                mount_group: optional_text("spec.mount_group", given.mount_group)?,
                parameters: map("spec.parameters", given.parameters)?,
                topologies: topologies(given.topologies)?,
                heal: word("spec.heal", given.heal)?,
                suid: flag(given.flags, CSI_SUID),
                dev: flag(given.flags, CSI_DEV),
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (namespace, id) = (namespace.clone(), id.clone());
                let spec = spec.clone().with(common);
                async move { client.register_volume(&namespace, &id, spec).await.map(one) }
            })
        })
    }
}

/// Has the plugin create a volume, and registers it unless CSI_CREATE_ONLY is set. Repeating a call whose
/// answer was lost creates no second volume. Result: one row as of csi_get_volume.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. plugin and at least one capability are needed; external_id and context
///   must be NULL.
/// @param spec  What the volume is to be. NULL: nothing beyond volume.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_EXISTS: the volume exists with other options.
/// - CSI_E_NOT_FOUND: the plugin, or the volume to clone, is unknown.
/// - CSI_E_UNSUPPORTED: the plugin cannot create volumes, or not from a snapshot or a volume.
/// - CSI_E_DENIED: the snapshot is of no volume that the caller registered, or a flag is root's.
/// - CSI_E_CANCELLED: also if csi_delete_volume ends it.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on if it has asked the plugin.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_create_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    spec: *const csi_volume_spec,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_create_volume", (client, call), (op, error), || {
            let Volume { namespace, id, inline } = Volume::read(volume)?;
            let given = extensible("spec", spec)?;
            known_flags("spec", given.flags, CSI_SUID | CSI_DEV | CSI_CREATE_ONLY)?;
            if inline.external_id.is_some() || inline.volume_context.is_some() {
                return Err(invalid(
                    "volume: external_id and context of a new volume are the plugin's to give",
                ));
            }
            let spec = CreateVolume {
                plugin: inline.plugin,
                capabilities: inline.capabilities,
                fs_type: inline.fs_type,
                mount_flags: inline.mount_flags,
                name: optional_text("spec.name", given.name)?,
                mount_group: optional_text("spec.mount_group", given.mount_group)?,
                parameters: map("spec.parameters", given.parameters)?,
                topologies: topologies(given.topologies)?,
                heal: word("spec.heal", given.heal)?,
                suid: flag(given.flags, CSI_SUID),
                dev: flag(given.flags, CSI_DEV),
                capacity_min: (given.capacity_min != 0).then_some(given.capacity_min),
                capacity_max: (given.capacity_max != 0).then_some(given.capacity_max),
                clone: optional_text("spec.clone", given.clone)?,
                snapshot: optional_text("spec.snapshot", given.snapshot)?,
                register: flag(given.flags, CSI_CREATE_ONLY).map(|_| false),
                ..Default::default()
            };
            Ok(move |client: Client, common| {
                let (namespace, id) = (namespace.clone(), id.clone());
                let spec = spec.clone().with(common);
                async move { client.create_volume(&namespace, &id, spec).await.map(one) }
            })
        })
    }
}
