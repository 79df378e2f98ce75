//! The process of a plugin that csid supervises: in a transient unit that csid starts, adopts and stops, or in a unit that
//! somebody else has defined, which csid only starts. It outlives csid; who watches it is the plugin's task, the only one.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use crate::host::units::{ForeignUnit, MainProcess, TransientService, Units, UnitsError};
use crate::plugin::errors::start::{StartError, how_it_ended};
use crate::plugin::namespace;
use crate::plugin::place::Location;
use crate::plugin::spec::{Log, PluginSpec, Supervision, split_credential};
use crate::plugin::unit_settings;

/// The mode of a directory that every user may write in.
const OPEN: u32 = 0o777;
/// The target that orders plugins at shutdown. csid's package has it.
const TARGET: &str = "csi-plugins.target";
/// Units that a plugin may need to flush its volumes. At shutdown they stop after it. The target's unit names the same ones. None of
/// them is ordered after remote-fs-pre.target, since a mount of csid's may be.
const STORAGE: &[&str] =
    &["network.target", "iscsid.service", "open-iscsi.service", "multipathd.service", "rpcbind.service"];
/// How long a unit may take to say what it is doing.
const SETTLE: Duration = Duration::from_secs(30);

/// How often a unit is looked at that somebody else may start.
const LOOK: Duration = Duration::from_secs(1);

/// systemd forgets a transient unit that ended well.
const ENDED_WELL: &str = "it exited with status 0";

/// A running process: found, or made now.
pub(super) struct Running {
    pub process: MainProcess,
    pub started: bool,
}

/// Makes sure that the plugin's unit runs, csid's own or another's.
pub(super) async fn ensure(
    units: &Units,
    id: &str,
    spec: &PluginSpec,
    place: &Location,
) -> Result<Running, StartError> {
    match spec.supervision {
        Supervision::Unit => adopt(units, &place.unit).await,
        Supervision::Managed | Supervision::External => own(units, id, spec, place).await,
    }
}

