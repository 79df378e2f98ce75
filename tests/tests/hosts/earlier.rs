//! Servers, links and csid of an earlier release with those of this one, while the servers are upgraded one after the other. `tests/soak-cluster`
//! builds the earlier release (`tests/earlier`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use csi_proto::cluster::v1::change_ask::What;
use csi_witness::Mark;
use csi_witness::report::Report;
use csid_client::Kind;
use csid_tests::ask::*;
use csid_tests::backend::{Backend, Volume as Stored};
use csid_tests::etcd::Cluster as Etcd;
use csid_tests::world::{World, child, eventually, left_out, refusal, world_within};
use rustix::mount::mount_bind;
use rustix::process::Signal;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::site::{Programs, Site, addresses, operator, register};
use crate::*;

/// The directory of the earlier release's programs. The test is left out without it.
const EARLIER: &str = "CSID_EARLIER";
/// How long the test may take.
const LIMIT: Duration = Duration::from_secs(1200);
/// A plugin that attaches nothing, and one whose controller runs on all hosts.
const PLUGINS: [&str; 2] = ["p", "attaching"];

const GRANTS: &str = r#"
[[grant]]
who = "node/n*"
namespaces = ["*"]
may = ["join", "mount", "controller:attaching"]

[[grant]]
who = "operator/all"
namespaces = ["*"]
may = ["read", "register", "release-others", "cluster"]
"#;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Release {
    Earlier,
    This,
}

/// The hosts, with the releases of csid and of csid-link.
const HOSTS: [(&str, Release, Release); 4] = [
    ("n1", Release::This, Release::This),
    ("n2", Release::Earlier, Release::Earlier),
    ("n3", Release::This, Release::Earlier),
    ("n4", Release::Earlier, Release::This),
];

/// What a host does with a volume.
#[derive(Clone, Debug)]
enum Order {
    /// It claims and releases the volume.
    Claim(String),
    Mount(String),
    Unmount(String),
    /// The volume has another holder.
    IsRefused(String, String),
    /// The volume is mounted, and the plugin was called for that once.
    HasKept(String),
    /// csid and its helper end, and this release's start.
    Upgrade,
}

struct Host {
    name: &'static str,
    link: Node,
    orders: UnboundedSender<(Order, oneshot::Sender<()>)>,
    thread: std::thread::JoinHandle<()>,
}

impl Host {
    async fn does(&self, order: Order) {
        println!("{}: {order:?}", self.name);
        let (done, ended) = oneshot::channel();
        self.orders.send((order, done)).expect("the host runs");
        ended.await.expect("the host goes on");
    }
}

/// Returns the earlier release's program.
fn of_earlier(directory: &Path, program: &str) -> PathBuf {
    let path = directory.join(program);
    assert!(path.exists(), "{} was not built", path.display());
    path
}

/// Runs a host until no orders come any more.
async fn host(
    w: &mut World,
    name: &str,
    link: &Path,
    places: [PathBuf; 2],
    mut orders: UnboundedReceiver<(Order, oneshot::Sender<()>)>,
) {
    let [storage, logs] = places;
    w.logs = Some(logs.clone());
    let [plain, attaching] = PLUGINS;
    w.add_plugin_and(plain, &[], "").await;
    let data = w.path("data");
    std::fs::create_dir(&data).expect("a directory");
    mount_bind(&data, Backend::new(&storage).data_directory()).expect("the data of this host");
    let plugin = w.add_plugin_and(attaching, &[], "").await;
    plugin.set(|script| {
        script.control(&["PUBLISH_UNPUBLISH_VOLUME"]);
        script.node_id = format!("node {name}");
        script.others = HOSTS.map(|(other, ..)| format!("node {other}")).to_vec();
    });
    plugin.kill();
    plugin.shares(storage);
    plugin.start().await;
    w.configure(&format!("{}controllers = [{attaching:?}]\n", of_node(name, link)));
    let mut client = w.start().await;
    for plugin in PLUGINS {
        healthy(&client, plugin).await;
    }
    joined(w).await;
    while let Some((order, done)) = orders.recv().await {
        match order {
            Order::Claim(volume) => {
                claim(&client, &volume, "web").await.expect("a claim");
                release(&client, &volume, "web").await.expect("a release");
            }
            Order::Mount(volume) => {
                let mounted = mount_registered(&client, &volume, "web").await.expect("a mount");
                assert!(Path::new(&mounted.source).exists(), "{mounted:?}");
            }
            Order::Unmount(volume) => unmount(&client, &volume, "web").await.expect("an unmount"),
            Order::IsRefused(volume, holder) => {
                let (kind, error) = refusal(mount_registered(&client, &volume, "web").await);
                assert_eq!((kind, &error.details.holders), (Kind::ClaimConflict, &vec![holder]), "{error:?}");
            }
            Order::HasKept(volume) => {
                eventually("the mount is there", async || state(&client, &volume, "web").await == "mounted")
                    .await;
                let plugin = PLUGINS.into_iter().find(|plugin| volume.starts_with(plugin)).expect("a plugin");
                let calls = w.plugin(plugin).volume_calls();
                let is_call =
                    |rpc: &str, id: &str| rpc == "NodePublishVolume" && id == format!("ext-{volume}");
                let calls = calls.iter().filter(|made| is_call(&made.call.rpc, &made.call.volume));
                assert_eq!(calls.count(), 1, "{volume} was mounted again");
            }
            Order::Upgrade => {
                w.stop().await;
                w.csid_program = None;
                // csid and its helper are of one release: the packages end both.
                w.replace_helper();
                client = w.start().await;
                for plugin in PLUGINS {
                    healthy(&client, plugin).await;
                }
                joined(w).await;
            }
        }
        let _ = done.send(());
    }
    w.nothing_left(&client).await;
    for plugin in PLUGINS {
        csi_witness::mark(&logs.join(format!("{plugin}.jsonl")), Mark::Rest).expect("the witness' log");
    }
}

