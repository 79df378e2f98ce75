//! The table of calls and identities: each call that exists, by each kind of caller. What no grant allows is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use csi_proto::cluster::v1::admin_client::AdminClient;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{
    Accept, AttachAsk, AuditAsk, BlockAsk, CallName, ChangeAsk, CreateAsk, DeleteAsk, DeleteSnapshotAsk,
    Deregister, DetachAsk, DrainAsk, ExpandAsk, FenceAsk, ForgetAsk, HeldClaims, InventoryAsk, ListAsk,
    ListExternal, MeasureCapacity, NodeAsk, NodeChange, NodeExpanded, NodesAsk, OwnAsk, ReleaseAsk,
    RestoredAsk, ResumeAsk, ServersAsk, SnapshotAsk, StatusAsk, UndrainAsk, UpgradeAsk, ValidateAsk,
    VolumeAsk, inventory_ask,
};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Response, Status, Streaming};

use crate::certificates::{Authority, Pair, Purpose};
use crate::descriptors;
use crate::fence::{set, show};
use crate::site::{First, Site, ask, hello, open, owed, register};

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Became {
    /// It was done.
    Done,
    /// It passed the grants, and the volume, node or claim decided.
    Decided,
    Denied,
    /// The server has answered a Hello with Refused.
    Refused,
    /// There was no connection.
    NoConnection,
}

use Became::{Decided, Denied, Done, NoConnection, Refused};

fn became<T>(result: Result<T, Status>) -> Became {
    match result {
        Ok(_) => Done,
        Err(status) => match (status.code(), status.metadata().contains_key("csid-failure-bin")) {
            (Code::PermissionDenied, true) => Denied,
            (_, true) => Decided,
            (Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal, false) => NoConnection,
            _ => panic!("{status:?}"),
        },
    }
}

/// Returns what became of a call that is answered in parts, by its first part.
async fn begun<T>(answers: Result<Response<Streaming<T>>, Status>) -> Became {
    match answers {
        Ok(answers) => became(answers.into_inner().message().await),
        Err(status) => became::<()>(Err(status)),
    }
}

