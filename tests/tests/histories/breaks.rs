//! Breaks of the cluster that a run has on purpose. The checker has to see each, and the witness one.
//!
//! Some are csid's, which the tests build with feature `fault`. The others come from outside, by what a fault of the servers would do to etcd.

use std::time::Duration;

use csi_proto::cluster::v1::{Owed, ReleaseAsk};
use csid_etcd::api::KeyValue;
use csid_tests::dice::Dice;
use csid_tests::world::world;

use crate::load::{ATTACHING, VOLUMES};
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
    /// csid says Detached as soon as a claim is granted, and not after it has unmounted.
    EarlyDetached,
    /// csid answers a release, and never says Detached.
    NoDetached,
    /// The servers get a Detached of a node whose csid has the volume.
    ForeignDetached,
    /// A claim's rows vanish from etcd: as a server that writes an older record without a compare.
    LostClaim,
}

/// Returns the claims of a volume of one holder.
async fn claims(site: &Site, volume: &str) -> Vec<KeyValue> {
    site.raw().await.below(&format!("/csid/v1/vol/default/{volume}/claim/")).await
}

impl Break {
    /// Returns what csid calls the break. Empty: it is none of csid's.
    fn of_csid(self) -> &'static str {
        match self {
            Break::EarlyDetached => "early-detached",
            Break::NoDetached => "no-detached",
            _ => "",
        }
    }

    /// Does it once to the claims of a volume. Its calls may fail: the holder may have let the volume go.
    async fn once(self, run: &Run, volume: &str) {
        if !self.of_csid().is_empty() {
            return;
        }
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
                Break::ForeignDetached => {
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
                Break::EarlyDetached | Break::NoDetached => unreachable!("csid does it"),
                Break::LostClaim => run.site.raw().await.delete(&claim.key).await,
            }
        }
    }
}

/// Whether the checker is red.
fn by_checker(run: &Run) -> bool {
    let (is_linearizable, said) = judge(&run.checker, &run.shared.history.path);
    assert!(is_linearizable || said.contains("not linearizable"), "{said}");
    !is_linearizable
}

/// Whether the witness saw that a volume is detached from a node that has it staged.
fn by_witness(run: &Run) -> bool {
    let report = run.report(ATTACHING);
    let mut breaches = report.breaches.iter().filter(|breach| breach.rule == 23);
    breaches.any(|breach| breach.calls.iter().any(|call| call.rpc == "NodeStageVolume"))
}

/// Runs two hosts under load with a break, until a judge sees it.
fn is_seen(wrong: Break, judge: fn(&Run) -> bool) {
    world(async move |w| {
        let mut run = Run::start(w, Dice::seed(), 1, HELD).await;
        run.csid_break = wrong.of_csid();
        run.hosts(2).await;
        for round in 1..=ROUNDS {
            tokio::time::sleep(Duration::from_millis(150)).await;
            wrong.once(&run, VOLUMES[round as usize % 3].name).await;
            // Each judgement costs a second or less.
            if round.is_multiple_of(10) && judge(&run) {
                eprintln!("    {wrong:?} is seen after {round} times");
                run.abandon();
                return;
            }
        }
        panic!("{wrong:?} was not seen");
    });
}

#[test]
fn forced_release_is_seen() {
    is_seen(Break::ForcedRelease, by_checker);
}

#[test]
fn csid_that_says_detached_early_is_seen() {
    is_seen(Break::EarlyDetached, by_checker);
}

#[test]
fn witness_sees_csid_that_says_detached_early() {
    is_seen(Break::EarlyDetached, by_witness);
}

#[test]
fn csid_that_never_says_detached_is_seen() {
    is_seen(Break::NoDetached, by_checker);
}

#[test]
fn foreign_detached_is_seen() {
    is_seen(Break::ForeignDetached, by_checker);
}

#[test]
fn lost_claim_is_seen() {
    is_seen(Break::LostClaim, by_checker);
}
