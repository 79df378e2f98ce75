//! Places of callers: how many calls, sessions and lists one identity has at the same time. No identity takes the places of another.
//!
//! A limit is of an identity. Where memory or etcd bounds a kind in all, one identity has a part of that at most.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csi_proto::identity::{Identity, Role};
use csid::{Error, Kind};
use tokio::time::Instant;

use crate::failure::{Result, ServerError};
use crate::metrics::Metrics;

/// What has a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kept {
    /// A call until its answer begins. One connection makes as many at most, so a caller with one connection is never refused.
    Call,
    /// A session, from before its Hello.
    Session,
    /// A list. It has pages in memory until its reader takes them.
    List,
    /// A walk over etcd.
    Audit,
    /// A question to a plugin's controller.
    Question,
}

impl Kept {
    #[cfg(test)]
    const ALL: [Kept; 5] = [Kept::Call, Kept::Session, Kept::List, Kept::Audit, Kept::Question];

    /// Returns the limit of one identity.
    fn of_identity(self, is_operator: bool) -> usize {
        match self {
            Kept::Call => 128,
            // Several commands of one operator run at the same time.
            Kept::List if is_operator => 8,
            // A session that is lost has its place for some seconds, and the node joins again meanwhile.
            Kept::Session | Kept::List | Kept::Question => 4,
            Kept::Audit => 1,
        }
    }

    fn plural(self) -> &'static str {
        match self {
            Kept::Call => "calls",
            Kept::Session => "sessions",
            Kept::List => "lists",
            Kept::Audit => "audits",
            Kept::Question => "questions",
        }
    }
}

/// The limits of all identities together: lists of nodes, and lists and audits of operators.
const LISTS: usize = 64;
const OPERATORS_LISTS: usize = 16;
const AUDITS: usize = 2;
/// The limit of questions of all nodes, and that of all operators.
const QUESTIONS: usize = 32;

/// The Hellos that a node may say at once, and the time in which it may say one more. Each may write to etcd.
const HELLOS: u32 = 300;
const BETWEEN_HELLOS: Duration = Duration::from_millis(200);

/// The places of all identities.
pub struct Places {
    table: Mutex<Table>,
    /// The limit of identities with a session.
    sessions: usize,
    metrics: Metrics,
}

#[derive(Default)]
struct Table {
    /// The counts of each identity that has a place, by kind.
    of: HashMap<(String, Kept), usize>,
    /// The identities with a session, and the places of other kinds in all, by whether they are operators'.
    all: HashMap<(bool, Kept), usize>,
    /// When each node may have said its Hellos but one. Nodes that have said none for long are not in it.
    hellos: HashMap<String, Instant>,
}

/// A place. Its drop frees it.
pub struct HeldPlace {
    places: Arc<Places>,
    key: (String, Kept),
    is_operator: bool,
}

