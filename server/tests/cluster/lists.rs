//! Lists of claims and volumes: their order, their filters, and what cannot be read.

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::{
    ChangeAsk, ClaimPage, Deregister, ListAsk, OwnAsk, ReleaseAsk, VolumeAsk, to_node,
};
use serde_json::json;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::etcd::Cluster as Etcd;
use crate::operators::{csictl, operator};
use crate::proxy::{Losses, Proxy};
use crate::site::{GRANTS, Node, Refusal, Site, eventually, register};

/// A list of claims as one text for each: NAMESPACE/VOLUME NODE CONSUMER.
async fn claims(mut client: ClusterClient<Channel>, ask: ListAsk) -> (Vec<String>, Vec<ClaimPage>) {
    let mut stream = client.claims(ask).await.unwrap().into_inner();
    let mut pages = Vec::new();
    while let Some(page) = stream.message().await.unwrap() {
        pages.push(page);
    }
    let rows = pages.iter().flat_map(|page| &page.claims).map(|row| {
        let claim = row.claim.as_ref().unwrap();
        format!("{}/{} {} {}", row.namespace, row.volume, claim.node, claim.consumer)
    });
    (rows.collect(), pages)
}

async fn claim(node: &Node, namespace: &str, volume: &str, consumer: &str) {
    let mut ask = node.ask(volume, consumer);
    ask.namespace = namespace.into();
    ask.r#use.as_mut().unwrap().access_mode = "multi-node-multi-writer".into();
    eventually("the server knows the plugin", async || match node.client(0).claim(ask.clone()).await {
        Ok(_) => true,
        Err(status) => {
            assert_eq!(Refusal::of(&status).kind, "PluginUnavailable", "{status:?}");
            false
        }
    })
    .await;
}

/// Registers volumes that any number of nodes may claim.
async fn volumes(site: &Site, all: &[(&str, &str)]) {
    for (namespace, volume) in all {
        let mut change = register(volume, "multi-node-multi-writer");
        let Some(What::Register(of)) = &mut change.what else { panic!() };
        of.namespace = (*namespace).into();
        of.external_id = format!("ext-{namespace}-{volume}");
        site.operator(0, "all").change(change).await.unwrap();
    }
}

#[tokio::test]
async fn claims_are_listed_by_volume_node_and_consumer() {
    let site = Site::start(1).await;
    volumes(&site, &[("default", "a"), ("default", "b"), ("shared", "a")]).await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let _sessions = (n1.join(0).await, n2.join(0).await);
    for (node, namespace, volume, consumer) in [
        (&n2, "shared", "a", "web"),
        (&n2, "default", "a", "a-job"),
        (&n1, "default", "a", "web"),
        (&n1, "default", "a", "job"),
        (&n1, "default", "b", "web"),
    ] {
        claim(node, namespace, volume, consumer).await;
    }
    let all =
        ["default/a n1 job", "default/a n1 web", "default/a n2 a-job", "default/b n1 web", "shared/a n2 web"];
    let (rows, pages) = claims(site.operator(0, "reads"), ListAsk::default()).await;
    assert_eq!(rows, all);
    let row = &pages[0].claims[0];
    assert_eq!((row.uid, row.plugin.as_str(), row.by_mount), (1000, "p", false));
    assert!(row.revision > 0 && row.revision <= pages[0].revision && row.since_usec > 1_700_000_000_000_000);
    let shown = row.claim.clone().unwrap();
    assert_eq!([shown.claim, shown.call], ["", ""], "an operator sees a node's names");

    let text = str::to_owned;
    for (ask, due) in [
        (ListAsk { namespace: text("default"), ..ListAsk::default() }, &all[..4]),
        (ListAsk { node: text("n2"), ..ListAsk::default() }, &[all[2], all[4]]),
        (ListAsk { consumer: text("web"), prefix: text("a"), ..ListAsk::default() }, &[all[1], all[4]]),
        (ListAsk { volume: text("b"), ..ListAsk::default() }, &all[3..4]),
        (ListAsk { plugin: text("another"), ..ListAsk::default() }, &[]),
        (
            ListAsk {
                after_namespace: text("default"),
                after_volume: text("a"),
                after_node: text("n1"),
                after_consumer: text("job"),
                ..ListAsk::default()
            },
            &all[1..],
        ),
        (
            ListAsk { after_namespace: text("default"), after_volume: text("a"), ..ListAsk::default() },
            &all[3..],
        ),
    ] {
        assert_eq!(claims(site.operator(0, "reads"), ask.clone()).await.0, due, "{ask:?}");
    }
    // An operator of one namespace, and a node.
    let local = claims(site.operator(0, "local"), ListAsk::default()).await.0;
    assert_eq!(local, all[..4]);
    let (rows, pages) = claims(n2.client(0), ListAsk { own: true, ..ListAsk::default() }).await;
    assert_eq!(rows, [all[2], all[4]]);
    assert!(!pages[0].claims[0].claim.clone().unwrap().claim.is_empty(), "a node's own claim has no name");
    let (rows, pages) = claims(n2.client(0), ListAsk::default()).await;
    assert_eq!(rows, all);
    let others = &pages[0].claims[0];
    assert_eq!((others.uid, others.since_usec), (0, 0), "a node sees who uses another node's claim");
    assert_eq!(others.claim.clone().unwrap().claim, "");
}

