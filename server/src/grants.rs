//! What identities may do. What no grant allows is refused.

use std::sync::{Arc, PoisonError, RwLock};

use anyhow::{Result, ensure};
use csi_proto::identity::{Identity, Role};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const GRANTS: usize = 1000;
const ENTRIES: usize = 100;

/// A `[[grant]]` of the configuration.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Grant {
    /// ROLE/NAME. A last `*` stands for any rest of the name.
    pub who: String,
    /// `*` is every namespace.
    pub namespaces: Vec<String>,
    pub may: Vec<String>,
}

/// A word of `may`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum May {
    /// A node has sessions.
    Join,
    /// A node claims volumes for itself.
    Mount,
    Read,
    Register,
    Create,
    Delete,
    Expand,
    Snapshot,
    /// Attaches volumes to nodes by the plugin's names of these, and detaches them.
    Attach,
    ClaimFor,
    ReleaseOthers,
    Fence,
    /// An operator decides which machines are nodes. Nodes are of all namespaces.
    Admit,
    /// An operator has a node get no more claims.
    Drain,
    /// An operator changes what is the whole cluster's: the version of its values, and its recovery from a backup.
    Cluster,
}

impl May {
    pub fn word(self) -> &'static str {
        match self {
            May::Join => "join",
            May::Mount => "mount",
            May::Read => "read",
            May::Register => "register",
            May::Create => "create",
            May::Delete => "delete",
            May::Expand => "expand",
            May::Snapshot => "snapshot",
            May::Attach => "attach",
            May::ClaimFor => "claim-for",
            May::ReleaseOthers => "release-others",
            May::Fence => "fence",
            May::Admit => "admit",
            May::Drain => "drain",
            May::Cluster => "cluster",
        }
    }
}

/// The beginning of a word that has the name of a plugin, whose controller calls a node may be sent.
const CONTROLLER: &str = "controller:";

/// The grants of a server. A reload replaces them.
#[derive(Debug, Default)]
pub struct Grants(RwLock<Arc<Vec<Grant>>>);

