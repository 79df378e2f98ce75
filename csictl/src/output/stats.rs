//! Output about the resource usage of plugins and the times of csid's calls.

use std::time::Duration;

use csid_client::{InstanceStats, PluginStats, RpcStats};
use serde::Serialize;

use super::text::{facts, table};
use super::volume::size;

/// The resource usage of an instance.
#[derive(Debug, Serialize)]
pub struct Used {
    pub plugin: String,
    pub state: String,
    #[serde(flatten)]
    pub stats: PluginStats,
}

pub fn plugin_stats(stats: &PluginStats) -> String {
    let mut said: Vec<String> = stats.instances.iter().map(instance).collect();
    if !stats.rpcs.is_empty() {
        said.push(rpcs(&stats.rpcs));
    }
    said.join("\n")
}

fn instance(of: &InstanceStats) -> String {
    let bytes = |read: Option<u64>, written: Option<u64>| match (read, written) {
        (None, None) => String::new(),
        _ => format!("{} read, {} written", amount(read), amount(written)),
    };
    facts([
        ("instance", of.instance.clone()),
        ("unit", of.unit.clone()),
        ("CPU", of.cpu_usage_nsec.map(|nsec| took(nsec / 1000)).unwrap_or_default()),
        ("memory", of.memory_current.map(size).unwrap_or_default()),
        ("memory peak", of.memory_peak.map(size).unwrap_or_default()),
        ("tasks", of.tasks_current.map(|tasks| tasks.to_string()).unwrap_or_default()),
        ("I/O", bytes(of.io_read_bytes, of.io_write_bytes)),
        ("CPU pressure", stalled(of.cpu_pressure_some_avg10, of.cpu_pressure_full_avg10)),
        ("memory pressure", stalled(of.memory_pressure_some_avg10, of.memory_pressure_full_avg10)),
        ("I/O pressure", stalled(of.io_pressure_some_avg10, of.io_pressure_full_avg10)),
    ])
}

fn rpcs(rpcs: &[RpcStats]) -> String {
    table(
        ["RPC", "CODE", "COUNT", "P50", "P99", "MAX"],
        rpcs.iter().map(|r| {
            let [p50, p99, max] = [r.p50_usec, r.p99_usec, r.max_usec].map(took);
            [r.rpc.clone(), r.code.clone(), r.count.to_string(), p50, p99, max]
        }),
    )
}

/// Returns a line for each instance. `before`: the time since the last usage, and that usage.
pub fn top(now: &[Used], before: Option<(Duration, &[Used])>) -> String {
    let rows = now.iter().flat_map(|used| used.stats.instances.iter().map(move |of| (used, of)));
    table(
        [
            "PLUGIN", "INSTANCE", "STATE", "CPU%", "CPU", "MEMORY", "TASKS", "READ", "WRITTEN", "RPCS",
            "FAILED", "SLOWEST",
        ],
        rows.map(|(used, of)| {
            let count = |counted: fn(&&RpcStats) -> bool| {
                used.stats.rpcs.iter().filter(counted).map(|rpc| rpc.count).sum::<u64>().to_string()
            };
            let slowest = used.stats.rpcs.iter().max_by_key(|rpc| rpc.p99_usec);
            [
                used.plugin.clone(),
                of.instance.clone(),
                used.state.clone(),
                before.and_then(|before| percent(used, of, before)).unwrap_or_default(),
                of.cpu_usage_nsec.map(|nsec| took(nsec / 1000)).unwrap_or_default(),
                amount(of.memory_current),
                of.tasks_current.map(|tasks| tasks.to_string()).unwrap_or_default(),
                amount(of.io_read_bytes),
                amount(of.io_write_bytes),
                count(|_| true),
                count(|rpc| rpc.code != "OK"),
                slowest.map(|rpc| format!("{} {}", rpc.rpc, took(rpc.p99_usec))).unwrap_or_default(),
            ]
        }),
    )
}