/// Returns the names of the volumes that a server lists at this revision or a later one.
async fn listed(site: &Site, server: usize, at_least: u64) -> Result<Vec<String>, Status> {
    let ask = ListAsk { at_least, ..ListAsk::default() };
    let mut stream = site.operator(server, "reads").volumes(ask).await?.into_inner();
    let mut names = Vec::new();
    while let Some(page) = stream.message().await? {
        assert!(page.revision >= at_least, "{page:?}");
        names.extend(page.volumes.into_iter().map(|row| row.volume));
    }
    Ok(names)
}

#[tokio::test]
async fn list_of_a_revision_to_come_is_unavailable() {
    let site = Site::start(1).await;
    volumes(&site, &[("default", "a")]).await;
    for _ in 0..2 {
        let refused = Refusal::of(&listed(&site, 0, u64::MAX).await.unwrap_err());
        assert_eq!((refused.code, refused.kind.as_str()), (Code::Unavailable, "Unavailable"));
        assert!(refused.message.contains("revision 18446744073709551615 has not come"), "{refused:?}");
    }
    let ask = ListAsk { at_least: u64::MAX, ..ListAsk::default() };
    let mut claims = site.operator(0, "reads").claims(ask).await.unwrap().into_inner();
    assert_eq!(claims.message().await.unwrap_err().code(), Code::Unavailable);
    // Any caller may name it, so the server does not list all of etcd again for it.
    assert!(!site.servers[0].text().contains("listed again"), "{}", site.servers[0].text());
    assert_eq!(listed(&site, 0, 0).await.unwrap(), ["a"]);
}

/// The second server's watch stands still, and the first one's goes on.
#[tokio::test(flavor = "multi_thread")]
async fn list_has_the_revision_that_its_caller_has_seen() {
    let etcd = Etcd::start(1, &[]).await;
    let proxy = Proxy::start(etcd.members[0].client).await;
    let direct = etcd.endpoints();
    let mut site = Site::of(etcd, 2, "", &format!("endpoints = {direct:?}\n{GRANTS}"));
    site.servers[1].kill();
    let config = site.path("s1.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace(&direct[0], &proxy.endpoint())).unwrap();
    site.servers[1] = site.start_server(1);
    volumes(&site, &[("default", "a")]).await;
    eventually("the second server has the volume", async || listed(&site, 1, 0).await.unwrap() == ["a"])
        .await;

    // The answers are lost from the next request on.
    proxy.lose(Losses { requests: true, answers: true, ..Losses::default() });
    let mut asked = site.operator(1, "reads");
    let ask = VolumeAsk { namespace: "default".into(), volume: "a".into(), ..VolumeAsk::default() };
    let asking = tokio::spawn(async move { asked.volume(ask).await });
    proxy.keeps().await;
    let registered = site.register("b", "single-node-writer").await.revision;
    assert_eq!(listed(&site, 0, registered).await.unwrap(), ["a", "b"]);
    assert_eq!(listed(&site, 1, 0).await.unwrap(), ["a"], "the list of before");
    let refused = listed(&site, 1, registered).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).kind, "Unavailable", "{refused:?}");

    proxy.lose(Losses::default());
    proxy.cut();
    eventually("the second server has the revision", async || match listed(&site, 1, registered).await {
        Ok(names) => {
            assert_eq!(names, ["a", "b"]);
            true
        }
        Err(status) => {
            assert_eq!(Refusal::of(&status).kind, "Unavailable", "{status:?}");
            false
        }
    })
    .await;
    asking.abort();
}

