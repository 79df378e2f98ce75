//! The figures of a run: the table for people, the goals, cluster.json.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::load::median;

/// The goal of a figure.
#[derive(Clone, Copy)]
pub enum Goal {
    AtMost(f64),
    AtLeast(f64),
    None,
}
use Goal::{AtLeast, AtMost};

/// A figure: its key, what it is, its unit and its goal.
type Known = (&'static str, &'static str, &'static str, Goal);

/// All figures, in the order of the table.
const FIGURES: [Known; 38] = [
    ("floor_per_s", "floor: compare-and-swaps/s, 64 callers", "/s", Goal::None),
    ("floor_p50_ms", "floor: compare-and-swap p50, 1 caller", "ms", Goal::None),
    ("claims_per_s", "claims/s, own volumes, no attach, 64 callers", "× floor", AtLeast(0.6)),
    ("one_volume_per_s", "claims/s of one multi-node volume by all nodes at once", "× floor", AtLeast(5.0)),
    ("one_volume_folded", "the same, claims in one transaction", "", Goal::None),
    ("one_volume_nodes_ms", "the same, a claim's time of a processor in all nodes", "ms", Goal::None),
    ("one_volume_servers_ms", "the same, in all servers", "ms", Goal::None),
    ("one_volume_etcd_ms", "the same, in all members of etcd", "ms", Goal::None),
    (
        "raw_one_volume_per_s",
        "the same by a bare client, 1 caller, 40 claims in one transaction",
        "× floor",
        Goal::None,
    ),
    ("refused_per_s", "calls/s of all nodes at once that are refused without etcd", "× floor", Goal::None),
    ("claim_p50", "claim p50, 1 caller, no attach", "× floor's p50", AtMost(1.5)),
    (
        "attach_p50",
        "claim p50, 1 caller, attached by a controller that does nothing",
        "× floor's p50",
        AtMost(4.0),
    ),
    ("watching", "claims/s at one server, 3 servers watching against 1", "×", AtLeast(0.9)),
    ("lag_ms", "watch lag: a volume of one server in another's list, p50", "ms", Goal::None),
    ("lag_most_ms", "the same, the longest", "ms", Goal::None),
    ("idle_cpu", "a server's idle CPU, with all sessions", "% of a core", AtMost(2.0)),
    ("server_rss", "RSS of a server with all sessions and claims", "MiB", AtMost(350.0)),
    ("server_rss_started", "the same, after its start", "MiB", Goal::None),
    ("list_s", "start of a server that lists them, to READY", "s", AtMost(10.0)),
    ("join_s", "all nodes join for the first time", "s", Goal::None),
    ("reported_s", "the same, and their first names by plugins are written", "s", Goal::None),
    ("rejoin_s", "all nodes join again, with new connections", "s", Goal::None),
    ("compare_s", "all nodes join again, and compare their claims", "s", AtMost(10.0)),
    ("again", "claims again after all nodes' reboot, against claims / (0.6 floor)", "×", AtMost(1.0)),
    ("again_per_s", "the same, claims/s", "/s", Goal::None),
    ("server_killed_s", "server killed: its nodes have joined others", "s", AtMost(2.0)),
    ("driven_s", "server killed: its controller call is made by another, and granted", "s", AtMost(12.0)),
    ("leader_pause_s", "etcd's leader killed: longest pause of claims", "s", AtMost(5.0)),
    ("mount_over", "mount that takes its claim, clustered less alone", "× floor's p50", AtMost(1.5)),
    ("mount_alone_ms", "mount that takes its claim, csid alone, p50", "ms", Goal::None),
    ("mount_clustered_ms", "the same, csid in the cluster", "ms", Goal::None),
    (
        "held_mount_over",
        "mount of a volume claimed before, clustered less alone",
        "× floor's p50",
        AtMost(1.5),
    ),
    ("held_mount_alone_ms", "mount of a volume claimed before, csid alone, p50", "ms", Goal::None),
    ("held_mount_clustered_ms", "the same, csid in the cluster", "ms", Goal::None),
    ("csid_rss_over", "csid's RSS with 100 held, clustered less alone", "MiB", AtMost(4.0)),
    ("csid_rss_alone", "csid's RSS with 100 held, alone", "MiB", Goal::None),
    ("csid_rss_clustered", "csid's RSS with 100 held, clustered", "MiB", Goal::None),
    ("certificates_s", "nodes' certificates", "s", Goal::None),
];

/// What was measured, by its key. A figure has its rounds.
#[derive(Default)]
pub struct Report(BTreeMap<&'static str, Measured>);

#[derive(Default)]
struct Measured {
    rounds: Vec<f64>,
    /// The sizes of the measurement. Empty: they are in the name of the figure.
    of: String,
}

#[derive(Serialize)]
struct Row<'a> {
    key: &'a str,
    what: &'a str,
    value: f64,
    unit: &'a str,
    goal: Option<String>,
    is_met: Option<bool>,
    of: &'a str,
    rounds: &'a [f64],
}

#[derive(Serialize)]
struct File<'a> {
    /// Seconds since 1970.
    begun: u64,
    command: String,
    processors: usize,
    /// The load of the machine over a minute, at the run's begin and end.
    load: [f64; 2],
    figures: Vec<Row<'a>>,
}