/// Makes each call for the volume `data` of a namespace. The calls about nodes and servers are of no namespace.
async fn calls(channel: &Channel, node: &str, namespace: &str) -> BTreeMap<&'static str, Became> {
    let mut client = ClusterClient::new(channel.clone());
    let name = || (namespace.to_owned(), "data".to_owned());
    let mut found = BTreeMap::new();
    found.insert(
        "session",
        match open(&mut client, hello(node)).await {
            Ok((First::Refused(_), _)) => Refused,
            joined => became(joined),
        },
    );
    let mut claim = ask("data", "c");
    claim.namespace = namespace.into();
    found.insert("claim", became(client.claim(claim.clone()).await));
    claim.node = "n9".into();
    found.insert("claim for another", became(client.claim(claim).await));
    let mut detached = owed("data", "an id of no claim");
    detached.namespace = namespace.into();
    found.insert("detached", became(client.detached(detached).await));
    let (of, volume) = name();
    let boot = hello(node).boot;
    let hold = HeldClaims { boot: boot.clone(), ..HeldClaims::default() };
    let expanded = NodeExpanded { namespace: of, volume, required: 1, limit: 0, boot };
    found.insert("hold", became(client.hold(hold).await));
    found.insert("expanded", became(client.expanded(expanded).await));
    let (of, volume) = name();
    let boot = hello(node).boot;
    let withdrawn = CallName { call: "none".into(), namespace: of, volume, boot };
    found.insert("withdraw", became(client.withdraw(withdrawn).await));
    let (of, volume) = name();
    let release = ReleaseAsk {
        namespace: of,
        volume,
        node: "n9".into(),
        consumer: "nothing".into(),
        ..ReleaseAsk::default()
    };
    found.insert("release", became(client.release(release.clone()).await));
    found.insert("release by force", became(client.release(ReleaseAsk { force: true, ..release }).await));
    let mut change = register("data", "single-node-writer");
    let Some(What::Register(of)) = &mut change.what else { panic!() };
    of.namespace = namespace.into();
    of.external_id = format!("ext-{namespace}");
    found.insert("register", became(client.change(change).await));
    let (of, volume) = name();
    found.insert(
        "volume",
        became(client.volume(VolumeAsk { namespace: of, volume, ..VolumeAsk::default() }).await),
    );
    let (of, volume) = name();
    found.insert(
        "explain",
        became(client.explain(VolumeAsk { namespace: of, volume, ..VolumeAsk::default() }).await),
    );
    let list = ListAsk { namespace: namespace.into(), ..ListAsk::default() };
    found.insert("volumes", begun(client.volumes(list).await).await);
    found.insert("all volumes", begun(client.volumes(ListAsk::default()).await).await);
    let list = ListAsk { namespace: namespace.into(), ..ListAsk::default() };
    found.insert("claims", begun(client.claims(list).await).await);
    found.insert("all claims", begun(client.claims(ListAsk::default()).await).await);
    // A volume that is not there has no owner, so the grants alone decide.
    let deregister =
        Deregister { namespace: namespace.into(), volume: "nothing".into(), ..Default::default() };
    let deregister = ChangeAsk { what: Some(What::Deregister(deregister)) };
    found.insert("deregister", became(client.change(deregister).await));
    let own = OwnAsk { namespace: namespace.into(), volume: "nothing".into(), from: String::new() };
    found.insert("own", became(client.change(ChangeAsk { what: Some(What::Own(own)) }).await));
    // A creation for no use is refused after the grants.
    let create = CreateAsk { namespace: namespace.into(), volume: "nothing".into(), ..CreateAsk::default() };
    let create_from = ChangeAsk { what: Some(What::CreateFrom(create.clone())) };
    found.insert("create from a source", became(client.change(create_from).await));
    found.insert("create", became(client.change(ChangeAsk { what: Some(What::Create(create)) }).await));
    let delete = DeleteAsk { namespace: namespace.into(), volume: "nothing".into(), ..Default::default() };
    found.insert("delete", became(client.change(ChangeAsk { what: Some(What::Delete(delete)) }).await));
    let expand = ExpandAsk { namespace: namespace.into(), volume: "nothing".into(), required: 1, limit: 0 };
    found.insert("expand", became(client.change(ChangeAsk { what: Some(What::Expand(expand)) }).await));
    let attach = AttachAsk {
        namespace: namespace.into(),
        volume: "nothing".into(),
        node_id: "x".into(),
        call: "call".into(),
        ..AttachAsk::default()
    };
    found.insert("attach", became(client.change(ChangeAsk { what: Some(What::Attach(attach)) }).await));
    let detach = DetachAsk {
        namespace: namespace.into(),
        volume: "nothing".into(),
        node_id: "x".into(),
        ..DetachAsk::default()
    };
    let forget = DetachAsk { forget: true, ..detach.clone() };
    found.insert("detach", became(client.change(ChangeAsk { what: Some(What::Detach(detach)) }).await));
    found.insert(
        "forget attachment",
        became(client.change(ChangeAsk { what: Some(What::Detach(forget)) }).await),
    );
    let (of, volume) = name();
    let validate = ValidateAsk { namespace: of, volume, capabilities: Vec::new() };
    found.insert("validate", became(client.change(ChangeAsk { what: Some(What::Validate(validate)) }).await));
    let (namespace, volume, call) = (namespace.to_owned(), "nothing".to_owned(), "call".to_owned());
    let snapshot =
        SnapshotAsk { namespace, volume, name: "s".into(), call: call.clone(), ..SnapshotAsk::default() };
    found.insert("snapshot", became(client.change(ChangeAsk { what: Some(What::Snapshot(snapshot)) }).await));
    let delete = DeleteSnapshotAsk { plugin: "p".into(), snapshot: "s".into(), call };
    let delete = ChangeAsk { what: Some(What::DeleteSnapshot(delete)) };
    found.insert("delete snapshot", became(client.change(delete).await));
    let questions = [
        ("inventory", inventory_ask::What::List(ListExternal::default())),
        ("capacity", inventory_ask::What::Capacity(MeasureCapacity::default())),
    ];
    for (call, what) in questions {
        let ask = InventoryAsk { plugin: "p".into(), what: Some(what) };
        found.insert(call, became(client.inventory(ask).await));
    }
    let mut client = AdminClient::new(channel.clone());
    found.insert("nodes", begun(client.nodes(NodesAsk::default()).await).await);
    // What was denied must not say whether there is such a node.
    found.insert("node", became(client.node(NodeAsk { node: "n9".into() }).await));
    let changes = [
        (
            "accept",
            Some(Change::Accept(Accept {
                machine_id: "m".into(),
                journal_id: "j".into(),
                ..Accept::default()
            })),
        ),
        ("block", Some(Change::Block(BlockAsk::default()))),
        ("another change", None),
        ("fence", Some(Change::Fence(FenceAsk { reason: String::new(), revision: 1, by_hand: false }))),
        ("drain", Some(Change::Drain(DrainAsk {}))),
        ("undrain", Some(Change::Undrain(UndrainAsk {}))),
        ("forget", Some(Change::Forget(ForgetAsk {}))),
    ];
    for (call, change) in changes {
        found.insert(call, became(client.set_node(NodeChange { node: "n9".into(), change }).await));
    }
    // The values have this version already.
    found.insert("upgrade", became(client.upgrade(UpgradeAsk { schema: 2 }).await));
    found.insert("status", became(client.status(StatusAsk {}).await));
    // No operator has seen generation 0.
    found.insert("restored", became(client.restored(RestoredAsk { generation: 0, past: 0 }).await));
    for (call, step) in
        [("resume", Step::End), ("resume without", Step::Fence), ("resume by forgetting", Step::Forget)]
    {
        let ask = ResumeAsk { step: step.into(), node: "n9".into(), ..ResumeAsk::default() };
        found.insert(call, became(client.resume(ask).await));
    }
    found.insert("servers", became(client.servers(ServersAsk {}).await));
    // An audit goes on until it is read to its end, and there is one at a time.
    found.insert("audit", begun(client.audit(AuditAsk {}).await).await);
    found
}

