//! Mount, Unmount, OpenMount, HasMount.

use std::ffi::{c_char, c_int};
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::pin::Pin;

use csid_client::{CallOptions, Descriptor, MountOptions, OpenOptions, UnmountOptions};

use crate::arguments::{Volume, csi_call, csi_map, csi_volume, with_inline};
use crate::border::{
    Extensible, Result, extensible, flag, invalid, known_flags, map, optional_text, text, word,
};
use crate::client::csi_client;
use crate::error::{csi_code, csi_error};
use crate::op::{Answer, csi_op, handed_out, nothing, one, start};
use crate::row::csi_row;

/// Mount or attach read-only.
pub const CSI_READ_ONLY: u64 = 1;
/// Honour set-user-ID programs on the volume. Root only.
pub const CSI_SUID: u64 = 2;
/// Honour device nodes on the volume. Root only.
pub const CSI_DEV: u64 = 4;

/// How a volume is mounted. NULL or all zeroes: to read and write; a registered volume as it is used or
/// registered, an inline one as a file system of a single node.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_mount_options {
    /// sizeof(csi_mount_options), in bytes.
    pub struct_size: usize,
    /// CSI_READ_ONLY, CSI_SUID and CSI_DEV, or 0. A volume registered with CSI_SUID or CSI_DEV has them without
    /// the flag.
    pub flags: u64,
    /// An access mode as in csi_capability. NULL: that in which a registered volume is used, else its first
    /// capability that fits; "single-node-writer" for an inline one.
    pub access_mode: *const c_char,
    /// "file-system" or "block-device". NULL: as for access_mode; "file-system" for an inline volume.
    pub attachment_mode: *const c_char,
    /// The group that the plugin gives the volume to. NULL: that of the registration, else none.
    pub mount_group: *const c_char,
    /// Distinguishes several mounts by one consumer. NULL: the empty tag.
    pub tag: *const c_char,
    /// An absolute path of the consumer, where csid binds the published volume. NULL: none.
    pub target: *const c_char,
    /// Of the target: "private", "host-to-task" or "bidirectional" (root only). NULL: "private".
    pub propagation: *const c_char,
    /// After a reboot: "auto" mounts again, "hold" keeps the row as `lost`. NULL: "auto" for a registered
    /// volume, "hold" for an inline one.
    pub restore: *const c_char,
    /// "unit:NAME": the claim of a registered volume, and with it the mount, ends when that systemd unit ends.
    /// NULL: it ends with Unmount.
    pub bind: *const c_char,
    /// How long after the unit's end the claim lasts, in microseconds. 0: ends at once. Needs bind.
    pub grace_usec: u64,
    /// The publish context of an inline volume that was attached. items NULL: none.
    pub publish_context: csi_map,
    /// How long to wait while a claim, mount or expansion is in the way, or the plugin takes no more volumes on
    /// this node, in microseconds. 0: do not wait; the operation fails with CSI_E_CLAIM_CONFLICT.
    pub wait_usec: u64,
}

// SAFETY: repr(C), struct_size first, pointers, sizes and integers of eight bytes only.
unsafe impl Extensible for csi_mount_options {}

/// A volume's namespace and id, its consumer, and how it is mounted.
type Given = (String, String, String, MountOptions);

/// # Safety
///
/// As csi.h says of every argument.
unsafe fn mount_request(
    volume: *const csi_volume,
    consumer: *const c_char,
    options: *const csi_mount_options,
) -> Result<Given> {
    // SAFETY: the caller's.
    unsafe {
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
            grace_usec: (given.grace_usec != 0).then_some(given.grace_usec),
            wait_usec: (given.wait_usec != 0).then_some(given.wait_usec));
        Ok((namespace, id, consumer, options))
    }
}

