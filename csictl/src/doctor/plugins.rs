//! Plugins: their health, and files, directories and rows of plugins that csid does not know.

use std::collections::BTreeSet;

use csid_client::{Client, MountFilter, VolumeFilter};

use super::bounded::ask;
use super::files::State;
use super::finding::Report;
use crate::helpers::mount_table::MountTable;
use crate::hints;
use crate::shell::quoted;

const ROOTS: &str = "/var/lib/csid/plugins";
const FILES: &str = "/etc/csid/plugins.d";

pub async fn look(client: &Client, state: &State, report: &mut Report) {
    let rows = match ask(client.list_plugins()).await {
        Ok(rows) => rows,
        Err(error) => {
            return report.warning(
                "plugins",
                &format!("csid does not list them: {error}"),
                "run doctor as root",
            );
        }
    };
    let known: BTreeSet<String> = rows.iter().map(|row| row.id.clone()).collect();
    for id in &known {
        match ask(client.plugin(id)).await {
            Ok(plugin) if plugin.healthy => report.ok(&format!("plugin {id}"), "it serves"),
            Ok(plugin) => {
                let found = match plugin.health_message.as_str() {
                    "" => format!("it is {}", plugin.state),
                    message => format!("it is {}: {message}", plugin.state),
                };
                let remedy = match hints::unhealthy(&plugin) {
                    next if next.is_empty() => {
                        format!("`csictl plugin show {0}`, `csictl plugin logs {0}`", quoted(id))
                    }
                    next => next,
                };
                match plugin.state.as_str() {
                    "starting" | "probing" => report.warning(&format!("plugin {id}"), &found, &remedy),
                    _ => report.error(&format!("plugin {id}"), &found, &remedy),
                }
            }
            // It was unregistered meanwhile.
            Err(_) => {}
        }
    }
    if known.is_empty() {
        report.note("plugins", "none is registered", "`csictl plugin register --help`");
    }
    missing(client, &known, report).await;
    unknown(&known, state, report);
}

/// Names plugins that volumes and mounts need, and that are not registered.
async fn missing(client: &Client, known: &BTreeSet<String>, report: &mut Report) {
    let declared = VolumeFilter { declared: Some(true), ..VolumeFilter::default() };
    let volumes = ask(client.volume_pages(declared).rest()).await.unwrap_or_default();
    let mounts = ask(client.mount_pages(MountFilter::default()).rest()).await.unwrap_or_default();
    let users = volumes
        .iter()
        .map(|volume| (&volume.plugin, format!("volume {}/{}", volume.namespace, volume.id)))
        .chain(
            mounts
                .iter()
                .map(|mount| (&mount.plugin, format!("a mount of {}/{}", mount.namespace, mount.volume))),
        );
    let mut named = BTreeSet::new();
    for (plugin, user) in users {
        if !known.contains(plugin) && named.insert(plugin.clone()) {
            let remedy = format!(
                "`csictl plugin register {} --socket PATH`, or start the plugin that registers itself",
                quoted(plugin)
            );
            report.error(
                &format!("plugin {plugin}"),
                &format!("it is not registered, and {user} needs it"),
                &remedy,
            );
        }
    }
}

/// Names files and directories of plugins that are not registered.
fn unknown(known: &BTreeSet<String>, state: &State, report: &mut Report) {
    let files = state.files.iter().filter(|id| !known.contains(*id));
    for id in files {
        let remedy = "`csictl check-config`, then `csictl reload`";
        report.error(
            &format!("plugin {id}"),
            &format!("{FILES}/{id}.toml defines it, and csid does not know it"),
            remedy,
        );
    }
    let table = MountTable::read().ok();
    for id in state.roots.iter().filter(|id| !known.contains(*id)) {
        let mounts = table.as_ref().map(|table| table.within(&state.real_roots.join(id)));
        let (found, remedy) = unregistered(id, mounts);
        report.note(&format!("plugin {id}"), &found, &remedy);
    }
}

/// Returns the finding of an unregistered plugin's directory, and the next step. `mounts`: how many are at or below the directory. `None`:
/// the mount table cannot be read.
fn unregistered(id: &str, mounts: Option<usize>) -> (String, String) {
    let directory = format!("{ROOTS}/{id}");
    let register = format!("`csictl plugin register {} --socket PATH`", quoted(id));
    let found = format!("it is not registered, and its directory {directory} is there");
    match mounts {
        Some(0) => {
            let remove = format!("`find {} -xdev -depth -type d -empty -delete`", quoted(&directory));
            let remedy = format!(
                "if the plugin shall serve: {register}; else {remove} removes its empty directories, and leaves files"
            );
            (found, remedy)
        }
        Some(count) => {
            let remedy = format!(
                "{register}, or `csictl unmount` for each mount of `csictl mounts`; remove nothing in the directory while \
                 volumes are mounted there"
            );
            (format!("{found}; mounts in it: {count}"), remedy)
        }
        None => (
            format!("{found}; its mounts cannot be counted"),
            format!("{register}; remove nothing in the directory"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_with_mounts_is_not_removed() {
        let (found, remedy) = unregistered("old", Some(2));
        assert!(found.ends_with("/var/lib/csid/plugins/old is there; mounts in it: 2"), "{found}");
        assert!(
            remedy.contains("`csictl plugin register old --socket PATH`")
                && remedy.contains("`csictl unmount`"),
            "{remedy}"
        );
        for mounts in [Some(2), None] {
            let (_, remedy) = unregistered("old", mounts);
            assert!(!["find ", "-delete", "rm "].iter().any(|word| remedy.contains(word)), "{remedy}");
        }
        let (found, remedy) = unregistered("an old", Some(0));
        assert!(found.ends_with("is there"), "{found}");
        let due = "`find '/var/lib/csid/plugins/an old' -xdev -depth -type d -empty -delete`";
        assert!(remedy.contains(due), "{remedy}");
    }
}
