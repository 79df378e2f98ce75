//! A whole cluster on one screen.

use csi_proto::cluster::v1::ClusterStatus;
use serde_json::{Value, json};

use super::cluster::servers_json;
use super::text::{facts, table};
use crate::hints::Due;

/// The most rows of what needs an operator, if more are due. With the facts, the headings, a line for the rest and the shell's next prompt they
/// fill a screen of 24 lines.
const MOST: usize = 11;

/// Returns the text of a cluster's state. `due`: what needs an operator.
pub fn whole_cluster(status: &ClusterStatus, due: &[Due]) -> String {
    let rows = status.servers.clone().unwrap_or_default();
    let servers: Vec<String> =
        rows.servers.iter().map(|row| format!("{} {}", row.name, row.version)).collect();
    let nodes: Vec<String> = status.nodes.iter().map(|of| format!("{} {}", of.count, of.state)).collect();
    let all: u64 = status.nodes.iter().map(|of| of.count).sum();
    let nodes = if nodes.is_empty() { "0".to_owned() } else { format!("{all} ({})", nodes.join(", ")) };
    let work = match status.restless {
        0 => String::new(),
        restless => format!(", {restless} of them with work that is not done"),
    };
    let head = facts([
        ("cluster", format!("{}, {}", rows.cluster, rows.mode)),
        ("generation", rows.generation.to_string()),
        ("schema", rows.schema.to_string()),
        ("servers", format!("{} ({})", rows.servers.len(), servers.join(", "))),
        ("nodes", nodes),
        ("volumes", format!("{}{work}", status.volumes)),
        ("claims that nodes owe", status.owed.to_string()),
        ("parked", status.parked.to_string()),
        ("queued", status.queued.to_string()),
        ("needs an operator", if due.is_empty() { "nothing".to_owned() } else { String::new() }),
    ]);
    if due.is_empty() {
        return head;
    }
    let all = count_of(status, due);
    let more_than = |shown: usize| all.saturating_sub(u64::try_from(shown).unwrap_or(u64::MAX));
    // The list is cut where the last line would not fit. JSON has the whole list.
    let shown = match more_than(MOST + 1) {
        0 => due,
        _ => &due[..due.len().min(MOST)],
    };
    let more = match more_than(shown.len()) {
        0 => String::new(),
        more => format!("and {more} more\n"),
    };
    let rows = shown.iter().map(|of| [of.kind.clone(), of.name.clone(), of.text.clone(), of.next.clone()]);
    format!("{head}\n{}\n{more}", table(["NEEDS AN OPERATOR", "WHO", "WHAT", "DO"], rows))
}

/// Returns the number of all that needs an operator: what the server counts, and what csictl has found itself.
fn count_of(status: &ClusterStatus, due: &[Due]) -> u64 {
    let of_csictl = due.len().saturating_sub(status.attention.len()) as u64;
    status.attention_count.saturating_add(of_csictl)
}

/// Returns a cluster's state as JSON.
pub fn whole_cluster_json(status: &ClusterStatus, due: &[Due]) -> Value {
    let mut value = servers_json(&status.servers.clone().unwrap_or_default());
    let nodes: serde_json::Map<String, Value> =
        status.nodes.iter().map(|of| (of.state.clone(), json!(of.count))).collect();
    value["nodes"] = nodes.into();
    value["volumes"] = json!(status.volumes);
    value["restless"] = json!(status.restless);
    value["owed"] = json!(status.owed);
    value["parked"] = json!(status.parked);
    value["queued"] = json!(status.queued);
    let rows =
        due.iter().map(|of| json!({ "kind": of.kind, "name": of.name, "text": of.text, "do": of.next }));
    value["attention"] = rows.collect();
    value["attention-count"] = json!(count_of(status, due));
    value
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::{Attention, NodeCount, ServerRow, ServerRows};

    use super::*;

    fn status() -> ClusterStatus {
        let server =
            ServerRow { name: "s1".into(), version: "0.1.0".into(), schema_max: 1, ..ServerRow::default() };
        let node = |state: &str, count| NodeCount { state: state.into(), count };
        ClusterStatus {
            servers: Some(ServerRows {
                servers: vec![server],
                cluster: "prod".into(),
                mode: "normal".into(),
                schema: 1,
                generation: 1,
                ..ServerRows::default()
            }),
            nodes: vec![node("away", 1), node("ready", 2)],
            volumes: 5,
            restless: 1,
            owed: 1,
            ..ClusterStatus::default()
        }
    }

    #[test]
    fn quiet_cluster_is_a_screen_of_facts() {
        let expected = "              \
              cluster: prod, normal
           generation: 1
               schema: 1
              servers: 1 (s1 0.1.0)
                nodes: 3 (1 away, 2 ready)
              volumes: 5, 1 of them with work that is not done
claims that nodes owe: 1
               parked: 0
               queued: 0
    needs an operator: nothing
";
        assert_eq!(whole_cluster(&status(), &[]), expected);
    }

    #[test]
    fn long_list_is_cut_at_the_end_of_a_screen() {
        let due = |count| -> Vec<Due> {
            let of = |n| Due {
                kind: "node-away".into(),
                name: format!("n{n}"),
                text: "it has no session".into(),
                next: "start it".into(),
            };
            (0..count).map(of).collect()
        };
        let attention = |count: usize| vec![Attention::default(); count];
        for (of_csictl, of_server, all, more) in
            [(0, 12, 12, None), (0, 13, 13, Some(2)), (3, 64, 70, Some(59)), (0, 12, 13, Some(2))]
        {
            let status = ClusterStatus {
                attention: attention(of_server),
                attention_count: all - of_csictl,
                ..status()
            };
            let due = due(of_csictl as usize + of_server);
            let text = whole_cluster(&status, &due);
            assert!(text.trim_end().lines().count() <= 23, "{text}");
            let rest = more.map(|more| format!("\nand {more} more\n"));
            assert_eq!(text.contains("more\n"), rest.is_some(), "{text}");
            assert!(rest.is_none_or(|rest| text.ends_with(&rest)), "{all} in all: {text}");
            let rows = whole_cluster_json(&status, &due);
            assert_eq!(
                rows["attention"].as_array().map(Vec::len),
                Some(due.len()),
                "JSON has the whole list"
            );
            assert_eq!(rows["attention-count"], json!(all));
        }
    }

    #[test]
    fn what_needs_an_operator_is_a_table() {
        let due = Due {
            kind: "node-away".into(),
            name: "n1\u{1b}".into(),
            text: "it has no session".into(),
            next: "start it".into(),
        };
        let status = ClusterStatus { attention_count: 3, ..status() };
        let text = whole_cluster(&status, std::slice::from_ref(&due));
        let expected = "
NEEDS AN OPERATOR  WHO  WHAT               DO
node-away          n1\u{fffd}  it has no session  start it
and 3 more
";
        assert!(text.ends_with(expected), "{text}");
        let value = whole_cluster_json(&status, &[due]);
        assert_eq!((&value["nodes"]["ready"], &value["attention"][0]["do"]), (&json!(2), &json!("start it")));
    }
}