#[tokio::test]
async fn wrong_list_of_claims_is_refused() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    let text = str::to_owned;
    let long = "x".repeat(129);
    for (ask, code) in [
        (ListAsk { own: true, node: text("n2"), ..ListAsk::default() }, Code::InvalidArgument),
        (ListAsk { namespace: text("other"), ..ListAsk::default() }, Code::PermissionDenied),
        (ListAsk { after_node: text("n1"), ..ListAsk::default() }, Code::InvalidArgument),
        (
            ListAsk { after_volume: text("a"), after_consumer: text("web"), ..ListAsk::default() },
            Code::InvalidArgument,
        ),
        (ListAsk { plugin: long.clone(), ..ListAsk::default() }, Code::InvalidArgument),
        (ListAsk { node: long.clone(), ..ListAsk::default() }, Code::InvalidArgument),
        (ListAsk { consumer: long.clone(), ..ListAsk::default() }, Code::InvalidArgument),
        (ListAsk { volume: long.clone(), ..ListAsk::default() }, Code::InvalidArgument),
        (ListAsk { prefix: text("a\nb"), ..ListAsk::default() }, Code::InvalidArgument),
        (
            ListAsk {
                after_volume: text("a"),
                after_node: long.clone(),
                after_consumer: text("web"),
                ..ListAsk::default()
            },
            Code::InvalidArgument,
        ),
    ] {
        let refused = node.client(0).claims(ask.clone()).await.unwrap_err();
        assert_eq!(refused.code(), code, "{ask:?}");
    }
    let refused =
        site.operator(0, "all").claims(ListAsk { own: true, ..ListAsk::default() }).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "an operator has no claims");
}

#[tokio::test]
async fn record_that_cannot_be_read_fails_no_list() {
    let site = Site::start(1).await;
    volumes(&site, &[("default", "a"), ("default", "b"), ("other", "c")]).await;
    let node = site.node("n1");
    let mut session = node.join(0).await;
    claim(&node, "default", "a", "web").await;
    let mut raw = site.raw().await;
    for key in ["default/b/reg", "other/c/claim/n9/x"] {
        raw.put(&format!("/csid/v1/vol/{key}"), "\"hunter2\"").await;
    }
    let list = async || claims(site.operator(0, "reads"), ListAsk::default()).await;
    eventually("the damage has come", async || list().await.1.iter().any(|page| page.left_out == 2)).await;
    let (rows, pages) = list().await;
    assert_eq!(rows, ["default/a n1 web"]);
    assert_eq!(pages.last().unwrap().first_left_out, "default/b");
    let mut stream = site.operator(0, "reads").volumes(ListAsk::default()).await.unwrap().into_inner();
    let page = stream.message().await.unwrap().unwrap();
    assert_eq!((page.volumes.len(), page.left_out), (1, 2));
    // A node does not learn of namespaces that it does not see. Any volume that cannot be read may be its own.
    let own = claims(node.client(0), ListAsk { own: true, ..ListAsk::default() }).await.1;
    assert_eq!((own[0].claims.len(), own[0].left_out), (1, 1));
    let log = site.servers[0].text();
    assert!(log.contains("/csid/v1/vol/default/b/reg") && !log.contains("hunter2"), "{log}");
    let one = VolumeAsk { namespace: "default".into(), volume: "b".into(), ..VolumeAsk::default() };
    let refused = Refusal::of(&site.operator(0, "reads").volume(one).await.unwrap_err());
    assert!(
        refused.kind == "Internal" && refused.message.contains("/csid/v1/vol/default/b/reg"),
        "{refused:?}"
    );
    assert!(!refused.message.contains("hunter2"), "{refused:?}");
    assert!(!site.servers[0].text().contains("hunter2"));
    // An operator's release goes on all the same.
    let release = ReleaseAsk {
        namespace: "default".into(),
        volume: "a".into(),
        node: "n1".into(),
        consumer: "web".into(),
        deadline_ms: 1,
        ..ReleaseAsk::default()
    };
    let late = site.operator(0, "all").release(release).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
    let asked = session.next().await.unwrap();
    assert!(matches!(asked, Some(to_node::Is::Changed(_))), "{asked:?}");
}