/// A unit that somebody else has defined. What systemd is about to do with it, its own `Restart=` among that, is waited
/// for: it is started only when nobody else does.
async fn adopt(units: &Units, unit: &str) -> Result<Running, StartError> {
    let mut started = false;
    let mut pause = Duration::from_millis(10);
    let until = tokio::time::Instant::now() + SETTLE;
    loop {
        let found = units.found(unit).await?;
        refuse_unloaded(unit, &found)?;
        let ForeignUnit { sub, has_job, state, .. } = found;
        match state.active.as_str() {
            // Before it says that it is ready it is watched already.
            "activating" if state.main_pid != 0 => {
                if let Some(process) = units.watch(unit, state.main_pid).await? {
                    return Ok(Running { process, started });
                }
            }
            _ if has_job => {}
            "active" | "reloading" if state.main_pid == 0 => {
                return Err(StartError::NoProcess { unit: unit.to_owned() });
            }
            "active" | "reloading" => {
                if let Some(process) = units.watch(unit, state.main_pid).await? {
                    return Ok(Running { process, started });
                }
            }
            "inactive" | "failed" if started => {
                return Err(StartError::Ended { unit: unit.to_owned(), how: how_it_ended(&state) });
            }
            "inactive" | "failed" => {
                // How often it is started is csid's business.
                units.reset_failed(unit).await?;
                units.start(unit).await?;
                started = true;
            }
            _ => {}
        }
        if tokio::time::Instant::now() > until {
            let active = format!("{} ({sub})", state.active);
            return Err(StartError::Stuck { unit: unit.to_owned(), active });
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

fn refuse_unloaded(unit: &str, found: &ForeignUnit) -> Result<(), StartError> {
    let unit = unit.to_owned();
    match found.load.as_str() {
        "loaded" if found.name == unit => Ok(()),
        "loaded" => Err(StartError::Alias { unit, name: found.name.clone() }),
        "not-found" => Err(StartError::NotFound { unit }),
        "masked" => Err(StartError::Masked { unit }),
        load => Err(StartError::NotLoaded { unit, load: load.to_owned() }),
    }
}

/// Waits until a unit that csid has not defined is started by others. It polls PID 1, for a subscription would send csid
/// every change of every unit of the host.
pub(super) async fn started_by_others(units: &Units, unit: &str) {
    loop {
        tokio::time::sleep(LOOK).await;
        if let Ok(found) = units.found(unit).await
            && (found.state.main_pid != 0 || found.state.active == "activating")
        {
            return;
        }
    }
}

/// Stop a unit that somebody else has defined, and start it: answered when its process has ended; the next one is waited for by
/// [`ensure`].
pub(super) async fn restart(units: &Units, place: &Location) -> Result<(), UnitsError> {
    let unit = &place.unit;
    let ends = units.found(unit).await?.state.main_pid;
    units.reset_failed(unit).await?;
    units.restart(unit).await?;
    let mut pause = Duration::from_millis(5);
    loop {
        // systemd bounds it by the unit's stop time-out; without a job nobody ends it any more.
        let found = units.found(unit).await?;
        if ends == 0 || found.state.main_pid != ends || !found.has_job {
            return Ok(());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

/// Make sure that the plugin's own unit runs. One that does is adopted as it is, whatever it was started with.
async fn own(units: &Units, id: &str, spec: &PluginSpec, place: &Location) -> Result<Running, StartError> {
    let unit = &place.unit;
    let mut started = false;
    let mut pause = Duration::from_millis(5);
    let until = tokio::time::Instant::now() + SETTLE;
    loop {
        let state = units.state(unit).await?;
        let active = state.as_ref().map_or("unloaded", |state| state.active.as_str()).to_owned();
        match state {
            Some(state) if matches!(active.as_str(), "active" | "activating" | "reloading") => {
                if let Some(process) = units.watch(unit, state.main_pid).await? {
                    return Ok(Running { process, started });
                }
            }
            Some(state) if state.at_rest() && started => {
                return Err(StartError::Ended { unit: unit.clone(), how: how_it_ended(&state) });
            }
            Some(state) if !state.at_rest() => {}
            None if started => {
                return Err(StartError::Ended { unit: unit.clone(), how: ENDED_WELL.into() });
            }
            rest => {
                start(units, id, spec, place, rest.is_some()).await?;
                started = true;
            }
        }
        if tokio::time::Instant::now() > until {
            return Err(StartError::Stuck { unit: unit.clone(), active });
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

async fn start(
    units: &Units,
    id: &str,
    spec: &PluginSpec,
    place: &Location,
    loaded: bool,
) -> Result<(), StartError> {
    spec.check_start()?;
    let requires = namespace::prepare(units, &spec.network, place.network.as_ref()).await?;
    prepare_socket(place).map_err(|source| StartError::Socket { path: place.socket.clone(), source })?;
    if loaded {
        units.reset_failed(&place.unit).await?;
    }
    let service = TransientService { requires, ..service(id, spec, place) };
    match units.start_transient(&service).await {
        // systemd forgets a unit that is at rest, but not while processes are left in it: they may be mounts.
        Err(UnitsError::Exists { unit }) => {
            if !units.is_defined_as(&service).await? {
                return Err(StartError::Leftovers { unit });
            }
            Ok(units.start(&unit).await?)
        }
        answer => Ok(answer?),
    }
}

fn service(id: &str, spec: &PluginSpec, place: &Location) -> TransientService {
    let credential = |credential: &String| {
        let (name, path) = split_credential(credential);
        (name.to_owned(), path.unwrap_or(name).to_owned())
    };
    TransientService {
        unit: place.unit.clone(),
        description: unit_settings::description(id, spec),
        argv: spec.argv.clone(),
        environment: place.environment(spec),
        credentials: spec.credentials.iter().map(credential).collect(),
        log_field: format!("CSI_PLUGIN={id}"),
        syslog_identifier: id.to_owned(),
        journal: spec.log == Log::Journal,
        target: TARGET,
        after: STORAGE,
        requires: None,
        settings: unit_settings::settings(spec, place),
    }
}

/// csid owns the socket's directory (CSI rule 5), and a socket nobody listens at is in the way of the
/// plugin's bind.
fn prepare_socket(place: &Location) -> io::Result<()> {
    if let Some(directory) = &place.directory {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        // The uid of a user that systemd makes is not known before the start. That user, and nobody else, comes to the directory
        // by a bind of its unit's: the one above is root's alone.
        let set = |directory: &Path, mode| std::fs::set_permissions(directory, Permissions::from_mode(mode));
        let is_open = std::fs::symlink_metadata(directory)?.mode() & OPEN == OPEN;
        match (&place.user, directory.parent()) {
            (Some(_), Some(above)) => set(above, 0o700).and_then(|()| set(directory, OPEN))?,
            // The plugin had a user of its own before.
            _ if is_open => set(directory, 0o700)?,
            _ => {}
        }
    }
    match std::fs::symlink_metadata(&place.socket) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(&place.socket),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is something that is no socket")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Stop the unit, and forget its socket.
pub(super) async fn stop(units: &Units, place: &Location) -> Result<(), UnitsError> {
    units.stop(&place.unit).await?;
    units.reset_failed(&place.unit).await?;
    if let Some(directory) = &place.directory {
        let removed = std::fs::remove_file(&place.socket)
            .or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
            .and_then(|()| std::fs::remove_dir(directory));
        if let Err(error) = removed {
            tracing::debug!(directory = %directory.display(), %error, "the socket's directory stays");
        }
        // Another instance's directory may be there too.
        let _ = directory.parent().map(std::fs::remove_dir);
    }
    Ok(())
}

/// Why a process that has ended did so, asked of systemd, which may need a moment to know.
pub(super) async fn end_of(units: &Units, unit: &str) -> String {
    for _ in 0..20 {
        match units.state(unit).await {
            // Not at rest for long is one that systemd starts again.
            Ok(Some(state)) if state.at_rest() || (state.main_pid == 0 && state.exit.0 != 0) => {
                return how_it_ended(&state);
            }
            Ok(Some(_)) => tokio::time::sleep(Duration::from_millis(25)).await,
            Ok(None) => return ENDED_WELL.into(),
            Err(error) => return error.to_string(),
        }
    }
    "its main process ended".into()
}
