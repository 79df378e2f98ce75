//! Rows that no plugin ends: root forgets them, and the calls that wait for them go on.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use csid_client::{CallOptions, Client, Kind, MountOptions, Result, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::backend::Published;
use csid_tests::elsewhere::Consumer;
use csid_tests::fault::Fault;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};
use rustix::mount::UnmountFlags;
use tokio::task::JoinHandle;

const SOON: Duration = Duration::from_secs(2);
const BOUND: Duration = Duration::from_secs(60);

async fn forget(client: &Client, volume: &str, consumer: &str) -> Result<()> {
    let options = UnmountOptions { forget: Some(true), ..UnmountOptions::default() };
    let forget = client.unmount(NAMESPACE, volume, consumer, options);
    tokio::time::timeout(BOUND, forget).await.expect("forget ends")
}

async fn unmount_soon(client: &Client, volume: &str, consumer: &str) -> Result<()> {
    let options =
        UnmountOptions { deadline_usec: Some(SOON.as_micros() as u64), ..UnmountOptions::default() };
    client.unmount(NAMESPACE, volume, consumer, options).await
}

/// A Mount by `consumer` that waits behind what is stuck.
async fn behind(client: &Client, options: MountOptions) -> JoinHandle<Result<csid_client::Mounted>> {
    let caller = client.clone();
    let mounting = tokio::spawn(async move { mount(&caller, "other", options).await });
    eventually("it waits", async || {
        let operations = client.list_operations().await.unwrap();
        operations.iter().any(|operation| operation.kind == "mount")
    })
    .await;
    mounting
}

async fn goes_on(mounting: JoinHandle<Result<csid_client::Mounted>>) {
    tokio::time::timeout(BOUND, mounting).await.expect("it goes on").unwrap().unwrap();
}

fn stages(w: &mut World) -> usize {
    w.plugin("p").count("NodeStageVolume", "v")
}

/// The mounts that keep `job`'s row are taken away by hand: forget names them, and changes nothing.
async fn by_hand(client: &Client) {
    let (kind, error) = refusal(forget(client, "v", "job").await);
    assert_eq!((kind, error.details.holders[0].as_str()), (Kind::Busy, "job"), "{error}");
    let (_, rest) = error.message.split_once("still mounted, at ").expect("it names the paths");
    for path in rest.split(';').next().unwrap_or_default().split(", ") {
        assert_eq!(kernel::stacked(Path::new(path)).unwrap(), 1, "nothing was unmounted: {path}");
        rustix::mount::unmount(path, UnmountFlags::empty()).unwrap();
    }
}

#[test]
fn publish_count_that_never_ends_is_given_up() {
    world(async |w| {
        w.add_plugin("p").await.set(|script| script.counts_publishes = true);
        let client = w.start().await;
        healthy(&client, "p").await;
        mounted(&client, "job", shared("v")).await;
        w.plugin("p").backend().put(&Published { volume: "v".to_owned(), count: 1_000_000 }).unwrap();
        let since = cursor(&client).await;
        refusal(unmount_soon(&client, "v", "job").await);
        refusal(mount(&client, "other", within(SOON, shared("v"))).await);
        let before = stages(w);
        by_hand(&client).await;

        forget(&client, "v", "job").await.unwrap();
        assert!(row(&client, "v", "job").await.is_none());
        mounted(&client, "other", shared("v")).await;
        assert_eq!(stages(w), before + 1, "the other one stages again");
        let event = event(&client, since, &["mount-forgotten"], &format!("{NAMESPACE}/v")).await;
        let answer = |key: &str| detail(&event, key);
        assert_eq!((answer("consumer"), answer("external-id")), ("job".to_owned(), "v".to_owned()));
        assert!(answer("last-error").contains("NodeUnstageVolume"), "{event:?}");
        assert!(!answer("source").is_empty() && !answer("staging").is_empty(), "{event:?}");
        forget(&client, "v", "job").await.expect("what is not there is forgotten already");
        assert_eq!(
            events(&client, since).await.iter().filter(|event| event.kind == "mount-forgotten").count(),
            1
        );

        w.plugin("p").set(|script| script.counts_publishes = false);
        unmount(&client, "v", "other").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn wrong_id_whose_stage_stays_unknown_is_given_up() {
    world(async |w| {
        let client = running(w).await;
        let unknown = ["NodeStageVolume", "NodeUnstageVolume"];
        w.plugin("p").rules(unknown.map(|rpc| Rule::always(rpc, Act::Fail(2)).of("wrong")));
        refusal(mount(&client, "job", within(SOON, inline("wrong"))).await);
        assert!(row(&client, "wrong", "job").await.is_some());
        forget(&client, "wrong", "job").await.unwrap();
        w.nothing_left(&client).await;
        let answer = client.explain(NAMESPACE, "wrong", CallOptions::default()).await.unwrap();
        assert!(
            answer.steps.iter().any(|step| step.starts_with("the mount of job was forgotten")),
            "{answer:?}"
        );
        assert!(answer.last_error.contains("NodeUnstageVolume"), "{answer:?}");
        let calls = w.plugin("p").count("NodeUnstageVolume", "wrong");
        mounted(&client, "job", inline("right")).await;
        unmount(&client, "right", "job").await.unwrap();
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", "wrong"), calls, "nobody asks again");
    });
}

#[test]
fn forget_is_busy_while_the_mount_is_there() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        let (kind, error) = refusal(forget(&client, "v", "job").await);
        assert_eq!(kind, Kind::Busy, "it is mounted: {error}");
        assert_eq!(state(&client, "v", "job").await, "mounted");

        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Fail(2))]);
        refusal(unmount_soon(&client, "v", "job").await);
        by_hand(&client).await;
        forget(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn forget_is_busy_while_a_copy_exists() {
    world(async |w| {
        let client = running(w).await;
        for restarts in [false, true] {
            mounted(&client, "job", inline("v")).await;
            let holder = Consumer::copy("private");
            by_hand(&client).await;
            w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Fail(2))]);
            refusal(unmount_soon(&client, "v", "job").await);
            let client = if restarts {
                w.kill();
                w.start().await
            } else {
                client.clone()
            };
            let (kind, error) = refusal(forget(&client, "v", "job").await);
            assert_eq!(kind, Kind::Busy, "{error}");
            let pid = holder.pid().to_string();
            assert!(error.details.holders.iter().any(|named| named.starts_with(&pid)), "{error:?}");
            holder.end();
            forget(&client, "v", "job").await.unwrap();
            w.plugin("p").honest();
            w.nothing_left(&client).await;
            if restarts {
                return;
            }
        }
    });
}

