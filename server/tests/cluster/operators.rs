//! Operators: csictl against servers, and what it shows and changes of nodes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    Accept, Answer, AvailableCapacity, BlockAsk, CallClass, CallName, ClaimAsk, ControllerCall,
    ExpandedVolume, ExternalSnapshot, ExternalVolume, ListAsk, Listed, Machine, NodeAsk, NodeChange,
    NodesAsk, Owed, ReleaseAsk, Validated, VolumeAsk,
};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::attach::Controller;
use crate::certificates::Purpose;
use crate::creations::{created, done, failed, is_delete, nothing_is_left};
use crate::far_end::FarEnd;
use crate::questions::answering;
use crate::site::{
    First, Node, Refusal, SOON, Site, csictl_program, eventually, hello, open, register, release_ask,
};
pub use crate::site::{operator, operator_file};

/// The end of a csictl.
#[derive(Debug)]
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Said {
    pub fn json(&self) -> Value {
        assert_eq!(self.code, Some(0), "{self:?}");
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the last line of standard error, which is JSON.
    pub fn error(&self) -> Value {
        assert_eq!(self.code, Some(1), "{self:?}");
        let last = self.err.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Runs a command of csictl to its end.
pub async fn csictl(file: &Path, words: &str) -> Said {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(csictl_program()).env("CSID_OPERATOR", file);
    command.args(words.split(' ')).stdin(Stdio::null());
    let output = tokio::time::timeout(Duration::from_secs(60), command.output()).await;
    let output = output.unwrap_or_else(|_| panic!("csictl {words} does not end")).unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Returns the kind of a refused call.
fn kind<T: std::fmt::Debug>(result: Result<T, tonic::Status>) -> String {
    Refusal::of(&result.unwrap_err()).kind
}

/// Returns another machine of the same node.
fn replaced(node: &str) -> csi_proto::cluster::v1::Hello {
    let of_node = hello(node);
    csi_proto::cluster::v1::Hello {
        machine_id: "new-machine".into(),
        journal_id: "new-journal".into(),
        boot: "new-boot".into(),
        ..of_node
    }
}

#[tokio::test]
async fn nodes_and_servers_are_listed_by_csictl() {
    let site = Site::start(2).await;
    let file = operator(&site, "reads");
    let said = csictl(&file, "node list").await;
    assert_eq!((said.code, said.err.as_str()), (Some(0), "No nodes.\n"));
    assert_eq!(csictl(&file, "node list --json").await.json(), json!([]));

    site.register("data", "single-node-writer").await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let _session = n1.join(1).await;
    n1.claim(1, "data").await.unwrap();
    let session = n2.join(0).await;
    eventually("n2 has reported its plugin", async || {
        csictl(&file, "node show n2 --json").await.json()["plugins"] != json!([])
    })
    .await;
    drop(session);
    eventually("n2 is away", async || {
        csictl(&file, "node show n2 --json").await.json()["sessions"] == json!([])
    })
    .await;
    let said = csictl(&file, "node list").await;
    let lines: Vec<Vec<&str>> = said.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NODE", "STATE", "SERVER", "SINCE", "CLAIMS", "PLUGINS", "NOTE"]);
    assert_eq!(
        (&lines[1][..3], &lines[1][4..]),
        (&["n1", "ready", &*site.addresses[1]][..], &["1", "p", "-"][..])
    );
    assert_eq!(lines[2], ["n2", "ready", "-", "-", "0", "p", "-"]);
    assert!(said.err.is_empty(), "{said:?}");

    let list = csictl(&file, "node list --json").await.json();
    let shown = csictl(&file, "node show n1 --json").await.json();
    assert_eq!((&list[0], list.as_array().map(Vec::len)), (&shown, Some(2)));
    assert_eq!(shown["machine-id"], "machine of n1");
    assert_eq!(shown["boot"], "boot 1 of n1");
    assert_eq!(shown["plugins"], json!([{ "plugin": "p", "attaches": false, "node-id": null }]));
    assert_eq!((&shown["other"], &shown["block"], &shown["claims"]), (&Value::Null, &Value::Null, &json!(1)));
    assert!(shown["sessions"][0]["since-usec"].as_u64().unwrap() > 1_700_000_000_000_000);

    let rows = csictl(&file, "server list --json").await.json();
    assert_eq!(
        (&rows["cluster"], &rows["schema"], &rows["generation"]),
        (&json!("prod"), &json!(2), &json!(1))
    );
    let names: Vec<&str> =
        rows["servers"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["s0", "s1"]);
    assert_eq!(rows["servers"][1]["address"], site.addresses[1]);
    assert_eq!(rows["answered-by"], rows["servers"][0]["id"]);
    eventually("both servers have been seen to beat", async || {
        let rows = csictl(&file, "server list --json").await.json();
        let beat = |n: usize| rows["servers"][n]["beat-usec"].as_u64().is_some_and(|usec| usec < 10_000_000);
        beat(0) && beat(1)
    })
    .await;
    let said = csictl(&file, "server list").await;
    assert!(said.out.contains("s1") && said.err.is_empty(), "{said:?}");
}

/// A page has 100 nodes.
#[tokio::test]
async fn volumes_and_claims_are_csictls_for_an_operator() {
    let site = Site::start(2).await;
    let file = operator(&site, "all");
    let text = "--operator volume register default data --plugin p --external-id ext-data --access-mode single-node-writer --context share=hunter2";
    let said = csictl(&file, text).await;
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), "", ""));
    assert_eq!(csictl(&file, text).await.code, Some(0), "the same again");
    let said = csictl(&file, "--operator volume register default data --plugin q --external-id x --access-mode single-node-writer --json").await;
    assert_eq!(said.error()["error"], "AlreadyExists", "{said:?}");
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let mut session = n1.join(0).await;
    let _other = n2.join(1).await;
    let id = n1.claim(0, "data").await.unwrap();

    let said = csictl(&file, "--operator volume list").await;
    let lines: Vec<Vec<&str>> = said.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines[1],
        ["default", "data", "p", "-", "-", "single-node-writer", "n1/web", "-", "-"],
        "{said:?}"
    );
    let rows = csictl(&file, "--operator volume list --node n1 --json").await.json();
    assert_eq!((&rows[0]["write-claims"], &rows[0]["owner"]), (&json!(["n1/web"]), &json!("operator/all")));
    assert_eq!(csictl(&file, "--operator volume list --node n2 --json").await.json(), json!([]));
    let row = csictl(&file, "--operator volume show default data --json").await.json();
    assert_eq!(
        (&row["id"], &row["standing"], &row["context"]),
        (&json!("data"), &json!("registered"), &json!({}))
    );
    assert_eq!((&row["queue"], &row["queue-count"]), (&json!([]), &json!(0)));
    let waits = ClaimAsk { queue_ms: 60_000, answer_ms: 1, ..n2.ask("data", "job") };
    eventually("the claim waits", async || {
        n2.client(1).claim(waits.clone()).await.is_err_and(|status| status.message().contains("it waits"))
    })
    .await;
    let row = csictl(&file, "--operator volume show default data --json").await.json();
    let entry = &row["queue"][0];
    assert_eq!(
        (&row["queue-count"], &entry["node"], &entry["consumer"], &entry["mode"]),
        (&json!(1), &json!("n2"), &json!("job"), &json!("write"))
    );
    let said = csictl(&file, "--operator volume show default data").await;
    let last: Vec<&str> = said.out.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(last[..3], ["n2/job", "write", "single-node-writer"], "{said:?}");
    let withdrawn =
        CallName { call: waits.call, namespace: waits.namespace, volume: waits.volume, boot: waits.boot };
    n2.client(0).withdraw(withdrawn).await.unwrap();
    let said = csictl(&file, "--operator volume show default none").await;
    assert!(said.code == Some(1) && said.err.contains("csictl --operator volume list"), "{said:?}");

    let said = csictl(&file, "--operator claims").await;
    let lines: Vec<Vec<&str>> = said.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..4], ["NAMESPACE", "VOLUME", "CONSUMER", "NODE"]);
    assert_eq!(lines[1][..5], ["default", "data", "web", "n1", "p"], "{said:?}");
    let rows = csictl(&file, "--operator claims --node n1 --json").await.json();
    assert_eq!(
        (&rows[0]["uid"], &rows[0]["state"], &rows[0]["plugin"]),
        (&json!(1000), &json!("taken"), &json!("p"))
    );

    let said = csictl(&file, "--operator volume deregister default data").await;
    assert!(said.code == Some(1) && said.err.contains("Held by: n1/web"), "{said:?}");
    let said = csictl(&file, "--operator release default data web --deadline 1s --json").await;
    let error = said.error();
    assert_eq!((&error["error"], &error["details"]["holders"]), (&json!("TimedOut"), &json!(["n1/web"])));
    let asked = session.next().await.unwrap();
    assert!(matches!(asked, Some(csi_proto::cluster::v1::to_node::Is::Changed(_))), "{asked:?}");
    n1.detached(0, "data", &id).await.unwrap();
    assert_eq!(csictl(&file, "--operator release default data web").await.code, Some(0), "it has ended");

    n2.claim(1, "data").await.unwrap();
    let said = csictl(&file, "--operator release default data web --force").await;
    assert!(said.code == Some(1) && said.err.contains("--yes default/data"), "{said:?}");
    let said = csictl(&file, "--operator release default data web --force --yes default/data").await;
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    assert_eq!(csictl(&file, "--operator claims --json").await.json(), json!([]));
    assert_eq!(csictl(&file, "--operator volume deregister default data --json").await.json(), json!({}));
    assert_eq!(csictl(&file, "--operator volume list --json").await.json(), json!([]));

    // The hint names the grant that an operator lacks.
    let reads = operator(&site, "reads");
    let said = csictl(&reads, text).await;
    assert!(said.code == Some(1) && said.err.contains("`register`"), "{said:?}");
    let said = csictl(&reads, "--operator release default data web --node n1").await;
    assert!(said.code == Some(1) && said.err.contains("`release-others`"), "{said:?}");
}

