//! Secrets of other calls in a plugin's messages. The controller runs on the host `c1`, and the servers log and pass on what it says.

use csi_proto::cluster::v1::change_ask::What;
use csid_client::Client;
use csid_tests::ask::healthy;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, world};

use crate::controllers::c1_that;
use crate::site::{Node, Session, register};
use crate::*;

const DOES: &str = "controllers = [\"p\"]\ncontroller-credentials = [\"csid.default.*\"]\n";
/// The value in the credential of volume `a`, which the plugin repeats.
const OF_A: &str = "c4n4ry-of-a";

/// Registers a volume with the credential `csid.default.NAME`, which the host of the controller has.
async fn register_secret(w: &mut World, site: &Site, name: &str, value: &str) {
    let document = format!("{{\"password\":{value:?}}}");
    std::fs::write(w.path(&format!("credentials/csid.default.{name}")), document).unwrap();
    w.plugin("p").provision(&format!("ext-{name}"));
    let mut ask = register(name, "single-node-writer");
    let Some(What::Register(of)) = &mut ask.what else { unreachable!() };
    of.spec.as_mut().unwrap().credential = format!("csid.default.{name}");
    site.operator(0, "all").change(ask).await.unwrap();
}

/// The node `n2` with its claim of volume `a`.
struct Claimed {
    n2: Node,
    claim: String,
    _session: Session,
}

/// Starts `c1`, and has `n2` claim volume `a`: the plugin is sent the credential of `a`. From then on the plugin repeats its value.
async fn plugin_that_knows(w: &mut World, site: &Site, link: &Node) -> (Client, Claimed) {
    let client = c1_that(w, link.run(), DOES).await;
    eventually("the servers know the controller", async || {
        !site.raw().await.below("/csid/v1/plugin/p").await.is_empty()
    })
    .await;
    register_secret(w, site, "a", OF_A).await;
    let n2 = site.node("n2");
    let mut session = n2.join(0).await;
    session.report_name("node n2").await;
    let claim = n2.claim(0, "a").await.unwrap();
    assert_eq!(w.plugin("p").count("ControllerPublishVolume", "ext-a"), 1);
    let words = Act::Say(9, format!("the session of {OF_A} is open"));
    w.plugin("p").rules(
        ["b", "data"]
            .map(|name| Rule::always("ControllerPublishVolume", words.clone()).of(&format!("ext-{name}"))),
    );
    (client, Claimed { n2, claim, _session: session })
}

/// Has a claim of the volume fail, and looks for the value of `a` in what the hosts and servers show of that. Then detaches `a`.
async fn fails_without_words(w: &mut World, site: &Site, client: &Client, claimed: &Claimed, volume: &str) {
    let Claimed { n2, claim, .. } = claimed;
    let refused = n2.claim(0, volume).await.unwrap_err();
    assert!(refused.message.contains("FAILED_PRECONDITION"), "the plugin has answered: {refused:?}");
    let logs: String = site.servers.iter().map(|server| server.text()).collect();
    let log = std::fs::read_to_string(w.path("csid.log")).unwrap();
    let shown = format!("{refused:?}\n{logs}\n{log}");
    let found = shown.lines().find(|line| line.contains(OF_A));
    assert_eq!(found, None, "no message has the secret of another call");
    w.honest();
    n2.detached(0, "a", claim).await.unwrap();
    servers_have(site, "a", &[]).await;
    w.nothing_left(client).await;
}

#[test]
fn call_with_secrets_shows_no_other_calls_secrets() {
    world(async |w| {
        let site = one_server(&[]).await;
        let link = site.node("c1");
        let (client, claimed) = plugin_that_knows(w, &site, &link).await;
        register_secret(w, &site, "b", "an0ther-of-b").await;
        fails_without_words(w, &site, &client, &claimed, "b").await;
    });
}

#[test]
fn restarted_csid_shows_no_earlier_secrets() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let link = site.node("c1");
        let (client, claimed) = plugin_that_knows(w, &site, &link).await;
        drop(client);
        w.kill();
        assert!(w.launch(&[]).await);
        joined(w).await;
        let client = w.client().await;
        healthy(&client, "p").await;
        fails_without_words(w, &site, &client, &claimed, "data").await;
    });
}
