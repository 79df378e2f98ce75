//! Members of org.csid1.Manager about mounts.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use zbus::OwnedVariant;

use super::arguments::{self, INLINE};
use super::authorise::{Permit, PolkitAction};
use super::call::{Answer, Call, within};
use super::contract::Map;
use super::cursor;
use super::failure::Failure;
use super::options::{Keys, Options};
use super::rooms::State;
use super::rows::Rows;
use crate::error::{Error, Kind, Result};
use crate::names::{self, word};
use crate::plugin::validate_id;
use crate::store::MountFilter;
use crate::store::registry::Capability;
use crate::store::rows::{AttachmentMode, MountKey, Phase, Propagation};
use crate::volume::{
    Authority, Force, ForgetRequest, MountOptions, MountRequest, MountView, Paths, ReconcileOptions,
    Uncovered, UnmountRequest, Unmounting,
};

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
    ("wait-usec", "t"),
];

/// An option of Mount and Unmount, and not of AdoptMount.
const TARGET_FD: Keys = &[("target-fd", "h")];

const ADOPT: Keys = &[("staging-path", "s"), ("published-path", "s")];

type Identified = (String, String, String, HashMap<String, OwnedVariant>);

fn identity(namespace: String, volume: String, consumer: String, tag: Option<String>) -> Result<MountKey> {
    let namespace = names::namespace(namespace)?;
    names::name("volume", &volume)?;
    names::name("consumer", &consumer)?;
    Ok(MountKey { namespace, volume, consumer, tag: tag.unwrap_or_default() })
}

pub(super) async fn mount(call: Call) -> Answer {
    let (identity, options) = identified(&call)?;
    let options = Options::check_all(options, &[MOUNT, INLINE, TARGET_FD])?;
    mount_or_adopt(call, identity, options, None).await
}

pub(super) async fn adopt_mount(call: Call) -> Answer {
    arguments::require_root(&call.permit, [(true, "AdoptMount")])?;
    let (identity, options) = identified(&call)?;
    let mut options = Options::check_all(options, &[MOUNT, INLINE, ADOPT])?;
    let staging = options.checked("staging-path", names::path)?;
    let Some(source) = options.checked("published-path", names::path)? else {
        return Err(Error::invalid("published-path is missing").into());
    };
    mount_or_adopt(call, identity, options, Some(Paths { staging, source })).await
}

fn identified(call: &Call) -> Result<([String; 3], HashMap<String, OwnedVariant>), Failure> {
    let (namespace, volume, consumer, options): Identified = call.arguments()?;
    Ok(([namespace, volume, consumer], options))
}

/// Mounts a volume. `adopted`: the paths of a mount that another manager made, and csid takes over.
async fn mount_or_adopt(
    call: Call,
    [namespace, volume, consumer]: [String; 3],
    mut options: Options,
    adopted: Option<Paths>,
) -> Answer {
    let key = identity(namespace, volume, consumer, options.checked("tag", names::optional_name)?)?;
    let inline = arguments::volume_key(&mut options)?;
    if inline.is_some() {
        call.server.authoriser.also(&call.permit, PolkitAction::Inline).await?;
    } else {
        arguments::refuse_inline_keys(&options, &["volume-context", "publish-context", "capabilities"])?;
    }
    let wait = call.wait(&mut options)?;
    let wait_until = arguments::wait_until(&mut options, call.arrived);
    let bound = arguments::bound(&mut options, &call.permit)?;
    if inline.is_some() && bound.is_some() {
        let text = "bind requires a claim, and an inline volume has none";
        return Err(Error::new(Kind::NotSupported, text).into());
    }
    let of_mount = MountOptions { bound, ..mount_options(&mut options)? };
    let target_fd = arguments::target_fd(&mut options, &call.permit, of_mount.target.as_deref())?;
    let target_fd = target_fd.map(|fd| call.server.rooms.volumes.target_fd(fd));
    authorise_options(&call.permit, &key, &of_mount)?;
    if let Some(target) = &of_mount.target {
        call.server.rooms.volumes.authorise_target(call.permit.uid(), Path::new(target)).await?;
    }
    let secrets = arguments::secrets(&mut options, &of_mount.credential).await?;
    let uid = call.permit.uid();
    let request =
        MountRequest { key, inline, uid, options: of_mount, adopted, target_fd, wait_until, secrets, wait };
    let mounted = call.server.rooms.volumes.mount(request).await?;
    call.reply(&(mounted.source, mounted.is_device))
}

