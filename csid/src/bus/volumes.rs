//! Members of org.csid1.Manager about registered volumes and the controller's calls for them.

use std::collections::HashMap;

use zbus::OwnedVariant;

use super::arguments::{self, INLINE};
use super::authorise::{Permit, PolkitAction};
use super::call::{Answer, Call, within};
use super::contract::Map;
use super::cursor;
use super::inventory;
use super::options::{Keys, Options};
use super::rows::Rows;
use super::volume_rows::{listed, row};
use crate::error::{Error, Result};
use crate::names::{self, Word};
use crate::plugin::validate_id;
use crate::store::registry::{Capability, Origin, RecordFilter, VolumeName, VolumeSpec};
use crate::store::rows::{AccessMode, AttachmentMode};
use crate::volume::api::requests::{CreateRequest, Inline, Part, RegisterRequest, VolumeRequest};
use crate::volume::refuse_nonsense;

const SPEC: Keys = &[
    ("plugin", "s"),
    ("name", "s"),
    ("capabilities", "aa{sv}"),
    ("fs-type", "s"),
    ("mount-flags", "as"),
    ("mount-group", "s"),
    ("parameters", "a{ss}"),
    ("topologies", "aa{ss}"),
    ("heal", "s"),
    ("suid", "b"),
    ("dev", "b"),
];
/// Options of RegisterVolume. CreateVolume gets both from the plugin's answer.
const REGISTER: Keys = &[("external-id", "s"), ("context", "a{ss}")];
const CREATE: Keys =
    &[("capacity-min", "t"), ("capacity-max", "t"), ("clone", "s"), ("snapshot", "s"), ("register", "b")];
const MODES: Keys = &[("access-mode", "s"), ("attachment-mode", "s")];

impl Word for Part {
    const WORDS: &'static [(&'static str, Self)] =
        &[("all", Part::All), ("controller", Part::Controller), ("node", Part::Node)];
}

type Named = (String, String, HashMap<String, OwnedVariant>);

/// Reads the spec of RegisterVolume and CreateVolume, except `plugin` and the secrets.
fn spec(permit: &Permit, namespace: &str, options: &mut Options) -> Result<VolumeSpec> {
    let spec =
        VolumeSpec { credential: arguments::credential(options, permit, namespace)?, ..read(options)? };
    arguments::require_root(permit, [(spec.suid, "suid"), (spec.dev, "dev")])?;
    Ok(spec)
}

fn read(options: &mut Options) -> Result<VolumeSpec> {
    let topologies = options.text_maps("topologies").unwrap_or_default();
    names::topologies(&topologies)?;
    let capabilities = arguments::capabilities(options)?;
    let spec = VolumeSpec {
        name: options.checked("name", names::name)?.unwrap_or_default(),
        capabilities: capabilities.ok_or_else(|| missing("capabilities"))?,
        fs_type: options.checked("fs-type", |_, text| names::fs_type(text))?.unwrap_or_default(),
        mount_flags: arguments::mount_flags(options)?.unwrap_or_default(),
        mount_group: options.checked("mount-group", names::optional_name)?.unwrap_or_default(),
        context: arguments::map(options, "context")?,
        parameters: arguments::map(options, "parameters")?,
        topologies,
        credential: None,
        heal: options.word("heal")?.unwrap_or_default(),
        suid: options.flag("suid"),
        dev: options.flag("dev"),
        snapshot: options.checked("snapshot", names::external_id)?.unwrap_or_default(),
        clone: options.checked("clone", names::name)?.unwrap_or_default(),
    };
    refuse_nonsense(&spec).map(|()| spec)
}

fn missing(key: &str) -> Error {
    Error::invalid(format!("{key} is missing"))
}

/// Checks a range of bytes. 0: no limit. CSI's numbers are signed (CSI rule 14).
fn capacity(least: (&str, u64), most: (&str, u64)) -> Result<()> {
    for (key, bytes) in [least, most] {
        if i64::try_from(bytes).is_err() {
            return Err(Error::invalid(format!("{key} exceeds CSI's limit (2^63-1 bytes)")));
        }
    }
    match most.1 > 0 && most.1 < least.1 {
        true => Err(Error::invalid(format!("{} is less than {}", most.0, least.0))),
        false => Ok(()),
    }
}

