//! Every gRPC code at stage, publish, unpublish and unstage, before and after the effect (CO rule 36).

use std::time::{Duration, Instant};

use csi_witness::GRPC_CODES;
use csid_client::{Client, Error, Kind, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, world};

/// Codes that csid retries with backoff: RESOURCE_EXHAUSTED, ABORTED, UNAVAILABLE.
const RETRIED: [i32; 3] = [8, 10, 14];
/// Codes that csid does not retry: INVALID_ARGUMENT, NOT_FOUND (making), ALREADY_EXISTS, OUT_OF_RANGE, UNIMPLEMENTED.
const FINAL: [i32; 5] = [3, 5, 6, 11, 12];
const NOT_FOUND: i32 = 5;
/// Ends the calls that csid retries for as long as it may.
const DEADLINE: Duration = Duration::from_secs(4);
/// More than a slow machine needs for a call that ends by itself.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug)]
struct Case {
    rpc: &'static str,
    code: i32,
    after: bool,
    for_ever: bool,
}

impl Case {
    fn volume(self) -> String {
        format!("{}-{}-{}-{}", self.rpc, self.code, self.after, self.for_ever)
    }

    fn rule(self) -> Rule {
        let act = if self.after { Act::FailAfter(self.code) } else { Act::Fail(self.code) };
        let rule = if self.for_ever { Rule::always(self.rpc, act) } else { Rule::once(self.rpc, act) };
        rule.of(&self.volume())
    }

    fn deadline(self) -> Duration {
        if self.for_ever && !FINAL.contains(&self.code) { DEADLINE } else { PATIENCE }
    }

    fn is_retried(self) -> bool {
        RETRIED.contains(&self.code)
    }
}

fn cases(rpcs: [&'static str; 2]) -> Vec<Case> {
    let mut cases = Vec::new();
    for rpc in rpcs {
        for code in 1..=16 {
            for after in [false, true] {
                for for_ever in [false, true] {
                    cases.push(Case { rpc, code, after, for_ever });
                }
            }
        }
    }
    cases
}

/// Runs `one` for all cases at the same time.
async fn all<R: Send + 'static>(
    client: &Client,
    cases: &[Case],
    one: impl AsyncFn(Client, Case) -> R,
) -> Vec<(Case, R)> {
    use futures_util::stream::{FuturesUnordered, StreamExt};
    let running: FuturesUnordered<_> =
        cases.iter().map(|case| async { (*case, one(client.clone(), *case).await) }).collect();
    running.collect().await
}

async fn honest_in_the_end(w: &mut World, client: &Client, cases: &[Case]) {
    w.plugin("p").honest();
    all(client, cases, async |client, case| {
        let volume = case.volume();
        unmount(&client, &volume, "job").await.unwrap_or_else(|e| panic!("{case:?}: {e}"));
        mount(&client, "job", inline(&volume)).await.unwrap_or_else(|e| panic!("{case:?}: {e}"));
        unmount(&client, &volume, "job").await.unwrap_or_else(|e| panic!("{case:?}: {e}"));
    })
    .await;
    w.nothing_left(client).await;
}

#[test]
fn co_rule_36_every_code_at_stage_and_publish() {
    world(async |w| {
        let client = running(w).await;
        let cases = cases(["NodeStageVolume", "NodePublishVolume"]);
        w.plugin("p").rules(cases.iter().map(|case| case.rule()));
        let answers = all(&client, &cases, async |client, case| {
            let begun = Instant::now();
            let result = mount(&client, "job", within(case.deadline(), inline(&case.volume()))).await;
            (result, begun.elapsed())
        })
        .await;
        let mut retries = 0;
        for (case, (result, took)) in &answers {
            assert!(*took < case.deadline() + PATIENCE, "{case:?}: {took:?}");
            let sent = w.plugin("p").count(case.rpc, &case.volume());
            if case.is_retried() {
                assert!(sent >= 2, "{case:?} was sent {sent} times");
                assert!(sent <= 60, "{case:?}: {sent} tries are no backoff");
                retries += sent - 1;
            }
            if case.is_retried() && !case.for_ever {
                assert!(result.is_ok(), "{case:?}: the second try succeeds: {result:?}");
                continue;
            }
            let error = match result {
                // An unknown outcome that was negated may be tried again within the deadline.
                Ok(_) if !case.for_ever && !FINAL.contains(&case.code) => continue,
                Err(Error::Csid(error)) => error,
                other => panic!("{case:?}: {other:?}"),
            };
            let due = match (case.is_retried(), case.code) {
                (true, _) => vec![Kind::TimedOut, Kind::PluginError],
                (false, 16) => vec![Kind::PluginError, Kind::SecretRequired],
                (false, _) => vec![Kind::PluginError],
            };
            let code = format!("{}: {}: ", case.rpc, GRPC_CODES[case.code as usize]);
            // csid may retry a call whose outcome is open, until the deadline.
            let is_late = case.deadline() == DEADLINE && error.kind == Kind::TimedOut;
            assert!(is_late || due.contains(&error.kind), "{case:?}: {error}");
            if error.kind == Kind::PluginError {
                assert!(error.message.starts_with(&code), "{case:?}: {error}");
                assert_eq!(error.details.grpc_code, Some(case.code as u32), "{case:?}");
                assert_eq!(error.details.rpc.as_deref(), Some(case.rpc), "{case:?}");
                assert!(error.details.plugin_message.is_some(), "{case:?}");
            }
            if FINAL.contains(&case.code) {
                assert_eq!(sent, 1, "{case:?} was tried again");
            }
        }
        // What failed is undone already; what a code hid is not left either.
        let failed: Vec<_> = answers.iter().filter(|(_, (r, _))| r.is_err()).map(|(c, _)| *c).collect();
        csid_tests::world::eventually("all failures are undone", async || {
            client.list_mounts(Default::default()).await.unwrap().iter().all(|row| row.state == "mounted")
        })
        .await;
        for case in &failed {
            assert_eq!(state(&client, &case.volume(), "job").await, "none", "{case:?}");
        }
        honest_in_the_end(w, &client, &cases).await;
        count("codes at stage and publish", cases.len());
        count("retries of them", retries);
    });
}

