//! What csictl shows while it waits, on a pseudo terminal and elsewhere.

use std::process::Stdio;
use std::time::{Duration, Instant};

use csid_client::{AccessMode, MountOptions, Restore};
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, child, eventually, program, world};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};

/// A csictl that runs, and what it has written so far.
struct Shown {
    child: Child,
    text: String,
}

impl Shown {
    fn of(mut command: Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Shown { child: command.kill_on_drop(true).spawn().expect("it runs"), text: String::new() }
    }

    /// Reads standard output until `words` are there.
    async fn until(&mut self, words: &str) {
        let output = self.child.stdout.as_mut().expect("its output");
        let mut buffer = [0; 4096];
        let end = Instant::now() + Duration::from_secs(60);
        while !self.text.contains(words) {
            let left = end.saturating_duration_since(Instant::now());
            let read = tokio::time::timeout(left, output.read(&mut buffer)).await;
            let read =
                read.unwrap_or_else(|_| panic!("no {words:?} in {:?}", self.text)).expect("a terminal");
            assert_ne!(read, 0, "it ended without {words:?}: {:?}", self.text);
            self.text += &String::from_utf8_lossy(&buffer[..read]);
        }
    }

    /// Waits for the end, and returns all that was written to standard output and standard error.
    async fn end(mut self) -> (bool, String, String) {
        let output = self.child.stdout.as_mut().expect("its output");
        let mut rest = Vec::new();
        output.read_to_end(&mut rest).await.unwrap();
        self.text += &String::from_utf8_lossy(&rest);
        let ended = self.child.wait_with_output().await.unwrap();
        (ended.status.success(), self.text, String::from_utf8(ended.stderr).unwrap())
    }
}

fn csictl(w: &World, line: &str) -> Vec<String> {
    let mut words = vec![program("csictl").display().to_string(), "--csid-socket".to_owned()];
    words.push(w.socket().display().to_string());
    words.extend(line.split(' ').map(str::to_owned));
    words
}

/// Runs csictl with all its streams on a pseudo terminal.
fn on_terminal(w: &World, line: &str) -> Shown {
    let mut command = Command::from(child("/usr/bin/script".as_ref()));
    command.args(["--quiet", "--return", "--flush", "--command", &csictl(w, line).join(" "), "/dev/null"]);
    command.env("TERM", "xterm").env("COLUMNS", "200");
    Shown::of(command)
}

fn elsewhere(w: &World, line: &str) -> Shown {
    let words = csictl(w, line);
    let mut command = Command::from(child(words[0].as_ref()));
    command.args(&words[1..]);
    Shown::of(command)
}

fn unavailable(rpc: &str) -> Rule {
    Rule::always(rpc, Act::Say(14, "the array reboots".to_owned()))
}

#[test]
fn terminal_shows_step_seconds_and_last_error() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([unavailable("NodeStageVolume")]);
        let mut shown = on_terminal(w, "mount default v job --plugin p --external-id v");
        shown.until("the array reboots").await;
        shown.until("s] ").await;
        assert!(
            shown.text.contains("s] stage; last error: NodeStageVolume: UNAVAILABLE: "),
            "{:?}",
            shown.text
        );
        assert!(shown.text.contains('\r'), "the line is written again: {:?}", shown.text);
        w.honest();
        let (succeeded, text, _) = shown.end().await;
        let source = row(&client, "v", "job").await.unwrap().source;
        assert!(succeeded && text.trim_end().ends_with(&source), "the path is the last line: {text:?}");

        w.plugin("p").rules([unavailable("NodeUnpublishVolume")]);
        let mut shown = on_terminal(w, "unmount default v job");
        shown.until("; last error: NodeUnpublishVolume: ").await;
        w.honest();
        assert!(shown.end().await.0);
        w.nothing_left(&client).await;
    });
}

#[test]
fn every_wait_shows_its_progress() {
    world(async |w| {
        w.add_plugin("q").await;
        let client = running(w).await;
        healthy(&client, "q").await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;

        // A plugin that is away.
        w.plugin("q").kill();
        eventually("csid sees it", async || !client.plugin("q").await.unwrap().healthy).await;
        let mut shown = on_terminal(w, "wait q");
        shown.until("; last error: ").await;
        w.plugin("q").start().await;
        assert!(shown.end().await.0);

        // Mounts that come back after a reboot.
        let auto = MountOptions { restore: Some(Restore::Auto), ..MountOptions::default() };
        client.mount(NAMESPACE, "v", "job", auto).await.unwrap();
        drop(client);
        w.plugin("p").rules([unavailable("NodePublishVolume")]);
        w.reboot().await;
        let client = w.start().await;
        w.plugin("p").rules([unavailable("NodePublishVolume")]);
        let mut shown = on_terminal(w, "wait-volumes");
        shown.until("1 mounts are missing, default/v ").await;
        w.honest();
        assert!(shown.end().await.0);

        // A drain.
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Hold)]);
        let mut shown = on_terminal(w, "plugin drain p --yes p");
        shown.until("1 mounts left").await;
        w.honest();
        assert!(shown.end().await.0);
        healthy(&client, "p").await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn progress_elsewhere_needs_verbose() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(4000))]);
        let (succeeded, path, text) =
            elsewhere(w, "mount default v job --plugin p --external-id v").end().await;
        assert!(succeeded && text.is_empty() && path.lines().count() == 1, "{path:?} {text:?}");
        unmount(&client, "v", "job").await.unwrap();
        let (succeeded, path, text) =
            elsewhere(w, "--verbose mount default v job --plugin p --external-id v").end().await;
        assert!(succeeded && path.lines().count() == 1, "{path:?}");
        // One line: the step is the same all the time.
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 1, "{text}");
        assert!(
            lines[0].starts_with("csictl: mount default v job: stage") && lines[0].ends_with("s]"),
            "{text}"
        );
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
