//! Seeds, and the breaks that the judge has to see.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::breaks::Break;
use super::scene::{Outcome, play};

/// Seeds of a run of the tests.
const SEEDS: u64 = 20;
/// Seeds within which each break has to be seen.
const BROKEN: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Plays seeds on all processors until one fails. Returns the least seed that has failed.
fn play_all(seeds: std::ops::Range<u64>, is_broken: Option<Break>) -> Option<(u64, Outcome)> {
    let next = AtomicU64::new(seeds.start);
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let mut failed: Vec<(u64, Outcome)> = std::thread::scope(|scope| {
        let play_some = || {
            let mut found = None;
            while found.is_none() {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= seeds.end {
                    break;
                }
                let outcome = play(seed, is_broken);
                if outcome.violation.is_some() {
                    next.store(seeds.end, Ordering::Relaxed);
                    found = Some((seed, outcome));
                }
            }
            found
        };
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(play_some)).collect();
        all.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    failed.sort_by_key(|(seed, _)| *seed);
    failed.into_iter().next()
}

#[test]
fn cluster_keeps_its_rules_under_all_seeds() {
    if let Some(seed) = number("CSID_SIM_SEED") {
        let outcome = play(seed, None);
        println!("CSID_SIM_SEED={seed}: {outcome}");
        assert_eq!(outcome.violation, None);
        return;
    }
    let (seeds, first) = (number("CSID_SIM_SEEDS").unwrap_or(SEEDS), number("CSID_SIM_FIRST").unwrap_or(0));
    let begun = Instant::now();
    if let Some((seed, outcome)) = play_all(first..first + seeds, None) {
        let last = outcome.log.len().saturating_sub(120);
        println!("{}\nCSID_SIM_SEED={seed}: {outcome}", outcome.log[last..].join("\n"));
        panic!("CSID_SIM_SEED={seed} breaks a rule");
    }
    println!("{seeds} seeds in {} ms", begun.elapsed().as_millis());
}

/// The judge is not blind.
#[test]
fn each_break_is_seen() {
    let mut breaks = vec![Break::EarlyDetached, Break::ForcedRelease, Break::NoCompare, Break::StaleCalls];
    // It needs a lost host and a second one, so it takes a program that is optimised: tests/simulation.
    if cfg!(tokio_unstable) {
        breaks.push(Break::SlowPlugin);
    }
    for is_broken in breaks {
        let found = play_all(0..BROKEN, Some(is_broken));
        let (seed, outcome) = found.unwrap_or_else(|| panic!("{is_broken:?} was not seen in {BROKEN} seeds"));
        println!("{is_broken:?}: seed {seed}: {outcome}");
    }
}

/// Without tokio's cfg the order of some wakes is tokio's own: tests/simulation has it.
#[cfg(tokio_unstable)]
#[test]
fn seed_repeats_its_scene() {
    // Names in etcd are random, and decide nothing.
    let is_name = |word: &str| word.len() >= 32 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let shown = |seed| {
        let log = play(seed, None).log.join("\n");
        let words = log.split(|letter: char| !letter.is_ascii_alphanumeric()).map(str::to_owned);
        words.map(|word| if is_name(&word) { "NAME".to_owned() } else { word }).collect::<Vec<_>>()
    };
    for seed in 0..20 {
        assert!(shown(seed) == shown(seed), "CSID_SIM_SEED={seed} has two scenes");
    }
}
