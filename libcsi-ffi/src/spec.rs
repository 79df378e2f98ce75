//! Volumes that csid is to know, and those that a plugin is to make.

use std::collections::BTreeMap;
use std::ffi::c_char;

use csid_client::{Client, CreateVolume, RegisterVolume};

use crate::border::{
    Extensible, Result, extensible, flag, invalid, items, known_flags, map, optional_text, word,
};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::given::{Volume, csi_call, csi_map, csi_volume};
use crate::mounts::{CSI_DEV, CSI_SUID};
use crate::op::{csi_op, one, start};

/// csi_create_volume: the caller keeps what there is to know of the volume, csid does not.
pub const CSI_CREATE_ONLY: u64 = 8;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_topologies {
    pub items: *const csi_map,
    pub len: usize,
}

/// What a volume shall be, beyond what csi_volume says; NULL, or all zeroes: nothing else.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_volume_spec {
    pub struct_size: usize,
    /// CSI_SUID, CSI_DEV; csi_create_volume: CSI_CREATE_ONLY
    pub flags: u64,
    /// For people; csi_create_volume: what the plugin is told to call it.
    pub name: *const c_char,
    pub mount_group: *const c_char,
    pub parameters: csi_map,
    pub topologies: csi_topologies,
    /// "report", "remount": what is done about a mount that died.
    pub heal: *const c_char,
    /// csi_create_volume alone, from here on. Bytes; 0: the plugin's choice.
    pub capacity_min: u64,
    pub capacity_max: u64,
    /// The id of the volume whose clone it shall be.
    pub clone: *const c_char,
    /// The plugin's id of the snapshot that it begins with.
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

/// Let csid know a volume that its plugin has: plugin, external_id and at least one capability are needed. One row, as csi_get_volume's.
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

/// Have the plugin make a volume: plugin and at least one capability are needed, external_id and context are the plugin's to give.
/// Asking again what was not answered makes no second one. One row, as csi_get_volume's.
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
