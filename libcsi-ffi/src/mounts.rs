//! Mount, Unmount, OpenMount, HasMount.

use std::ffi::c_char;

use csid_client::{OpenOptions, UnmountOptions};

use crate::border::{Extensible, extensible, flag, known_flags, map, optional_text, text, word};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::given::{Volume, csi_call, csi_map, csi_volume, with_inline};
use crate::op::{csi_op, handed_out, nothing, one, start};
use crate::row::csi_row;

pub const CSI_READ_ONLY: u64 = 1;
/// Set-user-ID programs on the volume are honoured: root's alone.
pub const CSI_SUID: u64 = 2;
/// So are device nodes: root's alone.
pub const CSI_DEV: u64 = 4;

/// How a volume is mounted; NULL, or all zeroes: to write, as a file system, by a single node.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_mount_options {
    pub struct_size: usize,
    /// CSI_READ_ONLY, CSI_SUID, CSI_DEV
    pub flags: u64,
    pub access_mode: *const c_char,
    pub attachment_mode: *const c_char,
    pub mount_group: *const c_char,
    /// Tells several mounts of one consumer apart.
    pub tag: *const c_char,
    /// A path of the consumer's own, where the published volume is bound too.
    pub target: *const c_char,
    /// "private", "host-to-task", "bidirectional": of the target.
    pub propagation: *const c_char,
    /// "auto", "hold": whether it comes back after a reboot.
    pub restore: *const c_char,
    /// "unit:NAME": of a registered volume, what ends its claim and with it the mount.
    pub bind: *const c_char,
    /// How long after that.
    pub grace_usec: u64,
    /// Of an inline volume that was attached.
    pub publish_context: csi_map,
}

// SAFETY: repr(C), struct_size first, pointers, sizes and integers of eight bytes only.
unsafe impl Extensible for csi_mount_options {}

/// Mount a volume for a consumer. One row: source, the published path, and is-device. Asking again what was answered finds the
/// same mount.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_mount_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    consumer: *const c_char,
    options: *const csi_mount_options,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_mount_volume", (client, call), (op, error), || {
            let Volume { namespace, id, inline } = Volume::read(volume)?;
            let consumer = text("consumer", consumer)?;
            let given = extensible("options", options)?;
            known_flags("options", given.flags, CSI_READ_ONLY | CSI_SUID | CSI_DEV)?;
            let options = with_inline!(MountOptions, inline,
                publish_context: map("options.publish_context", given.publish_context)?,
                mount_group: optional_text("options.mount_group", given.mount_group)?,
                access_mode: word("options.access_mode", given.access_mode)?,
                attachment_mode: word("options.attachment_mode", given.attachment_mode)?,
                read_only: flag(given.flags, CSI_READ_ONLY),
                tag: optional_text("options.tag", given.tag)?,
                target: optional_text("options.target", given.target)?,
                propagation: word("options.propagation", given.propagation)?,
                suid: flag(given.flags, CSI_SUID),
                dev: flag(given.flags, CSI_DEV),
                restore: word("options.restore", given.restore)?,
                bind: optional_text("options.bind", given.bind)?,
                grace_usec: (given.grace_usec != 0).then_some(given.grace_usec));
            Ok(move |client: csid_client::Client, common| {
                let (namespace, id, consumer) = (namespace.clone(), id.clone(), consumer.clone());
                let options = options.clone().with(common);
                async move { client.mount(&namespace, &id, &consumer, options).await.map(one) }
            })
        })
    }
}

/// Detach a dead mount lazily.
pub const CSI_FORCE: u64 = 1;

/// Unmount. Of the volume ns and id are looked at alone, of the mount its tag; nothing of how it was mounted is needed, nor that it
/// was by this process. What is not there is gone already. No row. flags: CSI_FORCE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_unmount_volume(
    client: *mut csi_client,
    volume: *const csi_volume,
    consumer: *const c_char,
    tag: *const c_char,
    flags: u64,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_unmount_volume", (client, call), (op, error), || {
            let (namespace, id) = Volume::name(volume)?;
            let consumer = text("consumer", consumer)?;
            known_flags("unmount", flags, CSI_FORCE)?;
            let force = flag(flags, CSI_FORCE);
            let options = UnmountOptions { tag: optional_text("tag", tag)?, force, ..Default::default() };
            Ok(move |client: csid_client::Client, common| {
                let (namespace, id, consumer) = (namespace.clone(), id.clone(), consumer.clone());
                let options = options.clone().with(common);
                async move { client.unmount(&namespace, &id, &consumer, options).await.map(nothing) }
            })
        })
    }
}

/// A mount of a consumer's as a descriptor (csi_op_take_fd), to attach it with move_mount(2) in another mount namespace: it is attached
/// nowhere, and the kernel keeps the file system until it, and what was mounted of it, is gone. subpath: a directory or file on the
/// volume; NULL: all of it. flags: CSI_READ_ONLY. A caller other than root is refused what may be written, or used, only because
/// he could not take a flag off: CSI_E_DENIED. What is not mounted: CSI_E_NOT_FOUND. No row.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_open_mount(
    client: *mut csi_client,
    volume: *const csi_volume,
    consumer: *const c_char,
    tag: *const c_char,
    subpath: *const c_char,
    flags: u64,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_open_mount", (client, call), (op, error), || {
            let (namespace, id) = Volume::name(volume)?;
            let consumer = text("consumer", consumer)?;
            known_flags("open", flags, CSI_READ_ONLY)?;
            let options = OpenOptions {
                tag: optional_text("tag", tag)?,
                subpath: optional_text("subpath", subpath)?,
                read_only: flag(flags, CSI_READ_ONLY),
                ..Default::default()
            };
            Ok(move |client: csid_client::Client, common| {
                let (namespace, id, consumer) = (namespace.clone(), id.clone(), consumer.clone());
                let options = options.clone().with(common);
                async move { client.open_mount(&namespace, &id, &consumer, options).await.map(handed_out) }
            })
        })
    }
}

/// Whether a published path is mounted. One row: mounted. A path that is missing is not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_has_mount(
    client: *mut csi_client,
    source: *const c_char,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_has_mount", (client, call), (op, error), || {
            let source = text("source", source)?;
            Ok(move |client: csid_client::Client, _| {
                let source = source.clone();
                async move { client.has_mount(&source).await.map(|yes| vec![csi_row::one("mounted", yes)].into()) }
            })
        })
    }
}