impl Grants {
    pub fn new(grants: Vec<Grant>) -> Result<Grants> {
        ensure!(grants.len() <= GRANTS, "{} grants are more than {GRANTS}", grants.len());
        for Grant { who, namespaces, may } in &grants {
            let name = who.strip_prefix("node/").or_else(|| who.strip_prefix("operator/"));
            let name = name.map(|name| name.strip_suffix('*').unwrap_or(name));
            let is_named = name.is_some_and(|name| {
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b))
            });
            ensure!(
                is_named && !who.ends_with('/'),
                "grant: who is neither node/NAME nor operator/NAME: {who:?}"
            );
            ensure!(
                !namespaces.is_empty() && namespaces.len() <= ENTRIES,
                "grant of {who}: namespaces has no entry, or more than {ENTRIES}"
            );
            let is_bad = |name: &String| name.is_empty() || (name.contains('*') && name != "*");
            let bad = namespaces.iter().find(|name| is_bad(name));
            ensure!(bad.is_none(), "grant of {who}: namespaces is neither names nor \"*\": {bad:?}");
            ensure!(
                !may.is_empty() && may.len() <= ENTRIES,
                "grant of {who}: may has no entry, or more than {ENTRIES}"
            );
            let unknown = may.iter().find(|word| !is_word(word));
            ensure!(unknown.is_none(), "grant of {who}: may has an unknown word: {unknown:?}");
        }
        Ok(Grants(RwLock::new(Arc::new(grants))))
    }

    fn now(&self) -> Arc<Vec<Grant>> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the grants by `new`.
    pub fn replace(&self, new: &Grants) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = new.now();
    }

    /// Returns whether the identity may do this in a namespace.
    pub fn allow(&self, identity: &Identity, namespace: &str, may: May) -> bool {
        self.has(identity, may, |grant| grant.namespaces.iter().any(|name| name == "*" || name == namespace))
    }

    /// Returns whether a node may be sent calls to a plugin's controller for volumes of a namespace. `None`: of some namespace.
    pub fn allow_controller(&self, node: &Identity, namespace: Option<&str>, plugin: &str) -> bool {
        let of_node = |grant: &Grant| is_of(grant, node) && names_controller(grant, namespace, plugin);
        node.role == Role::Node && self.now().iter().any(of_node)
    }

    /// Returns whether some node may be sent such calls.
    pub fn name_controller(&self, namespace: Option<&str>, plugin: &str) -> bool {
        let of_nodes =
            |grant: &Grant| grant.who.starts_with("node/") && names_controller(grant, namespace, plugin);
        self.now().iter().any(of_nodes)
    }

    /// Returns whether the identity may do this in some namespace.
    pub fn allow_anywhere(&self, identity: &Identity, may: May) -> bool {
        self.has(identity, may, |_| true)
    }

    /// Returns whether the identity may do this in all namespaces, which is needed for what belongs to none.
    pub fn allow_everywhere(&self, identity: &Identity, may: May) -> bool {
        self.has(identity, may, |grant| grant.namespaces.iter().any(|name| name == "*"))
    }

    /// Returns whether the identity has a grant with this word of which `is_meant` is true.
    fn has(&self, identity: &Identity, may: May, is_meant: impl Fn(&Grant) -> bool) -> bool {
        let of_role = match may {
            May::Join | May::Mount => identity.role == Role::Node,
            May::Admit | May::Drain | May::Cluster => identity.role == Role::Operator,
            _ => identity.role != Role::Server,
        };
        let has_word = |grant: &Grant| grant.may.iter().any(|word| word == may.word());
        of_role && self.now().iter().any(|grant| is_of(grant, identity) && has_word(grant) && is_meant(grant))
    }

    /// Returns a digest, which is the same for the same grants.
    pub fn digest(&self) -> String {
        let text = serde_json::to_vec(&*self.now()).unwrap_or_default();
        Sha256::digest(text)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Returns whether a grant names a plugin's controller for volumes of a namespace. `None`: of some namespace.
fn names_controller(grant: &Grant, namespace: Option<&str>, plugin: &str) -> bool {
    let is_in = |namespace| grant.namespaces.iter().any(|name| name == "*" || name == namespace);
    let names = |word: &String| word.strip_prefix(CONTROLLER) == Some(plugin);
    namespace.is_none_or(is_in) && grant.may.iter().any(names)
}

fn is_of(grant: &Grant, identity: &Identity) -> bool {
    let who = identity.to_string();
    match grant.who.strip_suffix('*') {
        Some(prefix) => who.starts_with(prefix),
        None => grant.who == who,
    }
}

fn is_word(word: &str) -> bool {
    let known = [
        May::Join,
        May::Mount,
        May::Read,
        May::Register,
        May::Create,
        May::Delete,
        May::Expand,
        May::Snapshot,
        May::Attach,
        May::ClaimFor,
        May::ReleaseOthers,
        May::Fence,
        May::Admit,
        May::Drain,
        May::Cluster,
    ];
    known.iter().any(|may| may.word() == word)
        || word.strip_prefix(CONTROLLER).is_some_and(|plugin| !plugin.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(role: Role, name: &str) -> Identity {
        Identity { cluster: "prod".into(), role, name: name.into() }
    }

    fn grant(who: &str, namespaces: &[&str], may: &[&str]) -> Grant {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Grant { who: who.into(), namespaces: owned(namespaces), may: owned(may) }
    }

    #[test]
    fn only_what_a_grant_names_is_allowed() {
        let grants = Grants::new(vec![
            grant("node/ctl-*", &["*"], &["mount", "join"]),
            grant("operator/a", &["prod"], &["read", "register"]),
        ])
        .unwrap();
        let node = identity(Role::Node, "ctl-1");
        assert!(grants.allow(&node, "prod", May::Mount) && grants.allow_anywhere(&node, May::Join));
        assert!(!grants.allow(&node, "prod", May::Read));
        assert!(!grants.allow(&identity(Role::Node, "db-1"), "prod", May::Mount));
        let operator = identity(Role::Operator, "a");
        assert!(grants.allow(&operator, "prod", May::Register));
        assert!(!grants.allow(&operator, "test", May::Register));
        assert!(!grants.allow(&operator, "prod", May::ReleaseOthers));
        assert!(!grants.allow(&identity(Role::Operator, "ab"), "prod", May::Read), "a name is no prefix");
        assert!(!grants.allow(&identity(Role::Node, "a"), "prod", May::Read), "a role is part of the name");
    }

    #[test]
    fn grant_of_one_namespace_is_none_of_all() {
        let grants = Grants::new(vec![
            grant("operator/a", &["prod"], &["read", "admit"]),
            grant("operator/b", &["prod", "*"], &["read", "admit"]),
            grant("node/*", &["*"], &["read", "admit"]),
        ])
        .unwrap();
        let everywhere = |role, name, may| grants.allow_everywhere(&identity(role, name), may);
        assert!(!everywhere(Role::Operator, "a", May::Read) && !everywhere(Role::Operator, "a", May::Admit));
        assert!(everywhere(Role::Operator, "b", May::Read) && everywhere(Role::Operator, "b", May::Admit));
        assert!(!everywhere(Role::Node, "n1", May::Admit), "a node admits no nodes");
    }

    #[test]
    fn controller_is_of_a_node_a_plugin_and_a_namespace() {
        let grants = Grants::new(vec![
            grant("node/ctl-*", &["prod"], &["controller:ceph"]),
            grant("operator/a", &["*"], &["controller:ceph"]),
        ])
        .unwrap();
        let allow =
            |role, name, namespace, plugin| grants.allow_controller(&identity(role, name), namespace, plugin);
        assert!(allow(Role::Node, "ctl-1", Some("prod"), "ceph") && allow(Role::Node, "ctl-1", None, "ceph"));
        assert!(!allow(Role::Node, "ctl-1", Some("test"), "ceph"));
        assert!(
            !allow(Role::Node, "ctl-1", Some("prod"), "cep") && !allow(Role::Node, "ctl-1", None, "cephfs")
        );
        assert!(!allow(Role::Node, "db-1", None, "ceph") && !allow(Role::Operator, "a", None, "ceph"));
        let name = |namespace, plugin| grants.name_controller(namespace, plugin);
        assert!(name(Some("prod"), "ceph") && name(None, "ceph"));
        assert!(!name(Some("test"), "ceph"), "an operator runs no controller");
        assert!(!name(Some("prod"), "cephfs") && !name(None, "cep"));
    }

    #[test]
    fn servers_and_mounting_operators_have_no_grant() {
        assert!(Grants::new(vec![grant("server/*", &["*"], &["read"])]).is_err());
        let grants = Grants::new(vec![grant("operator/*", &["*"], &["mount", "join"])]).unwrap();
        let operator = identity(Role::Operator, "a");
        assert!(!grants.allow(&operator, "x", May::Mount) && !grants.allow_anywhere(&operator, May::Join));
    }

    #[test]
    fn grant_with_a_wrong_word_is_refused() {
        for wrong in [
            grant("*", &["*"], &["read"]),
            grant("node/", &["*"], &["join"]),
            grant("node/A", &["*"], &["join"]),
            grant("node/*a", &["*"], &["join"]),
            grant("node/a", &[], &["join"]),
            grant("node/a", &["pro*"], &["join"]),
            grant("node/a", &["*"], &[]),
            grant("node/a", &["*"], &["everything"]),
            grant("node/a", &["*"], &["controller:"]),
        ] {
            assert!(Grants::new(vec![wrong.clone()]).is_err(), "{wrong:?}");
        }
    }
}
