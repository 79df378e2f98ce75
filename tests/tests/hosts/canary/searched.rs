//! What is searched for a secret: the cluster's files, memory, logs, metrics and sockets.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use csid_client::Client;
use csid_tests::ask::events;
use csid_tests::etcd::Cluster as Etcd;
use csid_tests::kernel;
use csid_tests::relay::Relay;
use csid_tests::search::Haystack;
use csid_tests::world::World;
use rustix::process::Pid;

use crate::canary::{MARKER, SECRET};
use crate::shown::{metrics, metrics_of};
use crate::site::{GRANTS, Node, Site, free_ports};

const OF_N1: &str = r#"
[[grant]]
who = "node/n1"
namespaces = ["default"]
may = ["read", "register", "create", "delete", "expand", "snapshot", "attach"]
"#;

/// Adds what a host has written and shows of itself.
pub async fn add_host(w: &World, before: &str, client: &Client, haystack: &mut Haystack) {
    haystack.add(&format!("{before}events"), format!("{:?}", events(client, 0).await).as_bytes());
    haystack.add(&format!("{before}metrics"), metrics(w).await.as_bytes());
    haystack.add_written(before, w);
}

/// Returns what a process has in its memory and can write to.
fn memory(process: Pid) -> Vec<u8> {
    let directory = format!("/proc/{}", process.as_raw_nonzero());
    let maps = fs::read_to_string(format!("{directory}/maps")).unwrap();
    let memory = fs::File::open(format!("{directory}/mem")).unwrap();
    let mut found = Vec::new();
    for map in maps.lines().filter(|map| map.split(' ').nth(1).is_some_and(|rights| rights.starts_with("rw")))
    {
        let (from, to) = map.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let [from, to] = [from, to].map(|address| u64::from_str_radix(address, 16).expect("an address"));
        let mut part = vec![0; usize::try_from(to - from).unwrap()];
        // The map may have gone meanwhile.
        if memory.read_exact_at(&mut part, from).is_ok() {
            found.append(&mut part);
        }
    }
    found
}

/// The cluster, with a relay before etcd, and one before the socket of each link.
pub struct Relayed {
    pub site: Site,
    of_etcd: Relay,
    of_links: Vec<(&'static str, Node, Relay)>,
    /// The port of the server's metrics.
    port: u16,
}

impl Relayed {
    pub async fn start() -> Relayed {
        let etcd = Etcd::start(1, &[]).await;
        let (of_etcd, address) = Relay::tcp(etcd.members[0].client);
        let [port, _] = free_ports();
        let section = format!("endpoints = [\"http://{address}\"]\n{GRANTS}{OF_N1}");
        let mut site = Site::of(etcd, 1, &format!("metrics = \"127.0.0.1:{port}\""), &section);
        site.servers[0].kill();
        site.environments = vec![vec![("CSID_LOG", "trace".into())]];
        site.servers[0] = site.start_server(0);
        let of_links = ["c1", "n1"].map(|name| {
            let node = site.node(name);
            let relayed = site.path(&format!("{name}.relay"));
            fs::create_dir(&relayed).unwrap();
            let relay = Relay::unix(&relayed.join(&site.addresses[0]), &node.run().join(&site.addresses[0]));
            (name, node, relay)
        });
        Relayed { site, of_etcd, of_links: of_links.into(), port }
    }

    /// Searches the memory of the server and of the links. Returns whether the server has the marker there.
    pub fn search_memory(&self) -> bool {
        let mut haystack = Haystack::default();
        haystack.add("server", &memory(self.site.servers[0].pid()));
        for (name, node, _) in &self.of_links {
            haystack.add(name, &memory(node.link.pid()));
        }
        assert_eq!(haystack.hits(SECRET), BTreeSet::new(), "the secret is in memory");
        assert_eq!(haystack.hits(&self.site.addresses[0]), BTreeSet::from(["c1", "n1", "server"]));
        haystack.hits(MARKER).contains("server")
    }

    /// Adds what etcd, the server and the links have written and carried.
    pub async fn add_all(&self, haystack: &mut Haystack) {
        for path in kernel::tree(self.site.etcd.members[0].data.parent().unwrap()).unwrap() {
            if path.is_file() {
                let bytes = fs::read(&path).unwrap();
                // etcd has room for more in its files.
                let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                haystack.add(&format!("etcd {}", kind_of(&path)), &bytes[..end]);
            }
        }
        let connections = [("etcd's socket", &self.of_etcd)].into_iter();
        let links = self.of_links.iter().map(|(name, _, relay)| (*name, relay));
        for (place, relay) in connections.chain(links) {
            let [sent, answered] = relay.seen();
            haystack.add_http2(&format!("{place}, sent"), &sent);
            haystack.add_http2(&format!("{place}, answered"), &answered);
        }
        haystack.add("server's log", self.site.servers[0].text().as_bytes());
        for (name, node, _) in &self.of_links {
            haystack.add(&format!("{name} link's log"), node.link.text().as_bytes());
        }
        let page = metrics_of(tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.unwrap()).await;
        assert!(page.contains("csid_server_requests_total"), "{page}");
        haystack.add("server's metrics", page.as_bytes());
    }
}

/// Returns the directory of a file of etcd, or `log`.
fn kind_of(path: &Path) -> &str {
    let name = |path: &Path| path.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
    match path.parent().map(name).as_deref() {
        Some("snap") => "snap",
        Some("wal") => "wal",
        _ => "log",
    }
}
