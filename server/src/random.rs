//! Random names.

use std::io::Read;

/// Returns a name of 128 random bits.
pub fn name() -> String {
    let mut bytes = [0; 16];
    // The kernel has random bytes for ever, so a failure is a broken machine.
    if let Err(error) = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)) {
        panic!("/dev/urandom cannot be read: {error}");
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
