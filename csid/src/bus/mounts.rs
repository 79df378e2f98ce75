//! The members of org.csid1.Manager that concern mounts.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use zbus::OwnedVariant;

use super::State;
use super::authorise::{Action, Permit};
use super::dispatch::{Answer, Call, Failure, Map};
use super::given::{self, INLINE};
use super::manager::within;
use super::options::{Keys, Options};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::names::{self, word};
use crate::plugin::validate_id;
use crate::store::MountFilter;
use crate::store::registry::Capability;
use crate::store::rows::{AttachmentMode, MountKey, Phase, Propagation};
use crate::volume::{Authority, MountOptions, MountRequest, MountView, ReconcileOptions, UnmountRequest};

const MOUNT: Keys = &[
    ("read-only", "b"),
    ("access-mode", "s"),
    ("attachment-mode", "s"),
    ("mount-group", "s"),
    ("tag", "s"),
    ("target", "s"),
    ("propagation", "s"),
    ("suid", "b"),
    ("dev", "b"),
    ("restore", "s"),
    ("bind", "s"),
    ("grace-usec", "t"),
    ("publish-context", "a{ss}"),
];

type Identified = (String, String, String, HashMap<String, OwnedVariant>);

fn identity(namespace: String, volume: String, consumer: String, tag: Option<String>) -> Result<MountKey> {
    names::name("namespace", &namespace)?;
    names::name("volume", &volume)?;
    names::name("consumer", &consumer)?;
    Ok(MountKey { namespace, volume, consumer, tag: tag.unwrap_or_default() })
}

pub(super) async fn mount(call: Call) -> Answer {
    let (namespace, volume, consumer, options): Identified = call.arguments()?;
    let mut options = Options::check_all(options, &[MOUNT, INLINE])?;
    let key = identity(namespace, volume, consumer, options.checked("tag", names::optional_name)?)?;
    let inline = given::volume_key(&mut options)?;
    if inline.is_some() {
        call.server.authoriser.also(&call.permit, Action::Inline).await?;
    } else {
        given::only_inline(&options, &["volume-context", "publish-context", "capabilities"])?;
    }
    let wait = call.wait(&mut options)?;
    let bound = given::bound(&mut options, &call.permit)?;
    if inline.is_some() && bound.is_some() {
        let text = "bind ends a claim, and a volume that is given with the call has none: register it, or unmount it \
                    when its consumer ends (ExecStopPost=csictl unmount)";
        return Err(Error::new(Kind::NotSupported, text).into());
    }
    let of_mount = MountOptions { bound, ..mount_options(&mut options)? };
    authorise_options(&call.permit, &call.server.rooms.config.borrow().clone(), &key, &of_mount)?;
    let secrets = given::secrets(&mut options, &of_mount.credential).await?;
    let request = MountRequest { key, inline, uid: call.permit.uid(), options: of_mount, secrets, wait };
    let mounted = call.server.rooms.volumes.mount(request).await?;
    call.reply(&(mounted.source, mounted.is_device))
}

fn mount_options(options: &mut Options) -> Result<MountOptions> {
    let (access_mode, attachment_mode) = (options.word("access-mode")?, options.word("attachment-mode")?);
    if let Some(capabilities) = given::capabilities(options)? {
        among(&capabilities, names::capability(access_mode, attachment_mode))?;
    }
    let (context, publish_context) =
        (given::map(options, "volume-context")?, given::map(options, "publish-context")?);
    let mount_flags = given::mount_flags(options)?;
    Ok(MountOptions {
        access_mode,
        attachment_mode,
        fs_type: options.checked("fs-type", |_, text| names::fs_type(text))?,
        mount_flags,
        mount_group: options.checked("mount-group", names::optional_name)?,
        read_only: options.flag("read-only"),
        target: options.checked("target", names::path)?,
        propagation: options.word("propagation")?.unwrap_or_default(),
        suid: options.optional_flag("suid"),
        dev: options.optional_flag("dev"),
        restore: options.word("restore")?,
        credential: options.checked("credential", |_, text| names::credential(text))?,
        context,
        publish_context,
        bound: None,
    })
}

