//! Output about the nodes and servers of a cluster.

use csi_proto::cluster::v1::{
    Attaches, AttachmentRow, Drained, Finding, Machine, NodeExpansion, NodeRow, PluginReport, QueueRow,
    ServerRow, ServerRows, VolumeRow,
};
use csi_proto::time::timestamp;
use csid_client::Cluster;
use serde_json::{Value, json};

use super::text::{facts, plain, seconds, table};
use crate::shell::quoted;

/// The most nodes that a note names.
const SHOWN: usize = 16;
/// The state of a node that drains.
const DRAINING: &str = "draining";

/// Returns this host's state in its cluster, on a line.
pub fn cluster_line(row: &Cluster) -> String {
    let at = if row.server.is_empty() { String::new() } else { format!(" at {}", row.server) };
    let why = if row.reason.is_empty() { String::new() } else { format!(" ({})", row.reason) };
    let owed = match row.owed {
        0 => String::new(),
        owed => format!("; {}", to_learn(owed)),
    };
    format!("{}, node {}: {}{at}{why}{owed}", row.name, row.node, row.state)
}

fn to_learn(owed: u32) -> String {
    match owed {
        1 => "the servers have yet to learn that 1 claim has ended".to_owned(),
        owed => format!("the servers have yet to learn that {owed} claims have ended"),
    }
}

/// Returns this host's state in its cluster, as facts.
pub fn cluster_status(row: &Cluster) -> String {
    if !row.is_clustered() {
        return "This host has no cluster.".to_owned();
    }
    let number = |number: u64| if number == 0 { String::new() } else { number.to_string() };
    facts([
        ("cluster", row.name.clone()),
        ("node", row.node.clone()),
        ("state", row.state.clone()),
        ("why", row.reason.clone()),
        ("server", row.server.clone()),
        ("since", timestamp(row.since)),
        ("owed", if row.owed == 0 { "nothing".to_owned() } else { to_learn(row.owed) }),
        ("generation", number(row.generation)),
        ("revision", number(row.revision)),
    ])
}

pub fn nodes(rows: &[NodeRow]) -> String {
    table(
        ["NODE", "STATE", "SERVER", "SINCE", "CLAIMS", "PLUGINS", "NOTE"],
        rows.iter().map(|row| {
            let since = row.sessions.iter().map(|session| session.since_usec).min();
            [
                row.node.clone(),
                row.state.clone(),
                servers_of(row).join(" "),
                since.map(timestamp).unwrap_or_default(),
                row.claims.to_string(),
                row.plugins.iter().map(|of| of.plugin.as_str()).collect::<Vec<_>>().join(" "),
                note(row),
            ]
        }),
    )
}

/// Returns the addresses of the servers that a node has joined, or their IDs.
fn servers_of(row: &NodeRow) -> Vec<&str> {
    let name = |address: &'_ str| !address.is_empty();
    row.sessions
        .iter()
        .map(|of| if name(&of.address) { of.address.as_str() } else { of.server.as_str() })
        .collect()
}

fn note(row: &NodeRow) -> String {
    let fence = row.fence.as_ref().filter(|_| row.state == "fenced");
    match (&row.block, &row.other) {
        (Some(block), _) => format!("blocked by {} {}", block.by, block.reason).trim_end().to_owned(),
        (None, None) if let Some(fence) = fence => {
            format!("fenced by {} {}", fence.by, fence.reason).trim_end().to_owned()
        }
        (None, Some(other)) => format!("another machine asks to join: {}", other.machine_id),
        (None, None) if let Some(ahead) = ahead(row) => ahead,
        (None, None) => drain_note(row).unwrap_or_default(),
    }
}

/// Returns what a node has seen that etcd does not have. `None`: it has seen nothing like that, or an operator has accepted it.
fn ahead(row: &NodeRow) -> Option<String> {
    let ahead = row.ahead.as_ref().filter(|ahead| !ahead.accepted)?;
    Some(format!(
        "refused: it has seen generation {} and revision {}, which etcd does not have",
        ahead.generation, ahead.revision
    ))
}

/// Returns whether a node that drains has nothing of the cluster's volumes any more, by its own report and the servers' count.
pub fn is_drained(row: &NodeRow) -> bool {
    row.state == DRAINING && row.claims == 0 && row.drained.as_ref().is_some_and(|of| of.count == 0)
}

