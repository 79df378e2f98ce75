//! Commands in a plugin: Exec, ResizeExec, WaitExec.

use std::collections::HashMap;
use std::time::SystemTime;

use zbus::{Fd, OwnedVariant};

use super::authorise::PolkitAction;
use super::call::{Answer, Call, until, within};
use super::contract::Map;
use super::options::Options;
use super::plugin::id;
use crate::error::{Error, Kind, Result, Step};
use crate::names;
use crate::plugin::{Exec, Run, Size};

/// A terminal's size if the call has none.
const DEFAULT_SIZE: Size = Size { rows: 24, columns: 80 };

fn command(argv: Vec<String>, options: &mut Options) -> Result<Exec> {
    if argv.first().is_none_or(String::is_empty) {
        return Err(Error::invalid("argv is empty"));
    }
    let (rows, columns) = (options.short("rows"), options.short("columns"));
    let size =
        Size { rows: rows.unwrap_or(DEFAULT_SIZE.rows), columns: columns.unwrap_or(DEFAULT_SIZE.columns) };
    let terminal = options.flag("tty").then_some(size);
    if terminal.is_none() && (rows.is_some() || columns.is_some()) {
        return Err(Error::invalid("rows and columns require tty"));
    }
    let directory = options.text("directory");
    match directory.as_deref() {
        None | Some("/") => {}
        Some(directory) => names::path("directory", directory)?,
    }
    Ok(Exec { argv, directory, terminal })
}

pub(super) async fn exec(call: Call) -> Answer {
    let id = id(&call)?.to_owned();
    let (argv, options): (Vec<String>, HashMap<String, OwnedVariant>) = call.arguments()?;
    let keys = &[("tty", "b"), ("rows", "q"), ("columns", "q"), ("directory", "s")];
    let mut options = Options::check(options, keys)?;
    let wait = options.wait(call.arrived)?;
    let command = command(argv, &mut options)?;
    if !call.server.rooms.config.borrow().exec {
        let text = "commands in plugins are disabled (`exec` in csid.toml)";
        let disabled = Error::new(Kind::NotSupported, text);
        return Err(disabled.with(|details| details.step = Some(Step::Configuration)).into());
    }
    let (plugins, uid) = (call.server.rooms.plugins.clone(), call.permit.uid());
    let begun = within(&call.slot, wait.deadline, "starting the command", async move {
        plugins.exec(&id, command, uid).await
    });
    let (streams, operation) = begun.await?;
    let [stdin, stdout, stderr] = [streams.stdin, streams.stdout, streams.stderr].map(Fd::from);
    call.reply(&(stdin, stdout, stderr, operation))
}

pub(super) async fn resize_exec(call: Call) -> Answer {
    let id = id(&call)?;
    let (operation, rows, columns): (String, u16, u16) = call.arguments()?;
    names::name("operation", &operation)?;
    let plugins = &call.server.rooms.plugins;
    plugins.resize_exec(id, &operation, Size { rows, columns }, call.permit.uid()).await?;
    call.reply(&())
}

pub(super) async fn wait_exec(call: Call) -> Answer {
    let id = id(&call)?;
    let (operation, options): (String, HashMap<String, OwnedVariant>) = call.arguments()?;
    names::name("operation", &operation)?;
    let mut options = Options::check(options, &[])?;
    let wait = options.wait(call.arrived)?;
    let plugins = &call.server.rooms.plugins;
    let end = until(wait.deadline, plugins.wait_exec(id, &operation, call.permit.uid())).await?;
    call.reply(&(end.exited, end.status))
}

/// Returns the row of a running command for ListOperations.
pub(super) fn row(run: Run) -> Map {
    let since = run.since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let since = u64::try_from(since.as_micros()).unwrap_or(u64::MAX);
    Map::from([
        ("id", run.operation.into()),
        ("kind", "exec".into()),
        ("subject", run.record.plugin.into()),
        ("step", "running".into()),
        ("since", since.into()),
        ("uid", run.record.uid.into()),
    ])
}

/// Ends a command for CancelOperation. Another uid's command needs the action manage. `false`: no command of that name runs.
pub(super) async fn cancel(call: &Call, operation: &str) -> Result<bool> {
    let plugins = call.server.rooms.plugins.clone();
    let Some(owner) = plugins.exec_owner(operation) else { return Ok(false) };
    if owner != call.permit.uid() {
        call.server.authoriser.also_of(&call.permit, PolkitAction::Manage, Some(owner)).await?;
    }
    let operation = operation.to_owned();
    within(&call.slot, None, "ending the command", async move { plugins.stop_exec(&operation).await })
        .await?;
    Ok(true)
}
