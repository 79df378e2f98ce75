//! A secret through every call of a cluster, while the plugins of both hosts repeat it. The controller runs on the host `c1`, and `n1` uses the
//! volumes. Then all that etcd, the server and the links have is searched for it: files, memory, logs, metrics and sockets. A text that is no
//! secret has to be found there.

mod calls;
mod searched;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use csi_proto::cluster::v1::change_ask::What;
use csid_client::{CallOptions, Client, Error, Kind, VolumeFilter};
use csid_tests::ask::*;
use csid_tests::plugin::Recorded;
use csid_tests::script::{Act, CONTROLLER, Half, Rule};
use csid_tests::search::Haystack;
use csid_tests::world::{World, count, eventually, world};

use crate::canary::calls::{Operator, ask};
use crate::canary::searched::{Relayed, add_host};
use crate::site::register;
use crate::*;

const SECRET: &str = "c4n4ry>?s3cr3t~4242";
const CREDENTIAL: &str = "csid.default.canary";
/// In contexts: the servers keep these, and hosts send them.
const MARKER: &str = "m4rk3r>?c0nt3xt~4242";
/// In the name of a volume that is not there: the message of an error has it.
const ABSENT: &str = "m4rk3r-abs3nt-4242";
/// The volume whose registration has the credential, and one without a credential.
const CREATED: &str = "created";
const REGISTERED: &str = "registered";
/// The operator's volume, whose registration has the credential.
const OPERATED: &str = "operated";
/// FAILED_PRECONDITION refuses a call. After INTERNAL it is not known whether it was done, and servers repeat it.
const REFUSED: i32 = 9;
const UNKNOWN: i32 = 13;
/// The controller's RPCs that get the secret.
const GIVEN: [&str; 8] = [
    "CreateVolume",
    "ValidateVolumeCapabilities",
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "ControllerExpandVolume",
    "CreateSnapshot",
    "DeleteSnapshot",
    "DeleteVolume",
];
/// How long a call may take that fails, and one that does not.
const BRIEF: Duration = Duration::from_secs(3);
const LONG: Duration = Duration::from_secs(20);
const BYTES: u64 = 4 << 20;
/// The plugin's name of the node that AttachVolume names.
const OTHER: &str = "node n2";

/// Returns what a plugin says that quotes its arguments.
fn words() -> String {
    format!("cannot log in with {SECRET} ({:?})", format!("password={SECRET}"))
}

/// Starts this world's csid with plugin `p`, as a node that talks to its link through the relay in `link`.
async fn host(w: &mut World, name: &str, link: &Path, storage: Option<&Path>, does: &str) -> Client {
    w.environment.insert("CSID_LOG".to_owned(), "trace".to_owned());
    fs::write(w.path("credentials").join(CREDENTIAL), format!("{{\"password\":{SECRET:?}}}")).unwrap();
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| {
        script.control(&CONTROLLER);
        if storage.is_some() {
            script.serves = vec![Half::Node];
        }
        script.node_id = format!("node {name}");
        script.others = vec!["node n1".into(), OTHER.into()];
        script.plugin.push("ONLINE".to_owned());
        script.capabilities.push("EXPAND_VOLUME".to_owned());
        script.token = Some(MARKER.to_owned());
    });
    plugin.kill();
    if let Some(storage) = storage {
        plugin.shares(storage.to_owned());
    }
    plugin.start().await;
    w.configure(&format!("{}{does}", of_node(name, link)));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    client
}

/// What the host `n1` says of calls that fail, and what it shows meanwhile.
#[derive(Default)]
struct Said {
    errors: String,
    rows: String,
}