impl Places {
    /// `sessions`: how many nodes have a session at the same time.
    pub fn new(sessions: usize, metrics: Metrics) -> Places {
        Places { table: Mutex::default(), sessions, metrics }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place, or refuses the caller.
    pub fn enter(self: &Arc<Self>, caller: &Identity, kind: Kept) -> Result<HeldPlace> {
        let is_operator = caller.role == Role::Operator;
        let key = (caller.to_string(), kind);
        let mut table = self.lock();
        let own = table.of.get(&key).copied().unwrap_or(0);
        if own >= kind.of_identity(is_operator) {
            return Err(self.full(
                kind.plural(),
                format!("{caller} has {own} {} at this server, its limit", kind.plural()),
            ));
        }
        let all = table.all.get(&(is_operator, kind)).copied().unwrap_or(0);
        let (most, counts) = match kind {
            Kept::Call => (usize::MAX, true),
            // A node that joins again needs no place of another.
            Kept::Session => (self.sessions, own == 0),
            Kept::List if is_operator => (OPERATORS_LISTS, true),
            Kept::List => (LISTS, true),
            Kept::Audit => (AUDITS, true),
            Kept::Question => (QUESTIONS, true),
        };
        if counts && all >= most {
            return Err(
                self.full(kind.plural(), format!("this server has {all} {}, its limit", kind.plural()))
            );
        }
        if counts {
            table.all.insert((is_operator, kind), all + 1);
        }
        table.of.insert(key.clone(), own + 1);
        Ok(HeldPlace { places: self.clone(), key, is_operator })
    }

    /// Returns the error of a limit.
    fn full(&self, limit: &'static str, text: String) -> ServerError {
        self.metrics.refused_by(limit);
        Error::new(Kind::RateLimited, text).into()
    }

    /// Counts a Hello of a node, or refuses it.
    pub fn hello(&self, caller: &Identity) -> Result<()> {
        let now = Instant::now();
        let window = BETWEEN_HELLOS * HELLOS;
        let mut table = self.lock();
        // A node is in the table for as long as its Hellos count.
        table.hellos.retain(|_, until| *until > now);
        let until = table.hellos.entry(caller.to_string()).or_insert(now);
        if *until + BETWEEN_HELLOS > now + window {
            let text = format!("{caller} has said {HELLOS} Hellos within {} s, its limit", window.as_secs());
            return Err(self.full("hellos", text));
        }
        *until += BETWEEN_HELLOS;
        Ok(())
    }
}

impl Drop for HeldPlace {
    fn drop(&mut self) {
        let mut table = self.places.lock();
        let left = table.of.get(&self.key).map_or(0, |count| count.saturating_sub(1));
        let counts = self.key.1 != Kept::Session || left == 0;
        match left {
            0 => drop(table.of.remove(&self.key)),
            left => drop(table.of.insert(self.key.clone(), left)),
        }
        let all = (self.is_operator, self.key.1);
        if counts && let Some(count) = table.all.get_mut(&all) {
            *count = count.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(role: Role, name: &str) -> Identity {
        Identity { cluster: "prod".into(), role, name: name.into() }
    }

    fn places(sessions: usize) -> Arc<Places> {
        Arc::new(Places::new(sessions, Metrics::default()))
    }

    fn kind(refused: Result<HeldPlace>) -> (Kind, bool) {
        match refused.err() {
            Some(ServerError::Refused(error)) => (error.kind, error.details.retryable),
            _ => panic!("the place was given"),
        }
    }

    #[test]
    fn identity_has_its_places_and_no_more() {
        let places = places(100);
        let (a, b) = (identity(Role::Node, "a"), identity(Role::Node, "b"));
        for of in Kept::ALL {
            let held: Vec<_> = (0..of.of_identity(false)).map(|_| places.enter(&a, of).unwrap()).collect();
            assert_eq!(kind(places.enter(&a, of)), (Kind::RateLimited, true));
            assert!(places.enter(&b, of).is_ok(), "{of:?}: a keeps b out");
            assert!(places.enter(&identity(Role::Operator, "a"), of).is_ok(), "{of:?}: the role counts");
            drop(held);
            assert!(places.enter(&a, of).is_ok());
        }
        assert!(places.lock().of.is_empty() && places.lock().all.values().all(|count| *count == 0));
    }

    #[test]
    fn one_operator_leaves_lists_and_audits_to_others() {
        let places = places(100);
        for of in [Kept::List, Kept::Audit] {
            let mut held = Vec::new();
            while let Ok(place) = places.enter(&identity(Role::Operator, "a"), of) {
                held.push(place);
            }
            assert!(places.enter(&identity(Role::Operator, "b"), of).is_ok(), "{of:?}");
        }
    }

    #[test]
    fn lists_of_nodes_leave_those_of_operators_free() {
        let places = places(100);
        let lists = |role, of: usize| {
            let enter = |n| places.enter(&identity(role, &format!("n{n}")), Kept::List);
            (0..of).map(enter).collect::<Result<Vec<_>>>()
        };
        let _nodes = lists(Role::Node, LISTS).unwrap();
        assert_eq!(kind(places.enter(&identity(Role::Node, "more"), Kept::List)), (Kind::RateLimited, true));
        let _operators = lists(Role::Operator, OPERATORS_LISTS).unwrap();
        assert!(places.enter(&identity(Role::Operator, "more"), Kept::List).is_err());
    }

    #[test]
    fn node_with_a_session_joins_again_when_all_are_taken() {
        let places = places(2);
        let session = |name| places.enter(&identity(Role::Node, name), Kept::Session);
        let (a, b) = (session("a").unwrap(), session("b").unwrap());
        assert_eq!(kind(session("c")), (Kind::RateLimited, true));
        let again = session("a").unwrap();
        drop(a);
        assert!(session("c").is_err(), "a has its session still");
        drop(again);
        assert!(session("c").is_ok());
        drop(b);
    }

    #[tokio::test(start_paused = true)]
    async fn hellos_are_bounded_for_each_node() {
        let places = places(100);
        let (a, b) = (identity(Role::Node, "a"), identity(Role::Node, "b"));
        for n in 0..HELLOS {
            assert!(places.hello(&a).is_ok(), "{n}");
        }
        assert!(places.hello(&a).is_err() && places.hello(&b).is_ok());
        tokio::time::advance(BETWEEN_HELLOS).await;
        assert!(places.hello(&a).is_ok() && places.hello(&a).is_err());
        tokio::time::advance(BETWEEN_HELLOS * HELLOS * 2).await;
        assert!((0..HELLOS).all(|_| places.hello(&b).is_ok()) && places.hello(&b).is_err());
        assert_eq!(places.lock().hellos.len(), 1, "a is forgotten");
    }
}