#[test]
fn forget_ends_a_removal_whose_rpc_hangs() {
    world(async |w| {
        // The plugin never said that it unpublished what root forgot.
        w.excuse(22, "NodeUnstageVolume");
        let client = running(w).await;
        for rpc in ["NodeUnstageVolume", "NodeUnpublishVolume"] {
            mounted(&client, "job", shared("v")).await;
            w.plugin("p").rules([Rule::always(rpc, Act::Delay(600_000))]);
            let caller = client.clone();
            let unmounting = tokio::spawn(async move { unmount(&caller, "v", "job").await });
            eventually("it hangs", async || {
                let operations = client.list_operations().await.unwrap();
                let step = if rpc == "NodeUnstageVolume" { "unstage" } else { "unpublish" };
                operations.iter().any(|operation| operation.step == step)
            })
            .await;
            let other = behind(&client, shared("v")).await;
            by_hand(&client).await;
            let begun = Instant::now();
            forget(&client, "v", "job").await.unwrap();
            count("ms to forget", begun.elapsed().as_millis() as usize);
            assert_eq!(refusal(unmounting.await.unwrap()).0, Kind::Cancelled);
            goes_on(other).await;
            w.plugin("p").honest();
            unmount(&client, "v", "other").await.unwrap();
            w.nothing_left(&client).await;
        }
    });
}

#[test]
fn forget_ends_the_consumers_own_mount() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([
            Rule::always("NodeStageVolume", Act::Delay(600_000)).of("v"),
            Rule::always("NodeUnstageVolume", Act::Fail(2)).of("v"),
        ]);
        let caller = client.clone();
        let mounting = tokio::spawn(async move { mount(&caller, "job", inline("v")).await });
        eventually("it hangs", async || w.plugin("p").count("NodeStageVolume", "v") == 1).await;
        forget(&client, "v", "job").await.unwrap();
        assert_eq!(refusal(mounting.await.unwrap()).0, Kind::Cancelled);
        w.plugin("p").honest();
        w.nothing_left(&client).await;
    });
}

#[test]
fn forget_keeps_other_consumers_mounts() {
    world(async |w| {
        // The plugin never said that it unpublished what root forgot.
        w.excuse(22, "NodeUnstageVolume");
        let client = running(w).await;
        let stays = mounted(&client, "other", shared("v")).await;
        mounted(&client, "job", shared("v")).await;
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Fail(2))]);
        refusal(unmount_soon(&client, "v", "job").await);
        by_hand(&client).await;
        forget(&client, "v", "job").await.unwrap();
        fs::write(stays.join("file"), "the volume works").unwrap();
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 0);
        w.plugin("p").honest();
        unmount(&client, "v", "other").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn forget_is_atomic_across_a_kill() {
    world(async |w| {
        let fault = Fault::of(w);
        fault.disarm();
        let mut client = running(w).await;
        let stuck = ["NodeStageVolume", "NodeUnstageVolume"];
        for (edge, is_there) in [("outcome.before", true), ("outcome.after", false)] {
            w.plugin("p").rules(stuck.map(|rpc| Rule::always(rpc, Act::Fail(2)).of("v")));
            refusal(mount(&client, "job", within(SOON, inline("v"))).await);
            fault.arm(&format!("{edge}:1"));
            assert!(forget(&client, "v", "job").await.is_err());
            eventually("csid is dead", async || w.dead()).await;
            fault.disarm();
            client = w.start().await;
            assert_eq!(row(&client, "v", "job").await.is_some(), is_there, "{edge}");
            forget(&client, "v", "job").await.unwrap();
            w.nothing_left(&client).await;
        }
    });
}
