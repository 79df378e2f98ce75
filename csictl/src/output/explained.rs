//! Output about why a volume of a cluster is not where it is wanted.

use csi_proto::cluster::v1::{
    Acting, ClaimExplained, ClaimInList, ClaimRow, Explanation, NodeExplained, QueueExplained, QueueRow,
    WaitExplained,
};
use csi_proto::time::{since as since_time, timestamp};
use serde_json::{Value, json};

use super::text::{facts, table};

/// Returns the text of an explanation. `next`: the hint.
pub fn of_servers(found: &Explanation, next: String) -> String {
    let volume = found.volume.clone().unwrap_or_default();
    let waits: Vec<String> = waits(found).map(|(who, wait)| waits_for(&who, wait)).take(1).collect();
    let head = facts([
        ("volume", format!("{}/{}", volume.namespace, volume.volume)),
        ("plugin", volume.plugin.clone()),
        ("standing", volume.standing.clone()),
        ("waits for", waits.into_iter().next().unwrap_or_else(|| "nothing".to_owned())),
        ("acts", found.acting.as_ref().map(acting).unwrap_or_default()),
        ("last error", volume.error),
        ("do", next),
    ]);
    let tables = [claims(found), attachments(found), queue(&found.queue), nodes(&found.nodes)];
    let tables = tables.into_iter().filter(|table| !table.is_empty());
    head + &tables.map(|table| format!("\n{table}\n")).collect::<String>()
}

/// Returns what waits, and for what: NODE/CONSUMER, the plugin's id of a node for an attachment by AttachVolume, or empty for the volume itself.
/// The volume comes first, then claims, the queue and attachments.
pub fn waits(found: &Explanation) -> impl Iterator<Item = (String, &WaitExplained)> {
    let of_volume = found.wait.iter().map(|wait| (String::new(), wait));
    let of_claims = found.claims.iter().filter_map(|of| Some((name(&row_of(of)), of.wait.as_ref()?)));
    let of_queue = found.queue.iter().filter_map(|of| {
        let entry = of.entry.as_ref()?;
        Some((format!("{}/{}", entry.node, entry.consumer), of.wait.as_ref()?))
    });
    let of_attachments =
        found.attachments.iter().filter_map(|of| Some((of.node_id.clone(), of.wait.as_ref()?)));
    of_volume.chain(of_claims).chain(of_queue).chain(of_attachments)
}

fn waits_for(who: &str, wait: &WaitExplained) -> String {
    let since = since_time(wait.since_usec);
    match who {
        "" => format!("{}{since}", wait.text),
        who => format!("{} ({who}){since}", wait.text),
    }
}

fn listed(of: &ClaimExplained) -> ClaimInList {
    of.claim.clone().unwrap_or_default()
}

fn row_of(of: &ClaimExplained) -> ClaimRow {
    listed(of).claim.unwrap_or_default()
}

fn name(row: &ClaimRow) -> String {
    format!("{}/{}", row.node, row.consumer)
}

fn acting(of: &Acting) -> String {
    let server = match (of.server.as_str(), of.gone, of.rpc.is_empty()) {
        (_, true, _) => "a server that is gone; another one goes on",
        ("", false, false) => "a server",
        ("", false, true) => "no server",
        (server, false, _) => server,
    };
    let rpc = if of.rpc.is_empty() { "the last call has no answer" } else { &of.rpc };
    let host = if of.host.is_empty() { String::new() } else { format!(" on node {}", of.host) };
    let claim = match (of.node.as_str(), of.consumer.as_str()) {
        ("", _) => String::new(),
        (node, "") => format!(" for node {node}"),
        (node, consumer) => format!(" for {node}/{consumer}"),
    };
    format!("{server}: {rpc}{host}{claim}{}", since_time(of.since_usec))
}

fn claims(found: &Explanation) -> String {
    let attached = |node: &str| {
        let at = found.attachments.iter().find(|at| at.node == node);
        at.map(|at| at.state.clone()).unwrap_or_default()
    };
    let rows = found.claims.iter().map(|of| {
        let (claim, row) = (listed(of), row_of(of));
        let used = row.r#use.clone().unwrap_or_default();
        let parked = if claim.parked { ", parked" } else { "" };
        let releasing = if row.releasing { ", releasing" } else { "" };
        [
            name(&row),
            used.mode,
            used.access_mode,
            format!("{}{releasing}{parked}", row.state),
            since(claim.since_usec),
            attached(&row.node),
            of.wait.as_ref().map(|wait| waits_for("", wait)).unwrap_or_default(),
        ]
    });
    match found.claims.is_empty() {
        true => String::new(),
        false => table(["HOLDER", "MODE", "ACCESS", "STATE", "SINCE", "ATTACHED", "WAITS FOR"], rows),
    }
}

