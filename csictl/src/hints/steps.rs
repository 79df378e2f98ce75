//! csid's steps that hints depend on, in the contract's words.

/// The step of a command in a plugin that the configuration refuses.
pub(super) const DISABLED: &str = "read the configuration";

/// The step of a claim that the plugin's limit of volumes refuses.
pub(super) const LIMIT: &str = "count the plugin's volumes";

/// The step of a claim of a volume that this node cannot reach.
pub(super) const TOPOLOGY: &str = "look at the topology";

/// The step of a claim that the servers of the cluster are asked for.
pub(super) const CLAIM: &str = "claim";

/// The step of a forced release.
pub(super) const FORGET: &str = "forget";

/// The step of an operation that waits for its turn.
pub(super) const QUEUED: &str = "queued";

/// The step of an operation whose plugin does not serve.
pub(super) const WAITING: &str = "waiting for plugin";

/// The steps of operations that wait for others.
pub(super) const UNUSED: &str = "waiting until nobody has it";

pub(super) const CLAIMS: &str = "waiting for claims";

pub(super) const OTHER_VOLUMES: &str = "waiting for another volume's claims";

pub(super) const SNAPSHOT: &str = "waiting for the snapshot";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_words_are_in_csids_source() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../csid/src/error.rs");
        let steps = std::fs::read_to_string(path).unwrap();
        for step in [
            DISABLED,
            LIMIT,
            TOPOLOGY,
            CLAIM,
            FORGET,
            QUEUED,
            WAITING,
            UNUSED,
            CLAIMS,
            OTHER_VOLUMES,
            SNAPSHOT,
        ] {
            assert!(steps.contains(&format!("=> \"{step}\"")), "no step is called {step}");
        }
    }
}
