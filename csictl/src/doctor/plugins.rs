//! Plugins: their health, and files, directories and rows of plugins that csid does not know.

use std::collections::BTreeSet;

use csid_client::{Client, MountFilter, VolumeFilter};

use super::bounded::ask;
use super::files::State;
use super::finding::Report;
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
                "`csictl plugin register {}`, or start the plugin that registers itself",
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
    for id in state.roots.iter().filter(|id| !known.contains(*id)) {
        let found = format!("it is not registered, and its directory {ROOTS}/{id} is there");
        let remedy = format!(
            "if the plugin shall serve: `csictl plugin register {}`; else look for mounts (`findmnt -R {ROOTS}/{id}`), then \
             remove the directory",
            quoted(id)
        );
        report.note(&format!("plugin {id}"), &found, &remedy);
    }
}
