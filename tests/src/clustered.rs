//! csid as the only node of a cluster, for the tests of claims and volumes: its claims are those of a csid-server. Each test has a server and
//! a link of its own. The servers share an etcd, in which each has keys of its own.

use crate::cluster::{Program, Site};
use crate::etcd::Cluster as Etcd;
use crate::world::{World, is_set, world};

/// The endpoints of the etcd that the servers use, with commas between them.
pub const ENDPOINTS: &str = "CSID_TEST_CLUSTER";

/// The cluster's name.
pub const CLUSTER: &str = "prod";
const NODE: &str = "host";

/// What the tests' users do with csid alone.
const GRANTS: &str = r#"
[[grant]]
who = "node/host"
namespaces = ["*"]
may = ["join", "mount", "controller:p", "controller:q", "controller:two", "controller:other", "controller:local", "read", "register", "create", "delete", "expand", "snapshot", "attach"]

[[grant]]
who = "node/host"
namespaces = ["*"]
may = ["release-others"]
"#;

/// Returns whether csid is a node of a cluster in this run.
pub fn is_used() -> bool {
    std::env::var_os(ENDPOINTS).is_some()
}

/// Returns whether csid is a node of a cluster in this run, for a test of what no node has. Prints why it is skipped then.
pub fn is_skipped(why: &str) -> bool {
    is_set(ENDPOINTS, "on a node of a cluster", why)
}

/// Runs a test of what no node of a cluster has, in a world of its own. Prints why it is skipped in a cluster.
pub fn alone<F>(why: &str, test: F)
where
    F: for<'w> AsyncFnOnce(&'w mut World) + Send + 'static,
{
    if !is_skipped(why) {
        world(test);
    }
}

/// The server of one test, and the link of its node.
pub struct Servers {
    site: Site,
    link: Program,
    run: std::path::PathBuf,
}

impl Servers {
    /// Starts a server whose keys in etcd are below `/NAME/`. They end with this thread. `None`: csid is alone in this run.
    pub fn start(name: &str) -> Option<Servers> {
        let endpoints = std::env::var(ENDPOINTS).ok()?;
        let endpoints: Vec<_> = endpoints.split(',').collect();
        let section = format!("endpoints = {endpoints:?}\nprefix = \"/{name}/\"\n{GRANTS}");
        let site = Site::of(Etcd::none(), 1, "", &section);
        let node = site.node(NODE);
        Some(Servers { run: node.run().to_owned(), link: node.link, site })
    }

    /// Returns a csid.toml for the node. `keys`: what csid.toml says without servers.
    pub fn configuration(&self, keys: &str) -> String {
        let plugins = ["p", "q", "two", "other", "local"];
        format!(
            "node = {NODE:?}\n{keys}\n[cluster]\nname = {CLUSTER:?}\nlink = {:?}\ninline = true\ncontrollers = {plugins:?}\n\
             controller-volumes = {plugins:?}\ncontroller-credentials = [\"csid.default.*\"]\n",
            self.run
        )
    }

    /// Returns what the server and the link have logged, for a test that fails.
    pub fn logs(&self) -> String {
        let server: String = self.site.servers.iter().map(Program::text).collect();
        format!("---- csid-server's log\n{server}---- csid-link's log\n{}", self.link.text())
    }
}