pub(super) async fn register_volume(call: Call) -> Answer {
    let (namespace, id, map): Named = call.arguments()?;
    let name = arguments::volume_name(namespace, id)?;
    let mut options = Options::check_all(map, &[SPEC, REGISTER])?;
    let volume = arguments::volume_key(&mut options)?.ok_or_else(|| missing("plugin"))?;
    let wait = call.wait(&mut options)?;
    let spec = spec(&call.permit, &name.namespace, &mut options)?;
    let secrets = arguments::secrets(&mut options, &spec.credential).await?;
    let request =
        RegisterRequest { name, volume, spec, uid: call.permit.uid(), origin: Origin::Bus, secrets, wait };
    let view = call.server.rooms.volumes.register_volume(request).await?;
    call.reply(&(row(view),))
}

pub(super) async fn create_volume(call: Call) -> Answer {
    let (namespace, id, map): Named = call.arguments()?;
    let name = arguments::volume_name(namespace, id)?;
    let mut options = Options::check_all(map, &[SPEC, CREATE])?;
    let plugin = options.checked("plugin", |_, id| validate_id(id))?.ok_or_else(|| missing("plugin"))?;
    let wait = call.wait(&mut options)?;
    let spec = spec(&call.permit, &name.namespace, &mut options)?;
    let capacity_min = options.number("capacity-min").unwrap_or(0);
    let capacity_max = options.number("capacity-max").unwrap_or(0);
    capacity(("capacity-min", capacity_min), ("capacity-max", capacity_max))?;
    let register = options.optional_flag("register").unwrap_or(true);
    let secrets = arguments::secrets(&mut options, &spec.credential).await?;
    let uid = call.permit.uid();
    let request =
        CreateRequest { name, plugin, spec, capacity_min, capacity_max, register, uid, secrets, wait };
    let view = call.server.rooms.volumes.create_volume(request).await?;
    call.reply(&(row(view),))
}

pub(super) async fn list_volumes(call: Call) -> Answer {
    const FILTER: Keys =
        &[("namespace", "s"), ("plugin", "s"), ("node", "s"), ("prefix", "s"), ("declared", "b")];
    let mut options = Options::check_all(call.arguments()?, &[FILTER, cursor::PAGE])?;
    let wait = options.wait(call.arrived)?;
    let namespace = options.text("namespace").map(names::namespace).transpose()?;
    let of_one = namespace.is_some();
    let after = match &namespace {
        // A name alone, because all rows are of one namespace.
        Some(namespace) => options
            .checked("after", names::optional_name)?
            .map(|volume| VolumeName { namespace: namespace.clone(), volume }),
        None => cursor::after(&mut options)?.map(|[namespace, volume]| VolumeName { namespace, volume }),
    };
    let filter = RecordFilter {
        namespace,
        plugin: options.checked("plugin", |_, id| validate_id(id))?,
        node: options.checked("node", names::name)?,
        prefix: options.checked("prefix", names::optional_name)?,
        after,
        most: cursor::most(&mut options),
        ..RecordFilter::default()
    };
    let volumes = call.server.rooms.volumes.clone();
    let declared = options.flag("declared");
    let found = async move {
        match declared {
            true => volumes.volumes_and_declared(filter).await,
            false => volumes.volumes(filter).await,
        }
    };
    let views = within(&call.slot, wait.deadline, "the list", found).await?;
    call.reply(&(Rows::of(views.into_iter().map(|view| listed(view, of_one))),))
}

pub(super) async fn get_volume(call: Call) -> Answer {
    let (namespace, volume): (String, String) = call.arguments()?;
    let name = arguments::volume_name(namespace, volume)?;
    let view = call.server.rooms.volumes.volume(name).await?;
    call.reply(&(row(view),))
}