impl Said {
    /// Keeps what any caller may see.
    async fn look(&mut self, client: &Client) {
        for volume in [CREATED, REGISTERED] {
            // It may not be there.
            let explained = client.explain(NAMESPACE, volume, CallOptions::default()).await;
            self.rows += &format!("{explained:?}\n");
        }
        let volumes = client.list_volumes(VolumeFilter::default()).await.unwrap();
        let operations = client.list_operations().await.unwrap();
        self.rows += &format!("{volumes:?}\n{operations:?}\n{:?}\n", claims(client).await);
    }
}

/// Makes calls as the test of `c1` says so, and adds what this host has written and said.
async fn uses(w: &mut World, link: &Path, storage: &Path, mut other: Other, haystack: Arc<Mutex<Haystack>>) {
    // The witness of this host sees its own plugin alone, which has no controller. The plugin itself knows what is attached.
    w.excuse(31, "with a publish_context, and the plugin does not attach");
    let client = host(w, "n1", link, Some(storage), "").await;
    other.say("ready");
    let mut said = Said::default();
    let mut patience = LONG;
    while let Some(what) = other.hears.recv().await {
        match what {
            "briefly" => patience = BRIEF,
            "patiently" => patience = LONG,
            "NodeStageVolume" | "NodeExpandVolume" => {
                w.plugin("p").rules([Rule::always(what, Act::Say(REFUSED, words()))]);
            }
            "honestly" => w.honest(),
            "end" => break,
            what => {
                let done = ask(&client, what, Some(patience.as_micros() as u64)).await;
                said.look(&client).await;
                if let Err(error) = &done {
                    said.errors += &format!("{what}: {error} {error:?}\n");
                }
                other.say(match done {
                    Ok(()) => "done",
                    Err(Error::Csid(error)) if error.kind == Kind::NotSupported => "not supported",
                    Err(Error::Csid(error)) if error.kind == Kind::SecretRequired => "secrets required",
                    Err(_) => "failed",
                });
            }
        }
    }
    w.nothing_left(&client).await;
    count("calls of n1's plugin that were given the secret", given_to(w, &["NodeStageVolume"]));
    let mut found = Haystack::default();
    found.add("n1 errors", said.errors.as_bytes());
    found.add("n1 rows", said.rows.as_bytes());
    add_host(w, "n1 ", &client, &mut found).await;
    *haystack.lock().unwrap() = found;
}

/// Returns how often the plugin was given the secret. Fails if one of these calls was not given it.
fn given_to(w: &mut World, rpcs: &[&str]) -> usize {
    let calls = w.plugin("p").calls();
    let has_it = |of: &&Recorded| of.call.secrets.iter().any(|(_, value)| value == SECRET);
    let given: Vec<&str> = calls.iter().filter(has_it).map(|of| of.call.rpc.as_str()).collect();
    for rpc in rpcs {
        assert!(given.contains(rpc), "{rpc} was not given the secret");
    }
    given.len()
}

/// The calls that an operator makes, and those of a host, each with the controller's RPC that fails first.
const OF_OPERATOR: [(&str, &str); 9] = [
    ("create", "CreateVolume"),
    ("validate", "ValidateVolumeCapabilities"),
    ("expand", "ControllerExpandVolume"),
    ("snapshot", "CreateSnapshot"),
    ("list volumes", "ListVolumes"),
    ("list snapshots", "ListSnapshots"),
    ("measure", "GetCapacity"),
    ("delete the snapshot", "DeleteSnapshot"),
    ("delete", "DeleteVolume"),
];
const OF_HOST: [(&str, &str); 14] = [
    ("create", "CreateVolume"),
    ("validate", "ValidateVolumeCapabilities"),
    ("attach", "ControllerPublishVolume"),
    ("detach", "ControllerUnpublishVolume"),
    ("mount", "ControllerPublishVolume"),
    ("unmount", ""),
    ("mount", "NodeStageVolume"),
    ("expand", "ControllerExpandVolume"),
    ("expand more", "NodeExpandVolume"),
    ("snapshot", "CreateSnapshot"),
    ("unmount", ""),
    ("delete", "DeleteVolume"),
    ("claim", "ControllerPublishVolume"),
    ("release", "ControllerUnpublishVolume"),
];

