//! Programs of the cluster. Each ends with its handle, and with this program.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long a program may take until it is ready.
const START: Duration = Duration::from_secs(120);

/// A program that runs.
pub struct Program {
    process: Child,
    /// The time from the start to READY. 0: the program does not say that it is ready.
    pub ready: Duration,
}

impl Program {
    /// Starts a program that says READY, and waits for that.
    pub fn start(command: &mut Command, log: &Path) -> Result<Program> {
        let notify = log.with_extension("notify");
        let _ = fs::remove_file(&notify);
        let socket = UnixDatagram::bind(&notify)?;
        socket.set_read_timeout(Some(Duration::from_millis(20)))?;
        let begun = Instant::now();
        let mut program = Program::spawn(command.env("NOTIFY_SOCKET", &notify), log)?;
        let mut message = [0; 4096];
        loop {
            if let Ok(size) = socket.recv(&mut message)
                && message[..size].starts_with(b"READY=1")
            {
                program.ready = begun.elapsed();
                // Later messages are read to the end of the program, as systemd does.
                socket.set_read_timeout(None)?;
                std::thread::spawn(move || while socket.recv(&mut message).is_ok() {});
                return Ok(program);
            }
            if let Some(status) = program.process.try_wait()? {
                bail!("{}: {status}: {}", log.display(), last_lines(log));
            }
            if begun.elapsed() > START {
                bail!("{}: not ready within {} s: {}", log.display(), START.as_secs(), last_lines(log));
            }
        }
    }

    /// Starts a program, with its output in a log.
    pub fn spawn(command: &mut Command, log: &Path) -> Result<Program> {
        let file = fs::OpenOptions::new().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let name = command.get_program().to_string_lossy().into_owned();
        let process = command.spawn().with_context(|| format!("{name} was not started"))?;
        Ok(Program { process, ready: Duration::ZERO })
    }

    /// Kills the program with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Returns the resident memory in MiB.
    pub fn rss(&self) -> Result<f64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib / 1024.0)
    }

    /// Returns the processor's time that the program has used, in seconds.
    pub fn cpu(&self) -> Result<f64> {
        cpu_of(self.process.id())
    }
}

/// Returns the processor's time that a process has used, in seconds.
pub fn cpu_of(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |place: usize| -> Result<f64> { Ok(fields.get(place).context("a short stat")?.parse()?) };
    Ok((ticks(11)? + ticks(12)?) / 100.0)
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a command that is killed when this thread ends, whatever ends it.
pub fn command(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program.as_ref());
    command
}

/// Returns a program that lies next to this one.
pub fn sibling(name: &str) -> Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name(name);
    anyhow::ensure!(program.exists(), "{} was not built: make bench-cluster builds it", program.display());
    Ok(program)
}

fn last_lines(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().rev().take(10).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}
