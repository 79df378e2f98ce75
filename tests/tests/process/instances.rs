//! Several instances of one plugin, and one of them that leaves while volumes are mounted.

use std::path::Path;

use csid_client::{Client, Kind, PluginSpec, Result, Supervision, UnregisterOptions};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, eventually, refusal, world};

/// A world with plugin `two`, whose instances are `first` and, newer, `second`.
async fn two(w: &mut World) -> Client {
    w.add_plugin_and("p", &["second"], "").await;
    w.add_instance("p", "second").await;
    let client = w.start().await;
    for (instance, plugin) in [("first", "p"), ("second", "p.second")] {
        let spec = PluginSpec {
            supervision: Some(Supervision::External),
            socket: Some(w.plugin(plugin).witnessed_socket().to_string_lossy().into_owned()),
            instance: Some(instance.to_owned()),
            ..PluginSpec::default()
        };
        client.register_plugin("two", spec).await.expect("an instance");
        eventually("it is the active one", async || {
            let view = client.plugin("two").await.expect("the plugin");
            view.healthy && view.instances[0] == instance
        })
        .await;
    }
    client
}

async fn leave(client: &Client, instance: Option<&str>) -> Result<()> {
    let instance = instance.map(str::to_owned);
    client.unregister_plugin("two", UnregisterOptions { instance, ..UnregisterOptions::default() }).await
}

#[test]
fn instance_leaves_while_another_serves_its_mounts() {
    world(async |w| {
        let client = two(w).await;
        let options = || of_plugin("two", "v");
        mount(&client, "job", options()).await.unwrap();
        assert_eq!(w.plugin("p.second").count("NodeStageVolume", "v"), 1, "the newest was asked");
        let (kind, error) = refusal(leave(&client, None).await);
        assert_eq!((kind, error.details.holders), (Kind::Busy, vec!["job".to_owned()]));

        // One that is dead serves nothing.
        let before = cursor(&client).await;
        w.plugin("p").kill();
        event(&client, before, &["plugin-health"], "two").await;
        assert_eq!(refusal(leave(&client, Some("second")).await).0, Kind::Busy);
        w.plugin("p").start().await;
        eventually("the other one serves, and it goes", async || {
            leave(&client, Some("second")).await.is_ok()
        })
        .await;
        assert_eq!(client.plugin("two").await.unwrap().instances, ["first"]);
        assert_eq!(state(&client, "v", "job").await, "mounted");
        assert_eq!(refusal(leave(&client, Some("first")).await).0, Kind::Busy, "it is the last one");
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", "v"), 1);
        leave(&client, Some("first")).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn calls_of_a_leaving_instance_end_well() {
    world(async |w| {
        let client = two(w).await;
        w.plugin("p.second").rules([Rule::once("NodeStageVolume", Act::Delay(1000))]);
        let (begun, ()) = tokio::join!(mount(&client, "job", of_plugin("two", "v")), async {
            eventually("it is under way", async || w.plugin("p.second").count("NodeStageVolume", "v") == 1)
                .await;
            leave(&client, Some("second")).await.unwrap();
            mount(&client, "job", of_plugin("two", "w")).await.expect("the other one serves");
        });
        begun.unwrap();
        assert_eq!(w.plugin("p").count("NodeStageVolume", "w"), 1);
        for volume in ["v", "w"] {
            assert_eq!(state(&client, volume, "job").await, "mounted");
            unmount(&client, volume, "job").await.unwrap();
        }
        leave(&client, None).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn root_of_a_plugin_stays_under_mounts() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        let socket = w.plugin("p").witnessed_socket();
        let elsewhere = w.path("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        for more in [format!("plugin-root = {elsewhere:?}\n"), format!("plugin-view = {elsewhere:?}\n")] {
            w.configure_plugin("p", &socket, &more);
            let (kind, error) = refusal(client.reload(Default::default()).await);
            assert_eq!(kind, Kind::PluginUnavailable, "{error}");
            let key = more.split_once(' ').unwrap().0;
            assert!(error.message.contains(key) && error.message.contains("default/v"), "{error}");
        }
        unmount(&client, "v", "job").await.expect("the plugin is where it was");
        let root = format!("plugin-root = {elsewhere:?}\n");
        w.configure_plugin("p", &socket, &root);
        client.reload(Default::default()).await.expect("nothing is mounted");
        healthy(&client, "p").await;
        let source = mounted(&client, "job", inline("v")).await;
        assert!(source.starts_with(&elsewhere), "{source:?}");
        unmount(&client, "v", "job").await.unwrap();
    });
}

#[test]
fn reload_waits_for_a_mount_that_chose_its_paths() {
    world(async |w| {
        let fault = Fault::of(w);
        let client = running(w).await;
        let socket = w.plugin("p").witnessed_socket();
        let elsewhere = w.path("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        fault.arm("intent.held");
        let (made, reloaded, ()) = tokio::join!(
            mount(&client, "job", inline("v")),
            async {
                fault.reached("intent").await;
                // A reload adds the plugin `a` before it reads the rows of `p`.
                w.configure_plugin("a", &socket, "");
                w.configure_plugin("p", &socket, &format!("plugin-root = {elsewhere:?}\n"));
                client.reload(Default::default()).await
            },
            async {
                eventually("the reload is at the plugin", async || client.plugin("a").await.is_ok()).await;
                fault.disarm();
            }
        );
        let source = made.expect("the mount goes on").source;
        assert!(!Path::new(&source).starts_with(&elsewhere), "{source}");
        let (kind, error) = refusal(reloaded);
        assert_eq!(kind, Kind::PluginUnavailable, "{error}");
        assert!(error.message.contains("plugin-root") && error.message.contains("default/v"), "{error}");
        unmount(&client, "v", "job").await.expect("the plugin is where it was");
    });
}

#[test]
fn changed_root_waits_for_mounts_at_a_start() {
    world(async |w| {
        let client = running(w).await;
        let old = mounted(&client, "job", inline("v")).await;
        let socket = w.plugin("p").witnessed_socket();
        let elsewhere = w.path("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        w.configure_plugin("p", &socket, &format!("plugin-root = {elsewhere:?}\n"));
        let before = cursor(&client).await;
        w.kill();
        let client = w.start().await;
        let reload = event(&client, before, &["reload"], "").await;
        let why = reload.details.get("error").expect("the file is not taken").to_string();
        assert!(why.contains("plugin-root cannot change") && why.contains("default/v"), "{why}");
        healthy(&client, "p").await;
        assert_eq!(mounted(&client, "job", inline("v")).await, old, "it is there");
        let root = old.ancestors().nth(3).unwrap();
        let second = mounted(&client, "job", inline("w")).await;
        assert!(second.starts_with(root), "{second:?}");
        unmount(&client, "w", "job").await.unwrap();
        unmount(&client, "v", "job").await.expect("the plugin is where it was");
        client.reload(Default::default()).await.expect("nothing is mounted");
        healthy(&client, "p").await;
        let source = mounted(&client, "job", inline("v")).await;
        assert!(source.starts_with(&elsewhere), "{source:?}");
        unmount(&client, "v", "job").await.unwrap();
    });
}
