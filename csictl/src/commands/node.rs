//! The commands about a cluster's nodes. Operators ask the cluster's servers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::admin_client::AdminClient;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    Accept, AttachmentName, Block, BlockAsk, DrainAsk, FenceAsk, ForgetAsk, Machine, NodeAsk, NodeChange,
    NodeRow, NodesAsk, UndrainAsk,
};
use csi_proto::time::timestamp;

use super::common::{confirmed_by, pairs};
use crate::{
    args::{self, Node},
    hints::Tried,
    operator::{ANSWER, Servers},
    output::{self, plain, print, print_json},
};

/// How long csictl waits for a fence. The server's command may take 45 s, and the server gives up after 70 s.
pub const FENCE: Duration = Duration::from_secs(68);
/// The time between two looks at a node that drains.
const LOOK: Duration = Duration::from_secs(1);
/// The state of a node that is blocked.
const BLOCKED: &str = "blocked";

pub async fn node(servers: &Servers, command: Node, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    match command {
        Node::List => {
            tried.command = "node list";
            let nodes = servers
                .call(None, async |channel| {
                    let mut pages = AdminClient::new(channel).nodes(NodesAsk::default()).await?.into_inner();
                    let mut nodes = Vec::new();
                    while let Some(page) = pages.message().await? {
                        nodes.extend(page.nodes);
                    }
                    Ok(nodes)
                })
                .await?;
            if json {
                print_json(&nodes.iter().map(output::node_json).collect::<Vec<_>>())?;
            } else if nodes.is_empty() {
                eprintln!("No nodes.");
            } else {
                print(&output::nodes(&nodes))?;
            }
        }
        Node::Show { node } => {
            about("node show", &node, tried);
            let row = show(servers, &node).await?;
            if json { print_json(&output::node_json(&row))? } else { print(&output::node(&row))? }
        }
        Node::Accept(accept) => self::accept(servers, accept, json, tried).await?,
        Node::Block(args::Block { node, reason }) => {
            about("node block", &node, tried);
            let what = format!("block node {node}");
            let row = set(servers, &node, &what, Change::Block(BlockAsk { reason })).await?;
            anyhow::ensure!(
                row.state == BLOCKED,
                "a server said that it is done, and node {node} is {}",
                plain(&row.state)
            );
            changed(&row, json)?;
        }
        Node::Fence(fence) => self::fence(servers, fence, json, tried).await?,
        Node::Drain(drain) => self::drain(servers, drain, json, tried).await?,
        Node::Undrain { node } => {
            about("node undrain", &node, tried);
            let what = format!("undrain node {node}");
            changed(&set(servers, &node, &what, Change::Undrain(UndrainAsk {})).await?, json)?;
        }
        Node::Forget { node } => {
            about("node forget", &node, tried);
            set(servers, &node, &format!("forget node {node}"), Change::Forget(ForgetAsk {})).await?;
        }
    }
    Ok(())
}

fn about(command: &'static str, node: &str, tried: &mut Tried) {
    tried.command = command;
    tried.node = Some(node.to_owned());
}

pub async fn show(servers: &Servers, node: &str) -> anyhow::Result<NodeRow> {
    let ask = NodeAsk { node: node.to_owned() };
    servers
        .call(None, async |channel| Ok(AdminClient::new(channel).node(ask.clone()).await?.into_inner()))
        .await
}

async fn set(servers: &Servers, node: &str, what: &str, change: Change) -> anyhow::Result<NodeRow> {
    set_within(ANSWER, servers, node, what, change).await
}

/// Changes a node. The change again is the same, so the next server may be asked for it.
async fn set_within(
    limit: Duration,
    servers: &Servers,
    node: &str,
    what: &str,
    change: Change,
) -> anyhow::Result<NodeRow> {
    let ask = NodeChange { node: node.to_owned(), change: Some(change) };
    servers
        .call_within(limit, Some(what), async |channel| {
            Ok(AdminClient::new(channel).set_node(ask.clone()).await?.into_inner())
        })
        .await
}

/// Prints a changed node for programs.
fn changed(row: &NodeRow, json: bool) -> std::io::Result<()> {
    if json { print_json(&output::node_json(row)) } else { Ok(()) }
}

