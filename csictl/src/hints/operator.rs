//! Advice for operators of a cluster.

use csi_proto::cluster::v1::Explanation;

use super::Tried;
use super::common::{CAPABILITY, lacks_capability};
use crate::operator::{OperatorError, Skipped};
use crate::output::waits;
use crate::shell::quoted;

/// Returns the next step after an operator's command has failed.
pub fn of_operator(error: &OperatorError, tried: &Tried) -> Option<String> {
    let node = tried.node.as_deref().map_or_else(|| "NODE".to_owned(), quoted);
    let volume = tried.volume.as_deref().unwrap_or("NAMESPACE VOLUME");
    let hint = match error {
        OperatorError::File { .. } => {
            "The file names servers, ca, certificate and key; how to make them: /usr/share/doc/csid/docs/cluster-install.md. Another file: --operator=FILE."
                .to_owned()
        }
        OperatorError::OpenKey { path, .. } => format!(
            "Give it to its owner alone: `chmod 600 {}`. If others may have read it, make a new one.",
            quoted(&path.display().to_string())
        ),
        OperatorError::Foreign { path } => format!(
            "The operator's files belong to the operator or root, and nobody else can write to them: `ls -lL {}`.",
            quoted(&path.display().to_string())
        ),
        OperatorError::NoServer { skipped, .. } if let Some(plugin) = skipped.iter().find_map(uncalled) => {
            let plugin = quoted(plugin);
            format!(
                "No host calls that controller for the cluster: name {plugin} in `[cluster] controllers` of csid.toml of a host that has \
                 it, and give its node the grant `controller:{plugin}` in csid-server.toml."
            )
        }
        OperatorError::NoServer { .. } => {
            "On a server: `systemctl status csid-server`. Then repeat the command.".to_owned()
        }
        OperatorError::Unknown { .. } if tried.command == UPGRADE => {
            "Repeat the command, which is safe. What came of it: `csictl --operator cluster status`.".to_owned()
        }
        OperatorError::Unknown { .. } if tried.command.starts_with("server") => {
            "Repeat the command, which is safe. What came of it: `csictl server list`.".to_owned()
        }
        OperatorError::Unknown { .. } if !tried.command.starts_with("node") => {
            format!("Repeat the command, which is safe. What came of it: `csictl --operator volume show {volume}`.")
        }
        OperatorError::Unknown { .. } => {
            format!("Repeat the command, which is safe. What came of it: `csictl node show {node}`.")
        }
        OperatorError::Refused { kind, message, holders, .. } if is_of_volumes(tried.command) => {
            let kind = if holders.is_empty() { kind } else { HELD };
            return of_volume(kind, message, volume, tried);
        }
        OperatorError::Refused { kind, message, .. } => match kind.as_str() {
            "NotAuthorized" => {
                "Grants are in csid-server.toml, the same on each server. Nodes and servers need `read` in all namespaces (\"*\"); \
                 accept, block and forget need `admit` there, fence needs `fence`, drain and undrain need `drain`, upgrade, restored and resume \
                 need `cluster`."
                    .to_owned()
            }
            "NotFound" if tried.command == "node accept" && message.contains("has asked to join") => {
                format!("What asks to join now: `csictl node show {node}`.")
            }
            "NotFound" if tried.command.starts_with("server") => {
                "What the cluster waits for: `csictl server list`. Then repeat the command.".to_owned()
            }
            "NotFound" => "Nodes that have joined once: `csictl node list`.".to_owned(),
            "Busy" if tried.command == UPGRADE && message.contains("recovers") => {
                "Wait for the end of the recovery: `csictl --operator cluster status`. Then repeat the command.".to_owned()
            }
            "Busy" if tried.command == UPGRADE && message.contains("restored") => {
                "Say that etcd was restored: `csictl server restored`. Repeat the command when the cluster is normal: \
                 `csictl --operator cluster status`."
                    .to_owned()
            }
            "Busy" if tried.command == UPGRADE => {
                "Upgrade the package csid-server there, or stop that server: `csictl server list`. Then repeat the command.".to_owned()
            }
            "Busy" if tried.command.starts_with("server") => {
                "What the cluster waits for: `csictl server list`. Then repeat the command.".to_owned()
            }
            "Busy" if tried.command == "node forget" && !message.contains("has a session") => {
                format!("`csictl node drain {node}`, or `csictl node fence --help` if its machine is off. Its claims: `csictl --operator claims --node {node}`.")
            }
            "Busy" if message.contains("has a session") => {
                "Switch the earlier machine off, or stop csid and csid-link on it. Then repeat the command.".to_owned()
            }
            "Busy" => format!("See the node again: `csictl node show {node}`. Then repeat the command."),
            "InvalidArgument" => format!("Valid arguments: `csictl {} --help`.", tried.command),
            _ => return None,
        },
    };
    Some(hint)
}

/// The command that raises the version of the values in etcd.
const UPGRADE: &str = "server upgrade";

