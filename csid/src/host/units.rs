//! systemd, over the system bus: transient services, and the end of their main process. It holds the
//! connection, nothing else; what runs is systemd's to know, and is asked each time.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, Semaphore};
use zbus::{OwnedObjectPath, OwnedVariant, Variant};

use crate::system_bus;

/// Control groups read at once.
const MEASURED_AT_ONCE: usize = 4;
/// Credentials fetched at once. Each is a unit, and half a dozen calls to PID 1.
pub(super) const FETCHED_AT_ONCE: usize = 4;
pub(super) const MANAGER: &str = "org.freedesktop.systemd1";
const MANAGER_INTERFACE: &str = "org.freedesktop.systemd1.Manager";
pub(super) const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
/// systemd's error for a unit that is not loaded.
const ABSENT: [&str; 2] = ["org.freedesktop.systemd1.NoSuchUnit", "org.freedesktop.systemd1.NoUnitForPID"];
/// A call to PID 1 that takes longer has failed.
pub(super) const CALL: Duration = Duration::from_secs(30);

/// A unit as ListUnitsByNames returns it: name, description, load, active and sub state, the unit it follows, its object, and
/// its job.
type Listed = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

#[derive(Debug, thiserror::Error)]
pub enum UnitsError {
    #[error("no systemd answers on the system bus, which managed plugins need: {source}")]
    NoManager { source: zbus::Error },
    #[error("systemd: {call} {unit}: {source}")]
    Call { call: &'static str, unit: String, source: zbus::Error },
    /// A unit of that name is loaded: it runs, it failed, or processes of it are left.
    #[error("systemd: the unit {unit} exists")]
    Exists { unit: String },
    #[error("cannot watch process {pid}, the main process of {unit}: {source}")]
    Watch { unit: String, pid: u32, source: std::io::Error },
    #[error("cannot make a pipe: {0}")]
    Pipe(std::io::Error),
}

/// A service that systemd runs for csid until the next boot.
pub struct TransientService {
    pub unit: String,
    pub description: String,
    pub argv: Vec<String>,
    pub environment: BTreeMap<String, String>,
    /// `(name, path)` of LoadCredential=; the path is the name where none is given.
    pub credentials: Vec<(String, String)>,
    /// A field of each of its journal lines.
    pub log_field: String,
    pub syslog_identifier: String,
    /// stdout and stderr go to the journal, or nowhere.
    pub journal: bool,
    /// The target that orders it at shutdown (`Before=`), and that it pulls in.
    pub target: &'static str,
    /// The units that start before it and stop after it, where they exist.
    pub after: &'static [&'static str],
    /// A unit that starts before it and stops it when it stops. `None`: there is none.
    pub requires: Option<String>,
    /// Further properties, as StartTransientUnit takes them.
    pub settings: Vec<(&'static str, Variant<'static>)>,
}

impl TransientService {
    fn environment(&self) -> Vec<String> {
        self.environment.iter().map(|(key, value)| format!("{key}={value}")).collect()
    }

    fn output(&self) -> &'static str {
        if self.journal { "journal" } else { "null" }
    }
}

/// A loaded unit.
#[derive(Clone, Debug)]
pub struct UnitState {
    /// `active`, `activating`, `deactivating`, `inactive`, `failed`, ...
    pub active: String,
    pub main_pid: u32,
    /// `success`, `exit-code`, `signal`, ...
    pub result: String,
    /// How the last main process ended: waitid's code (1 exited, 2 killed, 3 dumped) and status; 0 before any
    /// did.
    pub exit: (i32, i32),
}

/// A service that somebody else defines.
#[derive(Clone, Debug)]
pub struct ForeignUnit {
    /// The unit's own name. The requested name may be an alias of it.
    pub name: String,
    /// `loaded`, `not-found`, `masked`, `bad-setting`, `error`
    pub load: String,
    /// `running`, `auto-restart`, ...
    pub sub: String,
    /// A job is about to change it.
    pub has_job: bool,
    pub state: UnitState,
}

/// A unit that was asked about, and need not exist.
#[derive(Clone, Debug)]
pub struct SeenUnit {
    /// The unit's own name. The requested name may be an alias of it.
    pub name: String,
    /// The unit's D-Bus object.
    pub path: String,
    /// Whether the unit runs, or a job is about to start it.
    pub runs: bool,
}