/// Drains a node, and waits until nothing is left if that is wanted.
async fn drain(
    servers: &Servers,
    args: args::DrainNode,
    json: bool,
    tried: &mut Tried,
) -> anyhow::Result<()> {
    let args::DrainNode { node, wait, deadline } = args;
    about("node drain", &node, tried);
    let begun = Instant::now();
    let row = set(servers, &node, &format!("drain node {node}"), Change::Drain(DrainAsk {})).await?;
    if !wait {
        changed(&row, json)?;
        if row.claims > 0 {
            eprintln!("Node {node} has {} claims. What is left of them: csictl node show {node}", row.claims);
        }
        return Ok(());
    }
    let left = |row: &NodeRow| match output::is_drained(row) {
        true => Ok(None),
        false => output::drain_note(row)
            .map(Some)
            .ok_or_else(|| anyhow::anyhow!("node {node} drains no more: it is {}", plain(&row.state))),
    };
    let row = wait_until(servers, row, (begun, deadline), left, "is not drained", json).await?;
    changed(&row, json)?;
    Ok(())
}

/// Looks at a node each second until nothing is left, and returns its row. `left` returns what is left; an error ends the wait. At the deadline, counted
/// from its begin, it prints the row and fails: the node "`is_not`". `None`: there is no deadline.
async fn wait_until(
    servers: &Servers,
    mut row: NodeRow,
    (begun, deadline): (Instant, Option<Duration>),
    left: impl Fn(&NodeRow) -> anyhow::Result<Option<String>>,
    is_not: &str,
    json: bool,
) -> anyhow::Result<NodeRow> {
    let node = row.node.clone();
    let mut said = String::new();
    while let Some(left) = left(&row)? {
        if deadline.is_some_and(|deadline| begun.elapsed() >= deadline) {
            if json {
                print_json(&output::node_json(&row))?
            } else {
                print(&output::node(&row))?
            }
            anyhow::bail!("node {node} {is_not}: {}", plain(&left));
        }
        if left != said {
            eprintln!("Node {node}: {}", plain(&left));
            said = left;
        }
        let rest = deadline.map(|deadline| deadline.saturating_sub(begun.elapsed()));
        tokio::time::sleep(rest.unwrap_or(LOOK).min(LOOK)).await;
        row = show(servers, &node).await?;
    }
    Ok(row)
}

/// Fences the node as the operator has seen it, and waits until its claims have ended if that is wanted. A machine that has rebooted since is another one.
async fn fence(servers: &Servers, args: args::Fence, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    let args::Fence { node, reason, without_command, wait, deadline, confirm } = args;
    about("node fence", &node, tried);
    let row = show(servers, &node).await?;
    let session = match row.sessions.is_empty() {
        true => "It has no session.",
        false => "It has a session now, so it is not off yet.",
    };
    let what = format!(
        "Node {node} has {} claims, which end now: other nodes get the volumes. {session} Its machine has to be off, or two machines may write \
         to a volume.",
        row.claims
    );
    confirmed_by("--confirm", &node, &confirm, &plain(&what))?;
    let change = Change::Fence(FenceAsk { reason, revision: row.revision, by_hand: without_command });
    let begun = Instant::now();
    let fenced = set_within(FENCE, servers, &node, &format!("fence node {node}"), change).await?;
    let waited = match wait {
        true => {
            let left = |row: &NodeRow| match row.claims {
                0 => Ok(None),
                _ if row.fence.is_none() => {
                    anyhow::bail!("node {node} is fenced no more: it is {}", plain(&row.state))
                }
                claims => Ok(Some(format!("{claims} claims end when their volumes are detached"))),
            };
            wait_until(servers, fenced.clone(), (begun, deadline), left, "still has claims", json).await
        }
        false => {
            if fenced.claims > 0 {
                eprintln!(
                    "{} claims of node {node} end when their volumes are detached: csictl --operator claims --node {node}",
                    fenced.claims
                );
            }
            Ok(fenced.clone())
        }
    };
    if let Ok(row) = &waited {
        changed(row, json)?;
    }
    // Only the answer to the fence names them.
    let row = fenced;
    let volume = |of: &AttachmentName| format!("{}/{}", of.namespace, of.volume);
    for of in &row.left {
        let why = match of.node.is_empty() || of.node == node {
            true => format!("nobody has accepted this name of node {node}"),
            false => format!("it was attached for node {}", of.node),
        };
        let text = format!("volume {} is still attached to {}: {why}", volume(of), of.node_id);
        eprintln!("{}", plain(&text));
    }
    if row.left_count > 0 {
        eprintln!(
            "{} attachments are left; detach those whose machine is off: csictl --operator volume detach NS VOL NODE",
            row.left_count
        );
    }
    waited.map(drop)
}