fn mount_options(options: &mut Options) -> Result<MountOptions> {
    let (access_mode, attachment_mode) = (options.word("access-mode")?, options.word("attachment-mode")?);
    if let Some(capabilities) = arguments::capabilities(options)? {
        require_capability(&capabilities, names::capability(access_mode, attachment_mode))?;
    }
    let (context, publish_context) =
        (arguments::map(options, "volume-context")?, arguments::map(options, "publish-context")?);
    let mount_flags = arguments::mount_flags(options)?;
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

/// Refuses a mount's modes that are not one of the capabilities in the call.
fn require_capability(capabilities: &[Capability], wanted: Capability) -> Result<()> {
    match capabilities.contains(&wanted) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{} {} is not one of the volume's capabilities",
            word(wanted.access_mode),
            word(wanted.attachment_mode)
        ))),
    }
}

/// Refuses options that require root. Another caller may name a credential of the mount's namespace. It must not give a volume's content
/// power over the host, because it may control that content.
fn authorise_options(permit: &Permit, key: &MountKey, options: &MountOptions) -> Result<()> {
    arguments::require_root(
        permit,
        [
            (options.suid == Some(true), "suid"),
            (options.dev == Some(true), "dev"),
            (options.propagation == Propagation::Bidirectional, "propagation bidirectional"),
        ],
    )?;
    arguments::authorise_credential(permit, &key.namespace, options.credential.as_deref())
}

pub(super) async fn unmount(call: Call) -> Answer {
    let (namespace, volume, consumer, options): Identified = call.arguments()?;
    const KEYS: Keys = &[
        ("tag", "s"),
        ("all-tags", "b"),
        ("must-exist", "b"),
        ("force", "b"),
        ("force-hung", "b"),
        ("wait", "b"),
        ("forget", "b"),
        ("target", "s"),
    ];
    let mut options = Options::check_all(options, &[KEYS, TARGET_FD])?;
    let target = options.checked("target", names::path)?;
    let target_fd = arguments::target_fd(&mut options, &call.permit, target.as_deref())?;
    let uncovered = match (target, target_fd) {
        (Some(target), Some(fd)) => Some(Uncovered { target, fd: call.server.rooms.volumes.target_fd(fd) }),
        (Some(_), None) => return Err(Error::invalid("target requires target-fd").into()),
        (None, _) => None,
    };
    let all_tags = options.flag("all-tags");
    if uncovered.is_some() && (all_tags || options.has("forget")) {
        return Err(Error::invalid("target-fd excludes all-tags and forget").into());
    }
    if all_tags && options.has("tag") {
        return Err(Error::invalid("tag and all-tags exclude each other").into());
    }
    let key = identity(namespace, volume, consumer, options.checked("tag", names::optional_name)?)?;
    let wait = call.wait(&mut options)?;
    let force_hung = options.flag("force-hung");
    let forget = options.flag("forget");
    arguments::require_root(&call.permit, [(force_hung, "force-hung"), (forget, "forget")])?;
    if forget {
        let must_exist = options.flag("must-exist");
        call.server.authoriser.also(&call.permit, PolkitAction::UnmountOthers).await?;
        let request = ForgetRequest { key, node: None, all_tags, claim: false, must_exist, wait };
        call.server.rooms.volumes.forget(request).await?;
        return call.reply(&());
    }
    let force = match options.flag("force") {
        _ if force_hung => Force::Hung,
        true => Force::Dead,
        false => Force::No,
    };
    let how = Unmounting {
        force,
        must_exist: options.flag("must-exist"),
        once: options.optional_flag("wait") == Some(false),
        by_drain: false,
    };
    let volumes = &call.server.rooms.volumes;
    let uid = call.permit.uid();
    let is_root = call.permit.caller().is_root();
    let is_forced = force != Force::No;
    let owners = if is_forced || is_root { Vec::new() } else { volumes.owners(&key, all_tags).await? };
    let owner = owners.iter().find(|owner| **owner != uid).copied();
    let more = is_forced || is_root || owner.is_some();
    let authority = match more {
        true => {
            call.server.authoriser.also_of(&call.permit, PolkitAction::UnmountOthers, owner).await?;
            Authority::Any(uid)
        }
        // The volume's actor compares again, because the mount may have another owner by then.
        false => Authority::Own(uid),
    };
    volumes.unmount(UnmountRequest { key, authority, all_tags, how, uncovered, wait }).await?;
    call.reply(&())
}

