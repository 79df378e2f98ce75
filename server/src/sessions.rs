//! The sessions of nodes with this server.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use csi_proto::cluster::v1::to_node::Is;
use csi_proto::cluster::v1::{CallEnded, ControllerCall, Drain, Expand, ToNode};
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
    /// In the order of the nodes: the simulation repeats what it did.
    of: BTreeMap<String, Session>,
    next: u64,
}

struct Session {
    number: u64,
    /// The revision of the join.
    revision: u64,
    sender: mpsc::Sender<Outgoing>,
    /// What the node was asked for: claims that it has to release, and expansions.
    asked: HashSet<String>,
    /// The number of the drain that the node was sent. 0: it does not drain.
    drain: u64,
    /// Plugins with a healthy controller on the node, as the node reports, and what each does.
    controllers: HashMap<String, Hosted>,
    /// Controller calls that the node was sent, by their names.
    /// In an order: their drop wakes who waits.
    calls: BTreeMap<String, Waiting>,
    /// Ends the session's task: with a reason, or when it is dropped.
    end: oneshot::Sender<ServerError>,
}

/// A plugin's controller on a node, as the node reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hosted {
    pub attaches: bool,
    /// The node's csid knows the calls that change nothing.
    pub answers: bool,
}

/// A controller call without an answer. It is dropped with the session: nothing answers it any more.
struct Waiting {
    epoch: u64,
    ended: oneshot::Sender<CallEnded>,
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

    /// Returns how many sessions are of nodes with a healthy controller, and how many of others.
    pub fn roles(&self) -> [(&'static str, u64); 2] {
        let table = self.lock();
        let of = |has: bool| table.of.values().filter(|of| of.controllers.is_empty() != has).count();
        [("node", of(false)), ("controller", of(true))]
            .map(|(role, count)| (role, u64::try_from(count).unwrap_or(u64::MAX)))
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
            let drain = match &first.is {
                Some(Is::Welcome(welcome)) => welcome.drain,
                _ => 0,
            };
            // A failure means that the node is away, which ends the session.
            let _ = sender.try_send(Ok(first));
            let (asked, controllers, calls) = Default::default();
            let session = Session { number, revision, sender, asked, drain, controllers, calls, end };
            table.of.insert(node.to_owned(), session);
        }
        drop(table);
        Entered { sessions: self, node: node.to_owned(), number, over }
    }

    /// Has a session's node learn of its drain by the drain's number. 0: it does not drain. If its channel is full, the next look sends it.
    pub fn set_drain(&self, node: &str, number: u64, drain: u64) {
        let mut table = self.lock();
        if let Some(session) = table.of.get_mut(node).filter(|of| of.number == number && of.drain != drain)
            && session.sender.try_send(Ok(ToNode { is: Some(Is::Drain(Drain { number: drain })) })).is_ok()
        {
            session.drain = drain;
        }
    }

    /// Asks the nodes that have a session here for what is due. A node is asked once in a session for the same.
    pub fn ask(&self, due: &[Due]) {
        let mut table = self.lock();
        let mut asked = HashSet::new();
        for Due { node, is } in due {
            let name = asked_name(is);
            if let Some(session) = table.of.get_mut(node)
                && !session.asked.contains(&name)
                && session.sender.try_send(Ok(ToNode { is: Some(is.clone()) })).is_ok()
            {
                session.asked.insert(name.clone());
            }
            asked.insert((node.as_str(), name));
        }
        for (node, session) in &mut table.of {
            session.asked.retain(|name| asked.contains(&(node.as_str(), name.clone())));
        }
    }
}

/// Something that a node has to do.
#[derive(Clone, Debug)]
pub struct Due {
    pub node: String,
    pub is: Is,
}

/// Returns what a message asks for. No other request of the node has this name.
fn asked_name(is: &Is) -> String {
    match is {
        Is::Changed(changed) => changed.claim.clone(),
        Is::Expand(Expand { namespace, volume, required, limit }) => {
            format!("expand {namespace}/{volume} {required} {limit}")
        }
        Is::Welcome(_) | Is::Refused(_) | Is::Call(_) | Is::Drain(_) => String::new(),
    }
}

