//! Random names.

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
    let mut bytes = [0; 16];
    let read = SOURCE.as_ref().map_err(ToString::to_string);
    let read = read.and_then(|mut source| source.read_exact(&mut bytes).map_err(|error| error.to_string()));
    // The kernel has random bytes for ever, so a failure is a broken machine.
    if let Err(error) = read {
        panic!("/dev/urandom cannot be read: {error}");
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
