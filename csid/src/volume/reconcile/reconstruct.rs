//! Writes a new journal in place of a damaged one: everything mounted or staged below csid's directories, as rows of the
//! consumer [`UNKNOWN`].
//!
//! The kernel shows which mounts exist, and the readable old rows describe them. The hash of a volume's plugin and external id
//! names its directories, so an id is accepted only for the directory with its hash. A volume whose id could not be read keeps
//! its place without an id. The first Mount that names the volume restores the id ([`Context::identify`]). Until then csid
//! cannot ask a plugin to unpublish it. Nothing is unmounted here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::error::{Error, Kind, Result};
use crate::host::{Backing, Host, HostError, Look, boot};
use crate::plugin::validate_id;
use crate::store::event_kind::EventKind;
use crate::store::rows::{
    AccessMode, AttachmentMode, EventDetails, Leg, MountKey, MountRow, MountSpec, MountStatus, NewEvent,
    Phase, Propagation, Restore, Usage, VolumeKey, VolumeRow,
};
use crate::store::{Change, Durability, Health, Loaded};
use crate::volume::api::requests::ReconcileOptions;
use crate::volume::api::views::Report;
use crate::volume::context::Context;
use crate::volume::errors::mount::MountError;
use crate::volume::manager::Volumes;
use crate::volume::model::paths;
use crate::volume::model::volume::{UNKNOWN, Volume, title};
use crate::volume::operation::table::now_usec;
use crate::volume::probe::{entries, side_by_side};

/// A volume's directories, and their contents.
struct Found {
    plugin: String,
    root: PathBuf,
    /// Name of the volume's directories.
    name: String,
    published: Vec<Publish>,
    staging: Option<PathBuf>,
}

/// A publish, or a possible one.
struct Publish {
    /// Path where consumers find it.
    source: PathBuf,
    /// Path at which the plugin publishes it. `None`: the path is `source`, as with an older csid.
    private: Option<PathBuf>,
    look: Look,
    device: Option<u64>,
}

/// Readable part of the old rows.
struct Old<'a> {
    ids: BTreeMap<String, VolumeKey>,
    volumes: HashMap<&'a VolumeKey, &'a VolumeRow>,
    mounts: HashMap<&'a str, &'a MountRow>,
}

impl<'a> Old<'a> {
    fn of(rows: &'a Loaded) -> Self {
        let keys = rows.volumes.iter().map(|row| &row.key);
        let keys = keys.chain(rows.mounts.iter().map(|row| &row.volume)).filter(|key| !key.handle.is_lost());
        Old {
            ids: keys.map(|key| (paths::name(key), key.clone())).collect(),
            volumes: rows.volumes.iter().map(|row| (&row.key, row)).collect(),
            mounts: rows.mounts.iter().map(|row| (row.source.as_str(), row)).collect(),
        }
    }
}

impl Volumes {
    /// Performs Reconcile with `new-journal`.
    pub(in crate::volume) async fn new_journal(&self, options: ReconcileOptions) -> Result<Report> {
        let shared = &self.shared;
        if *shared.store.health().borrow() == Health::Sound {
            return Err(Error::invalid(
                "the journal is sound; new-journal is for one that is not (StateCorrupt)",
            ));
        }
        if options.remove_orphans {
            return Err(Error::invalid("remove-orphans has to wait until there is a new journal"));
        }
        if !options.dry_run && shared.operations.are_waited_for() {
            let text = "calls that began before the damage was noticed are under way";
            return Err(Error::new(Kind::Busy, text));
        }
        let old = shared.store.rows().await?;
        let volumes = shared.recorded(&old).await?;
        let mut report = Report::default();
        let mounts = volumes.iter().flat_map(|volume| &volume.mounts);
        report.adopted = mounts.clone().map(|row| format!("{}: {}", title(&row.key), row.source)).collect();
        let recorded: BTreeSet<&str> = mounts.map(|row| row.source.as_str()).collect();
        let forgotten = old.mounts.iter().filter(|row| !recorded.contains(row.source.as_str()));
        report.undone = forgotten.map(|row| format!("{}: not mounted now", title(&row.key))).collect();
        if options.dry_run {
            return Ok(report);
        }
        let boot = boot::current(&shared.directories.runtime)?;
        let mut changes = vec![Change::Boot(boot.as_str().to_owned()), Change::Event(begun(volumes.len()))];
        for volume in volumes {
            changes.push(Change::PutVolume(volume.row));
            changes.extend(volume.mounts.into_iter().map(Change::PutMount));
        }
        let kept = shared.store.replace(changes).await?;
        tracing::warn!(
            kept = %kept.display(), mounts = report.adopted.len(), "a new journal was begun; csid starts again with it"
        );
        report.kept = Some(kept);
        Ok(report)
    }

