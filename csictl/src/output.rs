//! Output: plain tables for people, or JSON with the contract's names for programs.

mod cluster;
mod explained;
mod plugin;
mod stats;
mod text;
mod volume;
mod whole;

use std::{
    io,
    time::{SystemTime, UNIX_EPOCH},
};

use csi_proto::time::timestamp;
use csid_client::{Cluster, Event, Manager, MountRow, OperationRow, PluginRow, ReconcileReport};
use serde_json::{Map, Value, json};

pub use cluster::{
    attachments, attachments_json, cluster_line, cluster_status, drain_note, expansion, expansion_json,
    finding_json, findings, is_drained, named, node, node_json, nodes, notes_of_servers, queue, queue_json,
    servers, servers_json,
};
pub use explained::{of_servers, of_servers_json, waits};
pub use plugin::{Consumer, drained, external_volumes, plugin, plugins, snapshots};
pub use stats::{Used, plugin_stats, top};
use text::{cut, facts, seconds, table};
pub use text::{json_line, lines, plain, print, print_json};
pub use volume::{claimed, claims, explanation, size, stats, volume, volumes};
pub use whole::{whole_cluster, whole_cluster_json};

pub struct Status {
    pub via: String,
    pub manager: Manager,
    /// This host's cluster. `None`: it has none.
    pub cluster: Option<Cluster>,
    pub plugins: Vec<PluginRow>,
    pub mounts: Vec<MountRow>,
    pub operations: Vec<OperationRow>,
    /// The content of a new journal, if this one is damaged.
    pub damaged: Option<ReconcileReport>,
}

impl Status {
    /// Returns the states with their counts, the most frequent first.
    fn states<'a>(states: impl Iterator<Item = &'a str>) -> Vec<(&'a str, usize)> {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for state in states {
            match counts.iter_mut().find(|(known, _)| *known == state) {
                Some((_, count)) => *count += 1,
                None => counts.push((state, 1)),
            }
        }
        counts.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        counts
    }

    pub fn text(&self) -> String {
        let counted = |counts: Vec<(&str, usize)>| {
            let total: usize = counts.iter().map(|(_, count)| count).sum();
            let each: Vec<_> = counts.iter().map(|(state, count)| format!("{count} {state}")).collect();
            if each.is_empty() { "0".to_owned() } else { format!("{total} ({})", each.join(", ")) }
        };
        let plugins: Vec<_> = self.plugins.iter().map(|p| format!("{} {}", p.id, p.state)).collect();
        let unhealthy = self.mounts.iter().filter(|m| m.state == "mounted" && !m.healthy).count();
        let mut mounts = counted(Self::states(self.mounts.iter().map(|m| m.state.as_str())));
        if unhealthy > 0 {
            mounts += &format!(", {unhealthy} of them not healthy");
        }
        let journal = self.damaged.as_ref().map(|report| {
            let mounts = report.adopted.len();
            format!("damaged: changes are refused until `csictl reconcile --new-journal` ({mounts} to be recorded)")
        });
        facts([
            ("csid", format!("{}, version {}", self.manager.state, self.manager.version)),
            ("journal", journal.unwrap_or_default()),
            ("via", self.via.clone()),
            ("cluster", self.cluster.as_ref().map(cluster_line).unwrap_or_default()),
            ("plugins", if plugins.is_empty() { "none".to_owned() } else { plugins.join(", ") }),
            ("mounts", mounts),
            ("operations", counted(Self::states(self.operations.iter().map(|o| o.kind.as_str())))),
            ("features", self.manager.features.join(" ")),
        ])
    }

    pub fn json(&self) -> io::Result<Value> {
        let states: Map<_, _> = Self::states(self.mounts.iter().map(|m| m.state.as_str()))
            .into_iter()
            .map(|(state, count)| (state.to_owned(), count.into()))
            .collect();
        let mut value = serde_json::to_value(&self.manager)?;
        value["via"] = json!(self.via);
        value["plugins"] = serde_json::to_value(&self.plugins)?;
        value["mounts"] = states.into();
        value["operations"] = serde_json::to_value(&self.operations)?;
        value["cluster"] = serde_json::to_value(&self.cluster)?;
        value["journal-damaged"] = self.damaged.is_some().into();
        Ok(value)
    }
}

/// The limit of a consumer's name in a table, in characters.
const CONSUMER: usize = 40;

