//! A command in the namespaces and the control group of a unit's main process. csid may not change namespaces, so each
//! has a unit of its own, where `csid exec-helper` (`enter`) goes there and runs it. Its standard input and output are the
//! caller's, by descriptor: csid copies nothing.
//!
//! The state of a command is one file in a directory for root only. csid writes it before the start, the helper from then on. So the
//! command and its result outlive csid. The arguments are in the file until the helper has read them. They are nowhere else, because
//! every user can read a unit's command line.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcsetwinsize};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use zbus::Variant;

use crate::host::units::{Units, UnitsError};

/// Commands that run at once; each is a unit, with two processes.
const RUNNING: usize = 16;
/// The number of commands of one uid other than root.
const EACH: usize = 4;
/// The number of ended commands whose result is kept.
const KEPT: usize = 64;
/// The prefix of a command's name. The name of its unit has `.service` behind it.
const PREFIX: &str = "csi-exec-";
/// The argument by which csid starts the helper.
pub const HELPER: &str = "exec-helper";
/// A file that is being written.
const NEW: &str = "new";
const UUID: &str = "/proc/sys/kernel/random/uuid";
/// The helper ends a command that does not end by itself, so it needs longer than that.
const STOP: Duration = Duration::from_secs(10);
/// A unit that is about to run has no main process yet.
const SOON: Duration = Duration::from_millis(20);

/// The lock under which a command is counted and started.
static STARTING: Mutex<()> = Mutex::const_new(());

#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error(transparent)]
    Units(#[from] UnitsError),
    #[error("{step}: {source}")]
    Os { step: &'static str, source: io::Error },
    #[error("{RUNNING} commands run in plugins, as many as may at once")]
    Many,
    #[error("{EACH} commands of uid {uid} run in plugins, as many as one uid's may at once")]
    ManyOf { uid: u32 },
}

fn os<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> ExecError {
    move |source| ExecError::Os { step, source: source.into() }
}

/// The command that the helper runs, and where.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExecRequest {
    /// The unit, and its main process. A pid may be given again: the helper enters it only in the unit's control group.
    pub unit: String,
    #[serde(default)]
    pub group: String,
    pub pid: u32,
    pub argv: Vec<String>,
    pub environment: BTreeMap<String, String>,
    /// As the process sees it.
    pub directory: Option<String>,
}

/// How a command ended: by its exit status, or by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    pub exited: bool,
    pub status: i32,
}

/// The record of a command.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExecRecord {
    pub plugin: String,
    pub uid: u32,
    /// The terminal it runs on, if it does.
    pub terminal: Option<PathBuf>,
    /// Until the helper has it.
    pub(super) request: Option<ExecRequest>,
    pub(super) end: Option<End>,
}

impl ExecRecord {
    pub fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    pub(super) fn read(path: &Path) -> io::Result<ExecRecord> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }
}

/// In characters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Size {
    pub rows: u16,
    pub columns: u16,
}

impl From<Size> for Winsize {
    fn from(size: Size) -> Self {
        Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 }
    }
}

/// The caller's ends of a command's standard input and output; of a terminal all three are its master.
pub struct Streams {
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

/// Both ends, and the terminal's path.
struct Ends {
    callers: Streams,
    commands: Streams,
    terminal: Option<PathBuf>,
}

impl Ends {
    fn pipes() -> io::Result<Ends> {
        let pipe = || pipe_with(PipeFlags::CLOEXEC);
        let (stdin, stdout, stderr) = (pipe()?, pipe()?, pipe()?);
        Ok(Ends {
            callers: Streams { stdin: stdin.1, stdout: stdout.0, stderr: stderr.0 },
            commands: Streams { stdin: stdin.0, stdout: stdout.1, stderr: stderr.1 },
            terminal: None,
        })
    }

    fn terminal(size: Size) -> io::Result<Ends> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags)?;
        rustix::pty::unlockpt(&master)?;
        tcsetwinsize(&master, size.into())?;
        let path = rustix::pty::ptsname(&master, Vec::new())?;
        let path = PathBuf::from(path.into_string().map_err(io::Error::other)?);
        let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        let thrice = |fd: OwnedFd| {
            Ok::<_, io::Error>(Streams { stdin: fd.try_clone()?, stdout: fd.try_clone()?, stderr: fd })
        };
        Ok(Ends { callers: thrice(master)?, commands: thrice(slave)?, terminal: Some(path) })
    }
}

/// The commands, by the directory of their files.
pub struct Commands {
    directory: PathBuf,
    units: Units,
}

