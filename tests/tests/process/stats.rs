//! What is measured of a plugin.

use csid_client::{CallOptions, Client, Kind, PluginStats};
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{refusal, world};

async fn stats(client: &Client) -> PluginStats {
    client.plugin_stats("p").await.expect("its stats")
}

/// How often an RPC of `p` ended with a code.
fn count(stats: &PluginStats, rpc: &str, code: &str) -> u64 {
    let mut counts = stats.rpcs.iter().filter(|count| count.rpc == rpc && count.code == code);
    counts.next().map_or(0, |count| count.count)
}

#[test]
fn rpcs_are_counted_by_code() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([
            Rule::always("NodeStageVolume", Act::Fail(9)).of("bad"),
            Rule::always("NodePublishVolume", Act::Delay(250)).of("slow"),
        ]);
        mounted(&client, "job", inline("v")).await;
        mounted(&client, "job", inline("slow")).await;
        mount(&client, "job", inline("bad")).await.unwrap_err();
        let log = std::fs::read_to_string(w.path("csid.log")).unwrap();
        let said = format!("plugin p, {NAMESPACE}/bad for job: NodeStageVolume: FAILED_PRECONDITION");
        assert!(log.contains(&said), "the text of the log line names the plugin: {log}");
        let before = stats(&client).await;
        assert_eq!(count(&before, "NodeStageVolume", "OK"), 2, "{before:?}");
        assert_eq!(count(&before, "NodeStageVolume", "FAILED_PRECONDITION"), 1, "{before:?}");
        assert_eq!(count(&before, "NodePublishVolume", "OK"), 2, "{before:?}");
        assert!(count(&before, "Probe", "OK") > 0 && count(&before, "NodeGetInfo", "OK") > 0, "{before:?}");
        let published = before.rpcs.iter().find(|rpc| rpc.rpc == "NodePublishVolume").unwrap();
        assert!(published.max_usec >= 250_000 && published.total_usec >= published.max_usec, "{published:?}");
        assert!(published.p99_usec >= 250_000 && published.p99_usec <= published.max_usec, "{published:?}");
        assert!(published.p50_usec < published.p99_usec, "{published:?}");

        // csid does not run it, and so says nothing of what it uses.
        let [instance] = &before.instances[..] else { panic!("{before:?}") };
        let json = serde_json::to_value(instance).unwrap();
        assert_eq!(json, serde_json::json!({ "instance": "default", "unit": "" }));

        unmount(&client, "v", "job").await.unwrap();
        unmount(&client, "slow", "job").await.unwrap();
        // And the one that failed was undone.
        assert_eq!(count(&stats(&client).await, "NodeUnstageVolume", "OK"), 3);
        let (kind, _) = refusal(client.plugin_stats("nobody").await);
        assert_eq!(kind, Kind::NotFound);
        w.nothing_left(&client).await;
    });
}

#[test]
fn inline_volume_has_stats_while_it_is_mounted() {
    world(async |w| {
        w.add_plugin("p").await.set(|script| script.capabilities.push("GET_VOLUME_STATS".to_owned()));
        w.plugin("p").kill();
        w.plugin("p").start().await;
        let client = w.start().await;
        healthy(&client, "p").await;
        let stats = async || client.volume_stats(NAMESPACE, "v", CallOptions::default()).await;
        assert_eq!(refusal(stats().await).0, Kind::NotFound);
        mounted(&client, "job", inline("v")).await;
        let usage = stats().await.unwrap().usage;
        assert!(usage.iter().any(|usage| usage.total > 0), "{usage:?}");
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(refusal(stats().await).0, Kind::NotFound);
        w.nothing_left(&client).await;
    });
}
