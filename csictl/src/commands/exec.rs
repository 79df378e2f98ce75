//! A command in a plugin with this process' streams and terminal, and the command's exit code.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, bail};
use csid_client::{CallOptions, ExecOptions, Exit, Running, Session, Target};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use super::common::{some, yes};
use crate::args::Exec;

const BUFFER: usize = 64 * 1024;

pub async fn exec(target: &Target, args: Exec) -> anyhow::Result<ExitCode> {
    if args.tty && !io::stdin().is_terminal() {
        bail!("--tty: standard input is not a terminal");
    }
    let size =
        args.tty.then(|| tcgetwinsize(io::stdin())).transpose().context("cannot get the terminal's size")?;
    let (mut ending, mut resized) = (Ending::listen()?, signal(SignalKind::window_change())?);
    let session = Session::open(target.clone()).await?;
    let options = ExecOptions {
        tty: yes(args.tty),
        rows: size.map(|size| size.ws_row),
        columns: size.map(|size| size.ws_col),
        directory: args.directory,
        ..ExecOptions::default()
    };
    let argv = some(args.argv).unwrap_or_default();
    let Running { stdin, stdout, stderr, operation } =
        session.client().await?.exec_plugin(&args.plugin, argv, options).await?;

    let raw = args.tty.then(Raw::set).transpose().context("cannot set the terminal")?;
    let terminal = args.tty.then(|| stdout.try_clone()).transpose()?;
    let own = |fd: io::Result<OwnedFd>| fd.context("a standard stream is closed");
    // Not awaited, because it may read forever.
    drop(copying(own(io::stdin().as_fd().try_clone_to_owned())?, stdin));
    let mut outputs = vec![copying(stdout, own(io::stdout().as_fd().try_clone_to_owned())?)];
    if !args.tty {
        outputs.push(copying(stderr, own(io::stderr().as_fd().try_clone_to_owned())?));
    }

    let end = async {
        let ended = ended(&session, &args.plugin, &operation).await;
        for output in outputs {
            let _ = output.await;
        }
        ended
    };
    tokio::pin!(end);
    let mut signalled = false;
    let ended = loop {
        tokio::select! {
            ended = &mut end => break ended,
            code = ending.next() => {
                if signalled {
                    break Ok(code);
                }
                signalled = true;
                let (client, operation) = (session.client().await, operation.clone());
                tokio::spawn(async move { client.ok()?.cancel_operation(&operation).await.ok() });
            }
            _ = resized.recv() => {
                if let Some(terminal) = &terminal && let Ok(size) = tcgetwinsize(io::stdin()) {
                    let _ = tcsetwinsize(terminal, size);
                }
            }
        }
    };
    drop(raw);
    ended.map(ExitCode::from)
}

/// Waits for the command's end, over restarts of csid. Returns its code as a shell does.
async fn ended(session: &Session, plugin: &str, operation: &str) -> anyhow::Result<u8> {
    let end: Exit = loop {
        let asked = session.ask(None, |client, _| async move {
            client.wait_exec(plugin, operation, CallOptions::default()).await
        });
        match asked.await {
            Err(error) if error.lost() => {}
            end => break end?,
        }
    };
    let code = if end.exited { end.status } else { 128 + end.status };
    Ok(u8::try_from(code).unwrap_or(u8::MAX))
}

/// The signals that end csictl.
struct Ending {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Ending {
    fn listen() -> io::Result<Self> {
        Ok(Ending {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// The exit code of the signal.
    async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => 130,
            _ = self.terminate.recv() => 143,
            _ = self.hang_up.recv() => 129,
        }
    }
}

/// The terminal in raw mode, so that the command gets all keys, until this value is dropped.
struct Raw(Termios);

impl Raw {
    fn set() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Raw(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Copies to the end of either stream. It needs a thread, because each may be a terminal or a file.
fn copying(from: OwnedFd, to: OwnedFd) -> oneshot::Receiver<()> {
    let (done, ended) = oneshot::channel();
    thread::spawn(move || {
        if let Err(error) = copy(from.into(), to.into()) {
            eprintln!("csictl: cannot copy a stream: {error}\r");
        }
        let _ = done.send(());
    });
    ended
}

fn copy(mut from: File, mut to: File) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // The terminal is gone.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::IO) => return Ok(()),
            Err(error) => return Err(error),
        };
        match to.write_all(&buffer[..count]) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::IO) => return Ok(()),
            written => written?,
        }
    }
}
