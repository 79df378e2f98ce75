//! The command of the administrators that switches a node's machine off.

use std::collections::HashSet;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;

/// Commands that run at the same time.
const AT_ONCE: usize = 8;
/// The variables that the command has, besides PATH. A drop-in of the unit may give it keys of its own.
const KEEPS: &str = "CREDENTIALS_DIRECTORY";

/// The command, and how long it may take.
#[derive(Debug)]
pub struct FenceCommand {
    /// An absolute path.
    program: String,
    time: Duration,
    places: Semaphore,
    /// The nodes for which it runs.
    running: Mutex<HashSet<String>>,
}

/// A node for which the command runs. The drop forgets it.
struct Turn<'c> {
    command: &'c FenceCommand,
    node: &'c str,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.command.running().remove(self.node);
    }
}

/// A command that runs. The drop kills it and all processes of its group.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The program has no ID any more when it was waited for, so the number is not another process' one.
        let group = self.0.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl FenceCommand {
    pub fn new(program: String, time: Duration) -> Self {
        FenceCommand { program, time, places: Semaphore::new(AT_ONCE), running: Mutex::default() }
    }

    fn running(&self) -> MutexGuard<'_, HashSet<String>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the command with the node's name, and returns when it has exited with 0: the machine is off. Returns otherwise why nobody may
    /// believe that. A command that takes too long is killed, and so is one whose caller waits no longer.
    pub async fn run(&self, node: &str) -> Result<(), String> {
        let program = &self.program;
        // The first of two may end, and the node boot, before the second switches it off again.
        if !self.running().insert(node.to_owned()) {
            return Err(format!("the fence command {program} runs for node {node} already"));
        }
        let _turn = Turn { command: self, node };
        let Ok(_place) = self.places.try_acquire() else {
            return Err(format!("{AT_ONCE} fence commands run already, which is the limit"));
        };
        let mut command = Command::new(program);
        command.arg(node).env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin");
        command.envs(std::env::var_os(KEEPS).map(|directory| (KEEPS, directory)));
        // Its output goes to the log of this server.
        command.stdin(Stdio::null()).process_group(0).kill_on_drop(true);
        let spawned = command.spawn();
        let spawned = spawned.map_err(|error| format!("the fence command {program} cannot run: {error}"))?;
        let mut running = Running(spawned);
        let Ok(ended) = tokio::time::timeout(self.time, running.0.wait()).await else {
            let seconds = self.time.as_secs();
            return Err(format!("the fence command {program} has not ended in {seconds} s, and was killed"));
        };
        let status =
            ended.map_err(|error| format!("the end of the fence command {program} is not known: {error}"))?;
        match (status.code(), status.signal()) {
            (Some(0), _) => Ok(()),
            (Some(code), _) => Err(format!("the fence command {program} has exited with {code}")),
            (None, signal) => {
                let signal = signal.unwrap_or_default();
                Err(format!("the fence command {program} was ended by signal {signal}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;

    fn script(directory: &Path, text: &str) -> FenceCommand {
        let path = directory.join("fence");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        FenceCommand::new(path.to_str().unwrap().to_owned(), Duration::from_secs(5))
    }

    /// A thread that makes a process has its descriptors until the exec, and a script that is open for writing cannot run.
    async fn run(command: &FenceCommand) -> Result<(), String> {
        loop {
            match command.run("n1").await {
                Err(why) if why.contains("Text file busy") => tokio::task::yield_now().await,
                ended => return ended,
            }
        }
    }

    #[tokio::test]
    async fn exit_status_0_alone_says_off() {
        let directory = tempfile::tempdir().unwrap();
        let seen = directory.path().join("seen");
        let text = format!("echo \"$#-$1-$HOME\" > {}", seen.display());
        assert_eq!(run(&script(directory.path(), &text)).await, Ok(()));
        assert_eq!(
            fs::read_to_string(&seen).unwrap(),
            "1-n1-\n",
            "the node's name, and no variable of the server"
        );
        for (text, end) in [("exit 3", "has exited with 3"), ("kill -9 $$", "was ended by signal 9")] {
            let why = run(&script(directory.path(), text)).await.unwrap_err();
            assert!(why.ends_with(end), "{why}");
        }
        let slow = script(directory.path(), "sleep 1");
        let (first, second) = tokio::join!(run(&slow), async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            slow.run("n1").await
        });
        assert!(first.is_ok() && second.unwrap_err().ends_with("runs for node n1 already"));
        assert!(slow.running().is_empty());
        let absent = FenceCommand::new("/nonexistent/fence".into(), Duration::from_secs(5));
        assert!(absent.run("n1").await.unwrap_err().contains("cannot run"));
    }

    #[tokio::test]
    async fn command_that_takes_too_long_ends_with_its_group() {
        let directory = tempfile::tempdir().unwrap();
        let child = directory.path().join("child");
        // The child ignores the end of its parent.
        let text = format!("sleep 600 & echo $! > {}; trap '' TERM; wait; sleep 600", child.display());
        let mut command = script(directory.path(), &text);
        command.time = Duration::from_secs(1);
        let why = run(&command).await.unwrap_err();
        assert!(why.ends_with("has not ended in 1 s, and was killed"), "{why}");
        let child = fs::read_to_string(&child).unwrap();
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", child.trim())).ok()?;
            stat.rsplit(") ").next().and_then(|rest| rest.chars().next())
        };
        for _ in 0..200 {
            if matches!(state(), None | Some('Z' | 'X')) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the child {child} goes on: {:?}", state());
    }
}
