//! Decides which targets a caller may use: those below target-roots, apart from csid's own directories. The helper resolves
//! each root separately, so a root that hangs delays only the mounts below it.

use std::path::{Path, PathBuf};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::Value;

use crate::error::{Error, Kind, Result, shown};
use crate::host::HostError;
use crate::store::event_kind::EventKind;
use crate::store::rows::MountSpec;
use crate::store::rows::{EventDetails, NewEvent};
use crate::store::{Change, Durability};
use crate::volume::context::Context;
use crate::volume::manager::Volumes;

impl Volumes {
    /// Drops the resolved target-roots and resolves each again, in the background. Called at csid's start, and once a new
    /// configuration holds.
    pub fn resolve_target_roots(&self) {
        let mut known = self.shared.roots.known();
        known.resolved.clear();
        known.reads += 1;
        drop(known);
        let shared = self.shared.clone();
        tokio::spawn(async move {
            let roots = shared.config.borrow().target_roots.clone();
            let mut resolving: FuturesUnordered<_> =
                roots.iter().map(|root| shared.resolve_root(root)).collect();
            while resolving.next().await.is_some() {}
        });
    }

    /// Refuses a target that is not below one of target-roots. Root may use any target. The error of `Hung` means that a root
    /// did not answer, so it is not known whether the target is below it.
    pub async fn authorise_target(&self, uid: u32, target: &Path) -> Result<()> {
        self.shared.root_of(uid, target).await.map(drop)
    }
}

impl Context {
    /// Refuses a target over, below or above csid's own directories. Such a target would hide the published volumes or the
    /// journal.
    pub(in crate::volume) fn refuse_own_target(&self, target: &Path) -> Result<()> {
        let own = [&self.directories.state, &self.directories.runtime];
        match own.into_iter().find(|own| target.starts_with(own) || own.starts_with(target)) {
            Some(own) => {
                let text = format!("target {} is over or below csid's own {}", shown(target), own.display());
                Err(Error::invalid(text))
            }
            None => Ok(()),
        }
    }

    /// Refuses a target that the caller may not cover, before anything is staged for it. The bind checks that again.
    pub(in crate::volume) async fn refuse_others_target(
        &self,
        plugin: &str,
        target: &Path,
        uid: u32,
        spec: &MountSpec,
    ) -> Result<()> {
        let root = self.target_root(uid, spec).await?;
        Ok(self.host.check_target(plugin, &root, target, uid).await?)
    }

    /// Returns the directory that a mount's target has to be below.
    pub(in crate::volume) async fn target_root(&self, uid: u32, spec: &MountSpec) -> Result<PathBuf> {
        match &spec.target {
            Some(target) => self.root_of(uid, Path::new(target)).await,
            None => Ok(PathBuf::from("/")),
        }
    }

    /// Returns the resolved directory of target-roots that `target` is below; `/` for root.
    pub(in crate::volume) async fn root_of(&self, uid: u32, target: &Path) -> Result<PathBuf> {
        if uid == 0 {
            return Ok(PathBuf::from("/"));
        }
        let is_below = |root: &PathBuf| target != root && target.starts_with(root);
        let roots = self.config.borrow().target_roots.clone();
        let (mut found, mut unknown) = (None, Vec::new());
        {
            let known = self.roots.known();
            for root in &roots {
                match known.resolved.get(root) {
                    Some(resolved) if is_below(resolved) => found = found.or(Some(resolved.clone())),
                    Some(_) => {}
                    None => unknown.push(root),
                }
            }
        }
        if let Some(root) = found {
            return Ok(root);
        }
        let mut failed: Option<Error> = None;
        let resolving = unknown.into_iter().map(async |root| (root, self.resolve_root(root).await));
        let mut resolving: FuturesUnordered<_> = resolving.collect();
        while let Some((root, resolved)) = resolving.next().await {
            match resolved {
                Ok(resolved) if is_below(&resolved) => return Ok(resolved),
                Ok(_) => {}
                // By its name the target may be below this root. It may also be below a root of any name that does not answer.
                Err(error) if is_below(root) => failed = Some(error.into()),
                Err(error @ (HostError::Hung(_) | HostError::Helper { .. })) => {
                    failed = failed.or(Some(error.into()));
                }
                Err(_) => {}
            }
        }
        Err(failed.unwrap_or_else(|| {
            let text = "the target is below none of target-roots in csid.toml; elsewhere targets are root's";
            Error::new(Kind::NotAuthorized, text)
        }))
    }

