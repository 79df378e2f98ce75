//! The crash matrix: csid is killed at every journal and RPC edge of mount, unmount and restore, and of what repairs,
//! undoes and finishes them; one volume in flight and many, of each kind, the plugin answering, failing, hanging, dying, late, serving
//! one call at a time, counting publishes and leaving mounts behind.
//! Then csid starts again, and what it owes its clients is looked at (`slots`). The same of volumes that are registered, claimed
//! and attached (`registered`), of volumes that another mount namespace writes to or an administrator has bound (`elsewhere`), and of volumes next to others
//! whose file systems hang (`hung`).
//!
//! `CSID_KILLS` is how many kills there are at least, `CSID_SEED` repeats a run, and with `CSID_CHAPTER` only one world of it.
//! With csid's claims on etcd or at a csid-server (`CSID_TEST_ETCD`, `CSID_TEST_CLUSTER`) only registered volumes have worlds.

mod check;
mod elsewhere;
mod hung;
mod model;
mod plan;
mod registered;
mod report;
mod rounds;
mod sequences;
mod slot;
mod slots;
mod traffic;

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use csid::fault::edges_of;
use csid_tests::dice::Dice;
use csid_tests::world::{program, world};
use csid_tests::{clustered, on_etcd};
use plan::{Chapter, Kind, Life, Plugin};
use report::Report;
use slots::Slots;

/// The edges that csid can be killed at.
fn points() -> Vec<String> {
    let output = Command::new(program("csid-under-test")).arg("--fault-points").output().expect("csid");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("UTF-8").lines().map(str::to_owned).collect()
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect(variable))
}

fn kinds(chapter: &Chapter) -> Vec<Kind> {
    match chapter {
        Chapter::EveryEdge(cells, _) | Chapter::RandomEdge(cells, _) => {
            cells.iter().map(|cell| cell.kind).collect::<BTreeSet<_>>().into_iter().collect()
        }
        Chapter::Sequences(_) => Kind::ALL.to_vec(),
    }
}

/// Returns whether the plugins count publishes, from the beginning of the life to its end.
fn counts(chapter: &Chapter, dice: &mut Dice) -> bool {
    match chapter {
        Chapter::EveryEdge(cells, _) | Chapter::RandomEdge(cells, _) => {
            cells.iter().any(|cell| cell.plugin == Plugin::Counts)
        }
        Chapter::Sequences(_) => dice.once_in(2),
    }
}

/// Returns the variable that says where the claims of this run are kept. `None`: in the journal.
fn elsewhere() -> Option<&'static str> {
    match () {
        () if on_etcd::is_used() => Some(on_etcd::ENDPOINTS),
        () if clustered::is_used() => Some(clustered::ENDPOINTS),
        () => None,
    }
}

async fn live(mut slots: Slots<'_>, chapter: Chapter) {
    if counts(&chapter, &mut slots.dice) {
        slots.count_publishes();
    }
    match chapter {
        Chapter::EveryEdge(cells, calls) => {
            for cell in cells {
                slots.every_edge(&cell, calls).await;
            }
        }
        Chapter::RandomEdge(cells, rounds) => {
            for _ in 0..rounds {
                let cell = slots.dice.of(&cells);
                slots.random_edge(&cell).await;
            }
        }
        Chapter::Sequences(epochs) => slots.sequences(epochs).await,
    }
    slots.close().await;
}

fn run(number: u64, life: Life, report: &Arc<Report>, seed: u64) {
    let for_world = Arc::clone(report);
    let (what, begun) = (life.to_string(), Instant::now());
    let lived = std::panic::catch_unwind(move || {
        world(async move |w| {
            let dice = Dice::new(seed, number);
            match life {
                Life::Inline(chapter) => {
                    let slots = Slots::new(w, &kinds(&chapter), dice, for_world).await;
                    live(slots, chapter).await;
                }
                Life::Registered(chapter) => registered::live(w, chapter, dice, for_world).await,
                Life::Elsewhere(volumes) => elsewhere::live(w, volumes, dice, for_world).await,
                Life::Hung(rounds) => hung::live(w, rounds, dice, for_world).await,
            }
        });
    });
    report.took(begun.elapsed().as_secs(), format!("chapter {number}, {what}"));
    if lived.is_err() {
        let kills = report.numbers().kills;
        report.failed(format!(
            "after kill {kills} or before; again with CSID_SEED={seed} CSID_CHAPTER={number} {}",
            elsewhere().unwrap_or_default()
        ));
    }
}

#[test]
fn kill_at_every_edge_loses_and_leaves_nothing() {
    let points = points();
    let seed = Dice::seed();
    let kills = number("CSID_KILLS").unwrap_or(1000);
    let only = number("CSID_CHAPTER");
    println!("CSID_SEED={seed}");
    let report = Arc::new(Report::new(seed));
    // The journal keeps the mounts everywhere. So elsewhere only what has claims is new.
    let elsewhere = elsewhere();
    let is_due = |life: &Life| elsewhere.is_none() || matches!(life, Life::Registered(_));
    let (matrix, long) = (plan::matrix(), plan::every_call());
    let must = matrix.iter().filter(|life| is_due(life)).count();
    let matrix: Vec<_> = matrix.into_iter().chain(long).filter(is_due).map(Some).map(Mutex::new).collect();
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let number = match only {
                        Some(only) if next.fetch_add(1, Ordering::Relaxed) == 0 => only as usize,
                        Some(_) => return,
                        None => next.fetch_add(1, Ordering::Relaxed),
                    };
                    if only.is_none() && number >= must && report.numbers().kills >= kills {
                        return;
                    }
                    let life = match matrix.get(number) {
                        Some(life) => life.lock().expect("a life").take().expect("lived once"),
                        None if elsewhere.is_some() => {
                            Life::Registered(registered::another(&mut Dice::new(seed, !(number as u64))))
                        }
                        None => plan::another(&mut Dice::new(seed, !(number as u64))),
                    };
                    run(number as u64, life, &report, seed);
                }
            });
        }
    });
    // Worlds of registered volumes do not come to every edge.
    let names: Vec<_> = registered::RPCS.into_iter().chain(["claim", "registration", "answer"]).collect();
    let is_of_claims = |point: &String| names.iter().any(|name| edges_of(name).contains(point));
    let mut due: Vec<_> =
        points.into_iter().filter(|point| elsewhere.is_none() || is_of_claims(point)).collect();
    if clustered::is_used() {
        due.extend(["Claim", "Detached"].into_iter().flat_map(edges_of));
    }
    report.close(if only.is_none() { &due } else { &[] }, elsewhere);
}
