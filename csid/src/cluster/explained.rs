//! What a server says of a volume, as csid's Explain shows it. A server's text is cut, and no list of it is longer than its limit.

use csi_proto::cluster::v1::{
    AttachmentExplained, ClaimExplained, ClaimRow, Explanation, NodeExplained, QueueExplained, WaitExplained,
};
use csi_proto::time::since;

use crate::error::presentable;
use crate::volume::servers::ServersExplanation;

/// The most claims, queue entries, attachments and nodes that an explanation names, each.
const ROWS: usize = 16;
/// The limit of a text, in bytes.
const TEXT: usize = 256;

/// Reads a server's explanation for the node `own`. csid has what it knows of the node's own claims.
pub(super) fn read_explanation(of: Explanation, own: &str) -> ServersExplanation {
    let mut read = ServersExplanation::default();
    let text = |wait: &WaitExplained| presentable(&wait.text, TEXT);
    let is_own = |claim: &&ClaimExplained| {
        claim.claim.as_ref().and_then(|of| of.claim.as_ref()).is_some_and(|claim| claim.node == own)
    };
    let of_claim = of.claims.iter().filter(is_own).find_map(|of| of.wait.as_ref());
    let is_own = |queued: &&QueueExplained| queued.entry.as_ref().is_some_and(|entry| entry.node == own);
    let own_wait =
        of_claim.or_else(|| of.queue.iter().filter(is_own).find_map(|of| of.wait.as_ref())).map(text);
    for of in of.claims.iter().take(ROWS) {
        let Some(listed) = &of.claim else { continue };
        let Some(claim) = &listed.claim else { continue };
        let name = name_of(&claim.node, &claim.consumer);
        let wait = of.wait.as_ref().map(text);
        if claim.node != own {
            read.holders.push(name.clone());
            read.steps.push(format!("claim of {name}: {}{}", state(claim), since(listed.since_usec)));
        }
        let began = of.wait.as_ref().map_or(0, |wait| wait.since_usec);
        read.steps.extend(wait.map(|wait| format!("claim of {name} waits for {wait}{}", since(began))));
    }
    for of in of.queue.iter().take(ROWS) {
        let (Some(entry), Some(wait)) = (&of.entry, of.wait.as_ref().map(text)) else { continue };
        let (name, since) = (name_of(&entry.node, &entry.consumer), since(entry.since_usec));
        read.steps.push(format!("{name} waits in the queue for {wait}{since}"));
    }
    let is_shown = |at: &&AttachmentExplained| at.node != own || !at.node_id.is_empty();
    for at in of.attachments.iter().filter(is_shown).take(ROWS) {
        let of_claims = at.node_id.is_empty();
        let node = presentable(if of_claims { &at.node } else { &at.node_id }, TEXT);
        if !of_claims {
            read.holders.push(format!("node {node}"));
        }
        read.steps.push(format!("node {node}: {}", presentable(&at.state, TEXT)));
        read.steps.extend(at.wait.as_ref().map(|wait| format!("node {node} waits for {}", text(wait))));
    }
    if let Some(acting) = of.acting {
        let [rpc, host, node] = [&acting.rpc, &acting.host, &acting.node].map(|text| presentable(text, TEXT));
        let at = if host.is_empty() { String::new() } else { format!(" on node {host}") };
        let for_node = if node.is_empty() { String::new() } else { format!(" for node {node}") };
        let since = since(acting.since_usec);
        read.steps.push(match rpc.is_empty() {
            true => format!("the servers' last controller call{at} has no answer{since}"),
            false => format!("a server calls {rpc}{at}{for_node}{since}"),
        });
    }
    read.steps.extend(of.nodes.iter().take(ROWS).filter_map(state_of_node));
    let of_attachment = || of.attachments.iter().find_map(|at| at.wait.as_ref());
    read.waiting_for =
        own_wait.or_else(|| of.wait.as_ref().or_else(of_attachment).map(text)).unwrap_or_default();
    read
}