/// Returns the usage since then in percent of one CPU.
fn percent(used: &Used, of: &InstanceStats, (since, before): (Duration, &[Used])) -> Option<String> {
    let then = before.iter().find(|then| then.plugin == used.plugin)?;
    let then = then.stats.instances.iter().find(|then| then.instance == of.instance)?;
    // The counter of a restarted instance begins at 0.
    let nsec = of.cpu_usage_nsec?.checked_sub(then.cpu_usage_nsec?)?;
    Some(format!("{:.1}", nsec as f64 / 1e7 / since.as_secs_f64()))
}

fn amount(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), size)
}

fn stalled(some: Option<f64>, full: Option<f64>) -> String {
    let said = |avg10: Option<f64>, who: &str| avg10.map(|percent| format!("{percent:.1}% {who}"));
    let both: Vec<String> = [said(some, "some"), said(full, "full")].into_iter().flatten().collect();
    both.join(", ")
}

fn took(usec: u64) -> String {
    match usec {
        0..1_000 => format!("{usec}us"),
        1_000..1_000_000 => format!("{:.1}ms", usec as f64 / 1e3),
        _ => format!("{:.1}s", usec as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(cpu_usage_nsec: Option<u64>) -> Used {
        let rpc = |rpc: &str, code: &str, count, usec| RpcStats {
            rpc: rpc.into(),
            code: code.into(),
            count,
            total_usec: count * usec,
            p50_usec: usec,
            p99_usec: usec,
            max_usec: usec,
        };
        let instance = InstanceStats {
            instance: "default".into(),
            unit: "csi-plugin-local-default.service".into(),
            cpu_usage_nsec,
            memory_current: Some(3 << 20),
            tasks_current: Some(4),
            memory_pressure_some_avg10: Some(1.25),
            memory_pressure_full_avg10: Some(0.0),
            ..InstanceStats::default()
        };
        let rpcs = vec![rpc("Probe", "OK", 3, 900), rpc("NodeStageVolume", "INTERNAL", 1, 2_500_000)];
        let stats = PluginStats { rpcs, instances: vec![instance] };
        Used { plugin: "local".into(), state: "ready".into(), stats }
    }

    #[test]
    fn uncounted_figures_are_not_shown() {
        let expected = "       instance: default
           unit: csi-plugin-local-default.service
         memory: 3MiB
          tasks: 4
memory pressure: 1.2% some, 0.0% full

RPC              CODE      COUNT  P50    P99    MAX
Probe            OK        3      900us  900us  900us
NodeStageVolume  INTERNAL  1      2.5s   2.5s   2.5s";
        assert_eq!(plugin_stats(&used(None).stats), expected);
        let json = serde_json::to_value(used(None)).unwrap();
        let instance = &json["instances"][0];
        assert_eq!(instance["memory-current"], 3 << 20);
        assert!(instance.get("cpu-usage-nsec").is_none(), "{json}");
        assert_eq!((&json["plugin"], &json["rpcs"][1]["p99-usec"]), (&"local".into(), &2_500_000.into()));
    }

    #[test]
    fn top_shows_an_instance_a_line() {
        let expected = "\
PLUGIN  INSTANCE  STATE  CPU%  CPU  MEMORY  TASKS  READ  WRITTEN  RPCS  FAILED  SLOWEST
local   default   ready  -     -    3MiB    4      -     -        4     1       NodeStageVolume 2.5s";
        assert_eq!(top(&[used(None)], None), expected);
        let before = [used(Some(1_000_000_000))];
        let shown = top(&[used(Some(2_000_000_000))], Some((Duration::from_secs(2), &before)));
        assert!(shown.contains("ready  50.0  2.0s"), "{shown}");
        let restarted = top(&[used(Some(5))], Some((Duration::from_secs(2), &before)));
        assert!(restarted.contains("ready  -     0us"), "{restarted}");
    }
}
