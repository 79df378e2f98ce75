//! What csid reads at its start and at a reload: csid.toml, plugins.d, volumes.d.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use serde_json::Value;
use tokio::sync::{Mutex, watch};

use super::notify;
use crate::config::{Config, Directories};
use crate::error::Error;
use crate::host;
use crate::plugin::{PluginSpec, Plugins, files};
use crate::store::rows::{EventDetails, NewEvent};
use crate::store::{Change, Durability, Store};
use crate::volume::files::Declared;
use crate::volume::{self, Volumes};

pub(super) type Configuration = (Config, Vec<(String, PluginSpec)>, Vec<Declared>);

pub(super) fn read_configuration(directories: &Directories) -> anyhow::Result<Configuration> {
    let config = load_config(directories)?;
    let plugins = files::load(&directories.configuration.join("plugins.d"))?;
    let volumes = volume::files::load(&directories.configuration.join("volumes.d"))?;
    Ok((config, plugins, volumes))
}

pub(super) fn load_config(directories: &Directories) -> anyhow::Result<Config> {
    let mut config = Config::load(&directories.configuration.join("csid.toml"))?;
    // By the names they have without symbolic links, as everything below them is reached without any.
    for root in &mut config.target_roots {
        match host::resolve(root) {
            Ok(resolved) => *root = resolved,
            Err(error) => tracing::warn!(root = %root.display(), %error, "a target root that is not there"),
        }
    }
    Ok(config)
}

/// So long does systemd wait at least, from each time on that it is told.
const EXTENDED: Duration = Duration::from_secs(60);
/// It is told so often at most: 30 minutes.
const EXTENSIONS: u32 = 120;

/// The rooms, and what a reload changes.
#[derive(Clone)]
pub(super) struct Handles {
    pub(super) directories: Directories,
    pub(super) config: watch::Sender<Arc<Config>>,
    pub(super) store: Store,
    pub(super) plugins: Plugins,
    pub(super) volumes: Volumes,
    /// One reload at a time: a plugin that is upgraded takes its time, and the last file that was read is to hold.
    pub(super) reloading: Arc<Mutex<()>>,
}

impl Handles {
    /// systemd gives a reload as long as a start, and one that upgrades a plugin may take longer: it is told as long as that goes on.
    /// It is the watchdog's time, too, that is extended, so the journal has to answer.
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

    /// Nothing is changed unless everything is right.
    pub(super) async fn reload(&self) -> crate::Result<()> {
        let _reloading = self.reloading.lock().await;
        let now = NotifyState::monotonic_usec_now().into_iter();
        notify(&std::iter::once(NotifyState::Reloading).chain(now).collect::<Vec<_>>());
        let result = async {
            let (config, plugins, declared) = read_configuration(&self.directories)
                .map_err(|error| Error::invalid(format!("{error:#}")))?;
            self.volumes.check_declared(&declared).await?;
            let in_use = self.volumes.plugins_in_use().await?;
            let applying = self.plugins.apply_files(plugins, in_use).await?;
            let volumes = self.volumes.declare(declared, true).await?;
            self.plugins.set_rpc_deadline(config.deadlines.rpc);
            self.config.send_replace(Arc::new(config));
            let plugins = applying.ended().await;
            tracing::info!(?plugins, ?volumes, "the configuration was read again");
            Ok(())
        }
        .await;
        notify(&[NotifyState::Ready]);
        self.tell_event("reload", String::new(), result.as_ref().err()).await;
        result
    }

    /// At csid's start: one wrong file keeps no other file's volume away, and no volume is forgotten that may be its.
    pub(super) async fn declare(&self) {
        let files = volume::files::load_each(&self.directories.configuration.join("volumes.d"));
        let (mut declared, mut all) = (Vec::new(), true);
        for file in files.unwrap_or_else(|error| vec![Err(error)]) {
            match file {
                Ok(file) => declared.push(file),
                Err(error) => {
                    tracing::error!(%error, "this volume is left out; mend its file, then `csictl reload`");
                    let wrong = Error::invalid(error.to_string());
                    self.tell_event("reload", String::new(), Some(&wrong)).await;
                    all = false;
                }
            }
        }
        match self.volumes.declare(declared, all).await {
            Ok(applied) => tracing::info!(?applied, "the volumes of volumes.d were read"),
            Err(error) => tracing::error!(%error, "the volumes of volumes.d could not be taken"),
        }
    }

    async fn tell_event(&self, kind: &'static str, subject: String, error: Option<&Error>) {
        let mut details = EventDetails::from([("success", Value::from(error.is_none()))]);
        details.extend(error.map(|error| ("error", Value::from(error.to_string()))));
        let event = Change::Event(NewEvent { kind, subject, details });
        if self.store.writable().is_ok()
            && let Err(error) = self.store.commit(vec![event], Durability::Process).await
        {
            tracing::warn!(%error, kind, "an event could not be written");
        }
    }
}
