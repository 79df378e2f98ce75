//! The figures of a run: the table for people, the targets, report.json.

use std::collections::BTreeMap;
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};

use crate::curves::{CALLS, CURVES};
use crate::load::{Round, median};

/// A figure's rounds, by its key in report.json.
#[derive(Default)]
pub struct Report(BTreeMap<String, Vec<f64>>);

/// The paths of the first table, with what each is. From [`HERE`] on each is a program next to this one, `csid-bench-WAY`.
pub const WAYS: [(&str, &str); 8] = [
    ("floor", "the same RPCs by a bare client"),
    ("floor-commit", "… and one synced row a call"),
    (LEAST, "the least that a daemon with csid's promises does"),
    ("private", "csid, private socket"),
    ("bus", "csid, dbus-daemon"),
    ("c", "csid, private socket, through libcsi"),
    ("cgo", "csid, private socket, from Go through libcsi"),
    ("go", "csid, private socket, from Go alone"),
];
/// How many of the ways are this program's own.
pub const HERE: usize = 5;
pub const LEAST: &str = "least";
pub const CALLERS: [u32; 3] = [1, 16, 64];

/// Printed, but no key of report.json.
const ASIDE: [&str; 9] = [
    "least.cpu_us",
    "private.csid_cpu_us",
    "bus.csid_cpu_us",
    "adopt_1000_ms",
    "foreign_10_ratio",
    "foreign_1000_ratio",
    "foreign_floor_10_ratio",
    "foreign_floor_1000_ratio",
    "foreign_floor_5000_ratio",
];

/// Figures of the floor whose spread shows how noisy the machine was.
const NOISE: [(&str, &str); 3] = [
    ("floor.mount_p50_us.1", "mount p50, 1 caller"),
    ("floor.mount_p99_us.64", "mount p99, 64 callers"),
    ("floor.cycles_per_s.64", "cycles/s, 64 callers"),
];

/// Figures without a target: of claims, and of an unmount among others.
const WITHOUT_TARGET: [(&str, &str); 9] = [
    ("claims_per_s.1", "claims with their release a second, 1 caller"),
    ("claims_per_s.64", "claims with their release a second, 64 callers"),
    ("claimed_mount_p50_ratio.1", "claim and mount against mount alone, p50, 1 caller"),
    ("claimed_mount_p50_ratio.64", "claim and mount against mount alone, p50, 64 callers"),
    ("claimed_mount_cycles_ratio.1", "cycles with a claim against cycles without, 1 caller"),
    ("claimed_mount_cycles_ratio.64", "cycles with a claim against cycles without, 64 callers"),
    ("unmount_alone_ms", "an unmount, ms"),
    ("unmount_600_processes_ms", "an unmount among 600 processes, ms"),
    ("unmount_50_namespaces_ms", "an unmount among 50 namespaces of 3,000 mounts, ms"),
];

enum Bound {
    AtMost(f64),
    AtLeast(f64),
}
use Bound::{AtLeast, AtMost};

impl Report {
    pub fn add(&mut self, key: &str, value: f64) {
        self.0.entry(key.to_owned()).or_default().push(value);
    }

    pub fn add_round(&mut self, way: &str, callers: u32, round: Round) {
        self.add(&format!("{way}.mount_p50_us.{callers}"), round.mount_p50_us);
        self.add(&format!("{way}.mount_p99_us.{callers}"), round.mount_p99_us);
        self.add(&format!("{way}.cycles_per_s.{callers}"), round.cycles_per_s);
    }

    /// The median of a figure's rounds.
    fn get(&self, key: &str) -> Option<f64> {
        self.0.get(key).map(|rounds| median(rounds.clone()))
    }

    /// Returns the difference of a figure's highest and lowest round in percent of their median. `None`: there was one round or none.
    fn spread(&self, key: &str) -> Option<f64> {
        let rounds = self.0.get(key).filter(|rounds| rounds.len() > 1)?;
        let (least, most) =
            rounds.iter().fold((f64::MAX, f64::MIN), |(least, most), &v| (least.min(v), most.max(v)));
        Some((most - least) / median(rounds.clone()) * 100.0)
    }

    fn ratio(&self, key: &str, floor: &str) -> Option<f64> {
        Some(self.get(key)? / self.get(floor)?)
    }

    pub fn write(&self, file: &Path) -> anyhow::Result<()> {
        let keys = self.0.keys().map(String::as_str).filter(|key| !ASIDE.contains(key));
        let medians: BTreeMap<&str, f64> =
            keys.filter_map(|key| Some((key, rounded(self.get(key)?)))).collect();
        Ok(std::fs::write(file, serde_json::to_string_pretty(&medians)? + "\n")?)
    }

