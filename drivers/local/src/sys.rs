//! The system calls that rustix does not have: the loop ioctls, ext4's resize and mount_setattr. All `unsafe` of this
//! driver is here. It owns nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

const LOOP_CLR_FD: libc::c_ulong = 0x4C01;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_SET_CAPACITY: libc::c_ulong = 0x4C07;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
/// `_IOW('f', 16, __u64)`
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;

pub const LO_READ_ONLY: u32 = 1;
pub const LO_AUTOCLEAR: u32 = 4;

/// The kernel's `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LoopInfo {
    pub device: u64,
    pub inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    pub flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

impl LoopInfo {
    pub fn new(flags: u32, name: &[u8]) -> Self {
        let mut file_name = [0; 64];
        // One byte stays zero: the kernel wants a C string; it is only shown.
        for (to, from) in file_name[..63].iter_mut().zip(name) {
            *to = *from;
        }
        LoopInfo {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags,
            file_name,
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        }
    }
}

/// The kernel's `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

fn ioctl<T>(fd: BorrowedFd<'_>, request: libc::c_ulong, argument: *mut T) -> io::Result<i32> {
    // SAFETY: the requests of this file take nothing (a null pointer is ignored) or a pointer to exactly the structure
    // that the callers below pass, exclusively borrowed for the call.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) } {
        -1 => Err(io::Error::last_os_error()),
        n => Ok(n),
    }
}

const NONE: *mut u8 = std::ptr::null_mut();

/// The number of a loop device that was free a moment ago.
pub fn loop_get_free(control: impl AsFd) -> io::Result<i32> {
    ioctl(control.as_fd(), LOOP_CTL_GET_FREE, NONE)
}

pub fn loop_configure(device: impl AsFd, image: impl AsFd, info: LoopInfo) -> io::Result<()> {
    // A descriptor is never negative.
    let fd = image.as_fd().as_raw_fd() as u32;
    let mut config = LoopConfig { fd, block_size: 0, info, reserved: [0; 8] };
    ioctl(device.as_fd(), LOOP_CONFIGURE, &raw mut config).map(drop)
}

/// ENXIO when nothing is attached.
pub fn loop_status(device: impl AsFd) -> io::Result<LoopInfo> {
    let mut info = LoopInfo::new(0, b"");
    ioctl(device.as_fd(), LOOP_GET_STATUS64, &raw mut info)?;
    Ok(info)
}

/// Detaches now, or when the last who has it open closes it.
pub fn loop_clear(device: impl AsFd) -> io::Result<()> {
    ioctl(device.as_fd(), LOOP_CLR_FD, NONE).map(drop)
}

/// Takes over the size that the image has now.
pub fn loop_set_capacity(device: impl AsFd) -> io::Result<()> {
    ioctl(device.as_fd(), LOOP_SET_CAPACITY, NONE).map(drop)
}

/// Grows the mounted ext4 to so many blocks; the same number is no change.
pub fn ext4_resize(mounted: impl AsFd, mut blocks: u64) -> io::Result<()> {
    ioctl(mounted.as_fd(), EXT4_IOC_RESIZE_FS, &raw mut blocks).map(drop)
}

/// Makes the mount that `tree` is read-only, before anybody can see it.
pub fn mount_set_read_only(tree: impl AsFd) -> io::Result<()> {
    let attr =
        libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the path is a C string, `attr` lives for the call and its size is given.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
