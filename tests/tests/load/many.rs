//! Many at once: 64 clients on one volume, and 1,000 volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use csid_client::{AccessMode, Client, Kind, MountFilter, MountOptions};
use csid_tests::ask::*;
use csid_tests::kernel::{self, resident_kib};
use csid_tests::world::{World, count, eventually, refusal, within_time};
use futures_util::future::join_all;

use crate::alone;

const CLIENTS: usize = 64;
const VOLUMES: usize = 1000;
/// The number of calls under way of one connection.
const EACH: usize = 100;
/// A bound that only a csid that hangs passes.
const BOUND: Duration = Duration::from_secs(90);

async fn clients(w: &mut World, number: usize) -> Vec<Client> {
    let mut clients = Vec::new();
    for _ in 0..number {
        clients.push(w.client().await);
    }
    clients
}

fn consumer(n: usize) -> String {
    format!("c{n}")
}

fn per_second(number: usize, took: Duration) -> usize {
    (number as f64 / took.as_secs_f64()) as usize
}

#[test]
fn sixty_four_equal_calls_get_one_answer() {
    alone(async |w| {
        running(w).await;
        let clients = clients(w, CLIENTS).await;
        let begun = Instant::now();
        let answers = join_all(clients.iter().map(|client| mount(client, "job", inline("v")))).await;
        let answers: Vec<_> = answers.into_iter().map(|answer| answer.unwrap()).collect();
        count("calls a second, all the same", per_second(CLIENTS, begun.elapsed()));
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
        let rpcs = |w: &mut World| -> Vec<_> {
            w.plugin("p").volume_calls().into_iter().map(|c| c.call.rpc).collect()
        };
        assert_eq!(rpcs(w), ["NodeStageVolume", "NodePublishVolume"], "one mount for all");
        for gone in join_all(clients.iter().map(|client| unmount(client, "v", "job"))).await {
            gone.unwrap();
        }
        assert_eq!(rpcs(w)[2..], ["NodeUnpublishVolume", "NodeUnstageVolume"], "one unmount for all");
        w.nothing_left(&clients[0]).await;
    });
}

#[test]
fn sixty_four_consumers_are_served_in_order() {
    alone(async |w| {
        let client = running(w).await;
        let clients = clients(w, CLIENTS).await;
        // While the plugin is stopped, one more call at a time is let in: so the order is known.
        let in_order = async |w: &mut World, mounts: bool| {
            w.plugin("p").pause();
            let mut calls = Vec::new();
            for (n, asked) in clients.iter().enumerate() {
                let asked = asked.clone();
                calls.push(tokio::spawn(async move {
                    match mounts {
                        true => mount(&asked, &consumer(n), shared("v")).await.map(drop),
                        false => unmount(&asked, "v", &consumer(n)).await,
                    }
                }));
                eventually("it is under way", async || {
                    client.list_operations().await.unwrap().len() == n + 1
                })
                .await;
            }
            w.plugin("p").resume();
            let begun = Instant::now();
            for call in calls {
                call.await.unwrap().unwrap();
            }
            begun.elapsed()
        };
        let took = in_order(w, true).await;
        count("mounts a second of one volume", per_second(CLIENTS, took));
        let rows = client.list_mounts(MountFilter::default()).await.unwrap();
        assert!(
            rows.len() == CLIENTS && rows.iter().all(|row| row.state == "mounted" && row.healthy),
            "{rows:?}"
        );
        let sources: BTreeMap<_, _> =
            rows.iter().map(|row| (private(row.source.as_ref()), row.consumer.clone())).collect();
        let took = in_order(w, false).await;
        count("unmounts a second of one volume", per_second(CLIENTS, took));

        let calls = w.plugin("p").volume_calls();
        let of = |rpc: &str| -> Vec<String> {
            let targets = calls.iter().filter(|c| c.call.rpc == rpc).map(|c| c.call.target.as_str());
            targets.map(|target| sources.get(Path::new(target)).cloned().unwrap_or_default()).collect()
        };
        let due: Vec<_> = (0..CLIENTS).map(consumer).collect();
        assert_eq!(of("NodePublishVolume"), due, "the mounts' order");
        assert_eq!(of("NodeUnpublishVolume"), due, "the unmounts' order");
        assert_eq!((of("NodeStageVolume").len(), of("NodeUnstageVolume").len()), (1, 1), "co_rule_21");
        w.nothing_left(&client).await;
    });
}