#[tokio::test]
async fn list_without_an_unreadable_volume_warns() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    site.raw().await.put("/csid/v1/vol/default/bad/reg", "\"hunter2\"").await;
    let file = operator(&site, "reads");
    eventually("the damage is said", async || {
        let said = csictl(&file, "--operator volume list").await;
        assert!(
            said.code == Some(0) && said.out.contains("data") && !said.err.contains("hunter2"),
            "{said:?}"
        );
        said.err.contains("are left out: default/bad\n")
    })
    .await;
    site.servers[0].kill();
    let said = csictl(&file, "--operator claims --json").await;
    assert!(said.code == Some(0) && said.err.contains("was not reached"), "{said:?}");
}

#[tokio::test]
async fn list_of_many_nodes_has_each_once() {
    let site = Site::start(1).await;
    let mut raw = site.raw().await;
    let row = json!({ "journal-id": "j", "machine-id": "m", "boot": "b", "state": "ready" }).to_string();
    for n in 0..250 {
        raw.put(&format!("/csid/v1/node/m{n:03}%2Eexample"), &row).await;
    }
    let list = csictl(&operator(&site, "reads"), "node list --json").await.json();
    let names: Vec<&str> = list.as_array().unwrap().iter().map(|row| row["node"].as_str().unwrap()).collect();
    let due: Vec<String> = (0..250).map(|n| format!("m{n:03}.example")).collect();
    assert_eq!(names, due);
    let mut pages =
        site.admin(0, "reads").nodes(NodesAsk { after: due[199].clone() }).await.unwrap().into_inner();
    let page = pages.message().await.unwrap().unwrap();
    assert_eq!((page.nodes.len(), page.nodes[0].node.as_str()), (50, "m200.example"));
    assert!(pages.message().await.unwrap().is_none());
}

