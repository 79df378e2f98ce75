//! The memory and the open files of csid's processes over their lives, and the judge of both.
//!
//! A thread looks at all processes of this test. A process that starts again is another life. The judge leaves out what a life takes while it is
//! young, and compares the quarters of the rest.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Display, Formatter};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a life is young: caches fill, and pages of the program are read for the first time.
pub const WARM_UP: Duration = Duration::from_secs(120);
/// The shortest life that is judged: each quarter after the warm-up has 30 s.
const SHORTEST: Duration = Duration::from_secs(240);
/// The growth of the memory that is no leak, from the first quarter after the warm-up to the last one, in KiB. A leak of one page in each second
/// exceeds it in half an hour.
const MEMORY: u64 = 3 << 10;
/// How many files more a process may have open in the last quarter than in the first one: sessions of nodes that were with another server then.
const FILES: usize = 12;
/// The time between two samples.
const PAUSE: Duration = Duration::from_secs(1);

/// What is sampled, by the kernel's names of processes, which end after 15 bytes.
pub const PROGRAMS: [&str; 3] = ["csid-under-test", "csid-link", "csid-server-und"];

/// The hosts, by the mount namespaces of their processes.
pub type Hosts = Arc<Mutex<BTreeMap<String, String>>>;

/// What a process has at a time.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The time since the first sample of the run.
    at: Duration,
    /// The memory that is resident, in KiB.
    memory: u64,
    files: usize,
}

/// A process from its start to its end.
#[derive(Debug, Default)]
pub struct Life {
    pub name: String,
    pid: u32,
    samples: Vec<Sample>,
}

/// What the judge says of a life.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The life was too short.
    NotJudged,
    Flat,
    /// Each text says what has grown, from what to what, and the limit.
    Grows(Vec<String>),
}

impl Life {
    /// Returns how long the process was seen.
    fn length(&self) -> Duration {
        self.samples.last().map_or(Duration::ZERO, |last| last.at - self.samples[0].at)
    }

    /// Judges the life.
    pub fn verdict(&self) -> Verdict {
        if self.length() < SHORTEST {
            return Verdict::NotJudged;
        }
        let end_of_warm_up = self.samples[0].at + WARM_UP;
        let old = &self.samples[self.samples.partition_point(|sample| sample.at < end_of_warm_up)..];
        // The sampler stood still.
        if old.len() < 4 {
            return Verdict::NotJudged;
        }
        let (first, last) = (&old[..old.len() / 4], &old[old.len() - old.len() / 4..]);
        let mut grows = Vec::new();
        let [before, after] = [first, last].map(|quarter| median(quarter, |sample| sample.memory));
        if after > before + MEMORY {
            grows.push(format!("RSS grew from {before} KiB to {after} KiB, by more than {MEMORY} KiB"));
        }
        let [before, after] = [first, last].map(|quarter| median(quarter, |sample| sample.files));
        if after > before + FILES {
            grows.push(format!("open files grew from {before} to {after}, by more than {FILES}"));
        }
        if grows.is_empty() { Verdict::Flat } else { Verdict::Grows(grows) }
    }
}

fn median<T: Ord + Copy>(samples: &[Sample], of: impl Fn(&Sample) -> T) -> T {
    let mut values: Vec<_> = samples.iter().map(of).collect();
    values.sort_unstable();
    values[values.len() / 2]
}

/// Returns the heading of the table of lives.
pub fn heading() -> String {
    format!(
        "{:<22} {:>8} {:>6} {:>7} | {:>25} | {:>20} | verdict",
        "process", "pid", "life/s", "samples", "RSS/KiB first  last   max", "files first last max"
    )
}

impl Display for Life {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [first, last] =
            [self.samples.first(), self.samples.last()].map(|sample| sample.expect("a sample"));
        let memory = self.samples.iter().map(|sample| sample.memory).max().unwrap_or_default();
        let files = self.samples.iter().map(|sample| sample.files).max().unwrap_or_default();
        let verdict = match self.verdict() {
            Verdict::NotJudged => "too short".to_owned(),
            Verdict::Flat => "flat".to_owned(),
            Verdict::Grows(what) => what.join(", "),
        };
        write!(
            f,
            "{:<22} {:>8} {:>6} {:>7} | {:>11} {:>6} {:>6} | {:>11} {:>4} {:>3} | {verdict}",
            self.name,
            self.pid,
            self.length().as_secs(),
            self.samples.len(),
            first.memory,
            last.memory,
            memory,
            first.files,
            last.files,
            files
        )
    }
}