impl UnitState {
    /// Neither it runs nor is a job about to change that.
    pub fn at_rest(&self) -> bool {
        matches!(self.active.as_str(), "inactive" | "failed")
    }
}

#[derive(Clone)]
pub struct Units {
    connection: Arc<Mutex<Option<zbus::Connection>>>,
    /// The turns of fetching a credential.
    pub(super) fetching: Arc<Semaphore>,
    /// The turns of reading a control group.
    pub(super) measuring: Arc<Semaphore>,
}

impl Default for Units {
    fn default() -> Self {
        let fetching = Arc::new(Semaphore::new(FETCHED_AT_ONCE));
        let measuring = Arc::new(Semaphore::new(MEASURED_AT_ONCE));
        Units { connection: Arc::default(), fetching, measuring }
    }
}

impl Units {
    /// Start a service; answered when systemd has taken it on, not when it runs.
    pub async fn start_transient(&self, service: &TransientService) -> Result<(), UnitsError> {
        let texts = |texts: &[&str]| -> Vec<String> { texts.iter().map(|text| (*text).to_owned()).collect() };
        let mut properties: Vec<(&str, Variant<'_>)> = vec![
            ("Description", service.description.as_str().into()),
            // `exec`: MainPID is known at once, and a program that cannot be run shows as the unit's failure.
            ("Type", "exec".into()),
            ("ExecStart", command(&service.argv).into()),
            ("Environment", service.environment().into()),
            ("LogExtraFields", vec![service.log_field.as_bytes().to_vec()].into()),
            ("SyslogIdentifier", service.syslog_identifier.as_str().into()),
            ("StandardInput", "null".into()),
            ("StandardOutput", service.output().into()),
            ("StandardError", service.output().into()),
            ("Before", texts(&[service.target]).into()),
            ("Wants", texts(&[service.target]).into()),
            ("After", texts(service.after).into()),
            // How often it is started is csid's business.
            ("StartLimitIntervalUSec", 0_u64.into()),
        ];
        // GetStats returns these. A drop-in may turn them off.
        let counted = ["CPUAccounting", "MemoryAccounting", "IOAccounting", "TasksAccounting"];
        properties.extend(counted.map(|counted| (counted, true.into())));
        if !service.credentials.is_empty() {
            properties.push(("LoadCredential", service.credentials.clone().into()));
        }
        if let Some(unit) = &service.requires {
            properties.push(("Requires", texts(&[unit]).into()));
            properties.push(("After", texts(&[unit]).into()));
        }
        properties.extend(service.settings.iter().cloned());
        self.start_transient_unit(&service.unit, &properties).await
    }

