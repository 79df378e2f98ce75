//! Every entry of libcsi, its arguments made of what libFuzzer gives: see `libcsi-ffi/tests/c/fuzz.c`. It needs a csid at
//! `$CSID_SOCKET`; `run` gives it one.
#![no_main]

use std::sync::Once;

use libfuzzer_sys::fuzz_target;

// Linked for its C entries alone.
extern crate csi as _;

unsafe extern "C" {
    fn fuzz_begin();
    fn fuzz_one(bytes: *const u8, size: usize);
}

fuzz_target!(|bytes: &[u8]| {
    static BEGUN: Once = Once::new();
    // SAFETY: it has no arguments.
    BEGUN.call_once(|| unsafe { fuzz_begin() });
    // SAFETY: so many bytes are there, and libFuzzer calls this on one thread.
    unsafe { fuzz_one(bytes.as_ptr(), bytes.len()) };
});
