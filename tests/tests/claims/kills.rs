//! csid killed at each edge of a claim's way: what was answered stays, what was not is undone, and nothing stays attached.

use std::fs;

use std::time::{Duration, Instant};

use csid_client::{AccessMode, Client, Error};
use csid_tests::ask::*;
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

/// Do `work` with csid killed at the `number`th passing of `edge`; whether it was.
async fn killed_at(w: &mut World, edge: &str, number: u32, work: impl AsyncFnOnce(&Client)) -> bool {
    let client = w.client().await;
    fs::write(w.path("fault"), format!("{edge}:{number}")).unwrap();
    work(&client).await;
    // What csid was killed at stands in the file.
    let killed = fs::read_to_string(w.path("fault")).unwrap() == edge;
    match killed {
        true => eventually("csid is dead", async || w.dead()).await,
        false => w.stop().await,
    }
    fs::write(w.path("fault"), "").unwrap();
    killed
}

#[test]
fn killed_anywhere_on_its_way_a_claim_ends_as_it_was_answered() {
    world(async |w| {
        let fault = w.path("fault").to_str().unwrap().to_owned();
        w.environment.insert("CSID_FAULT".to_owned(), fault);
        let client = attaching(w).await;
        register(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let mut kills = 0;
        for edge in EDGES {
            for number in 1..=6 {
                let mut mounted = false;
                let killed = killed_at(w, edge, number, async |client| {
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
        w.plugin("p").assert_rules();
    });
}

/// csid may be killed while a claim is being written, and find it then: nobody can have been told that it is undone.
#[test]
fn nobody_leaves_a_claim_that_is_being_written() {
    world(async |w| {
        let fault = w.path("fault");
        w.environment.insert("CSID_FAULT".to_owned(), fault.to_str().unwrap().to_owned());
        let (held, next) = (w.path("fault.held"), w.path("fault.next"));
        // At once: what is let go from one edge finds the next one armed.
        let arm = |edge: &str| {
            let _ = fs::remove_file(&held);
            fs::write(&next, edge).unwrap();
            fs::rename(&next, &fault).unwrap();
        };
        // csid is held there, or the caller has left before it was.
        let reached = async |edge: &str, asked: &JoinHandle<_>| {
            eventually(edge, async || {
                asked.is_finished() || fs::read_to_string(&held).is_ok_and(|held| held == edge)
            })
            .await;
        };
        let mut deadline = Duration::from_secs(1);
        let mut client = attaching(w).await;
        register(&client, "v", &[AccessMode::SingleNodeWriter]).await;
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
                arm("ControllerPublishVolume.held");
                let (asking, begun) = (client.clone(), Instant::now());
                let asked = tokio::spawn(async move { asking.claim(NAMESPACE, "v", "one", options).await });
                reached("ControllerPublishVolume", &asked).await;
                arm("claim.held");
                reached("claim", &asked).await;
                if !by_deadline || begun.elapsed() < deadline {
                    break asked;
                }
                // The machine is so slow that his deadline may have passed before.
                deadline *= 2;
                arm("");
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
                "deadline" => tokio::time::sleep(deadline).await,
                "cancel" => eventually("he is withdrawn", async || left.is_finished()).await,
                _ => {
                    eventually("the release is asked for", async || {
                        client.list_operations().await.unwrap().iter().any(|row| row.kind == "release")
                    })
                    .await;
                }
            }
            // Time to be told what is not true yet.
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!asked.is_finished(), "{leaves}");
            arm(if killed { "answer.before:1" } else { "" });
            let told = asked.await.unwrap();
            println!("{leaves}, killed {killed}: {told:?}");
            if killed {
                eventually("csid is killed", async || w.dead()).await;
                arm("");
                client = w.start().await;
                healthy(&client, "p").await;
                let refused = matches!(told, Err(Error::Csid(_)));
                assert!(!refused || claimed(&client).await.is_empty(), "{told:?}, and it is taken");
            } else {
                assert_eq!(told.unwrap().state, "taken");
                left.await.unwrap().unwrap();
                assert_eq!(claimed(&client).await.is_empty(), leaves == "release");
            }
            release(&client, "v", "one").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn what_fails_as_it_failed_before_csid_was_killed_is_tried_again() {
    world(async |w| {
        let client = attaching(w).await;
        register(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "one").await.unwrap();
        w.plugin("p").rules([Rule::always("ControllerUnpublishVolume", Act::Fail(10))]);
        let short = ReleaseOptions { deadline_usec: Some(200_000), ..ReleaseOptions::default() };
        client.release(NAMESPACE, "v", "one", short).await.unwrap_err();
        w.kill();
        let before = w.plugin("p").count("ControllerUnpublishVolume", "v");
        let client = w.start().await;
        healthy(&client, "p").await;
        eventually("it is tried", async || w.plugin("p").count("ControllerUnpublishVolume", "v") > before)
            .await;
        // Somebody else's turn ends the try, which changed nothing that is written.
        let (kind, _) = refusal(claim(&client, "v", "two").await);
        assert_eq!(kind, Kind::ClaimConflict);
        w.honest();
        eventually("the claim is gone", async || claims(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
    });
}