/// A thread that samples the processes which this one has started, and theirs.
pub struct Sampler {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Life>>,
}

impl Sampler {
    /// Starts to sample the processes of these programs.
    pub fn start(programs: &'static [&'static str], hosts: Hosts) -> Sampler {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let begun = Instant::now();
            let mut lives = BTreeMap::new();
            while !over.load(Ordering::SeqCst) {
                for process in below_this(programs) {
                    process.sample(begun, &hosts, &mut lives);
                }
                std::thread::sleep(PAUSE);
            }
            lives.into_values().collect()
        });
        Sampler { is_over, thread }
    }

    /// Returns the lives of all processes, in the order of their starts.
    pub fn end(self) -> Vec<Life> {
        self.is_over.store(true, Ordering::SeqCst);
        self.thread.join().expect("the samples")
    }
}

/// A process that runs.
#[derive(Debug)]
struct Process {
    pid: u32,
    parent: u32,
    program: String,
    /// When it has started, by the kernel's ticks since the boot. A number of a process is used again.
    start: u64,
}

impl Process {
    /// Reads a process. `None`: it has ended.
    fn read(pid: u32) -> Option<Process> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in brackets, and may have any byte.
        let (head, tail) = stat.rsplit_once(')')?;
        let program = head.split_once('(')?.1.to_owned();
        let fields: Vec<_> = tail.split_ascii_whitespace().collect();
        let [state, parent, start] = [0, 1, 19].map(|at| fields.get(at).copied().unwrap_or_default());
        (state != "Z").then_some(())?;
        Some(Process { pid, parent: parent.parse().ok()?, program, start: start.parse().ok()? })
    }

    /// Adds a sample to the life of the process.
    fn sample(&self, begun: Instant, hosts: &Hosts, lives: &mut BTreeMap<(u64, u32), Life>) {
        let Process { pid, start, .. } = self;
        let Some(memory) = memory(*pid) else { return };
        let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { return };
        let sample = Sample { at: begun.elapsed(), memory, files: files.count() };
        let life = lives.entry((*start, *pid)).or_insert_with(|| Life {
            name: self.name(hosts),
            pid: *pid,
            ..Life::default()
        });
        life.samples.push(sample);
    }

    /// Returns the process' program, and its machine.
    fn name(&self, hosts: &Hosts) -> String {
        let line = fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        let arguments: Vec<_> = line.split('\0').collect();
        let config = arguments.iter().position(|argument| *argument == "--config");
        if let Some(config) = config.and_then(|at| arguments.get(at + 1)) {
            let machine = Path::new(config).file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let program = if self.program == "csid-link" { "csid-link" } else { "csid-server" };
            return format!("{machine} {program}");
        }
        let namespace = fs::read_link(format!("/proc/{}/ns/mnt", self.pid)).unwrap_or_default();
        let hosts = hosts.lock().expect("the hosts");
        let host = hosts.get(&*namespace.to_string_lossy()).map_or("?", String::as_str);
        let program = match arguments.contains(&"host-helper") {
            false => "csid",
            true if self.parent == std::process::id() => "csid's helper",
            true => "helper's worker",
        };
        format!("{host} {program}")
    }
}

/// Returns the name of this thread's mount namespace.
pub fn mount_namespace() -> String {
    fs::read_link("/proc/thread-self/ns/mnt").expect("a namespace").to_string_lossy().into_owned()
}

