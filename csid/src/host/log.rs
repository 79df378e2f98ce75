//! Reads the logs of units, by journalctl in a unit of its own. A log may be followed for days, and continues when csid is restarted. It
//! ends when the reader has closed its end of the pipe. The unit has no mount namespace of its own, in which a copy of a consumer's
//! mount would stay after its unmount.

use std::os::fd::{AsFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};
use zbus::Variant;

use crate::host::units::{Units, UnitsError};

/// Logs that are read at once; each is a unit, with a process.
const READERS: usize = 32;

/// The lines to read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lines {
    /// Whether to wait for further lines.
    pub follow: bool,
    /// The time of the oldest line, in microseconds since the epoch.
    pub since_usec: Option<u64>,
    /// At most so many, the newest.
    pub most: Option<u32>,
}

impl Units {
    /// The lines of these units, to be read from a pipe; `None`: as many are being read as may be.
    pub async fn log(&self, units: &[String], lines: Lines) -> Result<Option<OwnedFd>, UnitsError> {
        let (reading, writing) =
            pipe_with(PipeFlags::CLOEXEC).map_err(|errno| UnitsError::Pipe(errno.into()))?;
        let allowed = |what: &str| (true, vec![what.to_owned()]);
        let properties: Vec<(&str, Variant<'_>)> = vec![
            ("Description", format!("The log of {} for csid", units.join(" ")).into()),
            ("Type", "exec".into()),
            ("ExecStart", vec![("/usr/bin/journalctl".to_owned(), argv(units, lines), false)].into()),
            ("StandardInput", "null".into()),
            ("StandardOutputFileDescriptor", Variant::Fd(writing.as_fd().into())),
            ("StandardError", "journal".into()),
            ("CollectMode", "inactive-or-failed".into()),
            ("LimitCORE", 0_u64.into()),
            ("CapabilityBoundingSet", 0_u64.into()),
            ("NoNewPrivileges", true.into()),
            ("MemoryDenyWriteExecute", true.into()),
            ("RestrictNamespaces", 0_u64.into()),
            ("RestrictAddressFamilies", allowed("AF_UNIX").into()),
            ("SystemCallFilter", allowed("@system-service").into()),
        ];
        for slot in 0..READERS {
            let unit = format!("csid-log-{slot}.service");
            match self.start_transient_unit(&unit, &properties).await {
                Err(UnitsError::Exists { .. }) => {}
                started => return started.map(|()| Some(reading)),
            }
        }
        Ok(None)
    }
}

fn argv(units: &[String], lines: Lines) -> Vec<String> {
    let mut argv: Vec<String> =
        ["journalctl", "--quiet", "--no-pager", "--output=short-iso"].map(str::to_owned).into();
    argv.extend(units.iter().map(|unit| format!("--unit={unit}")));
    argv.extend(lines.follow.then(|| "--follow".to_owned()));
    argv.extend(lines.since_usec.map(|usec| format!("--since=@{usec}us")));
    // --follow alone shows the last ten; who says since when wants all of them.
    let all = lines.since_usec.map(|_| "--lines=all".to_owned());
    argv.extend(lines.most.map(|most| format!("--lines={most}")).or(all));
    argv
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journalctl_is_asked_for_these_lines() {
        let asked = |lines| argv(&["a.service".to_owned(), "b.service".to_owned()], lines)[4..].join(" ");
        assert_eq!(asked(Lines::default()), "--unit=a.service --unit=b.service");
        let lines = Lines { follow: true, since_usec: Some(1_500_000), most: None };
        assert_eq!(asked(lines), "--unit=a.service --unit=b.service --follow --since=@1500000us --lines=all");
        let lines = Lines { most: Some(3), ..lines };
        assert_eq!(asked(lines), "--unit=a.service --unit=b.service --follow --since=@1500000us --lines=3");
    }
}
