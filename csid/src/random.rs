//! Random names.

use std::fs::File;
use std::io::{self, Read};
use std::sync::LazyLock;

/// The open source. The first name is made at the start, so a server that has no descriptor left makes names all the same.
static SOURCE: LazyLock<io::Result<File>> = LazyLock::new(|| File::open("/dev/urandom"));

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
