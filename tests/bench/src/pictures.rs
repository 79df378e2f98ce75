//! The time that a mount spends in each step, for the pictures in docs/.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::host::Host;
use crate::load;
use crate::paths::Way;

/// The order of a mount's steps. A step that is not listed comes after these.
const ORDER: [&str; 9] =
    ["bus", "queued", "waiting for plugin", "verify", "intent", "stage", "publish", "deliver", "commit"];

/// Writes `steps-CALLERS.folded`, a line `STEP MICROSECONDS` for each step of a mount.
pub async fn write(host: &Host, directory: &Path, time: Duration) -> Result<()> {
    fs::create_dir_all(directory)?;
    let _plugin = host.plugin("bench")?;
    let csid = host.start()?;
    let way = Way::Csid(host.client(&host.private(), "bench").await?);
    for callers in [1, 64] {
        load::cycle(&way, callers, time / 4).await?;
        let before = steps(host).await?;
        let mount_mean_us = load::mean_us(&way, callers, time).await?;
        let folded = folded(&before, &steps(host).await?, mount_mean_us)?;
        fs::write(directory.join(format!("steps-{callers}.folded")), &folded)?;
        println!("the steps of a mount with {callers} callers, µs:\n{folded}");
    }
    drop(way);
    drop(csid);
    host.forget_state()
}

/// Returns the count and the sum in seconds of each step of a mount, as csid's metrics have them.
async fn steps(host: &Host) -> Result<BTreeMap<String, (f64, f64)>> {
    let mut socket = UnixStream::connect(host.path("run/metrics.sock")).await?;
    socket.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await?;
    let mut text = String::new();
    socket.read_to_string(&mut text).await?;
    let mut found = BTreeMap::<String, (f64, f64)>::new();
    for line in text.lines() {
        let Some(rest) = line.strip_prefix("csid_operation_step_duration_seconds_") else { continue };
        let Some((part, rest)) = rest.split_once(r#"{kind="mount",step=""#) else { continue };
        let Some((step, value)) = rest.split_once("\"} ") else { continue };
        let entry = found.entry(step.to_owned()).or_default();
        match part {
            "count" => entry.0 = value.parse()?,
            "sum" => entry.1 = value.parse()?,
            _ => {}
        }
    }
    Ok(found)
}

/// Returns a line for each step with its mean since `before`. The rest of the callers' mean is the last line: the answer.
fn folded(
    before: &BTreeMap<String, (f64, f64)>,
    after: &BTreeMap<String, (f64, f64)>,
    mount_mean_us: f64,
) -> Result<String> {
    let mounts = |of: &BTreeMap<String, (f64, f64)>| of.get("commit").map_or(0.0, |(count, _)| *count);
    let count = mounts(after) - mounts(before);
    ensure!(count > 0.0, "csid's metrics count no mount");
    let mean = |step: &str| {
        let sum = |of: &BTreeMap<String, (f64, f64)>| of.get(step).map_or(0.0, |(_, sum)| *sum);
        (sum(after) - sum(before)) / count * 1e6
    };
    let others = after.keys().map(String::as_str).filter(|step| !ORDER.contains(step));
    let mut lines = String::new();
    let mut rest = mount_mean_us;
    for step in ORDER.into_iter().chain(others) {
        let mean = mean(step);
        rest -= mean;
        lines += &format!("{step} {mean:.0}\n");
    }
    ensure!(rest > 0.0, "the steps take {:.0} µs more than the mounts of the callers", -rest);
    Ok(lines + &format!("answer {rest:.0}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_answer_add_up_to_the_mount() {
        let steps = |count: f64, commit: f64, other: f64| {
            BTreeMap::from([
                ("commit".to_owned(), (count, commit)),
                ("of a later csid".to_owned(), (count, other)),
            ])
        };
        let folded = folded(&steps(1.0, 9.0, 9.0), &steps(3.0, 9.0004, 9.0002), 450.0).unwrap();
        assert!(folded.ends_with("commit 200\nof a later csid 100\nanswer 150\n"), "{folded}");
        assert!(folded.starts_with("bus 0\nqueued 0\n"), "{folded}");
    }

    #[test]
    fn longer_steps_than_the_mount_are_refused() {
        let steps = |count: f64, sum: f64| BTreeMap::from([("commit".to_owned(), (count, sum))]);
        assert!(folded(&steps(0.0, 0.0), &steps(1.0, 1.0), 450.0).is_err());
        assert!(folded(&steps(1.0, 1.0), &steps(1.0, 1.0), 450.0).is_err(), "no mount");
    }
}
