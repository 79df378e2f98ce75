//! The words of `-o`: those for csid, those that concern mount(8) alone, and the mount flags for the plugin.

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use csid_client::{AccessMode, AttachmentMode, MountOptions, Propagation, Restore};

use super::{failure::HelperFailure, octal::unescaped};
use crate::args::span;

/// The time of a mount or an unmount. It is less than systemd's 90 s, so that the reason that is shown is csid's.
pub const DEADLINE: Duration = Duration::from_secs(80);

/// Words that mount(8) and systemd act on.
const IGNORED: [&str; 12] = [
    "defaults", "nofail", "auto", "noauto", "user", "nouser", "users", "nousers", "owner", "noowner",
    "group", "nogroup",
];

#[derive(Debug, Default, PartialEq)]
pub struct HelperOptions {
    pub read_only: bool,
    pub remount: bool,
    /// `_netdev` is among the words.
    pub netdev: bool,
    /// Mount flags for the plugin.
    flags: Vec<String>,
    /// `None`: the name of the mount unit.
    pub consumer: Option<String>,
    pub tag: Option<String>,
    pub fs_type: Option<String>,
    access_mode: Option<AccessMode>,
    mount_group: Option<String>,
    propagation: Option<Propagation>,
    deadline: Option<Duration>,
    credential: Option<String>,
    suid: bool,
    dev: bool,
    /// The rest is of a volume that is not registered.
    plugin: Option<String>,
    external_id: Option<String>,
    context: BTreeMap<String, String>,
}

impl HelperOptions {
    /// `sloppy`: unknown words of csid's are no error.
    pub fn parse(text: &str, sloppy: bool) -> Result<Self, HelperFailure> {
        let mut options = Self::default();
        for word in words(text) {
            let taken = match word.split_once('=') {
                Some((key, value)) => options.take_value(key, unquoted(value))?,
                None => options.take_word(word),
            };
            if taken || sloppy && word.starts_with("csi.") {
                continue;
            }
            if word.starts_with("csi.") {
                return Err(HelperFailure::Usage(format!("unknown option {word}; see mount.csi(8)")));
            }
            options.flags.push(word.to_owned());
        }
        if options.plugin.is_some() != options.external_id.is_some() {
            return Err(HelperFailure::Usage("csi.plugin and csi.external-id need each other".to_owned()));
        }
        if options.plugin.is_none() && !options.context.is_empty() {
            return Err(HelperFailure::Usage("csi.context.KEY needs csi.plugin".to_owned()));
        }
        Ok(options)
    }

    /// Returns whether the word is known.
    fn take_word(&mut self, word: &str) -> bool {
        match word {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "_netdev" => self.netdev = true,
            "remount" => self.remount = true,
            "csi.suid" => self.suid = true,
            "csi.dev" => self.dev = true,
            word => return IGNORED.contains(&word) || is_for_mount(word),
        }
        true
    }

    /// Returns whether the key is known.
    fn take_value(&mut self, key: &str, value: &str) -> Result<bool, HelperFailure> {
        let Some(own) = key.strip_prefix("csi.") else {
            return Ok(["user", "helper", "uhelper", "comment"].contains(&key) || is_for_mount(key));
        };
        let text = || Some(value.to_owned());
        match own {
            "tag" => self.tag = text(),
            "consumer" => self.consumer = text(),
            "fs-type" => self.fs_type = text(),
            "access-mode" => self.access_mode = Some(parsed(key, value)?),
            "mount-group" => self.mount_group = text(),
            "propagation" => self.propagation = Some(parsed(key, value)?),
            "deadline" => self.deadline = Some(span(value).map_err(|why| wrong(key, value, &why))?),
            "credential" => self.credential = text(),
            "plugin" => self.plugin = text(),
            "external-id" => self.external_id = text(),
            _ => match own.strip_prefix("context.") {
                Some(entry) if !entry.is_empty() => {
                    self.context.insert(entry.to_owned(), value.to_owned());
                }
                _ => return Ok(false),
            },
        }
        Ok(true)
    }

    pub fn deadline(&self) -> Duration {
        self.deadline.unwrap_or(DEADLINE)
    }

    /// Returns the options of the call. They have no deadline and no descriptor yet.
    pub fn of_call(&self, target: &str) -> MountOptions {
        let yes = |flag: bool| flag.then_some(true);
        MountOptions {
            credential: self.credential.clone(),
            plugin: self.plugin.clone(),
            external_id: self.external_id.clone(),
            volume_context: (!self.context.is_empty()).then(|| self.context.clone()),
            fs_type: self.fs_type.clone(),
            mount_flags: (!self.flags.is_empty()).then(|| self.flags.clone()),
            mount_group: self.mount_group.clone(),
            access_mode: self.access_mode,
            attachment_mode: Some(AttachmentMode::FileSystem),
            read_only: yes(self.read_only),
            tag: self.tag.clone(),
            target: Some(target.to_owned()),
            propagation: self.propagation,
            suid: yes(self.suid),
            dev: yes(self.dev),
            // fstab mounts it after a reboot. csid must not do so, too.
            restore: Some(Restore::Hold),
            ..MountOptions::default()
        }
    }
}