impl Sessions {
    /// Takes over which controllers are healthy on a node. Returns whether one has come.
    pub fn set_controllers(&self, entered: &Entered<'_>, controllers: HashMap<String, Hosted>) -> bool {
        let mut table = self.lock();
        let Some(session) = table.of.get_mut(&entered.node).filter(|of| of.number == entered.number) else {
            return false;
        };
        let is_new = |(plugin, hosted): (&String, &Hosted)| session.controllers.get(plugin) != Some(hosted);
        let is_more = controllers.iter().any(is_new);
        session.controllers = controllers;
        is_more
    }

    /// Returns the nodes with a session and a healthy controller of this plugin that attaches.
    pub fn controllers(&self, plugin: &str) -> Vec<String> {
        self.with_controller(plugin, |hosted| hosted.attaches)
    }

    /// Returns the nodes with a session and a healthy controller of this plugin, whether it attaches or not.
    pub fn all_controllers(&self, plugin: &str) -> Vec<String> {
        self.with_controller(plugin, |_| true)
    }

    /// Returns the nodes with a session and a healthy controller of this plugin that may be asked what changes nothing.
    pub fn answering(&self, plugin: &str) -> Vec<String> {
        self.with_controller(plugin, |hosted| hosted.answers)
    }

    fn with_controller(&self, plugin: &str, is_one: impl Fn(Hosted) -> bool) -> Vec<String> {
        let table = self.lock();
        let found = table
            .of
            .iter()
            .filter(|(_, session)| session.controllers.get(plugin).is_some_and(|hosted| is_one(*hosted)));
        found.map(|(node, _)| node.clone()).collect()
    }

    /// Sends a controller call to a node. The answer fails when the session ends. `None`: nothing was sent.
    pub fn call(&self, node: &str, call: ControllerCall) -> Option<oneshot::Receiver<CallEnded>> {
        let mut table = self.lock();
        let session = table.of.get_mut(node)?;
        session.calls.retain(|_, waiting| !waiting.ended.is_closed());
        let (id, epoch) = (call.call.clone(), call.epoch);
        session.sender.try_send(Ok(ToNode { is: Some(Is::Call(call)) })).ok()?;
        let (ended, answer) = oneshot::channel();
        session.calls.insert(id, Waiting { epoch, ended });
        Some(answer)
    }