/// A command that runs.
pub struct Run {
    pub operation: String,
    pub since: SystemTime,
    pub record: ExecRecord,
}

impl Commands {
    pub fn new(runtime: &Path, units: Units) -> Self {
        Commands { directory: runtime.join("exec"), units }
    }

    /// A new command's name.
    pub fn name() -> Result<String, ExecError> {
        let uuid = std::fs::read_to_string(UUID).map_err(os("a command's name"))?;
        Ok(format!("{PREFIX}{}", uuid.trim().replace('-', "")))
    }

    /// Answered when systemd has taken it on. That it cannot be run is how it ends.
    pub async fn start(
        &self,
        operation: &str,
        (plugin, uid): (&str, u32),
        request: ExecRequest,
        terminal: Option<Size>,
    ) -> Result<Streams, ExecError> {
        let _starting = STARTING.lock().await;
        check_room(&self.forget_old().await?, uid)?;
        let ends = terminal.map_or_else(Ends::pipes, Ends::terminal).map_err(os("its streams"))?;
        let path = self.path(operation);
        let record = ExecRecord {
            plugin: plugin.to_owned(),
            uid,
            terminal: ends.terminal,
            request: Some(request),
            end: None,
        };
        self.keep(&path, &record).map_err(os("its file"))?;
        let unit = unit(operation);
        let started = self.units.start_helper(&unit, plugin, &path, &ends.commands).await;
        if let Err(error) = started {
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        Ok(ends.callers)
    }

    /// `None`: there is none of that name, or none any more.
    pub fn record(&self, operation: &str) -> Option<ExecRecord> {
        let word = operation.strip_prefix(PREFIX)?;
        if word.is_empty() || !word.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        match ExecRecord::read(&self.path(operation)) {
            Ok(record) => Some(record),
            Err(error) => {
                if error.kind() != ErrorKind::NotFound {
                    tracing::warn!(operation, %error, "what is known of a command cannot be read");
                }
                None
            }
        }
    }

    /// How it ended, when it has; `None`: that is not known, for its helper was killed.
    pub async fn end(&self, operation: &str) -> Result<Option<End>, ExecError> {
        let unit = unit(operation);
        loop {
            let runs = self.runs(&unit).await?;
            // The helper writes the end before its own.
            let end = self.record(operation).and_then(|record| record.end);
            if end.is_some() || !runs {
                return Ok(end);
            }
            let pid = self.units.state(&unit).await?.map_or(0, |state| state.main_pid);
            match self.units.watch(&unit, pid).await? {
                Some(process) => process.ended().await,
                None => tokio::time::sleep(SOON).await,
            }
        }
    }

    /// `false`: it has ended.
    pub async fn resize(&self, operation: &str, terminal: &Path, size: Size) -> Result<bool, ExecError> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::open(terminal, flags, Mode::empty());
        // As long as the unit runs nobody else has a terminal of that name.
        if !self.runs(&unit(operation)).await? {
            return Ok(false);
        }
        tcsetwinsize(opened.map_err(os("its terminal"))?, size.into()).map_err(os("its terminal"))?;
        Ok(true)
    }

    /// SIGTERM, and later SIGKILL; answered when it has ended.
    pub async fn stop(&self, operation: &str) -> Result<(), ExecError> {
        Ok(self.units.stop(&unit(operation)).await?)
    }

    pub async fn running(&self) -> Result<Vec<Run>, ExecError> {
        let runs = self.files().map_err(os("the commands' files"))?;
        let runs: Vec<Run> = runs.into_iter().filter(|run| run.record.end.is_none()).collect();
        if runs.is_empty() {
            return Ok(runs);
        }
        let running = self.those_running(&runs).await?;
        Ok(runs.into_iter().filter(|run| running.contains(&unit(&run.operation))).collect())
    }

    /// Removes the files that a killed csid has left.
    pub async fn clean(&self) -> Result<(), ExecError> {
        let _starting = STARTING.lock().await;
        self.forget_old().await.map(drop)
    }

