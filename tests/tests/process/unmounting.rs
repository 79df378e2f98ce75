//! Unmount's options: what must be there, every tag, and an answer after the first try.

use std::time::Duration;

use csid_client::{Client, Kind, MountOptions, Result, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::elsewhere::Consumer;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{eventually, refusal, world};
use rustix::mount::{MountFlags, UnmountFlags};

fn tagged(tag: &str) -> MountOptions {
    MountOptions { tag: Some(tag.to_owned()), ..shared("v") }
}

async fn unmount_with(client: &Client, options: UnmountOptions) -> Result<()> {
    client.unmount(NAMESPACE, "v", "job", options).await
}

async fn unmount_by(client: Client, options: UnmountOptions) -> Result<()> {
    unmount_with(&client, options).await
}

fn must_exist() -> UnmountOptions {
    UnmountOptions { must_exist: Some(true), ..UnmountOptions::default() }
}

/// A plugin that was restarted mounts its volumes again: what the consumer has is a clone of another mount then.
#[test]
fn volume_remounted_by_its_plugin_is_unmounted() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let published = private(&source);
        rustix::mount::unmount(&published, UnmountFlags::empty()).unwrap();
        rustix::mount::mount("tmpfs", &published, "tmpfs", MountFlags::empty(), None).unwrap();
        let user = std::fs::File::open(&source).unwrap();
        let (kind, error) = refusal(unmount(&client, "v", "job").await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert_eq!(state(&client, "v", "job").await, "mounted");
        drop(user);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The kernel gives the number of a file system that has ended to the next one, such as a container's tmpfs.
#[test]
fn reused_number_elsewhere_is_no_use_of_the_volume() {
    world(async |w| {
        let client = running(w).await;
        let place = w.path("container");
        std::fs::create_dir(&place).unwrap();
        // Another test may be the next to mount one.
        for _round in 0..8 {
            let published = private(&mounted(&client, "job", inline("v")).await);
            rustix::mount::unmount(&published, UnmountFlags::empty()).unwrap();
            rustix::mount::mount("tmpfs", &published, "tmpfs", MountFlags::empty(), None).unwrap();
            let there = || kernel::mounts().unwrap().into_iter().find(|mount| mount.point == published);
            let number = there().unwrap().device;
            w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::DelayAfter(1_000))]);
            let container = async {
                eventually("the plugin unmounts the volume", async || there().is_none()).await;
                Consumer::with_tmpfs(&place)
            };
            let (unmounted, container) = tokio::join!(unmount(&client, "v", "job"), container);
            let has_number = container.mounts().contains(&format!(" {number} / "));
            unmounted.unwrap();
            if has_number {
                return w.nothing_left(&client).await;
            }
        }
        panic!("no container got the number of the volume's file system");
    });
}

#[test]
fn must_exist_without_a_mount_is_not_found() {
    world(async |w| {
        let client = running(w).await;
        let (kind, error) = refusal(unmount_with(&client, must_exist()).await);
        assert_eq!((kind, error.details.tags.len()), (Kind::NotFound, 0), "{error}");
        for tag in ["one", "two"] {
            mounted(&client, "job", tagged(tag)).await;
        }
        mounted(&client, "other", tagged("three")).await;
        for tag in [None, Some("four".to_owned())] {
            unmount_with(&client, UnmountOptions { tag: tag.clone(), ..UnmountOptions::default() })
                .await
                .expect("what is not there is unmounted already");
            let (kind, error) = refusal(unmount_with(&client, UnmountOptions { tag, ..must_exist() }).await);
            let tags = ["one", "two"].map(str::to_owned).to_vec();
            assert_eq!((kind, error.details.tags.clone()), (Kind::NotFound, tags), "{error}");
        }
        for tag in ["one", "two"] {
            let tag = Some(tag.to_owned());
            unmount_with(&client, UnmountOptions { tag, ..must_exist() }).await.unwrap();
        }
        let three = UnmountOptions { tag: Some("three".to_owned()), ..must_exist() };
        client.unmount(NAMESPACE, "v", "other", three).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn all_tags_of_a_consumer_go_at_once() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", shared("v")).await;
        for tag in ["one", "two"] {
            mounted(&client, "job", tagged(tag)).await;
        }
        mounted(&client, "other", shared("v")).await;
        let all = |must_exist| UnmountOptions {
            all_tags: Some(true),
            must_exist: Some(must_exist),
            ..UnmountOptions::default()
        };
        let both = UnmountOptions { tag: Some("one".to_owned()), ..all(false) };
        assert_eq!(refusal(unmount_with(&client, both).await).0, Kind::InvalidArgument);
        unmount_with(&client, all(true)).await.unwrap();
        assert!(row(&client, "v", "job").await.is_none());
        assert_eq!(state(&client, "v", "other").await, "mounted");
        unmount_with(&client, all(false)).await.expect("gone already");
        assert_eq!(refusal(unmount_with(&client, all(true)).await).0, Kind::NotFound);
        unmount(&client, "v", "other").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A Mount that waits for its plugin has no row.
#[test]
fn all_tags_end_a_mount_that_waits_for_its_plugin() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", shared("v")).await;
        let plugin = w.plugin("p");
        plugin.kill();
        eventually("the plugin is away", async || {
            client.list_plugins().await.unwrap().iter().all(|row| row.state != "ready")
        })
        .await;
        let mut waiting = Vec::new();
        for tag in ["one", "two"] {
            let asking = client.clone();
            waiting.push(tokio::spawn(async move { mount(&asking, "job", tagged(tag)).await }));
        }
        eventually("both wait", async || client.list_operations().await.unwrap().len() == 2).await;
        let all =
            UnmountOptions { all_tags: Some(true), must_exist: Some(true), ..UnmountOptions::default() };
        let asking = client.clone();
        let unmounted = tokio::spawn(async move { unmount_with(&asking, all).await });
        for mount in waiting {
            assert_eq!(refusal(mount.await.unwrap()).0, Kind::Cancelled);
        }
        w.plugin("p").start().await;
        unmounted.await.unwrap().unwrap();
        w.nothing_left(&client).await;
    });
}

