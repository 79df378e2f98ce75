//! Hosts of a cluster whose etcd is restored from a backup. Their journals bring back what the backup lacks.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{
    Accept, Machine, NodeAsk, NodeChange, RestoredAsk, ResumeAsk, ServerRows, ServersAsk, VolumeAsk,
};
use csid_client::{Client, Kind};
use csid_tests::ask::*;
use csid_tests::world::{World, eventually, refusal, world};
use serde_json::Value;

use crate::lying::Lying;
use crate::*;

pub(crate) async fn servers(site: &Site) -> ServerRows {
    site.admin(0, "all").servers(ServersAsk {}).await.unwrap().into_inner()
}

pub(crate) async fn awaits(site: &Site, due: &[&str]) {
    eventually(&format!("the cluster recovers, and awaits {due:?}"), async || {
        let rows = servers(site).await;
        rows.mode == "recovering" && rows.awaited == due
    })
    .await;
}

/// Says as an operator that etcd was restored, whose generation is this one.
pub(crate) async fn restored(site: &Site, generation: u64) {
    site.admin(0, "all").restored(RestoredAsk { generation, past: 0 }).await.unwrap();
}

async fn refused_as(w: &World, reason: &str) {
    eventually(&format!("csid is refused as {reason}"), async || {
        w.status().contains(&format!("refused as {reason}"))
    })
    .await;
}

/// Ends the recovery.
pub(crate) async fn resume(site: &Site) {
    let generation = servers(site).await.generation;
    let ask = ResumeAsk { generation, step: Step::End.into(), ..ResumeAsk::default() };
    let rows = site.admin(0, "all").resume(ask).await.unwrap().into_inner();
    assert_eq!((rows.mode.as_str(), rows.awaited.len()), ("normal", 0));
}

/// Resumes without a node, as an operator who has just looked.
async fn resume_without(site: &Site, node: &str) {
    let mut admin = site.admin(0, "all");
    let revision = admin.node(NodeAsk { node: node.into() }).await.unwrap().into_inner().revision;
    let (generation, step) = (servers(site).await.generation, Step::Fence.into());
    let ask = ResumeAsk { generation, node: node.into(), revision, by_hand: true, step };
    admin.resume(ask).await.unwrap();
    resume(site).await;
}

/// Asserts that a volume is mounted as before, and that the plugin was not called for it again.
pub(crate) async fn is_untouched(w: &mut World, client: &Client, volume: &str, calls: usize) {
    assert_eq!(row(client, volume, "web").await.unwrap().state, "mounted");
    assert_eq!(w.plugin("p").volume_calls().len(), calls, "the plugin was called");
}

/// The host n2: it holds `b` and, since the backup, `new-b`.
async fn second(w: &mut World, link: &Path, mut first: Other) {
    let client = start_node(w, "n2", link).await;
    mount_registered(&client, "b", "web").await.unwrap();
    first.say("before");
    first.hear("saved").await;
    mount_registered(&client, "new-b", "web").await.unwrap();
    let calls = w.plugin("p").volume_calls().len();
    first.say("after");
    first.hear("normal").await;
    is_untouched(w, &client, "new-b", calls).await;
    for volume in ["b", "new-b"] {
        unmount(&client, volume, "web").await.unwrap();
    }
    w.nothing_left(&client).await;
}

/// The host n3: it holds `c` and, since the backup, `new-c`. It is off while the cluster recovers.
async fn third(w: &mut World, link: &Path, mut first: Other) {
    let client = start_node(w, "n3", link).await;
    mount_registered(&client, "c", "web").await.unwrap();
    first.say("before");
    first.hear("saved").await;
    mount_registered(&client, "new-c", "web").await.unwrap();
    w.kill();
    first.say("after");
    first.hear("normal").await;
    assert!(w.launch(&[]).await);
    let client = w.client().await;
    healthy(&client, "p").await;
    eventually("csid is fenced", async || w.status().contains("refused as fenced")).await;
    for volume in ["c", "new-c"] {
        unmount(&client, volume, "web").await.unwrap();
    }
    joined(w).await;
    w.nothing_left(&client).await;
}