#[tokio::test]
async fn blocked_node_ends_its_session_and_keeps_claims() {
    let site = Site::start(2).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let (node, other) = (site.node("n-trusted"), site.node("n2"));
    let (mut session, _other) = (node.join(1).await, other.join(0).await);
    let claim = node.claim(1, "data").await.unwrap();
    let file = operator(&site, "all");

    // The call goes to another server than the node's.
    let begun = Instant::now();
    let said = csictl(&file, "node block n-trusted --reason stolen").await;
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), "", ""));
    refuses_all(&site, &node, &claim).await;
    let ended = session.next().await.unwrap_err();
    assert!(ended.kind == "Busy" && ended.message.contains("blocked"), "{ended:?}");
    assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
    refuses_all(&site, &node, &claim).await;
    let (first, _) = node.say_hello(0).await.unwrap();
    assert!(matches!(&first, First::Refused(of) if of == "blocked"), "{first:?}");

    let refused = other.claim(0, "data").await.unwrap_err();
    assert_eq!(refused.holders, ["n-trusted/web"]);
    let shown = csictl(&file, "node show n-trusted --json").await.json();
    assert_eq!((&shown["state"], &shown["claims"]), (&json!("blocked"), &json!(1)));
    assert_eq!(
        (&shown["block"]["by"], &shown["block"]["reason"]),
        (&json!("operator/all"), &json!("stolen"))
    );
    let said = csictl(&file, "node list").await;
    assert!(said.out.contains("blocked by operator/all stolen"), "{said:?}");

    let said = csictl(&file, "node accept n-trusted").await;
    assert!(said.code == Some(1) && said.err.contains("blocked by operator/all (stolen)"), "{said:?}");
    // A second block changes nothing, and an acceptance ends it.
    let again = csictl(&file, "node block n-trusted --reason again --json").await.json();
    assert_eq!((&again["block"], &again["revision"]), (&shown["block"], &shown["revision"]));
    let accepted = csictl(&file, "node accept n-trusted --unblock --json").await.json();
    assert_eq!((&accepted["state"], &accepted["block"]), (&json!("ready"), &Value::Null));
    let _session = node.join(0).await;
    assert_eq!(node.claim(0, "data").await, Ok(claim.clone()), "its claim has stayed");
    node.detached(0, "data", &claim).await.unwrap();
    other.claim(0, "data").await.unwrap();
}

/// Expects that a blocked node's calls are refused at both servers, those that its grants allow, too.
async fn refuses_all(site: &Site, node: &Node, claim: &str) {
    for server in [0, 1] {
        let mut client = node.client(server);
        // Without its session the node is refused for that.
        let refused = kind(client.claim(node.ask("data", "web")).await);
        assert!(["Busy", "Unavailable"].contains(&refused.as_str()), "{refused}");
        let for_another = ClaimAsk { node: "n2".into(), ..node.ask("more", "web") };
        let refused = kind(client.claim(for_another).await);
        assert!(["Busy", "Unavailable"].contains(&refused.as_str()), "{refused}");
        assert_eq!(node.detached(server, "data", claim).await.unwrap_err().kind, "Busy");
        let volume = VolumeAsk { namespace: String::new(), volume: "data".into(), ..VolumeAsk::default() };
        assert_eq!(kind(client.volume(volume).await), "Busy");
        let mut list = client.volumes(ListAsk::default()).await.unwrap().into_inner();
        assert_eq!(kind(list.message().await), "Busy");
        assert_eq!(kind(client.change(register("new", "single-node-writer")).await), "Busy");
        let release = release_ask("data", "n-trusted");
        for force in [false, true] {
            assert_eq!(kind(client.release(ReleaseAsk { force, ..release.clone() }).await), "Busy");
        }
    }
    let mut raw = site.raw().await;
    assert_eq!(raw.below("/csid/v1/vol/default/data/claim/").await.len(), 1);
    for volume in ["new", "more"] {
        assert!(raw.below(&format!("/csid/v1/vol/default/{volume}/claim/")).await.is_empty());
    }
    assert!(raw.below("/csid/v1/vol/default/new/").await.is_empty());
}