pub(super) async fn validate_volume(call: Call) -> Answer {
    let (namespace, volume, map): Named = call.arguments()?;
    let mut options = Options::check_all(map, &[MODES, INLINE])?;
    let (access, attachment) = (options.word("access-mode")?, options.word("attachment-mode")?);
    let one = (access.is_some() || attachment.is_some()).then(|| names::capability(access, attachment));
    // For a registered volume these are the capabilities to validate, not those of the volume.
    let listed = if options.has("plugin") { None } else { arguments::capabilities(&mut options)? };
    if one.is_some() && listed.is_some() {
        return Err(Error::invalid("capabilities and a mode exclude each other").into());
    }
    let asked: Vec<Capability> = one.into_iter().chain(listed.into_iter().flatten()).collect();
    let request = request(&call, namespace, volume, &mut options).await?;
    let nothing = |inline: &Inline| inline.spec.capabilities.is_empty() && asked.is_empty();
    if request.inline.as_ref().is_some_and(nothing) {
        return Err(missing("capabilities, or access-mode and attachment-mode,").into());
    }
    let (confirmed, message) = call.server.rooms.volumes.validate_volume(request, asked).await?;
    call.reply(&(confirmed, message))
}

pub(super) async fn deregister_volume(call: Call) -> Answer {
    let (namespace, volume, map): Named = call.arguments()?;
    let mut options = Options::check(map, &[("force", "b"), ("forget", "b")])?;
    let (force, forget) = (options.flag("force"), options.flag("forget"));
    arguments::require_root(&call.permit, [(forget, "forget")])?;
    let request = request(&call, namespace, volume, &mut options).await?;
    if force {
        call.server.authoriser.also(&call.permit, PolkitAction::UnmountOthers).await?;
    }
    call.server.rooms.volumes.deregister_volume(request, force, forget).await?;
    call.reply(&())
}

pub(super) async fn delete_volume(call: Call) -> Answer {
    let (namespace, volume, map): Named = call.arguments()?;
    let mut options = Options::check(map, INLINE)?;
    let request = request(&call, namespace, volume, &mut options).await?;
    call.server.rooms.volumes.delete_volume(request).await?;
    call.reply(&())
}

pub(super) async fn expand_volume(call: Call) -> Answer {
    let (namespace, volume, required, limit, map): (String, String, u64, u64, HashMap<_, _>) =
        call.arguments()?;
    let mut options = Options::check_all(map, &[&[("part", "s")], INLINE])?;
    capacity(("required_bytes", required), ("limit_bytes", limit))?;
    let part = options.word("part")?.unwrap_or(Part::All);
    let request = request(&call, namespace, volume, &mut options).await?;
    let (capacity, node_has_to) =
        call.server.rooms.volumes.expand_volume(request, required, limit, part).await?;
    call.reply(&(capacity.unwrap_or(0), node_has_to))
}

pub(super) async fn create_snapshot(call: Call) -> Answer {
    let (namespace, volume, name, map): (String, String, String, HashMap<_, _>) = call.arguments()?;
    names::name("the snapshot's name", &name)?;
    let mut options = Options::check_all(map, &[&[("parameters", "a{ss}"), ("wait", "b")], INLINE])?;
    let parameters = arguments::map(&mut options, "parameters")?;
    let wait = options.optional_flag("wait").unwrap_or(true);
    let request = request(&call, namespace, volume, &mut options).await?;
    let snapshot = call.server.rooms.volumes.create_snapshot(request, name, parameters, wait).await?;
    call.reply(&(inventory::row(snapshot),))
}

pub(super) async fn get_volume_stats(call: Call) -> Answer {
    let (namespace, volume, map): Named = call.arguments()?;
    let mut options = Options::check(map, &[])?;
    let request = request(&call, namespace, volume, &mut options).await?;
    let stats = call.server.rooms.volumes.volume_stats(request).await?;
    let usage: Vec<_> =
        stats.usage.into_iter().map(|of| (of.unit, of.available, of.total, of.used)).collect();
    // A plugin without volume conditions reports nothing abnormal.
    let (abnormal, message) = stats.abnormal.unwrap_or_default();
    call.reply(&(usage, abnormal, message))
}

