//! The configuration that csid reads at its start and at a reload: csid.toml, plugins.d, volumes.d.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use serde_json::Value;
use tokio::sync::{Mutex, watch};

use crate::config::{Config, Directories};
use crate::daemon::notify::notify;
use crate::error::{Error, Kind, with_causes};
use crate::plugin::{PluginSpec, Plugins, files, moved_under};
use crate::store::event_kind::EventKind;
use crate::store::rows::{EventDetails, MountRow, NewEvent};
use crate::store::{Change, Durability, Store};
use crate::volume;
use crate::volume::Volumes;
use crate::volume::api::requests::Declared;
use crate::volume::model::paths;

pub(super) type Configuration = (Config, Vec<(String, PluginSpec)>, Vec<Declared>);

pub(super) fn read_configuration(directories: &Directories) -> anyhow::Result<Configuration> {
    let config = load_config(directories)?;
    let plugins = files::load(&directories.configuration.join("plugins.d"))?;
    let volumes = volume::volumes_d::load(&directories.configuration.join("volumes.d"))?;
    Ok((config, plugins, volumes))
}

pub(super) fn load_config(directories: &Directories) -> anyhow::Result<Config> {
    Ok(Config::load(&directories.configuration.join("csid.toml"))?)
}

/// How much longer systemd waits after each notification.
const EXTENDED: Duration = Duration::from_secs(60);
/// The most notifications: 30 minutes.
const EXTENSIONS: u32 = 120;

/// Returns the error of a reload that failed for these plugins (`ID: why`) alone.
fn unchanged(failed: &[String]) -> crate::Result<()> {
    let Some((id, _)) = failed.first().and_then(|first| first.split_once(": ")) else { return Ok(()) };
    let text = format!(
        "the configuration was taken, but for what it changes of these plugins, which go on as before: {}",
        failed.join("; ")
    );
    Err(Error::new(Kind::PluginUnavailable, text).with(|details| details.plugin = Some(id.to_owned())))
}

/// Keeps the directories of the plugins whose mounts are all below another root than their `files` name, as a reload does. Returns
/// the error that a reload returns. The mounts of one plugin have one root, unless an older csid took such a file.
pub(super) fn keep_roots(
    files: &mut [(String, PluginSpec)],
    mounts: &[MountRow],
    directories: &Directories,
) -> crate::Result<()> {
    let mut kept = Vec::new();
    for (id, spec) in files {
        let own = mounts.iter().filter(|row| row.volume.plugin == *id);
        let own = own.filter(|row| paths::is_own(&row.volume, Path::new(&row.source)));
        let mut roots = own.filter_map(|row| Some((row, paths::root(Path::new(&row.source))?)));
        let default = directories.plugin(id);
        let new = spec.plugin_root.as_ref().map_or(&*default, Path::new);
        let Some((row, root)) = roots.next() else { continue };
        // As a rule the first row fits. The directories of most are in the tmpfs below the root.
        let is_new = |root: &Path| root == new || root == new.join(paths::LIVE);
        if is_new(root) || roots.any(|(_, root)| is_new(root)) {
            continue;
        }
        let root = paths::root_of_live(root).filter(|_| root != default).unwrap_or(root);
        let why = format!("{id}: {}", moved_under("plugin-root", root, &row.key));
        tracing::error!(plugin = %id, "plugin {why}");
        kept.push(why);
        spec.plugin_root = (root != default).then(|| root.to_string_lossy().into_owned());
    }
    unchanged(&kept)
}

/// The rooms, and what a reload changes.
#[derive(Clone)]
pub(super) struct Handles {
    pub(super) directories: Directories,
    pub(super) config: watch::Sender<Arc<Config>>,
    pub(super) store: Store,
    pub(super) plugins: Plugins,
    pub(super) volumes: Volumes,
    /// Lock of a reload. An upgrade of a plugin takes time, and the files that were read last have to apply.
    pub(super) reloading: Arc<Mutex<()>>,
}

impl Handles {
    /// Extends systemd's timeout while a reload is under way: one that upgrades a plugin may take longer than a start.
    /// The extension also covers the watchdog, so the journal has to answer first.
    pub(super) async fn patiently<T>(&self, reload: impl Future<Output = T>) -> T {
        let extending = async {
            let mut due = tokio::time::interval(EXTENDED / 4);
            for _ in 0..EXTENSIONS {
                due.tick().await;
                if self.store.ping().await.is_ok() {
                    notify(&[NotifyState::ExtendTimeoutUsec(EXTENDED.as_micros() as u32)]);
                }
            }
            std::future::pending().await
        };
        tokio::select! {
            biased;
            reloaded = reload => reloaded,
            never = extending => never,
        }
    }

    /// Reads the configuration again. Nothing changes unless all files are valid.
    pub(super) async fn reload(&self) -> crate::Result<()> {
        let _reloading = self.reloading.lock().await;
        let now = NotifyState::monotonic_usec_now().into_iter();
        notify(&std::iter::once(NotifyState::Reloading).chain(now).collect::<Vec<_>>());
        let result = async {
            let (config, plugins, declared) = read_configuration(&self.directories)
                .map_err(|error| Error::invalid(with_causes(error.as_ref())))?;
            self.volumes.check_declared(&declared).await?;
            let in_use = self.volumes.plugins_in_use().await?;
            let applying = self.plugins.apply_files(plugins, in_use).await?;
            let volumes = self.volumes.declare(declared, true).await?;
            self.plugins.set_rpc_deadline(config.deadlines.rpc);
            self.config.send_replace(Arc::new(config));
            self.volumes.resolve_target_roots();
            let plugins = applying.ended().await;
            tracing::info!(?plugins, ?volumes, "the configuration was read again");
            unchanged(&plugins.failed)
        }
        .await;
        notify(&[NotifyState::Ready]);
        self.tell_reload(result.as_ref().err()).await;
        result
    }

    /// Declares the volumes of volumes.d at csid's start. A file with an error affects its own volume alone, and then no volume is removed.
    pub(super) async fn declare(&self) {
        let files = volume::volumes_d::load_each(&self.directories.configuration.join("volumes.d"));
        let (mut declared, mut all) = (Vec::new(), true);
        for file in files.unwrap_or_else(|error| vec![Err(error)]) {
            match file {
                Ok(file) => declared.push(file),
                Err(error) => {
                    tracing::error!(%error, "this volume is left out; mend its file, then `csictl reload`");
                    let wrong = Error::invalid(error.to_string());
                    self.tell_reload(Some(&wrong)).await;
                    all = false;
                }
            }
        }
        match self.volumes.declare(declared, all).await {
            Ok(applied) => tracing::info!(?applied, "the volumes of volumes.d were read"),
            Err(error) => tracing::error!(%error, "the volumes of volumes.d could not be taken"),
        }
    }

    pub(super) async fn tell_reload(&self, error: Option<&Error>) {
        let mut details = EventDetails::from([("success", Value::from(error.is_none()))]);
        details.extend(error.map(|error| ("error", Value::from(error.to_string()))));
        let event = Change::Event(NewEvent { kind: EventKind::Reload, subject: String::new(), details });
        if self.store.writable().is_ok()
            && let Err(error) = self.store.commit(vec![event], Durability::Process).await
        {
            tracing::warn!(%error, kind = EventKind::Reload.name(), "an event could not be written");
        }
    }
}
