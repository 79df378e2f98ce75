//! The contracts as code: CSI and plugin registration as generated types, clients and (feature `server`) servers, and csid's
//! D-Bus interface as its XML. It owns no state. What always holds: `{:?}` of no message of CSI or of a cluster shows a secret, the value of a
//! context or parameter, or mount flags; the generated `Debug` is replaced for every message that has one.

use std::fmt;

pub mod access;
#[cfg(feature = "cluster")]
pub mod identity;
pub mod time;

/// The CSI v1 interface.
pub mod csi {
    /// `csi.v1`: v1.13 with the v1.12 fields that drivers still send.
    #[allow(missing_docs, clippy::all, clippy::pedantic, unused_qualifications)]
    pub mod v1 {
        tonic::include_proto!("csi.v1");
        include!(concat!(env!("OUT_DIR"), "/csi.v1.debug.rs"));
    }
}

/// What nodes and operators ask of a cluster's servers.
#[cfg(feature = "cluster")]
pub mod cluster {
    /// The trailer of a refused call that has a server's [`v1::Failure`].
    pub const TRAILER: &str = "csid-failure-bin";
    /// The limit of a controller call, in bytes, as it crosses. A server leaves out values of `hide` until the call fits.
    pub const CALL: usize = 120 * 1024;
    /// The limit of the values of `hide`.
    pub const HIDE: usize = 2000;

    #[allow(missing_docs, clippy::all, clippy::pedantic, unused_qualifications)]
    pub mod v1 {
        tonic::include_proto!("csid.cluster.v1");
        include!(concat!(env!("OUT_DIR"), "/csid.cluster.v1.debug.rs"));
    }
}

/// The kubelet's plugin registration, v1.
#[allow(missing_docs, clippy::all, clippy::pedantic, unused_qualifications)]
pub mod pluginregistration {
    tonic::include_proto!("pluginregistration");
}

/// csid's D-Bus contract, as installed in `/usr/share/dbus-1/interfaces`.
pub const DBUS_INTERFACE_XML: &str = include_str!("../dbus/org.csid1.xml");

/// The `FileDescriptorSet` of csi.proto and what it imports, encoded, its options included.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/csi.v1.descriptors"));

/// Stands in a `Debug` for so many entries that are not shown.
struct Hidden(usize);

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("[]"),
            n => write!(f, "[{n} hidden]"),
        }
    }
}

#[cfg(test)]
mod tests;