    /// Shows mounts that no readable row explains. Shows as mounted what a row calls otherwise, because the row may be older
    /// than the mount.
    pub async fn show_unexplained(&self) -> Result<()> {
        let old = self.shared.store.rows().await?;
        let mut changes = Vec::new();
        for Volume { row, mounts } in self.shared.recorded(&old).await? {
            let is_known = old.mounts.iter().any(|mount| mount.volume == row.key);
            for mut mount in mounts.into_iter().map(Arc::unwrap_or_clone) {
                let known = old.mounts.iter().find(|known| known.source == mount.source);
                // An earlier reconstruction may also have left mounts without an owner.
                if known.is_none() && old.mounts.iter().any(|known| known.key == mount.key) {
                    mount.key.tag = file_name(Path::new(&mount.source));
                }
                match known {
                    None if mount.phase != Phase::Mounted && is_known => {}
                    None => {
                        changes.push(Change::PutVolume(row.clone()));
                        changes.push(Change::PutMount(mount.into()));
                    }
                    Some(known) if mount.phase == Phase::Mounted && !known.shows() => {
                        let MountRow { phase, publish, device, .. } = mount;
                        let shown = MountRow { phase, publish, device, ..known.clone() };
                        changes.push(Change::PutMount(shown.into()));
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(self.shared.store.show(changes).await?)
    }
}

impl Context {
    async fn recorded(&self, rows: &Loaded) -> Result<Vec<Volume>> {
        let old = Old::of(rows);
        let mut volumes = Vec::new();
        let mut names = BTreeSet::new();
        for found in self.found(rows).await? {
            volumes.push(self.record(found, &old, &mut names).await);
        }
        // What else shows a volume now is not known to be a consumer's.
        let mounts = self.host.all_own_mounts().await?;
        for volume in &mut volumes {
            let mut backing = Backing::default();
            self.note_found(&mounts, &self.places_of(volume, None), &mut backing);
            volume.row.backing = backing.to_text().ok().filter(|text| !text.is_empty());
        }
        Ok(volumes)
    }

    /// Returns the directories that csid made for volumes, if something is published or staged in them.
    async fn found(&self, rows: &Loaded) -> Result<Vec<Found>> {
        // A directory left by another boot is neither staged nor published. A device node left by it is not trusted.
        let boot = boot::current(&self.directories.runtime)?;
        let left_over = rows.boot.as_deref().is_some_and(|of_rows| !boot.same(of_rows));
        let mut roots: BTreeMap<PathBuf, String> =
            self.plugins.roots().into_iter().map(|(id, root)| (root, id)).collect();
        for root in entries(&self.directories.state.join("plugins")) {
            if let Some(id) = root.file_name().and_then(|id| id.to_str()).filter(|id| validate_id(id).is_ok())
            {
                roots.entry(root.clone()).or_insert(id.to_owned());
            }
        }
        let mut lives = Vec::new();
        for row in &rows.mounts {
            let source = Path::new(&row.source);
            if let Some(root) = paths::root(source).filter(|_| paths::is_own(&row.volume, source)) {
                roots.entry(root.to_owned()).or_insert_with(|| row.volume.plugin.clone());
                lives.extend(paths::root_of_live(root).map(Path::to_path_buf));
            }
        }
        // What is mounted in a tmpfs that csid does not see would be forgotten.
        let unheld = self.host.find_lives(roots.keys().cloned().chain(lives).collect()).await;
        if let Some(live) = unheld.into_iter().next() {
            return Err(HostError::Occupied(live).into());
        }
        let lives: Vec<_> =
            roots.iter().filter_map(|(root, id)| Some((self.host.live_of(root)?, id.clone()))).collect();
        roots.extend(lives);
        let mut all = Vec::new();
        for (root, plugin) in roots {
            let points = self.host.mounts_below(&root)?;
            let device = |path: &Path| Some(points.iter().find(|point| point.path == path)?.device);
            let [published, staged, private] = [paths::PUBLISH, paths::STAGING, paths::PRIVATE].map(|kind| {
                names_in(&self.host, &root.join(kind), &root.join(kind)).collect::<BTreeSet<String>>()
            });
            let mut all_paths = Vec::new();
            for name in &published {
                let found = self.targets(&root.join(paths::PUBLISH), &root.join(paths::PUBLISH).join(name));
                let is_published = |path: &&PathBuf| {
                    path.ends_with(paths::VOLUME)
                        || (paths::is_ours(&file_name(path)) && !found.contains(&path.join(paths::VOLUME)))
                };
                all_paths.extend(found.iter().filter(is_published).cloned());
            }
            let looking = all_paths.iter().map(|path| self.host.look(&plugin, path));
            let looks = side_by_side(looking).await;
            let mut looked: BTreeMap<PathBuf, Look> = all_paths.into_iter().zip(looks).collect();
            let names: BTreeSet<&String> = published.iter().chain(&staged).chain(&private).collect();
            for name in names.into_iter().cloned() {
                let own = root.join(paths::PUBLISH).join(&name);
                let shown: Vec<_> = looked.extract_if(.., |path, _| path.starts_with(&own)).collect();
                let mut private: BTreeSet<PathBuf> =
                    names_in(&self.host, &root.join(paths::PRIVATE), &root.join(paths::PRIVATE).join(&name))
                        .map(PathBuf::from)
                        .collect();
                let of_plugin = |source: &Path, private: &mut BTreeSet<PathBuf>| {
                    let path = paths::private(source)?;
                    private.take(Path::new(path.file_name()?)).map(|_| path)
                };
                let published = shown.into_iter().filter_map(|(source, look)| {
                    let private = of_plugin(&source, &mut private);
                    let device = match look {
                        Look::Missing if private.is_none() => return None,
                        Look::Missing | Look::Plain | Look::Device { .. } if left_over => return None,
                        Look::Missing | Look::Plain => None,
                        // Only the old rows could say whether a node is left over from an earlier boot, so it is kept.
                        Look::Mounted { device, .. } | Look::Device { rdev: device } => Some(device),
                        Look::Dead(_) | Look::Hung => device(&source),
                    };
                    Some(Publish { source, private, look, device })
                });
                let mut published: Vec<_> = published.collect();
                // The plugin may have published here, but no consumer finds it: not yet, or not any more.
                published.extend(private.into_iter().filter(|_| !left_over).map(|mount| Publish {
                    source: own.join(&mount),
                    private: Some(root.join(paths::PRIVATE).join(&name).join(mount)),
                    look: Look::Plain,
                    device: None,
                }));
                // The directory exists from before the stage RPC until the unstage RPC. It is not probed, because a staging may
                // hang.
                let is_staged = staged.contains(&name) && !(left_over && published.is_empty());
                let staging = is_staged.then(|| root.join(paths::STAGING).join(&name));
                if !published.is_empty() || staging.is_some() {
                    all.push(Found { plugin: plugin.clone(), root: root.clone(), name, published, staging });
                }
            }
        }
        Ok(all)
    }

    async fn record(&self, found: Found, old: &Old<'_>, names: &mut BTreeSet<(String, String)>) -> Volume {
        let Found { plugin, root, name, published, staging } = found;
        let key = old.ids.get(&name).cloned().unwrap_or_else(|| VolumeKey::lost(&plugin, &name));
        let named = old.volumes.get(&key).map(|row| (row.namespace.clone(), row.volume.clone()));
        let named = named.or_else(|| {
            let mount = published.iter().find_map(|found| old.mounts.get(found.source.to_str()?))?;
            Some((mount.key.namespace.clone(), mount.key.volume.clone()))
        });
        let (namespace, volume) = named
            .filter(|name| names.insert(name.clone()))
            .unwrap_or_else(|| (UNKNOWN.to_owned(), name.clone()));
        let row = VolumeRow {
            key: key.clone(),
            namespace: namespace.clone(),
            volume: volume.clone(),
            staging: staging.as_ref().map(|path| path.to_string_lossy().into_owned()),
            stage: match &staging {
                None => Leg::Absent,
                Some(_) if published.iter().any(|found| found.look != Look::Plain) => Leg::Present,
                // The state is unknown, so an Unmount has the volume unstaged.
                Some(_) => Leg::Removing,
            },
            backing: None,
        };
        let mount = |tag: String| MountRow {
            key: MountKey {
                namespace: namespace.clone(),
                volume: volume.clone(),
                consumer: UNKNOWN.into(),
                tag,
            },
            volume: key.clone(),
            uid: 0,
            spec: unread(AttachmentMode::FileSystem),
            status: MountStatus::default(),
            phase: Phase::Mounted,
            kept: true,
            source: String::new(),
            published: None,
            publish: Leg::Present,
            target: Leg::Absent,
            device: None,
            error: None,
            operations: Vec::new(),
            since_usec: now_usec(),
            modify_index: 0,
        };
        let mut mounts = Vec::new();
        for Publish { source: path, private, look, device } in published {
            let own = if path.ends_with(paths::VOLUME) { path.parent().unwrap_or(&path) } else { &path };
            let tag = if mounts.is_empty() { String::new() } else { file_name(own) };
            let source = path.to_string_lossy().into_owned();
            let before = old.mounts.get(source.as_str()).filter(|row| row.volume == key);
            let published = private.map(|path| path.to_string_lossy().into_owned());
            let mut row = MountRow { source, published, device, ..mount(tag) };
            match before {
                Some(before) => {
                    row.spec = MountSpec { restore: Restore::Hold, ..before.spec.clone() };
                    let text =
                        format!("recorded when the journal was replaced; it was of {}", title(&before.key));
                    row.error = Some(text);
                }
                None => {
                    if matches!(look, Look::Device { .. }) {
                        row.spec = unread(AttachmentMode::BlockDevice);
                    }
                    let text = "recorded when the journal was replaced; its row could not be read";
                    row.error = Some(text.to_owned());
                }
            }
            if matches!(look, Look::Plain | Look::Missing) {
                // A plugin made or left the path, and nothing is mounted on it, so it is not known whether it is published.
                row.phase = Phase::Lost;
                row.publish = Leg::Removing;
            }
            if let Some(target) = row.spec.target.take() {
                // A hung or dead mount is not probed again.
                let bound = matches!(look, Look::Dead(_) | Look::Hung)
                    || self.host.is_bound(&key.plugin, &path, Path::new(&target)).await.unwrap_or(true);
                if bound {
                    row.target = Leg::Present;
                    row.spec.target = Some(target);
                }
            }
            mounts.push(Arc::new(row));
        }
        if mounts.is_empty() {
            let mut row = mount(String::new());
            row.phase = Phase::Lost;
            row.publish = Leg::Absent;
            row.source = root
                .join(paths::publish(&key, &row.key, row.spec.usage.access_mode))
                .to_string_lossy()
                .into_owned();
            let text = "recorded when the journal was replaced; only its staging was there";
            row.error = Some(text.to_owned());
            mounts.push(Arc::new(row));
        }
        Volume { row, mounts }
    }

    /// Returns an error while another path shows a mount whose row was recorded without its options. It is not known whether
    /// such a mount had a target.
    pub(in crate::volume) fn refuse_while_shown(&self, volume: &Volume, row: &MountRow) -> Result<()> {
        if row.key.consumer != UNKNOWN || row.spec.target.is_some() {
            return Ok(());
        }
        let own = |path: &PathBuf| {
            let rows = volume.mounts.iter();
            let rows = rows.flat_map(|row| {
                [Some(row.source.as_str()), Some(row.published()), row.spec.target.as_deref()]
            });
            rows.flatten().chain(volume.row.staging.as_deref()).any(|own| path == Path::new(own))
        };
        match self.host.copies(Path::new(&row.source))?.into_iter().find(|path| !own(path)) {
            None => Ok(()),
            Some(path) => Err(MountError::ShownAt { path }.into()),
        }
    }

    /// Gives a volume that was recorded without its id the id whose hash names its directories.
    pub(in crate::volume) async fn identify(&self, key: &VolumeKey) -> Result<()> {
        let nameless = VolumeKey::lost(&key.plugin, &paths::name(key));
        let Some(mut volume) = self.directory.at_rest(&nameless) else { return Ok(()) };
        volume.row.key = key.clone();
        let mut changes = vec![Change::DeleteVolume(nameless.clone()), Change::PutVolume(volume.row.clone())];
        for mount in &mut volume.mounts {
            Arc::make_mut(mount).volume = key.clone();
            changes.push(Change::PutMount(Arc::clone(mount)));
        }
        self.store.commit(changes, Durability::Disk).await?;
        self.directory.identify(&nameless, volume);
        Ok(())
    }
}

/// Returns the options of a mount of which only the mount itself is known.
fn unread(attachment_mode: AttachmentMode) -> MountSpec {
    MountSpec {
        usage: Usage {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode,
            fs_type: String::new(),
            mount_flags: Vec::new(),
            mount_group: String::new(),
            context: BTreeMap::new(),
            publish_context: BTreeMap::new(),
        },
        read_only: false,
        target: None,
        propagation: Propagation::Private,
        suid: false,
        dev: false,
        restore: Restore::Hold,
        registered: false,
        credential: None,
        secrets_given: false,
    }
}

fn begun(volumes: usize) -> NewEvent {
    let error = format!(
        "the journal was damaged; a new one was begun with {volumes} volumes that are mounted or staged"
    );
    let details = EventDetails::from([("success", Value::from(true)), ("error", Value::from(error))]);
    NewEvent { kind: EventKind::State, subject: String::new(), details }
}

/// Returns the names in a directory that have the form of csid's names.
fn names_in(host: &Host, base: &Path, directory: &Path) -> impl Iterator<Item = String> + use<> {
    let found = host.entries(base, directory).unwrap_or_default();
    found.into_iter().map(|path| file_name(&path)).filter(|name| paths::is_ours(name))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