/// A plugin that cannot now would keep the caller for as long as csid tries.
#[test]
fn without_waiting_the_first_error_is_the_answer() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        let at_once = || UnmountOptions { wait: Some(false), ..UnmountOptions::default() };
        let plugin = w.plugin("p");
        plugin.rules([Rule::always("NodeUnpublishVolume", Act::Say(14, "not now".to_owned()))]);
        let (_, error) = refusal(unmount_with(&client, at_once()).await);
        assert_eq!(error.details.plugin_message.as_deref(), Some("not now"), "{error}");
        assert_eq!(error.details.rpc.as_deref(), Some("NodeUnpublishVolume"), "{error}");
        plugin.rules([]);
        eventually("csid goes on by itself", async || row(&client, "v", "job").await.is_none()).await;
        let events = client.get_events(0, 1000).await.unwrap().0;
        assert!(events.iter().any(|event| event.kind == "unmount"), "an event reports the end");

        mounted(&client, "job", inline("v")).await;
        unmount_with(&client, at_once()).await.expect("it is gone at the first try");
        w.nothing_left(&client).await;
    });
}

/// A caller that waits is retried for two minutes. One that does not wait has its own try in between, and each gets its answer.
#[test]
fn no_wait_is_answered_between_anothers_tries() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", shared("v")).await;
        mounted(&client, "other", shared("v")).await;
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Say(14, "not now".to_owned()))]);
        let mut waiting = tokio::spawn(unmount_by(w.client().await, must_exist()));
        eventually("csid retries", async || w.plugin("p").count("NodeUnpublishVolume", "v") >= 3).await;
        let at_once = || UnmountOptions { wait: Some(false), ..must_exist() };
        for consumer in ["job", "other"] {
            let asked = client.unmount(NAMESPACE, "v", consumer, at_once());
            let answer = tokio::time::timeout(Duration::from_secs(30), asked).await;
            let (_, error) = refusal(answer.expect("an answer long before the other caller's deadline"));
            assert_eq!(error.details.plugin_message.as_deref(), Some("not now"), "{consumer}: {error}");
            assert_eq!(error.details.rpc.as_deref(), Some("NodeUnpublishVolume"), "{consumer}: {error}");
        }
        let early = tokio::time::timeout(Duration::from_millis(1), &mut waiting).await;
        assert!(early.is_err(), "the first caller still waits: {early:?}");

        // Also where the mount ends by the other's try. The first caller's next try may be earlier: then it is NotFound.
        w.plugin("p").rules([]);
        client.unmount(NAMESPACE, "v", "job", at_once()).await.ok();
        waiting.await.unwrap().expect("the first caller's mount is gone");
        unmount(&client, "v", "other").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A plugin that is away has not been called. That is the answer to a caller that does not wait.
#[test]
fn no_wait_is_answered_while_the_plugin_is_away() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        w.plugin("p").kill();
        let waiting = tokio::spawn(unmount_by(w.client().await, UnmountOptions::default()));
        eventually("csid waits for the plugin", async || {
            client
                .list_operations()
                .await
                .unwrap()
                .iter()
                .any(|operation| operation.step == "waiting for plugin")
        })
        .await;
        let at_once = UnmountOptions { wait: Some(false), ..UnmountOptions::default() };
        let answer = tokio::time::timeout(Duration::from_secs(30), unmount_with(&client, at_once)).await;
        let (kind, error) = refusal(answer.expect("an answer long before the other caller's deadline"));
        assert_eq!(kind, Kind::PluginUnavailable, "{error}");
        w.plugin("p").start().await;
        waiting.await.unwrap().expect("the plugin has come back");
        w.nothing_left(&client).await;
    });
}

#[test]
fn force_refuses_a_mount_in_use() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        std::fs::create_dir(&target).unwrap();
        let at_target = MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..shared("v") };
        mounted(&client, "job", at_target).await;
        let file = std::fs::File::create(target.join("data")).unwrap();
        for force in [None, Some(true)] {
            let options = UnmountOptions { force, ..UnmountOptions::default() };
            let (kind, error) = refusal(unmount_with(&client, options).await);
            assert_eq!(kind, Kind::Busy, "{error}");
            let user = format!("{} ", std::process::id());
            assert!(error.details.holders.iter().any(|holder| holder.starts_with(&user)), "{error:?}");
        }
        assert_eq!(w.plugin("p").count("NodeUnpublishVolume", "v"), 0);
        drop(file);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