/// The mount's modes must be one of the volume's capabilities, where the caller says what they are.
fn among(capabilities: &[Capability], wanted: Capability) -> Result<()> {
    match capabilities.contains(&wanted) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{} {} is none of the volume's capabilities",
            word(wanted.access_mode),
            word(wanted.attachment_mode)
        ))),
    }
}

/// What a caller other than root may name: a target below the configured directories, a credential of his namespace; and
/// nothing that gives what is on a volume power over the host: he may control what is on it.
fn authorise_options(permit: &Permit, config: &Config, key: &MountKey, options: &MountOptions) -> Result<()> {
    given::roots_alone(
        permit,
        [
            (options.suid == Some(true), "suid"),
            (options.dev == Some(true), "dev"),
            (options.propagation == Propagation::Bidirectional, "propagation bidirectional"),
        ],
    )?;
    if let Some(target) = &options.target
        && !permit.caller().is_root()
    {
        let target = Path::new(target);
        if !config.target_roots.iter().any(|root| target.starts_with(root) && target != root) {
            return Err(Error::new(
                Kind::NotAuthorized,
                "the target is below none of target-roots in csid.toml; elsewhere targets are root's",
            ));
        }
    }
    given::authorise_credential(permit, &key.namespace, options.credential.as_deref())
}

pub(super) async fn unmount(call: Call) -> Answer {
    let (namespace, volume, consumer, options): Identified = call.arguments()?;
    let mut options = Options::check(options, &[("tag", "s"), ("force", "b")])?;
    let key = identity(namespace, volume, consumer, options.checked("tag", names::optional_name)?)?;
    let wait = call.wait(&mut options)?;
    let force = options.flag("force");
    let volumes = &call.server.rooms.volumes;
    let uid = call.permit.uid();
    let is_root = call.permit.caller().is_root();
    let more = force || is_root || volumes.owner(&key).await?.is_some_and(|owner| owner != uid);
    let authority = match more {
        true => {
            call.server.authoriser.also(&call.permit, Action::UnmountOthers).await?;
            Authority::Any(uid)
        }
        // The row's task compares again: it may have changed hands since.
        false => Authority::Own(uid),
    };
    volumes.unmount(UnmountRequest { key, authority, force, wait }).await?;
    call.reply(&())
}

pub(super) async fn open_mount(call: Call) -> Answer {
    const KEYS: Keys = &[("tag", "s"), ("subpath", "s"), ("read-only", "b")];
    let (namespace, volume, consumer, options): Identified = call.arguments()?;
    let mut options = Options::check(options, KEYS)?;
    let key = identity(namespace, volume, consumer, options.checked("tag", names::optional_name)?)?;
    let wait = options.wait(call.arrived)?;
    let subpath = options.checked("subpath", names::subpath)?.map(PathBuf::from);
    let read_only = options.flag("read-only");
    let volumes = call.server.rooms.volumes.clone();
    let row = volumes.mounted(&key).await?;
    let is_root = call.permit.caller().is_root();
    if row.uid != call.permit.uid() && !is_root {
        let text = "another's mount is opened by root alone";
        return Err(Failure::Ours(Error::new(Kind::NotAuthorized, text)));
    }
    let opening = async move { volumes.open_tree(&row, subpath, read_only, is_root).await };
    let tree = within(&call.slot, wait.deadline, "opening the mount", opening).await?;
    call.reply(&zbus::Fd::from(tree))
}

pub(super) async fn has_mount(call: Call) -> Answer {
    let source: String = call.arguments()?;
    if source.is_empty() || source.len() > names::PATH {
        return Err(Failure::Ours(Error::invalid("source is empty or longer than 4095 bytes")));
    }
    names::plain("source", &source)?;
    let mounted = call.server.rooms.volumes.has_mount(&source).await?;
    call.reply(&mounted)
}

const FILTER: Keys = &[
    ("namespace", "s"),
    ("volume", "s"),
    ("consumer", "s"),
    ("tag", "s"),
    ("plugin", "s"),
    ("state", "s"),
    ("uid", "u"),
];

