//! Names of a cluster's members: the one URI name of a certificate, `csid://CLUSTER/ROLE/NAME`.

use std::fmt;

/// The longest name of a cluster or of its members, in bytes.
const NAME: usize = 63;

/// What a member of a cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    Node,
    Server,
    Operator,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Node => "node",
            Role::Server => "server",
            Role::Operator => "operator",
        })
    }
}

/// A member of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    pub cluster: String,
    pub role: Role,
    pub name: String,
}

/// Writes ROLE/NAME, as grants name it.
impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.role, self.name)
    }
}

impl Identity {
    /// Reads the URI names of a certificate. `None`: there is not exactly one, or it is no member's.
    pub fn of<'a>(uris: impl IntoIterator<Item = &'a str>) -> Option<Identity> {
        let mut uris = uris.into_iter();
        let uri = uris.next()?;
        if uris.next().is_some() {
            return None;
        }
        let mut parts = uri.strip_prefix("csid://")?.split('/');
        let (cluster, role, name) = (parts.next()?, parts.next()?, parts.next()?);
        let role = match role {
            "node" => Role::Node,
            "server" => Role::Server,
            "operator" => Role::Operator,
            _ => return None,
        };
        let is_whole = parts.next().is_none() && is_member_name(cluster) && is_member_name(name);
        is_whole.then(|| Identity { cluster: cluster.to_owned(), role, name: name.to_owned() })
    }
}

/// Returns whether a text is a name of DNS in small letters, of at most 63 bytes. Each label begins and ends with a letter or digit.
pub fn is_member_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        bytes.iter().all(|byte| is_plain(*byte) || *byte == b'-')
            && bytes.first().is_some_and(|byte| is_plain(*byte))
            && bytes.last().is_some_and(|byte| is_plain(*byte))
    };
    name.len() <= NAME && name.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_uri_of_three_names_is_an_identity() {
        let read = Identity::of(["csid://prod/node/db-1.example"]).unwrap();
        assert_eq!(
            (read.cluster.as_str(), read.role, read.to_string().as_str()),
            ("prod", Role::Node, "node/db-1.example")
        );
        for wrong in [
            &["csid://prod/node/a", "csid://prod/node/b"][..],
            &["csid://prod/node/a", "https://example"],
            &[],
            &["csid://prod/node"],
            &["csid://prod/node/a/b"],
            &["csid://prod/node/"],
            &["csid:///node/a"],
            &["csid://prod/root/a"],
            &["csid://prod/Node/a"],
            &["csid://prod/node/A"],
            &["csid://prod/node/*"],
            &["csid://prod/node/a%2fb"],
            &["csid://prod/node/a."],
            &["csid://prod/node/-a"],
            &["spiffe://prod/node/a"],
        ] {
            assert_eq!(Identity::of(wrong.iter().copied()), None, "{wrong:?}");
        }
        assert!(is_member_name(&"a".repeat(63)) && !is_member_name(&"a".repeat(64)));
    }
}