pub(super) async fn attach_volume(call: Call) -> Answer {
    let (namespace, volume, node_id, map): (String, String, String, HashMap<_, _>) = call.arguments()?;
    names::node_id(&node_id)?;
    let mut options = Options::check_all(map, &[&[("read-only", "b")], MODES, INLINE])?;
    let read_only = options.flag("read-only");
    let (access, attachment) = (options.word("access-mode")?, options.word("attachment-mode")?);
    let mut request = request(&call, namespace, volume, &mut options).await?;
    if let Some(inline) = &mut request.inline {
        default_capability(inline, access, attachment);
    }
    let volumes = &call.server.rooms.volumes;
    let publish_context = volumes.attach_volume(request, node_id, read_only, access, attachment).await?;
    call.reply(&(publish_context,))
}

/// Gives an inline volume without capabilities the one that the call uses.
fn default_capability(inline: &mut Inline, access: Option<AccessMode>, attachment: Option<AttachmentMode>) {
    if (access.is_some() || attachment.is_some()) && inline.spec.capabilities.is_empty() {
        inline.spec.capabilities.push(names::capability(access, attachment));
    }
}

pub(super) async fn detach_volume(call: Call) -> Answer {
    let (namespace, volume, node_id, map): (String, String, String, HashMap<_, _>) = call.arguments()?;
    names::node_id(&node_id)?;
    let mut options = Options::check_all(map, &[&[("forget", "b")], INLINE])?;
    let forget = options.flag("forget");
    arguments::require_root(&call.permit, [(forget, "forget")])?;
    let request = request(&call, namespace, volume, &mut options).await?;
    if forget && request.inline.is_some() {
        return Err(Error::invalid("forget excludes plugin and the other inline options").into());
    }
    call.server.rooms.volumes.detach_volume(request, node_id, forget).await?;
    call.reply(&())
}

pub(super) async fn explain(call: Call) -> Answer {
    let (namespace, volume, map): Named = call.arguments()?;
    let name = arguments::volume_name(namespace, volume)?;
    let mut options = Options::check(map, &[])?;
    let wait = options.wait(call.arrived)?;
    let volumes = call.server.rooms.volumes.clone();
    let found =
        within(&call.slot, wait.deadline, "the explanation", async move { volumes.explain(name).await })
            .await?;
    let report = Map::from([
        ("waiting-for", found.waiting_for.into()),
        ("holders", found.holders.into()),
        ("last-error", found.last_error.into()),
        ("next-try", found.next_try_usec.into()),
        ("steps", found.steps.into()),
        ("timings", found.timings.into()),
    ]);
    call.reply(&(report,))
}