/// Returns how far the drain of a node is. `None`: the node does not drain.
pub fn drain_note(row: &NodeRow) -> Option<String> {
    let note = match &row.drained {
        _ if row.state != DRAINING => return None,
        None if row.sessions.is_empty() => "away, and drains when it is back".to_owned(),
        None => "has not reported yet what is left".to_owned(),
        Some(_) if is_drained(row) => "drained".to_owned(),
        Some(of) if of.count == 0 => format!("{} claims have yet to end at the servers", row.claims),
        Some(of) => format!("{} mounts and claims are left", of.count),
    };
    Some(note)
}

/// Returns what the drain of a node has left. Empty: nothing, or the node has not reported it.
fn left(drained: &Drained) -> String {
    if drained.left.is_empty() {
        return String::new();
    }
    let rows = drained.left.iter().map(|of| {
        let consumer =
            if of.tag.is_empty() { of.consumer.clone() } else { format!("{} {}", of.consumer, of.tag) };
        [format!("{}/{}", of.namespace, of.volume), consumer, of.target.clone(), of.why.clone()]
    });
    let named = u64::try_from(drained.left.len()).unwrap_or(u64::MAX);
    let more = match drained.count.saturating_sub(named) {
        0 => String::new(),
        more => format!("\nand {more} more"),
    };
    format!("\n\n{}{more}", table(["LEFT", "CONSUMER", "TARGET", "WHY"], rows))
}

pub fn node(row: &NodeRow) -> String {
    let machine = row.machine.clone().unwrap_or_default();
    let sessions = row.sessions.iter().zip(servers_of(row));
    let sessions: Vec<_> =
        sessions.map(|(of, server)| format!("{server} since {}", timestamp(of.since_usec))).collect();
    let plugins: Vec<_> = row.plugins.iter().map(plugin).collect();
    let block = row.block.as_ref().map(|block| {
        let reason = if block.reason.is_empty() { String::new() } else { format!(": {}", block.reason) };
        format!("by {} at {}{reason}", block.by, timestamp(block.since_usec))
    });
    let fence = row.fence.as_ref().map(|fence| {
        let reason = if fence.reason.is_empty() { String::new() } else { format!(": {}", fence.reason) };
        format!("by {} at {}, boot {}{reason}", fence.by, timestamp(fence.since_usec), fence.boot)
    });
    let other = row.other.as_ref().map(|other| {
        format!(
            "{}, journal {}, boot {}, refused at {}",
            other.machine_id,
            other.journal_id,
            other.boot,
            timestamp(other.refused_usec)
        )
    });
    let drain = drain_note(row).map(|note| match &row.drained {
        Some(of) => format!("{note}, at {}", timestamp(of.since_usec)),
        None => note,
    });
    let facts = facts([
        ("node", row.node.clone()),
        ("state", row.state.clone()),
        ("drain", drain.unwrap_or_default()),
        ("blocked", block.unwrap_or_default()),
        ("last fence", fence.unwrap_or_default()),
        ("joined", if sessions.is_empty() { "away".to_owned() } else { sessions.join(", ") }),
        ("machine", machine.machine_id),
        ("journal", machine.journal_id),
        ("boot", machine.boot),
        ("asks to join", other.unwrap_or_default()),
        ("ahead of etcd", ahead(row).unwrap_or_default()),
        ("claims", row.claims.to_string()),
        ("plugins", plugins.join(", ")),
        ("names", names(row).join(", ")),
        ("revision", row.revision.to_string()),
    ]);
    facts + &row.drained.as_ref().map(left).unwrap_or_default()
}

/// Returns the plugins' names of a node, as the node has reported them. A fence counts with those alone that an operator has accepted.
fn names(row: &NodeRow) -> Vec<String> {
    let reported = row.plugins.iter().filter(|of| !of.node_id.is_empty());
    let name = |of: &PluginReport| match row.accepted_ids.get(&of.plugin) == Some(&of.node_id) {
        true => format!("{}={} (accepted)", of.plugin, of.node_id),
        false => format!("{}={}", of.plugin, of.node_id),
    };
    reported.map(name).collect()
}

fn plugin(of: &PluginReport) -> String {
    match of.attaches() {
        Attaches::Unknown => of.plugin.clone(),
        Attaches::Yes => format!("{} (attaches volumes)", of.plugin),
        Attaches::No => format!("{} (attaches nothing)", of.plugin),
    }
}

