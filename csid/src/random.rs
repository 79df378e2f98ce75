//! Random names and numbers.

use std::fs::File;
use std::io::{self, Read};
use std::sync::LazyLock;

/// The open source.
static SOURCE: LazyLock<io::Result<File>> = LazyLock::new(|| File::open("/dev/urandom"));

/// Opens the source, so that a process that has no descriptor left later makes names all the same.
pub fn open() {
    LazyLock::force(&SOURCE);
}

/// Returns a name of 128 random bits.
pub fn name() -> String {
    bytes::<16>().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a random number from 0 to 1, without 1.
pub fn share() -> f64 {
    f64::from(u32::from_ne_bytes(bytes())) / (f64::from(u32::MAX) + 1.0)
}

fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let read = SOURCE.as_ref().map_err(ToString::to_string);
    let read = read.and_then(|mut source| source.read_exact(&mut bytes).map_err(|error| error.to_string()));
    // The kernel has random bytes for ever, so a failure is a broken machine.
    if let Err(error) = read {
        panic!("/dev/urandom cannot be read: {error}");
    }
    bytes
}
