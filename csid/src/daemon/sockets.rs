//! The sockets that csid listens on: systemd's, by the names it gives them, or csid's own where it was not started by systemd.

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::Context;

/// FileDescriptorName= of csid-metrics.socket. What has another name is the private socket.
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
            _ => drop(private.get_or_insert(socket)),
        }
    }
    if !passed {
        metrics.push(own(&runtime.join("metrics.sock"))?.into());
    }
    let private = private.map_or_else(|| own(&runtime.join("csid.sock")), |socket| Ok(socket.into()))?;
    private.set_nonblocking(true)?;
    Ok(Sockets { private, metrics })
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
