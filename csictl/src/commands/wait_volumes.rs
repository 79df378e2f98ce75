//! `csictl wait-volumes`: waits until csid has made the mounts again that come back after a reboot. csi-volumes.service runs it.

use std::ffi::OsStr;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::ensure;
use csid_client::{Client, Error, MountFilter, MountRow, ReconcileOptions, Restore, Target};
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use crate::args::WaitVolumes;
use crate::helpers::mount_table::MountTable;
use crate::output::{plain, print_json};
use crate::wait::{self, Progress};

/// The longest time between two looks at the rows, and the time between two tries to reach csid.
const PAUSES: (Duration, Duration) = (Duration::from_secs(2), Duration::from_millis(500));

/// The states of a mount that csid is about to make, or of which it does not know whether it is there.
const UNDER_WAY: [&str; 3] = ["waiting", "mounting", "uncertain"];

/// What a damaged journal means for the mounts of a boot.
const DAMAGED: &str = "csid's journal is damaged, it may lack mounts that come back after a reboot";

/// Why the wait has not ended.
enum Unfinished {
    /// csid cannot be reached.
    Unreachable(Error),
    /// csid has this state, and does not know all rows yet.
    State(String),
    /// No mount of this volume is known.
    Volume(String),
    /// These mounts are not there yet.
    Mounts(Vec<MountRow>),
    /// The journal is damaged: rows may be missing.
    Damaged,
}

/// Returns the exit code 1 if the deadline passes first, with the mounts that are missing on standard error.
pub async fn wait_volumes(target: &Target, args: WaitVolumes, json: bool) -> anyhow::Result<ExitCode> {
    ensure!(
        args.volumes.len().is_multiple_of(2),
        "volume {:?} has no name after its namespace",
        args.volumes.last()
    );
    let end = Instant::now() + args.deadline;
    let wanted: Vec<(&str, &str)> =
        args.volumes.chunks_exact(2).map(|pair| (pair[0].as_str(), pair[1].as_str())).collect();
    let unfinished = Mutex::new(None);
    let progress =
        async || unfinished.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Unfinished::progress);
    let waiting = wait::watched("wait for volumes", progress, restored(target, &wanted, &unfinished));
    if timeout_at(end, waiting).await.is_ok() {
        if json {
            print_json(&json!({ "waiting": [] }))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let seconds = args.deadline.as_secs_f64();
    match unfinished.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(Unfinished::Unreachable(error)) => return Err(error.into()),
        Some(Unfinished::Mounts(rows)) if json => print_json(&json!({ "waiting": rows }))?,
        Some(Unfinished::Mounts(rows)) => {
            eprintln!("csictl: {} mounts are missing after {seconds} s:", rows.len());
            for row in &rows {
                let (volume, consumer) = (format!("{}/{}", row.namespace, row.volume), &row.consumer);
                let reason = if row.error.is_empty() { String::new() } else { format!(": {}", row.error) };
                eprintln!("{}", plain(&format!("  {volume} for {consumer}: {}{reason}", shown_state(row))));
            }
        }
        Some(Unfinished::Volume(volume)) => {
            eprintln!("csictl: {volume} has no mount that csid makes again, after {seconds} s");
        }
        Some(Unfinished::State(state)) => eprintln!("csictl: csid is {state} after {seconds} s"),
        Some(Unfinished::Damaged) => {
            eprintln!("csictl: {DAMAGED}, after {seconds} s; see csid(8), A damaged journal");
        }
        None => eprintln!("csictl: csid has not answered within {seconds} s"),
    }
    Ok(ExitCode::FAILURE)
}

