//! csi-witness as a program: what it says and its exit codes.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn witness(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_csi-witness"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Killed with its test.
struct Running(Child);

impl Running {
    fn start(arguments: &[&str], socket: &Path) -> Self {
        let running = Running(witness(arguments).stdout(Stdio::null()).spawn().unwrap());
        until("it listens", || UnixStream::connect(socket).is_ok());
        running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ended(arguments: &[&str]) -> (i32, String) {
    let Output { status, stdout, stderr } = witness(arguments).output().unwrap();
    let text = [stdout, stderr].concat();
    (status.code().unwrap(), String::from_utf8(text).unwrap())
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A stage that nobody asked the plugin for.
const BREACH: &str = r#"{"time":1,"event":"connected","connection":1,"co":7,"plugin":8}
{"time":2,"event":"called","call":1,"connection":1,"rpc":"Probe","request":{}}
{"time":3,"event":"ended","call":1,"code":"OK","response":{"ready":{"value":true}}}
{"time":4,"event":"called","call":2,"connection":1,"rpc":"NodeStageVolume","request":{"volume_id":"vol-1","staging_target_path":"/s"}}
"#;

#[test]
fn log_is_judged_by_exit_code_table_and_json() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log.jsonl");
    let lines: Vec<&str> = BREACH.lines().collect();

    std::fs::write(&log, lines[..3].join("\n") + "\n").unwrap();
    let (code, said) = ended(&["report", text(&log)]);
    assert_eq!(code, 0, "{said}");
    assert!(said.ends_with("1 calls, 0 breaches\n"), "{said}");

    // A line that is being written is none yet.
    std::fs::write(&log, BREACH.to_owned() + "{\"time\":5,").unwrap();
    let (code, said) = ended(&["report", text(&log)]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("rule 19: NodeStageVolume, and nobody asked the plugin"), "{said}");
    assert!(said.contains("#2 NodeStageVolume {\"staging_target_path\":\"/s\""), "{said}");

    let (code, said) = ended(&["report", text(&log), "--json"]);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &report["breaches"][0]["rule"]), (1, &19.into()));
    assert_eq!(report["breaches"][0]["calls"][0]["request"]["volume_id"], "vol-1");

    std::fs::write(&log, "{}\n").unwrap();
    let (code, said) = ended(&["report", text(&log)]);
    assert_eq!(code, 2);
    assert!(said.contains("line 1 of the log is no record of csi-witness"), "{said}");
    assert_eq!(ended(&["report", "/nowhere"]).0, 2);
    assert_eq!(ended(&["judge"]).0, 2);
    assert_eq!(ended(&["mark", "reboot", "/nowhere"]).0, 2);
}

/// An attachment on a host whose CO has a controller. The times are those of the calls on the hosts.
fn attached(time: u64, node: &str) -> String {
    format!(
        r#"{{"time":{time},"event":"connected","connection":1,"co":7,"plugin":8}}
{{"time":{time},"event":"called","call":1,"connection":1,"rpc":"Probe","request":{{}}}}
{{"time":{time},"event":"ended","call":1,"code":"OK"}}
{{"time":{time},"event":"called","call":2,"connection":1,"rpc":"ControllerGetCapabilities","request":{{}}}}
{{"time":{time},"event":"ended","call":2,"code":"OK","response":{{"capabilities":[{{"rpc":{{"type":"PUBLISH_UNPUBLISH_VOLUME"}}}}]}}}}
{{"time":{time},"event":"called","call":3,"connection":1,"rpc":"ControllerPublishVolume","request":{{"volume_id":"vol-1","node_id":"{node}","volume_capability":{{"access_mode":{{"mode":"SINGLE_NODE_WRITER"}}}}}}}}
{{"time":{time},"event":"ended","call":3,"code":"OK"}}
"#
    )
}

#[test]
fn logs_of_hosts_are_judged_together_by_their_times() {
    let directory = tempfile::tempdir().unwrap();
    let [one, two] = ["one.jsonl", "two.jsonl"].map(|name| directory.path().join(name));
    std::fs::write(&one, attached(20, "n1")).unwrap();
    std::fs::write(&two, attached(10, "n2")).unwrap();
    for log in [&one, &two] {
        assert_eq!(ended(&["report", text(log)]).0, 0);
    }
    let (code, said) = ended(&["report", text(&one), text(&two)]);
    assert_eq!(code, 1, "{said}");
    assert!(said.ends_with("6 calls, 1 breaches\n"), "{said}");
    let shown: Vec<_> =
        said.lines().filter(|line| line.contains(" #3 of ") || line.contains("rule 34")).collect();
    let due = ["rule 34: ControllerPublishVolume in the mode SINGLE_NODE_WRITER", text(&one), text(&two)];
    assert!(shown.len() == 3 && (0..3).all(|n| shown[n].contains(due[n])), "{said}");
    assert!(said.contains("it is attached to \"n2\""), "{said}");

    // The earlier one is forgotten, before the later one is made.
    assert_eq!(ended(&["mark", "forgotten", text(&two)]).0, 2);
    assert_eq!(ended(&["mark", "forgotten", text(&two), "vol-1", "n2"]).0, 0);
    let log = std::fs::read_to_string(&two).unwrap();
    let (calls, mark) = log.trim_end().rsplit_once('\n').unwrap();
    let (_, mark) = mark.split_once(',').unwrap();
    std::fs::write(&two, format!("{calls}\n{{\"time\":15,{mark}\n")).unwrap();
    let (code, said) = ended(&["report", text(&one), text(&two)]);
    assert_eq!(code, 0, "{said}");
}

#[test]
fn witness_runs_until_it_is_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (socket, log) = (at("co.sock"), at("log.jsonl"));
    let run = ["run", "--listen", text(&socket), "--plugin", "/nowhere.sock", "--log", text(&log)];
    let mut running = Running::start(&run, &socket);

    // Neither its socket nor its log can be another's: a log is of one run.
    let (other_socket, other_log) = (at("other.sock"), at("other.jsonl"));
    let (mut same_log, mut same_socket) = (run, run);
    (same_log[2], same_socket[6]) = (text(&other_socket), text(&other_log));
    let (code, said) = ended(&same_log);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("move an older one away"), "{said}");
    assert_eq!(ended(&same_socket).0, 2);
    // Neither is one socket enough of two, and a socket that was bound before the failure goes.
    let (code, said) = ended(&[&run[..], &["--listen", text(&other_socket)]].concat());
    assert_eq!(code, 2);
    assert!(said.contains("each --listen needs a --plugin"), "{said}");
    let two = ["run", "--listen", text(&other_socket), "--plugin", "/nowhere.sock"];
    assert_eq!(ended(&[&two[..], &same_socket[1..]].concat()).0, 2);
    assert!(!other_socket.exists() && !other_log.exists());

    assert_eq!(ended(&["mark", "reboot", text(&log)]).0, 0);
    assert!(std::fs::read_to_string(&log).unwrap().ends_with("\"event\":\"marked\",\"mark\":\"reboot\"}\n"));

    let pid = running.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    until("it ends", || running.0.try_wait().unwrap().is_some());
    assert!(running.0.wait().unwrap().success());
    assert!(!socket.exists());
}

#[test]
fn socket_of_a_killed_witness_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let socket = at("co.sock");
    for name in ["first.jsonl", "second.jsonl"] {
        let log = at(name);
        let run = ["run", "--listen", text(&socket), "--plugin", "/nowhere.sock", "--log", text(&log)];
        drop(Running::start(&run, &socket));
        assert!(socket.exists());
    }
}