const CALLS: [&str; 16] = [
    "session",
    "claim",
    "claim for another",
    "detached",
    "release",
    "release by force",
    "register",
    "volume",
    "volumes",
    "all volumes",
    "nodes",
    "node",
    "accept",
    "block",
    "another change",
    "servers",
];

/// The calls of the contract, and what `calls` has of each.
const MADE: [(&str, &[&str]); 41] = [
    ("Session", &["session"]),
    ("Claim", &["claim", "claim for another"]),
    ("Withdraw", &["withdraw"]),
    ("Detached", &["detached"]),
    ("Hold", &["hold"]),
    ("Expanded", &["expanded"]),
    ("Release", &["release", "release by force"]),
    ("Change.register", &["register"]),
    ("Change.create", &["create"]),
    ("Change.create_from", &["create from a source"]),
    ("Change.deregister", &["deregister"]),
    ("Change.own", &["own"]),
    ("Change.delete", &["delete"]),
    ("Change.expand", &["expand"]),
    ("Change.validate", &["validate"]),
    ("Change.snapshot", &["snapshot"]),
    ("Change.delete_snapshot", &["delete snapshot"]),
    ("Change.attach", &["attach"]),
    ("Change.detach", &["detach", "forget attachment"]),
    ("Volume", &["volume"]),
    ("Volumes", &["volumes", "all volumes"]),
    ("Claims", &["claims", "all claims"]),
    ("Inventory.list", &["inventory"]),
    ("Inventory.capacity", &["capacity"]),
    ("Explain", &["explain"]),
    ("Nodes", &["nodes"]),
    ("Node", &["node"]),
    ("SetNode.accept", &["accept"]),
    ("SetNode.block", &["block"]),
    ("SetNode.fence", &["fence"]),
    ("SetNode.drain", &["drain"]),
    ("SetNode.undrain", &["undrain"]),
    ("SetNode.forget", &["forget"]),
    ("Servers", &["servers"]),
    ("Audit", &["audit"]),
    ("Restored", &["restored"]),
    ("Resume.STEP_END", &["resume"]),
    ("Resume.STEP_FENCE", &["resume without"]),
    ("Resume.STEP_FORGET", &["resume by forgetting"]),
    ("Upgrade", &["upgrade"]),
    ("Status", &["status"]),
];

