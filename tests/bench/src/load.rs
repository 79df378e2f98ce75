//! Callers that mount and unmount, each a volume of its own, and what they saw.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::try_join_all;

use crate::paths::Way;

/// What one round showed.
#[derive(Clone, Copy)]
pub struct Round {
    pub mount_p50_us: f64,
    pub mount_p99_us: f64,
    pub cycles_per_s: f64,
}

/// `callers` cycle for `time`, after a tenth of it that does not count.
pub async fn cycle(way: &Way, callers: u32, time: Duration) -> Result<Round> {
    let (mounts, elapsed) = mounts(way, callers, time).await?;
    let at = |part: f64| {
        let place = (part * (mounts.len() - 1) as f64).round() as usize;
        mounts[place].as_nanos() as f64 / 1000.0
    };
    Ok(Round {
        mount_p50_us: at(0.5),
        mount_p99_us: at(0.99),
        cycles_per_s: mounts.len() as f64 / elapsed.as_secs_f64(),
    })
}

/// Returns the mean of the mounts of such cycles, in microseconds.
pub async fn mean_us(way: &Way, callers: u32, time: Duration) -> Result<f64> {
    let (mounts, _) = mounts(way, callers, time).await?;
    Ok(mounts.iter().sum::<Duration>().as_nanos() as f64 / 1000.0 / mounts.len() as f64)
}

/// Returns how long the mounts of such cycles took, the shortest first, and the time that was measured.
async fn mounts(way: &Way, callers: u32, time: Duration) -> Result<(Vec<Duration>, Duration)> {
    let measuring = Arc::new(AtomicBool::new(false));
    let stop = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..callers)
        .map(|n| tokio::spawn(caller(way.clone(), n, Arc::clone(&measuring), Arc::clone(&stop))))
        .collect();
    tokio::time::sleep(time / 10).await;
    measuring.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    tokio::time::sleep(time).await;
    measuring.store(false, Ordering::Relaxed);
    let elapsed = begun.elapsed();
    stop.store(true, Ordering::Relaxed);
    let mut mounts = Vec::new();
    for seen in try_join_all(tasks).await? {
        mounts.extend(seen?);
    }
    mounts.sort_unstable();
    anyhow::ensure!(mounts.len() >= callers as usize, "only {} cycles in {elapsed:?}", mounts.len());
    Ok((mounts, elapsed))
}

/// The same by another program, `csid-bench-WAY SOCKET CALLERS MILLISECONDS`, which prints p50, p99 and cycles a second.
pub fn program(way: &str, socket: &Path, callers: u32, time: Duration) -> Result<Round> {
    let program = std::env::current_exe()?.with_file_name(format!("csid-bench-{way}"));
    let mut command = Command::new(&program);
    command.arg(socket).arg(callers.to_string()).arg(time.as_millis().to_string()).stderr(Stdio::inherit());
    let done = command.output().with_context(|| format!("{}: `make bench` builds it", program.display()))?;
    let said = String::from_utf8(done.stdout)?;
    let figures: Vec<f64> = said.split_whitespace().filter_map(|figure| figure.parse().ok()).collect();
    match figures[..] {
        [mount_p50_us, mount_p99_us, cycles_per_s] if done.status.success() => {
            Ok(Round { mount_p50_us, mount_p99_us, cycles_per_s })
        }
        _ => anyhow::bail!("{} {}, and said: {said}", program.display(), done.status),
    }
}

/// How long each mount took whose cycle ended while it was measured.
async fn caller(
    way: Way,
    n: u32,
    measuring: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
) -> Result<Vec<Duration>> {
    let mut mounts = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        way.mount(n).await?;
        let mount = begun.elapsed();
        way.unmount(n).await?;
        if measuring.load(Ordering::Relaxed) {
            mounts.push(mount);
        }
    }
    Ok(mounts)
}

/// Mount or unmount the volumes `0..volumes` with `callers`; how long it took.
pub async fn all(way: &Way, volumes: u32, callers: u32, mount: bool) -> Result<Duration> {
    let begun = Instant::now();
    let tasks: Vec<_> = (0..callers)
        .map(|first| {
            let way = way.clone();
            tokio::spawn(async move {
                for n in (first..volumes).step_by(callers as usize) {
                    if mount { way.mount(n).await? } else { way.unmount(n).await? }
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for ended in try_join_all(tasks).await? {
        ended?;
    }
    Ok(begun.elapsed())
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}
