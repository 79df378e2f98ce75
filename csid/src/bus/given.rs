//! What several members take alike: a volume's name, or the volume itself where it is not registered here, capabilities, secrets;
//! and what of it is root's alone.

use std::collections::{BTreeMap, HashMap};

use zbus::OwnedVariant;

use super::authorise::Permit;
use super::fds;
use super::options::{Keys, Options, check_types};
use crate::error::{Error, Kind, Result};
use crate::names;
use crate::plugin::validate_id;
use crate::secret::Secrets;
use crate::store::registry::{Bound, BoundTo, Capability, VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;
use crate::volume::requests::Inline;

/// What a member that the contract marks (inline) takes of a volume that is not registered here.
pub(super) const INLINE: Keys = &[
    ("plugin", "s"),
    ("external-id", "s"),
    ("volume-context", "a{ss}"),
    ("capabilities", "aa{sv}"),
    ("fs-type", "s"),
    ("mount-flags", "as"),
];

const CAPABILITY: Keys = &[("access-mode", "s"), ("attachment-mode", "s")];

pub(super) fn volume_name(namespace: String, volume: String) -> Result<VolumeName> {
    names::name("namespace", &namespace)?;
    names::name("volume", &volume)?;
    Ok(VolumeName { namespace, volume })
}

/// The volume as the plugin knows it, when it is given inline.
pub(super) fn volume_key(options: &mut Options) -> Result<Option<VolumeKey>> {
    let plugin = options.checked("plugin", |_, id| validate_id(id))?;
    let external_id = options.checked("external-id", names::name)?;
    match (plugin, external_id) {
        (Some(plugin), Some(external_id)) => Ok(Some(VolumeKey { plugin, external_id })),
        (None, None) => Ok(None),
        (Some(_), None) => Err(Error::invalid("plugin is given without external-id")),
        (None, Some(_)) => Err(Error::invalid("external-id is given without plugin")),
    }
}

/// The keys of [`INLINE`]; of a registered volume none of them can be said again.
pub(super) fn inline(options: &mut Options) -> Result<Option<Inline>> {
    let volume = volume_key(options)?;
    if volume.is_none() {
        only_inline(options, &["volume-context", "capabilities", "fs-type", "mount-flags"])?;
    }
    let spec = VolumeSpec {
        capabilities: capabilities(options)?.unwrap_or_default(),
        fs_type: options.checked("fs-type", |_, text| names::fs_type(text))?.unwrap_or_default(),
        mount_flags: mount_flags(options)?.unwrap_or_default(),
        context: map(options, "volume-context")?,
        ..VolumeSpec::default()
    };
    Ok(volume.map(|volume| Inline { volume, spec }))
}

/// A registered volume's own cannot be given with a call.
pub(super) fn only_inline(options: &Options, keys: &[&str]) -> Result<()> {
    match keys.iter().find(|key| options.has(key)) {
        None => Ok(()),
        Some(key) => Err(Error::invalid(format!(
            "{key} is for a volume that is not registered here: give plugin and external-id too, or leave it out"
        ))),
    }
}

/// What a volume can be used as, where that is said.
pub(super) fn capabilities(options: &mut Options) -> Result<Option<Vec<Capability>>> {
    let Some(maps) = options.maps("capabilities") else { return Ok(None) };
    maps.iter().try_for_each(|map| check_types(map, CAPABILITY.iter()))?;
    let text =
        |map, key| HashMap::get(map, key).and_then(|value: &OwnedVariant| <&str>::try_from(&**value).ok());
    let said = maps.iter().map(|map| [text(map, "access-mode"), text(map, "attachment-mode")]);
    names::capabilities(said).map(Some)
}

pub(super) fn map(options: &mut Options, key: &str) -> Result<BTreeMap<String, String>> {
    let map = options.map(key).unwrap_or_default();
    names::context(key, &map).map(|()| map)
}

pub(super) fn mount_flags(options: &mut Options) -> Result<Option<Vec<String>>> {
    let flags = options.texts("mount-flags");
    names::mount_flags(flags.as_deref().unwrap_or_default()).map(|()| flags)
}

/// What ends the claim of this call, in place of its Release. A caller may name any unit: his own claim ends the earlier.
pub(super) fn bound(options: &mut Options, permit: &Permit) -> Result<Option<Bound>> {
    let (bind, grace_usec) = (options.text("bind"), options.number("grace-usec"));
    let to = match bind.as_deref() {
        None if grace_usec.is_some() => return Err(Error::invalid("grace-usec means nothing without bind")),
        None => return Ok(None),
        Some("caller") => BoundTo::Caller(permit.caller().name.clone()),
        Some(text) => {
            let unit = text.strip_prefix("unit:");
            let unit = unit.ok_or_else(|| Error::invalid("bind is neither `caller` nor `unit:NAME`"))?;
            names::unit("bind", unit)?;
            BoundTo::Unit(unit.to_owned())
        }
    };
    Ok(Some(Bound::new(to, grace_usec.unwrap_or(0))))
}

/// A credential's name, if this caller may name it for a volume of the namespace.
pub(super) fn credential(options: &mut Options, permit: &Permit, namespace: &str) -> Result<Option<String>> {
    let credential = options.checked("credential", |_, text| names::credential(text))?;
    authorise_credential(permit, namespace, credential.as_deref()).map(|()| credential)
}

/// The same where no volume is named: then no namespace is the caller's.
pub(super) fn credential_of_none(options: &mut Options, permit: &Permit) -> Result<Option<String>> {
    let credential = options.checked("credential", |_, text| names::credential(text))?;
    roots_alone(permit, [(credential.is_some(), "a credential for what is of no namespace")])?;
    Ok(credential)
}

pub(super) fn authorise_credential(permit: &Permit, namespace: &str, credential: Option<&str>) -> Result<()> {
    let own = credential.is_none_or(|name| credential_namespace(name) == Some(namespace));
    match own || permit.caller().is_root() {
        true => Ok(()),
        false => Err(Error::new(
            Kind::NotAuthorized,
            format!(
                "a caller other than root may only name credentials csid.{namespace}.NAME, NAME without a dot"
            ),
        )),
    }
}

/// The one namespace whose credential this is: what stands between `csid.` and the last dot. Namespaces may have dots,
/// names may not, so `csid.a.b.key` is `a.b`'s and never `a`'s, and no two namespaces share a credential.
fn credential_namespace(credential: &str) -> Option<&str> {
    credential.strip_prefix("csid.")?.rsplit_once('.').map(|(namespace, _)| namespace)
}

/// The secrets of the call, read now. `credential`: what the call names instead.
pub(super) async fn secrets(options: &mut Options, credential: &Option<String>) -> Result<Option<Secrets>> {
    match options.secrets() {
        None => Ok(None),
        Some(_) if credential.is_some() => Err(Error::invalid("give secrets or credential, not both")),
        Some(fd) => fds::read_secrets(fd).await.map(Some),
    }
}

/// What gives a volume's content power over the host; who is not root may control that content.
pub(super) fn roots_alone<const N: usize>(permit: &Permit, asked: [(bool, &str); N]) -> Result<()> {
    match asked.into_iter().find(|(asked, _)| *asked) {
        Some((_, what)) if !permit.caller().is_root() => Err(Error::new(
            Kind::NotAuthorized,
            format!("{what} is root's alone: leave it out, or ask as root"),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use zbus::Variant;

    use super::*;
    use crate::bus::authorise::{Action, Authoriser};
    use crate::bus::caller::Caller;
    use crate::bus::socket::Credentials;
    use crate::store::rows::{AccessMode, AttachmentMode};

    fn options(entries: Vec<(&str, Variant<'static>)>) -> Options {
        let map = entries
            .into_iter()
            .map(|(key, value)| (key.to_owned(), OwnedVariant::try_from(value).unwrap()))
            .collect();
        Options::check(map, INLINE).unwrap()
    }

    fn capability_map(access: &str, attachment: &str) -> HashMap<String, Variant<'static>> {
        HashMap::from([
            ("access-mode".to_owned(), access.to_owned().into()),
            ("attachment-mode".to_owned(), attachment.to_owned().into()),
        ])
    }

    #[test]
    fn capabilities_are_at_least_one_and_none_twice() {
        let read = |maps: Vec<HashMap<String, Variant<'static>>>| {
            capabilities(&mut options(vec![("capabilities", maps.into())]))
        };
        assert!(capabilities(&mut options(vec![])).unwrap().is_none());
        let block = capability_map("multi-node-multi-writer", "block-device");
        let both = read(vec![block, HashMap::new()]).unwrap().unwrap();
        let (access_mode, attachment_mode) = (AccessMode::MultiNodeMultiWriter, AttachmentMode::BlockDevice);
        assert_eq!(both, [Capability { access_mode, attachment_mode }, names::capability(None, None)]);
        for (wrong, why) in [
            (vec![], "empty"),
            (vec![HashMap::new(), capability_map("single-node-writer", "file-system")], "twice"),
            (vec![capability_map("rw", "file-system")], "access-mode is none of"),
            (vec![capability_map("single-node-writer", "disk")], "attachment-mode is none of"),
            (vec![HashMap::from([("mode".to_owned(), Variant::from("x"))])], "unknown option"),
            (vec![HashMap::from([("access-mode".to_owned(), Variant::from(true))])], "of type b"),
        ] {
            let error = read(wrong).unwrap_err();
            assert_eq!(error.kind, Kind::InvalidArgument);
            assert!(error.message.contains(why), "{error}");
        }
    }

    #[test]
    fn a_volume_is_given_inline_or_registered_and_never_half() {
        let key = |name: &'static str| (name, Variant::from("x"));
        let given = inline(&mut options(vec![key("plugin"), key("external-id"), key("fs-type")]));
        let given = given.unwrap().unwrap();
        assert_eq!((given.volume.external_id.as_str(), given.spec.fs_type.as_str()), ("x", "x"));
        assert!(inline(&mut options(vec![])).unwrap().is_none());
        let context = BTreeMap::from([("k".to_owned(), "v".to_owned())]);
        for half in [
            vec![key("plugin")],
            vec![key("external-id")],
            vec![key("fs-type")],
            vec![("volume-context", context.into())],
            vec![("mount-flags", vec!["noatime".to_owned()].into())],
            vec![("capabilities", vec![capability_map("single-node-writer", "file-system")].into())],
        ] {
            let keys: Vec<&str> = half.iter().map(|(key, _)| *key).collect();
            let keys = format!("{keys:?}");
            let error = inline(&mut options(half)).err().expect(&keys);
            assert_eq!(error.kind, Kind::InvalidArgument, "{keys}");
        }
    }

    #[tokio::test]
    async fn a_credential_for_what_is_of_no_namespace_is_roots() {
        for (uid, name, may) in [
            (0, Some("csid.ns.key"), true),
            (1000, Some("csid.ns.key"), false),
            (1000, Some("key"), false),
            (1000, None, true),
        ] {
            let caller = Arc::new(Caller::on_socket(&Credentials { uid, groups: vec![990] }, Some(990)));
            let permit = Authoriser::for_socket().permit(&caller, Action::Read).await.unwrap();
            let entries = name.map(|name| ("credential", Variant::from(name)));
            let named = credential_of_none(&mut options(entries.into_iter().collect()), &permit);
            let refused = named.as_ref().err().map(|error| error.kind);
            assert_eq!(refused, (!may).then_some(Kind::NotAuthorized), "{name:?} by {uid}");
            assert!(!may || named.unwrap().as_deref() == name);
        }
    }

    #[test]
    fn a_credential_is_of_one_namespace() {
        for (credential, namespace) in [
            ("csid.a.key", Some("a")),
            ("csid.a.b.key", Some("a.b")),
            ("csid.key", None),
            ("csida.key", None),
        ] {
            assert_eq!(credential_namespace(credential), namespace, "{credential}");
        }
    }
}
