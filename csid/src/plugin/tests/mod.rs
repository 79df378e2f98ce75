//! The room against a real gRPC server on a socket: a scripted plugin.

mod answers;
mod calls;
mod controller;
mod fake;
mod health;
mod registry;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use super::spec::{Log, PluginSpec, Supervision};
use super::task::Pace;
use super::{Plugins, Ready, Service};
use crate::config::Directories;
use crate::store::Store;
use crate::store::rows::PluginRow;
use fake::Fake;

/// Everything ten to a hundred times as fast.
const PACE: Pace = Pace {
    probe: Duration::from_millis(50),
    start: Duration::from_millis(600),
    heartbeat: Duration::from_millis(200),
    patience: Duration::from_millis(500),
    restart: Duration::from_millis(50),
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
        let directory = tempfile::tempdir().unwrap();
        let (store, rows) = open(directory.path());
        let directories = directories(directory.path());
        let plugins = Plugins::start_at(pace, &directories, RPC, store.clone(), files, rows);
        Host { directory, store, plugins }
    }

    fn fake(&self) -> Fake {
        Fake::new(self.directory.path())
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

fn open(directory: &Path) -> (Store, Vec<PluginRow>) {
    let (store, loaded) = Store::open(&directory.join("journal"), directory, None).unwrap();
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
    PluginSpec {
        supervision: Supervision::External,
        argv: Vec::new(),
        environment: BTreeMap::new(),
        credentials: Vec::new(),
        socket: Some(socket.to_str().unwrap().into()),
        instance: None,
        plugin_root: None,
        plugin_view: None,
        log: Log::Journal,
        rpc_deadline: None,
    }
}

fn soon(after: Duration) -> Instant {
    Instant::now() + after
}