/// Reads the arguments that all calls about one volume have. An inline volume needs its action too.
async fn request(
    call: &Call,
    namespace: String,
    volume: String,
    options: &mut Options,
) -> Result<VolumeRequest> {
    let name = arguments::volume_name(namespace, volume)?;
    let inline = arguments::inline(options)?;
    if inline.is_some() {
        call.server.authoriser.also(&call.permit, PolkitAction::Inline).await?;
    }
    let wait = call.wait(options)?;
    let credential = arguments::credential(options, &call.permit, &name.namespace)?;
    let secrets = arguments::secrets(options, &credential).await?;
    Ok(VolumeRequest { name, inline, uid: call.permit.uid(), secrets, credential, wait })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use zbus::Variant;

    use super::*;
    use crate::bus::authorise::Authoriser;
    use crate::bus::caller::Caller;
    use crate::bus::socket::Credentials;
    use crate::error::Kind;
    use crate::names::word;

    type Entries = Vec<(&'static str, Variant<'static>)>;

    fn options(entries: Entries, keys: &[Keys]) -> Result<Options> {
        let map = entries
            .into_iter()
            .map(|(key, value)| (key.to_owned(), OwnedVariant::try_from(value).unwrap()))
            .collect();
        Options::check_all(map, keys)
    }

    fn capabilities(attachments: &[&str]) -> (&'static str, Variant<'static>) {
        let map =
            |of: &&str| HashMap::from([("attachment-mode".to_owned(), Variant::from((*of).to_owned()))]);
        ("capabilities", attachments.iter().map(map).collect::<Vec<_>>().into())
    }

    fn of(key: &str, value: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(key.to_owned(), value.to_owned())])
    }

    #[test]
    fn every_key_of_a_spec_is_read() {
        let entries = vec![
            capabilities(&["file-system", "block-device"]),
            ("name", "disk".into()),
            ("fs-type", "xfs".into()),
            ("mount-flags", vec!["noatime".to_owned()].into()),
            ("mount-group", "users".into()),
            ("context", of("pool", "ssd").into()),
            ("parameters", of("tier", "1").into()),
            ("topologies", vec![of("zone", "a")].into()),
            ("heal", "remount".into()),
            ("suid", true.into()),
        ];
        let spec = read(&mut options(entries, &[SPEC, REGISTER]).unwrap()).unwrap();
        let texts = [&spec.name, &spec.fs_type, &spec.mount_group, &spec.mount_flags[0]];
        assert_eq!(texts, ["disk", "xfs", "users", "noatime"]);
        assert_eq!((&spec.context, &spec.parameters), (&of("pool", "ssd"), &of("tier", "1")));
        assert_eq!((spec.topologies, spec.capabilities.len()), (vec![of("zone", "a")], 2));
        assert!(word(spec.heal) == "remount" && spec.suid && !spec.dev);
    }

    #[test]
    fn contradicting_spec_is_refused() {
        let fs = || capabilities(&["file-system"]);
        for (keys, entries, why) in [
            (REGISTER, vec![], "capabilities is missing"),
            (REGISTER, vec![capabilities(&[])], "capabilities is empty"),
            (REGISTER, vec![capabilities(&["block-device"]), ("fs-type", "xfs".into())], "fs-type means"),
            (
                REGISTER,
                vec![capabilities(&["block-device"]), ("mount-group", "g".into())],
                "mount-group means",
            ),
            (
                REGISTER,
                vec![fs(), ("topologies", vec![BTreeMap::<String, String>::new()].into())],
                "topologies",
            ),
            (REGISTER, vec![fs(), ("parameters", of("k", &"v".repeat(5000)).into())], "parameters is larger"),
            (REGISTER, vec![fs(), ("heal", "never".into())], "heal is none of report, remount"),
            (REGISTER, vec![fs(), ("name", "".into())], "name is empty"),
            (REGISTER, vec![fs(), ("capacity-min", 1u64.into())], "unknown option"),
            (CREATE, vec![fs(), ("external-id", "x".into())], "unknown option"),
            (CREATE, vec![fs(), ("clone", "a".into()), ("snapshot", "b".into())], "snapshot and clone"),
        ] {
            let error = options(entries, &[SPEC, keys]).and_then(|mut options| read(&mut options)).err();
            let error = error.expect(why);
            assert_eq!(error.kind, Kind::InvalidArgument);
            assert!(error.message.contains(why), "{error}");
        }
    }

    #[test]
    fn capacities_are_a_range_of_signed_numbers() {
        let most = i64::MAX as u64;
        for (least, limit, good) in [
            (0, 0, true),
            (5, 0, true),
            (0, 5, true),
            (5, 5, true),
            (6, 5, false),
            (most, most, true),
            (most + 1, 0, false),
            (0, most + 1, false),
        ] {
            assert_eq!(capacity(("min", least), ("max", limit)).is_ok(), good, "{least} {limit}");
        }
    }

    #[tokio::test]
    async fn some_keys_of_a_spec_require_root() {
        for (entry, uid, may) in [
            (("suid", Variant::from(true)), 1000, false),
            (("dev", true.into()), 1000, false),
            (("suid", false.into()), 1000, true),
            (("credential", "csid.ns.disk".into()), 1000, true),
            (("credential", "csid.other.disk".into()), 1000, false),
            (("credential", "disk".into()), 1000, false),
            (("credential", "disk".into()), 0, true),
            (("suid", true.into()), 0, true),
        ] {
            let caller = Arc::new(Caller::on_socket(&Credentials { uid, groups: vec![990] }, Some(990)));
            let permit = Authoriser::for_socket().permit(&caller, PolkitAction::Read).await.unwrap();
            let what = format!("{} by {uid}", entry.0);
            let mut options = options(vec![capabilities(&["file-system"]), entry], &[SPEC]).unwrap();
            let read = spec(&permit, "ns", &mut options);
            assert_eq!(read.err().map(|error| error.kind), (!may).then_some(Kind::NotAuthorized), "{what}");
        }
    }
}