#[tokio::test]
async fn row_of_a_volume_has_few_claims_and_the_list_all() {
    let site = Site::start(1).await;
    volumes(&site, &[("default", "a")]).await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let _sessions = (n1.join(0).await, n2.join(0).await);
    let long = |n: usize| format!("{n:0>100}");
    for n in 0..100 {
        claim(&n1, "default", "a", &long(n)).await;
    }
    claim(&n2, "default", "a", "own").await;
    let ask = VolumeAsk { namespace: "default".into(), volume: "a".into(), ..VolumeAsk::default() };
    let seen = n2.client(0).volume(ask.clone()).await.unwrap().into_inner();
    assert_eq!((seen.claims.len(), seen.claim_count, seen.claims[0].node.as_str()), (64, 101, "n2"));
    let seen = site.operator(0, "reads").volume(ask).await.unwrap().into_inner();
    assert_eq!((seen.claims.len(), seen.claim_count), (101, 101));
    let (rows, _) = claims(n1.client(0), ListAsk { own: true, ..ListAsk::default() }).await;
    assert_eq!(rows.len(), 100);
}

/// A node registers a volume, and is blocked and forgotten. Its registration has to end nevertheless.
#[tokio::test]
async fn operator_owns_what_a_gone_node_registered() {
    let site = Site::start_with(2, "max-volumes = 2").await;
    let (gone, user) = (site.node("n-registers"), site.node("n1"));
    let session = gone.join(0).await;
    gone.client(0).change(register("data", "single-node-writer")).await.unwrap();
    let _user = user.join(1).await;
    let claim = user.claim(1, "data").await.unwrap();
    drop(session);
    let change =
        async |who: &str, what: What| site.operator(1, who).change(ChangeAsk { what: Some(what) }).await;
    let of = |namespace: &str, volume: &str, from: &str| {
        What::Own(OwnAsk { namespace: namespace.into(), volume: volume.into(), from: from.into() })
    };
    let own = |namespace: &str, volume: &str| of(namespace, volume, "node/n-registers");
    let deregister = || {
        What::Deregister(Deregister { namespace: String::new(), volume: "data".into(), ..Default::default() })
    };
    let kind = |refused: Result<_, Status>| refused.map(|_| ()).map_err(|status| Refusal::of(&status).kind);
    // `registers` may register, and admit no node. `anna` may admit, and not register.
    for who in ["registers", "anna", "releases"] {
        assert_eq!(kind(change(who, own("default", "data")).await), Err("NotAuthorized".into()), "{who}");
    }
    for (namespace, volume, due) in
        [("default", "none", "NotFound"), ("other", "data", "NotFound"), ("default", "", "InvalidArgument")]
    {
        assert_eq!(
            kind(change("all", own(namespace, volume)).await),
            Err(due.into()),
            "{namespace}/{volume}"
        );
    }
    let file = operator(&site, "all");
    let said = csictl(&file, "--operator volume deregister default data").await;
    assert!(
        said.code == Some(1) && said.err.contains("`csictl --operator volume own default data --from OWNER`"),
        "{said:?}"
    );
    for from in ["", "operator/all", "node/n1"] {
        assert_eq!(kind(change("all", of("", "data", from)).await), Err("Busy".into()), "{from}");
    }
    for _ in 0..2 {
        let row =
            csictl(&file, "--operator volume own default data --from node/n-registers --json").await.json();
        assert_eq!((&row["owner"], &row["write-claims"]), (&json!("operator/all"), &json!(["n1/web"])));
    }
    assert_eq!(user.claim(1, "data").await, Ok(claim.clone()), "claims do not notice");
    assert_eq!(kind(change("all", deregister()).await), Err("Busy".into()));
    user.detached(1, "data", &claim).await.unwrap();
    let refused = gone.client(0).change(ChangeAsk { what: Some(deregister()) }).await;
    assert_eq!(kind(refused), Err("NotAuthorized".into()), "it was the owner");
    // The volume counts for its owner.
    site.register("second", "single-node-writer").await;
    let third = site.operator(0, "all").change(register("third", "single-node-writer")).await;
    assert_eq!(kind(third), Err("RateLimited".into()));
    // A node with the grant `register` owns what it registers, and takes nothing over.
    let taken =
        gone.client(0).change(ChangeAsk { what: Some(of("default", "second", "operator/all")) }).await;
    assert_eq!(kind(taken), Err("NotAuthorized".into()));
    change("all", deregister()).await.unwrap();
    site.register("third", "single-node-writer").await;
    gone.join(0).await;
    gone.client(0).change(register("data", "single-node-writer")).await.unwrap();
    assert_eq!(
        kind(change("all", own("", "data")).await),
        Err("RateLimited".into()),
        "it has as many as it may"
    );
}