pub fn node_json(row: &NodeRow) -> Value {
    let machine = row.machine.clone().unwrap_or_default();
    let sessions = row
        .sessions
        .iter()
        .map(|of| json!({ "server": of.server, "address": of.address, "since-usec": of.since_usec }));
    let plugins = row.plugins.iter().map(|of| {
        let attaches = match of.attaches() {
            Attaches::Unknown => None,
            Attaches::Yes => Some(true),
            Attaches::No => Some(false),
        };
        let node_id = Some(&of.node_id).filter(|id| !id.is_empty());
        json!({ "plugin": of.plugin, "attaches": attaches, "node-id": node_id })
    });
    let other = |of: &Machine| {
        json!({
            "machine-id": of.machine_id,
            "journal-id": of.journal_id,
            "boot": of.boot,
            "refused-usec": of.refused_usec,
        })
    };
    json!({
        "node": row.node,
        "state": row.state,
        "machine-id": machine.machine_id,
        "journal-id": machine.journal_id,
        "boot": machine.boot,
        "sessions": sessions.collect::<Vec<_>>(),
        "plugins": plugins.collect::<Vec<_>>(),
        "accepted-ids": row.accepted_ids,
        "claims": row.claims,
        "other": row.other.as_ref().map(other),
        "block": row.block.as_ref().map(
            |block| json!({ "by": block.by, "reason": block.reason, "since-usec": block.since_usec }),
        ),
        "revision": row.revision,
        "ahead": row.ahead.as_ref().map(|of| {
            json!({
                "generation": of.generation,
                "revision": of.revision,
                "since-usec": of.since_usec,
                "accepted": of.accepted,
            })
        }),
        "drained": row.drained.as_ref().map(|of| {
            let left = of.left.iter().map(|of| {
                json!({
                    "namespace": of.namespace,
                    "volume": of.volume,
                    "consumer": of.consumer,
                    "tag": of.tag,
                    "target": of.target,
                    "why": of.why,
                })
            });
            json!({ "count": of.count, "since-usec": of.since_usec, "left": left.collect::<Vec<_>>() })
        }),
        "fence": row.fence.as_ref().map(|fence| {
            json!({
                "by": fence.by,
                "reason": fence.reason,
                "since-usec": fence.since_usec,
                "number": fence.number,
                "boot": fence.boot,
            })
        }),
    })
}

/// Returns the claims of a volume that wait, in the order in which they are granted. Empty: none waits.
pub fn queue(row: &VolumeRow) -> String {
    let rows = row.queue.iter().map(|of| {
        let used = of.r#use.clone().unwrap_or_default();
        let since = timestamp(of.since_usec);
        [format!("{}/{}", of.node, of.consumer), used.mode, used.access_mode, since]
    });
    match row.queue.is_empty() {
        true => String::new(),
        false => format!("\n{}", table(["WAITS", "MODE", "ACCESS", "SINCE"], rows)),
    }
}

/// Returns what AttachVolume has attached. Empty: nothing.
pub fn attachments(row: &VolumeRow) -> String {
    let rows = row
        .attachments
        .iter()
        .map(|of| [&of.node_id, &of.node, &of.state, &of.owner, &of.error].map(|text| plain(text)));
    match row.attachments.is_empty() {
        true => String::new(),
        false => format!("\n{}", table(["ATTACHED TO", "NODE", "STATE", "BY", "ERROR"], rows)),
    }
}

pub fn attachments_json(row: &VolumeRow) -> Value {
    let entry = |of: &AttachmentRow| {
        json!({
            "node-id": of.node_id,
            "node": of.node,
            "state": of.state,
            "owner": of.owner,
            "error": of.error,
        })
    };
    row.attachments.iter().map(entry).collect()
}

/// Returns the nodes that have yet to do their part of an expansion. Empty: no node has.
pub fn expansion(row: &VolumeRow) -> String {
    match &row.expansion {
        None => String::new(),
        Some(of) if of.nodes.is_empty() => "\nThe next host that mounts the volume expands it.\n".to_owned(),
        Some(of) => {
            let nodes: Vec<String> = of.nodes.iter().map(|node| plain(node)).collect();
            format!("\nHosts that have yet to expand the volume: {}\n", nodes.join(", "))
        }
    }
}

