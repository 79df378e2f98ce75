//! csid killed at each edge of a claim's way: what was answered stays, what was not is undone, and nothing stays attached.

use std::fs;

use csid_client::{AccessMode, Client};
use csid_tests::ask::*;
use csid_tests::world::{World, count, eventually, world};

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
