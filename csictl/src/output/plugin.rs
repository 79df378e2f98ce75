//! Output about plugins, and their volumes and snapshots.

use std::collections::BTreeSet;

use csi_proto::time::timestamp;
use csid_client::{DrainReport, ExternalRow, Plugin, PluginRow, SnapshotRow};
use serde::Serialize;

use super::text::{facts, plain, table};
use super::volume::known;

/// A consumer that has a volume.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Consumer {
    consumer: String,
    namespace: String,
    volume: String,
}

impl Consumer {
    pub fn new(consumer: &str, namespace: &str, volume: &str) -> Self {
        let [consumer, namespace, volume] = [consumer, namespace, volume].map(str::to_owned);
        Self { consumer, namespace, volume }
    }
}

/// The limit of listed consumers, because a host may have ten thousand.
const CONSUMERS: usize = 16;

pub fn plugins(rows: &[PluginRow]) -> String {
    table(
        ["PLUGIN", "STATE", "SUPERVISION", "PROVIDER"],
        rows.iter().map(|p| [p.id.clone(), p.state.clone(), p.supervision.clone(), p.provider.clone()]),
    )
}

pub fn plugin(p: &Plugin, consumers: &BTreeSet<Consumer>, next: String) -> String {
    let mut topology: Vec<_> = p.topology.iter().map(|(key, value)| format!("{key}={value}")).collect();
    topology.sort();
    let health = match (p.healthy, p.health_message.as_str()) {
        (true, "") => "healthy".to_owned(),
        (true, message) => format!("healthy, {message}"),
        (false, "") => "not healthy".to_owned(),
        (false, message) => format!("not healthy: {message}"),
    };
    let used = |of: &Consumer| format!("{} ({}/{})", of.consumer, of.namespace, of.volume);
    let mut names: Vec<_> = consumers.iter().take(CONSUMERS).map(used).collect();
    if consumers.len() > CONSUMERS {
        names.push(format!("and {} more", consumers.len() - CONSUMERS));
    }
    facts([
        ("plugin", p.id.clone()),
        ("state", p.state.clone()),
        ("health", health),
        ("do", next),
        ("provider", format!("{} {}", p.provider, p.provider_version).trim().to_owned()),
        ("supervision", p.supervision.clone()),
        ("unit", p.unit.clone()),
        ("socket", p.socket.clone()),
        ("instances", p.instances.join(" ")),
        ("restarts", p.restarts.to_string()),
        ("log", p.log.clone()),
        ("owner", format!("uid {}", p.owner)),
        ("services", p.services.join(" ")),
        ("plugin can", p.plugin_capabilities.join(" ")),
        ("node can", p.node_capabilities.join(" ")),
        ("controller can", p.controller_capabilities.join(" ")),
        ("node id", p.node_id.clone()),
        ("volumes", if p.max_volumes > 0 { format!("at most {}", p.max_volumes) } else { String::new() }),
        ("topology", topology.join(" ")),
        ("consumers", names.join(", ")),
    ])
}

pub fn drained(report: &DrainReport) -> String {
    let groups = [
        ("unmounted", &report.unmounted),
        ("still mounted", &report.failed),
        ("claimed as before", &report.claimed),
    ];
    let lines: String = groups
        .iter()
        .flat_map(|(what, subjects)| {
            subjects.iter().map(move |subject| format!("{what}: {}\n", plain(subject)))
        })
        .collect();
    if lines.is_empty() { "The plugin had no mounts.".to_owned() } else { lines }
}

pub fn external_volumes(rows: &[ExternalRow]) -> String {
    table(
        ["EXTERNAL-ID", "CAPACITY", "NODES", "NOTE"],
        rows.iter().map(|v| {
            let note = match (v.abnormal, v.message.as_str()) {
                (true, message) => format!("abnormal: {message}"),
                (false, message) => message.to_owned(),
            };
            [v.external_id.clone(), known(v.capacity), v.published_node_ids.join(" "), note]
        }),
    )
}

pub fn snapshots(rows: &[SnapshotRow]) -> String {
    table(
        ["SNAPSHOT", "EXTERNAL-ID", "SIZE", "CREATED", "NOTE"],
        rows.iter().map(|s| {
            let created = if s.created == 0 { String::new() } else { timestamp(s.created) };
            let note = if s.ready { "" } else { "not ready" };
            [s.id.clone(), s.external_id.clone(), known(s.size), created, note.to_owned()]
        }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_is_shown_with_its_users() {
        let of = |number: usize| Consumer::new("job", "prod", &format!("v{number}"));
        let shown = |most| plugin(&Plugin::default(), &(0..most).map(of).collect(), String::new());
        assert!(!shown(0).contains("consumers"));
        assert!(shown(2).ends_with("consumers: job (prod/v0), job (prod/v1)\n"), "{}", shown(2));
        assert!(shown(16).ends_with("job (prod/v9)\n"), "{}", shown(16));
        assert!(shown(10_000).ends_with(", and 9984 more\n"), "{}", shown(10_000));
    }

    #[test]
    fn plugin_inventory_is_a_table() {
        let volume = ExternalRow {
            external_id: "vol-1".into(),
            capacity: 1 << 30,
            published_node_ids: vec!["a".into(), "b".into()],
            ..ExternalRow::default()
        };
        let sick = ExternalRow {
            external_id: "vol-2".into(),
            abnormal: true,
            message: "a disk\u{1b} is gone".into(),
            ..ExternalRow::default()
        };
        let expected = "\
EXTERNAL-ID  CAPACITY  NODES  NOTE
vol-1        1GiB      a b    -
vol-2        -         -      abnormal: a disk\u{fffd} is gone";
        assert_eq!(external_volumes(&[volume, sick]), expected);

        let ready = SnapshotRow {
            id: "snap-1".into(),
            external_id: "vol-1".into(),
            size: 1 << 20,
            created: 1_709_210_096_007_000,
            ready: true,
        };
        let not_yet =
            SnapshotRow { id: "snap-2".into(), external_id: "vol-1".into(), ..SnapshotRow::default() };
        let expected = "\
SNAPSHOT  EXTERNAL-ID  SIZE  CREATED                   NOTE
snap-1    vol-1        1MiB  2024-02-29T12:34:56.007Z  -
snap-2    vol-1        -     -                         not ready";
        assert_eq!(snapshots(&[ready, not_yet]), expected);
    }
}
