//! Plugins that are wrong: each says why, and no other plugin notices.

use super::*;

/// Checks a plugin that is right next to one that is wrong.
async fn beside(host: &Host) -> Fake {
    let mut good = Fake::new(host.directory.path(), "good");
    good.start();
    host.plugins.register("good", external(&good.socket), 0).await.unwrap();
    host.plugins.ready("good", Service::Node, soon(LONG)).await.unwrap();
    good
}

/// Until the plugin `p` is in this state, with these words.
async fn says(host: &Host, state: &str, words: &str) {
    let so = async {
        loop {
            let view = host.plugins.view("p").unwrap();
            if view.state == state && view.health_message.contains(words) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let in_time = tokio::time::timeout(LONG, so).await;
    assert!(in_time.is_ok(), "never {state}: {words}: {:?}", host.plugins.view("p"));
}

#[tokio::test]
async fn wrong_plugin_has_its_error_and_affects_no_other() {
    type Wrong = fn(&mut fake::Script);
    let table: [(&str, &str, Wrong); 7] = [
        ("unhealthy", "GetPluginInfo: the plugin's name is empty", |script| script.name.clear()),
        ("unhealthy", "node_id is empty", |script| script.node_id.clear()),
        ("unhealthy", "node_id is longer than the 1024 bytes", |script| script.node_id = "n".repeat(1025)),
        ("unhealthy", "node_id begins with csid's own", |script| {
            script.node_id = "unidentified:0123456789abcdef0123456789abcdef".into();
        }),
        ("probing", "Probe says that the plugin is not ready yet", |script| script.ready = Some(false)),
        ("unhealthy", "Probe: DEADLINE_EXCEEDED: the plugin did not answer within", |script| {
            script.late = PACE.patience + Duration::from_millis(200);
        }),
        ("unhealthy", "Probe: UNIMPLEMENTED", |script| {
            script.probe = Err((tonic::Code::Unimplemented, "no".into()));
        }),
    ];
    let host = Host::new();
    let good = beside(&host).await;
    let mut fake = host.fake();
    fake.start();
    host.register(&fake).await;
    host.ready().await;
    for (state, words, wrong) in table {
        // From its first moment, not only when it was right before.
        host.plugins.unregister("p", None, 0).await.unwrap();
        let (name, node_id) = ("test.csi".to_owned(), "node-1".to_owned());
        wrong(&mut fake.script());
        host.register(&fake).await;
        says(&host, state, words).await;
        // For ever, so long as it is so.
        let calls = fake.calls("Probe");
        until(|| fake.calls("Probe") > calls + 2).await;
        says(&host, state, words).await;
        assert!(host.plugins.ready("p", Service::Node, soon(Duration::from_millis(20))).await.is_err());
        // It mends itself when the plugin does.
        {
            let mut script = fake.script();
            (script.name, script.node_id) = (name, node_id);
            (script.ready, script.probe, script.late) = (None, Ok(()), Duration::ZERO);
        }
        host.ready().await;
    }
    assert!(host.plugins.healthy_now("good"));
    let turns = host.events("plugin-health").await;
    let of_good: Vec<_> = turns.iter().filter(|(id, _)| id == "good").collect();
    assert_eq!(of_good.len(), 1, "it was ready once, and stayed so: {of_good:?}");
    drop(good);
}

/// CSI rule 11 binds the plugin; what it says too much of hurts nobody.
#[tokio::test]
async fn co_rule_11_oversized_and_unknown_values_are_kept() {
    let host = Host::new();
    let good = beside(&host).await;
    let mut fake = host.fake();
    {
        let mut script = fake.script();
        script.name = "n".repeat(1 << 20);
        script.node_id = "n".repeat(1024);
        script.node_capabilities = vec![1, 0, -1, i32::MAX, 1000];
        script.controller_capabilities = vec![-7, 4_000_000];
    }
    fake.start();
    host.register(&fake).await;
    host.ready().await;
    let view = host.plugins.view("p").unwrap();
    assert!(view.provider.len() < 4096, "{} bytes of a name", view.provider.len());
    assert_eq!(view.node_id.len(), 1024);
    assert_eq!(view.node_capabilities, ["STAGE_UNSTAGE_VOLUME"]);
    assert!(view.controller_capabilities.is_empty());
    assert!(host.plugins.healthy_now("good"));
    drop(good);
}