    /// Start a unit of these properties; answered when systemd has taken it on. One of the name that is loaded is `Exists`.
    pub(super) async fn start_transient_unit(
        &self,
        unit: &str,
        properties: &[(&str, Variant<'_>)],
    ) -> Result<(), UnitsError> {
        let auxiliary: [(&str, &[(&str, Variant<'_>)]); 0] = [];
        let body = (unit, "fail", properties, auxiliary.as_slice());
        let sends = properties.iter().any(|(_, value)| matches!(value, Variant::Fd(_)));
        let connection = if sends { self.sending().await } else { self.connection().await };
        let call = "StartTransientUnit";
        ask(connection, MANAGER_PATH, MANAGER_INTERFACE, call, unit, &body).await.map(drop)
    }

    /// Start a unit by the definition it has.
    pub async fn start(&self, unit: &str) -> Result<(), UnitsError> {
        self.manager("StartUnit", unit, &(unit, "fail")).await.map(drop)
    }

    /// Stop a unit and start it, and what was stopped for that with it; answered when the job is there.
    pub async fn restart(&self, unit: &str) -> Result<(), UnitsError> {
        self.manager("RestartUnit", unit, &(unit, "replace")).await.map(drop)
    }

    /// Forget a unit's failure, so that its name is free again.
    pub async fn reset_failed(&self, unit: &str) -> Result<(), UnitsError> {
        unless_unloaded(self.manager("ResetFailedUnit", unit, &(unit,)).await).map(drop)
    }

    /// Stop a unit and wait until it has stopped; systemd bounds that by the unit's stop time-out.
    pub async fn stop(&self, unit: &str) -> Result<(), UnitsError> {
        if unless_unloaded(self.manager("StopUnit", unit, &(unit, "replace")).await)?.is_none() {
            return Ok(());
        }
        // A subscription to the job's end would make PID 1 send csid every change of every unit of the host.
        let mut pause = Duration::from_millis(5);
        while self.state(unit).await?.is_some_and(|state| !state.at_rest()) {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(200));
        }
        Ok(())
    }

    /// `None`: no such unit is loaded.
    pub async fn state(&self, unit: &str) -> Result<Option<UnitState>, UnitsError> {
        let Some(path) = self.path(unit).await? else { return Ok(None) };
        self.state_at(unit, &path).await.map(Some)
    }

    async fn state_at(&self, unit: &str, path: &str) -> Result<UnitState, UnitsError> {
        Ok(UnitState {
            active: self.property(unit, path, "Unit", "ActiveState").await?,
            main_pid: self.property(unit, path, "Service", "MainPID").await?,
            result: self.property(unit, path, "Service", "Result").await?,
            exit: (
                self.property(unit, path, "Service", "ExecMainCode").await?,
                self.property(unit, path, "Service", "ExecMainStatus").await?,
            ),
        })
    }

    /// A service that somebody else defines, also one that is not there: systemd reads its definition if it has not.
    pub async fn found(&self, service: &str) -> Result<ForeignUnit, UnitsError> {
        let mut listed = self.listed(&[service]).await?;
        let (name, _, load, _, sub, _, path, job, ..) = listed.remove(0);
        let state = self.state_at(service, &path).await?;
        Ok(ForeignUnit { name, load, sub, has_job: job != 0, state })
    }

    /// Returns whether the system goes down: it is halted, powered off or rebooted.
    pub async fn is_system_stopping(&self) -> Result<bool, UnitsError> {
        let state: String = self.property("the system", MANAGER_PATH, "Manager", "SystemState").await?;
        Ok(state == "stopping")
    }

    /// The control group of a unit's processes, and the main one; `None`: it is not loaded, or has none.
    pub async fn control_group(&self, unit: &str) -> Result<Option<(String, u32)>, UnitsError> {
        let Some(path) = self.path(unit).await? else { return Ok(None) };
        let group: String = self.property(unit, &path, "Service", "ControlGroup").await?;
        let main_pid = self.property(unit, &path, "Service", "MainPID").await?;
        Ok((!group.is_empty()).then_some((group, main_pid)))
    }

    /// Whether a loaded unit would start what `service` says; a drop-in may have added to it. What the settings were is read from
    /// the description, for drop-ins change them.
    pub async fn is_defined_as(&self, service: &TransientService) -> Result<bool, UnitsError> {
        type Command = (String, Vec<String>, bool, u64, u64, u64, u64, u32, i32, i32);
        let unit = service.unit.as_str();
        let Some(path) = self.path(unit).await? else { return Ok(false) };
        let description: String = self.property(unit, &path, "Unit", "Description").await?;
        let commands: Vec<Command> = self.property(unit, &path, "Service", "ExecStart").await?;
        let environment: Vec<String> = self.property(unit, &path, "Service", "Environment").await?;
        let credentials: Vec<(String, String)> =
            self.property(unit, &path, "Service", "LoadCredential").await?;
        Ok(commands.len() == 1
            && commands[0].1 == arguments(&service.argv)
            && description == service.description
            && service.environment().iter().all(|one| environment.contains(one))
            && service.credentials.iter().all(|one| credentials.contains(one)))
    }

    /// Returns the states of `units`, in their order. One call to systemd asks for all of them.
    pub async fn seen(&self, units: &[&str]) -> Result<Vec<SeenUnit>, UnitsError> {
        let rows = self.listed(units).await?;
        let seen = |(name, _, _, active, _, _, path, job, ..): Listed| {
            let runs = !matches!(active.as_str(), "inactive" | "failed") || job != 0;
            SeenUnit { name, path: path.to_string(), runs }
        };
        Ok(rows.into_iter().map(seen).collect())
    }

    /// Returns those of `units` that run, or that a job is about to start. One call to systemd asks for all of them.
    pub async fn running(&self, units: &[&str]) -> Result<Vec<String>, UnitsError> {
        let seen = self.seen(units).await?;
        let running = units.iter().zip(seen).filter(|(_, seen)| seen.runs);
        Ok(running.map(|(unit, _)| (*unit).to_owned()).collect())
    }

    /// In the order of the question; under other names, where a unit has several.
    async fn listed(&self, units: &[&str]) -> Result<Vec<Listed>, UnitsError> {
        let call = "ListUnitsByNames";
        let rows = self.manager(call, "", &(units,)).await?;
        let failed = |source| UnitsError::Call { call, unit: String::new(), source };
        let rows: Vec<Listed> = rows.body().deserialize().map_err(failed)?;
        if rows.len() != units.len() {
            return Err(failed(zbus::Error::InvalidReply));
        }
        Ok(rows)
    }

    /// Everybody's unique name on the bus, after that of the bus itself: another one gives the same names again.
    pub async fn bus_names(&self) -> Result<Vec<String>, UnitsError> {
        const DBUS: &str = "org.freedesktop.DBus";
        let connection = self.connection().await.map_err(|source| UnitsError::NoManager { source })?;
        let failed = |source| UnitsError::Call { call: "ListNames", unit: String::new(), source };
        let asked = connection.call_method(Some(DBUS), "/org/freedesktop/DBus", Some(DBUS), "ListNames", &());
        let names: Vec<String> = asked.await.map_err(failed)?.body().deserialize().map_err(failed)?;
        let bus = connection.server_guid();
        Ok(names.iter().filter(|name| name.starts_with(':')).map(|name| format!("{bus}{name}")).collect())
    }

    /// Watch the main process of a unit that runs; `None`: it has none, or it has just changed.
    pub async fn watch(&self, unit: &str, pid: u32) -> Result<Option<MainProcess>, UnitsError> {
        let failed = |source| UnitsError::Watch { unit: unit.to_owned(), pid, source };
        let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let fd = match pidfd_open(raw, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            opened => opened.map_err(|errno| failed(errno.into()))?,
        };
        // Only if it is still the main process does the descriptor mean it: a pid may be given again.
        match self.state(unit).await? {
            Some(state) if state.main_pid == pid => {}
            _ => return Ok(None),
        }
        #[expect(deprecated, reason = "safe for an OwnedFd; what replaces it is unsafe for every type")]
        let fd = AsyncFd::new(fd).map_err(failed)?;
        Ok(Some(MainProcess { pid, fd }))
    }

    /// The service that csid runs in, and its object; `None`: it was not started by this systemd.
    pub(super) async fn own_unit(&self) -> Result<Option<(String, OwnedObjectPath)>, UnitsError> {
        let own = "csid's own";
        let pid = std::process::id();
        let Some(answer) = unless_unloaded(self.manager("GetUnitByPID", own, &(pid,)).await)? else {
            return Ok(None);
        };
        let failed = |source| UnitsError::Call { call: "GetUnitByPID", unit: own.to_owned(), source };
        let path: OwnedObjectPath = answer.body().deserialize().map_err(failed)?;
        let unit: String = self.property(own, &path, "Unit", "Id").await?;
        Ok(unit.ends_with(".service").then_some((unit, path)))
    }

    pub(super) async fn path(&self, unit: &str) -> Result<Option<OwnedObjectPath>, UnitsError> {
        let Some(answer) = unless_unloaded(self.manager("GetUnit", unit, &(unit,)).await)? else {
            return Ok(None);
        };
        let failed = |source| UnitsError::Call { call: "GetUnit", unit: unit.to_owned(), source };
        answer.body().deserialize().map(Some).map_err(failed)
    }

    pub(super) async fn property<T>(
        &self,
        unit: &str,
        path: &str,
        kind: &str,
        name: &str,
    ) -> Result<T, UnitsError>
    where
        T: TryFrom<OwnedVariant>,
        T::Error: Into<zbus::Error>,
    {
        let body = (format!("{MANAGER}.{kind}"), name);
        let answer = self.call(path, "org.freedesktop.DBus.Properties", "Get", unit, &body).await?;
        let failed = |source| UnitsError::Call { call: "Get", unit: unit.to_owned(), source };
        let value: OwnedVariant = answer.body().deserialize().map_err(failed)?;
        T::try_from(value).map_err(|error| failed(error.into()))
    }

    pub(super) async fn manager<B>(
        &self,
        call: &'static str,
        unit: &str,
        body: &B,
    ) -> Result<zbus::Message, UnitsError>
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        self.call(MANAGER_PATH, MANAGER_INTERFACE, call, unit, body).await
    }

    pub(super) async fn call<B>(
        &self,
        path: &str,
        interface: &str,
        call: &'static str,
        unit: &str,
        body: &B,
    ) -> Result<zbus::Message, UnitsError>
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        ask(self.connection().await, path, interface, call, unit, body).await
    }

    /// Another systemd than the host's.
    #[cfg(test)]
    pub async fn connect_to(&self, connection: zbus::Connection) {
        *self.connection.lock().await = Some(connection);
    }

    /// Returns a connection for one call with descriptors.
    async fn sending(&self) -> Result<zbus::Connection, zbus::Error> {
        #[cfg(test)]
        if let Some(connection) = self.connection.lock().await.clone() {
            return Ok(connection);
        }
        system_bus::sending_descriptors().await?.method_timeout(CALL).build().await
    }

    /// The connection, made again when the bus was restarted.
    async fn connection(&self) -> Result<zbus::Connection, zbus::Error> {
        let mut kept = self.connection.lock().await;
        if let Some(connection) = kept.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let connection = system_bus::without_descriptors().await?.method_timeout(CALL).build().await?;
        *kept = Some(connection.clone());
        Ok(connection)
    }
}

/// Asks systemd over this connection. `unit`: for the error.
async fn ask<B>(
    connection: zbus::Result<zbus::Connection>,
    path: &str,
    interface: &str,
    call: &'static str,
    unit: &str,
    body: &B,
) -> Result<zbus::Message, UnitsError>
where
    B: serde::Serialize + zbus::DynamicType,
{
    let connection = connection.map_err(|source| UnitsError::NoManager { source })?;
    let answer = connection.call_method(Some(MANAGER), path, Some(interface), call, body).await;
    answer.map_err(|source| match error_name(&source) {
        Some("org.freedesktop.systemd1.UnitExists") => UnitsError::Exists { unit: unit.to_owned() },
        Some("org.freedesktop.DBus.Error.ServiceUnknown") => UnitsError::NoManager { source },
        None if is_unknown(&source) => UnitsError::NoManager { source },
        _ => UnitsError::Call { call, unit: unit.to_owned(), source },
    })
}

/// The main process of a unit, watched by descriptor.
pub struct MainProcess {
    pub pid: u32,
    fd: AsyncFd<OwnedFd>,
}

impl MainProcess {
    /// Wait for its end; answered at once when it has ended.
    pub async fn ended(&self) {
        // An error would mean that the runtime is gone, and then nobody waits.
        let _ = self.fd.readable().await;
    }
}

/// argv is data: no `$NAME` in it is expanded. (Specifiers are not, in what comes over D-Bus.)
fn arguments(argv: &[String]) -> Vec<String> {
    argv.iter().map(|argument| argument.replace('$', "$$")).collect()
}

/// Returns a command as ExecStart= and similar properties take it. ExecStartEx has a flag against expansion, but systemd 252 writes
/// that to the unit's file in a form that the next daemon-reload does not understand.
pub(super) fn command(argv: &[String]) -> Vec<(String, Vec<String>, bool)> {
    vec![(argv.first().cloned().unwrap_or_default(), arguments(argv), false)]
}

/// The bus answers that nobody has the name.
fn is_unknown(error: &zbus::Error) -> bool {
    matches!(error, zbus::Error::FDO(error) if matches!(**error, zbus::fdo::Error::ServiceUnknown(_)))
}

fn error_name(error: &zbus::Error) -> Option<&str> {
    match error {
        zbus::Error::MethodError(name, _, _) => Some(name.as_str()),
        _ => None,
    }
}

fn unless_unloaded<T>(answer: Result<T, UnitsError>) -> Result<Option<T>, UnitsError> {
    match answer {
        Err(UnitsError::Call { source, .. })
            if error_name(&source).is_some_and(|name| ABSENT.contains(&name)) =>
        {
            Ok(None)
        }
        answer => answer.map(Some),
    }
}