    /// Takes over the end of a call that the session's node was sent. Returns `false` if it was sent no such call.
    pub fn end_call(&self, entered: &Entered<'_>, ended: CallEnded) -> bool {
        let mut table = self.lock();
        let session = table.of.get_mut(&entered.node).filter(|of| of.number == entered.number);
        let Some(session) = session else { return false };
        if session.calls.get(&ended.call).is_none_or(|waiting| waiting.epoch != ended.epoch) {
            return false;
        }
        let waiting = session.calls.remove(&ended.call);
        waiting.is_some_and(|waiting| waiting.ended.send(ended).is_ok())
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
    use csi_proto::cluster::v1::{ClaimChanged, Welcome};

    use super::*;

    fn due(claim: &str) -> Vec<Due> {
        let changed = ClaimChanged { claim: claim.to_owned(), ..ClaimChanged::default() };
        vec![Due { node: "n1".to_owned(), is: Is::Changed(changed) }]
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
        assert!(sessions.nodes().is_empty());
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

    #[tokio::test]
    async fn end_of_a_call_has_its_session_name_and_epoch() {
        let sessions = Sessions::default();
        let entered = sessions.enter("n1", 1, mpsc::channel(4).0, ToNode::default());
        assert!(sessions.call("n1", ControllerCall::default()).is_none(), "nobody reads the channel");
        drop(entered);
        let (sender, _receiver) = mpsc::channel(4);
        let entered = sessions.enter("n1", 1, sender, ToNode::default());
        let (sender, _other) = mpsc::channel(4);
        let other = sessions.enter("n2", 1, sender, ToNode::default());
        let call = |epoch| ControllerCall { call: "c".into(), epoch, ..ControllerCall::default() };
        let ended = |call: &str, epoch| CallEnded { call: call.into(), epoch, how: None };
        let mut answer = sessions.call("n1", call(7)).unwrap();
        assert!(sessions.call("n3", call(7)).is_none());
        assert!(!sessions.end_call(&other, ended("c", 7)), "another node's word");
        assert!(!sessions.end_call(&entered, ended("d", 7)) && !sessions.end_call(&entered, ended("c", 6)));
        assert!(answer.try_recv().is_err());
        assert!(sessions.end_call(&entered, ended("c", 7)) && !sessions.end_call(&entered, ended("c", 7)));
        assert_eq!(answer.try_recv().unwrap().epoch, 7);
        let lost = sessions.call("n1", call(8)).unwrap();
        drop(entered);
        assert!(lost.await.is_err(), "the session is over");
    }

    #[tokio::test]
    async fn controller_is_one_while_its_session_is() {
        let sessions = Sessions::default();
        let first = sessions.enter("n1", 1, mpsc::channel(1).0, ToNode::default());
        let of = |attaches| Hosted { attaches, answers: true };
        let plugins = || HashMap::from([("p".to_owned(), of(true)), ("no".to_owned(), of(false))]);
        assert!(sessions.set_controllers(&first, plugins()) && !sessions.set_controllers(&first, plugins()));
        assert_eq!(sessions.controllers("p"), ["n1"]);
        assert_eq!(sessions.roles(), [("node", 0), ("controller", 1)]);
        assert!(sessions.all_controllers("q").is_empty() && sessions.controllers("no").is_empty());
        assert_eq!(sessions.all_controllers("no"), ["n1"]);
        let second = sessions.enter("n1", 2, mpsc::channel(1).0, ToNode::default());
        assert!(sessions.controllers("p").is_empty(), "a new session has reported nothing");
        assert_eq!(sessions.roles(), [("node", 1), ("controller", 0)]);
        assert!(!sessions.set_controllers(&first, plugins()) && sessions.controllers("p").is_empty());
        drop(second);
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
        sessions.ask(&due("a"));
        assert_eq!(receiver.try_recv().unwrap().unwrap(), ToNode::default());
        assert!(receiver.try_recv().unwrap().unwrap().is.is_some());
    }

    #[tokio::test]
    async fn node_learns_a_change_of_its_drain_once() {
        let sessions = Sessions::default();
        let (sender, mut receiver) = mpsc::channel(1);
        let welcome = Welcome { drain: 1, ..Welcome::default() };
        let _entered = sessions.enter("n1", 1, sender, ToNode { is: Some(Is::Welcome(welcome)) });
        let (_, number) = sessions.nodes().remove(0);
        sessions.set_drain("n1", number, 0);
        receiver.try_recv().unwrap().unwrap();
        assert!(receiver.try_recv().is_err(), "the channel was full");
        sessions.set_drain("n1", number, 1);
        assert!(receiver.try_recv().is_err(), "the Welcome has said it");
        sessions.set_drain("n1", number + 1, 0);
        assert!(receiver.try_recv().is_err(), "it is of another session");
        let mut sent = || receiver.try_recv().ok().map(|sent| sent.unwrap().is);
        for drain in [0, 0, 2] {
            sessions.set_drain("n1", number, drain);
        }
        assert_eq!(sent(), Some(Some(Is::Drain(Drain { number: 0 }))));
        for _ in 0..2 {
            sessions.set_drain("n1", number, 2);
        }
        assert_eq!(sent(), Some(Some(Is::Drain(Drain { number: 2 }))), "another drain");
        assert_eq!(sent(), None, "it was sent");
    }

    #[tokio::test]
    async fn release_is_asked_for_once_in_a_session() {
        let sessions = Sessions::default();
        let (sender, mut receiver) = mpsc::channel(1);
        let _entered = sessions.enter("n1", 1, sender, ToNode::default());
        receiver.try_recv().unwrap().unwrap();
        sessions.ask(&due("a"));
        sessions.ask(&due("a"));
        receiver.try_recv().unwrap().unwrap();
        assert!(receiver.try_recv().is_err(), "asked twice");
        sessions.ask(&[]);
        sessions.ask(&due("a"));
        sessions.ask(&[due("b").remove(0), due("a").remove(0)]);
        assert!(receiver.try_recv().is_ok(), "a release that was over and is due again");
        sessions.ask(&[due("b").remove(0), due("a").remove(0)]);
        let asked = receiver.try_recv().unwrap().unwrap();
        assert!(matches!(asked.is, Some(Is::Changed(changed)) if changed.claim == "b"), "it was full before");
    }
}