/// Who makes a call: an operator, or root on `n1`.
#[derive(Clone, Copy)]
enum Asker {
    Operator,
    Host,
}

/// The test, at the host `c1`.
struct Test<'a> {
    w: &'a mut World,
    relayed: &'a Relayed,
    n1: Other,
    operator: Operator<'a>,
    failed: usize,
    /// How often the server's memory had the marker.
    marked: usize,
}

impl Test<'_> {
    /// Has `n1` make a call. Returns how it ended.
    async fn asked(&mut self, what: &'static str) -> &'static str {
        self.n1.say(what);
        self.n1.hears.recv().await.expect("n1 answers")
    }

    /// Has a call fail, and searches the memory then.
    async fn fails(&mut self, what: &'static str, rpc: &'static str, code: i32, asker: Asker) {
        let is_of_node = rpc.starts_with("Node");
        let before = self.w.plugin("p").count(rpc, "");
        match is_of_node {
            true => self.n1.say(rpc),
            false => self.w.plugin("p").rules([Rule::always(rpc, Act::Say(code, words()))]),
        }
        let is_done = match asker {
            Asker::Operator => self.operator.ask(what).await,
            Asker::Host => {
                self.n1.say("briefly");
                let done = self.asked(what).await;
                self.n1.say("patiently");
                done == "done"
            }
        };
        // The servers go on with both.
        assert!(
            !is_done || ["release", "expand more"].contains(&what),
            "{what} is done though {rpc} failed with {code}"
        );
        let plugin = self.w.plugin("p");
        eventually("the controller was asked", async || is_of_node || plugin.count(rpc, "") > before).await;
        self.failed += 1;
        self.marked += usize::from(self.relayed.search_memory());
        self.n1.say("honestly");
        self.w.honest();
    }

    /// Repeats a call until it is done.
    async fn must(&mut self, what: &'static str, asker: Asker) {
        eventually(what, async || match asker {
            Asker::Operator => self.operator.ask(what).await,
            Asker::Host => self.asked(what).await == "done",
        })
        .await;
    }

    /// Releases the claims of a volume, as an operator does. A detach that was refused is made again.
    async fn free(&mut self, volume: &str) {
        let site = &self.relayed.site;
        eventually("the volume is free", async || {
            if claims_at_servers(site, volume).await.is_empty() {
                return true;
            }
            // It is refused while the host has the volume.
            let released = site.operator(0, "all").release(release_ask(volume, "n1")).await;
            self.operator.said += &format!("{released:?}\n");
            false
        })
        .await;
    }

    /// Makes each call fail, and then makes it.
    async fn all(&mut self) {
        for (what, rpc) in OF_OPERATOR {
            self.fails(what, rpc, REFUSED, Asker::Operator).await;
            self.must(what, Asker::Operator).await;
        }
        for (what, rpc) in OF_HOST {
            if !rpc.is_empty() {
                self.fails(what, rpc, REFUSED, Asker::Host).await;
            }
            if ["create", "attach", "detach", "delete"].contains(&what) {
                self.fails(what, rpc, UNKNOWN, Asker::Host).await;
            }
            match what {
                "release" => self.free(REGISTERED).await,
                what => self.must(what, Asker::Host).await,
            }
            if what == "unmount" {
                self.free(CREATED).await;
            }
        }
    }

    fn calls_about_volumes(&mut self) -> usize {
        self.w.plugin("p").calls().iter().filter(|call| !call.call.volume.is_empty()).count()
    }

    /// Makes calls that bring the secret themselves. No such call reaches the servers with it.
    async fn descriptors(&mut self) {
        for what in ["create with secrets", "attach with secrets"] {
            assert_eq!(self.asked(what).await, "not supported", "{what}");
        }
        self.marked += usize::from(self.relayed.search_memory());
        // No controller would get them. csid may probe the plugin meanwhile.
        let before = self.calls_about_volumes();
        for what in ["claim with secrets", "claim with a credential of this host"] {
            assert_eq!(self.asked(what).await, "secrets required", "{what}");
            assert_eq!(claims_at_servers(&self.relayed.site, REGISTERED).await.len(), 0, "{what}");
        }
        assert_eq!(self.calls_about_volumes(), before);
        // The node's own RPCs do.
        self.n1.say("NodeStageVolume");
        assert_eq!(self.asked("mount with secrets").await, "failed");
        self.marked += usize::from(self.relayed.search_memory());
        self.n1.say("honestly");
        self.must("mount with secrets", Asker::Host).await;
        self.must("unmount registered", Asker::Host).await;
        self.must("release", Asker::Host).await;
        self.free(REGISTERED).await;
        assert_eq!(self.asked("ask for an absent volume").await, "failed");
    }
}