/// Returns the same as JSON. Null: no node has to expand the volume.
pub fn expansion_json(row: &VolumeRow) -> Value {
    let of = |of: &NodeExpansion| json!({ "required": of.required, "limit": of.limit, "nodes": of.nodes });
    row.expansion.as_ref().map_or(Value::Null, of)
}

pub fn queue_json(row: &VolumeRow) -> Value {
    let entry = |of: &QueueRow| {
        let used = of.r#use.clone().unwrap_or_default();
        json!({
            "node": of.node,
            "consumer": of.consumer,
            "mode": used.mode,
            "access-mode": used.access_mode,
            "attachment-mode": used.attachment_mode,
            "since-usec": of.since_usec,
        })
    };
    row.queue.iter().map(entry).collect()
}

pub fn servers(rows: &ServerRows) -> String {
    table(
        ["SERVER", "ADDRESS", "BEAT", "VERSION", "SCHEMA", "GRANTS", "ID"],
        rows.servers.iter().map(|row| {
            let beat = row.beat_ms.map(|ms| seconds(ms.saturating_mul(1000)));
            [
                row.name.clone(),
                row.address.clone(),
                beat.unwrap_or_default(),
                row.version.clone(),
                schema(row),
                row.grants.clone(),
                row.id.clone(),
            ]
        }),
    )
}

/// Returns the versions of values that a server knows.
fn schema(row: &ServerRow) -> String {
    match row.schema_min == row.schema_max {
        true => row.schema_max.to_string(),
        false => format!("{}-{}", row.schema_min, row.schema_max),
    }
}

