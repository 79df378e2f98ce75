//! A cluster under load for half an hour, with a fault about every 10 s: no process of csid's takes more memory or open files as time goes on.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use csid_tests::dice::Dice;
use csid_tests::world::{left_out, within_time, world_within};

use crate::faults::Faults;
use crate::samples::{Life, PROGRAMS, Sampler, Verdict, WARM_UP, heading};
use crate::{HELD, HOSTS, REST, Run, keep};

/// The minutes of the load. The test is left out without it.
const MINUTES: &str = "CSID_MINUTES";
/// The time from one fault to the next. A fault that takes longer is followed at once.
const EACH: Duration = Duration::from_secs(10);
/// What no fault kills, and has to be judged for the whole run: the controller's host, the first host with clients, and the first server.
const JUDGED: [&str; 7] = [
    "c1 csid",
    "c1 csid's helper",
    "c1 csid-link",
    "n1 csid",
    "n1 csid's helper",
    "n1 csid-link",
    "s0 csid-server",
];
/// How long the processes are sampled after the load.
const AT_REST: Duration = Duration::from_secs(20);
/// What a run needs before and after its load.
const MORE: Duration = Duration::from_secs(600);

#[test]
fn processes_stay_flat_while_faults_go_on() {
    let Ok(minutes) = std::env::var(MINUTES) else {
        left_out(&format!("it takes half an hour, so `make soak-cluster` runs it, with {MINUTES}=30"));
        return;
    };
    let load = Duration::from_secs(60 * minutes.parse::<u64>().expect("a number of minutes"));
    world_within(load + MORE, async move |w| {
        let seed = Dice::seed();
        eprintln!("    CSID_SEED={seed}, {minutes} minutes, a fault every {EACH:?}");
        let mut run = Run::start(w, seed, 3, HELD).await;
        let sampler = Sampler::start(&PROGRAMS, run.shared.namespaces.clone());
        let mut faults = Faults::sparing(seed);
        run.hosts(HOSTS[1]).await;
        let (begun, mut made) = (Instant::now(), 0);
        while begun.elapsed() < load {
            let next = Instant::now() + EACH;
            faults.next(&mut run).await;
            made += 1;
            tokio::time::sleep_until(next.into()).await;
        }
        run.agree().await;
        run.shared.stop.store(true, Ordering::SeqCst);
        within_time(REST, "the load rests", async || run.shared.clients.load(Ordering::SeqCst) == 0).await;
        tokio::time::sleep(AT_REST).await;
        let lives = sampler.end();
        run.rest(&faults).await;
        run.judge_calls();

        eprintln!("    {}", faults.summary());
        run.judge_load();
        eprintln!("    warm-up of each process: {WARM_UP:?}\n    {}", heading());
        lives.iter().for_each(|life| eprintln!("    {life}"));
        let grows = lives.iter().filter(|life| matches!(life.verdict(), Verdict::Grows(_)));
        let grows: Vec<_> = grows.map(|life| life.name.clone()).collect();
        if !grows.is_empty() {
            keep(&run.shared.history.path, seed);
        }
        assert!(grows.is_empty(), "seed {seed}: these processes grow: {grows:?}");
        for judged in JUDGED {
            let verdicts: Vec<_> =
                lives.iter().filter(|life| life.name == judged).map(Life::verdict).collect();
            assert_eq!(verdicts, [Verdict::Flat], "seed {seed}: {judged} has not lived for the whole run");
        }
        let allowed = load.as_secs() / EACH.as_secs();
        assert!(10 * made >= 8 * allowed, "seed {seed}: {made} faults were made, and {allowed} have time");
    });
}
