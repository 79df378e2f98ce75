//! mount.csi and umount.csi: the programs that mount(8) and umount(8) run for the file system type csi, and so lines of fstab and mount
//! units. Both are symlinks to csictl.

mod arguments;
mod failure;
pub mod fstab;
mod lock;
mod mount;
pub mod mount_table;
mod octal;
mod options;
mod session;
pub mod unit;
mod unmount;
mod utab;

use std::{
    ffi::{OsStr, OsString},
    path::Path,
    process::ExitCode,
};

use crate::output::lines;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Helper {
    Mount,
    Unmount,
}

impl Helper {
    /// Returns the helper that the program was started as. `None`: it is csictl.
    pub fn of(program: &OsStr) -> Option<Self> {
        match Path::new(program).file_name()?.to_str()? {
            "mount.csi" => Some(Self::Mount),
            "umount.csi" => Some(Self::Unmount),
            _ => None,
        }
    }

    /// Runs the helper with its arguments, and returns the exit code as mount(8) defines it.
    pub async fn run(self, words: Vec<OsString>) -> ExitCode {
        let (name, done) = match self {
            Self::Mount => ("mount.csi", mount::mount(words).await),
            Self::Unmount => ("umount.csi", unmount::unmount(words).await),
        };
        let Err(failure) = done else { return ExitCode::SUCCESS };
        eprintln!("{name}: {}", lines(&failure.text()));
        ExitCode::from(failure.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_the_program_selects_the_helper() {
        for (program, helper) in [
            ("/sbin/mount.csi", Some(Helper::Mount)),
            ("umount.csi", Some(Helper::Unmount)),
            ("/usr/bin/csictl", None),
            ("mount.csi.old", None),
            ("", None),
        ] {
            assert_eq!(Helper::of(OsStr::new(program)), helper, "{program}");
        }
    }
}