/// Returns the table of mounts. `wide`: it has csid's own path of each, and names at their full length.
pub fn mounts<'p>(rows: &[MountRow], provider: impl Fn(&str) -> &'p str, wide: bool) -> String {
    let row = |m: &MountRow| {
        let note = match m.error.as_str() {
            "" if m.state == "mounted" && !m.healthy => "dead".to_owned(),
            error => error.to_owned(),
        };
        let mode = if m.read_only { "ro" } else { "rw" };
        [
            m.namespace.clone(),
            m.volume.clone(),
            if wide { m.consumer.clone() } else { cut(&m.consumer, CONSUMER) },
            m.tag.clone(),
            m.plugin.clone(),
            provider(&m.plugin).to_owned(),
            m.state.clone(),
            if m.is_device { format!("{mode} block") } else { mode.to_owned() },
            m.target.clone(),
            note,
        ]
    };
    let header =
        ["NAMESPACE", "VOLUME", "CONSUMER", "TAG", "PLUGIN", "PROVIDER", "STATE", "MODE", "TARGET", "NOTE"];
    if !wide {
        return table(header, rows.iter().map(row));
    }
    let with = |[a, b, c, d, e, f, g, h, i, note]: [String; 10], source: String| {
        [a, b, c, d, e, f, g, h, i, source, note]
    };
    let header = with(header.map(str::to_owned), "SOURCE".to_owned());
    table(header.each_ref().map(String::as_str), rows.iter().map(|m| with(row(m), m.source.clone())))
}

pub fn operations(rows: &[OperationRow], now: SystemTime) -> String {
    let now =
        u64::try_from(now.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()).unwrap_or(u64::MAX);
    let left = |deadline: u64| match deadline {
        0 => String::new(),
        _ => seconds(deadline.saturating_sub(now)),
    };
    table(
        ["OPERATION", "KIND", "SUBJECT", "STEP", "SINCE", "LEFT", "UID"],
        rows.iter().map(|o| {
            [
                o.id.clone(),
                o.kind.clone(),
                o.subject.clone(),
                o.step.clone(),
                seconds(now.saturating_sub(o.since)),
                left(o.deadline),
                o.uid.to_string(),
            ]
        }),
    )
}

pub fn report(report: &ReconcileReport, dry_run: bool, remove_orphans: bool) -> String {
    let (adopted, remounted, undone) = if dry_run {
        ("would be adopted", "would be mounted again", "would be undone, or tried again")
    } else {
        ("adopted", "mounted again", "undone")
    };
    let groups = [
        (adopted, &report.adopted),
        (remounted, &report.remounted),
        (undone, &report.undone),
        (if remove_orphans && !dry_run { "removed" } else { "orphan" }, &report.orphans),
        ("failed", &report.failed),
    ];
    let mut lines: String = groups
        .iter()
        .flat_map(|(what, subjects)| subjects.iter().map(move |s| format!("{what}: {}\n", plain(s))))
        .collect();
    if !report.kept.is_empty() {
        lines += &format!("A new journal was begun. The damaged one is kept: {}\n", plain(&report.kept));
    }
    if lines.is_empty() { "The journal and the kernel agree.".to_owned() } else { lines }
}

pub fn event(event: &Event) -> String {
    let mut details: Vec<_> = event
        .details
        .iter()
        .map(|(key, value)| match csid_client::json(value) {
            Value::String(text) if key == "timings" => format!("{key}={}", json!(timings(&text))),
            Value::String(text) if text.contains(' ') => format!("{key}={}", json!(text)),
            Value::String(text) => format!("{key}={text}"),
            other => format!("{key}={other}"),
        })
        .collect();
    details.sort();
    let subject = if event.subject.is_empty() { "-" } else { &event.subject };
    let line = format!(
        "{} {} {} {subject} {}",
        event.sequence,
        timestamp(event.realtime_usec),
        event.kind,
        details.join(" ")
    );
    plain(line.trim_end())
}

/// Returns the steps in the detail `timings`, which is JSON. Other text stays as it is.
fn timings(text: &str) -> String {
    match serde_json::from_str::<Vec<(String, u64)>>(text) {
        Ok(steps) => volume::timings(&steps),
        Err(_) => text.to_owned(),
    }
}

