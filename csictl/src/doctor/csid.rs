//! What csid itself says. Each call has a time limit.

use std::ffi::OsStr;

use csid_client::{
    CallOptions, ClaimFilter, Client, Error, Manager, MountFilter, MountRow, OperationRow, ReconcileOptions,
    Target, VolumeFilter,
};
use rustix::process::geteuid;
use tokio::time::timeout;

use super::bounded::{LIMIT, ask};
use super::files::State;
use super::finding::Report;
use super::plugins;
use super::units::Units;
use crate::commands::cluster::present;
use crate::helpers::mount_table::MountTable;
use crate::hints::{self, Tried};
use crate::output::cluster_line;
use crate::shell::quoted;

/// The rows of a kind that are named one by one. Of more there is only the number.
const MOST: usize = 20;
/// An operation that is older than this has a finding, in microseconds.
const OLD: u64 = 10 * 60 * 1_000_000;

/// Returns csid's mounts. `None`: csid cannot be reached.
pub async fn look(
    target: &Target,
    units: &Units,
    files: &State,
    report: &mut Report,
) -> Option<Vec<MountRow>> {
    if let Some(why) = units.stopped() {
        report.error(
            "csid",
            &format!("csid cannot be reached: {why}"),
            "the findings about csid's units have the next step",
        );
        return None;
    }
    let connecting = async {
        let client = Client::connect(target).await?;
        let manager = client.manager().await?;
        Ok::<_, Error>((client, manager))
    };
    let (client, manager) = match timeout(LIMIT, connecting).await {
        Ok(Ok(connected)) => connected,
        Ok(Err(error)) => {
            let remedy = hints::hint(&error, &Tried { command: "doctor", ..Tried::default() });
            let found = format!("csid cannot be reached: {error}");
            report.error("csid", &found, &remedy.unwrap_or_default());
            return None;
        }
        Err(_) => {
            let found = format!("csid cannot be reached: no answer within {} s", LIMIT.as_secs());
            report.error("csid", &found, "`systemctl status csid`; `journalctl -u csid -n 50`; `systemctl restart csid` changes no mount");
            return None;
        }
    };
    let before = report.len();
    state(&client, &manager, report).await;
    cluster(&client, &manager, report).await;
    plugins::look(&client, files, report).await;
    volumes(&client, report).await;
    let rows = mounts(&client, report).await;
    claims(&client, report).await;
    operations(&client, report).await;
    orphans(&client, report).await;
    if report.len() == before {
        report.ok("csid", &format!("csid is {}, and all that it knows is in order", manager.state));
    }
    Some(rows)
}

async fn state(client: &Client, manager: &Manager, report: &mut Report) {
    let own = env!("CARGO_PKG_VERSION");
    if manager.version != own {
        let found = format!("csid's version is {}, and that of csictl {own}", manager.version);
        report.warning("csid", &found, "install the same version of both, then `systemctl restart csid`");
    }
    match manager.state.as_str() {
        "starting" | "restoring" => {
            let found = format!("csid is {}: mounts are taken over or made again", manager.state);
            report.note("csid", &found, "wait; `csictl wait-volumes`, then `csictl doctor` again");
        }
        "stopping" => report.warning("csid", "csid is stopping", "`systemctl status csid`"),
        // Only a csid with a damaged journal answers this.
        "degraded" => {
            let begin = ReconcileOptions {
                dry_run: Some(true),
                new_journal: Some(true),
                ..ReconcileOptions::default()
            };
            if ask(client.reconcile(begin)).await.is_ok() {
                let remedy =
                    "put a backup back, or `csictl reconcile --new-journal`: csid(8), A damaged journal";
                report.error("journal", "the journal is damaged: csid refuses all changes", remedy);
            }
        }
        _ => {}
    }
}

/// Says in one line how this host is in its cluster. A host without one has no line.
async fn cluster(client: &Client, manager: &Manager, report: &mut Report) {
    let Ok(Some(row)) = timeout(LIMIT, present(client, &manager.features)).await else { return };
    let found = cluster_line(&row);
    match row.state.as_str() {
        "joined" if row.owed == 0 => report.ok("cluster", &found),
        "joined" => report.note("cluster", &found, "csid repeats it; `csictl cluster status`"),
        "joining" => report.note("cluster", &found, "wait; `csictl cluster status`"),
        "refused" | "fenced" => report.error("cluster", &found, REFUSED),
        _ => {
            report.warning("cluster", &found, "`systemctl status csid-link`; `journalctl -u csid-link -n 20`")
        }
    }
}