/// What a server says before the name of a plugin whose controller no host calls.
const UNCALLED: &str = "no node with a controller of plugin ";

/// The kind of an error with holders, whatever it was.
const HELD: &str = "ClaimConflict";

/// Returns whether a command is about volumes and claims, and not about nodes and servers.
fn is_of_volumes(command: &str) -> bool {
    ["volume", "claims", "release", "explain"].into_iter().any(|word| command.starts_with(word))
}

/// Returns the next step after servers have refused a command about a volume or its claims.
fn of_volume(kind: &str, message: &str, volume: &str, tried: &Tried) -> Option<String> {
    let name = volume.split_once(' ').map_or("VOLUME", |(_, name)| name);
    let holders = format!("`csictl --operator claims --volume {name}`");
    let hint = match kind {
        "NotAuthorized" if message.contains("another identity") => {
            format!(
                "Its owner changes it: `csictl --operator volume show {volume} --json` has the owner. If the owner is gone: \
                 `csictl --operator volume own {volume} --from OWNER`."
            )
        }
        "NotAuthorized" => "Grants are in csid-server.toml, the same on each server. Lists need `read` in the namespace, registrations \
                            `register`, `volume own` also `admit` in all namespaces, and a release `release-others`; with --force `fence`, too."
            .to_owned(),
        "NotFound" => "Registered volumes: `csictl --operator volume list`.".to_owned(),
        HELD if tried.command != "release" => format!("Who has claimed it: {holders}. Its consumers end, or: `csictl --operator release --help`."),
        HELD | "TimedOut" => format!(
            "The host unmounts the volume when no process uses it, and the claim ends then: {holders}. If the host is off for good: \
             repeat the command with --force."
        ),
        "Busy" => "Repeat the command.".to_owned(),
        "AlreadyExists" => "What has the plugin's volume: `csictl --operator volume list`.".to_owned(),
        "InvalidArgument" if lacks_capability(tried.command, message) => CAPABILITY.to_owned(),
        "InvalidArgument" => format!("Valid arguments: `csictl {} --help`.", tried.command),
        _ => return None,
    };
    Some(hint)
}

/// Returns the plugin whose controller no host calls for the cluster, if a server has said so.
fn uncalled(of: &Skipped) -> Option<&str> {
    let (_, rest) = of.why.split_once(UNCALLED)?;
    rest.split_once(" has joined this server").map(|(plugin, _)| plugin)
}