#[test]
fn restored_etcd_has_the_claims_of_all_hosts() {
    world(async |w| {
        let mut site = Site::start(2).await;
        for volume in ["a", "b", "c", "old", "new-a", "new-b", "new-c", "free"] {
            site.register(volume, "single-node-writer").await;
        }
        let (client, _link) = n1(w, &site).await;
        let (mut other, first) = Other::pair();
        let (mut off, of_third) = Other::pair();
        let links = ["n2", "n3"].map(|node| site.node(node));
        let [second_run, third_run] = [&links[0], &links[1]].map(|link| link.run().to_owned());
        let threads = [
            std::thread::spawn(move || world(async move |w| Box::pin(second(w, &second_run, first)).await)),
            std::thread::spawn(move || world(async move |w| Box::pin(third(w, &third_run, of_third)).await)),
        ];
        for volume in ["a", "old"] {
            mount_registered(&client, volume, "web").await.unwrap();
        }
        other.hear("before").await;
        off.hear("before").await;
        let backup = site.path("backup");
        site.etcd.save(&backup);
        unmount(&client, "old", "web").await.unwrap();
        mount_registered(&client, "new-a", "web").await.unwrap();
        let calls = w.plugin("p").volume_calls().len();
        for host in [&mut other, &mut off] {
            host.say("saved");
            host.hear("after").await;
        }
        for (volume, due) in [("old", &[][..]), ("new-b", &["n2/web"]), ("new-c", &["n3/web"])] {
            servers_have(&site, volume, due).await;
        }

        site.servers[0].kill();
        site.etcd.restore(&backup, Some("after the restore")).await;
        // This server has run on, and finds another etcd. systemd starts it again.
        assert!(!site.servers[1].ended().await);
        assert!(
            site.servers[1].text().contains("etcd was restored from a backup"),
            "{}",
            site.servers[1].text()
        );
        for n in [0, 1] {
            site.servers[n] = site.start_server(n);
        }
        // Nothing begins without an operator.
        refused_as(w, "etcd-restored").await;
        assert_eq!((servers(&site).await.generation, servers(&site).await.mode.as_str()), (1, "restored"));
        is_untouched(w, &client, "new-a", calls).await;
        restored(&site, 1).await;
        awaits(&site, &["n3"]).await;
        for (volume, due) in [
            ("a", &["n1/web"][..]),
            ("old", &[]),
            ("b", &["n2/web"]),
            ("new-a", &["n1/web"]),
            ("new-b", &["n2/web"]),
        ] {
            servers_have(&site, volume, due).await;
        }
        assert!(claims_at_servers(&site, "new-a").await[0].1.contains("\"adopted\":true"));
        let (kind, error) = refusal(claim(&client, "free", "web").await);
        assert_eq!(kind, Kind::Unavailable, "{}", error.message);
        servers_have(&site, "free", &[]).await;
        is_untouched(w, &client, "new-a", calls).await;

        resume_without(&site, "n3").await;
        servers_have(&site, "c", &[]).await;
        joined(w).await;
        eventually("a claim is granted", async || claim(&client, "free", "web").await.is_ok()).await;
        is_untouched(w, &client, "new-a", calls).await;
        other.say("normal");
        off.say("normal");
        for volume in ["a", "new-a"] {
            unmount(&client, volume, "web").await.unwrap();
        }
        release(&client, "free", "web").await.unwrap();
        for thread in threads {
            thread.join().unwrap();
        }
        for volume in ["a", "b", "c", "old", "new-a", "new-b", "new-c", "free"] {
            servers_have(&site, volume, &[]).await;
        }
        w.nothing_left(&client).await;
    });
}

