//! A plugin or a file system that hangs: its callers wait no longer than they said, and nobody else waits at all.

use std::time::{Duration, Instant};

use csid_client::{Client, Kind, MountFilter, MountOptions, Mounted, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::hung::LOOKS;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal};
use futures_util::future::join_all;
use tokio::task::JoinHandle;

use crate::alone;
use crate::beside::{median, within_bound};

const CALLERS: usize = 64;
const DEADLINE: Duration = Duration::from_millis(1500);
/// A slow machine's delay; for ever is longer.
const LATE: Duration = Duration::from_secs(5);
/// deadlines.operation, for those who name no deadline.
const OPERATION: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug)]
enum Hang {
    /// The whole process: not even its health is answered.
    Process,
    /// It is healthy, and its node calls have no end.
    Calls,
}

fn begin(w: &mut World, hang: Hang) {
    let rpcs = ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"];
    match hang {
        Hang::Process => w.plugin("p").pause(),
        Hang::Calls => w.plugin("p").rules(rpcs.map(|rpc| Rule::always(rpc, Act::Delay(3_600_000)))),
    }
}

fn end(w: &mut World, hang: Hang) {
    match hang {
        Hang::Process => w.plugin("p").resume(),
        Hang::Calls => w.plugin("p").honest(),
    }
}

fn volume(n: usize) -> String {
    format!("v{n}")
}

/// Every caller's answer has to be one that says that it took too long; the longest wait.
async fn all_too_long(client: &Client, deadline: Duration) -> Duration {
    let calls = (0..CALLERS).map(async |n| {
        let begun = Instant::now();
        let (kind, error) = refusal(mount(client, "job", within(deadline, inline(&volume(n)))).await);
        assert!([Kind::TimedOut, Kind::Uncertain].contains(&kind), "{error}");
        (kind, begun.elapsed())
    });
    let answers = join_all(calls).await;
    let timed_out = answers.iter().filter(|(kind, _)| *kind == Kind::TimedOut).count();
    assert!(timed_out * 2 > CALLERS, "{timed_out} of {CALLERS} were answered TimedOut");
    let longest = answers.into_iter().map(|(_, took)| took).max().unwrap();
    assert!(longest < deadline + LATE, "{longest:?} with a deadline of {deadline:?}");
    longest
}

