//! Advice for operators of a cluster.

use super::Tried;
use crate::operator::OperatorError;
use crate::shell::quoted;

/// Returns the next step after an operator's command has failed.
pub fn of_operator(error: &OperatorError, tried: &Tried) -> Option<String> {
    let node = tried.node.as_deref().map_or_else(|| "NODE".to_owned(), quoted);
    let hint = match error {
        OperatorError::File { .. } => {
            "The file names servers, ca, certificate and key; how to make them: /usr/share/doc/csid/docs/cluster.md. Another file: --operator=FILE."
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
        OperatorError::NoServer { .. } => {
            "On a server: `systemctl status csid-server`. Then repeat the command.".to_owned()
        }
        OperatorError::Unknown { .. } => {
            format!("Repeat the command, which is safe. What came of it: `csictl node show {node}`.")
        }
        OperatorError::Refused { kind, message, .. } => match kind.as_str() {
            "NotAuthorized" => {
                "Grants are in csid-server.toml, the same on each server. Nodes and servers need `read` in all namespaces (\"*\"); \
                 accept and block need `admit` there."
                    .to_owned()
            }
            "NotFound" if tried.command == "node accept" && message.contains("has asked to join") => {
                format!("What asks to join now: `csictl node show {node}`.")
            }
            "NotFound" => "Nodes that have joined once: `csictl node list`.".to_owned(),
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
