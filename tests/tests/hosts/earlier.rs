//! Servers, links and csid of an earlier release with those of this one, while servers and hosts are upgraded one after the other. Each step is taken
//! back once. `tests/soak-cluster` builds the earlier release (`tests/earlier`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
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
    /// It mounts the volume, and keeps a file there open.
    Use(String),
    /// It claims the volume, and keeps the claim.
    Hold(String),
    /// The volume has another holder.
    IsRefused(String, String),
    /// The mount in use takes what is written, and the plugin was called for it once.
    HasKept(String),
    /// csid has the claim that the host keeps.
    Holds(String),
    /// It closes its file and unmounts the volume.
    Leave(String),
    Release(String),
    /// csid and its helper end, and a release's start.
    Replace(Release),
}

/// Returns the volumes that a host keeps over each step: one is in use, and one is claimed.
fn kept(plugin: &str, host: &str) -> [String; 2] {
    [format!("{plugin}-{host}"), format!("{plugin}-{host}-claimed")]
}

/// An open file in a mounted volume.
struct InUse {
    file: File,
    path: PathBuf,
    text: String,
}

impl InUse {
    fn of(mounted: &Path) -> InUse {
        let path = mounted.join("in-use");
        let file = File::create_new(&path).expect("a new file");
        InUse { file, path, text: String::new() }
    }

