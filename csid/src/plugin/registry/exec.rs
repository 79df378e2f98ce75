//! Commands that are run in a plugin: whose they are, and that each is an event before it is begun.

use std::time::Duration;

use crate::error::Result;
use crate::host::exec::{Commands, End, ExecError, ExecRecord, ExecRequest, Run, Size, Streams};
use crate::host::units::UnitsError;
use crate::plugin::errors::exec::CommandError;
use crate::plugin::errors::process::ProcessError;
use crate::plugin::errors::registry::RegistrationError;
use crate::plugin::events;
use crate::plugin::place::Location;
use crate::plugin::registry::plugins::Plugins;
use crate::plugin::spec::Supervision;
use crate::store::{Change, Durability};

/// How long a list of operations waits for systemd.
const ASKED: Duration = Duration::from_secs(2);

/// A command to run in a plugin.
pub struct Exec {
    pub argv: Vec<String>,
    /// The working directory as the plugin sees it; `/` by default.
    pub directory: Option<String>,
    pub terminal: Option<Size>,
}

impl Plugins {
    /// Run a command where the plugin's active instance is; its streams, and the operation's name. It is not undone when
    /// its caller has gone.
    pub async fn exec(&self, id: &str, exec: Exec, uid: u32) -> Result<(Streams, String)> {
        self.open()?;
        self.0.shared.store.writable()?;
        let operation = Commands::name().map_err(|error| failed(id, error))?;
        let program = exec.argv.first().cloned().unwrap_or_default();
        let begun = self.begin_exec(id, exec, &program, uid, &operation).await;
        if let Err(error) = &begun {
            let event = events::exec(id, uid, &operation, &program, Some(error));
            events::write(&self.0.shared.store, event).await;
        }
        begun.map(|streams| (streams, operation))
    }

    async fn begin_exec(
        &self,
        id: &str,
        exec: Exec,
        program: &str,
        uid: u32,
        operation: &str,
    ) -> Result<Streams> {
        let request = self.request(id, exec.argv, exec.directory).await?;
        // Before the command: without its event it is not run.
        let event = Change::Event(events::exec(id, uid, operation, program, None));
        self.0.shared.store.commit(vec![event], Durability::Process).await?;
        let commands = self.commands();
        let started = commands.start(operation, (id, uid), request, exec.terminal);
        Ok(started.await.map_err(|error| failed(id, error))?)
    }

    async fn request(&self, id: &str, argv: Vec<String>, directory: Option<String>) -> Result<ExecRequest> {
        let view = self.view(id).ok_or_else(|| RegistrationError::unknown(id))?;
        if view.unit.is_empty() {
            return Err(ProcessError::NotRun { id: id.to_owned() }.into());
        }
        let instance = view.instances.first().map_or("", String::as_str);
        let spec = self
            .entry(id, instance, |entry| entry.spec.clone())
            .ok_or_else(|| RegistrationError::unknown(id))?;
        let environment = Location::of(&self.0.directories, id, &spec).environment(&spec);
        let (units, unit) = (&self.0.shared.units, view.unit);
        let unanswered = |error: UnitsError| failed(id, error.into());
        if spec.supervision == Supervision::Unit && units.hiding(&unit).await.map_err(unanswered)?.is_empty()
        {
            return Err(CommandError::OnHost { id: id.to_owned(), unit }.into());
        }
        match units.control_group(&unit).await.map_err(unanswered)?.filter(|(_, pid)| *pid != 0) {
            Some((group, pid)) => Ok(ExecRequest { unit, group, pid, argv, environment, directory }),
            None => {
                let (id, health) = (id.to_owned(), view.health_message);
                Err(CommandError::NotRunning { id, state: view.state, health }.into())
            }
        }
    }

    /// At csid's start: the arguments of commands that another csid has not begun. systemd is asked, and not waited for.
    pub(super) fn clean_execs(&self) {
        let commands = self.commands();
        tokio::spawn(async move {
            if let Err(error) = commands.clean().await {
                tracing::warn!(%error, "old commands in plugins are looked at again with the next one");
            }
        });
    }

    /// Set the size of its terminal.
    pub async fn resize_exec(&self, id: &str, operation: &str, size: Size, uid: u32) -> Result<()> {
        let record = self.command(id, operation, uid)?;
        let Some(terminal) = record.terminal else {
            return Err(CommandError::NoTerminal { operation: operation.to_owned() }.into());
        };
        match self.commands().resize(operation, &terminal, size).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(CommandError::Ended { operation: operation.to_owned() }.into()),
            Err(error) => Err(failed(id, error).into()),
        }
    }

    /// Wait for its end.
    pub async fn wait_exec(&self, id: &str, operation: &str, uid: u32) -> Result<End> {
        self.command(id, operation, uid)?;
        let commands = self.commands();
        let mut known = self.0.known.subscribe();
        let end = commands.end(operation);
        tokio::pin!(end);
        loop {
            // csid's stop wakes this too.
            known.borrow_and_update();
            self.open().map_err(|_| CommandError::Stopping)?;
            tokio::select! {
                end = &mut end => {
                    let lost = || CommandError::Lost { operation: operation.to_owned() }.into();
                    return end.map_err(|error| failed(id, error))?.ok_or_else(lost);
                }
                _ = known.changed() => {}
            }
        }
    }

    /// Commands that run, of all plugins. It asks systemd, and waits a moment for the answer.
    pub async fn execs(&self) -> Result<Vec<Run>> {
        let commands = self.commands();
        let silent = |_| CommandError::Silent { limit: ASKED };
        let asked = tokio::time::timeout(ASKED, commands.running()).await.map_err(silent)?;
        Ok(asked.map_err(|source| CommandError::Failed { id: None, source })?)
    }

    /// Whose a command is, if there is one of that name that has not ended.
    pub fn exec_owner(&self, operation: &str) -> Option<u32> {
        self.commands().record(operation).filter(|record| !record.has_ended()).map(|record| record.uid)
    }

    /// End it; answered when it has ended.
    pub async fn stop_exec(&self, operation: &str) -> Result<()> {
        let stopped = self.commands().stop(operation).await;
        Ok(stopped.map_err(|source| CommandError::Failed { id: None, source })?)
    }

    /// Returns the record of a command in this plugin. A uid other than root gets only its own commands.
    fn command(&self, id: &str, operation: &str, uid: u32) -> Result<ExecRecord> {
        let record = self.commands().record(operation).filter(|record| record.plugin == id);
        let operation = operation.to_owned();
        match record {
            None => Err(CommandError::Unknown { id: id.to_owned(), operation }.into()),
            Some(record) if record.uid != uid && uid != 0 => Err(CommandError::OtherUid { operation }.into()),
            Some(record) => Ok(record),
        }
    }

    fn commands(&self) -> Commands {
        Commands::new(&self.0.directories.runtime, self.0.shared.units.clone())
    }
}

fn failed(id: &str, source: ExecError) -> CommandError {
    CommandError::Failed { id: Some(id.to_owned()), source }
}