/// Mounts a volume for a consumer. A registered volume is claimed for the consumer too. Result: one row with
/// source (the published path) and is-device. The same call again returns the same mount.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
///   external_id.
/// @param consumer  Who uses the mount, such as an allocation or a unit. Not NULL.
/// @param options  How to mount. NULL: the defaults.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_NOT_FOUND: the volume is not registered and was not given inline, the plugin is unknown, or the unit
///   of bind does not run.
/// - CSI_E_EXISTS: the consumer has the mount with other options, or the inline volume is registered.
/// - CSI_E_CLAIM_CONFLICT: other claims or mounts are in the way, the node has no room for another volume of
///   the plugin (csid waits for both until wait_usec has passed), or cannot reach this one.
/// - CSI_E_BUSY: the volume is being created or deleted, or something else is mounted in the way; or, in a
///   cluster, this host drains.
/// - CSI_E_DENIED: also for an option that only root may use, or another user's mount or claim.
/// - CSI_E_CANCELLED: also if csi_unmount_volume ends it.
///
/// Threads: any thread; never blocks. Cancelling the operation rolls the mount back. One that
///   was complete at that moment stays: unmount it.
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
            let (namespace, id, consumer, options) = mount_request(volume, consumer, options)?;
            Ok(move |client: csid_client::Client, common| {
                let (namespace, id, consumer) = (namespace.clone(), id.clone(), consumer.clone());
                let options = options.clone().with(common);
                async move { client.mount(&namespace, &id, &consumer, options).await.map(one) }
            })
        })
    }
}

/// csi_unmount_volume: detach a dead mount lazily. csi_release, csi_deregister_volume and
/// csi_unregister_plugin: go on although something still uses the object.
pub const CSI_FORCE: u64 = 1;
/// Last resort, root only: drop csid's row though the plugin never acknowledged.
pub const CSI_FORGET: u64 = 2;

/// csi_unmount_volume: a missing mount is CSI_E_NOT_FOUND. The detail `tags` then lists the consumer's existing
/// mounts. If csid was restarted during the call, CSI_E_NOT_FOUND may mean that this call has unmounted it.
pub const CSI_MUST_EXIST: u64 = 16;
/// csi_unmount_volume: every mount of the consumer. tag must be NULL.
pub const CSI_ALL_TAGS: u64 = 32;
/// csi_unmount_volume: the operation ends after the first try, with its error if it failed. csid goes on, and
/// the event `unmount` reports the end.
pub const CSI_NO_WAIT: u64 = 64;
/// csi_unmount_volume: also detach a mount whose server does not answer a probe made now. Root only.
pub const CSI_FORCE_HUNG: u64 = 128;

/// Unmounts a volume from a consumer, whichever process mounted it. A missing mount is success. The operation
/// ends when the mount is gone. It has no result row.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. Only ns and id are used.
/// @param consumer  The consumer of the mount. Not NULL.
/// @param tag  The tag of the mount. NULL: the empty tag.
/// @param flags  0, or CSI_FORCE, CSI_FORCE_HUNG, CSI_FORGET, CSI_MUST_EXIST, CSI_ALL_TAGS and CSI_NO_WAIT.
///   With CSI_FORGET csid drops its row without an answer of the plugin.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation and of every plugin call (top of this file):
/// - CSI_E_BUSY: processes use the mount, or another mount namespace still shows it. With CSI_FORGET: any mount
///   namespace shows it.
/// - CSI_E_NOT_FOUND: with CSI_MUST_EXIST, there is no such mount. The detail `tags` lists the consumer's other mounts,
///   `holders` has "mount PATH" for each mount of the volume that is not csid's. csid sees those only while it has the
///   volume staged or published.
/// - CSI_E_DENIED: the mount is another user's, or the flag is root's.
///
/// Threads: any thread; never blocks. After a cancellation csid goes on with it.
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
            let known = CSI_FORCE | CSI_FORCE_HUNG | CSI_FORGET | CSI_MUST_EXIST | CSI_ALL_TAGS | CSI_NO_WAIT;
            known_flags("unmount", flags, known)?;
            let options = UnmountOptions {
                tag: optional_text("tag", tag)?,
                all_tags: flag(flags, CSI_ALL_TAGS),
                must_exist: flag(flags, CSI_MUST_EXIST),
                force: flag(flags, CSI_FORCE),
                force_hung: flag(flags, CSI_FORCE_HUNG),
                forget: flag(flags, CSI_FORGET),
                wait: flag(flags, CSI_NO_WAIT).map(|_| false),
                ..Default::default()
            };
            Ok(move |client: csid_client::Client, common| {
                let (namespace, id, consumer) = (namespace.clone(), id.clone(), consumer.clone());
                let options = options.clone().with(common);
                async move { client.unmount(&namespace, &id, &consumer, options).await.map(nothing) }
            })
        })
    }
}

