//! ExpandVolume where a volume that somebody has cannot be expanded (CSI rule 26).

use std::time::Duration;

use csid_client::{ExpandOptions, Kind, MountOptions};
use csid_tests::ask::{NAMESPACE, unmount};
use csid_tests::script::{Act, Rule};
use csid_tests::world::{eventually, refusal, world};

use crate::site::{Site, options, spec};

const LARGE: u64 = 8 << 20;

#[test]
fn co_rule_26_offline_it_waits_until_nobody_has_it() {
    world(async |w| {
        let mut s = Site::new(w).await;
        s.w.plugin("p").set(|script| script.plugin.push("OFFLINE".to_owned()));
        s.w.plugin("p").kill();
        s.w.plugin("p").start().await;
        s.restart().await;
        s.is_ready().await;
        s.create("a", spec()).await.unwrap();
        s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await.unwrap();

        let soon = ExpandOptions { deadline_usec: Some(300_000), ..ExpandOptions::default() };
        let (kind, error) = refusal(s.client.expand_volume(NAMESPACE, "a", LARGE, 0, soon).await);
        assert!(kind == Kind::TimedOut && error.message.contains("in use"), "{error}");
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 0);

        let client = s.client.clone();
        let asked = tokio::spawn(async move {
            client.expand_volume(NAMESPACE, "a", LARGE, 0, ExpandOptions::default()).await
        });
        eventually("it waits", async || {
            let operations = s.client.list_operations().await.unwrap();
            operations.iter().any(|operation| operation.step == "waiting until nobody has it")
        })
        .await;
        unmount(&s.client, "a", "job").await.unwrap();
        let expanded = asked.await.unwrap().unwrap();
        assert_eq!(expanded.capacity_bytes, LARGE);
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 1);
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn what_a_node_could_not_expand_is_tried_by_the_same_call_again() {
    world(async |w| {
        let mut s = Site::new(w).await;
        s.w.plugin("p").set(|script| {
            script.plugin.push("ONLINE".to_owned());
            script.capabilities.push("EXPAND_VOLUME".to_owned());
        });
        s.w.plugin("p").kill();
        s.w.plugin("p").start().await;
        s.restart().await;
        s.is_ready().await;
        s.create("a", spec()).await.unwrap();
        s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await.unwrap();
        let expand = async |s: &Site<'_>| {
            let patience = Duration::from_secs(10).as_micros() as u64;
            let options = ExpandOptions { deadline_usec: Some(patience), ..ExpandOptions::default() };
            s.client.expand_volume(NAMESPACE, "a", LARGE, 0, options).await
        };
        s.rules([Rule::always("NodeExpandVolume", Act::Fail(9))]);
        assert_eq!(refusal(expand(&s).await).0, Kind::PluginError);
        assert_eq!(s.rows().await[0].pending_expand, LARGE);
        s.w.plugin("p").honest();
        let expanded = expand(&s).await.unwrap();
        assert_eq!((expanded.capacity_bytes, expanded.node_expansion_required), (LARGE, false));
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 1);
        unmount(&s.client, "a", "job").await.unwrap();
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}
