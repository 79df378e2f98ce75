//! Who waits for a claim has it in the order of the asking.

use std::time::Duration;

use csid_client::{AccessMode, ClaimMode, Kind};
use csid_tests::ask::*;
use csid_tests::world::{eventually, refusal, world};

use crate::*;

fn waiting(limit: Duration) -> ClaimOptions {
    ClaimOptions { wait_usec: Some(limit.as_micros() as u64), ..ClaimOptions::default() }
}

#[test]
fn claims_wait_in_the_order_they_came() {
    world(async |w| {
        let client = unattaching(w).await;
        register(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "first").await.unwrap();
        let mut calls = Vec::new();
        for consumer in ["a", "b", "c"] {
            let client = client.clone();
            calls.push(tokio::spawn(async move {
                let claimed = client.claim(NAMESPACE, "v", consumer, waiting(Duration::from_secs(60))).await;
                claimed.map(|_| consumer)
            }));
            eventually("it waits", async || {
                let operations = w.client().await.list_operations().await.unwrap();
                operations.iter().filter(|o| o.kind == "claim").count() == calls.len()
            })
            .await;
        }
        let (kind, error) = refusal(claim(&client, "v", "hasty").await);
        assert_eq!(kind, Kind::ClaimConflict, "{error}");
        let mut holder = "first";
        for call in calls {
            release(&client, "v", holder).await.unwrap();
            holder = call.await.unwrap().unwrap();
            assert_eq!(claimed(&client).await, [pair(holder, "taken")]);
        }
        assert_eq!(holder, "c");
        release(&client, "v", holder).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn a_writer_that_waits_is_not_passed_by_readers() {
    world(async |w| {
        let client = unattaching(w).await;
        register(&client, "v", &[AccessMode::MultiNodeReaderOnly, AccessMode::SingleNodeWriter]).await;
        let reader = || ClaimOptions {
            mode: Some(ClaimMode::Read),
            access_mode: Some(AccessMode::MultiNodeReaderOnly),
            ..ClaimOptions::default()
        };
        client.claim(NAMESPACE, "v", "reader", reader()).await.unwrap();
        let writer = ClaimOptions {
            access_mode: Some(AccessMode::SingleNodeWriter),
            ..waiting(Duration::from_secs(60))
        };
        let call = {
            let client = client.clone();
            tokio::spawn(async move { client.claim(NAMESPACE, "v", "writer", writer).await })
        };
        eventually("the writer waits", async || {
            let operations = client.list_operations().await.unwrap();
            operations.iter().any(|o| o.step == "waiting for claims")
        })
        .await;
        let (kind, error) = refusal(client.claim(NAMESPACE, "v", "late", reader()).await);
        assert_eq!((kind, error.details.holders), (Kind::ClaimConflict, vec!["writer".to_owned()]));
        release(&client, "v", "reader").await.unwrap();
        call.await.unwrap().unwrap();
        release(&client, "v", "writer").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn waiting_ends_with_its_time_or_with_a_release() {
    world(async |w| {
        let client = unattaching(w).await;
        register(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "one").await.unwrap();
        let late = client.claim(NAMESPACE, "v", "two", waiting(Duration::from_millis(200))).await;
        let (kind, error) = refusal(late);
        assert_eq!((kind, error.details.holders), (Kind::ClaimConflict, vec!["one".to_owned()]));
        let call = {
            let client = client.clone();
            tokio::spawn(async move {
                client.claim(NAMESPACE, "v", "three", waiting(Duration::from_secs(60))).await
            })
        };
        eventually("it waits", async || {
            client.list_operations().await.unwrap().iter().any(|o| o.step == "waiting for claims")
        })
        .await;
        release(&client, "v", "three").await.unwrap();
        assert_eq!(refusal(call.await.unwrap()).0, Kind::Cancelled);
        release(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}
