//! Nodes with grants of their own that lie in each field of what they ask for. A grant counts in its namespaces, for what it names.

use std::time::Duration;

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{
    AttachAsk, Capability, ChangeAsk, CreateAsk, DeleteAsk, DeleteSnapshotAsk, Deregister, DetachAsk,
    ExpandAsk, InventoryAsk, ListExternal, MeasureCapacity, Register, ReleaseAsk, SnapshotAsk, Spec,
    Topology, ValidateAsk, inventory_ask,
};
use tonic::Code;

use crate::attach::Controller;
use crate::by_call::{Client, attach_ask};
use crate::creations::{create, created, creating};
use crate::questions::answering;
use crate::site::{Refusal, Site, register};

/// Makes a change that has to be refused, and returns the kind of the refusal.
async fn refused(client: &mut Client, what: What) -> String {
    let ask = ChangeAsk { what: Some(what) };
    Refusal::of(&client.change(ask.clone()).await.expect_err(&format!("{ask:?}"))).kind
}

/// Returns all of volumes that is in etcd.
async fn volumes(site: &Site) -> Vec<(Vec<u8>, Vec<u8>)> {
    let found = site.raw().await.below("/csid/v1/vol/").await;
    found.into_iter().map(|kv| (kv.key, kv.value)).collect()
}