/// Returns what an operator does next about the first thing that waits. Empty: nothing is to be done.
pub fn explained_by_servers(found: &Explanation, tried: &Tried) -> String {
    let volume = tried.volume.as_deref().unwrap_or("NAMESPACE VOLUME");
    let Some((who, wait)) = waits(found).next() else { return String::new() };
    let is_away =
        |node: &str| found.nodes.iter().any(|of| of.node == node && of.away && of.state != "fenced");
    let fence = |node: &str| {
        let node = quoted(node);
        format!(
            "if node {node} is off for good: `csictl node fence {node} --reason TEXT`; else its claims end when it is back"
        )
    };
    let release = |holder: &str| {
        let (node, consumer) = holder.split_once('/').unwrap_or_default();
        format!("`csictl --operator release {volume} {} --node {}`", quoted(consumer), quoted(node))
    };
    let detach = |node_id: &str| format!("`csictl --operator volume detach {volume} {}`", quoted(node_id));
    let mut by_call = found.attachments.iter().filter(|of| !of.node_id.is_empty());
    let node = quoted(&wait.node);
    match wait.kind.as_str() {
        "node" if is_away(&wait.node) => fence(&wait.node),
        "node" => format!("on node {node}: `csictl explain {volume}`, which names the processes that use it"),
        "controller" => {
            "start csid and the plugin on a host with its controller: `csictl node list`".to_owned()
        }
        "parked" if by_call.any(|of| of.node_id == who) => {
            format!("remove the cause, then {}; the last resort is its --forget", detach(&who))
        }
        "parked" if who.is_empty() => "remove the cause, then repeat the creation or deletion".to_owned(),
        "parked" => format!("remove the cause, then {}", release(&who)),
        "claims" if let Some(of) = by_call.next() => {
            format!("who has attached it detaches it, or: {}", detach(&of.node_id))
        }
        "claims" => {
            match wait.holders.iter().find(|of| of.split_once('/').is_some_and(|(node, _)| is_away(node))) {
                Some(holder) => fence(holder.split_once('/').unwrap_or_default().0),
                None => wait
                    .holders
                    .first()
                    .map(|of| format!("the consumer ends it, or: {}", release(of)))
                    .unwrap_or_default(),
            }
        }
        "away" | "node-state" => format!("`csictl node show {node}`"),
        "word" => {
            let release = release(&who);
            let command = release.trim_end_matches('`');
            format!("unmount the volume on node {node}. If no other node uses it: {command} --force`")
        }
        "recovering" => "what the cluster waits for: `csictl server list`".to_owned(),
        _ if found.acting.as_ref().is_some_and(|of| is_away(&of.host)) => {
            let host = found.acting.as_ref().map(|of| quoted(&of.host)).unwrap_or_default();
            format!("start csid on node {host}, whose controller was called: `csictl node show {host}`")
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::{
        AttachmentExplained, NodeExplained, QueueExplained, QueueRow, WaitExplained,
    };

    use super::*;

    #[test]
    fn explanation_of_an_attachment_leads_to_a_detach() {
        let tried = Tried { volume: Some("prod db".into()), ..Tried::default() };
        let wait = |kind: &str| Some(WaitExplained { kind: kind.into(), ..WaitExplained::default() });
        let at = AttachmentExplained { node_id: "i 1".into(), ..AttachmentExplained::default() };
        let next = |found: Explanation| explained_by_servers(&found, &tried);
        let parked = AttachmentExplained { wait: wait("parked"), ..at.clone() };
        let parked = next(Explanation { attachments: vec![parked], ..Explanation::default() });
        let queue = vec![QueueExplained { entry: Some(QueueRow::default()), wait: wait("claims") }];
        let waits = next(Explanation { attachments: vec![at], queue, ..Explanation::default() });
        for hint in [parked, waits] {
            assert!(hint.contains("`csictl --operator volume detach prod db 'i 1'`"), "{hint}");
        }
    }

    #[test]
    fn explanation_leads_to_a_fence_or_a_release() {
        let tried = Tried { volume: Some("prod db".into()), ..Tried::default() };
        let next = |kind: &str, away: bool| {
            let wait = WaitExplained {
                kind: kind.into(),
                node: "n1".into(),
                holders: vec!["n1/web".into()],
                ..WaitExplained::default()
            };
            let nodes = vec![NodeExplained { node: "n1".into(), away, ..NodeExplained::default() }];
            explained_by_servers(&Explanation { wait: Some(wait), nodes, ..Explanation::default() }, &tried)
        };
        for (kind, away, due) in [
            ("node", true, "csictl node fence n1"),
            ("node", false, "csictl explain prod db"),
            ("claims", true, "csictl node fence n1"),
            ("claims", false, "csictl --operator release prod db web --node n1"),
            ("controller", false, "csictl node list"),
            ("away", true, "csictl node show n1"),
            ("recovering", false, "csictl server list"),
            ("word", false, " --force`"),
            ("parked", false, "repeat the creation or deletion"),
        ] {
            assert!(next(kind, away).contains(due), "{kind}: {}", next(kind, away));
        }
        assert_eq!(next("turn", false), "");
        assert_eq!(explained_by_servers(&Explanation::default(), &tried), "");
    }

    #[test]
    fn plugin_without_a_host_names_its_grant() {
        let skipped = |why: &str| Skipped { server: "s1:7443".into(), why: why.into() };
        let said = format!("{UNCALLED}nfs has joined this server");
        let error = OperatorError::NoServer {
            cluster: "prod".into(),
            skipped: vec![skipped("the server was not reached"), skipped(&said)],
        };
        let hint = of_operator(&error, &Tried::default()).unwrap();
        assert!(hint.contains("`controller:nfs`") && hint.contains("`[cluster] controllers`"), "{hint}");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../server/src/questions.rs");
        assert!(std::fs::read_to_string(source).unwrap().contains(UNCALLED), "a server says it");
    }

    #[test]
    fn hint_of_a_volume_names_its_holders_or_grants() {
        let refused = |kind: &str, command| {
            let error = OperatorError::Refused {
                kind: kind.into(),
                message: String::new(),
                retryable: false,
                holders: Vec::new(),
            };
            let volume = Some("prod db".to_owned());
            of_operator(&error, &Tried { command, volume, ..Tried::default() }).unwrap_or_default()
        };
        assert!(refused("ClaimConflict", "volume deregister").contains("claims --volume db"));
        assert!(refused("TimedOut", "release").contains("--force"));
        assert!(refused("NotAuthorized", "release").contains("release-others"));
        assert!(refused("NotAuthorized", "node list").contains("all namespaces"));
        assert!(refused("Busy", "server upgrade").contains("csictl server list"));
        assert!(refused("NotAuthorized", "server upgrade").contains("`cluster`"));
        assert!(refused("Busy", "server restored").contains("waits for"));
        assert!(refused("NotFound", "volume show").contains("volume list"));
        let unknown = OperatorError::Unknown { what: String::new(), skipped: Vec::new() };
        let tried = Tried { command: UPGRADE, ..Tried::default() };
        assert!(of_operator(&unknown, &tried).unwrap().contains("cluster status"));
        let tried = Tried { command: "volume register", volume: Some("prod db".into()), ..Tried::default() };
        assert!(of_operator(&unknown, &tried).unwrap().contains("volume show prod db"));
    }
}
