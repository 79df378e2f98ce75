//! A volume whose plugin attaches: its controller runs on the host `c1` alone, and `n1` mounts the volume.

use std::path::{Path, PathBuf};

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{Attaches, PluginReport};
use csid_client::{Client, Kind};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::script::Half;
use csid_tests::world::{World, count, eventually, refusal, world};

use crate::kills::again;
use crate::site::register;
use crate::*;

const ATTACH: &[&str] = &["PUBLISH_UNPUBLISH_VOLUME", "PUBLISH_READONLY"];

/// Starts this world's csid as `c1`, which has the plugin's controller.
async fn c1(w: &mut World, link: &Path) -> Client {
    c1_that(w, link, "controllers = [\"p\"]\n").await
}

/// Does the same. `does`: what its csid.toml says of controllers.
pub async fn c1_that(w: &mut World, link: &Path, does: &str) -> Client {
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| {
        script.control(ATTACH);
        script.node_id = "node c1".into();
        script.others = vec!["node n1".into(), "node n2".into()];
    });
    plugin.kill();
    plugin.start().await;
    plugin.provision("ext-data");
    w.configure(&format!("{}{does}", of_node("c1", link)));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    client
}

/// Starts this world's csid as `n1`, whose plugin has no controller. It shares the storage with that of `c1`.
async fn user(w: &mut World, link: &Path, storage: PathBuf) -> Client {
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| {
        script.control(ATTACH);
        script.serves = vec![Half::Node];
        script.node_id = "node n1".into();
    });
    plugin.kill();
    plugin.shares(storage);
    plugin.start().await;
    w.configure(&of_node("n1", link));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    client
}

/// Mounts and unmounts as often as the other host's test says so.
async fn mounts(w: &mut World, link: &Path, storage: PathBuf, mut other: Other) {
    // The witness of this host sees its own plugin alone, which has no controller. The plugin itself knows what is attached.
    w.excuse(31, "with a publish_context, and the plugin does not attach");
    let mut client = user(w, link, storage).await;
    other.say("ready");
    loop {
        match other.hears.recv().await {
            Some("mount") => {
                let mounted = mount_registered(&client, "data", "web").await.unwrap();
                let staged = w.plugin("p").volume_calls().remove(0).call;
                assert!(!staged.publish_context.is_empty(), "staged without the controller's context");
                assert!(Path::new(&mounted.source).exists());
                other.say("mounted");
            }
            Some("refused") => {
                let (kind, error) = refusal(mount_registered(&client, "data", "web").await);
                assert_eq!((kind, error.details.holders), (Kind::ClaimConflict, vec!["n2/web".to_owned()]));
                other.say("was refused");
            }
            Some("unmount") => {
                unmount(&client, "data", "web").await.unwrap();
                other.say("unmounted");
            }
            Some("restart") => {
                w.kill();
                assert!(w.launch(&[]).await);
                client = mounted_again(w).await;
                other.say("restarted");
            }
            Some("reboot") => {
                w.reboot().await;
                assert!(w.launch(&[]).await);
                client = mounted_again(w).await;
                other.say("rebooted");
            }
            Some(what) => panic!("{what}"),
            None => break,
        }
    }
    assert_eq!(claims(&client).await.len(), 0);
}

/// Waits until csid has joined, and has its mount.
async fn mounted_again(w: &mut World) -> Client {
    joined(w).await;
    let client = w.client().await;
    healthy(&client, "p").await;
    eventually("the mount is there", async || {
        row(&client, "data", "web").await.is_some_and(|row| row.state == "mounted")
    })
    .await;
    client
}

/// Starts the host `n1` in a thread, and waits until it has joined. Its link ends with the returned node.
async fn start_n1(site: &Site, w: &mut World) -> (Other, std::thread::JoinHandle<()>, Node) {
    let (mut n1, other) = Other::pair();
    let node = site.node("n1");
    let (run, storage) = (node.run().to_owned(), w.plugin("p").state().to_owned());
    let thread = std::thread::spawn(move || {
        world(async move |w| Box::pin(mounts(w, &run, storage, other)).await);
    });
    n1.hear("ready").await;
    (n1, thread, node)
}

/// Returns the controller's calls since the last time.
fn called(w: &mut World, seen: &mut usize) -> Vec<String> {
    let calls = w.plugin("p").volume_calls();
    let new = calls.iter().skip(*seen).map(|recorded| recorded.call.rpc.clone()).collect();
    *seen = calls.len();
    new
}