    /// Print what was measured, and each target as met or MISSED.
    pub fn print(&self) {
        let mut table =
            new_table(["", "mount p50/p99 µs, 1 caller", "16", "64", "cycles/s, 1", "16", "64", "of floor"]);
        for (way, what) in WAYS {
            let figure = |figure: &str, callers| self.get(&format!("{way}.{figure}.{callers}"));
            if CALLERS.iter().all(|callers| figure("cycles_per_s", *callers).is_none()) {
                continue;
            }
            let mut row = vec![format!("{way}: {what}")];
            for callers in CALLERS {
                let both = [figure("mount_p50_us", callers), figure("mount_p99_us", callers)];
                row.push(both.map(|value| text(value, 0)).join("/"));
            }
            row.extend(CALLERS.map(|callers| text(figure("cycles_per_s", callers), 0)));
            let of_floor = self.ratio(&format!("{way}.cycles_per_s.64"), "floor.cycles_per_s.64");
            row.push(text(of_floor, 2));
            table.add_row(row);
        }
        if !table.is_empty() {
            println!("{table}\n");
        }
        let mut table = new_table(["target", "measured", "", "from the target", ""]);
        for (what, value, unit, bound) in self.targets() {
            let Some(value) = value else { continue };
            let (wanted, limit, met) = match bound {
                AtMost(most) => (format!("≤ {most}{unit}"), most, value <= most),
                AtLeast(least) => (format!("≥ {least}{unit}"), least, value >= least),
            };
            let distance = format!("{:+.0} %", (value / limit - 1.0) * 100.0);
            let verdict = if met { "met" } else { "MISSED" };
            let measured = format!("{}{unit}", rounded(value));
            table.add_row([what.to_owned(), measured, wanted, distance, verdict.to_owned()]);
        }
        println!("{table}");
        for (key, what) in NOISE {
            if let Some(spread) = self.spread(key) {
                println!("spread of the floor's rounds, {what}: {spread:.0} % of the median");
            }
        }
        self.print_curves();
        for (key, what) in WITHOUT_TARGET {
            if let Some(value) = self.get(key) {
                println!("{what}: {}", rounded(value));
            }
        }
        for key in ASIDE {
            if let Some(value) = self.get(key) {
                println!("{key}: {}", rounded(value));
            }
        }
    }

    /// Prints what each call costs by how much else there is.
    fn print_curves(&self) {
        let mut table = new_table(["µs p50 (of the first)", "call", "least", "more", "most"]);
        for (name, _, sizes) in CURVES {
            for call in CALLS {
                let figure = |size: usize| {
                    let cost = self.get(&format!("curve.{name}.{call}.{size}"))?;
                    let ratio = self.get(&format!("curve_ratio.{name}.{call}.{size}"))?;
                    Some(format!("{size}: {cost:.0} ({ratio:.2})"))
                };
                let figures: Vec<String> = sizes.into_iter().filter_map(figure).collect();
                if figures.len() == sizes.len() {
                    let row = [name.to_owned(), call.to_owned()];
                    table.add_row(row.into_iter().chain(figures));
                }
            }
        }
        if !table.is_empty() {
            println!("{table}\n");
        }
    }

    fn targets(&self) -> Vec<(&'static str, Option<f64>, &'static str, Bound)> {
        let of_floor =
            |way: &str, figure: &str| self.ratio(&format!("{way}.{figure}"), &format!("floor.{figure}"));
        let mebibytes = |key: &str| self.get(key).map(|kib| kib / 1024.0);
        let of_volumes = |call: &str| self.get(&format!("curve_ratio.registered volumes.{call}.10000"));
        let floor = " × floor";
        vec![
            (
                "mount p50, 1 caller, private socket",
                of_floor("private", "mount_p50_us.1"),
                floor,
                AtMost(2.2),
            ),
            ("mount p50, 1 caller, bus", of_floor("bus", "mount_p50_us.1"), floor, AtMost(2.8)),
            (
                "mount p99, 64 callers, private socket",
                of_floor("private", "mount_p99_us.64"),
                floor,
                AtMost(2.0),
            ),
            ("mount p99, 64 callers, bus", of_floor("bus", "mount_p99_us.64"), floor, AtMost(3.0)),
            (
                "cycles/s, 64 callers, private socket",
                of_floor("private", "cycles_per_s.64"),
                floor,
                AtLeast(0.60),
            ),
            ("cycles/s, 64 callers, bus", of_floor("bus", "cycles_per_s.64"), floor, AtLeast(0.42)),
            (
                "mount p50, 1 caller, through libcsi",
                self.ratio("c.mount_p50_us.1", "private.mount_p50_us.1"),
                " × private",
                AtMost(1.10),
            ),
            (
                "mount p50, 1 caller, from Go through libcsi",
                self.ratio("cgo.mount_p50_us.1", "private.mount_p50_us.1"),
                " × private",
                AtMost(1.25),
            ),
            (
                "mount p50, 1 caller, from Go alone",
                self.ratio("go.mount_p50_us.1", "private.mount_p50_us.1"),
                " × private",
                AtMost(1.15),
            ),
            ("adopting 10,000 mounts, exec to READY", self.get("adopt_10000_ms"), " ms", AtMost(300.0)),
            (
                "re-mounting 1,000 after a reboot",
                self.ratio("remount_1000_per_s", "floor_1000_per_s"),
                floor,
                AtLeast(0.5),
            ),
            (
                "a mount with 5,000 foreign mounts against none",
                self.ratio("foreign_5000_ratio", "foreign_floor_5000_ratio"),
                floor,
                AtMost(1.05),
            ),
            ("a claim with 10,000 volumes against 100", of_volumes("claim"), " ×", AtMost(1.2)),
            ("a mount with 10,000 volumes against 100", of_volumes("mount"), " ×", AtMost(1.2)),
            ("a list of 1,000 with 10,000 volumes against 100", of_volumes("list"), " ×", AtMost(1.2)),
            ("RSS, idle", mebibytes("rss_idle_kib"), " MiB", AtMost(12.0)),
            ("RSS, 10,000 mounts", mebibytes("rss_10000_kib"), " MiB", AtMost(40.0)),
            ("CPU, idle with 10 plugins", self.get("cpu_idle_percent"), " %", AtMost(0.1)),
            ("exec to READY, nothing in the journal", self.get("ready_ms"), " ms", AtMost(50.0)),
        ]
    }
}

fn new_table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn text(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
}

/// No more digits than mean something.
fn rounded(value: f64) -> f64 {
    let scale = if value.abs() < 10.0 { 1000.0 } else { 10.0 };
    (value * scale).round() / scale
}
