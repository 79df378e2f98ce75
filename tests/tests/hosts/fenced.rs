//! Claims that end at the servers by an operator's word, while the host goes on.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{FenceAsk, NodeAsk, NodeChange, ReleaseAsk};
use csid_client::{Client, Kind, MountOptions};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::hung::{FILE, LOOKS};
use csid_tests::kernel;
use csid_tests::world::{World, eventually, refusal, world};

use crate::*;

/// Fences a node, as an operator who has just looked at it.
pub(crate) async fn fence(site: &Site, node: &str) {
    let mut admin = site.admin(0, "all");
    let revision = admin.node(NodeAsk { node: node.into() }).await.unwrap().into_inner().revision;
    let change = Some(Change::Fence(FenceAsk { reason: "no answer".into(), revision, by_hand: false }));
    admin.set_node(NodeChange { node: node.into(), change }).await.unwrap();
}

pub(crate) async fn fenced(w: &World) {
    eventually("csid is fenced", async || w.status().contains("refused as fenced")).await;
}

/// Starts this world's csid as the node `n1`, which gives up volumes after a fence. Its link ends with the returned node.
async fn n1_that_unmounts(w: &mut World, site: &Site) -> (Client, Node) {
    let node = site.node("n1");
    w.add_plugin_and("p", &[], "").await;
    w.configure(&format!("{}on-fenced = \"unmount\"\n", of_node("n1", node.run())));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    (client, node)
}

/// Kills csid, and starts it again.
async fn restart(w: &mut World) -> Client {
    w.kill();
    assert!(w.launch(&[]).await);
    let client = w.client().await;
    healthy(&client, "p").await;
    client
}