#[tokio::test]
async fn session_ends_at_once_at_the_server_that_blocks() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    let mut session = node.join(0).await;
    let block = NodeChange { node: "n1".into(), change: Some(Change::Block(BlockAsk::default())) };
    let row = site.admin(0, "all").set_node(block).await.unwrap().into_inner();
    assert_eq!(row.state, "blocked");
    let begun = Instant::now();
    assert_eq!(session.next().await.unwrap_err().kind, "Busy");
    assert!(begun.elapsed() < Duration::from_secs(1), "it took {:?}", begun.elapsed());
}

#[tokio::test]
async fn other_machine_joins_when_it_is_accepted() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let (node, file) = (site.node("n1"), operator(&site, "all"));
    let session = node.join(0).await;
    let claim = node.claim(0, "data").await.unwrap();
    let asks = async |server: usize| open(&mut node.client(server), replaced("n1")).await.unwrap().0;
    let first = asks(1).await;
    assert!(matches!(&first, First::Refused(of) if of == "another-machine"), "{first:?}");
    let shown = csictl(&file, "node show n1 --json").await.json();
    assert_eq!(
        (&shown["machine-id"], &shown["other"]["machine-id"]),
        (&json!("machine of n1"), &json!("new-machine"))
    );
    let said = csictl(&file, "node list").await;
    assert!(said.out.contains("another machine asks to join: new-machine"), "{said:?}");
    // The same Hello is no new write.
    asks(1).await;
    assert_eq!(csictl(&file, "node show n1 --json").await.json()["revision"], shown["revision"]);

    // Without a terminal nobody is asked.
    let said = csictl(&file, "node accept n1").await;
    assert!(said.code == Some(1) && said.err.contains("--machine-id new-machine"), "{said:?}");
    let said = csictl(&file, "node accept n1 --machine-id another").await;
    assert!(said.code == Some(1) && said.err.contains("nothing was done"), "{said:?}");
    let accept = "node accept n1 --machine-id new-machine --json";
    let error = csictl(&file, accept).await.error();
    assert_eq!(error["error"], "Busy", "{error}");
    assert!(error["message"].as_str().unwrap().contains("has a session"), "{error}");

    drop(session);
    eventually("n1 is away", async || {
        csictl(&file, "node show n1 --json").await.json()["sessions"] == json!([])
    })
    .await;
    let accepted = csictl(&file, accept).await.json();
    assert_eq!((&accepted["machine-id"], &accepted["other"]), (&json!("new-machine"), &Value::Null));
    assert_eq!((&accepted["claims"], &accepted["plugins"]), (&json!(1), &json!([])));
    assert_eq!(csictl(&file, accept).await.json(), accepted, "the same again changes nothing");
    // The earlier machine is another one now.
    let refused = node.detached(0, "data", &claim).await.unwrap_err();
    assert!(refused.message.contains("another boot"), "{refused:?}");
    let (first, _) = node.say_hello(0).await.unwrap();
    assert!(matches!(&first, First::Refused(of) if of == "another-machine"), "{first:?}");
    let (first, _session) = open(&mut node.client(1), replaced("n1")).await.unwrap();
    assert!(matches!(first, First::Welcome(_)), "{first:?}");
    let owed = Owed { boot: "new-boot".into(), ..node.owed("data", &claim) };
    node.client(1).detached(owed).await.unwrap();
}

#[tokio::test]
async fn machine_is_accepted_by_its_id_on_a_terminal() {
    let site = Site::start(1).await;
    let (node, file) = (site.node("n1"), operator(&site, "all"));
    drop(node.join(0).await);
    open(&mut node.client(0), replaced("n1")).await.unwrap();
    eventually("n1 is away", async || {
        csictl(&file, "node show n1 --json").await.json()["sessions"] == json!([])
    })
    .await;
    let typed = async |text: &str| {
        let csictl = format!("{} node accept n1", csictl_program().display());
        let mut command = Command::new("script");
        command.args(["--quiet", "--return", "--command", &csictl, "/dev/null"]).env("CSID_OPERATOR", &file);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().unwrap();
        let mut stdin = process.stdin.take().unwrap();
        stdin.write_all(text.as_bytes()).await.unwrap();
        let output = tokio::time::timeout(SOON, process.wait_with_output()).await.unwrap().unwrap();
        drop(stdin);
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, said) = typed("n1\n").await;
    assert!(code == Some(1) && said.contains("nothing was done"), "{said}");
    for text in [
        "machine of n1 with the journal journal of n1 until now",
        "the machine new-machine with the journal",
        "Type new-machine to continue",
    ] {
        assert!(said.contains(text), "{text}: {said}");
    }
    assert_eq!(csictl(&file, "node show n1 --json").await.json()["machine-id"], "machine of n1");
    let (code, said) = typed("new-machine\n").await;
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(csictl(&file, "node show n1 --json").await.json()["machine-id"], "new-machine");
}