impl Unfinished {
    fn progress(&self) -> Progress {
        let of = |step: String| Progress { step, error: String::new() };
        match self {
            Self::Unreachable(error) => {
                Progress { step: "csid cannot be reached".to_owned(), error: error.to_string() }
            }
            Self::State(state) => of(format!("csid is {state}")),
            Self::Volume(volume) => of(format!("{volume} has no mount that csid makes again")),
            Self::Mounts(rows) => {
                let first = rows
                    .first()
                    .map(|row| format!(", {}/{} {}", row.namespace, row.volume, shown_state(row)));
                let error = rows.iter().map(|row| &row.error).find(|error| !error.is_empty());
                let step = format!("{} mounts are missing{}", rows.len(), first.unwrap_or_default());
                Progress { step, error: error.cloned().unwrap_or_default() }
            }
            Self::Damaged => of(DAMAGED.to_owned()),
        }
    }
}

fn set(unfinished: &Mutex<Option<Unfinished>>, now: Unfinished) {
    *unfinished.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
}

/// Waits until nothing is missing. `unfinished` has the reason while this waits.
async fn restored(target: &Target, wanted: &[(&str, &str)], unfinished: &Mutex<Option<Unfinished>>) {
    loop {
        let error = match Client::connect(target).await {
            Ok(client) => match watch(&client, wanted, unfinished).await {
                Ok(()) => return,
                Err(error) => error,
            },
            Err(error) => error,
        };
        // csid starts, or restarts.
        set(unfinished, Unfinished::Unreachable(error));
        tokio::time::sleep(PAUSES.1).await;
    }
}

/// Looks at the rows after each event, until nothing is missing.
async fn watch(
    client: &Client,
    wanted: &[(&str, &str)],
    unfinished: &Mutex<Option<Unfinished>>,
) -> csid_client::Result<()> {
    let mut events = client.follow(None).await?;
    loop {
        match missing(client, wanted).await? {
            None => return Ok(()),
            Some(missing) => set(unfinished, missing),
        }
        // A row may change without an event.
        if let Ok(news) = tokio::time::timeout(PAUSES.0, events.next()).await {
            news?;
        }
    }
}

/// Returns what is missing. `None`: nothing.
async fn missing(client: &Client, wanted: &[(&str, &str)]) -> csid_client::Result<Option<Unfinished>> {
    let state = client.manager().await?.state;
    if state == "starting" {
        return Ok(Some(Unfinished::State(state)));
    }
    let mut rows = client.list_mounts(MountFilter::default()).await?;
    if let Some((namespace, volume)) = wanted.iter().find(|name| is_unknown(&rows, name)) {
        return Ok(Some(Unfinished::Volume(format!("{namespace}/{volume}"))));
    }
    // Without the table nobody knows of a mount that it is gone.
    let table = MountTable::read().ok();
    let is_there = |source: &str| table.as_ref().is_none_or(|table| table.at(OsStr::new(source)).is_some());
    rows.retain(|row| is_missing(row, wanted, is_there));
    if !rows.is_empty() {
        return Ok(Some(Unfinished::Mounts(rows)));
    }
    Ok(match state.as_str() {
        "restoring" => Some(Unfinished::State(state)),
        // The rows of all named volumes are there.
        "degraded" if wanted.is_empty() && is_damaged(client).await? => Some(Unfinished::Damaged),
        _ => None,
    })
}

/// Returns whether csid's journal is damaged. `false` too for a caller that may not reconcile.
async fn is_damaged(client: &Client) -> csid_client::Result<bool> {
    // Only a csid with a damaged journal answers this.
    let begin =
        ReconcileOptions { dry_run: Some(true), new_journal: Some(true), ..ReconcileOptions::default() };
    match client.reconcile(begin).await {
        Ok(_) => Ok(true),
        Err(Error::Disconnected(reason)) => Err(Error::Disconnected(reason)),
        Err(_) => Ok(false),
    }
}

/// Returns whether no row has the volume as mounted, or as one that csid makes again. A volume that is named has to have such a row.
fn is_unknown(rows: &[MountRow], (namespace, volume): &(&str, &str)) -> bool {
    let is_it = |row: &MountRow| row.namespace == *namespace && row.volume == *volume;
    let comes = |row: &MountRow| row.restore == Restore::Auto.as_str() || row.healthy;
    !rows.iter().any(|row| is_it(row) && comes(row))
}

