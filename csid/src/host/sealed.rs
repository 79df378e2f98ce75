//! A process that runs from a copy of csid's program. A process that enters a plugin's root shows the plugin its program by
//! `/proc/PID/exe`, and so does a command that is a script for `/proc/self/exe`. A process that runs there as root could open the
//! host's file for writing by that link (CVE-2019-5736).
//!
//! The copy is in memory and sealed. Where the kernel executes no such file (`vm.memfd_noexec`), it is the program itself in a
//! mount that is read-only and attached nowhere.

#![expect(clippy::disallowed_types, reason = "exec(2) is all that it is for")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

use crate::host::raw::{self, Peers};

const PROGRAM: &str = "/proc/self/exe";

/// Runs this program from a copy, with these arguments, in the place of this process. Returns only the error.
pub(super) fn run(arguments: &[&std::ffi::OsStr]) -> io::Error {
    let execute = |program: io::Result<OwnedFd>| match program {
        // The descriptor is closed by the call, after the kernel has opened what it leads to.
        Ok(fd) => {
            Command::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).arg0("csid").args(arguments).exec()
        }
        Err(error) => error,
    };
    match execute(copy()) {
        error if error.kind() == io::ErrorKind::PermissionDenied => execute(read_only(PROGRAM)),
        error => error,
    }
}

/// Returns a copy of the program in memory, which nothing can change any more.
fn copy() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = match memfd_create(c"csid", flags | MemfdFlags::EXEC) {
        // Before Linux 6.3 each may be executed, and the flag is unknown.
        Err(Errno::INVAL) => memfd_create(c"csid", flags)?,
        created => created?,
    };
    let mut memory = File::from(memory);
    io::copy(&mut File::open(PROGRAM)?, &mut memory)?;
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&memory, seals)?;
    Ok(memory.into())
}

/// Returns the file at `path` in a mount of its own, which is read-only and attached nowhere.
fn read_only(path: &str) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let program = open_tree(rustix::fs::CWD, path, flags)?;
    raw::mount_setattr(program.as_fd(), raw::RDONLY, Peers::Private)?;
    Ok(program)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use super::*;

    fn opened(fd: &OwnedFd, how: &mut std::fs::OpenOptions) -> io::Result<File> {
        how.open(format!("/proc/self/fd/{}", fd.as_raw_fd()))
    }

    #[test]
    fn a_copy_is_whole_and_cannot_be_written() {
        let copy = copy().unwrap();
        let mut bytes = Vec::new();
        opened(&copy, File::options().read(true)).unwrap().read_to_end(&mut bytes).unwrap();
        assert!(bytes == std::fs::read(PROGRAM).unwrap(), "it is the program");
        let mut writer = opened(&copy, File::options().write(true)).unwrap();
        assert_eq!(writer.write(b"x").unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(writer.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        let more = fcntl_add_seals(&copy, SealFlags::FUTURE_WRITE).unwrap_err();
        assert_eq!(more, Errno::PERM, "the seals are sealed");
    }

    #[test]
    fn read_only_mount_refuses_open_for_writing() {
        // A program that runs is refused for that.
        let file = tempfile::NamedTempFile::new().unwrap();
        let program = read_only(file.path().to_str().unwrap()).unwrap();
        let refused = opened(&program, File::options().write(true)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        assert!(opened(&program, File::options().read(true)).is_ok());
    }
}
