//! A client of the servers that is no node. It asks any server, and its calls and their answers may be lost.

use std::fmt::Debug;
use std::sync::PoisonError;

use csi_proto::identity::Role;
use tokio::time::timeout;
use tonic::{Request, Response, Status};

use super::dice::Dice;
use super::node::Servers;
use super::server::identity;
use super::world::World;
use crate::service::Service;

/// The limits of the time in milliseconds that a client waits for an answer. csid waits for 10 s, and its caller may give up earlier.
const CALL: (u64, u64) = (300, 10_000);

pub struct Client {
    /// What the log names the client.
    pub name: &'static str,
    pub servers: Servers,
    pub world: World,
    pub dice: Dice,
}

impl Client {
    /// Asks a server, as an operator who may do all. `None`: it refuses, or has no answer.
    pub async fn ask<A, T, F>(&self, ask: A, call: impl FnOnce(Service, Request<A>) -> F) -> Option<T>
    where
        A: Clone + Debug,
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send + 'static,
    {
        let server = {
            let servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
            servers[self.dice.roll(servers.len() as u64) as usize].clone()?
        };
        let mut request = Request::new(ask.clone());
        request.extensions_mut().insert(identity(Role::Operator, "all"));
        let task = server.spawn(call(server.service.clone(), request));
        let ends = task.abort_handle();
        let answer = timeout(self.dice.time(CALL.0, CALL.1), task).await;
        // A server that does not see that its caller has gone goes on with the call.
        if self.dice.once_in(2) {
            ends.abort();
        }
        let name = self.name;
        self.world.note(|| match &answer {
            Ok(Ok(Ok(_))) => format!("{name} is answered: {ask:?}"),
            Ok(Ok(Err(status))) => format!("{name} is refused {ask:?}: {}", status.message()),
            _ => format!("{name} gets no answer: {ask:?}"),
        });
        match answer {
            // The answer may be lost.
            Ok(Ok(Ok(answer))) if !self.dice.once_in(10) => Some(answer.into_inner()),
            _ => None,
        }
    }
}