/// A thief of a node's key asks with one machine after the other.
#[tokio::test]
async fn hellos_of_other_machines_are_few_writes() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    drop(node.join(0).await);
    let mut raw = site.raw().await;
    let before = raw.below("/csid/v1/node/n1").await.remove(0).version;
    for n in 0..20 {
        let mut hello = replaced("n1");
        hello.machine_id = format!("m{n}");
        let (first, _) = open(&mut node.client(0), hello).await.unwrap();
        assert!(matches!(&first, First::Refused(of) if of == "another-machine"), "{first:?}");
    }
    let after = raw.below("/csid/v1/node/n1").await.remove(0).version;
    assert!(after - before <= 2, "{} writes", after - before);
    // What an operator has not seen is not accepted.
    let accept = |machine: &str| NodeChange {
        node: "n1".into(),
        change: Some(Change::Accept(Accept {
            machine_id: machine.into(),
            journal_id: "new-journal".into(),
            ..Accept::default()
        })),
    };
    assert_eq!(kind(site.admin(0, "all").set_node(accept("m19")).await), "NotFound");
}

#[tokio::test]
async fn two_operators_change_a_node_one_after_the_other() {
    let site = Site::start(2).await;
    drop(site.node("n1").join(0).await);
    let (mut all, mut second) = (site.admin(0, "all"), site.admin(1, "second"));
    let show = NodeAsk { node: "n1".into() };
    let block = |reason: &str| NodeChange {
        node: "n1".into(),
        change: Some(Change::Block(BlockAsk { reason: reason.into() })),
    };
    let accept = |machine: Option<Machine>, revision| {
        let Machine { machine_id, journal_id, .. } = machine.unwrap();
        let accept = Accept { machine_id, journal_id, revision, ..Accept::default() };
        NodeChange { node: "n1".into(), change: Some(Change::Accept(accept)) }
    };
    for _ in 0..20 {
        let (a, b) = tokio::join!(all.set_node(block("a")), second.set_node(block("b")));
        let (a, b) = (a.unwrap().into_inner(), b.unwrap().into_inner());
        // One of them has blocked the node, and both see who did.
        assert_eq!((&a.block, a.revision), (&b.block, b.revision));
        let by = a.block.map(|block| (block.by, block.reason)).unwrap();
        let due = [("operator/all", "a"), ("operator/second", "b")];
        assert!(due.contains(&(by.0.as_str(), by.1.as_str())), "{by:?}");
        let (a, b) = tokio::join!(
            all.set_node(accept(a.machine.clone(), a.revision)),
            second.set_node(accept(b.machine, b.revision))
        );
        let (a, b) = (a.unwrap().into_inner(), b.unwrap().into_inner());
        assert_eq!((a.state.as_str(), b.state.as_str()), ("ready", "ready"));
    }
    // One blocks while the other looks at the node. The acceptance does not undo a block that its operator has not seen.
    all.set_node(block("first")).await.unwrap();
    let seen = second.node(show.clone()).await.unwrap().into_inner();
    all.set_node(accept(seen.machine.clone(), seen.revision)).await.unwrap();
    all.set_node(block("again")).await.unwrap();
    let refused = second.set_node(accept(seen.machine, seen.revision)).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).kind, "Busy");
    assert_eq!(second.node(show).await.unwrap().into_inner().state, "blocked");

    // The same by commands.
    let (first, other) = (operator(&site, "all"), operator(&site, "second"));
    for words in ["node accept n1 --unblock --json", "node block n1 --json"] {
        let (a, b) = tokio::join!(csictl(&first, words), csictl(&other, words));
        for said in [a, b] {
            // An acceptance whose row the other one has changed may be refused. It is the same change.
            assert!(said.code == Some(0) || said.error()["error"] == "Busy", "{said:?}");
        }
    }
    assert_eq!(csictl(&first, "node show n1 --json").await.json()["state"], "blocked");
}

