//! Environment variables that name sockets. A set-uid program's environment comes from its caller. A variable could name
//! the caller's own server, which would get the program's secrets and answer in csid's place.

use std::env;
use std::ffi::OsString;

/// The default of the D-Bus specification.
const SYSTEM_BUS: &str = "unix:path=/var/run/dbus/system_bus_socket";

/// Returns a variable as secure_getenv(3) reads it. `None`: it is not set, or the kernel started the program with more
/// rights than its caller has.
pub(crate) fn secure_var(name: &str) -> Option<OsString> {
    var(name, is_secure())
}

fn is_secure() -> bool {
    // SAFETY: it reads the process' auxiliary vector, and has no other conditions.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

fn var(name: &str, secure: bool) -> Option<OsString> {
    if secure { None } else { env::var_os(name) }
}

/// The address of the system bus.
pub(crate) fn system_bus() -> String {
    let named = secure_var("DBUS_SYSTEM_BUS_ADDRESS").and_then(|address| address.into_string().ok());
    named.unwrap_or_else(|| SYSTEM_BUS.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::Target;

    #[test]
    fn a_program_with_more_rights_reads_none() {
        assert!(var("PATH", false).is_some());
        assert_eq!(var("PATH", true), None);
        assert_eq!(var("CSID_NO_SUCH_VARIABLE", false), None);
    }

    /// This program, set-uid, names its own test.
    #[test]
    fn set_uid_program_ignores_variables() {
        const CHILD: &str = "CSID_TEST_CHILD";
        if env::var_os(CHILD).is_some() {
            assert_eq!(Target::from_env(), Target::Auto);
            assert_eq!(system_bus(), SYSTEM_BUS);
            return;
        }
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIPPED: not root");
        }
        let directory = tempfile::tempdir().unwrap();
        let copy = directory.path().join("copy");
        std::fs::copy(env::current_exe().unwrap(), &copy).unwrap();
        std::os::unix::fs::chown(&copy, Some(65534), None).unwrap();
        for (mode, believes) in [(0o755, true), (0o4755, false)] {
            std::fs::set_permissions(&copy, PermissionsExt::from_mode(mode)).unwrap();
            let child = std::process::Command::new(&copy)
                .args(["--exact", "environment::tests::set_uid_program_ignores_variables"])
                .env(CHILD, "1")
                .env("CSID_SOCKET", "/tmp/a-server-of-the-callers")
                .env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/tmp/a-bus-of-the-callers")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&child.stdout);
            assert!(text.contains("running 1 test"), "{text}");
            assert_eq!(child.status.success(), !believes, "mode {mode:o}: {text}");
        }
    }
}