/// A cluster whose servers and hosts are of two releases.
struct Mixed {
    site: Site,
    hosts: Vec<Host>,
    earlier: Programs,
}

impl Mixed {
    /// Starts the hosts. Each of them mounts a volume of each plugin, and keeps it.
    async fn start_hosts(&mut self, w: &World, earlier: &Path, storage: &Path) {
        let this = Programs::default();
        for (name, csid, link) in HOSTS {
            let logs = w.path(&format!("logs-{name}"));
            std::fs::create_dir(&logs).expect("a directory");
            self.site.programs.link =
                if link == Release::This { this.link.clone() } else { self.earlier.link.clone() };
            let link = self.site.node(name);
            let (orders, taken) = unbounded_channel();
            let (run, places) = (link.run().to_owned(), [storage.to_owned(), logs]);
            let program = (csid == Release::Earlier).then(|| of_earlier(earlier, "csid"));
            let runs = move || {
                world_within(LIMIT, async move |w| {
                    w.csid_program = program;
                    Box::pin(host(w, name, &run, places, taken)).await;
                });
            };
            self.hosts.push(Host { name, link, orders, thread: std::thread::spawn(runs) });
        }
        for host in &self.hosts {
            for plugin in PLUGINS {
                host.does(Order::Mount(format!("{plugin}-{}", host.name))).await;
            }
        }
    }

    /// Replaces a server by one of a release, as `systemctl restart` does.
    async fn replace_server(&mut self, n: usize, release: Release) {
        println!("s{n} is of {release:?} from now on");
        self.site.programs.server = match release {
            Release::Earlier => self.earlier.server.clone(),
            Release::This => Programs::default().server,
        };
        self.site.servers[n].signal(Signal::TERM);
        assert!(self.site.servers[n].ended().await, "{}", self.site.servers[n].text());
        self.site.servers[n] = self.site.start_server(n);
    }

    /// Each host claims, mounts and releases a volume of each plugin, which another host is refused meanwhile. What the hosts keep stays.
    async fn works(&self, when: &str) {
        println!("---- {when}");
        for plugin in PLUGINS {
            let volume = format!("{plugin}-used");
            for (n, host) in self.hosts.iter().enumerate() {
                host.does(Order::Claim(volume.clone())).await;
                servers_have(&self.site, &volume, &[]).await;
                host.does(Order::Mount(volume.clone())).await;
                let holder = format!("{}/web", host.name);
                servers_have(&self.site, &volume, &[&holder]).await;
                let other = &self.hosts[(n + 1) % self.hosts.len()];
                other.does(Order::IsRefused(volume.clone(), holder)).await;
                host.does(Order::Unmount(volume.clone())).await;
                servers_have(&self.site, &volume, &[]).await;
            }
            for host in &self.hosts {
                let kept = format!("{plugin}-{}", host.name);
                servers_have(&self.site, &kept, &[&format!("{}/web", host.name)]).await;
                host.does(Order::HasKept(kept)).await;
            }
        }
    }

    /// Runs a command of csictl as an operator. Returns whether it was a success, and what it said.
    async fn csictl(&self, words: &str) -> (bool, String) {
        let mut command = tokio::process::Command::from(child(&site::csictl_program()));
        command.env("CSID_OPERATOR", operator(&self.site, "all")).args(words.split(' '));
        let output = command.output().await.expect("csictl runs");
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }
}