#[tokio::test]
async fn key_or_certificate_that_is_wrong_is_refused() {
    let site = Site::start(1).await;
    let [host, _] = site.addresses[0].split(':').collect::<Vec<_>>().try_into().unwrap();
    let file = operator(&site, "all");
    let key = file.with_file_name("operator.key");
    let secret = fs::read_to_string(&key).unwrap().lines().nth(1).unwrap().to_owned();
    fs::set_permissions(&key, PermissionsExt::from_mode(0o640)).unwrap();
    let said = csictl(&file, "node list").await;
    assert!(said.code == Some(1) && said.err.contains("0640"), "{said:?}");
    assert!(said.err.contains(&format!("chmod 600 {}", key.display())), "{said:?}");
    assert!(!said.err.contains(&secret), "{said:?}");
    fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    // A damaged key is not shown, either.
    let text = fs::read_to_string(&key).unwrap();
    fs::write(&key, text.replace("-----END", "----END")).unwrap();
    let said = csictl(&file, "node list").await;
    assert!(
        said.code == Some(1) && said.err.contains("operator.key") && !said.err.contains(&secret),
        "{said:?}"
    );
    fs::write(&key, text).unwrap();

    let said = csictl(&site.path("none.toml"), "node list").await;
    assert!(said.code == Some(1) && said.err.contains("none.toml cannot be read"), "{said:?}");
    let node = operator_file(&site, "node", &site.client_pair("csid://prod/node/n1"), &site.addresses);
    let said = csictl(&node, "node list").await;
    assert!(said.code == Some(1) && said.err.contains("csid://CLUSTER/operator/NAME"), "{said:?}");
    let expired = site.authority.issue("expired", "URI:csid://prod/operator/all", Purpose::Client, 0);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let expired = operator_file(&site, "expired", &expired, &site.addresses);
    let error = csictl(&expired, "node block n1 --json").await.error();
    assert_eq!(error["error"], "Unreachable", "{error}");
    assert!(error["message"].as_str().unwrap().contains("CertificateExpired"), "{error}");
    // The option comes before the environment.
    let said = csictl(&site.path("none.toml"), &format!("--operator={} node list", file.display())).await;
    assert_eq!(said.code, Some(0), "{said:?}");
    let error = csictl(&operator(&site, "local"), "node list --json").await.error();
    assert_eq!(error["error"], "NotAuthorized", "{error}");
    assert!(error["hint"].as_str().unwrap().contains("csid-server.toml"), "{error}");

    // A node's key does not pass for a server's.
    let names = format!("IP:{host},URI:csid://prod/node/n1");
    let far = FarEnd::start(&site.authority.issue("far", &names, Purpose::Both, 30));
    let far_file =
        operator_file(&site, "far", &site.client_pair("csid://prod/operator/all"), &[far.address()]);
    let error = csictl(&far_file, "node list --json").await.error();
    assert!(error["message"].as_str().unwrap().contains("is no server of the cluster"), "{error}");
    assert_eq!(far.bytes(), 0, "the far end got bytes of the operator");
    // An operator of another cluster does not ask this one's servers.
    let other = operator_file(&site, "other", &site.client_pair("csid://test/operator/all"), &site.addresses);
    let error = csictl(&other, "node list --json").await.error();
    assert!(error["message"].as_str().unwrap().contains("is no server of the cluster"), "{error}");
}

#[tokio::test]
async fn wrong_arguments_are_refused_before_etcd() {
    let site = Site::start(1).await;
    let file = operator(&site, "all");
    for (words, due) in [
        ("node show N1 --json", "InvalidArgument"),
        ("node show n1 --json", "NotFound"),
        ("node accept n1 --json", "NotFound"),
        ("node block n1 --json", "NotFound"),
        ("node block a/b --json", "InvalidArgument"),
        (&format!("node block n1 --reason={} --json", "a".repeat(257)), "InvalidArgument"),
    ] {
        let error = csictl(&file, words).await.error();
        assert_eq!(error["error"], due, "{words}: {error}");
    }
    let said = csictl(&file, "--operator status").await;
    assert!(said.code == Some(2) && said.err.contains("csictl node"), "{said:?}");
}

/// docs/cluster-install.md has the commands for an authority and an operator's certificate, and the operator's file.
#[tokio::test]
async fn operator_made_as_the_document_says_is_served() {
    let site = Site::start(1).await;
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cluster-install.md");
    let document = fs::read_to_string(document).unwrap();
    let block = |before: &str, language: &str| {
        let rest = document.split_once(before).expect(before).1;
        let rest = rest.split_once(&format!("```{language}\n")).unwrap().1;
        rest.split_once("```").unwrap().0.to_owned()
    };
    let (recipe, file) = (block("## Certificates", "sh"), block("## Operators", "toml"));
    let directory = site.path("anna");
    fs::create_dir(&directory).unwrap();
    let run = async |script: &str| {
        let output = Command::new("sh").args(["-ec", script]).current_dir(&directory).output().await.unwrap();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    };
    run(&recipe).await;
    let rest = document.split_once(&recipe).unwrap().1;
    let others = rest.split_once("```sh\n").unwrap().1.split_once("```").unwrap().0;
    run(others).await;
    run("openssl verify -CAfile ca.pem -purpose sslclient anna.pem db-1.pem && openssl verify -CAfile ca.pem -purpose sslserver s1.pem").await;
    run("openssl verify -CAfile etcd-ca.pem -purpose sslclient etcd.pem etcd-1.pem && openssl verify -CAfile etcd-ca.pem -purpose sslserver etcd-1.pem").await;
    // The servers of this test have an authority already. It signs the same request.
    fs::copy(site.authority.certificate(), directory.join("ca.pem")).unwrap();
    fs::copy(site.authority.key(), directory.join("ca.key")).unwrap();
    run(recipe.lines().find(|line| line.starts_with("openssl x509")).unwrap()).await;
    let path = directory.join("operator.toml");
    let servers = file.lines().next().unwrap();
    fs::write(&path, file.replace(servers, &format!("servers = {:?}", site.addresses))).unwrap();
    let said = csictl(&path, "server list").await;
    assert!(said.code == Some(0) && said.out.contains("s0"), "{said:?}");
}