fn name_of(node: &str, consumer: &str) -> String {
    presentable(&format!("{node}/{consumer}"), TEXT)
}

fn state(claim: &ClaimRow) -> String {
    let releasing = if claim.releasing { ", releasing" } else { "" };
    format!("{}{releasing}", presentable(&claim.state, TEXT))
}

/// Returns what is to be known of a node. `None`: it is ready and there, and ends no claim.
fn state_of_node(of: &NodeExplained) -> Option<String> {
    let away = of.away.then(|| "away".to_owned());
    let state = match of.state.as_str() {
        "ready" => None,
        "" => Some("unknown to the servers".to_owned()),
        state => Some(presentable(state, TEXT)),
    };
    let owes = (of.owes > 0).then(|| format!("has yet to unmount it for {} claims", of.owes));
    let all: Vec<String> = [state, away, owes].into_iter().flatten().collect();
    (!all.is_empty()).then(|| format!("node {}: {}", presentable(&of.node, TEXT), all.join(", ")))
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::{Acting, ClaimInList, QueueRow};

    use super::*;

    fn wait(text: &str) -> Option<WaitExplained> {
        Some(WaitExplained { text: text.into(), ..WaitExplained::default() })
    }

    fn claim(node: &str, releasing: bool, wait: Option<WaitExplained>) -> ClaimExplained {
        let row = ClaimRow {
            node: node.into(),
            consumer: "web".into(),
            state: "taken".into(),
            releasing,
            ..ClaimRow::default()
        };
        let since_usec = 1_709_210_096_007_000;
        let claim = Some(ClaimInList { claim: Some(row), since_usec, ..ClaimInList::default() });
        ClaimExplained { claim, wait }
    }

    #[test]
    fn servers_part_names_holders_waits_and_nodes() {
        let queued = QueueRow { node: "n1".into(), consumer: "job".into(), ..QueueRow::default() };
        let attachment = AttachmentExplained {
            node: "n2".into(),
            state: "attached".into(),
            ..AttachmentExplained::default()
        };
        let mut unmount = wait("node n2 to unmount the volume");
        unmount.as_mut().unwrap().since_usec = 1_709_210_106_007_000;
        let explanation = Explanation {
            claims: vec![claim("n2", true, unmount)],
            queue: vec![QueueExplained { entry: Some(queued), wait: wait("the end of n2/web") }],
            attachments: vec![attachment],
            acting: Some(Acting {
                rpc: "ControllerPublishVolume".into(),
                node: "n2".into(),
                since_usec: 1_709_210_116_007_000,
                ..Acting::default()
            }),
            nodes: vec![
                NodeExplained { node: "n2".into(), state: "draining".into(), away: true, owes: 1 },
                NodeExplained { node: "n1".into(), state: "ready".into(), ..NodeExplained::default() },
            ],
            ..Explanation::default()
        };
        let read = read_explanation(explanation, "n1");
        assert_eq!(
            (read.waiting_for.as_str(), read.holders),
            ("the end of n2/web", vec!["n2/web".to_owned()])
        );
        let due = [
            "claim of n2/web: taken, releasing since 2024-02-29T12:34:56.007Z",
            "claim of n2/web waits for node n2 to unmount the volume since 2024-02-29T12:35:06.007Z",
            "n1/job waits in the queue for the end of n2/web",
            "node n2: attached",
            "a server calls ControllerPublishVolume for node n2 since 2024-02-29T12:35:16.007Z",
            "node n2: draining, away, has yet to unmount it for 1 claims",
        ];
        assert_eq!(read.steps, due);
    }

    #[test]
    fn text_of_a_lying_server_is_bounded() {
        let long = "x\n".repeat(100_000);
        let claims = vec![claim("n2", false, wait(&long)); 10_000];
        let read = read_explanation(Explanation { claims, ..Explanation::default() }, "n1");
        assert_eq!((read.holders.len(), read.steps.len()), (ROWS, 2 * ROWS));
        assert!(read.steps.iter().all(|step| step.len() < 512 && !step.contains('\n')));
    }
}