pub(super) async fn open_mount(call: Call) -> Answer {
    const KEYS: Keys = &[("tag", "s"), ("subpath", "s"), ("read-only", "b"), ("userns", "h")];
    let (namespace, volume, consumer, options): Identified = call.arguments()?;
    let mut options = Options::check(options, KEYS)?;
    let userns = options.descriptor("userns").map(|fd| call.server.rooms.volumes.keep(fd));
    arguments::require_root(&call.permit, [(userns.is_some(), "userns")])?;
    let key = identity(namespace, volume, consumer, options.checked("tag", names::optional_name)?)?;
    let wait = options.wait(call.arrived)?;
    let subpath = options.checked("subpath", names::subpath)?.map(PathBuf::from);
    let read_only = options.flag("read-only");
    let volumes = call.server.rooms.volumes.clone();
    let row = volumes.mounted(&key).await?;
    let is_root = call.permit.caller().is_root();
    if row.uid != call.permit.uid() && !is_root {
        let text = "opening another uid's mount requires root";
        return Err(Failure::Ours(Error::new(Kind::NotAuthorized, text)));
    }
    let opening = async move { volumes.open_tree(&row, subpath, read_only, userns, is_root).await };
    let tree = within(&call.slot, wait.deadline, "opening the mount", opening).await?;
    let answer = call.reply(&zbus::Fd::from(tree.as_fd()));
    call.held.keep(tree);
    answer
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
    ("target", "s"),
];

pub(super) async fn list_mounts(call: Call) -> Answer {
    let mut options = Options::check_all(call.arguments()?, &[FILTER, cursor::PAGE])?;
    let wait = options.wait(call.arrived)?;
    let after = cursor::after(&mut options)?;
    let filter = MountFilter {
        namespace: options.text("namespace").map(names::namespace).transpose()?,
        volume: options.checked("volume", names::name)?,
        consumer: options.checked("consumer", names::name)?,
        tag: options.checked("tag", names::optional_name)?,
        plugin: options.checked("plugin", |_, id| validate_id(id))?,
        phase: options.word::<Phase>("state")?,
        uid: options.uint("uid"),
        target: options.checked("target", names::path)?,
        after: after.map(|[namespace, volume, consumer, tag]| MountKey { namespace, volume, consumer, tag }),
        most: cursor::most(&mut options),
        ..MountFilter::default()
    };
    let volumes = call.server.rooms.volumes.clone();
    let rows =
        within(&call.slot, wait.deadline, "the list", async move { volumes.list(filter).await }).await?;
    call.reply(&(Rows::of(rows.into_iter().map(row)),))
}

/// Returns a row of ListMounts. It has no mount flags, contexts or secrets.
fn row(view: MountView) -> Map {
    let MountView { row, staging, healthy, error } = view;
    let usage = row.spec.usage;
    let MountKey { namespace, volume, consumer, tag } = &row.key;
    let cursor = cursor::of(&[namespace, volume, consumer, tag]);
    Map::from([
        ("cursor", cursor.into()),
        ("namespace", row.key.namespace.into()),
        ("volume", row.key.volume.into()),
        ("consumer", row.key.consumer.into()),
        ("tag", row.key.tag.into()),
        ("plugin", row.volume.plugin.into()),
        ("state", word(row.phase).into()),
        ("uid", row.uid.into()),
        ("external-id", row.volume.handle.to_string().into()),
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
        // Answer when this csid is stopping: a caller that connects afterwards reaches the csid with the new journal.
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
    fn absent_options_have_their_defaults() {
        let spec = spec(vec![]).unwrap();
        assert!(spec.usage.access_mode == AccessMode::SingleNodeWriter);
        assert!(spec.usage.attachment_mode == AttachmentMode::FileSystem);
        assert!(spec.restore == Restore::Hold && spec.propagation == Propagation::Private);
        assert!(!spec.read_only && !spec.suid && !spec.dev && spec.target.is_none());
    }

    #[test]
    fn contradicting_options_are_refused() {
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
    async fn some_options_require_root() {
        let key = identity("ns".into(), "v".into(), "c".into(), None).unwrap();
        let permit = async |uid| {
            let caller = Arc::new(Caller::on_socket(&Credentials { uid, groups: vec![990] }, Some(990)));
            Authoriser::for_socket().permit(&caller, PolkitAction::Read).await.unwrap()
        };
        for (name, text, may) in [
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
            let allowed = authorise_options(&permit(1000).await, &key, &options);
            assert_eq!(allowed.is_ok(), may, "{name} {text}");
            assert!(authorise_options(&permit(0).await, &key, &options).is_ok());
        }
        for flag in ["suid", "dev"] {
            let options = options(vec![(flag, true.into())]).unwrap();
            let refused = authorise_options(&permit(1000).await, &key, &options).unwrap_err();
            assert_eq!(refused.kind, Kind::NotAuthorized);
            assert!(refused.message.starts_with(&format!("{flag} requires root")), "{refused}");
            assert!(authorise_options(&permit(0).await, &key, &options).is_ok());
        }
    }
}