/// When and where a run was made.
pub struct Run {
    pub begun: u64,
    pub load: f64,
}

impl Report {
    /// Adds a round of a figure, and prints it.
    pub fn add(&mut self, key: &'static str, value: f64, of: &str) {
        assert!(FIGURES.iter().any(|(known, ..)| *known == key), "the figure {key} is not in the table");
        eprintln!("{key}: {} {of}", rounded(value));
        let measured = self.0.entry(key).or_default();
        measured.rounds.push(value);
        of.clone_into(&mut measured.of);
    }

    fn rows(&self) -> Vec<Row<'_>> {
        let row = |(key, what, unit, goal): Known| {
            let measured = self.0.get(key)?;
            let value = median(measured.rounds.clone());
            let (goal, is_met) = match goal {
                AtMost(most) => (Some(format!("≤ {most}")), Some(value <= most)),
                AtLeast(least) => (Some(format!("≥ {least}")), Some(value >= least)),
                Goal::None => (None, None),
            };
            Some(Row { key, what, value, unit, goal, is_met, of: &measured.of, rounds: &measured.rounds })
        };
        FIGURES.into_iter().filter_map(row).collect()
    }

    /// Prints the table.
    pub fn print(&self) {
        let mut table = Table::new();
        table
            .load_style(presets::ASCII_MARKDOWN)
            .set_header(["figure", "measured", "goal", "", "of", "rounds"]);
        for column in table.column_iter_mut().skip(1).take(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for row in self.rows() {
            let verdict = match row.is_met {
                Some(true) => "met",
                Some(false) => "MISSED",
                None => "",
            };
            let spread = match row.rounds {
                [_] => String::new(),
                rounds => {
                    let least = rounds.iter().copied().fold(f64::MAX, f64::min);
                    let most = rounds.iter().copied().fold(f64::MIN, f64::max);
                    format!("{}: {} to {}", rounds.len(), rounded(least), rounded(most))
                }
            };
            table.add_row([
                row.what.to_owned(),
                format!("{} {}", rounded(row.value), row.unit),
                row.goal.unwrap_or_default(),
                verdict.to_owned(),
                row.of.to_owned(),
                spread,
            ]);
        }
        println!("{table}");
    }

    /// Writes the figures, with when and where they were measured.
    pub fn write(&self, path: &Path, run: &Run) -> Result<()> {
        let command: Vec<String> = std::env::args().collect();
        let file = File {
            begun: run.begun,
            command: command.join(" "),
            processors: std::thread::available_parallelism()?.get(),
            load: [run.load, load()?],
            figures: self.rows(),
        };
        Ok(std::fs::write(path, serde_json::to_string_pretty(&file)? + "\n")?)
    }
}

/// Returns the load of the machine over a minute.
pub fn load() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or_default().parse()?)
}

/// Returns no more digits than mean something.
fn rounded(value: f64) -> f64 {
    let scale = if value.abs() < 10.0 { 1000.0 } else { 10.0 };
    (value * scale).round() / scale
}