#[test]
fn co_rule_36_every_code_at_unpublish_and_unstage() {
    world(async |w| {
        let client = running(w).await;
        let cases = cases(["NodeUnpublishVolume", "NodeUnstageVolume"]);
        let paths: std::collections::BTreeMap<_, _> = all(&client, &cases, async |client, case| {
            let source = mounted(&client, "job", inline(&case.volume())).await;
            let staging = row(&client, &case.volume(), "job").await.expect("the row").staging;
            (source, std::path::PathBuf::from(staging))
        })
        .await
        .into_iter()
        .map(|(case, paths)| (case.volume(), paths))
        .collect();
        w.plugin("p").rules(cases.iter().map(|case| case.rule()));
        let answers = all(&client, &cases, async |client, case| {
            let begun = Instant::now();
            let options = UnmountOptions {
                deadline_usec: Some(case.deadline().as_micros() as u64),
                ..UnmountOptions::default()
            };
            let result = client.unmount(NAMESPACE, &case.volume(), "job", options).await;
            (result, begun.elapsed())
        })
        .await;
        let (mut done, mut refused) = (0, 0);
        for (case, (result, took)) in &answers {
            assert!(*took < case.deadline() + PATIENCE, "{case:?}: {took:?}");
            let sent = w.plugin("p").count(case.rpc, &case.volume());
            assert!(sent <= 60, "{case:?}: {sent} tries are no backoff");
            match result {
                // NOT_FOUND is success, for ever or not; but not while it is still mounted.
                Ok(()) => {
                    assert!(!case.for_ever || case.code == NOT_FOUND, "{case:?} cannot have succeeded");
                    assert_eq!(state(&client, &case.volume(), "job").await, "none", "{case:?}");
                    let (source, staging) = &paths[&case.volume()];
                    let mounts = [source, staging].map(|path| kernel::stacked(path).unwrap());
                    assert_eq!(mounts, [0, 0], "{case:?}: an unmount returns when the mount is gone");
                    done += 1;
                }
                Err(Error::Csid(error)) => {
                    let due = [Kind::PluginError, Kind::TimedOut, Kind::Uncertain, Kind::Busy];
                    assert!(due.contains(&error.kind), "{case:?}: {error}");
                    assert!(
                        !case.is_retried() || case.for_ever,
                        "{case:?}: the second try succeeds: {error}"
                    );
                    assert!(
                        !(case.code == NOT_FOUND && case.after),
                        "{case:?}: NOT_FOUND is success: {error}"
                    );
                    if case.rpc == "NodeUnpublishVolume" && case.for_ever && case.code != NOT_FOUND {
                        let unstaged = w.plugin("p").count("NodeUnstageVolume", &case.volume());
                        assert_eq!(unstaged, 0, "co_rule_22: {case:?}");
                    }
                    refused += 1;
                }
                Err(other) => panic!("{case:?}: {other:?}"),
            }
        }
        honest_in_the_end(w, &client, &cases).await;
        count("unmounts answered though a code came", done);
        count("unmounts refused, and done later", refused);
    });
}

#[test]
fn co_rule_36_unimplemented_checks_capabilities_first() {
    world(async |w| {
        let client = running(w).await;
        let unimplemented = GRPC_CODES.iter().position(|name| *name == "UNIMPLEMENTED").unwrap() as i32;
        let once = |rpc| [Rule::once(rpc, Act::Fail(unimplemented))];
        w.plugin("p").rules(once("NodeStageVolume"));
        mount(&client, "job", inline("v")).await.unwrap_err();
        mount(&client, "job", inline("v")).await.unwrap();
        w.plugin("p").rules(once("NodeUnpublishVolume"));
        unmount(&client, "v", "job").await.unwrap_err();
        // The background's try, or the caller's.
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
        let mut unanswered = None;
        let mut again = 0;
        for call in w.plugin("p").calls() {
            let rpc = call.call.rpc;
            if rpc == "NodeGetCapabilities" {
                unanswered = None;
            } else if call.code == Some(unimplemented) {
                unanswered = Some(rpc);
                again += 1;
            } else {
                assert_ne!(unanswered, Some(rpc), "asked again as it was");
            }
        }
        assert_eq!(again, 2);
    });
}