/// Returns whether the word is one that libmount keeps from helpers. Here it is only if the helper was started by hand.
fn is_for_mount(word: &str) -> bool {
    word.starts_with("x-") || word.starts_with("X-")
}

fn parsed<T: FromStr<Err = String>>(key: &str, value: &str) -> Result<T, HelperFailure> {
    value.parse().map_err(|why: String| wrong(key, value, &why))
}

fn wrong(key: &str, value: &str, why: &str) -> HelperFailure {
    HelperFailure::Usage(format!("{key}={value}: {why}"))
}

/// Returns the words between commas. A comma within `"` is part of a word.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    let words = text.split(move |c| {
        quoted ^= c == '"';
        c == ',' && !quoted
    });
    words.filter(|word| !word.is_empty())
}

fn unquoted(value: &str) -> &str {
    value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value)
}

/// Returns a volume's namespace and name. `None`: the source has no such form.
pub fn volume(source: &str) -> Option<(String, String)> {
    let (namespace, volume) = source.split_once('/')?;
    (!namespace.is_empty() && !volume.is_empty()).then(|| (namespace.to_owned(), volume.to_owned()))
}

/// Returns a field of fstab as text. `None`: it is not UTF-8.
pub fn field(of: &str) -> Option<String> {
    unescaped(of).into_string().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> HelperOptions {
        HelperOptions::parse(text, false).unwrap_or_else(|error| panic!("{text}: {}", error.text()))
    }

    #[test]
    fn mount_flags_are_what_mount_does_not_use() {
        for (text, flags) in [
            ("rw,_netdev", &[][..]),
            ("rw,noatime,sync,noexec", &["noatime", "sync", "noexec"]),
            ("ro,noatime,remount,_netdev", &["noatime"]),
            ("rw,nofail,user,users,user=me,owner,group,auto,noauto", &[]),
            ("rw,x-systemd.automount,X-mount.mkdir,x-a=b,comment=c,helper=csi,uhelper=x", &[]),
            (
                r#"context="system_u:object_r:x:s0:c1,c2",noatime"#,
                &[r#"context="system_u:object_r:x:s0:c1,c2""#, "noatime"],
            ),
            ("", &[]),
        ] {
            assert_eq!(parse(text).flags, flags, "{text}");
        }
        let remount = parse("ro,noatime,remount,_netdev");
        assert!(remount.remount && remount.read_only && remount.netdev);
        assert!(!parse("ro,rw").read_only, "the last word counts");
    }

    #[test]
    fn options_of_csid_reach_the_call() {
        let text = r#"rw,_netdev,csi.tag=blue,csi.fs-type=xfs,csi.access-mode=single-node-writer,csi.mount-group=pg,csi.propagation=host-to-task,csi.deadline=2min,csi.credential=pg,csi.suid,csi.dev,csi.plugin=p,csi.external-id=a/b,csi.context.k="v,w",csi.context.l=m=n"#;
        let options = parse(text);
        assert_eq!(options.deadline(), Duration::from_secs(120));
        let call = options.of_call("/srv/pg");
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(call.tag, text("blue"));
        assert_eq!(call.fs_type, text("xfs"));
        assert_eq!(call.access_mode, Some(AccessMode::SingleNodeWriter));
        assert_eq!(call.mount_group, text("pg"));
        assert_eq!(call.propagation, Some(Propagation::HostToTask));
        assert_eq!(call.credential, text("pg"));
        assert_eq!((call.suid, call.dev, call.read_only), (Some(true), Some(true), None));
        assert_eq!((call.plugin, call.external_id), (text("p"), text("a/b")));
        let context = [("k", "v,w"), ("l", "m=n")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(call.volume_context, Some(context.into()));
        assert_eq!((call.restore, call.target), (Some(Restore::Hold), text("/srv/pg")));
        assert_eq!(call.mount_flags, None, "the volume's own");
        assert_eq!(parse("rw").deadline(), DEADLINE);
    }

    #[test]
    fn unknown_words_of_csid_are_errors_unless_sloppy() {
        for text in [
            "csi.tags=a",
            "csi.suid=yes",
            "csi.tag",
            "csi.context.=v",
            "csi.access-mode=everybody",
            "csi.deadline=soon",
            "csi.plugin=p",
            "csi.external-id=x",
            "csi.context.k=v",
        ] {
            assert!(HelperOptions::parse(text, false).is_err_and(|error| error.code() == 1), "{text}");
        }
        assert_eq!(HelperOptions::parse("csi.later=a,csi.word", true).ok(), Some(HelperOptions::default()));
    }

    #[test]
    fn source_is_cut_at_the_first_slash() {
        let pair = |a: &str, b: &str| Some((a.to_owned(), b.to_owned()));
        assert_eq!(volume("prod/pg"), pair("prod", "pg"));
        assert_eq!(volume("prod/a/b c"), pair("prod", "a/b c"));
        for source in ["pg", "/pg", "prod/", "", "/"] {
            assert_eq!(volume(source), None, "{source}");
        }
    }
}
