//! The border: every entry passes through here. Panics end here, errors get out here, and C's pointers become Rust's
//! values.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use csid_client::{SealedSecrets, Secrets};
use zeroize::Zeroizing;

use crate::arguments::{csi_map, csi_strings};
use crate::error::{CSI_E_INTERNAL, CSI_E_INVALID, CSI_E_UNSUPPORTED, CSI_OK, csi_code, csi_error};

/// The limit of all arguments of a call in bytes. csid ends the connection of a much larger call.
const MOST: usize = 64 * 1024;

pub type Result<T> = std::result::Result<T, csi_error>;

/// Runs an entry that may fail. Returns its code and writes its error, if the caller asked for one.
///
/// # Safety
/// `error` is NULL or can be written.
pub unsafe fn entry(
    name: &'static str,
    error: *mut *mut csi_error,
    body: impl FnOnce() -> Result<()>,
) -> csi_code {
    let failure = match catch_unwind(AssertUnwindSafe(|| {
        panics_here(name);
        body()
    })) {
        Ok(Ok(())) => return CSI_OK,
        Ok(Err(failure)) => failure,
        Err(_) => csi_error::new(CSI_E_INTERNAL, format!("{name} panicked; this is a fault of libcsi's")),
    };
    let code = failure.code();
    if !error.is_null() {
        // SAFETY: not NULL, and the caller promised the rest.
        unsafe { error.write(Box::into_raw(Box::new(failure))) };
    }
    code
}

/// An entry without an error: `other` is its answer when it panics.
pub fn plain<T>(name: &'static str, other: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(|| {
        panics_here(name);
        body()
    }))
    .unwrap_or(other)
}

#[cfg(feature = "fault")]
fn panics_here(name: &'static str) {
    assert!(std::env::var_os("LIBCSI_PANIC").is_none_or(|entry| entry != name), "a panic was asked for");
}

#[cfg(not(feature = "fault"))]
fn panics_here(_: &'static str) {}

pub fn invalid(message: impl Into<String>) -> csi_error {
    csi_error::new(CSI_E_INVALID, message)
}

/// Returns the value that C points to.
///
/// # Safety
/// `pointer` is NULL, or its value stays unchanged for `'a`.
pub unsafe fn object<'a, T>(what: &str, pointer: *const T) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| invalid(format!("{what} is NULL")))
}

/// Checks the pointer that receives an answer, before anything is started.
pub fn out<T>(what: &str, pointer: *mut T) -> Result<*mut T> {
    if pointer.is_null() { Err(invalid(format!("{what} is NULL"))) } else { Ok(pointer) }
}

/// A text that may be absent.
///
/// # Safety
/// `pointer` is NULL or a text that ends with a NUL.
pub unsafe fn optional_text(what: &str, pointer: *const c_char) -> Result<Option<String>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, and the caller promised the rest.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(|text| Some(text.to_owned())).map_err(|_| invalid(format!("{what} is not UTF-8")))
}

/// # Safety
/// As [`optional_text`].
pub unsafe fn text(what: &str, pointer: *const c_char) -> Result<String> {
    // SAFETY: the caller's promise.
    unsafe { optional_text(what, pointer) }?.ok_or_else(|| invalid(format!("{what} is NULL")))
}

/// Reads one of the contract's words.
///
/// # Safety
/// As [`optional_text`].
pub unsafe fn word<T: std::str::FromStr<Err = String>>(
    what: &str,
    pointer: *const c_char,
) -> Result<Option<T>> {
    // SAFETY: the caller's promise.
    let text = unsafe { optional_text(what, pointer) }?;
    text.map(|text| text.parse().map_err(|error| invalid(format!("{what}: {error}")))).transpose()
}

/// `len` things in a row; NULL is none.
///
/// # Safety
/// `items` is NULL or points to `len` of them, which stay as they are for `'a`.
pub unsafe fn items<'a, T>(what: &str, items: *const T, len: usize) -> Result<Option<&'a [T]>> {
    if items.is_null() {
        return if len == 0 {
            Ok(None)
        } else {
            Err(invalid(format!("{what}: NULL with a length of {len}")))
        };
    }
    if len > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(invalid(format!("{what}: a length of {len} fits in no memory")));
    }
    // SAFETY: not NULL, of a possible length, and the caller promised the rest.
    Ok(Some(unsafe { std::slice::from_raw_parts(items, len) }))
}

