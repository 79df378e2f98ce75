//! A plugin that registers itself by the kubelet's protocol.

use csid_client::{Client, Kind, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::world::{World, eventually, refusal, world};

const ID: &str = "disk.example.org";

/// A world whose plugin `p.itself` registers itself when it is started.
async fn one(w: &mut World) -> Client {
    w.add_plugin("p").await;
    let socket = w.path("state/plugins_registry/disk-reg.sock");
    let plugin = w.add_instance("p", "itself").await;
    plugin.kill();
    plugin.set(|script| script.name = ID.to_owned());
    plugin.registers_at(socket);
    let client = w.start().await;
    assert!(
        w.path("state/plugins_registry").is_dir(),
        "csid is ready, and the plugin cannot register itself"
    );
    client
}

async fn is_known(client: &Client) -> bool {
    client.list_plugins().await.expect("the plugins").iter().any(|plugin| plugin.id == ID)
}

#[test]
fn mounts_stay_while_csid_or_plugin_restarts() {
    world(async |w| {
        let client = one(w).await;
        assert!(!is_known(&client).await);
        w.plugin("p.itself").start().await;
        eventually("it is known", async || is_known(&client).await).await;
        mount(&client, "job", of_plugin(ID, "v")).await.expect("a mount");

        w.kill();
        let client = w.start().await;
        assert_eq!(state(&client, "v", "job").await, "mounted");
        eventually("it is known again", async || is_known(&client).await).await;

        // Its registration ends, what it has mounted does not.
        w.plugin("p.itself").kill();
        std::fs::remove_file(w.path("state/plugins_registry/disk-reg.sock")).unwrap();
        eventually("it is gone", async || !is_known(&client).await).await;
        assert_eq!(state(&client, "v", "job").await, "mounted");
        let hasty = UnmountOptions { deadline_usec: Some(100_000), ..UnmountOptions::default() };
        let (kind, _) = refusal(client.unmount(NAMESPACE, "v", "job", hasty).await);
        assert_eq!(kind, Kind::TimedOut);

        w.plugin("p.itself").start().await;
        unmount(&client, "v", "job").await.expect("it is back");
        w.nothing_left(&client).await;
    });
}
