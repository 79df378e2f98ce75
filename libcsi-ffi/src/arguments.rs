//! Arguments of more than one entry: texts, maps, a volume, a call's common keys. Every struct that may grow has members of one size, so
//! it has no padding, and every byte of it is read.

use std::ffi::c_char;
use std::time::{Duration, Instant};

use csid_client::{CallOptions, Capability, VolumeOptions};

use crate::border::{
    Extensible, Result, extensible, invalid, items, map, object, optional_text, secrets, text, texts, word,
};

/// A name and a value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_pair {
    /// The name. Not NULL.
    pub key: *const c_char,
    /// The value. Not NULL. It may be empty.
    pub value: *const c_char,
}

/// A map of texts. items NULL means no map, which differs from an empty map (items not NULL, len 0).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_map {
    /// The pairs, each key once. NULL: no map; len is then 0.
    pub items: *const csi_pair,
    /// The number of pairs.
    pub len: usize,
}

/// A list of texts.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_strings {
    /// The texts, none of them NULL. NULL: no list; len is then 0.
    pub items: *const *const c_char,
    /// The number of texts.
    pub len: usize,
}

/// A way in which a volume can be used.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_capability {
    /// "single-node-writer", "single-node-reader-only", "single-node-single-writer",
    /// "single-node-multi-writer", "multi-node-reader-only", "multi-node-single-writer" or
    /// "multi-node-multi-writer". NULL: "single-node-writer".
    pub access_mode: *const c_char,
    /// "file-system" or "block-device". NULL: "file-system".
    pub attachment_mode: *const c_char,
}

/// A list of capabilities.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_capabilities {
    /// The capabilities. NULL: no list; len is then 0.
    pub items: *const csi_capability,
    /// The number of capabilities.
    pub len: usize,
}

/// A volume. A registered one is identified by ns and id alone. Any other is given inline: plugin and
/// external_id are then needed too, and csid keeps these members only as long as it uses the volume.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_volume {
    /// sizeof(csi_volume), in bytes.
    pub struct_size: usize,
    /// The namespace. Not NULL.
    pub ns: *const c_char,
    /// The volume's name in the namespace. Not NULL.
    pub id: *const c_char,
    /// The plugin's ID. NULL: the volume is registered.
    pub plugin: *const c_char,
    /// The plugin's ID of the volume. NULL: the volume is registered, or is to be created.
    pub external_id: *const c_char,
    /// The volume context that the plugin returned for the volume. items NULL: none.
    pub context: csi_map,
    /// How the volume can be used. items NULL: not given.
    pub capabilities: csi_capabilities,
    /// The file system, such as "xfs". NULL: the plugin's default.
    pub fs_type: *const c_char,
    /// Mount flags for the plugin. items NULL: none.
    pub mount_flags: csi_strings,
}

// SAFETY: repr(C), struct_size first, pointers and sizes only.
unsafe impl Extensible for csi_volume {}

/// Options of every call. NULL or all zeroes: no deadline, no secrets, an operation ID chosen by the library.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_call {
    /// sizeof(csi_call), in bytes.
    pub struct_size: usize,
    /// Time from now until the caller stops waiting, in microseconds. csid then ends the call with
    /// CSI_E_DEADLINE and rolls back a mount, a claim or an attachment. 0: none; csid then tries an operation
    /// as long as csid.toml says ([deadlines] operation, by default 2 min).
    pub deadline_usec: u64,
    /// The volume's secrets. They are sent in a sealed memfd, and the library's copies are zeroed. items NULL:
    /// none.
    pub secrets: csi_map,
    /// Used instead of secrets: the name of a systemd credential, which csid can load again after a reboot.
    /// NULL: none.
    pub credential: *const c_char,
    /// A name for the operation, unique among the caller's user ID. Not empty. NULL: the library chooses one;
    /// see csi_op_id.
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

    /// Reads the name alone, for an entry that needs nothing else of the volume.
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