fn hung(hang: Hang) {
    alone(async move |w| {
        w.configure(&format!("[deadlines]\noperation = \"{}s\"", OPERATION.as_secs()));
        w.add_plugin_with("p", "rpc-deadline = \"2s\"").await;
        let client = w.start().await;
        healthy(&client, "p").await;
        mounted(&client, "kept", inline("kept")).await;
        begin(w, hang);
        let longest = all_too_long(&client, DEADLINE).await;
        count(
            "µs after its deadline the last of 64 callers was answered",
            (longest - DEADLINE).as_micros() as usize,
        );

        // The next calls: for the same volumes, whose undoing hangs too.
        all_too_long(&client, DEADLINE / 3).await;
        let begun = Instant::now();
        let short = UnmountOptions { deadline_usec: Some(500_000), ..UnmountOptions::default() };
        let (kind, error) = refusal(client.unmount(NAMESPACE, "kept", "kept", short).await);
        assert_eq!(kind, Kind::TimedOut, "{error}");
        assert!(begun.elapsed() < LATE, "{:?}", begun.elapsed());
        // Who names no deadline does not wait for ever either.
        let begun = Instant::now();
        refusal(mount(&client, "job", inline("no-deadline")).await);
        let took = begun.elapsed();
        assert!(took < OPERATION * 2 + LATE, "{took:?} without a deadline");
        count("µs a caller without a deadline waited", took.as_micros() as usize);
        // Reads do not wait.
        assert!(row(&client, "kept", "kept").await.is_some(), "what was mounted is not forgotten");

        end(w, hang);
        healthy(&client, "p").await;
        join_all((0..CALLERS).map(async |n| {
            let answer = mount(&client, "job", within(Duration::from_secs(60), inline(&volume(n)))).await;
            answer.unwrap_or_else(|e| panic!("{hang:?}, once it has ended: {e}"));
            unmount(&client, &volume(n), "job").await.unwrap();
        }))
        .await;
        unmount(&client, "kept", "kept").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn stopped_plugins_callers_wait_for_their_deadline() {
    hung(Hang::Process);
}

#[test]
fn hung_plugins_callers_wait_for_their_deadline() {
    hung(Hang::Calls);
}

/// The number of mounts whose file systems hang. The helper carries out fewer calls of one plugin at once.
const FILE_SYSTEMS: usize = 40;
/// The number of lists at once, each of which probes every mount.
const LISTS: usize = 4;
/// The number of measurements before and during the lists.
const ROUNDS: usize = 9;

/// Returns the time of a list of q's mount, which csid probes.
async fn list_of_q(client: &Client) -> Duration {
    let begun = Instant::now();
    let filter = MountFilter { plugin: Some("q".to_owned()), ..MountFilter::default() };
    assert_eq!(client.list_mounts(filter).await.unwrap().len(), 1);
    begun.elapsed()
}

#[test]
fn hung_file_systems_do_not_delay_other_plugins() {
    alone(async |w| {
        w.add_plugin("q").await;
        let client = running(w).await;
        healthy(&client, "q").await;
        for plugin in ["p", "q"] {
            w.hang(plugin, "NodeStageVolume");
        }
        mounted(&client, "job", of_plugin("q", "quick")).await;
        join_all((0..FILE_SYSTEMS).map(async |n| mounted(&client, "job", inline(&volume(n))).await)).await;
        let hung = w.hung();
        let (mut before, mut during) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            before.push(list_of_q(&client).await);
            (0..FILE_SYSTEMS).for_each(|n| hung.hold_of(&volume(n), &LOOKS));
            let lists: Vec<_> = (0..LISTS)
                .map(|_| {
                    let client = client.clone();
                    tokio::spawn(async move { client.list_mounts(MountFilter::default()).await })
                })
                .collect();
            hung.holds(1).await;
            during.push(list_of_q(&client).await);
            hung.release();
            for rows in join_all(lists).await {
                assert_eq!(rows.unwrap().unwrap().len(), FILE_SYSTEMS + 1);
            }
        }
        let (before, during) = (median(before), median(during));
        count("µs of a probe of q's mount", before.as_micros() as usize);
        count("µs of it while p's file systems hang", during.as_micros() as usize);
        // Behind all of p's probes it takes more than ten times as long.
        assert!(during < 4 * before, "{during:?} while p's file systems hang, {before:?} before");
        unmount(&client, "quick", "job").await.unwrap();
        join_all((0..FILE_SYSTEMS).map(async |n| unmount(&client, &volume(n), "job").await.unwrap())).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn hung_plugin_does_not_delay_other_plugins() {
    alone(async |w| {
        w.add_plugin("q").await;
        let client = running(w).await;
        healthy(&client, "q").await;
        let hung = w.plugin("p");
        let many = async || {
            hung.pause();
            let calls: Vec<_> = (0..CALLERS)
                .map(|n| {
                    let client = client.clone();
                    let options = MountOptions { operation_id: Some(volume(n)), ..inline(&volume(n)) };
                    tokio::spawn(async move { mount(&client, "job", options).await })
                })
                .collect();
            eventually("all hang", async || client.list_operations().await.unwrap().len() == CALLERS).await;
            calls
        };
        // Each of them has its mount in the end.
        let over = async |calls: Vec<JoinHandle<csid_client::Result<Mounted>>>| {
            hung.resume();
            for call in join_all(calls).await {
                call.unwrap().unwrap();
            }
            for gone in join_all((0..CALLERS).map(async |n| unmount(&client, &volume(n), "job").await)).await
            {
                gone.unwrap();
            }
        };
        within_bound(&client, "q", many, over).await;
        w.nothing_left(&client).await;
    });
}
