//! The room against a real gRPC server on a socket: a scripted plugin.

mod answers;
mod bad;
mod calls;
mod controller;
mod crashes;
mod fake;
mod health;
mod instances;
mod node_ids;
mod registrar;
mod registry;
mod reload;
mod stats;
mod systemd;
mod upgrade;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use super::spec::{PluginSpec, Supervision};
use super::task::Pace;
use super::{Plugins, Ready, Service};
use crate::config::Directories;
use crate::store::Store;
use crate::store::rows::PluginRow;
use crate::store::tests::opened;
use fake::Fake;

/// Everything ten to a hundred times as fast.
const PACE: Pace = Pace {
    probe: Duration::from_millis(50),
    start: Duration::from_millis(600),
    heartbeat: Duration::from_millis(200),
    patience: Duration::from_millis(500),
    restart: Duration::from_millis(50),
    longest: Duration::from_millis(400),
    last: Duration::from_millis(500),
};
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);
/// A user that is not root.
const OTHER: u32 = 65534;
const RPC: Duration = Duration::from_secs(10);

struct Host {
    directory: tempfile::TempDir,
    store: Store,
    plugins: Plugins,
}

impl Host {
    fn new() -> Self {
        Self::with(PACE, Vec::new())
    }

    fn with(pace: Pace, files: Vec<(String, PluginSpec)>) -> Self {
        Self::within(tempfile::tempdir().unwrap(), pace, files)
    }

    fn within(directory: tempfile::TempDir, pace: Pace, files: Vec<(String, PluginSpec)>) -> Self {
        let (store, rows) = open(directory.path());
        let directories = directories(directory.path());
        let plugins =
            Plugins::start_at(pace, &directories, RPC, store.clone(), files, (rows, BTreeMap::new()));
        Host { directory, store, plugins }
    }

    fn fake(&self) -> Fake {
        Fake::new(self.directory.path(), "csi")
    }

    /// An instance of the plugin `p` that serves these, and is registered and healthy.
    async fn instance(&self, name: &str, node: bool, controller: bool) -> Fake {
        let fake = Fake::new(self.directory.path(), name).serving(node, controller);
        self.started(name, fake).await
    }

    /// The same, of a controller with these capabilities.
    async fn controller_with(&self, name: &str, capabilities: &[i32]) -> Fake {
        let fake = Fake::new(self.directory.path(), name).serving(false, true);
        fake.script().controller_capabilities = capabilities.to_vec();
        self.started(name, fake).await
    }

    async fn started(&self, name: &str, mut fake: Fake) -> Fake {
        fake.script().plugin_capabilities = controller::services(&[]);
        fake.start();
        let spec = PluginSpec { instance: Some(name.into()), ..external(&fake.socket) };
        self.plugins.register("p", spec, 0).await.unwrap();
        until(|| self.is_healthy(name)).await;
        fake
    }

    fn is_healthy(&self, instance: &str) -> bool {
        let plugins = self.plugins.entries();
        let mut of = plugins.get("p").into_iter().flatten();
        of.any(|entry| entry.spec.instance() == instance && entry.state.borrow().ready.is_some())
    }

    async fn register(&self, fake: &Fake) {
        self.plugins.register("p", external(&fake.socket), 0).await.unwrap();
    }

    async fn ready(&self) -> Ready {
        self.plugins.ready("p", Service::Node, soon(LONG)).await.unwrap()
    }

    /// Wait until the plugin's state is one of these.
    async fn state(&self, states: &[&str]) {
        let reached = async {
            while !self.plugins.view("p").is_some_and(|view| states.contains(&view.state)) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        if tokio::time::timeout(LONG, reached).await.is_err() {
            panic!("never {states:?}: {:?}", self.plugins.view("p"));
        }
    }

    /// The events of one type: subject and the details that are texts.
    async fn events(&self, kind: &str) -> Vec<(String, BTreeMap<String, String>)> {
        let (events, gap) = self.store.events(0, 1000).await.unwrap();
        assert!(!gap);
        let text = |(key, value): (String, serde_json::Value)| (key, value.to_string().replace('"', ""));
        let events = events.into_iter().filter(|event| event.kind == kind);
        events.map(|e| (e.subject, e.details.into_iter().map(text).collect())).collect()
    }
}

/// Wait until it is so.
async fn until(so: impl Fn() -> bool) {
    let so = async {
        while !so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LONG, so).await.expect("it never was so");
}

fn open(directory: &Path) -> (Store, Vec<PluginRow>) {
    let (store, loaded) = opened(&directory.join("journal")).unwrap();
    (store, loaded.plugins)
}

fn directories(directory: &Path) -> Directories {
    Directories {
        state: directory.join("state"),
        runtime: directory.join("run"),
        configuration: directory.join("etc"),
    }
}

fn external(socket: &Path) -> PluginSpec {
    PluginSpec { socket: Some(socket.to_str().unwrap().into()), ..PluginSpec::new(Supervision::External) }
}

fn soon(after: Duration) -> Instant {
    Instant::now() + after
}
