//! The report of a run: printed, and in `target/proof/report.json`, or `report-VARIABLE.json` where the journal does not keep the claims.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Mutex;

use serde::Serialize;

/// The CSI rules that apply to volumes with a controller.
const RULES: [u8; 14] = [18, 20, 21, 22, 23, 24, 25, 26, 27, 31, 32, 33, 35, 39];

/// The report names this number of the slowest chapters.
const SLOWEST: usize = 20;

/// Ways to break a promise; each is a number of the report that has to be 0.
#[derive(Clone, Copy, Debug)]
pub enum Broken {
    LostMount,
    /// Or an attachment, an expansion, a snapshot.
    LostClaim,
    Leftover,
    WrongUnmount,
    Breach,
    SecretHit,
    /// A volume for one was given away while another mount namespace wrote to it.
    SecondWriter,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Numbers {
    pub kills: u64,
    lost_mounts: u64,
    lost_claims: u64,
    leftovers: u64,
    wrong_unmounts: u64,
    breaches: u64,
    secret_hits: u64,
    second_writers: u64,
    seed: u64,
}

#[derive(Default)]
struct Found {
    numbers: Numbers,
    /// Kills at each edge.
    edges: BTreeMap<String, u64>,
    /// Kills in each cell of the matrix, and what else was counted.
    counts: BTreeMap<String, u64>,
    /// How often the witnesses had something to look at, by rule.
    rules: BTreeMap<u8, u64>,
    /// The seconds of each chapter.
    chapters: Vec<(u64, String)>,
    failures: Vec<String>,
}

/// Shared by all worlds of a run.
pub struct Report(Mutex<Found>);

impl Report {
    pub fn new(seed: u64) -> Self {
        let numbers = Numbers { seed, ..Numbers::default() };
        Report(Mutex::new(Found { numbers, ..Found::default() }))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Found) -> T) -> T {
        change(&mut self.0.lock().expect("nothing panics in here"))
    }

    /// The kill's number.
    pub fn kill(&self, edge: &str, cell: &str) -> u64 {
        self.change(|found| {
            found.numbers.kills += 1;
            *found.edges.entry(edge.to_owned()).or_default() += 1;
            *found.counts.entry(format!("kills: {cell}")).or_default() += 1;
            found.numbers.kills
        })
    }

    pub fn count(&self, what: String) {
        self.change(|found| *found.counts.entry(what).or_default() += 1);
    }

    /// Adds the numbers of checks of a witness.
    pub fn looked(&self, checked: &BTreeMap<u8, u64>) {
        self.change(|found| {
            for (rule, times) in checked {
                *found.rules.entry(*rule).or_default() += times;
            }
        });
    }

    pub fn wrong(&self, wrong: Broken) {
        self.change(|Found { numbers: n, .. }| {
            *match wrong {
                Broken::LostMount => &mut n.lost_mounts,
                Broken::LostClaim => &mut n.lost_claims,
                Broken::Leftover => &mut n.leftovers,
                Broken::WrongUnmount => &mut n.wrong_unmounts,
                Broken::Breach => &mut n.breaches,
                Broken::SecretHit => &mut n.secret_hits,
                Broken::SecondWriter => &mut n.second_writers,
            } += 1;
        });
    }

    pub fn took(&self, seconds: u64, chapter: String) {
        self.change(|found| found.chapters.push((seconds, chapter)));
    }

    pub fn failed(&self, what: String) {
        self.change(|found| found.failures.push(what));
    }

    pub fn numbers(&self) -> Numbers {
        self.change(|found| found.numbers)
    }

    /// Print it, write it, and fail unless all is well, every one of `points` was hit, and of a whole run every one of `RULES`
    /// was looked at.
    pub fn close(&self, points: &[String], elsewhere: Option<&str>) {
        let json = serde_json::to_string(&self.numbers()).expect("JSON");
        let program = std::env::current_exe().expect("this program's path");
        let proof = program.ancestors().nth(3).expect("target/debug/deps").join("proof");
        std::fs::create_dir_all(&proof).expect("target/proof");
        let file = elsewhere.map_or_else(|| "report.json".to_owned(), |of| format!("report-{of}.json"));
        std::fs::write(proof.join(file), format!("{json}\n")).expect("the report");
        self.change(|found| {
            let mut out = std::io::stderr().lock();
            for (what, number) in &found.counts {
                writeln!(out, "    {number:>6} {what}").expect("stderr");
            }
            for (edge, kills) in &found.edges {
                writeln!(out, "    {kills:>6} kills at {edge}").expect("stderr");
            }
            for (rule, times) in &found.rules {
                writeln!(out, "    {times:>6} looks at CSI rule {rule}").expect("stderr");
            }
            found.chapters.sort();
            for (seconds, chapter) in found.chapters.iter().rev().take(SLOWEST) {
                writeln!(out, "    {seconds:>6} s, {chapter}").expect("stderr");
            }
            writeln!(out, "{json}").expect("stderr");
            assert!(
                found.failures.is_empty(),
                "{} worlds ended badly: {:#?}",
                found.failures.len(),
                found.failures
            );
            let Numbers { kills: _, seed: _, lost_mounts, lost_claims, .. } = found.numbers;
            let Numbers { leftovers, wrong_unmounts, breaches, secret_hits, second_writers, .. } =
                found.numbers;
            let lost = lost_mounts + lost_claims;
            assert_eq!(lost + leftovers + wrong_unmounts + breaches + secret_hits + second_writers, 0);
            let missed: Vec<_> = points.iter().filter(|point| !found.edges.contains_key(*point)).collect();
            assert!(missed.is_empty(), "no kill at {missed:?}");
            let untried: Vec<_> = RULES.iter().filter(|rule| !found.rules.contains_key(rule)).collect();
            assert!(points.is_empty() || untried.is_empty(), "nothing to look at for the rules {untried:?}");
        });
    }
}
