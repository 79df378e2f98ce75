//! The sockets that csid listens on: systemd's, by the names it gives them, or csid's own where it was not started by systemd.

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::Context;
use rustix::net::AddressFamily;

/// systemd's name for csid.socket's descriptor without FileDescriptorName=.
const PRIVATE: &str = "csid.socket";
/// FileDescriptorName= of csid-metrics.socket.
const METRICS: &str = "metrics";

pub(super) struct Sockets {
    pub private: UnixListener,
    /// None, where systemd passes none; several, where an administrator adds some.
    pub metrics: Vec<OwnedFd>,
}

pub(super) fn listen(runtime: &Path) -> anyhow::Result<Sockets> {
    let (mut private, mut metrics, mut passed) = (None, Vec::new(), false);
    for (fd, name) in sd_notify::listen_fds_with_names()? {
        // SAFETY: systemd passed this descriptor to this process (LISTEN_PID), and nothing else here takes it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        passed = true;
        match name.as_str() {
            METRICS => metrics.push(socket),
            // Only a Unix socket gives the uid of its callers.
            PRIVATE if private.is_none() && is_unix(&socket) => private = Some(socket),
            _ => tracing::warn!(
                name,
                "a socket that systemd passes is closed: the private one is a Unix socket, the first of {PRIVATE}, and those of \
                 {METRICS} are the metrics'"
            ),
        }
    }
    if !passed {
        metrics.push(own(&runtime.join("metrics.sock"))?.into());
    }
    let private = private.map_or_else(|| own(&runtime.join("csid.sock")), |socket| Ok(socket.into()))?;
    private.set_nonblocking(true)?;
    Ok(Sockets { private, metrics })
}

fn is_unix(socket: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_domain(socket).is_ok_and(|domain| domain == AddressFamily::UNIX)
}

fn own(path: &Path) -> anyhow::Result<UnixListener> {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(error).with_context(|| format!("cannot remove the stale {}", path.display()));
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    Ok(listener)
}