/// What an operator looks at when servers refuse this host.
const REFUSED: &str =
    "an operator sees why: `csictl node show NODE`; /usr/share/doc/csid/docs/troubleshooting.md, Clusters";

/// Adds the failure of a call as a finding.
fn refused(subject: &str, error: &str, report: &mut Report) {
    report.warning(subject, &format!("csid does not list them: {error}"), "run doctor as root");
}

async fn volumes(client: &Client, report: &mut Report) {
    let filter = VolumeFilter { declared: Some(true), ..VolumeFilter::default() };
    let rows = match ask(client.volume_pages(filter).rest()).await {
        Ok(rows) => rows,
        Err(error) => return refused("volumes", &error, report),
    };
    let mut bad: Vec<_> =
        rows.into_iter().filter(|row| row.standing != "registered" || !row.schedulable).collect();
    cut("volumes", &mut bad, report);
    for row in bad {
        let (name, volume) = (format!("volume {}/{}", row.namespace, row.id), words(&row.namespace, &row.id));
        let explain = format!("`csictl explain {volume}`");
        match row.standing.as_str() {
            "declared" => {
                report.warning(&name, "a file of volumes.d declares it, and it is not registered", &explain)
            }
            "creating" | "deleting" => {
                let found = format!("it is {}, and the plugin has not given a definite answer", row.standing);
                report.warning(&name, &found, &explain);
            }
            _ => {
                let found = format!(
                    "it cannot be used now: plugin {} does not serve what the volume needs",
                    row.plugin
                );
                report.warning(&name, &found, &format!("`csictl plugin show {}`", quoted(&row.plugin)));
            }
        }
    }
}

/// Returns all rows.
async fn mounts(client: &Client, report: &mut Report) -> Vec<MountRow> {
    let rows = match ask(client.mount_pages(MountFilter::default()).rest()).await {
        Ok(rows) => rows,
        Err(error) => {
            refused("mounts", &error, report);
            return Vec::new();
        }
    };
    let is_bad = |row: &MountRow| match row.state.as_str() {
        "mounted" => !row.healthy,
        "mounting" | "unmounting" => !row.error.is_empty(),
        _ => true,
    };
    let mut bad: Vec<_> = rows.iter().filter(|row| is_bad(row)).collect();
    cut("mounts", &mut bad, report);
    for row in bad {
        let name = format!("mount {}/{} for {}", row.namespace, row.volume, row.consumer);
        let remedy = remedy(client, row).await;
        let error = if row.error.is_empty() { String::new() } else { format!(": {}", row.error) };
        let found =
            format!("it is {}{error}", if row.state == "mounted" { "not healthy" } else { &row.state });
        match row.state.as_str() {
            "mounted" | "uncertain" => report.error(&name, &found, &remedy),
            _ => report.warning(&name, &found, &remedy),
        }
    }
    rows
}

/// Returns what ends the state of a mount, as `csictl explain` says it.
async fn remedy(client: &Client, row: &MountRow) -> String {
    let volume = words(&row.namespace, &row.volume);
    let explain = format!("`csictl explain {volume}`");
    match ask(client.explain(&row.namespace, &row.volume, CallOptions::default())).await {
        Ok(explained) => {
            let tried = Tried { command: "explain", volume: Some(volume), ..Tried::default() };
            let next = hints::explained(&explained, std::slice::from_ref(row), &tried);
            if next.is_empty() { explain } else { next }
        }
        Err(_) => explain,
    }
}

