//! The crash matrix: csid is killed at every journal and RPC edge of mount, unmount and restore, and of what repairs,
//! undoes and finishes them; one volume in flight and many, of each kind, the plugin answering, failing, hanging, dying, late, serving
//! one call at a time, counting publishes and leaving mounts behind.
//! Then csid starts again, and what it owes its clients is looked at (`slots`). The same of volumes that are registered, claimed
//! and attached (`registered`), of volumes that another mount namespace writes to or an administrator has bound (`elsewhere`), and of volumes next to others
//! whose file systems hang (`hung`).
//!
//! `CSID_KILLS` is how many kills there are at least, `CSID_SEED` repeats a run, and with `CSID_CHAPTER` only one world of it.

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

use csid_tests::dice::Dice;
use csid_tests::world::{program, world};
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
            "after kill {kills} or before; again with CSID_SEED={seed} CSID_CHAPTER={number}"
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
    let matrix: Vec<_> =
        plan::matrix().into_iter().chain(plan::every_call()).map(Some).map(Mutex::new).collect();
    let must = plan::matrix().len();
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
                        None => plan::another(&mut Dice::new(seed, !(number as u64))),
                    };
                    run(number as u64, life, &report, seed);
                }
            });
        }
    });
    report.close(if only.is_none() { &points } else { &[] });
}
