//! The sessions of nodes with this server.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use csi_proto::cluster::v1::to_node::Is;
use csi_proto::cluster::v1::{ClaimChanged, ToNode};
use tokio::sync::{mpsc, oneshot};

use crate::failure::ServerError;

/// Messages that wait for a slow node.
pub const WAITING: usize = 64;

/// A message to a node, or the end of its session.
pub type Outgoing = Result<ToNode, tonic::Status>;

/// The sessions, one of each node. That of the later join ends the other one, whose connection is dead.
#[derive(Default)]
pub struct Sessions(Mutex<Table>);

#[derive(Default)]
struct Table {
    of: HashMap<String, Session>,
    next: u64,
}

struct Session {
    number: u64,
    /// The revision of the join.
    revision: u64,
    sender: mpsc::Sender<Outgoing>,
    /// Claims whose release the node was asked for.
    asked: HashSet<String>,
    /// Ends the session's task: with a reason, or when it is dropped.
    end: oneshot::Sender<ServerError>,
}

/// A session in the table. Its drop removes it.
pub struct Entered<'a> {
    sessions: &'a Sessions,
    node: String,
    number: u64,
    /// Resolves with the reason when the session is to end. An error: a session of a later join has its place.
    pub over: oneshot::Receiver<ServerError>,
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn count(&self) -> usize {
        self.lock().of.len()
    }

    pub fn has(&self, node: &str) -> bool {
        self.lock().of.contains_key(node)
    }

    /// Returns the nodes that have a session, and the number of each session.
    pub fn nodes(&self) -> Vec<(String, u64)> {
        self.lock().of.iter().map(|(node, session)| (node.clone(), session.number)).collect()
    }

    /// Ends a session, unless a later one has its place.
    pub fn end(&self, node: &str, number: u64, reason: ServerError) {
        let mut table = self.lock();
        if table.of.get(node).is_some_and(|session| session.number == number)
            && let Some(session) = table.of.remove(node)
        {
            // A failure means that the session has ended already.
            let _ = session.end.send(reason);
        }
    }

    /// Enters a session, and sends its first message. No other message passes it. A session whose node has joined here later is over
    /// at once, and gets no message.
    pub fn enter(
        &self,
        node: &str,
        revision: u64,
        sender: mpsc::Sender<Outgoing>,
        first: ToNode,
    ) -> Entered<'_> {
        let (end, over) = oneshot::channel();
        let mut table = self.lock();
        table.next += 1;
        let number = table.next;
        if table.of.get(node).is_none_or(|present| present.revision < revision) {
            // A failure means that the node is away, which ends the session.
            let _ = sender.try_send(Ok(first));
            let session = Session { number, revision, sender, asked: HashSet::new(), end };
            table.of.insert(node.to_owned(), session);
        }
        drop(table);
        Entered { sessions: self, node: node.to_owned(), number, over }
    }

    /// Asks the nodes that have a session here for the releases that are due. A node is asked once in a session.
    pub fn ask_for_releases(&self, due: &[(String, ClaimChanged)]) {
        let mut table = self.lock();
        for (node, changed) in due {
            if let Some(session) = table.of.get_mut(node)
                && !session.asked.contains(&changed.claim)
                && session.sender.try_send(Ok(ToNode { is: Some(Is::Changed(changed.clone())) })).is_ok()
            {
                session.asked.insert(changed.claim.clone());
            }
        }
        let due: HashSet<&str> = due.iter().map(|(_, changed)| changed.claim.as_str()).collect();
        for session in table.of.values_mut() {
            session.asked.retain(|claim| due.contains(claim.as_str()));
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut table = self.sessions.lock();
        if table.of.get(&self.node).is_some_and(|session| session.number == self.number) {
            table.of.remove(&self.node);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(claim: &str) -> Vec<(String, ClaimChanged)> {
        vec![("n1".to_owned(), ClaimChanged { claim: claim.to_owned(), ..ClaimChanged::default() })]
    }

    fn is_over(entered: &mut Entered<'_>) -> bool {
        !matches!(entered.over.try_recv(), Err(oneshot::error::TryRecvError::Empty))
    }

    #[tokio::test]
    async fn later_session_ends_the_earlier_one() {
        let sessions = Sessions::default();
        let mut first = sessions.enter("n1", 1, mpsc::channel(1).0, ToNode::default());
        let mut second = sessions.enter("n1", 2, mpsc::channel(1).0, ToNode::default());
        assert!(is_over(&mut first) && !is_over(&mut second));
        drop(first);
        assert!(sessions.has("n1"), "the drop of the earlier session removed the later one");
        drop(second);
        assert_eq!(sessions.count(), 0);
    }

    #[tokio::test]
    async fn session_ends_by_its_own_number_alone() {
        let sessions = Sessions::default();
        let mut entered = sessions.enter("n1", 1, mpsc::channel(1).0, ToNode::default());
        let (node, number) = sessions.nodes().remove(0);
        sessions.end(&node, number + 1, ServerError::denied("another session"));
        assert!(sessions.has("n1") && !is_over(&mut entered));
        sessions.end(&node, number, ServerError::denied("this one"));
        assert!(!sessions.has("n1"));
        assert!(entered.over.try_recv().is_ok_and(|reason| reason.to_string().contains("this one")));
    }

    /// Two Hellos of a node are answered out of their order.
    #[tokio::test]
    async fn session_of_the_earlier_join_is_over_at_once() {
        let sessions = Sessions::default();
        let mut later = sessions.enter("n1", 7, mpsc::channel(1).0, ToNode::default());
        let (sender, mut receiver) = mpsc::channel(1);
        let mut earlier = sessions.enter("n1", 5, sender, ToNode::default());
        assert!(is_over(&mut earlier) && !is_over(&mut later));
        assert!(receiver.try_recv().is_err(), "the earlier session got a Welcome");
        drop(earlier);
        assert!(sessions.has("n1") && !is_over(&mut later));
    }

    #[tokio::test]
    async fn first_message_comes_when_the_session_is_there() {
        let sessions = Sessions::default();
        let (sender, mut receiver) = mpsc::channel(2);
        let _entered = sessions.enter("n1", 1, sender, ToNode::default());
        sessions.ask_for_releases(&due("a"));
        assert_eq!(receiver.try_recv().unwrap().unwrap(), ToNode::default());
        assert!(receiver.try_recv().unwrap().unwrap().is.is_some());
    }

    #[tokio::test]
    async fn release_is_asked_for_once_in_a_session() {
        let sessions = Sessions::default();
        let (sender, mut receiver) = mpsc::channel(1);
        let _entered = sessions.enter("n1", 1, sender, ToNode::default());
        receiver.try_recv().unwrap().unwrap();
        sessions.ask_for_releases(&due("a"));
        sessions.ask_for_releases(&due("a"));
        receiver.try_recv().unwrap().unwrap();
        assert!(receiver.try_recv().is_err(), "asked twice");
        sessions.ask_for_releases(&[]);
        sessions.ask_for_releases(&due("a"));
        sessions.ask_for_releases(&[("n1".to_owned(), due("b").remove(0).1), due("a").remove(0)]);
        assert!(receiver.try_recv().is_ok(), "a release that was over and is due again");
        sessions.ask_for_releases(&[due("b").remove(0), due("a").remove(0)]);
        let asked = receiver.try_recv().unwrap().unwrap();
        assert!(matches!(asked.is, Some(Is::Changed(changed)) if changed.claim == "b"), "it was full before");
    }
}
