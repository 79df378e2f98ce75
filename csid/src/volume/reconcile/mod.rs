//! Reconcile: probes all mounts again, repairs what rows want, and lists leftovers below csid's directories that no row
//! explains. A leftover is removed only on request, and only if it is empty or at a path that only csid makes.

mod claim_lifetime;
mod liveness;
mod monitor;
mod reconstruct;
mod startup;

use std::collections::{BTreeSet, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::Result;
use crate::host::{Look, plain};
use crate::store::event_kind::EventKind;
use crate::store::rows::{EventDetails, MountRow, NewEvent, Phase};
use crate::store::{Change, Durability, MountFilter};
use crate::volume::api::requests::{ReconcileOptions, Wait};
use crate::volume::api::views::Report;
use crate::volume::context::Context;
use crate::volume::manager::Volumes;
use crate::volume::model::paths;
use crate::volume::model::volume::{DesiredMount, Observed, title};
use crate::volume::operation::request::{OperationRequest, OperationResponse};
use crate::volume::probe::{entries, healthy, why};

impl Volumes {
    pub async fn reconcile(&self, options: ReconcileOptions) -> Result<Report> {
        if options.new_journal {
            return self.new_journal(options).await;
        }
        if !options.dry_run {
            self.shared.store.writable()?;
        }
        let mut report = Report::default();
        let found = self.unexplained().await?;
        self.orphans(found, options, &mut report).await?;

        let rows = self.shared.store.mounts(MountFilter::default()).await?;
        let rows: Vec<MountRow> = rows.into_iter().map(|(row, _)| row).collect();
        let looks = self.shared.looks(&rows.iter().collect::<Vec<_>>()).await;
        for (row, look) in rows.iter().zip(&looks) {
            let name = title(&row.key);
            let work = match row.phase {
                Phase::Mounted => match self.shared.sight_of(row, look).await {
                    Observed::There if healthy(row, look) => {
                        report.adopted.push(name);
                        continue;
                    }
                    Observed::Dead if self.shared.heals(row).await? => {
                        OperationRequest::Heal { key: row.key.clone(), uid: row.uid }
                    }
                    Observed::There | Observed::Dead => {
                        report.failed.push(format!("{name}: {}", why(look)));
                        continue;
                    }
                    Observed::Unbound | Observed::Gone => restore(row),
                },
                Phase::Lost => {
                    report.failed.push(format!("{name}: lost; ask for it with Mount, or Unmount it"));
                    continue;
                }
                Phase::Waiting if row.lacks_secrets() => {
                    report.failed.push(format!("{name}: waits for its secrets; repeat Mount with them"));
                    continue;
                }
                Phase::Waiting => restore(row),
                Phase::Mounting | Phase::Unmounting | Phase::Uncertain => {
                    OperationRequest::Settle { key: row.key.clone() }
                }
            };
            let restores = work.is_restore();
            let list = if matches!(work, OperationRequest::Settle { .. }) {
                &mut report.undone
            } else {
                &mut report.remounted
            };
            if options.dry_run {
                list.push(name);
                continue;
            }
            let answer = self.shared.ask(&row.volume, row.uid, work, Wait::default());
            let done = match answer {
                Ok(answer) => self.shared.answered(answer).await,
                Err(error) => Err(error),
            };
            match done {
                // The row was unmounted meanwhile.
                Ok(OperationResponse::Gone) if restores => {}
                Ok(_) => list.push(name),
                Err(error) => report.failed.push(format!("{name}: {error}")),
            }
        }
        Ok(report)
    }

    /// Reports at start the paths that no row explains.
    pub async fn report_orphans(&self) -> Result<()> {
        let found = self.unexplained().await?;
        let mut report = Report::default();
        self.orphans(found, ReconcileOptions { dry_run: true, ..ReconcileOptions::default() }, &mut report)
            .await?;
        let events = report.orphans.into_iter().map(|path| {
            tracing::warn!(path, "no row explains this; `csictl reconcile` shows more");
            let details =
                EventDetails::from([("success", Value::from(false)), ("error", Value::from(path.clone()))]);
            Change::Event(NewEvent { kind: EventKind::Orphan, subject: path, details })
        });
        let events: Vec<Change> = events.collect();
        if !events.is_empty() {
            self.shared.store.commit(events, Durability::Process).await?;
        }
        Ok(())
    }

    /// Returns the paths that csid made and no row explains, the deepest first. The directories are read before the rows, so
    /// that paths of a mount made meanwhile are explained.
    async fn unexplained(&self) -> Result<Vec<(PathBuf, PathBuf)>> {
        let mut found = Vec::new();
        for root in self.roots().await? {
            let [published, private, staged] =
                [paths::PUBLISH, paths::PRIVATE, paths::STAGING].map(|kind| root.join(kind));
            let entries =
                |kind: &Path, directory: &Path| self.shared.host.entries(kind, directory).unwrap_or_default();
            let of_volumes = entries(&published, &published);
            let targets = of_volumes.iter().flat_map(|directory| self.shared.targets(&published, directory));
            let of_plugin = entries(&private, &private);
            let own = of_plugin.iter().flat_map(|directory| entries(&private, directory));
            found.extend(targets.map(|path| (published.clone(), path)));
            found.extend(own.map(|path| (private.clone(), path)));
            found.extend(of_volumes.iter().map(|path| (published.clone(), path.clone())));
            found.extend(of_plugin.iter().map(|path| (private.clone(), path.clone())));
            found.extend(entries(&staged, &staged).into_iter().map(|path| (staged.clone(), path)));
        }
        let known = self.known().await?;
        found.retain(|(_, path)| !known.contains(plain(path).as_os_str()));
        Ok(found)
    }

    /// Returns the paths that rows explain, by their bytes. Comparing paths part by part takes longer.
    async fn known(&self) -> Result<HashSet<OsString>> {
        let mut known = HashSet::new();
        let mut add = |path: &Path| {
            let path = plain(path);
            if !known.contains(path.as_os_str()) {
                known.insert(path.into_owned().into_os_string());
            }
        };
        for (row, staging) in self.shared.store.mounts(MountFilter::default()).await? {
            let is_own = |path: &&Path| !path.ends_with(paths::PUBLISH) && !path.ends_with(paths::PRIVATE);
            for path in [row.source.as_str(), row.published()] {
                Path::new(path).ancestors().take_while(is_own).for_each(&mut add);
            }
            // Another manager's staging path may lie deeper.
            let above = Path::new(&staging).ancestors();
            above.take_while(|path| !path.ends_with(paths::STAGING)).for_each(&mut add);
        }
        Ok(known)
    }

    /// Returns the roots below which plugins stage and publish: those of present plugins, and those of rows.
    async fn roots(&self) -> Result<BTreeSet<PathBuf>> {
        let mut roots: BTreeSet<PathBuf> =
            entries(&self.shared.directories.state.join("plugins")).into_iter().collect();
        for (row, _) in self.shared.store.mounts(MountFilter::default()).await? {
            let source = Path::new(&row.source);
            let root = paths::root(source).filter(|_| paths::is_own(&row.volume, source));
            roots.extend(root.map(Path::to_path_buf));
        }
        self.shared.host.find_lives(roots.clone()).await;
        let lives: Vec<PathBuf> = roots.iter().filter_map(|root| self.shared.host.live_of(root)).collect();
        roots.extend(lives);
        Ok(roots)
    }

    async fn orphans(
        &self,
        found: Vec<(PathBuf, PathBuf)>,
        options: ReconcileOptions,
        report: &mut Report,
    ) -> Result<()> {
        for (root, path) in found {
            let text = path.display().to_string();
            if options.dry_run || !options.remove_orphans {
                report.orphans.push(text);
                continue;
            }
            // A mount may have begun to use the path since it was found. Its row is there before the mount is, so what is mounted before
            // the rows are read is no row's.
            let is_mounted = self.shared.host.look_unmounted(&root, &path).is_none();
            if self.known().await?.contains(plain(&path).as_os_str()) {
                continue;
            }
            let name = path.file_name().and_then(|name| name.to_str());
            let ours = is_mounted && name.is_some_and(|name| paths::is_ours(name) || name == paths::VOLUME);
            let plugin = plugin_of(&root).to_string_lossy();
            match self.shared.host.remove_orphan(&plugin, &root, &path, ours).await {
                Ok(true) => report.orphans.push(text),
                Ok(false) => report.failed.push(format!("{text}: not empty, or not csid's")),
                Err(error) => report.failed.push(format!("{text}: {error}")),
            }
        }
        Ok(())
    }
}

impl Context {
    /// Returns the entries of a volume's directory of publishes, and the publishes in directories of one mount there, the
    /// deepest first. Directories on which something is mounted are not read.
    pub(in crate::volume) fn targets(&self, base: &Path, directory: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for path in self.host.entries(base, directory).unwrap_or_default() {
            if self.host.look_unmounted(base, &path) == Some(Look::Plain) {
                let own = path.join(paths::VOLUME);
                let is_there = self.host.look_unmounted(base, &own) != Some(Look::Missing);
                found.extend(Some(own).filter(|_| is_there));
            }
            found.push(path);
        }
        found
    }
}

/// Returns the name of the plugin's root that `kind` is below, or below whose tmpfs it is.
fn plugin_of(kind: &Path) -> &OsStr {
    let mut above = kind.iter().rev().skip(1);
    let directory = above.next().unwrap_or_default();
    if directory == paths::LIVE { above.next().unwrap_or_default() } else { directory }
}

fn restore(row: &MountRow) -> OperationRequest {
    OperationRequest::Restore { wanted: DesiredMount::of(row) }
}
