//! A host: a world with csid, its plugins and clients, and what the faults order. The first host runs the controller of the plugin that attaches, and
//! has no clients.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use csi_witness::Mark;
use csid_tests::ask::healthy;
use csid_tests::backend::Backend;
use csid_tests::clock::Clock;
use csid_tests::fault::Fault;
use csid_tests::script::Half;
use csid_tests::world::{World, eventually};
use rustix::mount::mount_bind;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;

use crate::HOSTS;
use crate::load::{ATTACHING, Shared, VOLUMES, client};
use crate::samples::mount_namespace;
use crate::site::Node;

/// The clients of each host but the first.
pub const CLIENTS: u32 = 3;
/// The host that runs the controller.
pub const CONTROLLER: &str = "c1";

pub struct Host {
    pub name: String,
    pub node: Node,
    pub orders: UnboundedSender<(Order, oneshot::Sender<()>)>,
    pub thread: std::thread::JoinHandle<()>,
}

/// What the hosts have in common.
#[derive(Clone)]
pub struct Places {
    /// What the plugin that attaches has.
    pub storage: PathBuf,
    /// A directory for each host, with the logs of its witnesses.
    pub logs: PathBuf,
}

/// What a fault does to csid.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// csid is killed, and started again.
    Kill,
    /// csid ends at one of the edges that it passes next, and is started again. The number says at which.
    KillAtEdge(u64),
    /// csid's helper is killed, and started again.
    KillHelper,
    /// A plugin is killed, and started again after a time.
    KillPlugin(&'static str, Duration),
    /// csid is stopped for a time.
    Stop(Duration),
    /// csid's clock is so many seconds ahead for a time.
    MoveClock(i64, Duration),
}

/// Runs a host until no orders come any more. Then its clients let all volumes go, and nothing is left.
pub async fn host(
    w: &mut World,
    name: &str,
    link: &Path,
    places: &Places,
    shared: Arc<Shared>,
    mut orders: UnboundedReceiver<(Order, oneshot::Sender<()>)>,
) {
    shared.namespaces.lock().expect("the hosts").insert(mount_namespace(), name.to_owned());
    let fault = Fault::of(w);
    let clock = Clock::new(&w.path("clock"));
    for (key, value) in clock.environment() {
        w.environment.insert(key.to_owned(), value.display().to_string());
    }
    let logs = places.logs.join(name);
    std::fs::create_dir(&logs).expect("a directory");
    w.logs = Some(logs.clone());
    let is_controller = name == CONTROLLER;
    let (mut plugins, mut keys) = (vec![ATTACHING], String::new());
    if is_controller {
        keys = format!("controllers = [{ATTACHING:?}]\n");
    } else {
        w.add_plugin_and("p", &[], "").await;
        plugins.push("p");
    }
    attach(w, name, is_controller, &places.storage).await;
    w.configure(&format!("node = {name:?}\n[cluster]\nname = \"prod\"\nlink = {link:?}\n{keys}"));
    let own = w.start().await;
    for plugin in &plugins {
        healthy(&own, plugin).await;
    }
    joined(w).await;
    let clients: Vec<_> = (0..if is_controller { 0 } else { CLIENTS })
        .map(|n| tokio::spawn(client(Arc::clone(&shared), name.to_owned(), n, w.socket())))
        .collect();
    shared.hosts.fetch_add(1, Ordering::SeqCst);
    while let Some((order, done)) = orders.recv().await {
        match order {
            Order::Kill => {
                w.kill();
                assert!(w.launch(&[]).await, "csid does not start");
            }
            Order::KillAtEdge(number) => {
                fault.arm(&format!("any:{number}"));
                eventually("csid ends at an edge", async || w.dead()).await;
                println!("           {name}: csid was killed at {}", fault.disarm());
                assert!(w.launch(&[]).await, "csid does not start");
            }
            Order::KillHelper => w.replace_helper(),
            Order::KillPlugin(plugin, time) => {
                w.plugin(plugin).kill();
                tokio::time::sleep(time).await;
                w.plugin(plugin).start().await;
            }
            Order::MoveClock(seconds, time) => {
                clock.move_by(seconds);
                eventually("csid reads its moved clock", async || clock.is_read_at(seconds)).await;
                tokio::time::sleep(time).await;
                clock.move_by(0);
            }
            Order::Stop(time) => {
                let csid = Pid::from_raw(w.csid_pid().cast_signed()).expect("a pid");
                crate::stopped(|signal: Signal| kill_process(csid, signal).expect("csid runs"), time).await;
            }
        }
        let _ = done.send(());
    }
    for client in clients {
        client.await.expect("a client lets its volume go");
    }
    if shared.is_broken.load(Ordering::SeqCst) {
        return;
    }
    joined(w).await;
    let own = w.client().await;
    w.nothing_left(&own).await;
    // csid ends with this host, and would owe the servers the rest for ever.
    eventually("csid owes the servers nothing", async || {
        own.cluster().await.is_ok_and(|cluster| cluster.owed == 0)
    })
    .await;
    for plugin in plugins {
        csi_witness::mark(&log(&logs, plugin), Mark::Rest).expect("the witness' log");
    }
}

/// Returns the log of a plugin's witness, by the directory of its host's logs.
pub fn log(logs: &Path, plugin: &str) -> PathBuf {
    logs.join(format!("{plugin}.jsonl"))
}

/// Starts the host's part of the plugin that attaches. All hosts have its storage in common, but for the data. Each host has a file system of its own
/// for that, as machines do. csid unmounts nothing that it sees in use in another mount namespace.
async fn attach(w: &mut World, name: &str, is_controller: bool, storage: &Path) {
    let data = w.path("data");
    std::fs::create_dir(&data).expect("a directory");
    mount_bind(&data, Backend::new(storage).data_directory()).expect("the data of this host");
    let plugin = w.add_plugin_and(ATTACHING, &[], "").await;
    plugin.set(|script| {
        script.control(&["PUBLISH_UNPUBLISH_VOLUME"]);
        script.node_id = node_id(name);
        script.others = (1..=HOSTS[1]).map(|n| node_id(&format!("n{n}"))).collect();
        if !is_controller {
            script.serves = vec![Half::Node];
            // The servers count the volumes of a host for that, and refuse none.
            script.max_volumes = VOLUMES.iter().filter(|volume| volume.attaches()).count() as i64;
        }
    });
    plugin.kill();
    plugin.shares(storage.to_owned());
    plugin.start().await;
}

/// Returns the name that the plugin has for a host.
pub fn node_id(host: &str) -> String {
    format!("node {host}")
}

async fn joined(w: &World) {
    eventually("csid has joined", async || w.status().contains("cluster prod: joined at")).await;
}