pub(super) async fn list_mounts(call: Call) -> Answer {
    let mut options = Options::check(call.arguments()?, FILTER)?;
    let wait = options.wait(call.arrived)?;
    let filter = MountFilter {
        namespace: options.checked("namespace", names::name)?,
        volume: options.checked("volume", names::name)?,
        consumer: options.checked("consumer", names::name)?,
        tag: options.checked("tag", names::optional_name)?,
        plugin: options.checked("plugin", |_, id| validate_id(id))?,
        phase: options.word::<Phase>("state")?,
        uid: options.uint("uid"),
        ..MountFilter::default()
    };
    let volumes = call.server.rooms.volumes.clone();
    let rows =
        within(&call.slot, wait.deadline, "the list", async move { volumes.list(filter).await }).await?;
    let rows: Vec<Map> = rows.into_iter().map(row).collect();
    call.reply(&(rows,))
}

/// A row of ListMounts: never mount flags, contexts or secrets.
fn row(view: MountView) -> Map {
    let MountView { row, staging, healthy, error } = view;
    let usage = row.spec.usage;
    Map::from([
        ("namespace", row.key.namespace.into()),
        ("volume", row.key.volume.into()),
        ("consumer", row.key.consumer.into()),
        ("tag", row.key.tag.into()),
        ("plugin", row.volume.plugin.into()),
        ("state", word(row.phase).into()),
        ("uid", row.uid.into()),
        ("external-id", row.volume.external_id.into()),
        ("source", row.source.into()),
        ("staging", staging.into()),
        ("target", row.spec.target.unwrap_or_default().into()),
        ("is-device", (usage.attachment_mode == AttachmentMode::BlockDevice).into()),
        ("read-only", row.spec.read_only.into()),
        ("access-mode", word(usage.access_mode).into()),
        ("attachment-mode", word(usage.attachment_mode).into()),
        ("fs-type", usage.fs_type.into()),
        ("mount-group", usage.mount_group.into()),
        ("restore", word(row.spec.restore).into()),
        ("healthy", healthy.into()),
        ("error", error.into()),
        ("operation", row.operations.into_iter().next().unwrap_or_default().into()),
        ("since", row.since_usec.into()),
        ("modify-index", row.modify_index.into()),
    ])
}