/// The calls about nodes and servers, of an identity that may make none of them.
const NO_ADMIN: [Became; 6] = [Denied; 6];

/// Returns what becomes of all calls: those of a namespace, and those about nodes and servers.
fn all(of_namespace: [Became; 10], admin: [Became; 6]) -> [Became; 16] {
    let mut all = [Denied; 16];
    all[..10].copy_from_slice(&of_namespace);
    all[10..].copy_from_slice(&admin);
    all
}

/// Returns what becomes of a call that no grant allows. `register`: what becomes of a registration.
fn without_grant(register: Became) -> Became {
    if register == NoConnection { NoConnection } else { Denied }
}

#[test]
fn table_of_identities_has_every_call() {
    let made: BTreeSet<_> = MADE.into_iter().map(|(call, _)| call.to_owned()).collect();
    assert_eq!(made, descriptors::calls());
}

#[tokio::test]
async fn every_call_of_every_identity_is_as_granted() {
    let site = Site::start(1).await;
    let foreign = Authority::new();
    // A registration of each namespace, by `operator/all`.
    let mut operator = site.operator(0, "all");
    for namespace in ["default", "other"] {
        let mut change = register("data", "single-node-writer");
        let Some(What::Register(of)) = &mut change.what else { panic!() };
        of.namespace = namespace.into();
        of.external_id = format!("ext-{namespace}");
        operator.change(change).await.unwrap();
    }
    let of = |uri: &str| Some(site.client_pair(uri));
    let names = |file: &str, names: &str| Some(site.authority.issue(file, names, Purpose::Client, 30));
    let expired = Some(site.authority.issue("expired", "URI:csid://prod/node/n1", Purpose::Client, 0));
    let server_only =
        Some(site.authority.issue("server-only", "URI:csid://prod/node/n1", Purpose::Server, 30));
    let both = Some(site.authority.issue("both", "URI:csid://prod/server/s7", Purpose::Both, 30));
    let others = Some(foreign.issue("n1", "URI:csid://prod/node/n1", Purpose::Client, 30));
    let none = [Denied; 16];
    let no_connection = [NoConnection; 16];
    // n9 has never joined.
    let admin = [Done, Decided, Decided, Decided, Decided, Done];
    // The calls of CALLS, in the namespace `default`; then those in `other`.
    let table = [
        (
            "node",
            of("csid://prod/node/n1"),
            all([Done, Decided, Denied, Done, Denied, Denied, Denied, Done, Done, Done], NO_ADMIN),
            all([Done, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Done], NO_ADMIN),
        ),
        (
            "node that may join alone",
            of("csid://prod/node/joins"),
            all([Done, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Denied], NO_ADMIN),
            all([Done, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Denied], NO_ADMIN),
        ),
        (
            "node without a grant",
            of("csid://prod/node/stranger"),
            all([Denied, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Denied], NO_ADMIN),
            all([Denied, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Denied], NO_ADMIN),
        ),
        (
            "node with an operator's grants",
            of("csid://prod/node/n-trusted"),
            // `operator/all` has registered the volumes.
            all([Done, Decided, Decided, Done, Done, Done, Denied, Done, Done, Done], NO_ADMIN),
            all([Done, Denied, Decided, Done, Done, Done, Denied, Done, Done, Done], NO_ADMIN),
        ),
        // The grants decide first, and then the node's row.
        (
            "blocked node",
            of("csid://prod/node/n-trusted"),
            all(
                [Refused, Decided, Decided, Decided, Decided, Decided, Decided, Decided, Decided, Decided],
                NO_ADMIN,
            ),
            all(
                [Refused, Denied, Decided, Decided, Decided, Decided, Decided, Decided, Decided, Decided],
                NO_ADMIN,
            ),
        ),
        (
            "controller's host",
            of("csid://prod/node/c1"),
            all([Done, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Denied], NO_ADMIN),
            all([Done, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Denied], NO_ADMIN),
        ),
        (
            "operator with all grants",
            of("csid://prod/operator/all"),
            // It has no node of its own to claim for, and n9 has never joined.
            all([Denied, Decided, Decided, Denied, Done, Done, Done, Done, Done, Done], admin),
            all([Denied, Decided, Decided, Denied, Done, Done, Done, Done, Done, Done], admin),
        ),
        (
            "node that creates",
            of("csid://prod/node/n-creates"),
            all([Done, Decided, Denied, Done, Denied, Denied, Denied, Done, Done, Done], NO_ADMIN),
            all([Done, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Done], NO_ADMIN),
        ),
        (
            "fenced node",
            of("csid://prod/node/n-creates"),
            all([Refused, Decided, Denied, Done, Denied, Denied, Denied, Done, Done, Done], NO_ADMIN),
            all([Refused, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Done], NO_ADMIN),
        ),
        ("operator who creates", of("csid://prod/operator/creates"), none, none),
        (
            "node that attaches",
            of("csid://prod/node/n-attaches"),
            all([Done, Decided, Denied, Done, Denied, Denied, Denied, Done, Done, Done], NO_ADMIN),
            all([Done, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied, Done], NO_ADMIN),
        ),
        (
            "operator who attaches",
            of("csid://prod/operator/attaches"),
            all([Denied, Denied, Denied, Denied, Denied, Denied, Denied, Done, Done, Done], NO_ADMIN),
            all([Denied, Denied, Denied, Denied, Denied, Denied, Denied, Denied, Denied, Done], NO_ADMIN),
        ),
        (
            "operator with one grant",
            of("csid://prod/operator/releases"),
            all([Denied, Denied, Denied, Denied, Done, Denied, Denied, Denied, Denied, Denied], NO_ADMIN),
            none,
        ),
        (
            "operator who reads",
            of("csid://prod/operator/reads"),
            all(
                [Denied, Denied, Denied, Denied, Denied, Denied, Denied, Done, Done, Done],
                [Done, Decided, Denied, Denied, Denied, Done],
            ),
            all(
                [Denied, Denied, Denied, Denied, Denied, Denied, Denied, Done, Done, Done],
                [Done, Decided, Denied, Denied, Denied, Done],
            ),
        ),
        (
            "operator with grants in one namespace",
            of("csid://prod/operator/local"),
            all([Denied, Denied, Denied, Denied, Denied, Denied, Denied, Done, Done, Done], NO_ADMIN),
            all([Denied, Denied, Denied, Denied, Denied, Denied, Denied, Denied, Denied, Done], NO_ADMIN),
        ),
        ("operator without a grant", of("csid://prod/operator/nobody"), none, none),
        ("operator called as a node", of("csid://prod/operator/n1"), none, none),
        ("server", both, none, none),
        ("node of another cluster", of("csid://test/node/n1"), none, none),
        ("operator of another cluster", of("csid://test/operator/all"), none, none),
        ("two names", names("two", "URI:csid://prod/node/n1,URI:csid://prod/operator/all"), none, none),
        ("no name", names("no-name", "DNS:n1"), none, none),
        ("a name of no role", names("role", "URI:csid://prod/root/n1"), none, none),
        ("no certificate", None, no_connection, no_connection),
        ("expired", expired, no_connection, no_connection),
        ("a server's use", server_only, no_connection, no_connection),
        ("another authority", others, no_connection, no_connection),
    ];
    tokio::time::sleep(Duration::from_millis(1100)).await; // The certificate for 0 days has expired.
    for (who, pair, here, there) in table {
        // Both have joined in an earlier row.
        match who {
            "blocked node" => {
                let block = Change::Block(BlockAsk { reason: "stolen".into() });
                set(&site, 0, "n-trusted", block).await.unwrap();
            }
            "fenced node" => {
                let revision = show(&site, "n-creates").await.revision;
                let fence = FenceAsk { reason: "off".into(), revision, by_hand: true };
                set(&site, 0, "n-creates", Change::Fence(fence)).await.unwrap();
            }
            _ => {}
        }
        for (namespace, due) in [("default", here), ("other", there)] {
            // Nodes are known by their name, so each says its own Hello.
            let node = match who {
                "node that may join alone" => "joins",
                "node without a grant" => "stranger",
                "node that creates" | "fenced node" => "n-creates",
                "controller's host" => "c1",
                "node that attaches" => "n-attaches",
                "node with an operator's grants" | "blocked node" => "n-trusted",
                _ => "n1",
            };
            let found = calls(&site.channel(0, pair.as_ref()), node, namespace).await;
            let made: BTreeSet<_> = MADE.into_iter().flat_map(|(_, made)| made.iter().copied()).collect();
            // A change that no server knows is no call of the contract.
            let extra = BTreeSet::from(["another change"]);
            assert_eq!(found.keys().copied().collect::<BTreeSet<_>>(), &made | &extra);
            let mut due: BTreeMap<_, _> = CALLS.into_iter().zip(due).collect();
            // Who sees a volume has it explained.
            due.insert("explain", due["volume"]);
            // Who sees volumes sees their claims.
            due.insert("claims", due["volumes"]);
            due.insert("all claims", due["all volumes"]);
            // `operator/all` may do all that is done to nodes, and n9 is forgotten already.
            for call in ["fence", "drain", "undrain"] {
                due.insert(call, due["block"]);
            }
            due.insert("forget", if due["block"] == Decided { Done } else { due["block"] });
            // Who sees servers sees the cluster in numbers. `operator/all` may change what is the whole cluster's.
            due.insert("status", due["servers"]);
            let upgrade = if who == "operator with all grants" { Done } else { due["block"] };
            due.insert("upgrade", upgrade);
            for call in ["restored", "resume", "resume without", "resume by forgetting"] {
                due.insert(call, due["block"]);
            }
            // Who sees servers may make an audit.
            due.insert("audit", due["servers"]);
            // A node withdraws its own calls, and who claims for other nodes does.
            let withdraw = match (due["detached"], due["claim for another"]) {
                (Denied, Decided) => Done,
                (of_node, _) => of_node,
            };
            due.insert("withdraw", withdraw);
            // A node reports its own part of an expansion, if it has a claim.
            due.insert("expanded", due["detached"]);
            // No node has seen generation 0.
            due.insert("hold", if due["detached"] == Done { Decided } else { due["detached"] });
            // The volume of `deregister` is not there, and has no owner.
            due.insert(
                "deregister",
                if who == "node with an operator's grants" { Done } else { due["register"] },
            );
            // There is no volume to own.
            let own =
                if who == "operator with all grants" { Decided } else { without_grant(due["register"]) };
            due.insert("own", own);
            let (create, delete) = match (who, namespace) {
                ("operator with all grants", _) => (Decided, Done),
                ("node that creates" | "fenced node" | "operator who creates", "default") => (Decided, Done),
                _ => (without_grant(due["register"]), without_grant(due["register"])),
            };
            // What is not there is attached to nothing.
            let (attach, detach) = match (who, namespace) {
                ("operator with all grants", _) => (Decided, Done),
                ("node that attaches" | "operator who attaches", "default") => (Decided, Done),
                _ => (without_grant(due["register"]), without_grant(due["register"])),
            };
            due.extend([("attach", attach), ("detach", detach)]);
            // To forget an attachment is to release what others have, by force.
            let forget =
                if who == "operator with all grants" { Decided } else { without_grant(due["register"]) };
            due.insert("forget attachment", forget);
            // No node with a controller has joined, so no plugin is asked.
            let decided = |of: Became| if of == Done { Decided } else { of };
            due.insert("inventory", decided(due["servers"]));
            due.insert("capacity", due["inventory"]);
            let validate = match who {
                "operator with all grants" | "node with an operator's grants" => Decided,
                _ => due["register"],
            };
            due.insert("validate", validate);
            // A snapshot belongs to no namespace, until the plugin says of which volume it is.
            let delete_snapshot = match who {
                "operator with all grants" | "node that creates" | "fenced node" | "operator who creates" => {
                    Decided
                }
                _ => create,
            };
            due.extend([("snapshot", create), ("delete snapshot", delete_snapshot)]);
            // A volume that is not there is not expanded.
            due.extend([("create", create), ("create from a source", create)]);
            due.extend([("delete", delete), ("expand", create)]);
            assert_eq!(found, due, "{who}, namespace {namespace}");
        }
    }
    // A change that this server does not know is no way past the grants.
    let unknown = became(site.operator(0, "nobody").change(ChangeAsk { what: None }).await);
    assert_eq!(unknown, Decided);
}