#[test]
fn volume_is_attached_by_another_hosts_controller() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let link = site.node("c1");
        let client = c1(w, link.run()).await;
        let (mut n1, thread, _link) = start_n1(&site, w).await;
        let n2 = site.node("n2");
        let mut session = n2.join(0).await;
        session.report_name("node n2").await;
        let mut seen = 0;
        n1.say("mount");
        n1.hear("mounted").await;
        assert_eq!(called(w, &mut seen), ["ControllerPublishVolume"]);
        let call = w.plugin("p").volume_calls().remove(0).call;
        assert_eq!(call.node, "node n1");
        assert!(call.context.contains(&("share".to_owned(), "hunter2".to_owned())), "{:?}", call.context);
        let refused = n2.claim(0, "data").await.unwrap_err();
        assert_eq!((refused.kind.as_str(), refused.holders), ("ClaimConflict", vec!["n1/web".to_owned()]));

        n1.say("unmount");
        n1.hear("unmounted").await;
        servers_have(&site, "data", &[]).await;
        assert_eq!(called(w, &mut seen), ["ControllerUnpublishVolume"]);
        let claim = n2.claim(0, "data").await.unwrap();
        assert_eq!(called(w, &mut seen), ["ControllerPublishVolume"]);
        n1.say("refused");
        n1.hear("was refused").await;
        n2.detached(0, "data", &claim).await.unwrap();
        servers_have(&site, "data", &[]).await;
        n1.say("mount");
        n1.hear("mounted").await;
        n1.say("unmount");
        n1.hear("unmounted").await;
        servers_have(&site, "data", &[]).await;
        drop(n1);
        thread.join().unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn attached_volume_stays_over_restart_and_reboot() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let link = site.node("c1");
        let client = c1(w, link.run()).await;
        let (mut n1, thread, _link) = start_n1(&site, w).await;
        let mut seen = 0;
        for (word, done, due) in [
            ("mount", "mounted", &["ControllerPublishVolume"][..]),
            ("restart", "restarted", &[]),
            ("reboot", "rebooted", &["ControllerPublishVolume"]),
            ("restart", "restarted", &[]),
            ("unmount", "unmounted", &["ControllerUnpublishVolume"]),
        ] {
            n1.say(word);
            n1.hear(done).await;
            if word == "unmount" {
                servers_have(&site, "data", &[]).await;
            }
            assert_eq!(called(w, &mut seen), due, "{word}");
        }
        drop(n1);
        thread.join().unwrap();
        w.nothing_left(&client).await;
    });
}

/// A server may be an attacker's. What csid does for other hosts stands in its own file.
#[test]
fn call_that_csid_toml_does_not_name_is_not_made() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let mut ask = register("secret", "single-node-writer");
        let Some(What::Register(of)) = &mut ask.what else { unreachable!() };
        of.spec.as_mut().unwrap().credential = "csid.default.key".into();
        site.operator(0, "all").change(ask).await.unwrap();
        let link = site.node("c1");
        let client = c1_that(w, link.run(), "").await;
        let n2 = site.node("n2");
        let (_, mut session) = n2.say_hello(0).await.unwrap();
        session
            .report_as(PluginReport {
                plugin: "p".into(),
                attaches: Attaches::Yes.into(),
                node_id: "node n2".into(),
                controller: false,
                max_volumes: None,
                calls: 0,
            })
            .await;
        let refused = n2.claim(0, "data").await.unwrap_err();
        assert!(refused.message.contains("no node with the grant controller:"), "{refused:?}");
        drop(client);

        w.kill();
        w.configure(&format!("{}controllers = [\"p\"]\n", of_node("c1", link.run())));
        assert!(w.launch(&[]).await);
        joined(w).await;
        let client = w.client().await;
        healthy(&client, "p").await;
        eventually("the servers know the controller", async || {
            !site.raw().await.below("/csid/v1/plugin/p").await.is_empty()
        })
        .await;
        let refused = n2.claim(0, "secret").await.unwrap_err();
        assert!(refused.message.contains("controller-credentials"), "{refused:?}");
        assert!(w.plugin("p").volume_calls().is_empty());
        let claim = n2.claim(0, "data").await.unwrap();
        n2.detached(0, "data", &claim).await.unwrap();
        servers_have(&site, "data", &[]).await;
        assert_eq!(called(w, &mut 0), ["ControllerPublishVolume", "ControllerUnpublishVolume"]);
        w.nothing_left(&client).await;
    });
}

/// The host that has the controller is killed at each edge of its calls.
#[test]
fn killed_controller_host_attaches_once_it_is_back() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let link = site.node("c1");
        let fault = Fault::of(w);
        let mut client = c1(w, link.run()).await;
        let (mut n1, thread, _link) = start_n1(&site, w).await;
        let mut kills = 0;
        let mut seen = 0;
        let (publish, unpublish) = ("ControllerPublishVolume", "ControllerUnpublishVolume");
        for (edge, due) in [
            ("ControllerPublishVolume.before:1", &[unpublish, publish, unpublish][..]),
            ("ControllerPublishVolume.after:1", &[publish, unpublish, publish, unpublish]),
            ("ControllerUnpublishVolume.before:1", &[publish, unpublish]),
            ("ControllerUnpublishVolume.after:1", &[publish, unpublish, unpublish]),
        ] {
            let is_attach = edge.starts_with("ControllerPublish");
            if is_attach {
                fault.arm(edge);
            }
            n1.say("mount");
            if is_attach {
                client = again(w, &fault).await;
                kills += 1;
            }
            n1.hear("mounted").await;
            if !is_attach {
                fault.arm(edge);
            }
            n1.say("unmount");
            n1.hear("unmounted").await;
            if !is_attach {
                client = again(w, &fault).await;
                kills += 1;
            }
            servers_have(&site, "data", &[]).await;
            assert_eq!(called(w, &mut seen), due, "{edge}");
        }
        count("kills", kills);
        drop(n1);
        thread.join().unwrap();
        w.nothing_left(&client).await;
    });
}