/// Returns the resident memory of a process in KiB. `None`: it has ended.
fn memory(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Returns the processes of these programs that this process has started, and those that these have started.
fn below_this(programs: &[&str]) -> Vec<Process> {
    let entries = fs::read_dir("/proc").expect("/proc").filter_map(Result::ok);
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let all: HashMap<u32, Process> = pids.filter_map(|pid| Some((pid, Process::read(pid)?))).collect();
    let is_below = |process: &Process| {
        let mut above = Some(process);
        // Processes start and end while they are read, so their parents may form a circle.
        for _ in 0..8 {
            match above {
                Some(process) if process.parent == std::process::id() => return true,
                Some(process) => above = all.get(&process.parent),
                None => return false,
            }
        }
        false
    };
    let mut found: Vec<_> = all
        .values()
        .filter(|process| programs.contains(&process.program.as_str()) && is_below(process))
        .map(|process| process.pid)
        .collect();
    found.sort_unstable();
    found.into_iter().filter_map(Process::read).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use csid_tests::world::{eventually, world};

    use super::*;

    /// Returns a life of so many seconds, with the memory in KiB and the open files of each second.
    fn life(seconds: u64, memory: impl Fn(u64) -> u64, files: impl Fn(u64) -> usize) -> Life {
        let sample = |second| Sample {
            at: Duration::from_secs(1000 + second),
            memory: memory(second),
            files: files(second),
        };
        Life { samples: (0..=seconds).map(sample).collect(), ..Life::default() }
    }

    /// Says what of a life grows.
    fn grown(life: &Life) -> Vec<&'static str> {
        let Verdict::Grows(what) = life.verdict() else { return Vec::new() };
        let of = |what: &String| if what.starts_with("RSS") { "memory" } else { "files" };
        what.iter().map(of).collect()
    }

    #[test]
    fn leaks_are_seen_in_memory_and_in_files() {
        // One page in each second, for half an hour.
        assert_eq!(grown(&life(1800, |at| 40_000 + 4 * at, |_| 40)), ["memory"]);
        // Below a load that goes up and down, each third second.
        assert_eq!(grown(&life(600, |at| 40_000 + at % 3 * 900 + 20 * at, |_| 40)), ["memory"]);
        // One file for each fault.
        assert_eq!(grown(&life(600, |_| 40_000, |at| 40 + at as usize / 10)), ["files"]);
        assert_eq!(
            grown(&life(1800, |_| 40_000, |at| 40 + at as usize % 7 * 9 + at as usize / 10)),
            ["files"]
        );
        // Once it had more in the warm-up.
        assert_eq!(
            grown(&life(600, |_| 40_000, |at| if at == 60 { 200 } else { 40 + at as usize / 10 })),
            ["files"]
        );
        assert_eq!(grown(&life(1800, |at| 40_000 + 90 * at, |at| 40 + at as usize)), ["memory", "files"]);
    }

    #[test]
    fn lives_that_do_not_leak_are_flat() {
        for flat in [
            life(1800, |_| 40_000, |_| 40),
            // It grows while it is young alone.
            life(1800, |at| 40_000 + 300 * at.min(110), |at| 40 + at.min(110) as usize),
            life(600, |at| 40_000 + at % 60 * 200, |at| 40 + at as usize % 60),
            // Once it had much.
            life(600, |at| if at == 590 { 90_000 } else { 40_000 }, |at| if at == 590 { 900 } else { 40 }),
            life(600, |at| 40_000 - 10 * at, |at| 400 - at as usize / 2),
        ] {
            assert_eq!(flat.verdict(), Verdict::Flat);
        }
    }

    #[test]
    fn short_life_is_not_judged() {
        assert_eq!(Life::default().verdict(), Verdict::NotJudged);
        assert_eq!(life(239, |at| 1000 * at, |at| at as usize).verdict(), Verdict::NotJudged);
        assert_eq!(grown(&life(240, |at| 1000 * at, |at| at as usize)), ["memory", "files"]);
    }

    #[test]
    fn sampler_sees_each_file_that_a_process_opens() {
        world(async |_| {
            let leaks = "while read -r _; do exec {file}</dev/null; done";
            let mut process =
                Command::new("bash").args(["-c", leaks]).stdin(Stdio::piped()).spawn().expect("bash");
            let sample = |lives: &mut BTreeMap<_, _>| {
                for process in below_this(&["bash"]).iter().filter(|found| found.pid == process.id()) {
                    process.sample(Instant::now(), &Hosts::default(), lives);
                }
            };
            let (mut lives, mut input) = (BTreeMap::new(), process.stdin.as_ref().expect("a pipe"));
            sample(&mut lives);
            input.write_all(&[b'\n'; 30]).expect("bash reads");
            eventually("the sampler sees the files", async || {
                sample(&mut lives);
                let samples = &lives.values().next().expect("a life").samples;
                samples.last().expect("a sample").files == samples[0].files + 30
            })
            .await;
            process.kill().expect("bash is killed");
            process.wait().expect("bash has ended");
            let before = lives.values().next().expect("a life").samples.len();
            for process in below_this(&["bash"]) {
                process.sample(Instant::now(), &Hosts::default(), &mut lives);
            }
            assert_eq!(
                lives.values().next().expect("a life").samples.len(),
                before,
                "a process that has ended"
            );
        });
    }
}