pub fn event_json(event: &Event) -> String {
    let details: Map<_, _> =
        event.details.iter().map(|(key, value)| (key.clone(), csid_client::json(value))).collect();
    json_line(&json!({
        "sequence": event.sequence,
        "realtime-usec": event.realtime_usec,
        "type": event.kind,
        "subject": event.subject,
        "details": details,
    }))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use zbus::Variant;

    use super::*;

    fn row() -> MountRow {
        MountRow {
            namespace: "default".into(),
            volume: "data".into(),
            consumer: "job".into(),
            plugin: "local".into(),
            state: "mounted".into(),
            source: "/p".into(),
            healthy: true,
            ..MountRow::default()
        }
    }

    #[test]
    fn mounts_are_a_plain_table() {
        let dead = MountRow {
            volume: "x\u{1b}[2J".into(),
            plugin: "gone".into(),
            healthy: false,
            read_only: true,
            ..row()
        };
        let expected = "\
NAMESPACE  VOLUME  CONSUMER  TAG  PLUGIN  PROVIDER  STATE    MODE  TARGET   NOTE
default    data    job       -    local   L         mounted  rw    /srv/db  -
default    x\u{fffd}[2J   job       -    gone    -         mounted  ro    -        dead";
        let provider = |plugin: &str| if plugin == "local" { "L" } else { "" };
        let bound = MountRow { target: "/srv/db".into(), ..row() };
        assert_eq!(mounts(&[bound, dead], provider, false), expected);
    }

    #[test]
    fn wide_mounts_have_sources_and_whole_names() {
        let long = MountRow { consumer: "ä".repeat(41), ..row() };
        let text = mounts(std::slice::from_ref(&long), |_| "L", false);
        let shown = format!("{}…  ", "ä".repeat(39));
        assert!(text.contains(&shown) && !text.contains("SOURCE"), "{text}");
        let fits = MountRow { consumer: "ä".repeat(40), ..row() };
        assert!(mounts(&[fits], |_| "L", false).contains(&"ä".repeat(40)));
        let text = mounts(&[long], |_| "L", true);
        assert!(
            text.contains(&"ä".repeat(41)) && text.contains("TARGET  SOURCE  NOTE") && text.contains("/p"),
            "{text}"
        );
    }

    #[test]
    fn json_keys_are_the_contracts() {
        let value = serde_json::to_value(row()).unwrap();
        let keys: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
        for key in ["external-id", "is-device", "attachment-mode", "modify-index", "uid"] {
            assert!(keys.contains(&key), "{key} in {keys:?}");
        }
        let plugin = serde_json::to_value(csid_client::Plugin::default()).unwrap();
        assert_eq!(plugin["health-message"], "");
        assert_eq!(plugin["max-volumes"], 0);
    }

    #[test]
    fn status_counts() {
        let status = Status {
            via: "/run/csid/csid.sock".into(),
            manager: Manager { state: "ready".into(), version: "1".into(), ..Manager::default() },
            cluster: None,
            plugins: vec![],
            mounts: vec![row(), MountRow { state: "lost".into(), ..row() }, row()],
            operations: vec![],
            damaged: None,
        };
        let expected = "      csid: ready, version 1
       via: /run/csid/csid.sock
   plugins: none
    mounts: 3 (2 mounted, 1 lost)
operations: 0
";
        assert_eq!(status.text(), expected);
        assert_eq!(status.json().unwrap()["mounts"], json!({"mounted": 2, "lost": 1}));
        let report = ReconcileReport { adopted: vec!["a".into(), "b".into()], ..ReconcileReport::default() };
        let text = Status { damaged: Some(report), ..status }.text();
        assert!(text.contains("journal: damaged: ") && text.contains("(2 to be recorded)"), "{text}");
    }

    #[test]
    fn timings_of_an_event_are_in_milliseconds() {
        assert_eq!(timings(r#"[["queued",12],["publish",812400]]"#), "queued 0.0 ms, publish 812.4 ms");
        assert_eq!(timings("of a later csid"), "of a later csid");
    }

    #[test]
    fn an_event_is_a_line() {
        let details = HashMap::from([
            ("success".to_owned(), Variant::from(false).try_into_owned().unwrap()),
            ("error".to_owned(), Variant::from("no such\nthing").try_into_owned().unwrap()),
            ("uid".to_owned(), Variant::from(7u32).try_into_owned().unwrap()),
        ]);
        let sample = Event {
            sequence: 41,
            realtime_usec: 1_709_210_096_007_000,
            kind: "mount".into(),
            subject: "default/data".into(),
            details,
        };
        assert_eq!(
            event(&sample),
            r#"41 2024-02-29T12:34:56.007Z mount default/data error="no such\nthing" success=false uid=7"#
        );
        assert_eq!(
            event_json(&sample),
            concat!(
                r#"{"details":{"error":"no such\nthing","success":false,"uid":7},"#,
                r#""realtime-usec":1709210096007000,"sequence":41,"subject":"default/data","type":"mount"}"#
            )
        );
    }
}
