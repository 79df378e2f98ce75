//! Claims that the servers have and a host has not, because a server wrote them after the host had given the call up.

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{CallName, ClaimAsk, ListAsk, Owed, ReleaseAsk};
use csid_client::Client;
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::world::{World, count, eventually, world};

use crate::site::{Node, ask};
use crate::*;

/// Returns the node's row at the servers.
async fn node_row(site: &Site, node: &str) -> serde_json::Value {
    let rows = site.raw().await.below(&format!("/csid/v1/node/{node}")).await;
    serde_json::from_slice(&rows[0].value).unwrap()
}

/// Has the server write a claim of this node for the consumer, by a call of a name that csid does not know any more.
async fn write_late(site: &Site, link: &Node, volume: &str, consumer: &str, journal: &str) {
    write_by(site, link, volume, consumer, &format!("{journal}.late")).await;
}

/// Does the same by a call of this name.
async fn write_by(site: &Site, link: &Node, volume: &str, consumer: &str, call: &str) {
    let row = node_row(site, "n1").await;
    let ask = ClaimAsk {
        call: call.to_owned(),
        // The client of these tests.
        uid: 0,
        boot: row["boot"].as_str().expect("a boot").to_owned(),
        ..ask(volume, consumer)
    };
    // The server may not know yet what the plugin does.
    eventually("the server has written the claim", async || link.client(0).claim(ask.clone()).await.is_ok())
        .await;
}

/// Returns the beginning of the names of csid's calls, by that of a claim that it has.
async fn calls_of(client: &Client, link: &Node, volume: &str) -> String {
    mount_registered(client, volume, "web").await.unwrap();
    let call = call_at_servers(link, volume).await;
    call.split_once('.').expect("a beginning").0.to_owned()
}

/// Returns the call of the claim that the servers have.
async fn call_at_servers(link: &Node, volume: &str) -> String {
    let ask = ListAsk { own: true, volume: volume.into(), ..ListAsk::default() };
    let mut pages = link.client(0).volumes(ask).await.unwrap().into_inner();
    let page = pages.message().await.unwrap().expect("a page");
    page.volumes[0].claims[0].call.clone()
}

/// Sends all that csid may have sent for a call that it has given up.
async fn say_late(site: &Site, link: &Node, volume: &str, call: &str) {
    let boot = node_row(site, "n1").await["boot"].as_str().expect("a boot").to_owned();
    let (call, volume, consumer) = (call.to_owned(), volume.to_owned(), "web".to_owned());
    let name =
        CallName { call: call.clone(), volume: volume.clone(), boot: boot.clone(), ..CallName::default() };
    link.client(0).withdraw(name).await.unwrap();
    let owed = Owed { call, volume, consumer, boot, ..Owed::default() };
    link.client(0).detached(owed).await.unwrap();
}

/// Kills csid, and starts it again. It joins once more, and compares.
async fn restart(w: &mut World) -> Client {
    w.kill();
    assert!(w.launch(&[]).await);
    joined(w).await;
    let client = w.client().await;
    healthy(&client, "p").await;
    client
}

/// A server has lost the claim of a mount, and has another one of the node. Its end would free the volume under the mount.
#[test]
fn unheld_claim_is_kept_while_the_volume_is_mounted() {
    world(async |w| {
        let site = one_server(&["data", "used"]).await;
        let (client, link) = n1(w, &site).await;
        let journal = calls_of(&client, &link, "used").await;
        mount_registered(&client, "data", "web").await.unwrap();
        site.raw().await.delete(b"/csid/v1/vol/default/data/claim/n1/web").await;
        write_late(&site, &link, "data", "old", &journal).await;
        let release = || {
            let volume = "data".into();
            let (node, consumer, deadline_ms) = ("n1".into(), "old".into(), 4000);
            ReleaseAsk { volume, node, consumer, deadline_ms, ..ReleaseAsk::default() }
        };
        site.operator(0, "all").release(release()).await.expect_err("the volume is mounted");
        servers_have(&site, "data", &["n1/old"]).await;
        unmount(&client, "data", "web").await.unwrap();
        eventually("the claim is released", async || {
            site.operator(0, "all").release(release()).await.is_ok()
        })
        .await;
        servers_have(&site, "data", &[]).await;
    });
}

#[test]
fn claim_written_after_its_end_is_ended() {
    world(async |w| {
        let site = one_server(&["data", "used", "old"]).await;
        let (client, link) = n1(w, &site).await;
        let journal = calls_of(&client, &link, "used").await;
        write_late(&site, &link, "data", "web", &journal).await;
        // The volume of a claim of another journal may be mounted.
        write_late(&site, &link, "old", "web", "another-journal").await;
        let client_again = restart(w).await;
        servers_have(&site, "data", &[]).await;
        servers_have(&site, "used", &["n1/web"]).await;
        servers_have(&site, "old", &["n1/web"]).await;
        eventually("csid has one claim", async || claims(&client_again).await.len() == 1).await;
        // Another host gets the volume, and so does this one afterwards.
        let other = site.node("n2");
        let _session = other.join(0).await;
        let id = other.claim(0, "data").await.unwrap();
        other.detached(0, "data", &id).await.unwrap();
        mount_registered(&client_again, "data", "web").await.unwrap();
        for volume in ["data", "used"] {
            unmount(&client_again, volume, "web").await.unwrap();
            servers_have(&site, volume, &[]).await;
        }
        // The comparison has ended long ago.
        servers_have(&site, "old", &["n1/web"]).await;
        w.nothing_left(&client_again).await;
    });
}

