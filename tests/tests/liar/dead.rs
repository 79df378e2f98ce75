//! File systems that hang or die: FUSE, as a plugin brings it.

use std::time::{Duration, Instant};

use csid_client::{Kind, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::hung::LOOKS;
use csid_tests::kernel;
use csid_tests::script::{Act, Lie, Rule};
use csid_tests::world::{eventually, refusal, world};

#[test]
fn publish_that_is_dead_is_undone() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(Lie::Dead))]);
        let options = within(Duration::from_secs(10), inline("v"));
        let (kind, error) = refusal(mount(&client, "job", options).await);
        assert_eq!(kind, Kind::PluginError, "{error}");
        w.nothing_left(&client).await;
    });
}

#[test]
fn hang_in_the_kernel_delays_no_other_volume() {
    world(async |w| {
        w.add_plugin("q").await;
        w.hang("q", "NodePublishVolume").hold(&LOOKS);
        let client = running(w).await;
        let stuck: Vec<_> = (0..10)
            .map(|n| {
                let client = client.clone();
                let options = within(Duration::from_secs(8), of_plugin("q", &format!("stuck-{n}")));
                tokio::spawn(async move { mount(&client, "job", options).await })
            })
            .collect();
        eventually("the plugin has published", async || w.plugin("q").count("NodePublishVolume", "") >= 5)
            .await;
        let begun = Instant::now();
        for n in 0..10 {
            let volume = format!("quick-{n}");
            mount(&client, "job", inline(&volume)).await.unwrap();
            assert_eq!(state(&client, &volume, "job").await, "mounted");
            unmount(&client, &volume, "job").await.unwrap();
        }
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?} during a hang in the kernel",
            begun.elapsed()
        );
        for call in stuck {
            let (kind, error) = refusal(call.await.unwrap());
            // The deadline passes during the publish, or during its undoing.
            assert!([Kind::TimedOut, Kind::Uncertain].contains(&kind), "{error}");
        }
        w.hung().release();
        w.nothing_left(&client).await;
    });
}

#[test]
fn dead_mount_is_unhealthy_and_not_joined() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(Lie::Fuse))]);
        let source = mounted(&client, "job", inline("v")).await;
        assert!(source.is_dir());
        assert!(row(&client, "v", "job").await.unwrap().healthy);
        // Its server dies with the plugin.
        w.plugin("p").kill();
        eventually("it is dead", async || std::fs::metadata(&source).is_err()).await;
        let dead = row(&client, "v", "job").await.unwrap();
        assert!(!dead.healthy, "a dead mount is no mount: {dead:?}");
        w.kill();
        let client = w.start().await;
        settled(&client).await;
        assert!(!row(&client, "v", "job").await.unwrap().healthy, "nor after a restart");
        w.plugin("p").start().await;
        // A repeated Mount is answered after a look: it heals, or says that it does not.
        match mount(&client, "job", inline("v")).await {
            Ok(again) => {
                assert!(std::fs::metadata(&again.source).is_ok(), "answered, and dead");
                assert!(row(&client, "v", "job").await.unwrap().healthy);
                assert_eq!(kernel::stacked(&source).unwrap(), 1, "not mounted over");
            }
            Err(csid_client::Error::Csid(error)) => assert!(error.message.contains("dead"), "{error}"),
            Err(other) => panic!("{other:?}"),
        }
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The driver says OK and leaves what is dead where it is.
#[test]
fn left_dead_mount_is_detached_without_force() {
    world(async |w| {
        let client = running(w).await;
        for rpc in ["NodeUnpublishVolume", "NodeUnstageVolume"] {
            w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Lie(Lie::Served))]);
            let source = mounted(&client, "job", inline("v")).await;
            w.plugin("p").kill();
            eventually("it is dead", async || std::fs::metadata(&source).is_err()).await;
            w.plugin("p").start().await;
            w.plugin("p").rules([Rule::always(rpc, Act::Lie(Lie::Nothing))]);
            let deadline_usec = Some(60_000_000);
            let options = UnmountOptions { deadline_usec, ..UnmountOptions::default() };
            client.unmount(NAMESPACE, "v", "job", options).await.unwrap_or_else(|e| panic!("{rpc}: {e}"));
            w.nothing_left(&client).await;
        }
    });
}

#[test]
fn dead_mount_is_unmounted_by_force_or_not() {
    world(async |w| {
        let client = running(w).await;
        for force in [false, true] {
            w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(Lie::Fuse))]);
            let source = mounted(&client, "job", inline("v")).await;
            w.plugin("p").kill();
            eventually("it is dead", async || std::fs::metadata(&source).is_err()).await;
            w.plugin("p").start().await;
            let options = UnmountOptions { force: Some(force), ..UnmountOptions::default() };
            client.unmount(NAMESPACE, "v", "job", options).await.unwrap();
            w.nothing_left(&client).await;
        }
    });
}
