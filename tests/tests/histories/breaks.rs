//! Breaks of the cluster that a run has on purpose. The checker has to see each.
//!
//! They come from outside, by what a fault in a program would do to etcd. No program has a switch for them.

use std::time::Duration;

use csi_proto::cluster::v1::{Owed, ReleaseAsk};
use csid_etcd::api::KeyValue;
use csid_tests::dice::Dice;
use csid_tests::world::world;

use crate::load::VOLUMES;
use crate::site::Site;
use crate::{Run, judge};

/// How long the load goes on.
const ROUNDS: u32 = 60;
/// How long a client has a volume at most. Others are to come within this time.
const HELD: Duration = Duration::from_millis(1000);

#[derive(Clone, Copy, Debug)]
enum Break {
    /// An operator forces the release of a volume that is in use: as a server that frees a claim before Detached.
    ForcedRelease,
    /// A node's claims are said to have ended, while its csid has the volume: as a csid that says Detached before it unmounts.
    EarlyDetached,
    /// A claim's rows vanish from etcd: as a server that writes an older record without a compare.
    LostClaim,
}

/// Returns the claims of a volume of one holder.
async fn claims(site: &Site, volume: &str) -> Vec<KeyValue> {
    site.raw().await.below(&format!("/csid/v1/vol/default/{volume}/claim/")).await
}

impl Break {
    /// Does it once to the claims of a volume. Its calls may fail: the holder may have let the volume go.
    async fn once(self, run: &Run, volume: &str) {
        for claim in claims(&run.site, volume).await {
            let key = String::from_utf8_lossy(&claim.key).into_owned();
            let mut names = key.rsplit('/');
            let [consumer, node] = [(); 2].map(|()| names.next().expect("a claim's key").to_owned());
            match self {
                Break::ForcedRelease => {
                    let ask = ReleaseAsk {
                        volume: volume.to_owned(),
                        node,
                        consumer,
                        force: true,
                        ..ReleaseAsk::default()
                    };
                    let ended = run.site.operator(0, "all").release(ask).await;
                    println!("{key}: {:?}", ended.map(drop).map_err(|status| status.message().to_owned()));
                }
                Break::EarlyDetached => {
                    let value: serde_json::Value = serde_json::from_slice(&claim.value).expect("a claim");
                    let host = run.hosts.iter().find(|host| host.name == node).expect("a host");
                    let claim = value["id"].as_str().expect("a claim's id").to_owned();
                    let rows = run.site.raw().await.below(&format!("/csid/v1/node/{node}")).await;
                    let row: serde_json::Value = serde_json::from_slice(&rows[0].value).expect("a node");
                    let owed = Owed {
                        claim,
                        volume: volume.to_owned(),
                        consumer,
                        boot: row["boot"].as_str().expect("the node's boot").to_owned(),
                        ..Owed::default()
                    };
                    let ended = host.node.client(0).detached(owed).await;
                    println!("{key}: {:?}", ended.map(drop).map_err(|status| status.message().to_owned()));
                }
                Break::LostClaim => run.site.raw().await.delete(&claim.key).await,
            }
        }
    }
}

/// Runs two hosts under load with a break, until the checker is red.
fn is_seen(wrong: Break) {
    world(async move |w| {
        let mut run = Run::start(w, Dice::seed(), 1, HELD).await;
        run.hosts(2).await;
        for round in 1..=ROUNDS {
            tokio::time::sleep(Duration::from_millis(150)).await;
            wrong.once(&run, VOLUMES[round as usize % 3].0).await;
            // Each judgement costs a second or less.
            if round.is_multiple_of(10) {
                let (is_linearizable, said) = judge(&run.checker, &run.shared.history.path);
                if !is_linearizable {
                    assert!(said.contains("not linearizable"), "{said}");
                    eprintln!("    {wrong:?} is seen after {round} times");
                    run.abandon();
                    return;
                }
            }
        }
        panic!("{wrong:?} was not seen");
    });
}

#[test]
fn forced_release_is_seen() {
    is_seen(Break::ForcedRelease);
}

#[test]
fn early_detached_is_seen() {
    is_seen(Break::EarlyDetached);
}

#[test]
fn lost_claim_is_seen() {
    is_seen(Break::LostClaim);
}