/// Accepts the machine that the operator has seen, and no other that has asked since.
async fn accept(servers: &Servers, args: args::Accept, json: bool, tried: &mut Tried) -> anyhow::Result<()> {
    let args::Accept { node, machine_id, unblock, forget, name } = args;
    about("node accept", &node, tried);
    let row = show(servers, &node).await?;
    let own = row.machine.clone().unwrap_or_default();
    if row.state == BLOCKED && !unblock {
        let Block { by, reason, .. } = row.block.unwrap_or_default();
        let why = if reason.is_empty() { String::new() } else { format!(" ({})", plain(&reason)) };
        anyhow::bail!("node {node} is blocked by {}{why}; --unblock ends that", plain(&by));
    }
    if forget && row.ahead.is_none() {
        anyhow::bail!("node {node} has seen nothing that etcd does not have");
    }
    let machine = match &row.other {
        Some(other)
            if row.state != BLOCKED
                && !forget
                && (name.is_empty() || machine_id.as_ref().is_some_and(|given| *given != own.machine_id)) =>
        {
            let from = match other.machine_id == own.machine_id {
                true => format!("the journal {}", other.journal_id),
                false => format!("the machine {} with the journal {}", other.machine_id, other.journal_id),
            };
            let what = format!(
                "Node {node} is the machine {} with the journal {} until now. From now on it is {from}, which asked to join at {}. Its claims ({}) \
                 become the new one's. The earlier machine has to be off, or two machines may write to a volume.",
                own.machine_id,
                own.journal_id,
                timestamp(other.refused_usec),
                row.claims,
            );
            // The IDs are those of Hellos.
            confirmed_by("--machine-id", &other.machine_id, &machine_id, &plain(&what))?;
            other.clone()
        }
        _ if machine_id.as_ref().is_some_and(|given| *given != own.machine_id) => {
            anyhow::bail!("node {node}: the machine is {}, and no other has asked to join", own.machine_id)
        }
        _ => own,
    };
    let Machine { machine_id, journal_id, .. } = machine;
    let what = format!("accept node {node}");
    let names = pairs(name).unwrap_or_default();
    let revision = row.revision;
    let change = Change::Accept(Accept { machine_id, journal_id, revision, forget, names: names.clone() });
    let after = set(servers, &node, &what, change).await?;
    let missing = not_accepted(&names, &after);
    if !missing.is_empty() {
        anyhow::bail!(
            "node {node}: the server has not accepted {missing}. Is it of an earlier release? Upgrade all servers (csictl server list), and type the command again"
        );
    }
    changed(&after, json)?;
    Ok(())
}

/// Returns the names that an answer does not have as accepted, by plugin. A server of an earlier release does not know them.
fn not_accepted(names: &BTreeMap<String, String>, after: &NodeRow) -> String {
    let is_missing = |(plugin, name): &(&String, &String)| after.accepted_ids.get(*plugin) != Some(*name);
    let missing = names.iter().filter(is_missing).map(|(plugin, name)| plain(&format!("{plugin}={name}")));
    missing.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_that_a_server_does_not_know_is_named() {
        let names = [("p", "i-1"), ("q", "i-2")].map(|(plugin, name)| (plugin.to_owned(), name.to_owned()));
        let of = |accepted: &[(String, String)]| {
            let accepted_ids = accepted.iter().cloned().collect();
            not_accepted(&names.clone().into(), &NodeRow { accepted_ids, ..NodeRow::default() })
        };
        assert_eq!(of(&names), "");
        assert_eq!(of(&names[1..]), "p=i-1");
        assert_eq!(of(&[]), "p=i-1, q=i-2");
    }
}