#[test]
fn earlier_release_works_in_a_rolling_upgrade() {
    let Some(earlier) = std::env::var_os(EARLIER).map(PathBuf::from) else {
        left_out(&format!(
            "`make soak-cluster` builds an earlier release and runs it, with {EARLIER}=DIRECTORY"
        ));
        return;
    };
    world_within(LIMIT, async move |w| {
        let programs =
            Programs { server: of_earlier(&earlier, "csid-server"), link: of_earlier(&earlier, "csid-link") };
        let etcd = Etcd::start(1, &[]).await;
        let section = format!("endpoints = {:?}\n{GRANTS}", etcd.endpoints());
        let site = Site::at(programs.clone(), etcd, &addresses(3), BTreeMap::new(), "", &section);
        let storage = w.path("storage");
        let stored = Backend::new(&storage);
        std::fs::create_dir_all(stored.data_directory()).expect("the storage");
        for plugin in PLUGINS {
            for of in HOSTS.map(|(name, ..)| name).into_iter().chain(["used"]) {
                let volume = format!("{plugin}-{of}");
                let mut ask = register(&volume, "single-node-writer");
                if let Some(What::Register(register)) = &mut ask.what {
                    register.plugin = plugin.into();
                }
                site.operator(0, "all").change(ask).await.expect("the registration");
                stored.put(&Stored::provisioned(&format!("ext-{volume}"), 4 << 20)).expect("the storage");
            }
        }
        let mut mixed = Mixed { site, hosts: Vec::new(), earlier: programs };
        mixed.start_hosts(w, &earlier, &storage).await;

        mixed.works("all servers are of the earlier release").await;
        mixed.replace_server(0, Release::This).await;
        mixed.works("one server is of this release").await;
        // Until the schema is raised, each step can be taken back.
        mixed.replace_server(0, Release::Earlier).await;
        mixed.works("all servers are of the earlier release again").await;
        mixed.replace_server(0, Release::This).await;
        mixed.replace_server(1, Release::This).await;
        mixed.works("one server is of the earlier release").await;
        let (is_raised, said) = mixed.csictl("server upgrade --confirm prod").await;
        assert!(!is_raised && said.contains("the server s2 (") && said.contains("and not 2"), "{said}");
        mixed.replace_server(2, Release::This).await;
        mixed.works("all servers are of this release, and the values are of the earlier one").await;
        let (is_raised, said) = mixed.csictl("server upgrade --confirm prod").await;
        assert!(is_raised, "{said}");
        mixed.works("the values have version 2").await;

        // The way back is closed.
        mixed.site.servers[2].signal(Signal::TERM);
        assert!(mixed.site.servers[2].ended().await);
        mixed.site.programs.server.clone_from(&mixed.earlier.server);
        let (has_run, said) = mixed.site.run_server(2, &["run"]);
        assert!(!has_run && said.contains("etcd has values of version 2"), "{said}");
        mixed.site.programs = Programs::default();
        mixed.site.servers[2] = mixed.site.start_server(2);
        mixed.works("a server of the earlier release was refused").await;

        for (n, (name, csid, link)) in HOSTS.into_iter().enumerate() {
            if link == Release::Earlier {
                mixed.hosts[n].link.link.kill();
                mixed.hosts[n].link = mixed.site.node(name);
            }
            if csid == Release::Earlier {
                mixed.hosts[n].does(Order::Upgrade).await;
            }
        }
        mixed.works("all hosts are of this release").await;
        let mut logs = Vec::new();
        for Host { name, link: _link, orders, thread } in mixed.hosts.drain(..) {
            for plugin in PLUGINS {
                let (done, ended) = oneshot::channel();
                orders.send((Order::Unmount(format!("{plugin}-{name}")), done)).expect("the host runs");
                ended.await.expect("the host goes on");
                servers_have(&mixed.site, &format!("{plugin}-{name}"), &[]).await;
                logs.push((plugin, w.path(&format!("logs-{name}")).join(format!("{plugin}.jsonl"))));
            }
            drop(orders);
            eventually("the host has ended", async || thread.is_finished()).await;
            thread.join().expect("nothing is left on the host");
        }
        for plugin in PLUGINS {
            let logs = logs.iter().filter(|(of, _)| *of == plugin);
            let report =
                Report::read(&logs.map(|(_, log)| log.clone()).collect::<Vec<_>>()).expect("the logs");
            eprintln!("    witness of {plugin}: {} calls, {} breaches", report.calls, report.breaches.len());
            assert!(report.breaches.is_empty(), "{plugin}: {report}");
        }
    });
}
