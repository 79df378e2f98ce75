//! What needs an operator in a cluster, each with the next command.

use csi_proto::cluster::v1::{Attention, ClusterStatus, ServerRow};

use crate::shell::quoted;

/// Something that needs an operator.
#[derive(Debug, PartialEq, Eq)]
pub struct Due {
    /// A word that stays the same: docs/cluster-operations.md has all.
    pub kind: String,
    /// The server, the node, or NAMESPACE/VOLUME. Empty: the whole cluster.
    pub name: String,
    pub text: String,
    /// The next step.
    pub next: String,
}

/// Returns what needs an operator: of the cluster and its servers, then of nodes and volumes.
pub fn attention(status: &ClusterStatus) -> Vec<Due> {
    let rows = status.servers.clone().unwrap_or_default();
    let due = |kind: &str, name: &str, text: String, next: String| Due {
        kind: kind.to_owned(),
        name: name.to_owned(),
        text,
        next,
    };
    let mut found = Vec::new();
    if rows.mode == "restored" {
        let text =
            "etcd is a backup, and no operator has said so: nothing is granted, and no node joins".to_owned();
        found.push(due("restored", "", text, "`csictl server restored`".to_owned()));
    }
    if rows.mode == "recovering" {
        let awaited = rows.awaited.len();
        let text =
            format!("the cluster recovers from a backup, grants no claims, and waits for {awaited} nodes");
        let next = match awaited {
            0 => "`csictl server list`, and if no machine is missing: `csictl server resume`",
            _ => "`csictl server list` names them; if some do not come back: `csictl server resume --help`",
        };
        found.push(due("recovering", "", text, next.to_owned()));
    }
    let knows = |row: &ServerRow, schema: u32| (row.schema_min..=row.schema_max).contains(&schema);
    for row in rows.servers.iter().filter(|row| !knows(row, rows.schema)) {
        let text = format!("it does not know values of version {}, and serves nothing", rows.schema);
        let (kind, next) = match row.schema_min > rows.schema {
            true => ("server-too-new", "install the earlier package csid-server there"),
            false => ("server-too-old", "upgrade the package csid-server there"),
        };
        found.push(due(kind, &row.name, text, next.to_owned()));
    }
    let newest = rows.servers.iter().map(|row| row.schema_max).max().unwrap_or_default();
    if newest > rows.schema {
        let text = format!("the values have version {}, and a server knows {newest}", rows.schema);
        let all = rows.servers.iter().all(|row| knows(row, newest));
        let next = if all { "`csictl server upgrade`" } else { "upgrade the other servers" };
        found.push(due("upgrade", "", text, next.to_owned()));
    }
    if rows.servers.windows(2).any(|pair| pair[0].grants != pair[1].grants) {
        let text = "the servers have different grants".to_owned();
        let next = "`csictl server list`; compare their csid-server.toml".to_owned();
        found.push(due("grants-differ", "", text, next));
    }
    found.extend(status.attention.iter().map(|of| Due {
        kind: of.kind.clone(),
        name: of.name.clone(),
        text: of.text.clone(),
        next: next(of),
    }));
    found
}