/// Returns what AttachVolume has attached.
fn attachments(found: &Explanation) -> String {
    let by_call: Vec<_> = found.attachments.iter().filter(|of| !of.node_id.is_empty()).collect();
    let rows = by_call.iter().map(|of| {
        let wait = of.wait.as_ref().map(|wait| wait.text.clone()).unwrap_or_default();
        [of.node_id.clone(), of.node.clone(), of.state.clone(), wait]
    });
    match by_call.is_empty() {
        true => String::new(),
        false => table(["ATTACHED TO", "NODE", "STATE", "WAITS FOR"], rows),
    }
}

fn queue(queue: &[QueueExplained]) -> String {
    let rows = queue.iter().map(|of| {
        let QueueRow { node, consumer, r#use, since_usec } = of.entry.clone().unwrap_or_default();
        let wait = of.wait.as_ref().map(|wait| wait.text.clone()).unwrap_or_default();
        [format!("{node}/{consumer}"), r#use.unwrap_or_default().mode, since(since_usec), wait]
    });
    match queue.is_empty() {
        true => String::new(),
        false => table(["IN QUEUE", "MODE", "SINCE", "WAITS FOR"], rows),
    }
}

fn nodes(nodes: &[NodeExplained]) -> String {
    let rows = nodes.iter().map(|of| {
        let owes = if of.owes == 0 { String::new() } else { of.owes.to_string() };
        let state = if of.state.is_empty() { "unknown" } else { &of.state };
        let away = if of.away { "away" } else { "joined" };
        [of.node.clone(), state.to_owned(), away.to_owned(), owes]
    });
    match nodes.is_empty() {
        true => String::new(),
        false => table(["NODE", "STATE", "SESSION", "OWES"], rows),
    }
}

fn since(usec: u64) -> String {
    if usec == 0 { String::new() } else { timestamp(usec) }
}

/// Returns an explanation as JSON. `next`: the hint.
pub fn of_servers_json(found: &Explanation, next: &str) -> Value {
    let volume = found.volume.clone().unwrap_or_default();
    let wait = |of: Option<&WaitExplained>| match of {
        None => Value::Null,
        Some(of) => json!({
            "kind": of.kind,
            "text": of.text,
            "holders": of.holders,
            "node": of.node,
            "since-usec": of.since_usec,
        }),
    };
    let claims = found.claims.iter().map(|of| {
        let (claim, row) = (listed(of), row_of(of));
        let used = row.r#use.clone().unwrap_or_default();
        json!({
            "node": row.node,
            "consumer": row.consumer,
            "mode": used.mode,
            "access-mode": used.access_mode,
            "attachment-mode": used.attachment_mode,
            "state": row.state,
            "releasing": row.releasing,
            "parked": claim.parked,
            "by-mount": claim.by_mount,
            "uid": claim.uid,
            "error": claim.error,
            "since-usec": claim.since_usec,
            "waits-for": wait(of.wait.as_ref()),
        })
    });
    let attachments = found.attachments.iter().map(|of| {
        json!({
            "node": of.node,
            "node-id": of.node_id,
            "state": of.state,
            "consumers": of.consumers,
            "waits-for": wait(of.wait.as_ref()),
        })
    });
    let acting = found.acting.as_ref().map(|of| {
        json!({
            "server": of.server,
            "gone": of.gone,
            "rpc": of.rpc,
            "host": of.host,
            "node": of.node,
            "consumer": of.consumer,
            "since-usec": of.since_usec,
        })
    });
    let queue = found.queue.iter().map(|of| {
        let entry = of.entry.clone().unwrap_or_default();
        json!({
            "node": entry.node,
            "consumer": entry.consumer,
            "mode": entry.r#use.unwrap_or_default().mode,
            "since-usec": entry.since_usec,
            "waits-for": wait(of.wait.as_ref()),
        })
    });
    let nodes = found
        .nodes
        .iter()
        .map(|of| json!({ "node": of.node, "state": of.state, "away": of.away, "owes": of.owes }));
    json!({
        "namespace": volume.namespace,
        "volume": volume.volume,
        "plugin": volume.plugin,
        "standing": volume.standing,
        "error": volume.error,
        "waits-for": wait(found.wait.as_ref()),
        "claims": claims.collect::<Vec<_>>(),
        "claim-count": volume.claim_count,
        "attachments": attachments.collect::<Vec<_>>(),
        "acting": acting,
        "queue": queue.collect::<Vec<_>>(),
        "queue-count": volume.queue_count,
        "nodes": nodes.collect::<Vec<_>>(),
        "do": next,
    })
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::{AttachmentExplained, Use, VolumeRow};

    use super::*;

    pub fn explanation() -> Explanation {
        let used = Some(Use { mode: "write".into(), access_mode: "single".into(), ..Use::default() });
        let row = ClaimRow {
            node: "n1".into(),
            consumer: "web".into(),
            r#use: used.clone(),
            state: "taken".into(),
            releasing: true,
            ..ClaimRow::default()
        };
        let claim =
            ClaimInList { claim: Some(row), since_usec: 1_709_210_096_007_000, ..ClaimInList::default() };
        let wait = |kind: &str, text: &str, node: &str| {
            Some(WaitExplained {
                kind: kind.into(),
                text: text.into(),
                node: node.into(),
                ..WaitExplained::default()
            })
        };
        let unmounts = wait("node", "node n1 to unmount the volume", "n1").unwrap();
        let entry = QueueRow { node: "n2".into(), consumer: "job\u{1b}".into(), r#use: used, since_usec: 0 };
        Explanation {
            volume: Some(VolumeRow {
                namespace: "prod".into(),
                volume: "db".into(),
                plugin: "p".into(),
                ..VolumeRow::default()
            }),
            claims: vec![ClaimExplained {
                claim: Some(claim),
                wait: Some(WaitExplained { since_usec: 1_709_210_106_007_000, ..unmounts }),
            }],
            attachments: vec![AttachmentExplained {
                node: "n1".into(),
                state: "attached".into(),
                ..AttachmentExplained::default()
            }],
            acting: Some(Acting {
                server: "s1".into(),
                rpc: "CreateSnapshot".into(),
                host: "c1".into(),
                since_usec: 1_709_210_116_007_000,
                ..Acting::default()
            }),
            queue: vec![QueueExplained { entry: Some(entry), wait: wait("claims", "the end of n1/web", "") }],
            nodes: vec![NodeExplained { node: "n1".into(), state: "ready".into(), away: true, owes: 1 }],
            wait: None,
        }
    }

    #[test]
    fn explanation_is_facts_and_three_tables() {
        let expected = "    \
    volume: prod/db
    plugin: p
 waits for: node n1 to unmount the volume (n1/web) since 2024-02-29T12:35:06.007Z
      acts: s1: CreateSnapshot on node c1 since 2024-02-29T12:35:16.007Z
        do: fence it

HOLDER  MODE   ACCESS  STATE             SINCE                     ATTACHED  WAITS FOR
n1/web  write  single  taken, releasing  2024-02-29T12:34:56.007Z  attached  node n1 to unmount the volume since 2024-02-29T12:35:06.007Z

IN QUEUE  MODE   SINCE  WAITS FOR
n2/job\u{fffd}   write  -      the end of n1/web

NODE  STATE  SESSION  OWES
n1    ready  away     1
";
        assert_eq!(of_servers(&explanation(), "fence it".into()), expected);
        let value = of_servers_json(&explanation(), "fence it");
        assert_eq!(value["claims"][0]["waits-for"]["kind"], "node");
        assert_eq!(value["claims"][0]["waits-for"]["since-usec"], 1_709_210_106_007_000_u64);
        assert_eq!(value["acting"]["since-usec"], 1_709_210_116_007_000_u64);
        assert_eq!((&value["acting"]["host"], &value["nodes"][0]["away"]), (&json!("c1"), &json!(true)));
        let quiet = Explanation { volume: explanation().volume, ..Explanation::default() };
        assert!(of_servers(&quiet, String::new()).ends_with("waits for: nothing\n"));
    }

    #[test]
    fn acting_server_is_named_as_far_as_known() {
        let call = Acting { rpc: "CreateVolume".into(), ..Acting::default() };
        assert_eq!(acting(&call), "a server: CreateVolume");
        assert_eq!(acting(&Acting::default()), "no server: the last call has no answer");
        let gone = Acting { gone: true, node: "n1".into(), consumer: "web".into(), ..call };
        assert_eq!(acting(&gone), "a server that is gone; another one goes on: CreateVolume for n1/web");
    }
}
