//! Hints of mount.csi and umount.csi, whose options are in fstab and in mount units.

use csid_client::{Error, Kind};

use super::common::Tried;
use super::hint;
use super::steps::{LIMIT, TOPOLOGY};

/// Returns the hint for an error of a helper. `tried.command` is `mount` or `unmount`.
pub fn of_helper(error: &Error, tried: &Tried) -> Option<String> {
    let own = error.csid().and_then(|error| {
        let step = error.details.step.as_deref();
        let volume = tried.volume.as_deref().unwrap_or("NAMESPACE VOLUME");
        match error.kind {
            Kind::InvalidArgument if error.details.obstacle.is_none() => Some(
                "Options of a line in fstab: mount.csi(8). A block device has no file system to mount: `csictl mount --block`."
                    .to_owned(),
            ),
            Kind::AlreadyExists if tried.command == "mount" => Some(
                "Compare its options: `csictl mounts --json`. To change them, unmount it first (`systemctl stop` of the mount unit, or \
                 `umount`)."
                    .to_owned(),
            ),
            Kind::ClaimConflict if error.details.obstacle.as_deref() == Some("target") => Some(
                "Unmount what is at the target: `csictl mounts --json` and `findmnt` show it.".to_owned(),
            ),
            Kind::ClaimConflict if ![Some(LIMIT), Some(TOPOLOGY)].contains(&step) => Some(format!(
                "Release it there first: `csictl claims`, `csictl mounts`. If a holder does not end: `csictl explain {volume}`."
            )),
            Kind::TimedOut if tried.command == "mount" => Some(format!(
                "See why: `csictl explain {volume}`. For more time give the line csi.deadline=TIME, and \
                 x-systemd.mount-timeout=TIME with ten seconds more."
            )),
            Kind::SecretRequired => {
                Some("Give the line csi.credential=NAME, a systemd credential with the volume's secrets.".to_owned())
            }
            _ => None,
        }
    });
    own.or_else(|| hint(error, tried))
}

#[cfg(test)]
mod tests {
    use csid_client::{CsidError, Details};

    use super::super::samples::tried;
    use super::*;

    fn said(kind: Kind, details: Details, command: &'static str) -> String {
        let error = CsidError { kind, message: "m".into(), details };
        of_helper(&Error::Csid(Box::new(error)), &tried(command)).unwrap()
    }

    #[test]
    fn hints_of_helpers_name_no_option_of_csictl_mount() {
        use Kind::*;

        for kind in
            [InvalidArgument, AlreadyExists, ClaimConflict, TimedOut, SecretRequired, NotFound, PluginError]
        {
            let hint = said(kind.clone(), Details::default(), "mount");
            for option in ["--wait", "--deadline", "--credential", "--secrets-file", "csictl mount --help"] {
                assert!(!hint.contains(option), "{kind}: {hint}");
            }
        }
        assert!(said(Busy, Details::default(), "unmount").contains("End its holders"));
        let target = Details { obstacle: Some("target".into()), ..Details::default() };
        assert!(said(ClaimConflict, target, "mount").starts_with("Unmount what is at the target"));
        let limit = Details { step: Some(LIMIT.into()), ..Details::default() };
        assert!(said(ClaimConflict, limit, "mount").contains("takes no more volumes"));
    }
}