#[tokio::test]
async fn volume_is_deregistered_by_its_owner_when_unused() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let deregister = |volume: &str| {
        let of = Deregister { namespace: "default".into(), volume: volume.into(), ..Default::default() };
        ChangeAsk { what: Some(What::Deregister(of)) }
    };
    let node = site.node("n1");
    let _session = node.join(0).await;
    let id = node.claim(0, "data").await.unwrap();
    let mut operator = site.operator(0, "all");
    let used = Refusal::of(&operator.change(deregister("data")).await.unwrap_err());
    assert_eq!((used.kind.as_str(), &used.holders[..]), ("Busy", &["n1/web".to_owned()][..]));
    node.detached(0, "data", &id).await.unwrap();
    let registers = site.node("n-registers");
    let _another = registers.join(0).await;
    let denied = Refusal::of(&registers.client(0).change(deregister("data")).await.unwrap_err());
    assert_eq!(denied.kind, "NotAuthorized", "another identity ends a registration");
    operator.change(deregister("data")).await.unwrap();
    operator.change(deregister("data")).await.unwrap();
    operator.change(deregister("never")).await.unwrap();
    assert_eq!(node.claim(0, "data").await.unwrap_err().code, Code::NotFound);
    let mut raw = site.raw().await;
    assert!(raw.below("/csid/v1/ext/").await.is_empty(), "the volume's plugin has it still");
    // It may have another name now.
    let mut other = register("other", "single-node-writer");
    let Some(What::Register(of)) = &mut other.what else { panic!() };
    of.external_id = "ext-data".into();
    operator.change(other).await.unwrap();
}

/// csid asks so before it mounts a volume that root has named by the plugin's ID.
#[tokio::test]
async fn volume_is_found_by_the_plugins_id() {
    let site = Site::start(1).await;
    volumes(&site, &[("default", "a"), ("secret", "b")]).await;
    let node = site.node("n1");
    let _session = node.join(0).await;
    let ask = |volume: &str, external_id: &str| VolumeAsk {
        volume: volume.into(),
        plugin: "p".into(),
        external_id: external_id.into(),
        ..VolumeAsk::default()
    };
    let mut client = node.client(0);
    for (volume, external_id) in [("a", "none"), ("none", "ext-default-a")] {
        let found = client.volume(ask(volume, external_id)).await.unwrap().into_inner();
        let found = (found.namespace, found.volume, found.external_id);
        assert_eq!(found, ("default".into(), "a".into(), "ext-default-a".into()), "{volume} {external_id}");
    }
    for (external_id, due) in [("none", Code::NotFound), ("", Code::NotFound), ("\n", Code::InvalidArgument)]
    {
        assert_eq!(client.volume(ask("none", external_id)).await.unwrap_err().code(), due, "{external_id:?}");
    }
    // The node does not see that namespace.
    let refused = Refusal::of(&client.volume(ask("none", "ext-secret-b")).await.unwrap_err());
    assert!(refused.kind == "AlreadyExists" && !refused.message.contains("secret"), "{refused:?}");
}
