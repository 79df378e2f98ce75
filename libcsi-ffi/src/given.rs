//! What C gives to more than one entry: texts, maps, a volume, a call's common keys. Every struct that may grow is made of
//! members of one size, so that it has no padding and nothing of it is not looked at.

use std::ffi::c_char;
use std::time::{Duration, Instant};

use csid_client::{CallOptions, Capability, VolumeOptions};

use crate::border::{
    Extensible, Result, extensible, invalid, items, map, object, optional_text, secrets, text, texts, word,
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_pair {
    pub key: *const c_char,
    pub value: *const c_char,
}

/// items NULL is no map, which is something else than a map with nothing in it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_map {
    pub items: *const csi_pair,
    pub len: usize,
}

/// A list of texts; items NULL is no list.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_strings {
    pub items: *const *const c_char,
    pub len: usize,
}

/// One of the ways in which a volume can be used: NULL is "single-node-writer", and "file-system".
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_capability {
    pub access_mode: *const c_char,
    pub attachment_mode: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_capabilities {
    pub items: *const csi_capability,
    pub len: usize,
}

/// Which volume. One that is registered has ns and id alone; all else gives it inline: then plugin and external_id are
/// needed too, and nothing of it is kept by csid beyond what it is used for.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_volume {
    pub struct_size: usize,
    pub ns: *const c_char,
    pub id: *const c_char,
    pub plugin: *const c_char,
    pub external_id: *const c_char,
    pub context: csi_map,
    pub capabilities: csi_capabilities,
    pub fs_type: *const c_char,
    pub mount_flags: csi_strings,
}

// SAFETY: repr(C), struct_size first, pointers and sizes only.
unsafe impl Extensible for csi_volume {}

/// What every call takes. NULL, or all zeroes: no deadline, no secrets, a name of the library's own for the operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_call {
    pub struct_size: usize,
    /// From now, in microseconds; 0: none. csid ends what it does for this call then.
    pub deadline_usec: u64,
    /// Sent in a sealed memfd, and zeroed here.
    pub secrets: csi_map,
    /// Instead of secrets: a systemd credential that csid can load again after a reboot.
    pub credential: *const c_char,
    /// Unique for this user; csi_op_id says which the library took.
    pub operation_id: *const c_char,
}

// SAFETY: repr(C), struct_size first, pointers and integers of eight bytes only.
unsafe impl Extensible for csi_call {}

/// `csi_volume`, read: its name, and what gives it inline.
pub struct Volume {
    pub namespace: String,
    pub id: String,
    pub inline: VolumeOptions,
}

impl Volume {
    /// # Safety
    /// As csi.h says of every argument.
    pub unsafe fn read(pointer: *const csi_volume) -> Result<Self> {
        // SAFETY: the caller's promise.
        unsafe {
            object("volume", pointer)?;
            let volume = extensible("volume", pointer)?;
            Ok(Self {
                namespace: text("volume.ns", volume.ns)?,
                id: text("volume.id", volume.id)?,
                inline: VolumeOptions {
                    plugin: optional_text("volume.plugin", volume.plugin)?,
                    external_id: optional_text("volume.external_id", volume.external_id)?,
                    volume_context: map("volume.context", volume.context)?,
                    capabilities: capabilities(volume.capabilities)?,
                    fs_type: optional_text("volume.fs_type", volume.fs_type)?,
                    mount_flags: texts("volume.mount_flags", volume.mount_flags)?,
                    ..Default::default()
                },
            })
        }
    }

    /// Its name, where the rest of it is of no matter.
    ///
    /// # Safety
    /// As csi.h says of every argument.
    pub unsafe fn name(pointer: *const csi_volume) -> Result<(String, String)> {
        // SAFETY: the caller's promise.
        let volume = unsafe { Self::read(pointer) }?;
        Ok((volume.namespace, volume.id))
    }
}

/// csid-client's options of a call that takes a volume inline too: that of a `Volume`, and the fields given.
macro_rules! with_inline {
    ($options:ident, $inline:expr $(, $field:ident: $value:expr)*) => {
        csid_client::$options {
            plugin: $inline.plugin,
            external_id: $inline.external_id,
            volume_context: $inline.volume_context,
            capabilities: $inline.capabilities,
            fs_type: $inline.fs_type,
            mount_flags: $inline.mount_flags,
            $($field: $value,)*
            ..Default::default()
        }
    };
}
pub(crate) use with_inline;

/// # Safety
/// As csi.h says of every argument.
pub unsafe fn capabilities(list: csi_capabilities) -> Result<Option<Vec<Capability>>> {
    // SAFETY: the caller's promise.
    let items = unsafe { items("capabilities", list.items, list.len) }?;
    let read = |item: &csi_capability| {
        // SAFETY: the caller's promise.
        let (access, attachment) = unsafe {
            (word("access_mode", item.access_mode)?, word("attachment_mode", item.attachment_mode)?)
        };
        Ok(Capability {
            access_mode: access.unwrap_or(csid_client::AccessMode::SingleNodeWriter),
            attachment_mode: attachment.unwrap_or(csid_client::AttachmentMode::FileSystem),
        })
    };
    items.map(|items| items.iter().map(read).collect()).transpose()
}

/// `csi_call`, read.
pub struct Call {
    pub deadline: Option<Instant>,
    pub common: CallOptions,
}

impl Call {
    /// # Safety
    /// As csi.h says of every argument.
    pub unsafe fn read(pointer: *const csi_call) -> Result<Self> {
        // SAFETY: the caller's promise.
        let (call, secrets, credential, operation_id) = unsafe {
            let call = extensible("call", pointer)?;
            (
                call,
                secrets(call.secrets)?,
                optional_text("call.credential", call.credential)?,
                optional_text("call.operation_id", call.operation_id)?,
            )
        };
        if operation_id.as_deref() == Some("") {
            return Err(invalid("call.operation_id is empty; NULL lets the library take one"));
        }
        // A deadline beyond the clock's end is none.
        let deadline = match call.deadline_usec {
            0 => None,
            usec => Instant::now().checked_add(Duration::from_micros(usec)),
        };
        Ok(Self { deadline, common: CallOptions { deadline_usec: None, operation_id, secrets, credential } })
    }
}
