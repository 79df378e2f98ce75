//! The end of a run: nothing is left in etcd, at the storage and on the hosts, and the operators' audit finds nothing. Also what a restore of etcd
//! leaves attached, which is excused in the end.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{AttachAsk, AuditAsk, ChangeAsk, DetachAsk, Finding, VolumeRow};
use csi_witness::Mark;
use csid_tests::backend::Backend;
use csid_tests::kernel;
use csid_tests::world::within_time;
use serde_json::Value;

use crate::faults::Faults;
use crate::history::Line;
use crate::host::{CONTROLLER, Host, log, node_id};
use crate::load::{Stray, VOLUMES, Volume};
use crate::samples::Hosts;
use crate::site::Site;
use crate::{REST, Run, SOON, keep};

/// The root of the keys of volumes in etcd.
const VOLUME_KEYS: &str = "/csid/v1/vol/";

impl Run {
    /// Ends the load. Waits until every call has its end, every host has let all volumes go, and the servers know it. An operator ends what a restore has
    /// left attached. Then etcd has nothing of a host, and the operators' audit finds nothing.
    pub async fn rest(&mut self, faults: &Faults) {
        let ended = Instant::now();
        self.shared.stop.store(true, Ordering::SeqCst);
        let clients = &self.shared.clients;
        within_time(REST, "all clients have let their volumes go", async || {
            clients.load(Ordering::SeqCst) == 0 || self.hosts.iter().any(|host| host.thread.is_finished())
        })
        .await;
        self.nothing_left_in_etcd("hosts at rest", left_of_volumes).await;
        self.detach_strays().await;
        self.nothing_left_in_etcd("an operator's calls", left_of_volumes).await;
        // All detaching needs the first host.
        for host in self.hosts.split_off(1) {
            self.end(host).await;
        }
        let controller = self.hosts.pop().expect("the first host");
        self.end(controller).await;
        println!("at rest {:.1} s after the end of the load", ended.elapsed().as_secs_f64());
        self.nothing_left_in_etcd("hosts that have ended", left_of_sessions).await;
        self.judge_audit().await;
        self.joins.abort();
        let history = &self.shared.history;
        history.write(&Line::event("rest", history.now()));
        faults.read(&self.site, &self.shared).await;
    }