    async fn resolve_root(&self, root: &Path) -> Result<PathBuf, HostError> {
        let reads = self.roots.known().reads;
        let resolved = self.host.resolve(root).await;
        let is_news = {
            let mut known = self.roots.known();
            match &resolved {
                _ if known.reads != reads => false,
                Ok(name) => {
                    known.resolved.insert(root.to_owned(), name.clone());
                    known.failed.remove(root)
                }
                Err(_) => known.failed.insert(root.to_owned()),
            }
        };
        if is_news {
            self.tell_of_root(root, resolved.as_ref().err()).await;
        }
        resolved
    }

    async fn tell_of_root(&self, root: &Path, error: Option<&HostError>) {
        let mut details = EventDetails::from([("success", Value::from(error.is_none()))]);
        match error {
            None => tracing::info!(root = %root.display(), "a target root is there again"),
            Some(error) => {
                tracing::warn!(root = %root.display(), %error, "a target root cannot be used");
                details.insert("error", Value::from(error.to_string()));
            }
        }
        let event =
            NewEvent { kind: EventKind::TargetRoot, subject: root.to_string_lossy().into_owned(), details };
        if self.store.writable().is_ok()
            && let Err(error) = self.store.commit(vec![Change::Event(event)], Durability::Process).await
        {
            tracing::warn!(%error, "an event could not be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::{Config, Directories};
    use crate::host::{Host, resolve};
    use crate::plugin::Plugins;
    use crate::store::Store;

    #[tokio::test]
    async fn targets_of_members_are_below_a_root() {
        let directory = tempfile::tempdir().unwrap();
        let place = resolve(directory.path()).unwrap();
        std::fs::create_dir(place.join("real")).unwrap();
        std::os::unix::fs::symlink(place.join("real"), place.join("link")).unwrap();
        let roots = ["link", "missing"].map(|name| place.join(name)).to_vec();
        let config = Config { target_roots: roots, ..Config::default() };
        let (_config, config) = tokio::sync::watch::channel(Arc::new(config));
        let [state, runtime, configuration] = ["state", "run", "etc"].map(|name| place.join(name));
        let directories = Directories { state, runtime, configuration };
        let (store, loaded) = Store::open(&place.join("journal"), &place, None).unwrap();
        let rpc = config.borrow().deadlines.rpc;
        let plugins = Plugins::start(
            &directories,
            rpc,
            store.clone(),
            Vec::new(),
            loaded.plugins,
            loaded.node_ids,
            Default::default(),
        );
        let volumes = Volumes::new(
            store.clone(),
            Arc::new(store),
            plugins,
            Host::of_threads(),
            config,
            directories,
            None,
        );
        for (target, kind) in [
            (place.join("real/a"), None),
            (place.join("real"), Some(Kind::NotAuthorized)),
            (place.join("realish/a"), Some(Kind::NotAuthorized)),
            (place.join("link/a"), Some(Kind::NotAuthorized)),
            ("/etc/a".into(), Some(Kind::NotAuthorized)),
            (place.join("missing/a"), Some(Kind::InvalidArgument)),
        ] {
            let refused = volumes.authorise_target(1000, &target).await.err().map(|error| error.kind);
            assert_eq!(refused, kind, "{}", target.display());
            assert!(volumes.authorise_target(0, &target).await.is_ok());
        }
        std::fs::create_dir(place.join("missing")).unwrap();
        assert!(volumes.authorise_target(1000, &place.join("missing/a")).await.is_ok(), "asked again");
    }
}