/// With the token of before, a claim in the journal is all that shows the restore.
#[test]
fn restarted_host_shows_that_etcd_went_back() {
    world(async |w| {
        let mut site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let backup = site.path("backup");
        site.etcd.save(&backup);
        let mut raw = site.raw().await;
        // Beats of the server raise the revision of the restored etcd, too.
        for _ in 0..200 {
            raw.put("/other", "1").await;
        }
        mount_registered(&client, "data", "web").await.unwrap();
        let calls = w.plugin("p").volume_calls().len();
        w.kill();
        site.servers[0].kill();
        site.etcd.restore(&backup, None).await;
        site.servers[0] = site.start_server(0);
        assert_eq!((servers(&site).await.generation, servers(&site).await.mode.as_str()), (1, "normal"));
        assert!(claims_at_servers(&site, "data").await.is_empty());
        assert!(w.launch(&[]).await);
        let client = w.client().await;
        healthy(&client, "p").await;
        refused_as(w, "ahead-of-etcd").await;
        assert_eq!((servers(&site).await.generation, servers(&site).await.mode.as_str()), (1, "normal"));
        assert!(claims_at_servers(&site, "data").await.is_empty());
        is_untouched(w, &client, "data", calls).await;
        restored(&site, 1).await;
        servers_have(&site, "data", &["n1/web"]).await;
        awaits(&site, &[]).await;
        resume(&site).await;
        let rows = servers(&site).await;
        assert_eq!((rows.generation, rows.by.as_str()), (2, "operator/all"), "{}", rows.cause);
        joined(w).await;
        is_untouched(w, &client, "data", calls).await;
        // Another restart proves nothing of this generation.
        w.kill();
        assert!(w.launch(&[]).await);
        joined(w).await;
        let client = w.client().await;
        healthy(&client, "p").await;
        assert_eq!(servers(&site).await.generation, 2);
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

/// The mount waits for its restoration, and csid asks for its claim again all the time.
#[test]
fn claim_of_a_host_that_rebooted_comes_back() {
    world(async |w| {
        let mut site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let backup = site.path("backup");
        site.etcd.save(&backup);
        mount_registered(&client, "data", "web").await.unwrap();
        let before = claims_at_servers(&site, "data").await;
        w.reboot().await;
        site.servers[0].kill();
        site.etcd.restore(&backup, Some("after the restore")).await;
        site.servers[0] = site.start_server(0);
        restored(&site, 1).await;
        let client = w.start().await;
        healthy(&client, "p").await;
        servers_have(&site, "data", &["n1/web"]).await;
        awaits(&site, &[]).await;
        assert_eq!(row(&client, "data", "web").await.unwrap().state, "waiting");
        resume(&site).await;
        eventually("the mount is there again", async || {
            row(&client, "data", "web").await.is_some_and(|row| row.state == "mounted")
        })
        .await;
        let id = |rows: &[(String, String)]| {
            let of: Value = serde_json::from_str(&rows[0].1).unwrap();
            of["id"].as_str().unwrap().to_owned()
        };
        assert_eq!(id(&claims_at_servers(&site, "data").await), id(&before), "the claim is another one");
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

/// The server has the page, and has not answered it yet. It knows the end of the claim before the claim.
#[test]
fn claim_that_ends_while_it_is_said_is_ended_once_more() {
    world(async |w| {
        let mut site = one_server(&["data"]).await;
        let (client, link) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let lying = Lying::default();
        lying.takes.store(true, Ordering::Relaxed);
        *lying.welcome.lock().unwrap() = (2, "recovering");
        site.servers[0].kill();
        let socket = link.run().join("s9:7443");
        let serving = lying.start(&socket);
        let said = || lying.said.lock().unwrap().clone();
        eventually("the node says what it holds", async || said() == ["page of 1"]).await;
        unmount(&client, "data", "web").await.unwrap();
        eventually("the claim has ended", async || said() == ["page of 1", "end of web"]).await;
        lying.answer.notify_one();
        eventually("the node has said all", async || {
            said() == ["page of 1", "end of web", "end of web", "last page of 0"]
        })
        .await;
        serving.abort();
        std::fs::remove_file(&socket).unwrap();
        site.servers[0] = site.start_server(0);
        lying.end_sessions();
        w.nothing_left(&client).await;
    });
}

/// A server lies about the generation. The node believes nothing but what it was granted, and an operator can end that.
#[test]
fn lie_about_the_generation_locks_no_host_out() {
    world(async |w| {
        let mut site = one_server(&["data", "more"]).await;
        let (client, link) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let calls = w.plugin("p").volume_calls().len();
        let ask = VolumeAsk { namespace: NAMESPACE.into(), volume: "more".into(), ..VolumeAsk::default() };
        let more = site.operator(0, "all").volume(ask).await.unwrap().into_inner();
        let socket = link.run().join("s9:7443");
        let lying = Lying::default();
        let joined_at = async |w: &World, address: &str| {
            let due = format!("joined at {address}");
            eventually(&due, async || w.status().contains(&due)).await;
        };
        let joined_anew = async |w: &World, before: usize| {
            let sessions = || lying.sessions.load(Ordering::Relaxed);
            eventually("the liar has a session", async || sessions() > before).await;
            joined_at(w, "s9:7443").await;
        };

        // Of no greater generation, it has nothing to recover.
        site.servers[0].kill();
        *lying.welcome.lock().unwrap() = (1, "recovering");
        let serving = lying.start(&socket);
        refused_as(w, "ahead-of-etcd").await;
        let before = lying.sessions.load(Ordering::Relaxed);
        *lying.welcome.lock().unwrap() = (5, "another-mode");
        joined_anew(w, before).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(lying.pages.load(Ordering::Relaxed), 0, "the node has said what it holds");

        // A generation without a grant.
        let before = lying.sessions.load(Ordering::Relaxed);
        *lying.welcome.lock().unwrap() = (1 << 63, "normal");
        lying.end_sessions();
        joined_anew(w, before).await;
        serving.abort();
        std::fs::remove_file(&socket).unwrap();
        site.servers[0] = site.start_server(0);
        lying.end_sessions();
        joined_at(w, &site.addresses[0]).await;

        // A generation with a grant.
        site.servers[0].kill();
        *lying.volume.lock().unwrap() = Some(more);
        let before = lying.sessions.load(Ordering::Relaxed);
        let serving = lying.start(&socket);
        joined_anew(w, before).await;
        claim(&client, "more", "web").await.unwrap();
        serving.abort();
        std::fs::remove_file(&socket).unwrap();
        site.servers[0] = site.start_server(0);
        lying.end_sessions();
        refused_as(w, "ahead-of-etcd").await;
        let row = site.admin(0, "all").node(NodeAsk { node: "n1".into() }).await.unwrap().into_inner();
        assert_eq!(row.ahead.unwrap().generation, 1 << 63);
        let Machine { machine_id, journal_id, .. } = row.machine.unwrap();
        let accept =
            Accept { machine_id, journal_id, revision: row.revision, forget: true, ..Accept::default() };
        let ask = NodeChange { node: "n1".into(), change: Some(Change::Accept(accept)) };
        site.admin(0, "all").set_node(ask).await.unwrap();
        joined_at(w, &site.addresses[0]).await;
        is_untouched(w, &client, "data", calls).await;
        // The journal has that: a restart is no more ahead.
        w.kill();
        assert!(w.launch(&[]).await);
        joined_at(w, &site.addresses[0]).await;
        let row = site.admin(0, "all").node(NodeAsk { node: "n1".into() }).await.unwrap().into_inner();
        assert!(row.ahead.is_none(), "{row:?}");
        let client = w.client().await;
        healthy(&client, "p").await;
        release(&client, "more", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}