fn next(of: &Attention) -> String {
    let name = quoted(&of.name);
    match of.kind.as_str() {
        "node-away" => {
            format!("start it; if it is off for good: `csictl node fence {name} --reason TEXT`")
        }
        "etcd-full" => "/usr/share/doc/csid/docs/cluster-operations.md, \"A full etcd\"".to_owned(),
        "another-machine" => format!("`csictl node show {name}`, then `csictl node accept {name}`"),
        "unreadable-node" => "`csictl server audit`".to_owned(),
        "node-ahead-of-etcd" => {
            format!("if etcd was restored: `csictl server restored`; if not: `csictl node show {name}`")
        }
        "held-claim-refused" => {
            format!("`csictl server audit`, then `csictl server resume --forget {name}`")
        }
        "parked" => {
            let (namespace, volume) = of.name.split_once('/').unwrap_or_default();
            format!("`csictl --operator explain {} {}`", quoted(namespace), quoted(volume))
        }
        "attachment-of-backup" => {
            let (namespace, volume) = of.name.split_once('/').unwrap_or_default();
            let volume = format!("{} {}", quoted(namespace), quoted(volume));
            format!("repeat the AttachVolume, or `csictl --operator volume detach {volume} NODE`")
        }
        // A server of a later version knows more.
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::ServerRows;

    use super::*;

    #[test]
    fn each_thing_that_needs_an_operator_has_a_command() {
        let server = |name: &str, max: u32| ServerRow {
            name: name.into(),
            schema_min: 1,
            schema_max: max,
            ..ServerRow::default()
        };
        let of =
            |kind: &str, name: &str| Attention { kind: kind.into(), name: name.into(), text: "t".into() };
        let status = ClusterStatus {
            servers: Some(ServerRows {
                servers: vec![server("s1", 1), server("s2", 2)],
                schema: 2,
                mode: "recovering".into(),
                awaited: vec!["n6".into(), "n7".into()],
                ..ServerRows::default()
            }),
            attention: vec![
                of("etcd-full", ""),
                of("node-away", "n1"),
                of("another-machine", "n2"),
                of("unreadable-node", "n3"),
                of("node-ahead-of-etcd", "n4"),
                of("held-claim-refused", "n5"),
                of("parked", "prod/db"),
                of("attachment-of-backup", "prod/db"),
                of("of a later version", "x"),
            ],
            ..ClusterStatus::default()
        };
        let found = attention(&status);
        let kinds: Vec<&str> = found.iter().map(|due| due.kind.as_str()).collect();
        let due = [
            "recovering",
            "server-too-old",
            "etcd-full",
            "node-away",
            "another-machine",
            "unreadable-node",
            "node-ahead-of-etcd",
            "held-claim-refused",
            "parked",
            "attachment-of-backup",
            "of a later version",
        ];
        assert_eq!(kinds, due);
        assert_eq!(found[1].name, "s1");
        assert!(found[2].next.contains("A full etcd"), "{found:?}");
        assert!(found[3].next.contains("csictl node fence n1"), "{found:?}");
        assert!(
            found[0].text.contains("2 nodes") && found[0].next.contains("csictl server resume"),
            "{found:?}"
        );
        assert!(found[6].next.contains("csictl server restored"), "{found:?}");
        assert!(found[7].next.contains("csictl server resume"), "{found:?}");
        assert_eq!(found[8].next, "`csictl --operator explain prod db`");
        assert!(found[9].next.contains("`csictl --operator volume detach prod db NODE`"), "{found:?}");
        assert!(found[..10].iter().all(|due| !due.next.is_empty()), "{found:?}");
    }

    #[test]
    fn restored_etcd_leads_to_an_operators_word() {
        let servers = Some(ServerRows { mode: "restored".into(), ..ServerRows::default() });
        let found = attention(&ClusterStatus { servers, ..ClusterStatus::default() });
        assert_eq!(found.len(), 1, "{found:?}");
        let due = ("restored", "", "`csictl server restored`");
        assert_eq!((found[0].kind.as_str(), found[0].name.as_str(), found[0].next.as_str()), due);
    }

    #[test]
    fn upgrade_is_due_when_all_servers_know_it() {
        let server = |max| ServerRow { schema_min: 1, schema_max: max, ..ServerRow::default() };
        let next = |servers: Vec<ServerRow>| {
            let servers = Some(ServerRows { servers, schema: 1, ..ServerRows::default() });
            attention(&ClusterStatus { servers, ..ClusterStatus::default() })
        };
        assert_eq!(next(vec![server(1), server(1)]), []);
        assert_eq!(next(vec![server(1), server(2)])[0].next, "upgrade the other servers");
        assert_eq!(next(vec![server(2), server(2)])[0].next, "`csictl server upgrade`");
        let other = ServerRow { grants: "other".into(), ..server(1) };
        assert_eq!(next(vec![server(1), other])[0].kind, "grants-differ");
    }
}
