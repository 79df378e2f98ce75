//! The facts about a command, and advice that several hints give.

/// The facts about a command that a hint needs.
#[derive(Clone, Default)]
pub struct Tried {
    /// The subcommand, `mount`.
    pub command: &'static str,
    pub plugin: Option<String>,
    /// `NAMESPACE VOLUME CONSUMER`, and of an unmount its `--tag TAG` or `--all-tags`; quoted for a shell.
    pub mount: Option<String>,
    /// `NAMESPACE VOLUME`, quoted for a shell.
    pub volume: Option<String>,
    /// A node of a cluster.
    pub node: Option<String>,
    pub operation: Option<String>,
}

/// The hint for a volume without a capability.
pub(super) const CAPABILITY: &str = "Give --access-mode MODE, such as single-node-writer.";

/// Returns whether csid or a server has refused a volume for want of capabilities.
pub(super) fn lacks_capability(command: &str, message: &str) -> bool {
    ["volume create", "volume register"].contains(&command)
        && ["capabilities is missing", "capabilities is empty"].iter().any(|text| message.contains(text))
}

pub(super) const HELPER: &str = "If csid-helper.socket has failed (`systemctl status csid-helper.socket csid-helper.service`): \
                      `systemctl reset-failed csid-helper.socket csid-helper.service; systemctl start \
                      csid-helper.socket`. Your mounts stay. Then repeat the command.";

pub(super) const STOPPING: &str = "csid is stopping; repeat it when csid is back: `systemctl status csid`.";

pub(super) const HELD: &str = "End what holds it; csid then continues by itself.";

pub(super) const ORPHAN: &str =
    "`csictl reconcile --dry-run` shows it; `csictl reconcile --remove-orphans` or `umount PATH` removes it.";
