//! csid killed while a mount's outcome is being written.

use std::time::Duration;

use csid_client::{Error, Kind};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::world::{eventually, refusal, world};

use crate::calls::{named, spawn};

/// The next csid may find the mount in the journal, so no caller may have been answered that it is undone.
#[test]
fn mount_past_commit_point_cannot_be_cancelled() {
    world(async |w| {
        let fault = Fault::of(w);
        let mut client = running(w).await;
        for (leaves, killed) in
            ["deadline", "cancel", "unmount"].into_iter().flat_map(|leaves| [(leaves, true), (leaves, false)])
        {
            let volume = format!("{leaves}-{killed}");
            let mut deadline = Duration::from_millis(500);
            let asked = loop {
                fault.arm("outcome.held");
                let options = match leaves {
                    "deadline" => within(deadline, inline(&volume)),
                    _ => inline(&volume),
                };
                let asked = spawn(&client, named("mount", options));
                eventually("the outcome is being written", async || {
                    asked.is_finished() || fault.holds("outcome")
                })
                .await;
                if fault.holds("outcome") {
                    break asked;
                }
                // On a slow machine the deadline passed before.
                assert_eq!(leaves, "deadline");
                refusal(asked.await.unwrap());
                deadline *= 2;
                fault.disarm();
                unmount(&client, &volume, "job").await.unwrap();
            };
            let (leaving, of) = (client.clone(), volume.clone());
            let left = tokio::spawn(async move {
                match leaves {
                    "cancel" => leaving.cancel_operation("mount").await,
                    "unmount" => unmount(&leaving, &of, "job").await,
                    _ => Ok(()),
                }
            });
            match leaves {
                "deadline" => {}
                "cancel" => eventually("the cancellation is answered", async || left.is_finished()).await,
                _ => {
                    eventually("the unmount is listed", async || {
                        client.list_operations().await.unwrap().iter().any(|row| row.kind == "unmount")
                    })
                    .await;
                }
            }
            // A later call with the same deadline has its answer; the first one's would have come before.
            let later = mount(&client, "other", within(deadline, inline(&volume))).await;
            assert_eq!(refusal(later).0, Kind::TimedOut, "{volume}");
            assert!(!asked.is_finished(), "{volume}");
            fault.arm(if killed { "answer.before:1" } else { "" });
            let answer = asked.await.unwrap();
            if killed {
                eventually("csid is killed", async || w.dead()).await;
                fault.disarm();
                client = w.start().await;
                healthy(&client, "p").await;
                let is_refused = matches!(answer, Err(Error::Csid(_)));
                assert!(!is_refused || row(&client, &volume, "job").await.is_none(), "{volume}: {answer:?}");
            } else {
                answer.unwrap();
                left.await.unwrap().unwrap();
                let now = if leaves == "unmount" { "none" } else { "mounted" };
                assert_eq!(state(&client, &volume, "job").await, now);
            }
            unmount(&client, &volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}
