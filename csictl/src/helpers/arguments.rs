//! The arguments that mount(8) and umount(8) give their helpers. Both programs put options last and make paths canonical.

use std::ffi::OsString;

use super::failure::HelperFailure;

const MOUNT: &str =
    "usage: mount.csi NAMESPACE/VOLUME TARGET [-sfnv] [-o OPTIONS] [-t csi.FSTYPE]; see mount.csi(8)";
const UNMOUNT: &str = "usage: umount.csi TARGET [-nlfvr] [-t TYPE]; see umount.csi(8)";

#[derive(Debug, Default, PartialEq, Eq)]
pub struct MountArguments {
    pub source: String,
    pub target: String,
    /// Unknown options are no error.
    pub sloppy: bool,
    /// Nothing is mounted.
    pub fake: bool,
    /// No line is written to utab.
    pub no_utab: bool,
    pub options: String,
    /// The file system of the type `csi.FSTYPE`.
    pub fs_type: Option<String>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct UnmountArguments {
    pub target: String,
    pub lazy: bool,
    pub force: bool,
}

impl MountArguments {
    pub fn parse(words: Vec<OsString>) -> Result<Self, HelperFailure> {
        let (paths, given) = split(words, "sfnv", MOUNT)?;
        let Ok([source, target]) = <[String; 2]>::try_from(paths) else { return Err(usage(MOUNT)) };
        let mut parsed = Self { source, target, ..Self::default() };
        for (option, value) in given {
            match option {
                's' => parsed.sloppy = true,
                'f' => parsed.fake = true,
                'n' => parsed.no_utab = true,
                'o' if parsed.options.is_empty() => parsed.options = value,
                'o' => parsed.options = format!("{},{value}", parsed.options),
                't' => parsed.fs_type = fs_type(&value)?,
                _ => {}
            }
        }
        Ok(parsed)
    }
}

impl UnmountArguments {
    pub fn parse(words: Vec<OsString>) -> Result<Self, HelperFailure> {
        let (paths, given) = split(words, "nlfvr", UNMOUNT)?;
        let Ok([target]) = <[String; 1]>::try_from(paths) else { return Err(usage(UNMOUNT)) };
        let has = |option| given.iter().any(|(given, _)| *given == option);
        Ok(Self { target, lazy: has('l'), force: has('f') })
    }
}

/// Returns the file system that a type names. `None`: the type is csi alone.
fn fs_type(of: &str) -> Result<Option<String>, HelperFailure> {
    match of.strip_prefix("csi") {
        Some("") => Ok(None),
        Some(rest) if rest.len() > 1 && rest.starts_with('.') => Ok(Some(rest[1..].to_owned())),
        _ => Err(HelperFailure::Usage(format!("type {of} is neither csi nor csi.FSTYPE"))),
    }
}

fn usage(text: &str) -> HelperFailure {
    HelperFailure::Usage(text.to_owned())
}

/// An option and its value. The value of an option without one is empty.
type Given = (char, String);

/// Returns the paths and the options. `flags`: the options without one.
fn split(words: Vec<OsString>, flags: &str, how: &str) -> Result<(Vec<String>, Vec<Given>), HelperFailure> {
    let (mut paths, mut given) = (Vec::new(), Vec::new());
    let mut words = words.into_iter().map(|word| {
        word.into_string().map_err(|word| HelperFailure::Usage(format!("{} is not UTF-8", word.display())))
    });
    while let Some(word) = words.next().transpose()? {
        let Some(letters) = word.strip_prefix('-').filter(|letters| !letters.is_empty()) else {
            paths.push(word);
            continue;
        };
        for (at, letter) in letters.char_indices() {
            if flags.contains(letter) {
                given.push((letter, String::new()));
                continue;
            }
            if letter == 'N' {
                let refused = "-N is not supported: csid mounts in the host's mount namespace";
                return Err(usage(refused));
            }
            if !"ot".contains(letter) {
                return Err(HelperFailure::Usage(format!("unknown option -{letter}; {how}")));
            }
            let value = match &letters[at + 1..] {
                "" => words.next().transpose()?.ok_or_else(|| usage(how))?,
                rest => rest.to_owned(),
            };
            given.push((letter, value));
            break;
        }
    }
    Ok((paths, given))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Vec<OsString> {
        line.iter().map(OsString::from).collect()
    }

    fn mount(line: &[&str]) -> MountArguments {
        MountArguments::parse(words(line)).unwrap_or_else(|error| panic!("{line:?}: {}", error.text()))
    }

    /// Each line is what mount of util-linux 2.38.1 passed.
    #[test]
    fn recorded_arguments_of_mount_are_read() {
        let plain = MountArguments {
            source: "prod/pg".into(),
            target: "/srv/pg".into(),
            options: "rw".into(),
            ..MountArguments::default()
        };
        let line = ["prod/pg", "/srv/pg", "-o", "rw"];
        assert_eq!(mount(&line), plain);
        let all = ["prod/pg", "/srv/pg", "-s", "-f", "-n", "-v", "-o", "ro,noatime,_netdev", "-t", "csi.xfs"];
        let every = MountArguments {
            sloppy: true,
            fake: true,
            no_utab: true,
            options: "ro,noatime,_netdev".into(),
            fs_type: Some("xfs".into()),
            ..mount(&line)
        };
        assert_eq!(mount(&all), every);
        assert_eq!(mount(&["prod/a b", "/srv/ä b", "-o", "rw"]).source, "prod/a b");
        // By hand.
        assert_eq!(
            mount(&["-sfnv", "-oro", "-o", "noatime,_netdev", "-tcsi.xfs", "prod/pg", "/srv/pg"]).options,
            "ro,noatime,_netdev"
        );
        assert_eq!(mount(&["prod/pg", "/srv/pg", "-t", "csi"]).fs_type, None);
    }

    #[test]
    fn wrong_arguments_of_mount_are_usage_errors() {
        use std::os::unix::ffi::OsStringExt;

        for line in [
            &[][..],
            &["prod/pg"],
            &["a", "b", "c"],
            &["prod/pg", "/srv/pg", "-N", "/proc/1/ns/mnt"],
            &["prod/pg", "/srv/pg", "-x"],
            &["prod/pg", "/srv/pg", "--help"],
            &["prod/pg", "/srv/pg", "-o"],
            &["prod/pg", "/srv/pg", "-t", "xfs"],
            &["prod/pg", "/srv/pg", "-t", "csi."],
        ] {
            let error = MountArguments::parse(words(line)).map(|_| ());
            assert_eq!(error.map_err(|error| error.code()), Err(1), "{line:?}");
        }
        let bytes = vec![OsString::from_vec(b"prod/\xff".to_vec()), "/srv/pg".into()];
        assert!(MountArguments::parse(bytes).is_err_and(|error| error.text().contains("is not UTF-8")));
    }

    #[test]
    fn recorded_arguments_of_umount_are_read() {
        let parse = |line: &[&str]| UnmountArguments::parse(words(line));
        let plain = UnmountArguments { target: "/srv/pg".into(), ..UnmountArguments::default() };
        assert_eq!(parse(&["/srv/pg"]).ok(), Some(plain));
        let all = UnmountArguments { target: "/srv/pg".into(), lazy: true, force: true };
        assert_eq!(parse(&["/srv/pg", "-n", "-l", "-f", "-v", "-r", "-t", "ext4"]).ok(), Some(all));
        for line in [&[][..], &["/srv/pg", "-N", "/n"], &["/srv/pg", "/srv/b"], &["/srv/pg", "-s"]] {
            assert!(parse(line).is_err_and(|error| error.code() == 1), "{line:?}");
        }
    }
}