/// # Safety
/// As for [`items`] and [`text`].
pub unsafe fn texts(what: &str, list: csi_strings) -> Result<Option<Vec<String>>> {
    // SAFETY: the caller's promise.
    let items = unsafe { items(what, list.items, list.len) }?;
    // SAFETY: the caller's promise.
    items.map(|items| items.iter().map(|item| unsafe { text(what, *item) }).collect()).transpose()
}

/// # Safety
/// As for [`items`] and [`text`].
pub unsafe fn map(what: &str, map: csi_map) -> Result<Option<BTreeMap<String, String>>> {
    // SAFETY: the caller's promise.
    let Some(items) = (unsafe { items(what, map.items, map.len) })? else { return Ok(None) };
    let (mut read, mut bytes) = (BTreeMap::new(), 0);
    for pair in items {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (text(what, pair.key)?, text(what, pair.value)?) };
        bytes += key.len() + value.len();
        if bytes > MOST {
            return Err(invalid(format!("{what} has more than the {MOST} bytes that csid takes")));
        }
        if read.insert(key, value).is_some() {
            return Err(invalid(format!("{what} has a key twice")));
        }
    }
    Ok(Some(read))
}

/// Secrets, sealed for csid. The copies made on the way are zeroed, and no error has a word of them.
///
/// # Safety
/// As for [`items`] and [`text`].
pub unsafe fn secrets(map: csi_map) -> Result<Option<SealedSecrets>> {
    // SAFETY: the caller's promise.
    let Some(items) = (unsafe { items("secrets", map.items, map.len) })? else { return Ok(None) };
    let mut secrets = Secrets::new();
    for pair in items {
        // SAFETY: the caller's promise.
        let key = unsafe { text("a secret's name", pair.key) }?;
        // SAFETY: the caller's promise.
        let value = Zeroizing::new(unsafe { text("a secret", pair.value) }?);
        secrets.insert(key, value);
    }
    let sealed = secrets.seal();
    sealed
        .map(Some)
        .map_err(|error| csi_error::new(CSI_E_INTERNAL, format!("the secrets have no memfd: {error}")))
}

/// A struct that begins with `struct_size` and may grow at its end.
///
/// # Safety
/// The type is `repr(C)`, its first member is a `usize`, it has no padding, and any bytes, such as zeroes, are a value of it.
pub unsafe trait Extensible: Copy {
    /// The size of its first version. A program of that time gives no more.
    const FIRST: usize = size_of::<Self>();
}

/// The struct as this library knows it; absent, it is all zeroes.
///
/// # Safety
/// `pointer` is NULL or points to as many bytes as its first member says.
pub unsafe fn extensible<T: Extensible>(what: &str, pointer: *const T) -> Result<T> {
    // SAFETY: zeroes are a value of every Extensible.
    let mut read: T = unsafe { std::mem::zeroed() };
    if pointer.is_null() {
        return Ok(read);
    }
    // SAFETY: not NULL, and the first member is there to say how much else is.
    let size = unsafe { pointer.cast::<usize>().read() };
    let known = size_of::<T>();
    // No size ends inside a member: every member consists of whole words.
    if size < T::FIRST || (size < known && !size.is_multiple_of(size_of::<usize>())) {
        return Err(invalid(format!("{what}: a struct_size of {size} is too small; set it to sizeof")));
    }
    // An absurd size is refused before that much memory is read.
    if size > known + 4096 {
        return Err(invalid(format!("{what}: a struct_size of {size}; set it to sizeof")));
    }
    let given = size.min(known);
    // SAFETY: `size` bytes are there, and `given` is no more than that.
    let tail = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>().add(given), size - given) };
    if tail.iter().any(|byte| *byte != 0) {
        let message = format!("{what} has members that this libcsi does not know; a newer one is needed");
        return Err(csi_error::new(CSI_E_UNSUPPORTED, message));
    }
    // SAFETY: both have `given` bytes, and `read` is ours.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut read).cast(), given) };
    Ok(read)
}

/// As the contract has it: what is not asked for is not said.
pub fn flag(flags: u64, flag: u64) -> Option<bool> {
    (flags & flag != 0).then_some(true)
}

pub fn known_flags(what: &str, flags: u64, known: u64) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        other => {
            Err(csi_error::new(CSI_E_UNSUPPORTED, format!("{what}: flags {other:#x} mean nothing here")))
        }
    }
}