#[test]
fn claim_ended_by_force_is_asked_for_again() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        claim(&client, "data", "web").await.unwrap();
        let by_force = ReleaseAsk { force: true, ..release_ask("data", "n1") };
        site.operator(0, "all").release(by_force).await.unwrap();
        servers_have(&site, "data", &[]).await;
        let client = restart(w).await;
        eventually("csid has learned it", async || {
            events(&client, 0)
                .await
                .iter()
                .any(|event| event.kind == "claim-gone" && event.subject == "default/data")
        })
        .await;
        assert_eq!(claims(&client).await.len(), 1, "the claim was this host's, and stays");
        let other = site.node("n2");
        let mut session = other.join(0).await;
        session.report_name("i-2").await;
        let id = other.claim(0, "data").await.unwrap();
        let (kind, error) = refusal(mount_registered(&client, "data", "web").await);
        assert_eq!(
            (kind, error.message.contains("n2/web")),
            (Kind::ClaimConflict, true),
            "{}",
            error.message
        );
        other.detached(0, "data", &id).await.unwrap();
        mount_registered(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &["n1/web"]).await;
        unmount(&client, "data", "web").await.unwrap();
        release(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn fenced_host_mounts_nothing_until_it_is_clean() {
    world(async |w| {
        let site = one_server(&["data", "more"]).await;
        let (client, _link) = n1(w, &site).await;
        let mounted = mount_registered(&client, "data", "web").await.unwrap();
        claim(&client, "more", "web").await.unwrap();
        fence(&site, "n1").await;
        for volume in ["data", "more"] {
            servers_have(&site, volume, &[]).await;
        }
        fenced(w).await;
        let mut client = client;
        for _ in 0..2 {
            let (kind, error) = refusal(mount_registered(&client, "more", "web").await);
            assert_eq!(
                (kind, error.message.contains("fenced")),
                (Kind::Unavailable, true),
                "{}",
                error.message
            );
            assert_eq!(row(&client, "data", "web").await.unwrap().state, "mounted", "nothing is touched");
            let mounts = kernel::mounts().unwrap();
            assert!(mounts.iter().any(|mount| mount.point.as_os_str() == mounted.source.as_str()));
            client = restart(w).await;
            fenced(w).await;
        }
        unmount(&client, "data", "web").await.expect("an unmount needs no server");
        assert!(!w.status().contains("joined"), "a claim is left: {}", w.status());
        // The servers cannot be asked, so the caller learns no more than that it has begun.
        let (kind, _) = refusal(release(&client, "more", "web").await);
        assert_eq!(kind, Kind::Unavailable);
        joined(w).await;
        mount_registered(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &["n1/web"]).await;
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn fenced_host_gives_up_what_is_not_in_use() {
    world(async |w| {
        let site = one_server(&["data", "more", "open"]).await;
        let (client, _node) = n1_that_unmounts(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        claim(&client, "more", "web").await.unwrap();
        let mounted = mount_registered(&client, "open", "web").await.unwrap();
        let file = File::create(format!("{}/file", mounted.source)).unwrap();
        fence(&site, "n1").await;
        fenced(w).await;
        eventually("what is not in use is given up", async || {
            // Their ends are owed to the servers.
            let claims = claims(&client).await;
            claims.iter().all(|claim| (claim.volume == "open") == (claim.state == "taken"))
        })
        .await;
        assert!(row(&client, "data", "web").await.is_none());
        assert_eq!(row(&client, "open", "web").await.unwrap().state, "mounted");
        assert!(!w.status().contains("joined"), "a mount is left: {}", w.status());
        drop(file);
        joined(w).await;
        eventually("the servers know the ends", async || claims(&client).await.is_empty()).await;
        mount_registered(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &["n1/web"]).await;
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A process has a file of each mount open: an unmount without a detach is refused as Busy.
#[test]
fn fenced_host_detaches_dead_mount_and_keeps_hung() {
    world(async |w| {
        let site = one_server(&["dead", "hangs"]).await;
        let (client, _node) = n1_that_unmounts(w, &site).await;
        w.hang("p", "NodeStageVolume");
        let dead = mount_registered(&client, "dead", "web").await.unwrap().source;
        let hangs = mount_registered(&client, "hangs", "web").await.unwrap().source;
        let file_of_dead = File::open(Path::new(&dead).join(FILE)).unwrap();
        let file_of_hung = File::open(Path::new(&hangs).join(FILE)).unwrap();
        w.hung().end("ext-dead");
        w.hung().hold_of("ext-hangs", &LOOKS);
        fence(&site, "n1").await;
        fenced(w).await;
        eventually("the dead mount is given up", async || {
            // The ends of claims are owed to the servers.
            let claims = claims(&client).await;
            claims.iter().all(|claim| (claim.volume == "hangs") == (claim.state == "taken"))
        })
        .await;
        assert!(row(&client, "dead", "web").await.is_none());
        let mounts = kernel::mounts().unwrap();
        assert!(mounts.iter().all(|mount| mount.point.as_os_str() != dead.as_str()), "it is mounted still");
        w.hung().hangs("ext-hangs").await;
        assert_eq!(row(&client, "hangs", "web").await.unwrap().state, "mounted");
        assert!(!w.status().contains("joined"), "a mount is left: {}", w.status());
        w.hung().release();
        drop((file_of_dead, file_of_hung));
        joined(w).await;
        eventually("the servers know the ends", async || claims(&client).await.is_empty()).await;
        servers_have(&site, "dead", &[]).await;
        servers_have(&site, "hangs", &[]).await;
        w.nothing_left(&client).await;
    });
}

/// Starts csid again on a host that reaches no server. Returns why it mounts a claimed volume not.
async fn refused_while_cut_off(w: &mut World) -> String {
    assert!(w.launch(&[]).await);
    let client = w.client().await;
    healthy(&client, "p").await;
    cut_off(w).await;
    let options = within(Duration::from_secs(3), MountOptions::default());
    let (kind, error) = refusal(client.mount(NAMESPACE, "data", "web", options).await);
    assert_eq!((kind, error.details.retryable), (Kind::Unavailable, Some(true)), "{}", error.message);
    error.message
}

#[test]
fn fence_outlives_csid_until_another_boot() {
    world(async |w| {
        let site = one_server(&["data", "more"]).await;
        let (client, mut node) = n1(w, &site).await;
        claim(&client, "data", "web").await.unwrap();
        mount_registered(&client, "more", "web").await.unwrap();
        fence(&site, "n1").await;
        fenced(w).await;
        node.link.kill();
        for _ in 0..2 {
            w.kill();
            let why = refused_while_cut_off(w).await;
            assert!(why.contains("fenced"), "{why}");
        }
        let client = w.client().await;
        assert_eq!(row(&client, "more", "web").await.unwrap().state, "mounted", "nothing is touched");
        w.reboot().await;
        let why = refused_while_cut_off(w).await;
        assert!(!why.contains("fenced"), "{why}");
        node.link = site.link("n1", &site.client_pair("csid://prod/node/n1"), &site.addresses);
        joined(w).await;
        let client = w.client().await;
        mount_registered(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &["n1/web"]).await;
        // The fence is over, so it is no hindrance after the next restart, either.
        node.link.kill();
        w.kill();
        assert!(w.launch(&[]).await);
        cut_off(w).await;
        let client = w.client().await;
        healthy(&client, "p").await;
        unmount(&client, "data", "web").await.unwrap();
        mount_registered(&client, "data", "web").await.expect("the claim of this boot counts");
        unmount(&client, "data", "web").await.unwrap();
        unmount(&client, "more", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn fence_is_in_the_journal_before_it_is_shown() {
    for (edge, counts) in [("Fence.before:1", false), ("Fence.after:1", true)] {
        world(async move |w| {
            let site = one_server(&["data"]).await;
            let fault = Fault::of(w);
            let (client, mut node) = n1(w, &site).await;
            claim(&client, "data", "web").await.unwrap();
            fault.arm(edge);
            fence(&site, "n1").await;
            let mut shown = String::new();
            eventually("csid is killed", async || {
                shown.push_str(&w.status());
                w.dead()
            })
            .await;
            assert!(!shown.contains("refused as fenced"), "{edge}: csid showed it first: {shown}");
            node.link.kill();
            fault.disarm();
            match counts {
                true => {
                    let why = refused_while_cut_off(w).await;
                    assert!(why.contains("fenced"), "{why}");
                }
                // Nobody has seen the fence here, and a server has to say it again.
                false => {
                    assert!(w.launch(&[]).await);
                    cut_off(w).await;
                }
            }
            node.link = site.link("n1", &site.client_pair("csid://prod/node/n1"), &site.addresses);
            fenced(w).await;
        });
    }
}

/// The row says mounted, and its claim was granted before the fence.
#[test]
fn fenced_host_repairs_no_mount() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let mounted = mount_registered(&client, "data", "web").await.unwrap();
        fence(&site, "n1").await;
        fenced(w).await;
        rustix::mount::unmount(mounted.source.as_str(), rustix::mount::UnmountFlags::empty()).unwrap();
        let (kind, error) = refusal(mount_registered(&client, "data", "web").await);
        assert_eq!((kind, error.message.contains("fenced")), (Kind::Unavailable, true), "{}", error.message);
        let mounts = kernel::mounts().unwrap();
        assert!(mounts.iter().all(|mount| mount.point.as_os_str() != mounted.source.as_str()));
        unmount(&client, "data", "web").await.expect("an unmount needs no server");
        joined(w).await;
        w.nothing_left(&client).await;
    });
}

/// The volumes of the host that is cut off.
const HELD: [&str; 2] = ["data", "more"];

/// Mounts on the second host what the first had. Both stay mounted until the first host's test ends.
async fn mounts_both(w: &mut World, link: &Path, _: PathBuf, mut first: Other) {
    let client = start_node(w, "n2", link).await;
    first.say("ready");
    first.hear("its machine is off").await;
    for volume in HELD {
        mount_registered(&client, volume, "web").await.unwrap();
    }
    let calls = w.plugin("p").volume_calls().len();
    first.say("mounted");
    first.hear("it is back").await;
    for volume in HELD {
        assert_eq!(row(&client, volume, "web").await.unwrap().state, "mounted");
    }
    assert_eq!(w.plugin("p").volume_calls().len(), calls, "the first host's return made calls here");
    for volume in HELD {
        unmount(&client, volume, "web").await.unwrap();
    }
    w.nothing_left(&client).await;
}

/// Fences `n1` while it is cut off, in error: its machine is on. One of its two volumes is unmounted meanwhile, and `n2` mounts both. Then `n1` reaches the
/// server again, and touches nothing. `ends` ends what `n1` has mounted.
fn fenced_while_cut_off<F>(ends: F)
where
    F: AsyncFnOnce(&mut World, Client) -> Client + Send + 'static,
{
    world(async move |w| {
        let (site, wire) = one_server_on_wire(&HELD).await;
        let (client, _link) = n1(w, &site).await;
        let (mut n2, thread, _n2) = start_user(&site, w, "n2", mounts_both).await;
        let path = mount_registered(&client, "data", "web").await.unwrap().source;
        mount_registered(&client, "more", "web").await.unwrap();
        wire.cut();
        cut_off(w).await;
        unmount(&client, "more", "web").await.expect("an unmount needs no server");
        let is_owed = async |client: &Client| {
            let states = claims(client).await.into_iter().map(|row| (row.volume, row.state));
            let due = [("data", "taken"), ("more", "controller-detached")];
            states.eq(due.map(|(volume, state)| (volume.to_owned(), state.to_owned())))
        };
        assert!(is_owed(&client).await);
        fence(&site, "n1").await;
        for volume in HELD {
            servers_have(&site, volume, &[]).await;
        }
        n2.say("its machine is off");
        n2.hear("mounted").await;
        let theirs =
            async || [claims_at_servers(&site, "data").await, claims_at_servers(&site, "more").await];
        let before = theirs().await;
        assert!(before.iter().all(|claims| claims.len() == 1 && claims[0].0 == "n2/web"), "{before:?}");
        let (calls, mount) =
            (w.plugin("p").volume_calls().len(), kernel::mount_id(Path::new(&path)).unwrap());

        wire.heal();
        let mut client = client;
        for _ in 0..2 {
            fenced(w).await;
            let (kind, error) = refusal(mount_registered(&client, "more", "web").await);
            assert_eq!(
                (kind, error.message.contains("fenced")),
                (Kind::Unavailable, true),
                "{}",
                error.message
            );
            assert!(is_owed(&client).await, "{:?}", claims(&client).await);
            assert_eq!(row(&client, "data", "web").await.unwrap().state, "mounted");
            assert_eq!(kernel::mount_id(Path::new(&path)).unwrap(), mount, "the mount is another one");
            client = restart(w).await;
        }
        fenced(w).await;
        assert_eq!(w.plugin("p").volume_calls().len(), calls, "csid called the plugin");
        assert_eq!(theirs().await, before);

        let client = ends(w, client).await;
        joined(w).await;
        eventually("nothing is owed", async || claims(&client).await.is_empty()).await;
        assert_eq!(theirs().await, before, "the host's return changed the other's claims");
        n2.say("it is back");
        thread.join().unwrap();
        for volume in HELD {
            servers_have(&site, volume, &[]).await;
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn fenced_host_that_is_back_touches_nothing() {
    fenced_while_cut_off(async |_, client| {
        unmount(&client, "data", "web").await.expect("an unmount needs no server");
        client
    });
}

#[test]
fn fenced_host_that_reboots_leaves_others_claims() {
    fenced_while_cut_off(async |w, _| {
        w.reboot().await;
        assert!(w.launch(&[]).await);
        joined(w).await;
        let client = w.client().await;
        healthy(&client, "p").await;
        // The other host has the volume, so it is not mounted again.
        unmount(&client, "data", "web").await.unwrap();
        client
    });
}