/// A node's key must not pass for a server's: its holder could have nodes believe that they have claims.
/// A connection stays, or is resumed, when the certificate of its caller has expired.
#[tokio::test]
async fn expired_caller_of_a_connection_is_refused() {
    let site = Site::start(1).await;
    let ca = Certificate::from_pem(std::fs::read(site.authority.certificate()).unwrap());
    for n in 0..20 {
        let name = format!("expires-{n}");
        let Pair { certificate, key } =
            site.authority.issue(&name, "URI:csid://prod/operator/all", Purpose::Client, 0);
        let [certificate, key] = [certificate, key].map(|path| std::fs::read(path).unwrap());
        let tls = ClientTlsConfig::new().ca_certificate(ca.clone());
        let tls = tls.identity(Identity::from_pem(certificate, key));
        let endpoint = Endpoint::from_shared(format!("https://{}", site.addresses[0])).unwrap();
        // The certificate may have expired before the server has seen it.
        let Ok(channel) = endpoint.tls_config(tls).unwrap().connect().await else { continue };
        tokio::time::sleep(Duration::from_millis(1100)).await;
        match became(ClusterClient::new(channel).volumes(ListAsk::default()).await) {
            NoConnection => {}
            found => return assert_eq!(found, Denied),
        }
    }
    panic!("no connection began before its certificate expired");
}

