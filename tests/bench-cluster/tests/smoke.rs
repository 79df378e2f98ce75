//! A short run of the bench with few nodes, so that it keeps working. What it measures is compared with nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long the run may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(900);
/// A figure of each part.
const FIGURES: [&str; 15] = [
    "floor_per_s",
    "claims_per_s",
    "watching",
    "claim_p50",
    "attach_p50",
    "lag_ms",
    "one_volume_per_s",
    "one_volume_folded",
    "refused_per_s",
    "server_rss",
    "compare_s",
    "again",
    "driven_s",
    "mount_clustered_ms",
    "held_mount_clustered_ms",
];

/// Returns a directory on a tmpfs: etcd syncs each change. tests/run removes what a killed test leaves below this name.
fn directory() -> PathBuf {
    let temporary = std::env::temp_dir();
    let below = Path::new("/dev/shm").join(temporary.file_name().unwrap());
    std::fs::create_dir_all(&below).unwrap();
    below
}

/// Returns the processes whose command lines name a path.
fn processes_of(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(path.to_str().unwrap())).collect()
}

#[test]
fn small_run_has_all_figures_and_leaves_nothing() {
    let directory = tempfile::Builder::new().prefix("csid-bench.").tempdir_in(directory()).unwrap();
    let log = directory.path().join("log");
    let mut bench = Command::new(env!("CARGO_BIN_EXE_csid-bench-cluster"))
        .args("--nodes 6 --claims 4 --again 12 --rounds 1 --milliseconds 300 --directory".split(' '))
        .arg(directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = bench.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > LIMIT {
            bench.kill().unwrap();
            bench.wait().unwrap();
            panic!("not done within {LIMIT:?}: {}", std::fs::read_to_string(&log).unwrap());
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(status.success(), "{status}: {}", std::fs::read_to_string(&log).unwrap());
    let text = std::fs::read_to_string(directory.path().join("cluster.json")).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    let figures = report["figures"].as_array().unwrap();
    for key in FIGURES {
        let found = figures.iter().find(|figure| figure["key"] == key);
        let value = found.and_then(|figure| figure["value"].as_f64());
        assert!(value.is_some_and(|value| value > 0.0), "{key}: {value:?} in {text}");
    }
    assert_eq!(processes_of(directory.path()), [""; 0], "they are left of the run");
    let mut left: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["cluster.json", "log"]);
}
