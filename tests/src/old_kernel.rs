//! A kernel before Linux 6.8 for csid: `listmount` and `statmount` do not exist.

use std::io;

/// The variable of csid's environment with which it gets such a kernel.
pub const VARIABLE: &str = "CSID_TEST_OLD_KERNEL";

/// The numbers of the two calls, the same on every architecture.
const STATMOUNT: u32 = 457;
const LISTMOUNT: u32 = 458;

/// Has the two calls fail with ENOSYS in this process from now on.
pub fn begin() -> io::Result<()> {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    let line = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut lines = [
        line(LOAD, std::mem::offset_of!(libc::seccomp_data, nr) as u32, 0, 0),
        line(EQUAL, STATMOUNT, 2, 0),
        line(EQUAL, LISTMOUNT, 1, 0),
        line(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        line(RETURN, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32, 0, 0),
    ];
    let program = libc::sock_fprog { len: lines.len() as u16, filter: lines.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which lives through the call.
    let done =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0_u32, &raw const program) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
