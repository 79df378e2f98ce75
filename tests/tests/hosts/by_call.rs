//! AttachVolume and DetachVolume through the host `n-attaches`. The plugin's controller runs on the host `c1` alone.

use std::path::{Path, PathBuf};

use csid_client::{AttachOptions, Client, DetachOptions, Kind};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::script::Half;
use csid_tests::world::{World, count, eventually, refusal, world};

use crate::kills::again;
use crate::*;

const ATTACH: &[&str] = &["PUBLISH_UNPUBLISH_VOLUME", "PUBLISH_READONLY"];
/// The plugin's name of the node that volumes are attached to.
const ID: &str = "node n2";

/// Starts this world's csid as `c1`, which has the plugin's controller.
async fn c1(w: &mut World, link: &Path) -> Client {
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| {
        script.control(ATTACH);
        script.node_id = "node c1".into();
        script.others = vec!["node n-attaches".into(), ID.into()];
    });
    plugin.kill();
    plugin.start().await;
    plugin.provision("ext-data");
    w.configure(&format!("{}controllers = [\"p\"]\n", of_node("c1", link)));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    client
}

fn attach() -> AttachOptions {
    AttachOptions { deadline_usec: Some(60_000_000), ..AttachOptions::default() }
}

fn forget() -> DetachOptions {
    DetachOptions { forget: Some(true), ..DetachOptions::default() }
}

/// Attaches and detaches as the other host's test says so.
async fn uses(w: &mut World, link: &Path, storage: PathBuf, mut other: Other) {
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| {
        script.control(ATTACH);
        script.serves = vec![Half::Node];
        script.node_id = "node n-attaches".into();
    });
    plugin.kill();
    plugin.shares(storage);
    plugin.start().await;
    w.configure(&of_node("n-attaches", link));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    other.say("ready");
    loop {
        match other.hears.recv().await {
            Some("lie") => {
                let inline = AttachOptions {
                    plugin: Some("p".to_owned()),
                    external_id: Some("ext-data".to_owned()),
                    ..attach()
                };
                let given = AttachOptions { secrets: Some(secrets(&[("key", "hunter2")])), ..attach() };
                for wrong in [inline, given] {
                    let refused = client.attach_volume(NAMESPACE, "data", ID, wrong).await;
                    assert_eq!(refusal(refused).0, Kind::NotSupported);
                }
                let none = client.attach_volume(NAMESPACE, "none", ID, attach()).await;
                assert_eq!(refusal(none).0, Kind::NotFound);
                let none = client.detach_volume(NAMESPACE, "data", ID, forget()).await;
                assert_eq!(refusal(none).0, Kind::NotAuthorized, "it has no grant for that");
                client.detach_volume(NAMESPACE, "data", ID, DetachOptions::default()).await.unwrap();
                other.say("was refused");
            }
            Some("attach") => {
                let context = client.attach_volume(NAMESPACE, "data", ID, attach()).await.unwrap();
                assert!(!context.is_empty());
                let same = client.attach_volume(NAMESPACE, "data", ID, attach()).await.unwrap();
                assert_eq!(same, context);
                let read_only = AttachOptions { read_only: Some(true), ..attach() };
                let otherwise = client.attach_volume(NAMESPACE, "data", ID, read_only).await;
                assert_eq!(refusal(otherwise).0, Kind::AlreadyExists);
                let (kind, error) = refusal(mount_registered(&client, "data", "web").await);
                assert!(
                    kind == Kind::ClaimConflict && error.message.contains("AttachVolume"),
                    "{}",
                    error.message
                );
                let explained = client.explain(NAMESPACE, "data", Default::default()).await.unwrap();
                assert_eq!(explained.holders, [format!("node {ID}")], "{:?}", explained.steps);
                other.say("attached");
            }
            Some("detach") => {
                client.detach_volume(NAMESPACE, "data", ID, DetachOptions::default()).await.unwrap();
                client.detach_volume(NAMESPACE, "data", ID, DetachOptions::default()).await.unwrap();
                other.say("detached");
            }
            Some(what) => panic!("{what}"),
            None => break,
        }
    }
    assert_eq!(claims(&client).await.len(), 0);
}

async fn nothing_attached(site: &Site) {
    eventually("the servers have no attachment", async || {
        site.raw().await.below("/csid/v1/vol/default/data/at/").await.is_empty()
    })
    .await;
}

const PUBLISH: &str = "ControllerPublishVolume";
const UNPUBLISH: &str = "ControllerUnpublishVolume";

#[test]
fn volume_is_attached_by_call_at_another_host() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let link = site.node("c1");
        let client = c1(w, link.run()).await;
        let (mut user, thread, _link) = start_user(&site, w, "n-attaches", uses).await;
        let mut seen = 0;
        user.say("lie");
        user.hear("was refused").await;
        nothing_attached(&site).await;
        // The host has no grant for it.
        let denied = client.attach_volume(NAMESPACE, "data", ID, attach()).await;
        assert_eq!(refusal(denied).0, Kind::NotAuthorized);
        assert_eq!(called(w, &mut seen).len(), 0);
        user.say("attach");
        user.hear("attached").await;
        assert_eq!(called(w, &mut seen), [PUBLISH]);
        let denied = client.detach_volume(NAMESPACE, "data", ID, DetachOptions::default()).await;
        assert_eq!(refusal(denied).0, Kind::NotAuthorized);
        user.say("detach");
        user.hear("detached").await;
        assert_eq!(called(w, &mut seen), [UNPUBLISH]);
        nothing_attached(&site).await;
        drop(user);
        thread.join().unwrap();
        w.nothing_left(&client).await;
    });
}

/// The host that has the controller is killed at each edge of its calls.
#[test]
fn killed_controller_host_attaches_by_call_once() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let link = site.node("c1");
        let fault = Fault::of(w);
        let mut client = c1(w, link.run()).await;
        let (mut user, thread, _link) = start_user(&site, w, "n-attaches", uses).await;
        let (mut kills, mut seen) = (0, 0);
        for (edge, due) in [
            // What may be attached is detached first.
            ("ControllerPublishVolume.before:1", &[UNPUBLISH, PUBLISH, UNPUBLISH][..]),
            ("ControllerPublishVolume.after:1", &[PUBLISH, UNPUBLISH, PUBLISH, UNPUBLISH]),
            ("ControllerUnpublishVolume.before:1", &[PUBLISH, UNPUBLISH]),
            ("ControllerUnpublishVolume.after:1", &[PUBLISH, UNPUBLISH, UNPUBLISH]),
        ] {
            for (word, done, rpc) in [("attach", "attached", PUBLISH), ("detach", "detached", UNPUBLISH)] {
                let is_killed = edge.starts_with(rpc);
                if is_killed {
                    fault.arm(edge);
                }
                user.say(word);
                if is_killed {
                    client = again(w, &fault).await;
                    kills += 1;
                }
                user.hear(done).await;
            }
            assert_eq!(called(w, &mut seen), due, "{edge}");
            nothing_attached(&site).await;
        }
        count("kills", kills);
        drop(user);
        thread.join().unwrap();
        w.nothing_left(&client).await;
    });
}
