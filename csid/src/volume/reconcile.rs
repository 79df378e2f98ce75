//! Reconcile: look at everything again, repair what rows want, and tell what no row explains below csid's directories. What
//! no row explains is removed only when asked, and only when it is empty or at a path that only csid makes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::Result;
use crate::host::Look;
use crate::store::rows::{EventDetails, MountKey, MountRow, NewEvent, Phase};
use crate::store::{Change, Durability, MountFilter};
use crate::volume::looking::{healthy, why};
use crate::volume::state::{Sight, Wanted};
use crate::volume::work::Work;
use crate::volume::{ReconcileOptions, Report, Shared, Volumes, Wait, paths};

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
                    Sight::There if healthy(row, look) => {
                        report.adopted.push(name);
                        continue;
                    }
                    Sight::Dead if self.shared.heals(row).await? => {
                        Work::Heal { key: row.key.clone(), uid: row.uid }
                    }
                    Sight::There | Sight::Dead => {
                        report.failed.push(format!("{name}: {}", why(look)));
                        continue;
                    }
                    Sight::Unbound | Sight::Gone => restore(row),
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
                    Work::Settle { key: row.key.clone() }
                }
            };
            let list =
                if matches!(work, Work::Settle { .. }) { &mut report.undone } else { &mut report.remounted };
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
                Ok(_) => list.push(name),
                Err(error) => report.failed.push(format!("{name}: {error}")),
            }
        }
        Ok(report)
    }

    /// Tell at start what no row explains.
    pub async fn report_orphans(&self) -> Result<()> {
        let found = self.unexplained().await?;
        let mut report = Report::default();
        self.orphans(found, ReconcileOptions { dry_run: true, ..ReconcileOptions::default() }, &mut report)
            .await?;
        let events = report.orphans.into_iter().map(|path| {
            tracing::warn!(path, "no row explains this; `csictl reconcile` tells more");
            let details =
                EventDetails::from([("success", Value::from(false)), ("error", Value::from(path.clone()))]);
            Change::Event(NewEvent { kind: "orphan", subject: path, details })
        });
        let events: Vec<Change> = events.collect();
        if !events.is_empty() {
            self.shared.store.commit(events, Durability::Process).await?;
        }
        Ok(())
    }

    /// Paths of csid's own making that no row explains, the deepest first. The directories are read before the rows, so that
    /// what a mount makes meanwhile is explained.
    async fn unexplained(&self) -> Result<Vec<(PathBuf, PathBuf)>> {
        let mut found = Vec::new();
        for root in self.roots().await? {
            let published = entries(&root.join(paths::PUBLISH));
            let mut targets = Vec::new();
            for directory in &published {
                targets.extend(self.shared.targets(&root, directory).await);
            }
            let staged = entries(&root.join(paths::STAGING));
            let all = targets.into_iter().chain(published).chain(staged);
            found.extend(all.map(|path| (root.clone(), path)));
        }
        let known = self.known().await?;
        found.retain(|(_, path)| !known.contains(path));
        Ok(found)
    }

    /// The paths that rows explain.
    async fn known(&self) -> Result<BTreeSet<PathBuf>> {
        let mut known = BTreeSet::new();
        for (row, staging) in self.shared.store.mounts(MountFilter::default()).await? {
            let above = Path::new(&row.source).ancestors();
            known.extend(above.take_while(|path| !path.ends_with(paths::PUBLISH)).map(Path::to_path_buf));
            known.insert(PathBuf::from(staging));
        }
        Ok(known)
    }

    /// The roots below which plugins stage and publish: those of plugins now, and of rows.
    async fn roots(&self) -> Result<BTreeSet<PathBuf>> {
        let mut roots: BTreeSet<PathBuf> =
            entries(&self.shared.directories.state.join("plugins")).into_iter().collect();
        for (row, _) in self.shared.store.mounts(MountFilter::default()).await? {
            roots.extend(paths::root(Path::new(&row.source)).map(Path::to_path_buf));
        }
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
            // A mount may have begun to use it since it was found.
            if self.known().await?.contains(&path) {
                continue;
            }
            let name = path.file_name().and_then(|name| name.to_str());
            let ours = name.is_some_and(|name| paths::is_ours(name) || name == paths::VOLUME);
            match self.shared.host.remove_orphan(&root, &path, ours).await {
                Ok(true) => report.orphans.push(text),
                Ok(false) => report.failed.push(format!("{text}: not empty, or not csid's")),
                Err(error) => report.failed.push(format!("{text}: {error}")),
            }
        }
        Ok(())
    }
}

impl Shared {
    /// What is in the directory of a volume's publishes, and what is published in the directories of mounts of their own there,
    /// the deepest first. What is mounted is not looked into.
    pub(super) async fn targets(&self, root: &Path, directory: &Path) -> Vec<PathBuf> {
        let plugin = root.file_name().unwrap_or_default().to_string_lossy();
        let mut found = Vec::new();
        for path in entries(directory) {
            if self.host.look_below(&plugin, root, &path).await == Look::Plain {
                let own = path.join(paths::VOLUME);
                let is_there = self.host.look_below(&plugin, root, &own).await != Look::Missing;
                found.extend(Some(own).filter(|_| is_there));
            }
            found.push(path);
        }
        found
    }
}

fn restore(row: &MountRow) -> Work {
    Work::Restore { wanted: Wanted::of(row) }
}

pub(super) fn title(key: &MountKey) -> String {
    match key.tag.as_str() {
        "" => format!("{}/{} {}", key.namespace, key.volume, key.consumer),
        tag => format!("{}/{} {} {tag}", key.namespace, key.volume, key.consumer),
    }
}

pub(super) fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}