pub(super) async fn reconcile(call: Call) -> Answer {
    const KEYS: Keys = &[("dry-run", "b"), ("remove-orphans", "b"), ("new-journal", "b")];
    let mut options = Options::check(call.arguments()?, KEYS)?;
    let wait = options.wait(call.arrived)?;
    let wanted = ReconcileOptions {
        dry_run: options.flag("dry-run"),
        remove_orphans: options.flag("remove-orphans"),
        new_journal: options.flag("new-journal"),
    };
    let volumes = call.server.rooms.volumes.clone();
    let report =
        within(
            &call.slot,
            wait.deadline,
            "the reconciliation",
            async move { volumes.reconcile(wanted).await },
        )
        .await?;
    let mut map = Map::from([
        ("adopted", report.adopted.into()),
        ("remounted", report.remounted.into()),
        ("undone", report.undone.into()),
        ("orphans", report.orphans.into()),
        ("failed", report.failed.into()),
    ]);
    if let Some(kept) = report.kept {
        map.insert("kept", kept.to_string_lossy().into_owned().into());
        // Whoever connects after this answer meets the csid that has the new journal.
        let _ = call.server.rooms.state.clone().wait_for(|state| *state == State::Stopping).await;
    }
    call.reply(&(map,))
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
    use crate::store::rows::{AccessMode, MountSpec, Restore};

    fn spec(entries: Vec<(&str, Variant<'static>)>) -> Result<MountSpec> {
        options(entries)?.spec(None)
    }

    fn options(entries: Vec<(&str, Variant<'static>)>) -> Result<MountOptions> {
        let map = entries
            .into_iter()
            .map(|(key, value)| (key.to_owned(), OwnedVariant::try_from(value).unwrap()))
            .collect();
        mount_options(&mut Options::check_all(map, &[MOUNT, INLINE])?)
    }

    fn capability(access: &str) -> Variant<'static> {
        Variant::from(vec![HashMap::from([("access-mode".to_owned(), Variant::from(access.to_owned()))])])
    }

    #[test]
    fn the_defaults() {
        let spec = spec(vec![]).unwrap();
        assert!(spec.usage.access_mode == AccessMode::SingleNodeWriter);
        assert!(spec.usage.attachment_mode == AttachmentMode::FileSystem);
        assert!(spec.restore == Restore::Hold && spec.propagation == Propagation::Private);
        assert!(!spec.read_only && !spec.suid && !spec.dev && spec.target.is_none());
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let block = || ("attachment-mode", Variant::from("block-device"));
        for (entries, kind) in [
            (vec![block(), ("fs-type", "ext4".into())], Kind::InvalidArgument),
            (vec![block(), ("mount-flags", vec!["noatime".to_owned()].into())], Kind::InvalidArgument),
            (vec![block(), ("mount-group", "1".into())], Kind::InvalidArgument),
            (
                vec![("propagation", "bidirectional".into()), ("read-only", true.into())],
                Kind::InvalidArgument,
            ),
            (vec![("capabilities", capability("multi-node-multi-writer"))], Kind::InvalidArgument),
            (vec![("capabilities", capability("nonsense"))], Kind::InvalidArgument),
            (vec![("access-mode", "rw".into())], Kind::InvalidArgument),
            (vec![("restore", "never".into())], Kind::InvalidArgument),
            (vec![("target", "/a/../b".into())], Kind::InvalidArgument),
            (vec![("fs-type", "../ext4".into())], Kind::InvalidArgument),
            (vec![("mount-flags", vec!["a\nb".to_owned()].into())], Kind::InvalidArgument),
            (
                vec![("volume-context", BTreeMap::from([("k".to_owned(), "v".repeat(4096))]).into())],
                Kind::InvalidArgument,
            ),
            (vec![("credential", "../etc".into())], Kind::InvalidArgument),
        ] {
            let keys: Vec<&str> = entries.iter().map(|(key, _)| *key).collect();
            assert_eq!(
                spec(keys.iter().copied().zip(entries.iter().map(|(_, v)| v.try_clone().unwrap())).collect())
                    .err()
                    .map(|error| error.kind),
                Some(kind),
                "{keys:?}"
            );
        }
        assert!(spec(vec![block(), ("capabilities", capability("single-node-writer"))]).is_err());
        assert!(spec(vec![("capabilities", capability("single-node-writer"))]).is_ok());
    }

    #[tokio::test]
    async fn what_others_than_root_may_not_name() {
        let config = Config { target_roots: vec!["/srv/jobs".into()], ..Config::default() };
        let key = identity("ns".into(), "v".into(), "c".into(), None).unwrap();
        let permit = async |uid| {
            let caller = Arc::new(Caller::on_socket(&Credentials { uid, groups: vec![990] }, Some(990)));
            Authoriser::for_socket().permit(&caller, Action::Read).await.unwrap()
        };
        for (name, text, may) in [
            ("target", "/srv/jobs/a", true),
            ("target", "/srv/jobs", false),
            ("target", "/srv/jobsish/a", false),
            ("target", "/etc/a", false),
            ("credential", "csid.ns.disk", true),
            ("credential", "csid.nsx.disk", false),
            ("credential", "csid.other.disk", false),
            ("credential", "csid.ns.other.disk", false),
            ("credential", "csid.ns", false),
            ("credential", "disk", false),
            ("propagation", "host-to-task", true),
            ("propagation", "bidirectional", false),
        ] {
            let options = options(vec![(name, text.to_owned().into())]).unwrap();
            let allowed = authorise_options(&permit(1000).await, &config, &key, &options);
            assert_eq!(allowed.is_ok(), may, "{name} {text}");
            assert!(authorise_options(&permit(0).await, &config, &key, &options).is_ok());
        }
        for flag in ["suid", "dev"] {
            let options = options(vec![(flag, true.into())]).unwrap();
            let refused = authorise_options(&permit(1000).await, &config, &key, &options).unwrap_err();
            assert_eq!(refused.kind, Kind::NotAuthorized);
            assert!(refused.message.starts_with(&format!("{flag} is root's")), "{refused}");
            assert!(authorise_options(&permit(0).await, &config, &key, &options).is_ok());
        }
    }
}
