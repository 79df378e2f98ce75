//! SQLite's `unix` VFS with a record, as the process's default: csid needs to know nothing of it.
//!
//! The file is SQLite's own. Behind it, in memory that SQLite allocates with it, stands a copy of its methods with three of
//! them replaced; each does what the original does and appends to the record. A thing is recorded after it was done:
//! when csid answers that something is synced, the sync is in the record.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use rusqlite::ffi::{
    SQLITE_IOERR_FSYNC, SQLITE_OK, sqlite3_file, sqlite3_io_methods, sqlite3_vfs, sqlite3_vfs_find,
    sqlite3_vfs_register,
};

use super::record::{append, open};

/// The least time of a sync. On a tmpfs a sync takes no time, so nothing would ever happen between a write and its sync.
const SYNC: Duration = Duration::from_millis(1);

static RECORD: OnceLock<File> = OnceLock::new();
/// While this file exists, each sync fails, as on a disk that breaks.
static BROKEN: OnceLock<PathBuf> = OnceLock::new();
/// SQLite's own VFS; it lives as long as the process.
static UNIX: AtomicPtr<sqlite3_vfs> = AtomicPtr::new(ptr::null_mut());

/// The state of an open file.
struct Tail {
    unix: *const sqlite3_io_methods,
    ours: sqlite3_io_methods,
    /// As SQLite gave it to open: it is good until the file is closed.
    name: *const c_char,
}

/// Returns the file that breaks the disk of a csid with this record.
pub fn broken(record: &Path) -> PathBuf {
    record.with_extension("broken")
}

/// From now on record, at `path`, what SQLite does in this process.
pub fn record(path: &Path) -> io::Result<()> {
    BROKEN.set(broken(path)).map_err(|_| io::Error::other("there is a record already"))?;
    RECORD.set(open(path)?).map_err(|_| io::Error::other("there is a record already"))?;
    // SAFETY: the name is a C string. What is found is never freed, and only read.
    let (unix, mut vfs) = unsafe {
        let unix = sqlite3_vfs_find(c"unix".as_ptr());
        assert!(!unix.is_null(), "SQLite has a VFS named unix");
        (unix, *unix)
    };
    UNIX.store(unix, Ordering::Release);
    vfs.zName = c"recorded".as_ptr();
    vfs.pNext = ptr::null_mut();
    vfs.szOsFile = (tail_offset(vfs.szOsFile) + size_of::<Tail>()) as c_int;
    vfs.xOpen = Some(open_file);
    vfs.xDelete = Some(delete_file);
    // SAFETY: the VFS is never freed, and all its functions are SQLite's own or keep to their contract.
    let code = unsafe { sqlite3_vfs_register(Box::leak(Box::new(vfs)), 1) };
    assert_eq!(code, SQLITE_OK, "SQLite takes the VFS");
    Ok(())
}

fn note(words: &str, bytes: &[u8]) {
    let record = RECORD.get().expect("the record was opened first");
    append(record, words, bytes).expect("the record is written");
}

fn tail_offset(file_size: c_int) -> usize {
    (file_size as usize).next_multiple_of(align_of::<Tail>())
}

/// SAFETY: `file` was allocated for this VFS.
unsafe fn tail(file: *mut sqlite3_file) -> *mut Tail {
    // SAFETY: UNIX was set before anything could be opened; SQLite allocates szOsFile bytes, which hold the tail,
    // and aligns them to 8.
    unsafe { file.byte_add(tail_offset((*UNIX.load(Ordering::Acquire)).szOsFile)).cast() }
}

/// The file's name without its directory. SAFETY: `path` is a C string.
unsafe fn name(path: *const c_char) -> String {
    // SAFETY: the caller's.
    let path = unsafe { CStr::from_ptr(path) }.to_str().expect("UTF-8");
    path.rsplit('/').next().unwrap_or_default().to_owned()
}

unsafe extern "C" fn open_file(
    _vfs: *mut sqlite3_vfs,
    path: *const c_char,
    file: *mut sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    let unix = UNIX.load(Ordering::Acquire);
    // SAFETY: SQLite calls this with what xOpen takes; a file that is open has methods and, but for a temporary one,
    // a path; the tail is in the file's memory and not yet in use.
    unsafe {
        let code = (*unix).xOpen.expect("xOpen")(unix, path, file, flags, out_flags);
        if code != SQLITE_OK || path.is_null() {
            return code;
        }
        let (tail, unix) = (tail(file), (*file).pMethods);
        let ours = sqlite3_io_methods {
            xWrite: Some(write_file),
            xTruncate: Some(truncate_file),
            xSync: Some(sync_file),
            ..*unix
        };
        tail.write(Tail { unix, ours, name: path });
        (*file).pMethods = &raw const (*tail).ours;
        note(&format!("open {}", name(path)), b"");
    }
    SQLITE_OK
}

unsafe extern "C" fn delete_file(_vfs: *mut sqlite3_vfs, path: *const c_char, synced: c_int) -> c_int {
    let unix = UNIX.load(Ordering::Acquire);
    // SAFETY: SQLite calls this with what xDelete takes.
    unsafe {
        let code = (*unix).xDelete.expect("xDelete")(unix, path, synced);
        if code == SQLITE_OK {
            note(&format!("delete {} {synced}", name(path)), b"");
        }
        code
    }
}

unsafe extern "C" fn write_file(
    file: *mut sqlite3_file,
    bytes: *const c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: SQLite calls this with what xWrite takes, on a file that `open_file` opened.
    unsafe {
        let tail = tail(file);
        // First: what was written and not noted would be missing from the record when csid is killed in between, but not
        // from the file that the next csid goes on with. What is noted and was not written, that one writes over.
        let written = std::slice::from_raw_parts(bytes.cast::<u8>(), length as usize);
        note(&format!("write {} {offset} {length}", name((*tail).name)), written);
        let code = (*(*tail).unix).xWrite.expect("xWrite")(file, bytes, length, offset);
        // Nothing here fills the disk. The record cannot describe a write that failed.
        assert_eq!(code, SQLITE_OK, "a write failed");
        code
    }
}

unsafe extern "C" fn truncate_file(file: *mut sqlite3_file, length: i64) -> c_int {
    // SAFETY: as in `write_file`.
    unsafe {
        let tail = tail(file);
        let code = (*(*tail).unix).xTruncate.expect("xTruncate")(file, length);
        if code == SQLITE_OK {
            note(&format!("truncate {} {length}", name((*tail).name)), b"");
        }
        code
    }
}

unsafe extern "C" fn sync_file(file: *mut sqlite3_file, flags: c_int) -> c_int {
    std::thread::sleep(SYNC);
    if BROKEN.get().is_some_and(|broken| broken.exists()) {
        return SQLITE_IOERR_FSYNC;
    }
    // SAFETY: as in `write_file`.
    unsafe {
        let tail = tail(file);
        let code = (*(*tail).unix).xSync.expect("xSync")(file, flags);
        if code == SQLITE_OK {
            note(&format!("sync {}", name((*tail).name)), b"");
        }
        code
    }
}