    /// Writes to the file that was opened first. Its path shows the same, for the mount is the same.
    fn goes_on(&mut self) {
        let line = format!("{}\n", self.text.lines().count());
        self.file.write_all(line.as_bytes()).expect("the volume takes it");
        self.text.push_str(&line);
        assert_eq!(std::fs::read_to_string(&self.path).expect("the mount is there"), self.text);
    }
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

/// Runs a host until no orders come any more. `places`: its link, the storage, the logs, and the earlier release's programs.
async fn host(
    w: &mut World,
    name: &str,
    places: [PathBuf; 4],
    mut orders: UnboundedReceiver<(Order, oneshot::Sender<()>)>,
) {
    let [link, storage, logs, earlier] = places;
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
    w.configure(&format!("{}controllers = [{attaching:?}]\n", of_node(name, &link)));
    let mut client = w.start().await;
    for plugin in PLUGINS {
        healthy(&client, plugin).await;
    }
    joined(w).await;
    let mut in_use = BTreeMap::new();
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
            Order::Use(volume) => {
                let mounted = mount_registered(&client, &volume, "web").await.expect("a mount");
                in_use.insert(volume, InUse::of(Path::new(&mounted.source)));
            }
            Order::Hold(volume) => drop(claim(&client, &volume, "web").await.expect("a claim")),
            Order::Leave(volume) => {
                in_use.remove(&volume).expect("the host uses the volume").goes_on();
                unmount(&client, &volume, "web").await.expect("an unmount");
            }
            Order::Release(volume) => release(&client, &volume, "web").await.expect("a release"),
            Order::Holds(volume) => {
                let claims = claims(&client).await;
                let claim = claims.iter().find(|claim| claim.volume == volume).expect("the claim");
                assert_eq!((claim.consumer.as_str(), claim.state.as_str()), ("web", "taken"), "{claim:?}");
            }
            Order::HasKept(volume) => {
                in_use.get_mut(&volume).expect("the host uses the volume").goes_on();
                eventually("the mount is there", async || state(&client, &volume, "web").await == "mounted")
                    .await;
                let plugin = PLUGINS.into_iter().find(|plugin| volume.starts_with(plugin)).expect("a plugin");
                let calls = w.plugin(plugin).volume_calls();
                let is_call =
                    |rpc: &str, id: &str| rpc == "NodePublishVolume" && id == format!("ext-{volume}");
                let calls = calls.iter().filter(|made| is_call(&made.call.rpc, &made.call.volume));
                assert_eq!(calls.count(), 1, "{volume} was mounted again");
            }
            Order::Replace(release) => {
                w.stop().await;
                w.csid_program = (release == Release::Earlier).then(|| of_earlier(&earlier, "csid"));
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
    /// Starts the hosts. Each of them uses a volume of each plugin, and claims another one.
    async fn start_hosts(&mut self, w: &World, earlier: &Path, storage: &Path) {
        for (name, csid, link) in HOSTS {
            let logs = w.path(&format!("logs-{name}"));
            std::fs::create_dir(&logs).expect("a directory");
            let link = self.link(name, link);
            let (orders, taken) = unbounded_channel();
            let places = [link.run().to_owned(), storage.to_owned(), logs, earlier.to_owned()];
            let program = (csid == Release::Earlier).then(|| of_earlier(earlier, "csid"));
            let runs = move || {
                world_within(LIMIT, async move |w| {
                    w.csid_program = program;
                    Box::pin(host(w, name, places, taken)).await;
                });
            };
            self.hosts.push(Host { name, link, orders, thread: std::thread::spawn(runs) });
        }
        for host in &self.hosts {
            for plugin in PLUGINS {
                let [used, claimed] = kept(plugin, host.name);
                host.does(Order::Use(used)).await;
                host.does(Order::Hold(claimed)).await;
            }
        }
    }

    /// Starts a host's link of a release.
    fn link(&mut self, host: &str, release: Release) -> Node {
        self.site.programs.link = match release {
            Release::Earlier => self.earlier.link.clone(),
            Release::This => Programs::default().link,
        };
        self.site.node(host)
    }

    /// Replaces what was of the earlier release on a host by programs of a release, as the packages do.
    async fn replace_host(&mut self, n: usize, release: Release) {
        let (name, csid, link) = HOSTS[n];
        println!("{name} is of {release:?} from now on");
        if link == Release::Earlier {
            self.hosts[n].link.link.kill();
            self.hosts[n].link = self.link(name, release);
        }
        if csid == Release::Earlier {
            self.hosts[n].does(Order::Replace(release)).await;
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
                let [used, claimed] = kept(plugin, host.name);
                for volume in [&used, &claimed] {
                    servers_have(&self.site, volume, &[&format!("{}/web", host.name)]).await;
                }
                host.does(Order::HasKept(used)).await;
                host.does(Order::Holds(claimed)).await;
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
            let held = HOSTS.into_iter().flat_map(|(name, ..)| kept(plugin, name));
            for volume in held.chain([format!("{plugin}-used")]) {
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
        // Until the schema is raised, each step can be taken back.
        for n in 0..3 {
            mixed.replace_server(n, Release::This).await;
            mixed.works(&format!("s{n} is of this release")).await;
            if n == 1 {
                let (is_raised, said) = mixed.csictl("server upgrade --confirm prod").await;
                assert!(
                    !is_raised && said.contains("the server s2 (") && said.contains("and not 2"),
                    "{said}"
                );
            }
            mixed.replace_server(n, Release::Earlier).await;
            mixed.works(&format!("s{n} is of the earlier release again")).await;
            mixed.replace_server(n, Release::This).await;
        }
        mixed.works("all servers are of this release, and the values are of the earlier one").await;
        for (n, (name, ..)) in HOSTS.into_iter().enumerate().skip(1) {
            mixed.replace_host(n, Release::This).await;
            mixed.works(&format!("{name} is of this release")).await;
            mixed.replace_host(n, Release::Earlier).await;
            mixed.works(&format!("{name} is of the earlier release again")).await;
        }
        // The last server again: all hosts were of this release meanwhile.
        mixed.replace_server(2, Release::Earlier).await;
        mixed.works("s2 is of the earlier release once more").await;
        mixed.replace_server(2, Release::This).await;
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

        for n in 1..HOSTS.len() {
            mixed.replace_host(n, Release::This).await;
        }
        mixed.works("all hosts are of this release").await;
        let mut logs = Vec::new();
        for host in mixed.hosts.drain(..) {
            for plugin in PLUGINS {
                let [used, claimed] = kept(plugin, host.name);
                host.does(Order::Leave(used.clone())).await;
                host.does(Order::Release(claimed.clone())).await;
                for volume in [used, claimed] {
                    servers_have(&mixed.site, &volume, &[]).await;
                }
                logs.push((plugin, w.path(&format!("logs-{}", host.name)).join(format!("{plugin}.jsonl"))));
            }
            let Host { link: _link, orders, thread, .. } = host;
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