    /// Keep the ends of the last, and nothing of what was never begun: its arguments are there. The uids of those that run.
    async fn forget_old(&self) -> Result<Vec<u32>, ExecError> {
        match std::fs::remove_file(self.directory.join(NEW)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(os("an old command's file")(error));
            }
            _ => {}
        }
        let runs = self.files().map_err(os("the commands' files"))?;
        let running = match runs.is_empty() {
            true => Vec::new(),
            false => self.those_running(&runs).await?,
        };
        let (running, rest): (Vec<Run>, Vec<Run>) =
            runs.into_iter().partition(|run| running.contains(&unit(&run.operation)));
        let (never_begun, mut ended): (Vec<Run>, Vec<Run>) =
            rest.into_iter().partition(|run| run.record.request.is_some());
        ended.sort_by_key(|run| run.since);
        ended.truncate(ended.len().saturating_sub(KEPT));
        for run in never_begun.iter().chain(&ended) {
            std::fs::remove_file(self.path(&run.operation)).map_err(os("an old command's file"))?;
        }
        Ok(running.iter().map(|run| run.record.uid).collect())
    }

    async fn those_running(&self, runs: &[Run]) -> Result<Vec<String>, ExecError> {
        let units: Vec<String> = runs.iter().map(|run| unit(&run.operation)).collect();
        let units: Vec<&str> = units.iter().map(String::as_str).collect();
        Ok(self.units.running(&units).await?)
    }

    async fn runs(&self, unit: &str) -> Result<bool, ExecError> {
        Ok(!self.units.running(&[unit]).await?.is_empty())
    }

    fn files(&self) -> io::Result<Vec<Run>> {
        let entries = match std::fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut runs = Vec::new();
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let operation = name.to_str().and_then(|name| name.strip_suffix(".json"));
            if let Some(operation) = operation
                && let Some(record) = self.record(operation)
            {
                // Another one may be cleaning up.
                let Ok(since) = entry.metadata().and_then(|metadata| metadata.modified()) else { continue };
                runs.push(Run { operation: operation.to_owned(), since, record });
            }
        }
        Ok(runs)
    }

    fn path(&self, operation: &str) -> PathBuf {
        self.directory.join(format!("{operation}.json"))
    }

    /// Whole, or not at all.
    fn keep(&self, path: &Path, record: &ExecRecord) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let new = self.directory.join(NEW);
        let mut file: File =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        let written = file.write_all(&serde_json::to_vec(record)?).and_then(|()| std::fs::rename(&new, path));
        written.inspect_err(|_| {
            let _ = std::fs::remove_file(&new);
        })
    }
}

/// `running`: the uids of the commands that do. Root could take another's place anyway.
fn check_room(running: &[u32], uid: u32) -> Result<(), ExecError> {
    if running.len() >= RUNNING {
        return Err(ExecError::Many);
    }
    if uid != 0 && running.iter().filter(|other| **other == uid).count() >= EACH {
        return Err(ExecError::ManyOf { uid });
    }
    Ok(())
}

fn unit(operation: &str) -> String {
    format!("{operation}.service")
}

impl Units {
    async fn start_helper(
        &self,
        unit: &str,
        plugin: &str,
        record: &Path,
        streams: &Streams,
    ) -> Result<(), ExecError> {
        let csid = std::env::current_exe().map_err(os("csid's own program"))?;
        let csid = csid.to_string_lossy();
        // A csid that was upgraded starts the helper of the new one.
        let csid = csid.strip_suffix(" (deleted)").unwrap_or(&csid).to_owned();
        let record = record.to_string_lossy().replace('$', "$$");
        let argv = vec!["csid".to_owned(), HELPER.to_owned(), record];
        let usec = u64::try_from(STOP.as_micros()).unwrap_or(u64::MAX);
        let properties: Vec<(&str, Variant<'_>)> = vec![
            ("Description", format!("A command in the CSI plugin {plugin}").into()),
            ("Type", "exec".into()),
            ("ExecStart", vec![(csid, argv, false)].into()),
            ("StandardInputFileDescriptor", Variant::Fd(streams.stdin.as_fd().into())),
            ("StandardOutputFileDescriptor", Variant::Fd(streams.stdout.as_fd().into())),
            ("StandardErrorFileDescriptor", Variant::Fd(streams.stderr.as_fd().into())),
            ("CollectMode", "inactive-or-failed".into()),
            ("TimeoutStopUSec", usec.into()),
            // Once: its request is gone when it has been read.
            ("Restart", "no".into()),
            ("LimitCORE", 0_u64.into()),
        ];
        Ok(self.start_transient_unit(unit, &properties).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_uid_but_root_takes_all_the_room() {
        let of = |uid, number| vec![uid; number];
        assert!(check_room(&of(7, EACH - 1), 7).is_ok());
        assert!(matches!(check_room(&of(7, EACH), 7), Err(ExecError::ManyOf { uid: 7 })));
        assert!(check_room(&of(7, EACH), 8).is_ok());
        assert!(check_room(&of(0, RUNNING - 1), 0).is_ok());
        assert!(matches!(check_room(&of(0, RUNNING), 7), Err(ExecError::Many)));
    }
}
