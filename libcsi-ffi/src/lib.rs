//! libcsi: csid's C library. Thin: it turns C's arguments into csid-client's, and its answers into rows.
//!
//! libcsi owns one thread for each open client, and the objects that its callers have handles of. It has no engine, no state file and no
//! protocol of its own. Its rules:
//! - a C type has one kind of ownership: counted (`csi_client`, `csi_op`, `csi_events`), owned (`csi_error`, `csi_event`) or borrowed
//!   from one of these (`csi_row`, and every text);
//! - nothing of C's is kept after an entry returns;
//! - no panic leaves an entry, and no entry waits but those that say so;
//! - `include/csi.h` is made of these sources (`tests/header.rs`); the docs of what is public here are C's docs.

// C's names, as C sees them. What a caller owes every entry is said once, at the head of csi.h.
#![allow(non_camel_case_types, clippy::missing_safety_doc)]

mod arguments;
mod border;
mod claims;
mod client;
mod error;
mod events;
mod inventory;
mod lists;
mod mounts;
mod op;
mod plugins;
mod row;
mod spec;
mod volumes;

/// The major version of this header. It changes only when something is taken away.
pub const CSI_VERSION_MAJOR: u32 = 1;
/// The minor version of this header. It grows when functions or struct members are added.
pub const CSI_VERSION_MINOR: u32 = 0;
/// The patch version of this header.
pub const CSI_VERSION_PATCH: u32 = 0;

/// Returns the version of the library that runs, which may be newer than this header.
///
/// @return major << 16 | minor << 8 | patch; 0 if the library panicked.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub extern "C" fn csi_version() -> u32 {
    border::plain("csi_version", 0, || CSI_VERSION_MAJOR << 16 | CSI_VERSION_MINOR << 8 | CSI_VERSION_PATCH)
}
