//! Arguments that several members take: a volume's name, an inline volume, capabilities and secrets. Some of them require root.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use zbus::OwnedVariant;

use super::authorise::Permit;
use super::caller::Way;
use super::fds;
use super::options::{Keys, Options, check_types};
use crate::error::{Error, Kind, Result};
use crate::names;
use crate::plugin::validate_id;
use crate::secret::Secrets;
use crate::store::registry::{Bound, BoundTo, Capability, VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;
use crate::volume::api::requests::Inline;

/// Options of an inline volume, for the members that the contract marks (inline).
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
    let namespace = names::namespace(namespace)?;
    names::name("volume", &volume)?;
    Ok(VolumeName { namespace, volume })
}

/// Returns the inline volume's plugin and external id. `None`: the call names a registered volume.
pub(super) fn volume_key(options: &mut Options) -> Result<Option<VolumeKey>> {
    let plugin = options.checked("plugin", |_, id| validate_id(id))?;
    let external_id = options.checked("external-id", names::external_id)?;
    match (plugin, external_id) {
        (Some(plugin), Some(external_id)) => Ok(Some(VolumeKey::new(plugin, external_id))),
        (None, None) => Ok(None),
        (Some(_), None) => Err(Error::invalid("plugin requires external-id")),
        (None, Some(_)) => Err(Error::invalid("external-id requires plugin")),
    }
}

