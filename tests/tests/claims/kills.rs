//! csid killed at each edge of a claim: an answered claim stays, an unanswered one is undone, and nothing stays attached.

use std::time::Duration;

use csid_client::{AccessMode, Client, Error};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};
use tokio::task::JoinHandle;

use crate::*;

const EDGES: [&str; 6] = [
    "claim.before",
    "claim.after",
    "ControllerPublishVolume.before",
    "ControllerPublishVolume.after",
    "ControllerUnpublishVolume.before",
    "ControllerUnpublishVolume.after",
];

/// Runs `work` and kills csid at the `number`th passing of `edge`. Returns whether csid was killed.
async fn killed_at(
    w: &mut World,
    fault: &Fault,
    edge: &str,
    number: u32,
    work: impl AsyncFnOnce(&Client),
) -> bool {
    let client = w.client().await;
    fault.arm(&format!("{edge}:{number}"));
    work(&client).await;
    let killed = fault.killed_at(edge);
    match killed {
        true => eventually("csid is dead", async || w.dead()).await,
        false => w.stop().await,
    }
    fault.disarm();
    killed
}

#[test]
fn claim_ends_as_answered_after_a_kill_at_any_edge() {
    world(async |w| {
        let fault = Fault::of(w);
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let mut kills = 0;
        for edge in EDGES {
            for number in 1..=6 {
                let mut mounted = false;
                let killed = killed_at(w, &fault, edge, number, async |client| {
                    mounted = mount_registered(client, "v", "one").await.is_ok();
                    let unmounted = mounted && unmount(client, "v", "one").await.is_ok();
                    mounted &= !unmounted;
                })
                .await;
                kills += usize::from(killed);
                let client = w.start().await;
                settled(&client).await;
                healthy(&client, "p").await;
                if mounted {
                    // The Unmount was not answered: it was done, or it was not.
                    eventually("it is settled", async || client.list_operations().await.unwrap().is_empty())
                        .await;
                    unmount(&client, "v", "one").await.unwrap();
                }
                eventually("the claim is gone", async || claims(&client).await.is_empty()).await;
                w.nothing_left(&client).await;
                if !killed {
                    break;
                }
            }
        }
        count("kills on a claim's way", kills);
        assert!(kills >= 12, "{kills}");
    });
}

/// The next csid may find the claim in the journal, so no caller may have been answered that it is undone.
#[test]
fn claim_past_commit_point_cannot_be_cancelled() {
    world(async |w| {
        let fault = Fault::of(w);
        // csid is held there, or the call ended before it was.
        let reached = async |edge: &str, asked: &JoinHandle<_>| {
            eventually(edge, async || asked.is_finished() || fault.holds(edge)).await;
        };
        let mut deadline = Duration::from_secs(1);
        let mut client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        for (leaves, killed) in
            ["deadline", "cancel", "release"].into_iter().flat_map(|leaves| [(leaves, true), (leaves, false)])
        {
            let by_deadline = leaves == "deadline";
            let asked = loop {
                let options = ClaimOptions {
                    operation_id: Some("claim".to_owned()),
                    deadline_usec: by_deadline.then_some(deadline.as_micros() as u64),
                    ..ClaimOptions::default()
                };
                fault.arm("ControllerPublishVolume.held");
                let asking = client.clone();
                let asked = tokio::spawn(async move { asking.claim(NAMESPACE, "v", "one", options).await });
                reached("ControllerPublishVolume", &asked).await;
                fault.arm("claim.held");
                reached("claim", &asked).await;
                if fault.holds("claim") && !asked.is_finished() {
                    break asked;
                }
                // On a slow machine the deadline passed before the claim was written.
                assert!(by_deadline, "{leaves}");
                deadline *= 2;
                fault.disarm();
                let _either = asked.await.unwrap();
                release(&client, "v", "one").await.unwrap();
            };
            let leaving = client.clone();
            let left = tokio::spawn(async move {
                match leaves {
                    "cancel" => leaving.cancel_operation("claim").await,
                    "release" => release(&leaving, "v", "one").await,
                    _ => Ok(()),
                }
            });
            match leaves {
                "deadline" => {}
                "cancel" => eventually("the cancellation is answered", async || left.is_finished()).await,
                _ => {
                    eventually("the release is listed", async || {
                        client.list_operations().await.unwrap().iter().any(|row| row.kind == "release")
                    })
                    .await;
                }
            }
            // A later call with the same deadline has its answer; the first one's would have come before.
            let same =
                ClaimOptions { deadline_usec: Some(deadline.as_micros() as u64), ..ClaimOptions::default() };
            assert_eq!(
                refusal(client.claim(NAMESPACE, "v", "two", same).await).0,
                Kind::TimedOut,
                "{leaves}"
            );
            assert!(!asked.is_finished(), "{leaves}");
            fault.arm(if killed { "answer.before:1" } else { "" });
            let answer = asked.await.unwrap();
            if killed {
                eventually("csid is killed", async || w.dead()).await;
                fault.disarm();
                client = w.start().await;
                healthy(&client, "p").await;
                let is_refused = matches!(answer, Err(Error::Csid(_)));
                assert!(!is_refused || claimed(&client).await.is_empty(), "{leaves}: {answer:?}");
            } else {
                assert_eq!(answer.unwrap().state, "taken");
                left.await.unwrap().unwrap();
                assert_eq!(claimed(&client).await.is_empty(), leaves == "release");
            }
            release(&client, "v", "one").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn failed_detach_is_repeated_after_a_kill() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "one").await.unwrap();
        w.plugin("p").rules([Rule::always("ControllerUnpublishVolume", Act::Fail(10))]);
        let short = ReleaseOptions { deadline_usec: Some(200_000), ..ReleaseOptions::default() };
        // Servers have taken it before they have the volume detached.
        let released = client.release(NAMESPACE, "v", "one", short).await;
        assert_eq!(released.is_ok(), clustered::is_used(), "{released:?}");
        w.kill();
        let before = w.plugin("p").count("ControllerUnpublishVolume", "v");
        let client = w.start().await;
        healthy(&client, "p").await;
        eventually("it is tried", async || w.plugin("p").count("ControllerUnpublishVolume", "v") > before)
            .await;
        // Another call for the volume ends the try, which changed no row.
        let (kind, _) = refusal(claim(&client, "v", "two").await);
        assert_eq!(kind, Kind::ClaimConflict);
        w.honest();
        eventually("the claim is gone", async || claims(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
    });
}
