//! A node that lies in each field of its calls. It gets nothing that it has not, and takes nothing from others.

use csi_proto::cluster::v1::{
    Attaches, CallName, ClaimAsk, FromNode, Hello, ListAsk, Owed, PluginReport, Plugins, VolumeAsk, from_node,
};
use tonic::Code;

use crate::site::{First, Refusal, Site, eventually, open};

#[tokio::test]
async fn lie_in_a_claim_is_refused() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (node, other) = (site.node("n1"), site.node("n2"));
    let _sessions = (node.join(0).await, other.join(0).await);
    // The server knows the plugins of both.
    site.register("known", "single-node-writer").await;
    let known = node.claim(0, "known").await.unwrap();
    node.detached(0, "known", &known).await.unwrap();
    other.claim(0, "known").await.unwrap();
    let good = node.ask("data", "web");
    let long = "x".repeat(129);
    type Lie<'a> = &'a dyn Fn(&mut ClaimAsk);
    let cases: [(&str, Lie<'_>, Code); 22] = [
        ("another boot", &|ask| ask.boot = "of a clone".into(), Code::Aborted),
        ("no boot", &|ask| ask.boot = String::new(), Code::Aborted),
        ("another node", &|ask| ask.node = "n2".into(), Code::PermissionDenied),
        ("a node of no name", &|ask| ask.node = "../n2".into(), Code::PermissionDenied),
        ("a namespace without a grant", &|ask| ask.namespace = "other".into(), Code::PermissionDenied),
        ("a namespace as a way", &|ask| ask.namespace = "default/data/../..".into(), Code::PermissionDenied),
        ("a namespace that is too long", &|ask| ask.namespace = long.clone(), Code::InvalidArgument),
        ("no volume", &|ask| ask.volume = String::new(), Code::InvalidArgument),
        ("a volume that is not there", &|ask| ask.volume = "data/claim".into(), Code::NotFound),
        ("a volume that is too long", &|ask| ask.volume = long.clone(), Code::InvalidArgument),
        ("no consumer", &|ask| ask.consumer = String::new(), Code::InvalidArgument),
        ("a control character", &|ask| ask.consumer = "a\nb".into(), Code::InvalidArgument),
        ("a consumer that is too long", &|ask| ask.consumer = long.clone(), Code::InvalidArgument),
        ("no call", &|ask| ask.call = String::new(), Code::InvalidArgument),
        ("a call that is too long", &|ask| ask.call = long.clone(), Code::InvalidArgument),
        ("no use", &|ask| ask.r#use = None, Code::InvalidArgument),
        ("another mode", &|ask| ask.r#use.as_mut().unwrap().mode = "own".into(), Code::InvalidArgument),
        (
            "a mode that was not registered",
            &|ask| ask.r#use.as_mut().unwrap().access_mode = "multi-node-multi-writer".into(),
            Code::InvalidArgument,
        ),
        (
            "another attachment mode",
            &|ask| ask.r#use.as_mut().unwrap().attachment_mode = "block-device".into(),
            Code::InvalidArgument,
        ),
        ("another's credential", &|ask| ask.credential = "csid.other.key".into(), Code::InvalidArgument),
        (
            "a credential as a path",
            &|ask| ask.credential = "csid.default./../x".into(),
            Code::InvalidArgument,
        ),
        ("a message that is too large", &|ask| ask.call = "x".repeat(300_000), Code::OutOfRange),
    ];
    for (lie, change, code) in cases {
        let mut ask = good.clone();
        change(&mut ask);
        let refused = node.client(0).claim(ask).await.expect_err(lie);
        assert_eq!(refused.code(), code, "{lie}: {refused:?}");
    }
    let mut raw = site.raw().await;
    assert!(raw.below("/csid/v1/vol/default/data/claim/").await.is_empty(), "a lie was written");

    let claim = node.claim(0, "data").await.unwrap();
    let uid = ClaimAsk { uid: 1001, ..good.clone() };
    let refused = Refusal::of(&node.client(0).claim(uid).await.unwrap_err());
    assert_eq!(refused.kind, "NotAuthorized", "another uid of the node has not the claim");
    assert_eq!(node.claim(0, "data").await, Ok(claim));
}

#[tokio::test]
async fn lie_of_a_call_that_waits_is_refused() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    site.register("known", "single-node-writer").await;
    let (node, other) = (site.node("n1"), site.node("n2"));
    let _sessions = (node.join(0).await, other.join(0).await);
    node.claim(0, "known").await.unwrap();
    let claim = other.claim(0, "data").await.unwrap();
    // The longest wait that there is, and the shortest answer.
    let ask = |answer_ms| ClaimAsk { queue_ms: u64::MAX, answer_ms, ..node.ask("data", "web") };
    let queued = async |ask: ClaimAsk| {
        let refused = Refusal::of(&node.client(0).claim(ask).await.unwrap_err());
        assert_eq!((refused.kind.as_str(), refused.holders), ("ClaimConflict", vec!["n2/web".to_owned()]));
    };
    queued(ask(1)).await;
    let begun = std::time::Instant::now();
    queued(ask(u32::MAX)).await;
    assert!(begun.elapsed() < std::time::Duration::from_secs(15), "the answer took {:?}", begun.elapsed());
    let mut raw = site.raw().await;
    let queue = async |raw: &mut crate::site::Raw| raw.below("/csid/v1/vol/default/data/queue/").await.len();
    assert_eq!(queue(&mut raw).await, 1);
    type Lie<'a> = &'a dyn Fn(&mut ClaimAsk);
    let cases: [(&str, Lie<'_>); 4] = [
        ("another consumer", &|ask| ask.consumer = "other".into()),
        ("another uid", &|ask| ask.uid = 0),
        ("a mount", &|ask| ask.by_mount = true),
        ("another credential", &|ask| ask.credential = "csid.default.key".into()),
    ];
    for (lie, change) in cases {
        queued(ask(1)).await;
        let mut lying = ask(1);
        change(&mut lying);
        let refused = node.client(0).claim(lying).await.expect_err(lie);
        assert_eq!(refused.code(), Code::InvalidArgument, "{lie}: {refused:?}");
    }
    queued(ask(1)).await;
    let clone = ClaimAsk { boot: "of a clone".into(), queue_ms: 1, ..ask(1) };
    assert_eq!(node.client(0).claim(clone).await.unwrap_err().code(), Code::Aborted);
    assert_eq!(queue(&mut raw).await, 1, "a clone has ended the node's wait");
    let good = CallName {
        call: "call 1".into(),
        namespace: "default".into(),
        volume: "data".into(),
        boot: node.hello.boot.clone(),
    };
    type Wrong<'a> = &'a dyn Fn(&mut CallName);
    let cases: [(&str, Wrong<'_>, Option<Code>); 10] = [
        ("another call", &|name| name.call = "call 2".into(), None),
        ("another's call", &|name| name.call = "n2/call 1".into(), None),
        ("a volume that is not there", &|name| name.volume = "none".into(), None),
        ("another namespace", &|name| name.namespace = "other".into(), None),
        ("a namespace as a way", &|name| name.namespace = "default/data".into(), None),
        ("a long namespace", &|name| name.namespace = "x".repeat(129), Some(Code::InvalidArgument)),
        ("another boot", &|name| name.boot = "of a clone".into(), Some(Code::Aborted)),
        ("no call", &|name| name.call = String::new(), Some(Code::InvalidArgument)),
        ("a long call", &|name| name.call = "x".repeat(129), Some(Code::InvalidArgument)),
        ("no volume", &|name| name.volume = String::new(), Some(Code::InvalidArgument)),
    ];
    for (lie, change, code) in cases {
        let mut name = good.clone();
        change(&mut name);
        let answer = node.client(0).withdraw(name).await;
        assert_eq!(answer.err().map(|status| status.code()), code, "{lie}");
        assert_eq!(queue(&mut raw).await, 1, "{lie}");
    }
    let of_other = CallName { boot: other.hello.boot.clone(), ..good.clone() };
    assert!(other.client(0).withdraw(of_other).await.unwrap().into_inner().taken, "its own call");
    assert_eq!(other.claim(0, "data").await, Ok(claim));
    assert_eq!(queue(&mut raw).await, 1);
    node.client(0).withdraw(good).await.unwrap();
    assert_eq!(queue(&mut raw).await, 0);
}

#[tokio::test]
async fn lie_in_detached_ends_no_claim() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (node, other) = (site.node("n1"), site.node("n2"));
    let _sessions = (node.join(0).await, other.join(0).await);
    let claim = other.claim(0, "data").await.unwrap();
    let good = node.owed("data", &claim);
    type Lie<'a> = &'a dyn Fn(&mut Owed);
    let cases: [(&str, Lie<'_>, Option<Code>); 8] = [
        // It is true of n1 that it has no such claim.
        ("another node's claim", &|_| {}, None),
        ("another node's consumer", &|owed| owed.consumer = "n2/web".into(), None),
        ("a volume that is not there", &|owed| owed.volume = "none".into(), None),
        ("no claim", &|owed| owed.claim = String::new(), Some(Code::InvalidArgument)),
        ("no volume", &|owed| owed.volume = String::new(), Some(Code::InvalidArgument)),
        ("no consumer", &|owed| owed.consumer = String::new(), Some(Code::InvalidArgument)),
        ("a long claim", &|owed| owed.claim = "x".repeat(129), Some(Code::InvalidArgument)),
        ("a long namespace", &|owed| owed.namespace = "x".repeat(129), Some(Code::InvalidArgument)),
    ];
    for (lie, change, code) in cases {
        let mut owed = good.clone();
        change(&mut owed);
        let answer = node.client(0).detached(owed).await;
        assert_eq!(answer.err().map(|status| status.code()), code, "{lie}");
        assert_eq!(other.claim(0, "data").await, Ok(claim.clone()), "{lie}");
    }
    // The claim's own node, with wrong words.
    for (lie, owed, code) in [
        ("another id", other.owed("data", "another id"), None),
        (
            "another boot",
            Owed { boot: "of a clone".into(), ..other.owed("data", &claim) },
            Some(Code::Aborted),
        ),
        ("no boot", Owed { boot: String::new(), ..other.owed("data", &claim) }, Some(Code::Aborted)),
        (
            "staged for a claim that is not there",
            Owed { still_staged: true, ..other.owed("data", &claim) },
            Some(Code::Aborted),
        ),
    ] {
        let answer = other.client(0).detached(owed).await;
        assert_eq!(answer.err().map(|status| status.code()), code, "{lie}");
        assert_eq!(other.claim(0, "data").await, Ok(claim.clone()), "{lie}");
    }
    other.detached(0, "data", &claim).await.unwrap();
    node.claim(0, "data").await.unwrap();
}

/// The name of a call is the caller's own. It names a claim that was granted, one that is pending, and one that waits.
#[tokio::test]
async fn call_of_another_node_ends_no_claim() {
    let site = Site::start(1).await;
    for volume in ["data", "free", "known"] {
        site.register(volume, "single-node-writer").await;
    }
    let (node, other) = (site.node("n1"), site.node("n2"));
    let _sessions = (node.join(0).await, other.join(0).await);
    node.claim(0, "known").await.unwrap();
    let claim = other.claim(0, "data").await.unwrap();
    let queued = ClaimAsk { queue_ms: 600_000, answer_ms: 1, ..node.ask("data", "web") };
    let refused = Refusal::of(&node.client(0).claim(queued).await.unwrap_err());
    assert_eq!(refused.kind, "ClaimConflict");
    let mut raw = site.raw().await;
    let before = raw.below("/csid/v1/vol/default/data/").await;
    // Both nodes have named their calls `call 1`.
    let named = |who: &crate::site::Node, call: &str| Owed { call: call.into(), ..who.owed("data", "") };
    for (lie, owed, code) in [
        ("no name at all", named(&other, ""), Some(Code::InvalidArgument)),
        ("a long call", named(&other, &"x".repeat(129)), Some(Code::InvalidArgument)),
        ("a call with a line", named(&other, "a\nb"), Some(Code::InvalidArgument)),
        ("another call", named(&other, "call 2"), None),
        ("another node's call", named(&other, "node/n1/call 1"), None),
        ("a way to another node's call", named(&other, "../n1/call 1"), None),
        ("an operator's call", named(&other, "operator/all/call 1"), None),
        ("its call for another consumer", Owed { consumer: "other".into(), ..named(&other, "call 1") }, None),
        (
            "its call of another boot",
            Owed { boot: "of a clone".into(), ..named(&other, "call 1") },
            Some(Code::Aborted),
        ),
        (
            "its claim by a long call",
            Owed { call: "x".repeat(129), ..other.owed("data", &claim) },
            Some(Code::InvalidArgument),
        ),
    ] {
        let answer = other.client(0).detached(owed).await;
        assert_eq!(answer.err().map(|status| status.code()), code, "{lie}");
        assert_eq!(raw.below("/csid/v1/vol/default/data/").await, before, "{lie}");
    }
    for (lie, owed, code) in [
        (
            "the other's claim by the same call",
            Owed { call: "call 2".into(), ..node.owed("data", &claim) },
            None,
        ),
        ("the other's call", named(&node, "node/n2/call 1"), None),
        ("its call at another volume", Owed { volume: "free".into(), ..named(&node, "call 1") }, None),
        (
            "its call of another boot",
            Owed { boot: String::new(), ..named(&node, "call 1") },
            Some(Code::Aborted),
        ),
    ] {
        let answer = node.client(0).detached(owed).await;
        assert_eq!(answer.err().map(|status| status.code()), code, "{lie}");
        assert_eq!(raw.below("/csid/v1/vol/default/data/").await, before, "{lie}");
    }
    // Its own call ends its own wait alone, and then the other's ends the claim.
    node.client(0).detached(named(&node, "call 1")).await.unwrap();
    assert!(raw.below("/csid/v1/vol/default/data/queue/").await.is_empty());
    assert_eq!(other.claim(0, "data").await, Ok(claim));
    other.client(0).detached(named(&other, "call 1")).await.unwrap();
    node.claim(0, "data").await.unwrap();
}

#[tokio::test]
async fn lie_in_a_session_is_refused() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    let (long, none) = ("x".repeat(129), String::new());
    type Lie<'a> = &'a dyn Fn(&mut Hello, &str);
    let fields: [Lie<'_>; 4] = [
        &|hello, text| hello.journal_id = text.into(),
        &|hello, text| hello.machine_id = text.into(),
        &|hello, text| hello.boot = text.into(),
        &|hello, text| hello.version = text.into(),
    ];
    for change in fields {
        for text in [&long, &none] {
            let mut hello = node.hello.clone();
            change(&mut hello, text);
            let refused = open(&mut node.client(0), hello).await.err().expect("an error");
            assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        }
    }
    let future = Hello { generation: 2, ..node.hello.clone() };
    let (first, _) = open(&mut node.client(0), future).await.unwrap();
    assert!(matches!(&first, First::Refused(of) if of == "ahead-of-etcd"), "{first:?}");
    let mut raw = site.raw().await;
    assert!(raw.below("/csid/v1/node/").await.is_empty(), "a lie was written");
    let future = Hello { seen_revision: 1 << 40, ..node.hello.clone() };
    let (first, _) = open(&mut node.client(0), future).await.unwrap();
    assert!(matches!(&first, First::Refused(of) if of == "ahead-of-etcd"), "{first:?}");
    assert!(raw.below("/csid/v1/node/").await.is_empty(), "a lie was written");
    assert!(raw.below("/csid/v1/session/").await.is_empty());

    let plugin = |name: &str| PluginReport {
        plugin: name.into(),
        attaches: Attaches::No.into(),
        ..PluginReport::default()
    };
    let many = (0..65).map(|n| plugin(&format!("p{n}"))).collect();
    for plugins in [many, vec![plugin(&long)], vec![plugin("")]] {
        let mut session = node.join(0).await;
        let report = from_node::Is::Plugins(Plugins { plugins });
        session.to_server.send(FromNode { is: Some(report) }).await.unwrap();
        assert_eq!(session.next().await.unwrap_err().kind, "InvalidArgument");
    }
    // A value of a later version is taken for unknown.
    let mut session = node.join(0).await;
    let report = PluginReport { plugin: "p".into(), attaches: 77, ..PluginReport::default() };
    let report = from_node::Is::Plugins(Plugins { plugins: vec![report] });
    session.to_server.send(FromNode { is: Some(report) }).await.unwrap();
    eventually("the report is written", async || {
        let row = String::from_utf8(raw.below("/csid/v1/node/n1").await.remove(0).value).unwrap();
        row.contains("\"attaches\":null")
    })
    .await;
    // The greatest limit is one that is never reached.
    let report = PluginReport { max_volumes: Some(u64::MAX), ..plugin("p") };
    let report = from_node::Is::Plugins(Plugins { plugins: vec![report] });
    session.to_server.send(FromNode { is: Some(report) }).await.unwrap();
    eventually("the limit is written", async || {
        let row = String::from_utf8(raw.below("/csid/v1/node/n1").await.remove(0).value).unwrap();
        row.contains(&format!("\"max-volumes\":{}", u64::MAX))
    })
    .await;
    site.register("data", "single-node-writer").await;
    let claim = node.claim(0, "data").await.unwrap();
    node.detached(0, "data", &claim).await.unwrap();
    session.report(Attaches::No).await;
    eventually("the session goes on", async || {
        let row = String::from_utf8(raw.below("/csid/v1/node/n1").await.remove(0).value).unwrap();
        row.contains("\"attaches\":false")
    })
    .await;
}

#[tokio::test]
async fn lie_in_a_question_shows_nothing() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    for (namespace, volume, code) in [
        ("other", "data", Code::PermissionDenied),
        ("default/data", "head", Code::PermissionDenied),
        ("default", "", Code::InvalidArgument),
        ("default", "data/claim", Code::NotFound),
        ("default", "%64ata", Code::NotFound),
    ] {
        let volume = VolumeAsk { namespace: namespace.into(), volume: volume.into(), ..VolumeAsk::default() };
        let refused = node.client(0).volume(volume.clone()).await.unwrap_err();
        assert_eq!(refused.code(), code, "{volume:?}");
    }
    for list in [
        ListAsk { namespace: "other".into(), ..ListAsk::default() },
        ListAsk { namespace: "*".into(), ..ListAsk::default() },
    ] {
        let refused = node.client(0).volumes(list).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
    }
    let half = ListAsk { after_namespace: "default".into(), ..ListAsk::default() };
    assert_eq!(node.client(0).volumes(half).await.unwrap_err().code(), Code::InvalidArgument);
}