#[test]
fn secret_in_a_cluster_is_found_nowhere() {
    world(async |w| {
        let relayed = Relayed::start().await;
        let site = &relayed.site;
        let does = "controllers = [\"p\"]\ncontroller-volumes = [\"p\"]\ncontroller-credentials = [\"csid.default.*\"]\n";
        let client = host(w, "c1", &site.path("c1.relay"), None, does).await;
        w.plugin("p").provision(&format!("ext-{REGISTERED}"));
        let mut of_registered = register(REGISTERED, "single-node-writer");
        let Some(What::Register(register)) = &mut of_registered.what else { unreachable!() };
        register.spec.as_mut().unwrap().volume_context = [("token".to_owned(), MARKER.to_owned())].into();
        site.operator(0, "all").change(of_registered).await.unwrap();

        let (mut n1, n1_end) = Other::pair();
        let (link, storage) = (site.path("n1.relay"), w.plugin("p").state().to_owned());
        let of_n1 = Arc::new(Mutex::default());
        let haystack = of_n1.clone();
        let thread = std::thread::spawn(move || {
            world(async move |w| Box::pin(uses(w, &link, &storage, n1_end, haystack)).await);
        });
        n1.hear("ready").await;

        let operator = Operator::new(site);
        let mut test = Test { w, relayed: &relayed, n1, operator, failed: 0, marked: 0 };
        test.all().await;
        test.descriptors().await;
        let Test { w, n1, operator, failed, marked, .. } = test;
        n1.say("end");
        thread.join().unwrap();
        count("calls that failed", failed);
        assert!(marked > 0, "the server's memory never had the marker");
        let given = given_to(w, &GIVEN);
        count("calls of c1's plugin that were given the secret", given);

        let mut haystack = std::mem::take(&mut *of_n1.lock().unwrap());
        haystack.add("operator", operator.said.as_bytes());
        add_host(w, "c1 ", &client, &mut haystack).await;
        relayed.add_all(&mut haystack).await;
        count("places searched", haystack.places());
        count("bytes searched", haystack.bytes());
        let found = haystack.hits(MARKER);
        let due = [
            "etcd snap",
            "etcd wal",
            "etcd's socket, sent",
            "etcd's socket, answered",
            "c1, sent",
            "c1, answered",
            "n1, answered",
        ];
        assert!(due.iter().all(|place| found.contains(place)), "what is no secret is found: {found:?}");
        // The message of an error is in a header.
        assert!(haystack.hits(ABSENT).contains("n1, answered"), "{:?}", haystack.hits(ABSENT));
        let logs = [site.servers[0].text(), fs::read_to_string(w.path("csid.log")).unwrap()];
        assert!(logs.iter().all(|log| log.contains(CREATED)), "a log lacks the calls");
        let hits = haystack.hits(SECRET);
        assert_eq!(hits, BTreeSet::new(), "the secret is found");
        count("hits of the secret in each form", hits.len());
        w.nothing_left(&client).await;
    });
}
