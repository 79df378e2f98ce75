//! Breaks of the cluster that a run has on purpose. The checker has to see each by the rule that the break breaks, and the witness one. A run without a
//! break is green.
//!
//! Some are csid's, which the tests build with feature `fault`. The others come from outside, by what a fault of the servers would do to etcd.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::{Owed, ReleaseAsk};
use csi_witness::report::Report;
use csid_etcd::api::KeyValue;
use csid_tests::dice::Dice;
use csid_tests::world::{World, world};

use crate::load::{ATTACHING, VOLUMES};
use crate::site::Site;
use crate::{Run, judge};

/// The load goes on until so many claims were granted, and so many were broken from outside. On a busy machine that takes longer.
const GRANTED: usize = 80;
const BROKEN: usize = 20;
/// How much longer the load goes on at most until the witness has seen its breach.
const LONGER: Duration = Duration::from_secs(60);
/// The time between two breaks.
const PAUSE: Duration = Duration::from_millis(150);
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

    /// Does it once to the claims of a volume. Its calls may fail: the holder may have let the volume go. Returns how many it has broken.
    async fn once(self, run: &Run, volume: &str) -> usize {
        let mut broken = 0;
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
                    broken += usize::from(ended.is_ok());
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
                    broken += usize::from(ended.is_ok());
                    println!("{key}: {:?}", ended.map(drop).map_err(|status| status.message().to_owned()));
                }
                Break::EarlyDetached | Break::NoDetached => unreachable!("csid does it"),
                Break::LostClaim => {
                    run.site.raw().await.delete(&claim.key).await;
                    broken += 1;
                }
            }
        }
        broken
    }
}

/// Who has to be red, and by what.
#[derive(Clone, Copy, Debug)]
enum Judge {
    /// The checker, by this rule alone.
    Checker(&'static str),
    /// The checker, by this rule. It may also see that a shared volume was refused.
    CheckerOfShared(&'static str),
    /// The witness, by this rule of CSI and a call of this name.
    Witness(u8, &'static str),
}

/// The rules of the checker, as it says them.
const GRANT: &str = "a claim is granted only if no other one is in its way";
const REFUSAL: &str = "a claim is refused only if another one is in its way";

impl Judge {
    /// Judges a history that has ended.
    fn judges(self, run: &Run) {
        match self {
            Judge::Checker(due) | Judge::CheckerOfShared(due) => {
                let (is_linearizable, said) = judge(&run.checker, &run.shared.history.path);
                assert!(!is_linearizable && said.contains("not linearizable"), "{said}");
                // A rule follows the line that ends with its volume.
                let lines = said.lines().zip(said.lines().skip(1));
                let broken: Vec<(&str, &str)> =
                    lines.filter_map(|(volume, rule)| Some((volume, rule.strip_prefix("rule: ")?))).collect();
                let may_be = |(volume, rule): &(&str, &str)| {
                    *rule == due
                        || matches!(self, Judge::CheckerOfShared(_))
                            && *rule == REFUSAL
                            && volume.contains(" of ")
                };
                let is_due = broken.iter().any(|(_, rule)| *rule == due) && broken.iter().all(may_be);
                assert!(is_due, "{due:?} is due, and not {broken:?}: {said}");
            }
            Judge::Witness(rule, rpc) => {
                let report = run.report(ATTACHING);
                assert!(is_in(&report, rule, rpc), "no breach of rule {rule}: {report}");
            }
        }
    }

    /// Returns whether the load has to go on. Only some of the grants show the witness its breach: on a fast machine csid's unstage has begun when the
    /// controller is called, which is another rule.
    fn needs_more(self, run: &Run) -> bool {
        match self {
            Judge::Checker(_) | Judge::CheckerOfShared(_) => false,
            Judge::Witness(rule, rpc) => !is_in(&run.report(ATTACHING), rule, rpc),
        }
    }
}

/// Returns whether a report has a breach of a rule with a call of this name.
fn is_in(report: &Report, rule: u8, rpc: &str) -> bool {
    let mut breaches = report.breaches.iter().filter(|breach| breach.rule == rule);
    breaches.any(|breach| breach.calls.iter().any(|call| call.rpc == rpc))
}

/// Runs two hosts under load, and ends it. `wrong` is `None`: nothing is broken. `judge` is `None`: nobody has to see a breach.
async fn under_load(w: &World, wrong: Option<Break>, judge: Option<Judge>) -> Run {
    let mut run = Run::start(w, Dice::seed(), 1, HELD).await;
    run.csid_break = wrong.map_or("", Break::of_csid);
    run.hosts(2).await;
    let from_outside = wrong.filter(|wrong| wrong.of_csid().is_empty());
    let (mut broken, mut volumes) = (0, VOLUMES[..3].iter().cycle());
    while run.shared.history.counts().granted < GRANTED || from_outside.is_some() && broken < BROKEN {
        tokio::time::sleep(PAUSE).await;
        let volume = volumes.next().expect("a volume");
        if let Some(wrong) = from_outside {
            broken += wrong.once(&run, volume.name).await;
        }
    }
    let end = Instant::now() + LONGER;
    while Instant::now() < end && judge.is_some_and(|judge| judge.needs_more(&run)) {
        tokio::time::sleep(5 * PAUSE).await;
    }
    // A call that has ended and has no line yet would be another reason to be red.
    run.break_off();
    run
}

/// Runs a cluster with a break. The judge has to see it.
fn is_seen(wrong: Break, judge: Judge) {
    world(async move |w| {
        let run = under_load(w, Some(wrong), Some(judge)).await;
        judge.judges(&run);
    });
}

#[test]
fn unbroken_cluster_is_green() {
    world(async |w| {
        let run = under_load(w, None, None).await;
        let (is_linearizable, said) = judge(&run.checker, &run.shared.history.path);
        assert!(is_linearizable, "{said}");
        for plugin in BTreeSet::from(VOLUMES.map(|volume| volume.plugin)) {
            let report = run.report(plugin);
            assert!(report.breaches.is_empty() && report.calls > 0, "{plugin}: {report}");
        }
        let counts = run.shared.history.counts();
        eprintln!("    {counts}");
        assert!(counts.refused > 0, "the load has shown little: {counts}");
    });
}

#[test]
fn forced_release_is_seen() {
    is_seen(Break::ForcedRelease, Judge::Checker(GRANT));
}

#[test]
fn csid_that_says_detached_early_is_seen() {
    // The servers detach a shared volume that csid has mounted, and attach it again with another publish context. csid refuses the mount of
    // a consumer whose context differs from another's.
    is_seen(Break::EarlyDetached, Judge::CheckerOfShared(GRANT));
}

#[test]
fn witness_sees_csid_that_says_detached_early() {
    is_seen(Break::EarlyDetached, Judge::Witness(23, "NodeStageVolume"));
}

#[test]
fn csid_that_never_says_detached_is_seen() {
    is_seen(Break::NoDetached, Judge::Checker(REFUSAL));
}

#[test]
fn foreign_detached_is_seen() {
    is_seen(Break::ForeignDetached, Judge::Checker(GRANT));
}

#[test]
fn lost_claim_is_seen() {
    is_seen(Break::LostClaim, Judge::Checker(GRANT));
}