#[tokio::test]
async fn link_refuses_what_is_no_server() {
    let site = Site::start(1).await;
    let good = site.path("s0/server.pem");
    let key = site.path("s0/server.key");
    let [host, _] = site.addresses[0].split(':').collect::<Vec<_>>().try_into().unwrap();
    let node = site.node("n1");
    drop(node.join(0).await);
    for (file, names, purpose, days) in [
        ("node", format!("IP:{host},URI:csid://prod/node/n1"), Purpose::Both, 30),
        ("client", format!("IP:{host},URI:csid://prod/server/s0"), Purpose::Client, 30),
        ("operator", format!("IP:{host},URI:csid://prod/operator/all"), Purpose::Both, 30),
        ("cluster", format!("IP:{host},URI:csid://test/server/s0"), Purpose::Both, 30),
        ("host", "IP:127.0.0.1,URI:csid://prod/server/s0".to_owned(), Purpose::Both, 30),
        ("unnamed", format!("IP:{host}"), Purpose::Both, 30),
        ("old", format!("IP:{host},URI:csid://prod/server/s0"), Purpose::Both, 0),
    ] {
        let pair = site.authority.issue(&format!("far-{file}"), &names, purpose, days);
        let far = crate::far_end::FarEnd::start(&pair);
        let link =
            site.link(&format!("link-{file}"), &site.client_pair("csid://prod/node/n1"), &[far.address()]);
        if days == 0 {
            tokio::time::sleep(Duration::from_millis(1100)).await;
        }
        let socket = site.path(&format!("link-{file}.run")).join(far.address());
        let answer = became(crate::site::through(&socket).volumes(ListAsk::default()).await);
        assert_eq!(answer, NoConnection, "{file}");
        assert_eq!(far.bytes(), 0, "{file}: the far end got bytes of the node");
        assert!(link.text().contains("the server was not reached"), "{file}: {}", link.text());
    }
    // The same far end with a server's certificate gets bytes: it is the name that decides.
    let pair = Pair { certificate: good, key };
    let far = crate::far_end::FarEnd::start_at(&pair, host);
    let _link = site.link("link-good", &site.client_pair("csid://prod/node/n1"), &[far.address()]);
    let socket = site.path("link-good.run").join(far.address());
    assert_eq!(became(crate::site::through(&socket).volumes(ListAsk::default()).await), NoConnection);
    assert!(far.bytes() > 0);
}