async fn claims(client: &Client, report: &mut Report) {
    let rows = match ask(client.claim_pages(ClaimFilter::default()).rest()).await {
        Ok(rows) => rows,
        Err(error) => return refused("claims", &error, report),
    };
    let mut bad: Vec<_> =
        rows.into_iter().filter(|row| row.state == "parked" || !row.error.is_empty()).collect();
    cut("claims", &mut bad, report);
    for row in bad {
        let name = format!("claim of {}/{} by {}", row.namespace, row.volume, row.consumer);
        let (found, explain) = (
            format!("it is {}: {}", row.state, row.error),
            format!("`csictl explain {}`", words(&row.namespace, &row.volume)),
        );
        match row.state.as_str() {
            "parked" => report.error(&name, &found, &explain),
            _ => report.warning(&name, &found, &explain),
        }
    }
}

async fn operations(client: &Client, report: &mut Report) {
    let Ok(rows) = ask(client.list_operations()).await else { return };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
    let mut old: Vec<OperationRow> =
        rows.into_iter().filter(|row| now.saturating_sub(row.since) > OLD).collect();
    // A command in a plugin may run for days.
    old.retain(|row| row.kind != "exec");
    cut("operations", &mut old, report);
    for row in old {
        let minutes = now.saturating_sub(row.since) / 60_000_000;
        let found =
            format!("the {} of {} has run for {minutes} min, now at {:?}", row.kind, row.subject, row.step);
        let remedy = match row.subject.split_once('/') {
            Some((namespace, volume)) => {
                format!("`csictl explain {}`; `csictl cancel {}`", words(namespace, volume), quoted(&row.id))
            }
            None => format!("`csictl plugin show {}`", quoted(&row.subject)),
        };
        report.warning(&format!("operation {}", row.id), &found, &remedy);
    }
}

/// Names what the journal and the kernel disagree about. A dry run changes nothing.
async fn orphans(client: &Client, report: &mut Report) {
    if !geteuid().is_root() {
        return report.ok("orphans", "only root can look for mounts that csid does not know");
    }
    let options = ReconcileOptions { dry_run: Some(true), ..ReconcileOptions::default() };
    let mut found = match ask(client.reconcile(options)).await {
        Ok(found) => found,
        Err(error) => {
            return report.warning(
                "orphans",
                &format!("they cannot be looked for: {error}"),
                "`csictl reconcile --dry-run`",
            );
        }
    };
    let count = found.orphans.len();
    cut("orphans", &mut found.orphans, report);
    let table = MountTable::read().ok();
    for orphan in found.orphans {
        let is_mounted = table.as_ref().is_none_or(|table| table.at(OsStr::new(&orphan)).is_some());
        report.warning("orphan", &format!("no row explains {orphan}"), &orphan_remedy(&orphan, is_mounted));
    }
    if count > 0 {
        let remedy =
            format!("`csictl reconcile --remove-orphans` removes all {count}; look at each of them first");
        report.note("orphans", &format!("no row explains {count} paths"), &remedy);
    }
    cut("differences", &mut found.failed, report);
    for failed in found.failed {
        report.warning("reconcile", &failed, "`csictl reconcile` tries to repair it");
    }
}

/// Returns how one orphan is looked at and removed.
fn orphan_remedy(path: &str, is_mounted: bool) -> String {
    let path = quoted(path);
    match is_mounted {
        true => format!("`findmnt {path}` shows it; if nothing uses it: `umount {path}`"),
        false => format!("`ls -la {path}` shows it; if it is an empty directory: `rmdir {path}`"),
    }
}

/// Leaves the first rows, and notes how many there are.
fn cut<T>(what: &str, rows: &mut Vec<T>, report: &mut Report) {
    if rows.len() > MOST {
        report.note(what, &format!("{} of them have findings; the first {MOST} are named", rows.len()), "");
        rows.truncate(MOST);
    }
}

pub fn words(namespace: &str, volume: &str) -> String {
    format!("{} {}", quoted(namespace), quoted(volume))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_of_an_orphan_is_for_it_alone() {
        let mounted = orphan_remedy("/var/lib/csid/plugins/p/publish/a b", true);
        assert!(mounted.contains("`umount '/var/lib/csid/plugins/p/publish/a b'`"), "{mounted}");
        let directory = orphan_remedy("/p/publish/a", false);
        assert!(directory.contains("`rmdir /p/publish/a`") && !directory.contains("umount"), "{directory}");
        assert!(!mounted.contains("--remove-orphans") && !directory.contains("--remove-orphans"));
    }
}
