//! Callers that repeat a call, and what they saw.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures_util::future::try_join_all;

/// What callers saw.
pub struct Load {
    pub per_s: f64,
    /// The median of a call, in milliseconds.
    pub p50_ms: f64,
    /// The longest time in which no call ended, in seconds.
    pub pause_s: f64,
}

/// Has callers repeat a call for `time`, each with its number. A caller ends when its call returns `false`: nothing is left for it.
pub async fn run<C, F>(callers: usize, time: Duration, call: C) -> Result<Load>
where
    C: Fn(usize) -> F + Send + Sync + 'static,
    F: Future<Output = Result<bool>> + Send,
{
    let call = Arc::new(call);
    let begun = Instant::now();
    let end = begun + time;
    let caller = |n: usize| {
        let call = Arc::clone(&call);
        tokio::spawn(async move {
            let mut seen = Vec::new();
            while Instant::now() < end {
                let begun = Instant::now();
                if !call(n).await? {
                    break;
                }
                seen.push((Instant::now(), begun.elapsed()));
            }
            anyhow::Ok(seen)
        })
    };
    let mut seen = Vec::new();
    for ended in try_join_all((0..callers).map(caller)).await? {
        seen.extend(ended?);
    }
    ensure!(!seen.is_empty(), "no call has ended within {} ms", time.as_millis());
    seen.sort_unstable();
    let (mut last, mut pause) = (begun, Duration::ZERO);
    for (at, _) in &seen {
        pause = pause.max(*at - last);
        last = *at;
    }
    let mut took: Vec<Duration> = seen.iter().map(|(_, took)| *took).collect();
    took.sort_unstable();
    Ok(Load {
        per_s: seen.len() as f64 / (last - begun).as_secs_f64(),
        p50_ms: took[took.len() / 2].as_secs_f64() * 1000.0,
        pause_s: pause.as_secs_f64(),
    })
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}