/// A backup of etcd has it. No server ends it: none is its keeper. Its plugin has no controller, so it stays pending.
#[test]
fn pending_claim_that_no_call_waits_for_is_ended() {
    world(async |w| {
        let site = one_server(&["used"]).await;
        let mut register = site::register("data", "single-node-writer");
        if let Some(What::Register(register)) = &mut register.what {
            register.plugin = "away".into();
        }
        site.operator(0, "all").change(register).await.unwrap();
        let (client, link) = n1(w, &site).await;
        let journal = calls_of(&client, &link, "used").await;
        let mut raw = site.raw().await;
        let [head, row] = ["data/head", "used/claim/n1/web"].map(|key| format!("/csid/v1/vol/default/{key}"));
        let mut claim: serde_json::Value =
            serde_json::from_slice(&raw.below(&row).await.remove(0).value).unwrap();
        claim["call"] = format!("node/n1/{journal}.late").into();
        for (key, value) in [("state", "pending"), ("id", "late"), ("keeper", "")] {
            claim[key] = value.into();
        }
        claim["kept"] = false.into();
        raw.put("/csid/v1/vol/default/data/claim/n1/web", &claim.to_string()).await;
        let of_head = raw.below(&head).await.remove(0).value;
        raw.put(&head, &String::from_utf8(of_head).unwrap()).await;
        servers_have(&site, "data", &["n1/web"]).await;
        let client = {
            drop(client);
            restart(w).await
        };
        servers_have(&site, "data", &[]).await;
        unmount(&client, "used", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn killed_host_ends_a_late_claim_all_the_same() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let fault = Fault::of(w);
        let (client, link) = n1(w, &site).await;
        let journal = calls_of(&client, &link, "data").await;
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        let edges = ["registration.before", "registration.after", "Detached.before", "Detached.after"];
        for edge in edges {
            write_late(&site, &link, "data", "web", &journal).await;
            w.kill();
            fault.arm(&format!("{edge}:1"));
            w.launch(&[]).await;
            eventually(&format!("csid is killed at {edge}"), async || w.dead()).await;
            assert!(fault.killed_at(edge));
            fault.disarm();
            assert!(w.launch(&[]).await);
            joined(w).await;
            let client = w.client().await;
            healthy(&client, "p").await;
            servers_have(&site, "data", &[]).await;
            eventually("csid has no claim", async || claims(&client).await.is_empty()).await;
        }
        count("kills", edges.len());
        let client = w.client().await;
        w.nothing_left(&client).await;
    });
}

/// csid has given a call up, and mounts the volume by the next one, which finds the claim of the first.
#[test]
fn late_words_do_not_end_the_claim_of_a_mount() {
    world(async |w| {
        let site = one_server(&["data", "used"]).await;
        let (client, link) = n1(w, &site).await;
        let journal = calls_of(&client, &link, "used").await;
        let late = format!("{journal}.{:016x}.late", 1);
        write_by(&site, &link, "data", "web", &late).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let call = call_at_servers(&link, "data").await;
        assert!(call.starts_with(&format!("{journal}.")) && call != late, "{call}");
        let before = claims_at_servers(&site, "data").await;
        say_late(&site, &link, "data", &late).await;
        write_by(&site, &link, "data", "web", &late).await;
        say_late(&site, &link, "data", &late).await;
        assert_eq!(claims_at_servers(&site, "data").await, before);

        // The claim that csid has in its journal is the one at the servers.
        restart(w).await;
        let client = w.client().await;
        tokio::time::sleep(std::time::Duration::from_secs(6)).await;
        assert_eq!(claims_at_servers(&site, "data").await, before, "csid took it for another's");
        for volume in ["data", "used"] {
            unmount(&client, volume, "web").await.unwrap();
            servers_have(&site, volume, &[]).await;
        }
        w.nothing_left(&client).await;
    });
}

/// An operator ends a claim while the host is off. So the host's next boot makes another one.
#[test]
fn claim_made_in_another_boot_has_a_name_of_it() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, link) = n1(w, &site).await;
        let before = calls_of(&client, &link, "data").await;
        let old = call_at_servers(&link, "data").await;
        w.reboot().await;
        let by_force = ReleaseAsk { force: true, ..release_ask("data", "n1") };
        site.operator(0, "all").release(by_force).await.unwrap();
        servers_have(&site, "data", &[]).await;
        let client = w.start().await;
        healthy(&client, "p").await;
        eventually("the mount is there again", async || {
            row(&client, "data", "web").await.is_some_and(|row| row.state == "mounted")
        })
        .await;
        let call = call_at_servers(&link, "data").await;
        assert!(!call.starts_with(&format!("{before}.")), "{call} has the name of the earlier boot");
        say_late(&site, &link, "data", &old).await;
        servers_have(&site, "data", &["n1/web"]).await;
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

/// The mount has its turn before the servers know the end of the earlier claim, and reports that end itself.
#[test]
fn mount_reports_the_end_of_its_earlier_claim() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let fault = Fault::of(w);
        let (client, _link) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        fault.arm("Detached.held");
        let unmounting = tokio::spawn({
            let client = client.clone();
            async move { unmount(&client, "data", "web").await }
        });
        fault.reached("Detached").await;
        let mounting = mount_begins(&client).await;
        unmounting.await.unwrap().expect("an unmount needs no server");
        fault.disarm();
        mounting.await.unwrap().unwrap();
        servers_have(&site, "data", &["n1/web"]).await;
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}
