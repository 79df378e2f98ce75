//! An error says what failed. The next command is csictl's part (csictl/src/hints.rs), since other clients have no csictl.

use std::path::{Path, PathBuf};

/// Files whose texts go to the journal of systemd or to a terminal, not into an error.
const LOGS: [&str; 3] = ["daemon/mod.rs", "daemon/reload.rs", "volume/reconcile/mod.rs"];

/// Words of advice: commands, the option `force`, and what a caller may do next.
const ADVICE: [&str; 21] = [
    "csictl",
    "fuser -vm",
    "use force",
    "force detaches",
    "ask again",
    "ask for it by",
    "choose another",
    "; root may ",
    "leave out",
    "begin the list again",
    "unmount again",
    "Ask once",
    "name the directory itself",
    "then give",
    "`systemctl",
    "`journalctl",
    "`ip netns",
    "; register its",
    "; register the plugin",
    "put it into /etc",
    "Install the newer",
];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false => found.push(path),
        }
    }
}

#[test]
fn error_texts_name_no_next_command() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let mut found = Vec::new();
    for file in files {
        let name = file.strip_prefix(&src).unwrap().display().to_string();
        let text = std::fs::read_to_string(&file).unwrap();
        let lines = text.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
        let told = lines
            .filter(|line| ADVICE.iter().any(|words| line.contains(words)))
            .map(|line| format!("{name}: {line}"));
        found.extend(told.filter(|_| !LOGS.contains(&name.as_str()) && !name.contains("tests")));
    }
    assert!(found.is_empty(), "{found:#?}");
}
