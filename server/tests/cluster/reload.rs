//! Reloads of a server: other grants, another fence, and revoked certificates.

use std::fs;
use std::time::Duration;

use csi_proto::cluster::v1::ServersAsk;
use csi_proto::cluster::v1::admin_client::AdminClient;
use rustix::process::Signal;

use crate::attach::{claiming, user};
use crate::certificates::Pair;
use crate::site::{Refusal, Session, Site, eventually};

/// Replaces text in the configuration of server 0, and has the server take it. Returns when the log has `said` once more.
async fn reload(site: &Site, from: &str, to: &str, said: &str) {
    let file = site.path("s0.toml");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(&file, text.replacen(from, to, 1)).unwrap();
    take(site, said).await;
}

async fn take(site: &Site, said: &str) {
    let count = || site.servers[0].text().matches(said).count();
    let before = count();
    site.servers[0].signal(Signal::HUP);
    eventually("the server has read its files", async || count() > before).await;
}

/// Waits for the end of a session.
async fn over(session: &mut Session) -> Refusal {
    loop {
        match session.next().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the session has ended without a reason"),
            Err(refusal) => return refusal,
        }
    }
}

async fn is_over(session: &mut Session) -> bool {
    tokio::time::timeout(Duration::from_millis(500), over(session)).await.is_ok()
}

const TAKEN: &str = "the configuration was taken";
const NOT_TAKEN: &str = "the configuration was not taken";

#[tokio::test]
async fn reload_takes_grants_and_ends_what_they_allowed() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (n1, mut first) = user(&site, "n1", 0).await;
    let (n2, mut second) = user(&site, "n2", 0).await;
    claiming(&n1, 0, "data").await.unwrap().unwrap();
    let digest = async || {
        let rows = site.admin(0, "all").servers(ServersAsk {}).await.unwrap().into_inner();
        rows.servers[0].grants.clone()
    };
    let before = digest().await;
    let [nodes, one] = ["who = \"node/n*\"", "who = \"node/n1*\""];
    reload(&site, nodes, one, TAKEN).await;
    // The session of a node without a grant ends, and no other does.
    let reason = over(&mut second).await;
    assert!(reason.kind == "NotAuthorized" && reason.message.contains("no grant for join"), "{reason:?}");
    let denied = claiming(&n2, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(denied.kind, "NotAuthorized", "{denied:?}");
    claiming(&n1, 0, "data").await.unwrap().unwrap();
    assert!(!is_over(&mut first).await);
    eventually("the other servers see other grants", async || digest().await != before).await;

    // A file that is wrong changes nothing.
    reload(&site, one, "who = \"n1\"", NOT_TAKEN).await;
    claiming(&n1, 0, "data").await.unwrap().unwrap();
    reload(&site, "who = \"n1\"", nodes, TAKEN).await;
    let (_n2, _again) = user(&site, "n2", 0).await;
    // Other keys count after a restart.
    reload(&site, "cluster = \"prod\"", "cluster = \"prod\"\nmax-claims = 7", "need a restart").await;
    assert!(site.servers[0].text().contains("max-claims"), "{}", site.servers[0].text());
}

#[tokio::test]
async fn revoked_certificate_is_of_no_use_after_a_reload() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (n1, mut first) = user(&site, "n1", 0).await;
    let stolen = site.client_pair("csid://prod/operator/anna");
    let list = async || {
        let mut client = AdminClient::new(site.channel(0, Some(&stolen)));
        client.servers(ServersAsk {}).await.map(drop).map_err(|status| Refusal::of(&status))
    };
    list().await.unwrap();
    // A list that is not there changes nothing.
    let missing = site.path("missing.pem");
    let key = |file: &std::path::Path| format!("cluster = \"prod\"\ncrl = {file:?}");
    reload(&site, "cluster = \"prod\"", &key(&missing), NOT_TAKEN).await;
    list().await.unwrap();
    // So does an empty one.
    fs::write(&missing, "").unwrap();
    take(&site, NOT_TAKEN).await;
    list().await.unwrap();
    let crl = site.authority.revoke(&[&stolen]);
    reload(&site, &key(&missing), &key(&crl), TAKEN).await;
    let refused = list().await.unwrap_err();
    assert!(refused.kind == "NotAuthorized" && refused.message.contains("not valid now"), "{refused:?}");
    // Sessions were verified by earlier lists. A node that is not revoked joins again.
    let reason = over(&mut first).await;
    assert!(reason.kind == "Unavailable" && reason.message.contains("join again"), "{reason:?}");
    let _session = n1.join(0).await;
    claiming(&n1, 0, "data").await.unwrap().unwrap();
    // The same list again ends nothing.
    let (n2, mut second) = user(&site, "n2", 0).await;
    take(&site, TAKEN).await;
    assert!(!is_over(&mut second).await);
    let of_n2 = Pair { certificate: site.path("n2/node.pem"), key: site.path("n2/node.key") };
    site.authority.revoke(&[&of_n2]);
    take(&site, TAKEN).await;
    over(&mut second).await;
    let refused = Refusal::of(&n2.say_hello(0).await.map(drop).unwrap_err());
    assert!(refused.kind == "NotAuthorized" && refused.message.contains("not valid now"), "{refused:?}");
}