#[test]
fn first_of_sixty_four_conflicting_claims_win() {
    alone(async |w| {
        let client = running(w).await;
        let clients = clients(w, CLIENTS).await;
        let (mut had, mut refused) = (0, 0);
        for round in 0..8 {
            let volume = format!("v{round}");
            let mode = |n: usize| match n % 3 {
                0 => AccessMode::SingleNodeWriter,
                1 => AccessMode::SingleNodeMultiWriter,
                _ => AccessMode::MultiNodeMultiWriter,
            };
            // Another one is the first in each round.
            let answers = join_all((0..CLIENTS).map(async |n| {
                let n = (n + round) % CLIENTS;
                let options = MountOptions { access_mode: Some(mode(n)), ..inline(&volume) };
                (n, mount(&clients[n], &consumer(n), options).await)
            }))
            .await;
            let winners: Vec<_> =
                answers.iter().filter(|(_, answer)| answer.is_ok()).map(|(n, _)| *n).collect();
            let modes: BTreeSet<_> = winners.iter().map(|n| mode(*n).as_str()).collect();
            assert_eq!(modes.len(), 1, "one mode, and somebody has it: {winners:?}");
            let due = match mode(winners[0]) {
                AccessMode::SingleNodeWriter => 1,
                mode_of_all => (0..CLIENTS).filter(|n| mode(*n) == mode_of_all).count(),
            };
            assert_eq!(winners.len(), due, "all that the first one's mode admits: {modes:?}");
            for (n, answer) in answers {
                if answer.is_err() {
                    let (kind, error) = refusal(answer);
                    assert_eq!(kind, Kind::ClaimConflict, "{n}: {error}");
                    assert!(!error.details.holders.is_empty(), "it names who has it: {error}");
                    refused += 1;
                }
            }
            had += winners.len();
            assert_eq!(w.plugin("p").count("NodeStageVolume", &volume), 1, "co_rule_21");
            let all = winners.iter().map(async |n| unmount(&clients[*n], &volume, &consumer(*n)).await);
            for gone in join_all(all).await {
                gone.unwrap();
            }
        }
        w.nothing_left(&client).await;
        count("clients who had a volume", had);
        count("clients answered ClaimConflict", refused);
    });
}

/// The numbers of the mounts below csid's directory: another mount at the same place has another number.
fn mounts(w: &World) -> BTreeSet<u64> {
    kernel::volumes_below(&w.path("state/plugins")).unwrap().into_iter().map(|mount| mount.id).collect()
}

#[test]
fn thousand_volumes_at_once() {
    alone(async |w| {
        running(w).await;
        let idle = resident_kib(w.csid_pid());
        let clients = clients(w, VOLUMES / EACH).await;
        let begun = Instant::now();
        let all =
            (0..VOLUMES).map(async |n| mount(&clients[n / EACH], "job", inline(&format!("v{n}"))).await);
        let answers = tokio::time::timeout(BOUND, join_all(all)).await.expect("a bounded time");
        let sources: BTreeSet<_> = answers.into_iter().map(|answer| answer.unwrap().source).collect();
        count("mounts a second, 1,000 at once", per_second(VOLUMES, begun.elapsed()));
        count("KiB csid has idle", idle);
        count("KiB csid has with 1,000 mounts", resident_kib(w.csid_pid()));
        assert_eq!(sources.len(), VOLUMES, "each has its own");
        let mounted = mounts(w);
        assert_eq!(mounted.len(), 3 * VOLUMES, "a staging, a publish and its clone each");
        let calls = w.plugin("p").volume_calls().len();
        assert_eq!(calls, 2 * VOLUMES);

        w.kill();
        let begun = Instant::now();
        let client = w.start().await;
        settled(&client).await;
        count("µs from exec until 1,000 are adopted", begun.elapsed().as_micros() as usize);
        let rows = client.list_mounts(MountFilter::default()).await.unwrap();
        let good =
            rows.iter().filter(|row| row.state == "mounted" && row.healthy && sources.contains(&row.source));
        assert_eq!(good.count(), VOLUMES, "nothing is lost");
        assert_eq!(mounts(w), mounted, "the very same mounts");
        assert_eq!(w.plugin("p").volume_calls().len(), calls, "adopted without a call");
        count("KiB the next csid has", resident_kib(w.csid_pid()));

        let clients = self::clients(w, VOLUMES / EACH).await;
        let begun = Instant::now();
        let all = (0..VOLUMES).map(async |n| unmount(&clients[n / EACH], &format!("v{n}"), "job").await);
        for gone in tokio::time::timeout(BOUND, join_all(all)).await.expect("a bounded time") {
            gone.unwrap();
        }
        count("unmounts a second, 1,000 at once", per_second(VOLUMES, begun.elapsed()));
        within_time(BOUND, "all are gone", async || mounts(w).is_empty()).await;
        w.nothing_left(&client).await;
    });
}
