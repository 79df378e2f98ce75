//! Orders of events between the calls for one volume that once gave a wrong answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use csid_client::{Kind, MountFilter, MountOptions, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};
use futures_util::future::join_all;
use rustix::mount::{MountFlags, UnmountFlags, mount as kernel_mount, unmount as kernel_unmount};

use crate::calls::{reached, spawn};

/// `options` with a new directory as target.
fn at_target(w: &World, options: MountOptions) -> MountOptions {
    let target = w.path("targets/t");
    std::fs::create_dir(&target).unwrap();
    MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..options }
}

#[test]
fn unmount_goes_on_after_its_caller_timed_out() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "a", shared("v")).await;
        w.plugin("p").kill();
        eventually("the plugin is unhealthy", async || !client.plugin("p").await.unwrap().healthy).await;
        let short = UnmountOptions { deadline_usec: Some(500_000), ..UnmountOptions::default() };
        let (unmounted, other) = tokio::join!(
            client.unmount(NAMESPACE, "v", "a", short),
            mount(&client, "b", within(Duration::from_secs(2), shared("v"))),
        );
        assert_eq!(refusal(unmounted).0, Kind::TimedOut);
        // The call and its search for the plugin end at the same instant.
        let (kind, error) = refusal(other);
        assert!([Kind::TimedOut, Kind::PluginUnavailable].contains(&kind), "{error}");
        assert_eq!(state(&client, "v", "a").await, "unmounting");
        w.plugin("p").start().await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn unmount_cancels_a_mount_queued_before_it() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", shared("v")).await;
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Hold)]);
        let unmounting =
            |client: csid_client::Client| tokio::spawn(async move { unmount(&client, "v", "job").await });
        let first = unmounting(client.clone());
        reached(w, "NodeUnpublishVolume").await;
        let queued = spawn(&client, shared("v"));
        eventually("the mount is queued", async || {
            client.list_operations().await.unwrap().iter().any(|row| row.kind == "mount")
        })
        .await;
        let last = unmounting(client.clone());
        assert_eq!(refusal(queued.await.unwrap()).0, Kind::Cancelled);
        w.plugin("p").honest();
        first.await.unwrap().unwrap();
        last.await.unwrap().unwrap();
        assert_eq!(state(&client, "v", "job").await, "none", "the last call was the unmount");
        w.nothing_left(&client).await;
    });
}

#[test]
fn listing_makes_no_unmount_busy() {
    world(async |w| {
        let client = running(w).await;
        let options = at_target(w, shared("v"));
        let other = w.client().await;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let listing = tokio::spawn(async move {
            let mut lists = 0;
            while !stopped.load(Ordering::Relaxed) {
                let all = join_all((0..8).map(|_| other.list_mounts(MountFilter::default()))).await;
                lists += all.len();
                all.into_iter().for_each(|rows| drop(rows.expect("the rows")));
            }
            lists
        });
        for _ in 0..150 {
            mounted(&client, "a", options.clone()).await;
            unmount(&client, "v", "a").await.unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        count("lists during mounts and unmounts", listing.await.unwrap());
        w.nothing_left(&client).await;
    });
}

#[test]
fn blocked_unmount_delays_no_other_consumers() {
    world(async |w| {
        let client = running(w).await;
        let options = at_target(w, shared("v"));
        mounted(&client, "a", options).await;
        mounted(&client, "b", shared("v")).await;
        // A mount over the target keeps `a`.
        let target = w.path("targets/t");
        kernel_mount("none", &target, "tmpfs", MountFlags::empty(), None).unwrap();
        assert_eq!(refusal(unmount(&client, "v", "a").await).0, Kind::Busy);
        w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::Fail(9))]);
        let (kind, error) = refusal(unmount(&client, "v", "b").await);
        assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(9)), "{error}");
        eventually("the unmount of b is repeated", async || row(&client, "v", "b").await.is_none()).await;
        assert_eq!(state(&client, "v", "a").await, "mounted");
        kernel_unmount(&target, UnmountFlags::empty()).unwrap();
        unmount(&client, "v", "a").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn failed_unmount_frees_the_targets_of_others() {
    world(async |w| {
        let client = running(w).await;
        let options = at_target(w, shared("v"));
        let other = MountOptions { target: options.target.clone(), ..inline("other") };
        mounted(&client, "failing", shared("v")).await;
        mounted(&client, "a", options).await;
        w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::Fail(9))]);
        let (kind, error) = refusal(unmount(&client, "v", "failing").await);
        assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(9)), "{error}");
        w.plugin("p").honest();
        unmount(&client, "v", "a").await.unwrap();
        mounted(&client, "a", other).await;
        unmount(&client, "other", "a").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// Deadlines of 0.3 to 12 ms end mounts at every step, also while the outcome is being written.
#[test]
fn timed_out_mounts_are_rolled_back() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "a", shared("warm")).await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(2))]);
        let mut timed_out = 0;
        for n in 0..400_u64 {
            let volume = format!("v{n}");
            let deadline = Duration::from_micros(300 + (n % 80) * 150);
            match mount(&client, "a", within(deadline, shared(&volume))).await {
                Ok(_) => unmount(&client, &volume, "a").await.unwrap(),
                failed => {
                    // Another error may come first, as that of the search for the plugin. It is rolled back as well.
                    timed_out += usize::from(refusal(failed).0 == Kind::TimedOut);
                }
            }
        }
        count("mounts timed out", timed_out);
        assert!(timed_out > 0, "no deadline passed during a mount");
        assert!(kernel::stacked(&mounted(&client, "a", shared("warm")).await).unwrap() == 1);
        unmount(&client, "warm", "a").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn plugin_is_busy_during_its_first_mount() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Hold)]);
        let mounting = spawn(&client, inline("v"));
        reached(w, "NodeStageVolume").await;
        assert_eq!(refusal(client.unregister_plugin("p", Default::default()).await).0, Kind::Busy);
        w.plugin("p").honest();
        mounting.await.unwrap().unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