/// Opens a mount as a descriptor, which move_mount(2) attaches in another mount namespace. Take it with
/// csi_op_take_fd. It is attached nowhere. The kernel keeps the file system until the descriptor and all mounts
/// made from it are gone. No result row.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. Only ns and id are used.
/// @param consumer  The consumer of the mount. Not NULL.
/// @param tag  The tag of the mount. NULL: the empty tag.
/// @param subpath  A directory or file on the volume, relative to its root. NULL: all of it.
/// @param flags  CSI_READ_ONLY, or 0.
/// @param call  Deadline and operation ID; secrets have no use here. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file):
/// - CSI_E_NOT_FOUND: there is no such mount.
/// - CSI_E_DENIED: the mount is another user's. For a caller other than root also if the mount has nosuid,
///   nodev, noexec or read-only, since the receiver could clear them.
/// - CSI_E_INVALID: subpath or CSI_READ_ONLY does not apply to a block device.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
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
            opening(Opened { volume, consumer, tag, subpath, flags }, None)
        })
    }
}

/// Opens a mount as csi_open_mount does, with the owners of its files mapped by a user namespace: a file of uid 0
/// has the uid that uid 0 of the namespace has outside. Root only. csid needs the feature open-mount-idmap. No
/// result row.
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. Only ns and id are used.
/// @param consumer  The consumer of the mount. Not NULL.
/// @param tag  The tag of the mount. NULL: the empty tag.
/// @param subpath  A directory or file on the volume, relative to its root. NULL: all of it.
/// @param flags  CSI_READ_ONLY, or 0.
/// @param userns  A descriptor of the user namespace, as open(2) of /proc/PID/ns/user returns it. The library
///   duplicates it; the caller may close it after this call.
/// @param call  Deadline and operation ID; secrets have no use here. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of csi_open_mount:
/// - CSI_E_INVALID: userns is not of a user namespace, or is csid's own; or the volume is a block device.
/// - CSI_E_DENIED: the caller is not root.
/// - CSI_E_UNSUPPORTED: the file system cannot map owners, the namespace maps no uid or no gid, or the mount has
///   mapped owners already.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_open_mount_idmapped(
    client: *mut csi_client,
    volume: *const csi_volume,
    consumer: *const c_char,
    tag: *const c_char,
    subpath: *const c_char,
    flags: u64,
    userns: c_int,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_open_mount_idmapped", (client, call), (op, error), || {
            opening(Opened { volume, consumer, tag, subpath, flags }, Some(copied("userns", userns)?))
        })
    }
}

/// The arguments that all calls have that open a mount.
struct Opened {
    volume: *const csi_volume,
    consumer: *const c_char,
    tag: *const c_char,
    subpath: *const c_char,
    flags: u64,
}