fn registration() -> Register {
    match register("new", "single-node-writer").what {
        Some(What::Register(register)) => register,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn lie_in_a_registration_is_refused() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n-registers");
    let _session = node.join(0).await;
    let mut client = node.client(0);
    let before = volumes(&site).await;
    let long = "x".repeat(10_000);
    let large = || [("k".to_owned(), "x".repeat(10_000))].into();
    type Lie<'a> = &'a dyn Fn(&mut Register);
    let cases: [(&str, Lie<'_>, &str); 9] = [
        ("a namespace without a grant", &|of| of.namespace = "shared".into(), "NotAuthorized"),
        ("a namespace as a way", &|of| of.namespace = "default/data".into(), "NotAuthorized"),
        ("no volume", &|of| of.volume.clear(), "InvalidArgument"),
        ("a volume with a line", &|of| of.volume = "a\nb".into(), "InvalidArgument"),
        ("no plugin", &|of| of.plugin.clear(), "InvalidArgument"),
        ("no ID", &|of| of.external_id.clear(), "InvalidArgument"),
        ("a long ID", &|of| of.external_id = "x".repeat(10_000), "InvalidArgument"),
        // Another caller's volume, by its name and by its ID.
        ("the name of another's volume", &|of| of.volume = "data".into(), "NotAuthorized"),
        ("the ID of another's volume", &|of| of.external_id = "ext-data".into(), "AlreadyExists"),
    ];
    for (lie, change, kind) in cases {
        let mut of = registration();
        change(&mut of);
        assert_eq!(refused(&mut client, What::Register(of)).await, kind, "{lie}");
    }
    let capability = |access_mode: &str, attachment_mode: &str| Capability {
        access_mode: access_mode.into(),
        attachment_mode: attachment_mode.into(),
    };
    type Wrong<'a> = &'a dyn Fn(&mut Spec);
    let cases: [(&str, Wrong<'_>); 16] = [
        ("a name with a line", &|spec| spec.name = "a\nb".into()),
        ("no use", &|spec| spec.capabilities.clear()),
        ("an access mode of no contract", &|spec| spec.capabilities = vec![capability("own", "file-system")]),
        ("an attachment mode of no contract", &|spec| {
            spec.capabilities = vec![capability("single-node-writer", "tape")]
        }),
        ("a long file system", &|spec| spec.fs_type = long.clone()),
        ("a long mount flag", &|spec| spec.mount_flags = vec![long.clone()]),
        ("a long mount group", &|spec| spec.mount_group = long.clone()),
        ("a large context", &|spec| spec.volume_context = large()),
        ("large parameters", &|spec| spec.parameters = large()),
        ("another namespace's credential", &|spec| spec.credential = "csid.shared.key".into()),
        ("a credential as a path", &|spec| spec.credential = "csid.default./../x".into()),
        ("another healing", &|spec| spec.heal = "always and more".into()),
        ("a topology of nothing", &|spec| spec.topologies = vec![Topology::default()]),
        ("a large topology", &|spec| spec.topologies = vec![Topology { segments: large() }]),
        ("a snapshot as its source", &|spec| spec.snapshot = "snap-1".into()),
        ("a clone", &|spec| spec.clone = "data".into()),
    ];
    for (lie, change) in cases {
        let mut of = registration();
        change(of.spec.as_mut().unwrap());
        assert_eq!(refused(&mut client, What::Register(of)).await, "InvalidArgument", "{lie}");
    }
    let none = Register { spec: None, ..registration() };
    assert_eq!(refused(&mut client, What::Register(none)).await, "InvalidArgument");
    for (namespace, volume, kind) in
        [("shared", "data", "NotAuthorized"), ("", "data", "NotAuthorized"), ("", "", "InvalidArgument")]
    {
        let of = Deregister { namespace: namespace.into(), volume: volume.into(), ..Default::default() };
        assert_eq!(refused(&mut client, What::Deregister(of)).await, kind, "{namespace} {volume}");
        let of = ValidateAsk { namespace: namespace.into(), volume: volume.into(), ..ValidateAsk::default() };
        // A plugin may be asked about any volume of a namespace with the grant. None has joined.
        let kind = if (namespace, volume) == ("", "data") { "Unavailable" } else { kind };
        assert_eq!(refused(&mut client, What::Validate(of)).await, kind, "{namespace} {volume}");
    }
    let of = ValidateAsk {
        volume: "data".into(),
        capabilities: vec![capability("own", "file-system")],
        ..ValidateAsk::default()
    };
    assert_eq!(refused(&mut client, What::Validate(of)).await, "InvalidArgument");
    assert_eq!(volumes(&site).await, before, "a lie was written");
    client.change(ChangeAsk { what: Some(What::Register(registration())) }).await.unwrap();
}

/// n-creates may create, delete, expand and make snapshots in `default`, and of what is its own.
#[tokio::test]
async fn grant_to_create_counts_for_its_namespace_alone() {
    let site = Site::start(1).await;
    let mut controller = answering(&site, 0).await;
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
    let node = site.node("n-creates");
    let _session = node.join(0).await;
    let mut client = node.client(0);
    let before = volumes(&site).await;
    let of_snapshot = |name: &str, of: CreateAsk| CreateAsk {
        spec: of.spec.map(|spec| Spec { snapshot: name.into(), ..spec }),
        ..of
    };
    let of_clone = |name: &str, of: CreateAsk| CreateAsk {
        spec: of.spec.map(|spec| Spec { clone: name.into(), ..spec }),
        ..of
    };
    let there = |of: CreateAsk| CreateAsk { namespace: "shared".into(), ..of };
    let with_credential = |name: &str| {
        let of = create("new");
        CreateAsk { spec: of.spec.map(|spec| Spec { credential: name.into(), ..spec }), ..of }
    };
    let expand = |namespace: &str, volume: &str| ExpandAsk {
        namespace: namespace.into(),
        volume: volume.into(),
        required: 16_384,
        limit: 0,
    };
    let snapshot = |namespace: &str, volume: &str| SnapshotAsk {
        namespace: namespace.into(),
        volume: volume.into(),
        name: "monday".into(),
        call: "call".into(),
        ..SnapshotAsk::default()
    };
    let delete = |namespace: &str, volume: &str| DeleteAsk {
        namespace: namespace.into(),
        volume: volume.into(),
        ..Default::default()
    };
    for (lie, what, kind) in [
        ("another namespace", What::Create(there(create("new"))), "NotAuthorized"),
        (
            "a namespace as a way",
            What::Create(CreateAsk { namespace: "default/new".into(), ..create("new") }),
            "NotAuthorized",
        ),
        ("a clone there", What::CreateFrom(there(of_clone("data", create("new")))), "NotAuthorized"),
        ("a snapshot there", What::CreateFrom(there(of_snapshot("snap-1", create("new")))), "NotAuthorized"),
        ("a clone of another's volume", What::CreateFrom(of_clone("data", create("new"))), "NotAuthorized"),
        ("another's volume", What::Create(create("data")), "NotAuthorized"),
        (
            "a plugin without a grant",
            What::Create(CreateAsk { plugin: "q".into(), ..create("new") }),
            "NotSupported",
        ),
        (
            "another namespace's credential",
            What::Create(with_credential("csid.shared.key")),
            "InvalidArgument",
        ),
        ("a deletion there", What::Delete(delete("shared", "data")), "NotAuthorized"),
        ("a deletion of another's volume", What::Delete(delete("", "data")), "NotAuthorized"),
        ("a deletion of no name", What::Delete(delete("", "")), "InvalidArgument"),
        ("an expansion there", What::Expand(expand("shared", "data")), "NotAuthorized"),
        ("an expansion of another's volume", What::Expand(expand("", "data")), "NotAuthorized"),
        ("a snapshot there", What::Snapshot(snapshot("shared", "data")), "NotAuthorized"),
        ("a snapshot of another's volume", What::Snapshot(snapshot("", "data")), "NotAuthorized"),
        ("a snapshot of a volume that is not there", What::Snapshot(snapshot("", "none")), "NotFound"),
        // It may neither register nor attach, nor deregister what it has created.
        ("a registration", What::Register(registration()), "NotAuthorized"),
        (
            "a deregistration",
            What::Deregister(Deregister { volume: "data".into(), ..Deregister::default() }),
            "NotAuthorized",
        ),
        ("an attachment", What::Attach(attach_ask("data", "id of n1")), "NotAuthorized"),
    ] {
        assert_eq!(refused(&mut client, what).await, kind, "{lie}");
    }
    for (plugin, snapshot, call) in [("", "s", "c"), ("p", "", "c"), ("p", "s", ""), ("p", "a\nb", "c")] {
        let [plugin, snapshot, call] = [plugin, snapshot, call].map(str::to_owned);
        let of = DeleteSnapshotAsk { plugin, snapshot, call };
        assert_eq!(refused(&mut client, What::DeleteSnapshot(of.clone())).await, "InvalidArgument", "{of:?}");
    }
    assert_eq!(volumes(&site).await, before, "a lie was written");
    assert!(!controller.is_called(Duration::from_millis(300)).await, "a plugin was called for a lie");
}

/// n-attaches may attach in `default`, and n-creates may not.
#[tokio::test]
async fn grant_to_attach_counts_for_its_namespace_alone() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut there = registration();
    (there.namespace, there.volume, there.external_id) = ("shared".into(), "data".into(), "ext-there".into());
    site.operator(0, "all").change(ChangeAsk { what: Some(What::Register(there)) }).await.unwrap();
    let mut controller = Controller::start(&site, "c1", 0).await;
    let node = site.node("n-attaches");
    let _session = node.join(0).await;
    let mut client = node.client(0);
    let before = volumes(&site).await;
    let ask = || attach_ask("data", "x");
    let detach = || DetachAsk { volume: "data".into(), node_id: "x".into(), ..DetachAsk::default() };
    let long = "x".repeat(1000);
    for (lie, what, kind) in [
        (
            "another namespace",
            What::Attach(AttachAsk { namespace: "shared".into(), ..ask() }),
            "NotAuthorized",
        ),
        ("another volume", What::Attach(AttachAsk { volume: "none".into(), ..ask() }), "NotFound"),
        ("no name of a node", What::Attach(AttachAsk { node_id: String::new(), ..ask() }), "InvalidArgument"),
        (
            "a name with a line",
            What::Attach(AttachAsk { node_id: "a\nb".into(), ..ask() }),
            "InvalidArgument",
        ),
        // It can only be written.
        (
            "a mode that was not registered",
            What::Attach(AttachAsk {
                access_mode: "multi-node-reader-only".into(),
                read_only: true,
                ..ask()
            }),
            "InvalidArgument",
        ),
        (
            "another attachment mode",
            What::Attach(AttachAsk { attachment_mode: "block-device".into(), ..ask() }),
            "InvalidArgument",
        ),
        ("no call", What::Attach(AttachAsk { call: String::new(), ..ask() }), "InvalidArgument"),
        ("a long call", What::Attach(AttachAsk { call: long.clone(), ..ask() }), "InvalidArgument"),
        (
            "a detach there",
            What::Detach(DetachAsk { namespace: "shared".into(), ..detach() }),
            "NotAuthorized",
        ),
        ("a detach by force", What::Detach(DetachAsk { forget: true, ..detach() }), "NotAuthorized"),
        (
            "a detach of no node",
            What::Detach(DetachAsk { node_id: String::new(), ..detach() }),
            "InvalidArgument",
        ),
        ("a long ID", What::Detach(DetachAsk { id: long.clone(), ..detach() }), "InvalidArgument"),
    ] {
        assert_eq!(refused(&mut client, what).await, kind, "{lie}");
    }
    // What is not attached under an ID has ended.
    let ended = What::Detach(DetachAsk { id: "another".into(), ..detach() });
    client.change(ChangeAsk { what: Some(ended) }).await.unwrap();
    assert_eq!(volumes(&site).await, before, "a lie was written");
    assert!(!controller.is_called(Duration::from_millis(300)).await, "a plugin was called for a lie");
}

/// No node may ask what a plugin has, whatever its grants are: that is of no namespace.
#[tokio::test]
async fn node_asks_no_plugin_for_its_inventory() {
    let site = Site::start(1).await;
    let mut controller = answering(&site, 0).await;
    let list = |of: ListExternal| Some(inventory_ask::What::List(of));
    let capacity = |of: MeasureCapacity| Some(inventory_ask::What::Capacity(of));
    let capability = Capability { access_mode: "own".into(), attachment_mode: "file-system".into() };
    let asks = [
        (list(ListExternal::default()), None),
        (list(ListExternal { snapshots: true, ..ListExternal::default() }), None),
        (list(ListExternal { snapshot: "a\nb".into(), ..ListExternal::default() }), Some("snapshot")),
        (
            list(ListExternal { external_id: "x".repeat(10_000), ..ListExternal::default() }),
            Some("external-id"),
        ),
        (list(ListExternal { token: "x".repeat(100_000), ..ListExternal::default() }), Some("token")),
        (list(ListExternal { max: u32::MAX, ..ListExternal::default() }), None),
        (capacity(MeasureCapacity::default()), None),
        (capacity(MeasureCapacity { capabilities: vec![capability], ..MeasureCapacity::default() }), None),
        (
            capacity(MeasureCapacity {
                parameters: [("k".to_owned(), "x".repeat(10_000))].into(),
                ..MeasureCapacity::default()
            }),
            None,
        ),
        (
            capacity(MeasureCapacity { topology: Some(Topology::default()), ..MeasureCapacity::default() }),
            None,
        ),
        (None, Some("what")),
    ];
    for name in ["n1", "n-trusted", "n-creates", "c1"] {
        let mut client = site.direct(0, Some(&site.client_pair(&format!("csid://prod/node/{name}"))));
        for (what, _) in &asks {
            let refused = client.inventory(InventoryAsk { plugin: "p".into(), what: what.clone() }).await;
            assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied, "{name}: {what:?}");
        }
    }
    // An operator's lies about a list reach no plugin. csid on the host checks the others.
    let mut client = site.operator(0, "reads");
    for (what, lie) in asks {
        let Some(lie) = lie else { continue };
        let refused = client.inventory(InventoryAsk { plugin: "p".into(), what }).await.expect_err(lie);
        let kind = Refusal::of(&refused).kind;
        assert!(["InvalidArgument", "NotSupported"].contains(&kind.as_str()), "{lie}: {refused:?}");
    }
    for plugin in [String::new(), "x".repeat(1000)] {
        let ask = InventoryAsk { plugin, what: list(ListExternal::default()) };
        assert_eq!(Refusal::of(&client.inventory(ask).await.unwrap_err()).kind, "InvalidArgument");
    }
    assert!(!controller.is_called(Duration::from_millis(300)).await, "a plugin was called for a lie");
}

/// n-trusted may release what others have, also by force.
#[tokio::test]
async fn lie_in_a_release_ends_no_claim() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let _session = node.join(0).await;
    let claim = node.claim(0, "data").await.unwrap();
    let good = || ReleaseAsk {
        volume: "data".into(),
        node: "n1".into(),
        consumer: "web".into(),
        deadline_ms: 1,
        ..ReleaseAsk::default()
    };
    let trusted = site.client_pair("csid://prod/node/n-trusted");
    let long = "x".repeat(129);
    for force in [false, true] {
        for (lie, ask, code) in [
            ("another namespace", ReleaseAsk { namespace: "other".into(), ..good() }, None),
            (
                "a long namespace",
                ReleaseAsk { namespace: long.clone(), ..good() },
                Some(Code::InvalidArgument),
            ),
            ("another volume", ReleaseAsk { volume: "data/claim".into(), ..good() }, None),
            ("no volume", ReleaseAsk { volume: String::new(), ..good() }, Some(Code::InvalidArgument)),
            ("another node", ReleaseAsk { node: "n2".into(), ..good() }, None),
            ("a node as a way", ReleaseAsk { node: "../n1".into(), ..good() }, Some(Code::InvalidArgument)),
            ("no node", ReleaseAsk { node: String::new(), ..good() }, Some(Code::InvalidArgument)),
            ("another consumer", ReleaseAsk { consumer: "n1/web".into(), ..good() }, None),
            ("no consumer", ReleaseAsk { consumer: String::new(), ..good() }, Some(Code::InvalidArgument)),
            ("the longest wait", ReleaseAsk { consumer: "x".into(), deadline_ms: u64::MAX, ..good() }, None),
        ] {
            let mut client = site.direct(0, Some(&trusted));
            let answer = client.release(ReleaseAsk { force, ..ask }).await;
            // What is not there has been released.
            assert_eq!(answer.err().map(|status| status.code()), code, "{lie}");
            assert_eq!(node.claim(0, "data").await, Ok(claim.clone()), "{lie}");
        }
    }
}