/// Runs a command, while the controller answers its calls one after the other.
async fn answered(
    (file, controller): (&Path, &mut Controller),
    words: &str,
    answers: Vec<How>,
) -> (Said, Vec<ControllerCall>) {
    let answered = async {
        let mut calls = Vec::new();
        for answer in answers {
            let call = controller.called().await;
            controller.end(&call, answer).await;
            calls.push(call);
        }
        calls
    };
    tokio::join!(csictl(file, words), answered)
}

#[tokio::test]
async fn volumes_are_made_and_deleted_by_csictl() {
    let site = Site::start(1).await;
    let file = operator(&site, "all");
    let mut controller = answering(&site, 0).await;
    let quiet =
        |said: &Said| assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), "", ""));
    let answer = |of: Answer| vec![How::Answer(of)];

    let text = "--operator volume create default data --plugin p --access-mode single-node-writer --capacity 4096 --capacity-max 1MiB --parameter pool=fast";
    let (said, calls) = answered((&file, &mut controller), text, vec![created("ext-data")]).await;
    quiet(&said);
    let Some(Method::Create(of)) = &calls[0].method else { panic!("{calls:?}") };
    assert_eq!((of.capacity_min, of.capacity_max, of.parameters["pool"].as_str()), (4096, 1 << 20, "fast"));
    let row = csictl(&file, &format!("{text} --json")).await.json();
    assert_eq!(
        [&row["id"], &row["external-id"], &row["owner"], &row["standing"], &row["capacity"], &row["context"]],
        [
            &json!("data"),
            &json!("ext-data"),
            &json!("operator/all"),
            &json!("registered"),
            &json!(8192),
            &json!({})
        ]
    );

    let validate = "--operator volume validate default data --access-mode single-node-writer";
    let validated = |confirmed, message: &str| {
        answer(Answer {
            validated: Some(Validated { confirmed, message: message.into() }),
            ..Answer::default()
        })
    };
    let (said, calls) = answered((&file, &mut controller), validate, validated(true, "")).await;
    quiet(&said);
    assert!(matches!(calls[0].method, Some(Method::Validate(_))), "{calls:?}");
    let (said, _) = answered((&file, &mut controller), validate, validated(false, "")).await;
    assert_eq!((said.code, said.err.as_str()), (Some(1), ""), "{said:?}");
    assert!(said.out.starts_with("not confirmed: "), "{said:?}");
    let json = format!("{validate} --json");
    let (said, _) = answered((&file, &mut controller), &json, validated(true, "")).await;
    assert_eq!(said.json(), json!({ "confirmed": true, "message": "" }));
    let failed = vec![failed(CallClass::Refused, Some(13))];
    let (said, _) = answered((&file, &mut controller), &json, failed).await;
    assert_eq!((said.code, said.out.as_str()), (Some(3), ""), "{said:?}");
    let error: Value = serde_json::from_str(said.err.lines().last().unwrap()).unwrap();
    assert_eq!(error["error"], "PluginError");

    let expanded = |capacity| {
        let expanded = ExpandedVolume { capacity, node_expansion_required: false };
        answer(Answer { expanded: Some(expanded), ..Answer::default() })
    };
    let expand = "--operator volume expand default data 16KiB --limit 1MiB";
    let (said, calls) = answered((&file, &mut controller), expand, expanded(16_384)).await;
    quiet(&said);
    let Some(Method::Expand(of)) = &calls[0].method else { panic!("{calls:?}") };
    assert_eq!((of.required, of.limit), (16_384, 1 << 20));
    let json = "--operator volume expand default data 32KiB --json";
    let (said, _) = answered((&file, &mut controller), json, expanded(32_768)).await;
    assert_eq!(said.json()["capacity"], 32_768);

    let row = || ExternalSnapshot {
        id: "snap-1".into(),
        external_id: "ext-data".into(),
        size: 4096,
        created_usec: 7,
        ready: true,
    };
    let made = || answer(Answer { snapshot: Some(row()), ..Answer::default() });
    let snapshot = "--operator volume snapshot default data monday --parameter tier=cold";
    let (said, calls) = answered((&file, &mut controller), snapshot, made()).await;
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), "snap-1\n", ""));
    let Some(Method::Snapshot(of)) = &calls[0].method else { panic!("{calls:?}") };
    assert_eq!((of.name.as_str(), of.parameters["tier"].as_str()), ("monday", "cold"));
    let due = json!({ "id": "snap-1", "external-id": "ext-data", "size": 4096, "created": 7, "ready": true });
    let (said, _) = answered((&file, &mut controller), &format!("{snapshot} --json"), made()).await;
    assert_eq!(said.json(), due);

    let listed = |volumes, snapshots| {
        let listed = Listed { volumes, snapshots, next: String::new() };
        answer(Answer { listed: Some(listed), ..Answer::default() })
    };
    let snapshots = "--operator snapshots p --external-id ext-data";
    let (said, calls) = answered((&file, &mut controller), snapshots, listed(vec![], vec![row()])).await;
    let Some(Method::List(of)) = &calls[0].method else { panic!("{calls:?}") };
    assert!(of.snapshots && of.external_id == "ext-data", "{of:?}");
    let lines: Vec<Vec<&str>> = said.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((lines[0][0], &lines[1][..2]), ("SNAPSHOT", &["snap-1", "ext-data"][..]), "{said:?}");
    let json = format!("{snapshots} --json");
    let (said, _) = answered((&file, &mut controller), &json, listed(vec![], vec![row()])).await;
    assert_eq!(said.json(), json!([due]));
    let (said, _) = answered((&file, &mut controller), snapshots, listed(vec![], vec![])).await;
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), "", "No snapshots.\n"));

    let volume = ExternalVolume {
        external_id: "ext-data".into(),
        capacity: 32_768,
        published_node_ids: vec!["id of n1".into()],
        abnormal: false,
    };
    let volumes = "--operator plugin volumes p";
    let (said, _) = answered((&file, &mut controller), volumes, listed(vec![volume.clone()], vec![])).await;
    assert!(said.code == Some(0) && said.out.lines().nth(1).unwrap().starts_with("ext-data "), "{said:?}");
    let json = format!("{volumes} --json");
    let (said, _) = answered((&file, &mut controller), &json, listed(vec![volume], vec![])).await;
    let rows = said.json();
    assert_eq!(
        [&rows[0]["external-id"], &rows[0]["capacity"], &rows[0]["published-node-ids"]],
        [&json!("ext-data"), &json!(32_768), &json!(["id of n1"])]
    );
    let capacity = "--operator plugin capacity p --access-mode single-node-writer --topology zone=a";
    let available = || {
        let available = Some(AvailableCapacity { bytes: 1 << 40 });
        answer(Answer { available, ..Answer::default() })
    };
    let (said, calls) = answered((&file, &mut controller), capacity, available()).await;
    assert!(said.code == Some(0) && said.out.contains("TiB"), "{said:?}");
    let Some(Method::Capacity(of)) = &calls[0].method else { panic!("{calls:?}") };
    assert_eq!(of.topology.as_ref().unwrap().segments["zone"], "a");
    let (said, _) = answered((&file, &mut controller), &format!("{capacity} --json"), available()).await;
    assert_eq!(said.json(), json!({ "available": 1_u64 << 40 }));

    // Operators without the grant are refused before any plugin is called.
    let [delete_snapshot, delete] =
        ["--operator plugin delete-snapshot p snap-1", "--operator volume delete default data"];
    let [sure_snapshot, sure] =
        [format!("{delete_snapshot} --yes snap-1"), format!("{delete} --yes default/data")];
    let changes = [text, validate, expand, snapshot, sure_snapshot.as_str(), sure.as_str()];
    let grants = ["create", "register", "expand", "snapshot", "snapshot", "delete"];
    let reads = operator(&site, "reads");
    for (words, grant) in changes.into_iter().zip(grants) {
        let said = csictl(&reads, words).await;
        // There is no answer to the question.
        let code = if words == validate { 3 } else { 1 };
        assert!(
            said.code == Some(code) && said.err.contains(&format!("no grant for {grant}")),
            "{words}: {said:?}"
        );
        assert_eq!(said.out, "", "{words}");
    }
    let local = operator(&site, "local");
    for words in [snapshots, volumes, capacity] {
        let said = csictl(&local, words).await;
        assert!(said.code == Some(1) && said.err.contains("`read`"), "{words}: {said:?}");
        assert_eq!(csictl(&local, &format!("{words} --json")).await.error()["error"], "NotAuthorized");
    }
    assert!(
        !controller.is_called(Duration::from_millis(300)).await,
        "a plugin was called for a refused operator"
    );

    // What cannot be undone asks once more.
    for (words, name) in [(delete_snapshot, "--yes snap-1"), (delete, "--yes default/data")] {
        let said = csictl(&file, words).await;
        assert!(said.code == Some(1) && said.err.contains(name), "{words}: {said:?}");
    }
    let answers = || [listed(vec![], vec![row()]), vec![done()]].concat();
    let (said, calls) = answered((&file, &mut controller), &sure_snapshot, answers()).await;
    quiet(&said);
    let Some(Method::DeleteSnapshot(of)) = &calls[1].method else { panic!("{calls:?}") };
    assert_eq!(of.snapshot, "snap-1");
    let json = format!("{sure_snapshot} --json");
    let (said, _) = answered((&file, &mut controller), &json, listed(vec![], vec![])).await;
    assert_eq!(said.json(), json!({}), "it is deleted already");
    let (said, calls) = answered((&file, &mut controller), &sure, vec![done()]).await;
    quiet(&said);
    assert!(is_delete(&calls[0]), "{calls:?}");
    assert_eq!(csictl(&file, &format!("{sure} --json")).await.json(), json!({}), "it is deleted already");
    nothing_is_left(&site).await;
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}