/// Returns the names of nodes, the first ones of many. Empty: there are none.
pub fn named<'a>(nodes: impl IntoIterator<Item = &'a String>) -> String {
    let nodes: Vec<String> = nodes.into_iter().map(|node| plain(node)).collect();
    let shown = nodes.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match nodes.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Returns what is to be seen to about the servers, a line for each.
pub fn notes_of_servers(rows: &ServerRows) -> Vec<String> {
    let mut notes = Vec::new();
    if rows.servers.windows(2).any(|pair| pair[0].grants != pair[1].grants) {
        notes.push("The servers have different grants: compare their csid-server.toml.".to_owned());
    }
    if rows.servers.iter().any(|row| !(row.schema_min..=row.schema_max).contains(&rows.schema)) {
        notes.push("A server does not know the version of the values in etcd.".to_owned());
    }
    if rows.mode == "restored" {
        notes.push(
            "etcd is a backup, and no operator has said so: nothing is granted, and no node joins. Next: csictl server restored".to_owned(),
        );
    }
    if rows.mode == "recovering" {
        notes.push(format!(
            "The cluster recovers from a backup in generation {}, and grants no claims. {} began the recovery: {}.",
            rows.generation,
            plain(&rows.by),
            plain(&rows.cause)
        ));
    }
    if let Some(of) = rows.half_done.first() {
        let volumes =
            rows.half_done.iter().map(|of| format!("{}/{} at {}", of.namespace, of.volume, of.node_id));
        notes.push(format!(
            "The backup has these attachments of AttachVolume half done, and nothing detaches them without a word: {}. Next: repeat the AttachVolume, or csictl --operator volume detach {} {} {}",
            named(volumes.collect::<Vec<_>>().iter()),
            quoted(&of.namespace),
            quoted(&of.volume),
            quoted(&of.node_id)
        ));
    }
    if rows.mode != "recovering" {
        return notes;
    }
    if !rows.awaited.is_empty() {
        notes.push(format!(
            "Nodes that have not said yet what they hold: {}. If they do not come back: csictl server resume --help",
            named(&rows.awaited)
        ));
    }
    if !rows.refused.is_empty() {
        notes.push(format!(
            "Nodes whose claims were not all brought back: {}. Next: csictl server audit",
            named(rows.refused.iter().map(|of| &of.node))
        ));
    }
    if rows.awaited.is_empty() && rows.refused.is_empty() {
        notes.push(
            "All nodes that etcd knows have said what they hold. If no machine is missing: csictl server resume".to_owned(),
        );
    }
    notes
}

pub fn servers_json(rows: &ServerRows) -> Value {
    let servers = rows.servers.iter().map(|row| {
        json!({
            "id": row.id,
            "name": row.name,
            "address": row.address,
            "version": row.version,
            "schema-min": row.schema_min,
            "schema-max": row.schema_max,
            "grants": row.grants,
            "beat-usec": row.beat_ms.map(|ms| ms.saturating_mul(1000)),
        })
    });
    json!({
        "cluster": rows.cluster,
        "schema": rows.schema,
        "generation": rows.generation,
        "mode": rows.mode,
        "awaited": rows.awaited,
        "refused": rows.refused.iter().map(|of| {
            json!({ "node": of.node, "count": of.count, "more": of.more, "revision": of.revision })
        }).collect::<Vec<_>>(),
        "half-done": rows.half_done.iter().map(|of| {
            json!({ "namespace": of.namespace, "volume": of.volume, "node-id": of.node_id, "node": of.node })
        }).collect::<Vec<_>>(),
        "cause": rows.cause,
        "by": rows.by,
        "since-usec": rows.since_usec,
        "answered-by": rows.server,
        "servers": servers.collect::<Vec<_>>(),
    })
}

/// Returns what an audit has found.
pub fn findings(rows: &[Finding]) -> String {
    table(
        ["KIND", "KEY", "FINDING"],
        rows.iter().map(|of| [of.kind.clone(), of.key.clone(), of.text.clone()]),
    )
}

pub fn finding_json(of: &Finding) -> Value {
    json!({ "kind": of.kind, "key": of.key, "text": of.text })
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::{AttachmentName, Block, DrainLeft, NodeSession, RefusedClaims};

    use super::*;

    fn row() -> NodeRow {
        NodeRow {
            node: "db-1".into(),
            state: "ready".into(),
            machine: Some(Machine { machine_id: "m1".into(), journal_id: "j1".into(), ..Machine::default() }),
            sessions: vec![NodeSession {
                server: "x".into(),
                address: "s1:7443".into(),
                since_usec: 1_709_210_096_007_000,
            }],
            plugins: vec![PluginReport {
                plugin: "nfs".into(),
                attaches: Attaches::No.into(),
                ..PluginReport::default()
            }],
            claims: 2,
            ..NodeRow::default()
        }
    }

    #[test]
    fn nodes_are_a_table_with_their_servers() {
        let other = Machine { machine_id: "m\u{1b}2".into(), ..Machine::default() };
        let away = NodeRow { sessions: Vec::new(), other: Some(other), ..row() };
        let block = Block { by: "operator/a".into(), reason: "stolen".into(), since_usec: 0 };
        let blocked = NodeRow { state: "blocked".into(), block: Some(block), ..away.clone() };
        let expected = "\
NODE  STATE    SERVER   SINCE                     CLAIMS  PLUGINS  NOTE
db-1  ready    s1:7443  2024-02-29T12:34:56.007Z  2       nfs      -
db-1  ready    -        -                         2       nfs      another machine asks to join: m\u{fffd}2
db-1  blocked  -        -                         2       nfs      blocked by operator/a stolen";
        assert_eq!(nodes(&[row(), away.clone(), blocked.clone()]), expected);
        assert!(node(&away).contains("away") && node(&blocked).contains("by operator/a at 1970"));
        assert_eq!(node_json(&row())["sessions"][0]["address"], "s1:7443");
        assert_eq!(node_json(&row())["other"], Value::Null);
        assert_eq!(node_json(&row())["plugins"][0]["node-id"], Value::Null);
        let mut named = row();
        named.plugins[0].node_id = "i-1".into();
        assert_eq!(node_json(&named)["plugins"][0]["node-id"], "i-1");
    }

    #[test]
    fn node_that_drains_shows_what_is_left_and_why() {
        let silent = NodeRow { state: "draining".into(), ..row() };
        let left = DrainLeft {
            namespace: "prod".into(),
            volume: "db".into(),
            consumer: "web".into(),
            target: "/srv/db".into(),
            why: "/srv/db is in use by psql (7)\u{1b}".into(),
            ..DrainLeft::default()
        };
        let drained = |count, left| Drained { left, count, since_usec: 1_709_210_096_007_000, drain: 1 };
        let drains = NodeRow { drained: Some(drained(40, vec![left])), ..silent.clone() };
        let expected = "

LEFT     CONSUMER  TARGET   WHY
prod/db  web       /srv/db  /srv/db is in use by psql (7)\u{fffd}
and 39 more";
        let text = node(&drains);
        assert!(
            text.ends_with(expected) && text.contains("40 mounts and claims are left, at 2024"),
            "{text}"
        );
        assert_eq!(node_json(&drains)["drained"]["left"][0]["target"], "/srv/db");
        let empty = NodeRow { drained: Some(drained(0, Vec::new())), ..silent.clone() };
        let done = NodeRow { claims: 0, ..empty.clone() };
        let away = NodeRow { sessions: Vec::new(), ..silent.clone() };
        let rows = [row(), away, silent, empty, done];
        assert_eq!(rows.each_ref().map(is_drained), [false, false, false, false, true]);
        let notes = rows.each_ref().map(|row| drain_note(row).unwrap_or_default());
        let due = ["", "away", "has not reported", "2 claims have yet to end", "drained"];
        assert!(notes.iter().zip(due).all(|(note, due)| note.starts_with(due)), "{notes:?}");
        assert_eq!(node_json(&rows[2])["drained"], Value::Null);
    }

    #[test]
    fn state_of_a_host_is_a_line_and_a_screen() {
        assert_eq!(
            cluster_status(&Cluster { state: "alone".into(), ..Cluster::default() }),
            "This host has no cluster."
        );
        let joined = Cluster {
            name: "prod".into(),
            node: "db-1".into(),
            state: "joined".into(),
            server: "s1:7443".into(),
            since: 1_709_210_096_007_000,
            revision: 7,
            ..Cluster::default()
        };
        assert_eq!(cluster_line(&joined), "prod, node db-1: joined at s1:7443");
        let text = cluster_status(&joined);
        assert!(text.contains("2024-02-29") && text.contains("nothing") && !text.contains("why"), "{text}");
        let away = Cluster {
            state: "cut-off".into(),
            server: String::new(),
            reason: "s1:7443: it is away".into(),
            owed: 2,
            ..joined
        };
        let due = "prod, node db-1: cut-off (s1:7443: it is away); the servers have yet to learn that 2 claims have ended";
        assert_eq!(cluster_line(&away), due);
    }

    #[test]
    fn findings_are_a_table_without_control_characters() {
        let found = Finding {
            kind: "grants-differ".into(),
            key: "/csid/v1/server/\u{1b}x".into(),
            text: "it".into(),
        };
        let expected = "\
KIND           KEY                 FINDING
grants-differ  /csid/v1/server/\u{fffd}x  it";
        assert_eq!(findings(std::slice::from_ref(&found)), expected);
        assert_eq!(finding_json(&found)["kind"], "grants-differ");
    }

    #[test]
    fn servers_with_different_grants_are_noted() {
        let server = ServerRow { name: "s1".into(), schema_min: 1, schema_max: 2, ..ServerRow::default() };
        let beat = ServerRow { beat_ms: Some(2900), grants: "b".into(), ..server.clone() };
        let rows = ServerRows { servers: vec![server, beat], schema: 1, ..ServerRows::default() };
        let text = servers(&rows);
        assert!(text.contains("1-2") && text.contains("2.9s"), "{text}");
        assert_eq!(notes_of_servers(&rows).len(), 1);
        let rows = ServerRows { schema: 3, mode: "recovering".into(), ..rows };
        let notes = notes_of_servers(&rows);
        assert!(notes.len() == 4 && notes[3].ends_with("csictl server resume"), "{notes:?}");
        let refused = vec![RefusedClaims { node: "n2".into(), ..RefusedClaims::default() }];
        let rows = ServerRows { awaited: vec!["n1".into()], refused, ..rows };
        let notes = notes_of_servers(&rows);
        assert!(
            notes.len() == 5 && notes[3].contains("hold: n1") && notes[4].contains("back: n2"),
            "{notes:?}"
        );
        let (namespace, volume, node_id) = ("prod".into(), "db".into(), "i 1".into());
        let half_done = vec![AttachmentName { namespace, volume, node_id, node: String::new() }];
        let rows = ServerRows { half_done, ..ServerRows::default() };
        let due = "csictl --operator volume detach prod db 'i 1'";
        assert!(notes_of_servers(&rows).last().unwrap().ends_with(due));
        assert_eq!(servers_json(&rows)["half-done"][0]["node-id"], "i 1");
    }
}