/// Reads the options in [`INLINE`]. A call for a registered volume may have none of them.
pub(super) fn inline(options: &mut Options) -> Result<Option<Inline>> {
    let volume = volume_key(options)?;
    if volume.is_none() {
        refuse_inline_keys(options, &["volume-context", "capabilities", "fs-type", "mount-flags"])?;
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

/// Refuses options that describe an inline volume; those of a registered one are in its record.
pub(super) fn refuse_inline_keys(options: &Options, keys: &[&str]) -> Result<()> {
    match keys.iter().find(|key| options.has(key)) {
        None => Ok(()),
        Some(key) => Err(Error::invalid(format!(
            "{key} is for an inline volume only and requires plugin and external-id"
        ))),
    }
}

/// Reads the volume's capabilities. `None`: the call has none.
pub(super) fn capabilities(options: &mut Options) -> Result<Option<Vec<Capability>>> {
    let Some(maps) = options.maps("capabilities") else { return Ok(None) };
    maps.iter().try_for_each(|map| check_types(map, CAPABILITY.iter()))?;
    let text =
        |map, key| HashMap::get(map, key).and_then(|value: &OwnedVariant| <&str>::try_from(&**value).ok());
    let modes = maps.iter().map(|map| [text(map, "access-mode"), text(map, "attachment-mode")]);
    names::capabilities(modes).map(Some)
}

pub(super) fn map(options: &mut Options, key: &str) -> Result<BTreeMap<String, String>> {
    let map = options.map(key).unwrap_or_default();
    names::context(key, &map).map(|()| map)
}

pub(super) fn mount_flags(options: &mut Options) -> Result<Option<Vec<String>>> {
    let flags = options.texts("mount-flags");
    names::mount_flags(flags.as_deref().unwrap_or_default()).map(|()| flags)
}

/// The longest wait for a claim; a longer one could exceed the clock's range.
const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns when the caller stops waiting for conflicting claims. `None`: the call does not wait for them.
pub(super) fn wait_until(options: &mut Options, arrived: Instant) -> Option<Instant> {
    let wait = Duration::from_micros(options.number("wait-usec")?).min(LONGEST_WAIT);
    arrived.checked_add(wait)
}

/// Returns the lifetime that the claim of this call is bound to. A caller may name any unit, as that only ends the caller's own claim
/// earlier.
pub(super) fn bound(options: &mut Options, permit: &Permit) -> Result<Option<Bound>> {
    let (bind, grace_usec) = (options.text("bind"), options.number("grace-usec"));
    let to = match bind.as_deref() {
        None if grace_usec.is_some() => return Err(Error::invalid("grace-usec requires bind")),
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

/// Returns the credential's name, if this caller may use it for a volume of the namespace.
pub(super) fn credential(options: &mut Options, permit: &Permit, namespace: &str) -> Result<Option<String>> {
    let credential = options.checked("credential", |_, text| names::credential(text))?;
    authorise_credential(permit, namespace, credential.as_deref()).map(|()| credential)
}

/// Returns the credential's name for a call without a namespace, which requires root.
pub(super) fn credential_without_namespace(options: &mut Options, permit: &Permit) -> Result<Option<String>> {
    let credential = options.checked("credential", |_, text| names::credential(text))?;
    require_root(permit, [(credential.is_some(), "a credential for a call without a namespace")])?;
    Ok(credential)
}

pub(super) fn authorise_credential(permit: &Permit, namespace: &str, credential: Option<&str>) -> Result<()> {
    let own = credential.is_none_or(|name| names::credential_namespace(name) == Some(namespace));
    match own || permit.caller().is_root() {
        true => Ok(()),
        false => Err(Error::new(
            Kind::NotAuthorized,
            format!(
                "credential must be csid.{namespace}.NAME, NAME without a dot, unless the caller is root"
            ),
        )),
    }
}

/// Reads the secrets of the call. `credential`: the credential of the same call, which excludes them.
pub(super) async fn secrets(options: &mut Options, credential: &Option<String>) -> Result<Option<Secrets>> {
    match options.descriptor("secrets") {
        None => Ok(None),
        Some(_) if credential.is_some() => Err(Error::invalid("secrets and credential exclude each other")),
        Some(fd) => fds::read_secrets(fd).await.map(Some),
    }
}

/// Refuses options that give a volume's content power over the host, unless the caller is root: another caller may control that
/// content.
pub(super) fn require_root<const N: usize>(permit: &Permit, asked: [(bool, &str); N]) -> Result<()> {
    match asked.into_iter().find(|(asked, _)| *asked) {
        Some((_, what)) if !permit.caller().is_root() => {
            Err(Error::new(Kind::NotAuthorized, format!("{what} requires root")))
        }
        _ => Ok(()),
    }
}

/// Returns the descriptor of `target`, which root may pass over the private socket.
pub(super) fn target_fd(
    options: &mut Options,
    permit: &Permit,
    target: Option<&str>,
) -> Result<Option<OwnedFd>> {
    let fd = options.descriptor("target-fd");
    if fd.is_none() {
        return Ok(None);
    }
    require_root(permit, [(true, "target-fd")])?;
    if !matches!(permit.caller().way, Way::Socket) {
        return Err(Error::new(Kind::NotSupported, "target-fd requires csid's private socket"));
    }
    match target {
        Some(_) => Ok(fd),
        None => Err(Error::invalid("target-fd requires target")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use zbus::Variant;

    use super::*;
    use crate::bus::authorise::{Authoriser, PolkitAction};
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
    fn capabilities_are_one_or_more_and_distinct() {
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
    fn half_an_inline_volume_is_refused() {
        let key = |name: &'static str| (name, Variant::from("x"));
        let given = inline(&mut options(vec![key("plugin"), key("external-id"), key("fs-type")]));
        let given = given.unwrap().unwrap();
        assert_eq!((&*given.volume.handle.text(), given.spec.fs_type.as_str()), ("x", "x"));
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
    async fn credential_without_namespace_requires_root() {
        for (uid, name, may) in [
            (0, Some("csid.ns.key"), true),
            (1000, Some("csid.ns.key"), false),
            (1000, Some("key"), false),
            (1000, None, true),
        ] {
            let caller = Arc::new(Caller::on_socket(&Credentials { uid, groups: vec![990] }, Some(990)));
            let permit = Authoriser::for_socket().permit(&caller, PolkitAction::Read).await.unwrap();
            let entries = name.map(|name| ("credential", Variant::from(name)));
            let named = credential_without_namespace(&mut options(entries.into_iter().collect()), &permit);
            let refused = named.as_ref().err().map(|error| error.kind);
            assert_eq!(refused, (!may).then_some(Kind::NotAuthorized), "{name:?} by {uid}");
            assert!(!may || named.unwrap().as_deref() == name);
        }
    }

    #[tokio::test]
    async fn target_fd_requires_root_and_the_private_socket() {
        let credentials = |uid| Credentials { uid, groups: vec![990] };
        let on_bus = |uid| Caller::on_bus(&credentials(uid), Some(990), ":1.7".to_owned(), false);
        let on_socket = |uid| Caller::on_socket(&credentials(uid), Some(990));
        for (caller, target, due) in [
            (on_socket(0), Some("/srv/pg"), None),
            (on_socket(0), None, Some(Kind::InvalidArgument)),
            (on_socket(1000), Some("/srv/pg"), Some(Kind::NotAuthorized)),
            (on_bus(0), Some("/srv/pg"), Some(Kind::NotSupported)),
            (on_bus(1000), Some("/srv/pg"), Some(Kind::NotAuthorized)),
        ] {
            let permit =
                Authoriser::for_socket().permit(&Arc::new(caller), PolkitAction::Read).await.unwrap();
            let fd = Variant::Fd(zbus::Fd::from(OwnedFd::from(std::io::pipe().unwrap().0)));
            let map = HashMap::from([("target-fd".to_owned(), OwnedVariant::try_from(fd).unwrap())]);
            let mut given = Options::check(map, &[("target-fd", "h")]).unwrap();
            let taken = target_fd(&mut given, &permit, target);
            assert_eq!(taken.as_ref().err().map(|error| error.kind), due, "{target:?}");
            assert_eq!(taken.ok().flatten().is_some(), due.is_none());
            assert!(target_fd(&mut options(vec![]), &permit, None).unwrap().is_none());
        }
    }
}