/// Returns a call of OpenMount.
///
/// # Safety
/// As csi.h says of every argument.
unsafe fn opening(
    opened: Opened,
    userns: Option<Descriptor>,
) -> Result<impl Fn(csid_client::Client, CallOptions) -> Opening + Send + Sync + 'static> {
    // SAFETY: the caller's promise.
    let ((namespace, id), consumer, tag, subpath) = unsafe {
        (
            Volume::name(opened.volume)?,
            text("consumer", opened.consumer)?,
            optional_text("tag", opened.tag)?,
            optional_text("subpath", opened.subpath)?,
        )
    };
    known_flags("open", opened.flags, CSI_READ_ONLY)?;
    let read_only = flag(opened.flags, CSI_READ_ONLY);
    let options = OpenOptions { tag, subpath, read_only, userns, ..Default::default() };
    Ok(move |client: csid_client::Client, common| -> Opening {
        let (namespace, id, consumer) = (namespace.clone(), id.clone(), consumer.clone());
        let options = options.clone().with(common);
        Box::pin(async move { client.open_mount(&namespace, &id, &consumer, options).await.map(handed_out) })
    })
}

type Opening = Pin<Box<dyn Future<Output = csid_client::Result<Answer>> + Send>>;

/// Duplicates a descriptor of the caller's.
///
/// # Safety
/// The descriptor stays open during the call, if it is open.
unsafe fn copied(name: &str, fd: c_int) -> Result<Descriptor> {
    if fd < 0 {
        return Err(invalid(format!("{name} is {fd}; it must be an open descriptor")));
    }
    // SAFETY: the caller's promise; a number that is not open is an error of the kernel.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let copy = borrowed.try_clone_to_owned();
    copy.map(Descriptor::from).map_err(|error| invalid(format!("{name} cannot be duplicated: {error}")))
}

/// Asks the kernel whether a published path is mounted. A missing path is not. Result: one row with the boolean
/// mounted.
///
/// @param client  The connection. Not NULL.
/// @param source  The published path, from the result of csi_mount_volume. Not NULL.
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

/// Takes over a mount that another manager made. Root only. No plugin is asked. Result: one row with source
/// (published_path) and is-device. The same call again returns the same mount. csid can do this if the features
/// of csi_get_manager contain "adopt-mount".
///
/// @param client  The connection. Not NULL.
/// @param volume  The volume. Not NULL. A registered one needs ns and id only; any other also needs plugin and
///   external_id.
/// @param consumer  Who uses the mount. Not NULL.
/// @param options  How it was mounted. NULL: the defaults.
/// @param staging_path  Where the volume is staged. NULL: its plugin does not stage.
/// @param published_path  Where the volume is published for the consumer. Not NULL.
/// @param call  Deadline, secrets and operation ID. NULL: none.
/// @param op  Receives the operation, which the caller frees with csi_op_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation was started. CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_E_FORKED or CSI_E_INTERNAL:
///   it was not.
///
/// Errors of the operation, besides those of every operation (top of this file); each changes nothing:
/// - CSI_E_NOT_FOUND: nothing is mounted at one of the paths.
/// - CSI_E_INVALID: something else is mounted at one of the paths, or staging_path does not fit the plugin.
/// - CSI_E_EXISTS: a path belongs to another mount, or the consumer has the mount with other options.
/// - CSI_E_CLAIM_CONFLICT: other claims or mounts are in the way.
/// - CSI_E_UNSUPPORTED: the plugin attaches volumes, and csid did not attach this registered one; or this csid
///   cannot adopt.
///
/// Threads: any thread; never blocks. The operation can be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_adopt_mount(
    client: *mut csi_client,
    volume: *const csi_volume,
    consumer: *const c_char,
    options: *const csi_mount_options,
    staging_path: *const c_char,
    published_path: *const c_char,
    call: *const csi_call,
    op: *mut *mut csi_op,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        start("csi_adopt_mount", (client, call), (op, error), || {
            let (namespace, id, consumer, options) = mount_request(volume, consumer, options)?;
            let staging_path = optional_text("staging_path", staging_path)?;
            let published_path = Some(text("published_path", published_path)?);
            let options = MountOptions { staging_path, published_path, ..options };
            Ok(move |client: csid_client::Client, common| {
                let (namespace, id, consumer) = (namespace.clone(), id.clone(), consumer.clone());
                let options = options.clone().with(common);
                async move { client.adopt_mount(&namespace, &id, &consumer, options).await.map(one) }
            })
        })
    }
}
