//! Whether one client's calls take as long under a load as alone: rounds of both in turn, the medians of their p99.

use std::time::{Duration, Instant};

use csid_client::Client;
use csid_tests::ask::*;
use csid_tests::world::count;

const ROUNDS: usize = 5;
/// Mounts of one measurement, and as many unmounts.
const CYCLES: usize = 60;
/// The noise of a busy machine. A call that waits for the plugin or the queue of another waits much longer.
const NOISE: Duration = Duration::from_millis(10);
const TRIES: usize = 3;

/// Returns the p99 of a call: mounts and unmounts of a volume of `plugin`, one after the other.
async fn p99(client: &Client, plugin: &str) -> Duration {
    let mut times = Vec::new();
    for n in 0..CYCLES {
        let volume = format!("quick-{n}");
        let begun = Instant::now();
        mounted(client, "job", within(Duration::from_secs(30), of_plugin(plugin, &volume))).await;
        let there = Instant::now();
        unmount(client, &volume, "job").await.expect("an unmount");
        times.extend([there - begun, there.elapsed()]);
    }
    times.sort();
    times[(times.len() * 99).div_ceil(100) - 1]
}

/// Returns the p99 of reads, which only the connection delays.
pub async fn p99_of_reads(client: &Client, during: Duration) -> Duration {
    let mut times = Vec::new();
    let first = Instant::now();
    while first.elapsed() < during {
        let begun = Instant::now();
        client.list_plugins().await.expect("the plugins");
        times.push(begun.elapsed());
    }
    times.sort();
    times[(times.len() * 99).div_ceil(100) - 1]
}

pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Measures calls to `plugin` alone and under the load between `begin` and `end`, and checks the bound of 1.5 times.
pub async fn within_bound<T>(
    client: &Client,
    plugin: &str,
    mut begin: impl AsyncFnMut() -> T,
    mut end: impl AsyncFnMut(T),
) {
    let mut seen = Vec::new();
    for _ in 0..TRIES {
        let (mut alone, mut beside) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            alone.push(p99(client, plugin).await);
            let begun = begin().await;
            beside.push(p99(client, plugin).await);
            end(begun).await;
        }
        let (alone, beside) = (median(alone), median(beside));
        count("µs, the p99 of a call alone", alone.as_micros() as usize);
        count("µs, the p99 of a call under the load", beside.as_micros() as usize);
        count("hundredths of it", (100.0 * beside.as_secs_f64() / alone.as_secs_f64()) as usize);
        if beside <= alone * 3 / 2 + NOISE {
            return;
        }
        seen.push((alone, beside));
    }
    panic!("alone and under the load, in {TRIES} tries: {seen:?}");
}