/// Returns whether csid is to make the mount by itself and has not done so. `wanted`: the volumes that count; empty: all. `is_there`: whether
/// something is mounted at a path. A csid that cannot write its journal keeps the rows of the last boot. Another mount that is not healthy does
/// not count: a wait does not mend it.
fn is_missing(row: &MountRow, wanted: &[(&str, &str)], is_there: impl Fn(&str) -> bool) -> bool {
    let is_gone = || row.state == "mounted" && !row.healthy && !is_there(&row.source);
    row.restore == Restore::Auto.as_str()
        && (wanted.is_empty() || wanted.contains(&(row.namespace.as_str(), row.volume.as_str())))
        && (UNDER_WAY.contains(&row.state.as_str()) || is_gone())
}

/// Returns the state of a missing mount. csid has one as mounted that is gone.
fn shown_state(row: &MountRow) -> &str {
    if row.state == "mounted" { "gone" } else { &row.state }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOWHERE: fn(&str) -> bool = |_| false;

    #[test]
    fn only_wanted_mounts_that_csid_makes_are_missing() {
        let row = |volume: &str, restore: &str, state: &str| MountRow {
            namespace: "prod".to_owned(),
            volume: volume.to_owned(),
            restore: restore.to_owned(),
            state: state.to_owned(),
            ..MountRow::default()
        };
        for state in UNDER_WAY {
            assert!(is_missing(&row("pg", "auto", state), &[], NOWHERE));
            assert!(is_missing(&row("pg", "auto", state), &[("prod", "web"), ("prod", "pg")], NOWHERE));
            assert!(!is_missing(&row("pg", "auto", state), &[("test", "pg"), ("prod", "web")], NOWHERE));
            assert!(!is_missing(&row("pg", "hold", state), &[], NOWHERE));
        }
        for state in ["lost", "unmounting"] {
            assert!(!is_missing(&row("pg", "auto", state), &[], NOWHERE));
        }
    }

    fn mounted(restore: &str, healthy: bool) -> MountRow {
        MountRow {
            namespace: "prod".to_owned(),
            volume: "pg".to_owned(),
            restore: restore.to_owned(),
            state: "mounted".to_owned(),
            source: "/live/pg".to_owned(),
            healthy,
            ..MountRow::default()
        }
    }

    #[test]
    fn mounted_row_without_its_mount_is_missing() {
        assert!(is_missing(&mounted("auto", false), &[], NOWHERE));
        assert!(is_missing(&mounted("auto", false), &[("prod", "pg")], NOWHERE));
        assert!(!is_missing(&mounted("auto", false), &[("prod", "web")], NOWHERE));
        assert!(!is_missing(&mounted("auto", true), &[], NOWHERE));
        assert!(!is_missing(&mounted("hold", false), &[], NOWHERE));
        let step = Unfinished::Mounts(vec![mounted("auto", false)]).progress().step;
        assert_eq!(step, "1 mounts are missing, prod/pg gone");
        // Its server hangs, or is dead.
        assert!(!is_missing(&mounted("auto", false), &[], |source| source == "/live/pg"));
    }

    #[test]
    fn named_volume_that_does_not_come_is_unknown() {
        let pg = ("prod", "pg");
        assert!(is_unknown(&[], &pg));
        assert!(is_unknown(&[mounted("hold", false)], &pg));
        assert!(!is_unknown(&[mounted("hold", true)], &pg));
        assert!(!is_unknown(&[mounted("hold", false), mounted("auto", false)], &pg));
        assert!(is_unknown(&[mounted("auto", true)], &("prod", "web")));
    }

    #[test]
    fn damaged_journal_is_named_in_the_progress() {
        assert!(Unfinished::Damaged.progress().step.starts_with("csid's journal is damaged"));
    }
}