    /// Waits until etcd has nothing more of what `left` looks at.
    async fn nothing_left_in_etcd(&self, of: &str, left: impl AsyncFn(&Site) -> Vec<String>) {
        let mut rows = Vec::new();
        let is_empty = tokio::time::timeout(SOON, async {
            loop {
                rows = left(&self.site).await;
                if rows.is_empty() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        if is_empty.await.is_err() {
            keep(&self.shared.history.path, self.seed);
            panic!("seed {}: in {SOON:?} etcd still has these rows of {of}: {rows:#?}", self.seed);
        }
    }

    /// Makes the operators' audit of a cluster at rest, which finds nothing.
    async fn judge_audit(&self) {
        let counts = self.site.raw().await.below("/csid/v1/used/").await;
        assert!(!counts.is_empty(), "no host has counted its volumes");
        let mut found = self.site.admin(0, "all").audit(AuditAsk {}).await.expect("an audit").into_inner();
        let mut findings: Vec<Finding> = Vec::new();
        while let Some(finding) = found.message().await.expect("an audit") {
            findings.push(finding);
        }
        if !findings.is_empty() {
            keep(&self.shared.history.path, self.seed);
        }
        assert_eq!(findings, [], "seed {}", self.seed);
    }

    /// Notes what is attached and is not in etcd, while the cluster recovers. Nothing is attached or detached meanwhile. A stray is excused only if
    /// neither a client, nor the kernel of its host, nor csid's word to the servers has the volume there.
    pub async fn note_strays(&self) {
        for volume in VOLUMES.into_iter().filter(Volume::attaches) {
            // A volume that is in use now has been attached since before the restore.
            let had = self.shared.had.lock().expect("the volumes").clone();
            let stored = Backend::new(&self.places.storage);
            let mounted: Vec<_> = self
                .hosts
                .iter()
                .map(|host| &host.name)
                .filter(|host| is_mounted(&self.shared.namespaces, host, &stored.data(&volume.external_id())))
                .collect();
            let rows = self.site.raw().await.below(&format!("{VOLUME_KEYS}default/{}/", volume.name)).await;
            let rows = rows.iter().map(|row| (String::from_utf8_lossy(&row.key).into_owned(), &row.value));
            let of_volume: Vec<_> = rows.map(|(key, value)| (Part::of(&key), value)).collect();
            let known: Vec<String> = of_volume
                .iter()
                .filter_map(|(part, _)| match part {
                    Part::Attachment { node } => Some(node_id(node)),
                    _ => None,
                })
                .collect();
            for node in self.attached(&volume.external_id()) {
                if known.contains(&node) {
                    continue;
                }
                println!("           {} is attached to {node}, and etcd lacks that", volume.name);
                let is_here = |host: &str| node_id(host) == node;
                let clients = had.iter().filter(|(name, who)| *name == volume.name && is_here(host_of(who)));
                let of_clients = clients.map(|(_, who)| format!("{who} has the volume"));
                let of_kernel = mounted.iter().filter(|host| is_here(host));
                let of_kernel = of_kernel.map(|host| format!("the volume is mounted on {host}"));
                let said = of_volume.iter().filter_map(|(part, value)| match part {
                    Part::Claim { node, consumer } if is_here(node) && is_brought_back(value) => {
                        Some(format!("csid has said that {consumer} has the volume on {node}"))
                    }
                    _ => None,
                });
                let uses: Vec<String> = of_clients.chain(of_kernel).chain(said).collect();
                if !uses.is_empty() {
                    keep(&self.shared.history.path, self.seed);
                }
                assert_eq!(uses, [""; 0], "seed {}: etcd lacks {} of {node}", self.seed, volume.name);
                // The servers cannot know of it.
                let mark = Mark::Forgotten { volume: volume.external_id(), node: node.clone() };
                let controllers = log(&self.places.logs.join(CONTROLLER), volume.plugin);
                csi_witness::mark(&controllers, mark).expect("the witness' log");
                let stray = Stray { volume: volume.name, node };
                self.shared.strays.lock().expect("the strays").push(stray);
            }
        }
    }

    /// Has each stray that is left attached by call, which the plugin answers from what it has, and detached.
    async fn detach_strays(&self) {
        let strays = self.shared.strays.lock().expect("the strays").clone();
        for Stray { volume, node, .. } in strays {
            if !self.attached(&format!("ext-{volume}")).contains(&node) {
                continue;
            }
            println!("           {volume} is still attached to {node}: an operator attaches and detaches it");
            let call = csid::random::name();
            let attach =
                AttachAsk { volume: volume.into(), node_id: node.clone(), call, ..AttachAsk::default() };
            let row = self.change(What::Attach(attach)).await;
            let id = row.attached.expect("the attachment").id;
            let detach = DetachAsk { volume: volume.into(), node_id: node, id, ..DetachAsk::default() };
            self.change(What::Detach(detach)).await;
        }
    }

    /// Makes a change as an operator.
    async fn change(&self, what: What) -> VolumeRow {
        let ask = ChangeAsk { what: Some(what) };
        let changed = self.site.operator(0, "all").change(ask).await;
        changed.expect("a change by an operator").into_inner()
    }

    /// Ends a host that is to come to rest.
    async fn end(&self, Host { name, node: _node, orders, thread }: Host) {
        drop(orders);
        within_time(REST, &format!("{name} is at rest"), async || thread.is_finished()).await;
        if thread.join().is_err() {
            keep(&self.shared.history.path, self.seed);
            panic!("{name} failed");
        }
    }
}

/// A key below a volume's.
#[derive(Debug, PartialEq, Eq)]
enum Part {
    Head,
    /// A registration, or a claim of the past.
    Kept,
    Claim {
        node: String,
        consumer: String,
    },
    /// `node` is empty for what AttachVolume has attached.
    Attachment {
        node: String,
    },
    /// A claim that waits, or what this test does not know.
    Other,
}

impl Part {
    fn of(key: &str) -> Part {
        let below = key.strip_prefix(VOLUME_KEYS).unwrap_or_default();
        match below.split('/').skip(2).collect::<Vec<_>>()[..] {
            ["head"] => Part::Head,
            ["reg"] | ["past", _] => Part::Kept,
            ["claim", node, consumer] => Part::Claim { node: node.into(), consumer: consumer.into() },
            ["at", "@", _] => Part::Attachment { node: String::new() },
            ["at", node] => Part::Attachment { node: node.into() },
            _ => Part::Other,
        }
    }
}

/// Returns the host of NODE/CONSUMER.
fn host_of(who: &str) -> &str {
    who.split('/').next().expect("NODE/CONSUMER")
}

/// Returns whether a node has brought this claim back after a restore of etcd.
fn is_brought_back(claim: &[u8]) -> bool {
    let claim: Value = serde_json::from_slice(claim).expect("a claim");
    claim["adopted"] == true
}

/// Returns what a cluster at rest has no more of volumes: claims, attachments, claims that wait, and calls of controllers. A node that has no volume has
/// a count of 0.
async fn left_of_volumes(site: &Site) -> Vec<String> {
    let mut raw = site.raw().await;
    let (rows, counts) = (raw.below(VOLUME_KEYS).await, raw.below("/csid/v1/used/").await);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let is_left = |key: &str, value: &[u8]| {
        let value: Value = serde_json::from_slice(value).expect("a row");
        match Part::of(key) {
            Part::Kept => false,
            Part::Head => value.get("driver").is_some_and(|driver| !driver.is_null()),
            Part::Claim { .. } | Part::Attachment { .. } | Part::Other => true,
        }
    };
    let of_volumes = rows.into_iter().filter(|row| is_left(&text(&row.key), &row.value));
    let counts = counts.into_iter().filter(|row| {
        let value: Value = serde_json::from_slice(&row.value).expect("a count");
        value["volumes"] != 0
    });
    of_volumes.chain(counts).map(|row| format!("{} = {}", text(&row.key), text(&row.value))).collect()
}

/// Returns the sessions of nodes in etcd.
async fn left_of_sessions(site: &Site) -> Vec<String> {
    let rows = site.raw().await.below("/csid/v1/session/").await;
    rows.into_iter().map(|row| String::from_utf8_lossy(&row.key).into_owned()).collect()
}

/// Returns whether a volume's data is mounted on a host, but for the place where the storage has it.
fn is_mounted(namespaces: &Hosts, host: &str, data: &Path) -> bool {
    let namespaces = namespaces.lock().expect("the hosts");
    let tasks = std::fs::read_dir("/proc/self/task").expect("the threads of this process");
    let mut tasks = tasks.filter_map(Result::ok).map(|task| task.path());
    let is_of_host = |task: &Path| {
        let namespace = std::fs::read_link(task.join("ns/mnt")).unwrap_or_default();
        namespaces.get(&*namespace.to_string_lossy()).is_some_and(|name| name == host)
    };
    let task = tasks.find(|task| is_of_host(task)).expect("the host runs");
    let mounts = kernel::mounts_of(&task).expect("the host's mounts");
    mounts.iter().any(|mount| mount.root.file_name() == data.file_name())
}

#[cfg(test)]
mod tests {
    use csid_tests::world::world;
    use rustix::mount::{UnmountFlags, mount_bind, unmount};

    use super::*;
    use crate::samples::mount_namespace;

    #[test]
    fn mount_on_a_host_is_seen_while_it_is_there() {
        world(async |w| {
            let host = |name: &str| (mount_namespace(), name.to_owned());
            let namespaces = Hosts::default();
            namespaces.lock().unwrap().extend([host("n1")]);
            let stored = Backend::new(&w.path("storage"));
            let (one, other) = (stored.data("ext-attached"), stored.data("ext-attached-many"));
            let target = w.path("target");
            for directory in [&one, &other, &target] {
                std::fs::create_dir_all(directory).unwrap();
            }
            assert!(!is_mounted(&namespaces, "n1", &one));
            mount_bind(&one, &target).unwrap();
            let seen = [&one, &other].map(|data| is_mounted(&namespaces, "n1", data));
            assert_eq!(seen, [true, false]);
            unmount(&target, UnmountFlags::empty()).unwrap();
            assert!(!is_mounted(&namespaces, "n1", &one));
        });
    }

    #[test]
    fn each_key_of_a_volume_has_its_part() {
        for (key, part) in [
            ("head", Part::Head),
            ("reg", Part::Kept),
            ("past/f", Part::Kept),
            ("claim/n1/c0", Part::Claim { node: "n1".into(), consumer: "c0".into() }),
            ("at/n1", Part::Attachment { node: "n1".into() }),
            ("at/@/i-7", Part::Attachment { node: String::new() }),
            ("queue/0001", Part::Other),
        ] {
            assert_eq!(Part::of(&format!("{VOLUME_KEYS}default/data/{key}")), part, "{key}");
        }
    }
}
