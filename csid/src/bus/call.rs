//! An authorised call, as handlers get it: arguments, deadline, answer.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use zbus::{DynamicType, Message, Type};

use super::authorise::{Authoriser, Permit};
use super::caller::Way;
use super::contract::Object;
use super::failure::Failure;
use super::limits::Slot;
use super::options::Options;
use super::rooms::Rooms;
use crate::error::{Error, Kind, Result};
use crate::volume::{Tree, Wait};

/// The handles that calls need, and the authoriser of the way the callers came.
pub(super) struct Server {
    pub rooms: Rooms,
    pub authoriser: Authoriser,
}

/// An authorised call.
pub(super) struct Call {
    pub server: Arc<Server>,
    pub permit: Permit,
    pub object: Object,
    pub message: Message,
    pub arrived: Instant,
    /// Held by work that continues after the answer.
    pub slot: Slot,
    pub held: HeldTree,
}

/// A mount whose descriptor is in the answer, kept until the answer is sent or dropped. Otherwise the answer would close the last
/// descriptor in csid's own process, which may wait for the file system's server.
#[derive(Clone, Default)]
pub(super) struct HeldTree(Arc<Mutex<Option<Tree>>>);

impl HeldTree {
    pub fn keep(&self, tree: Tree) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(tree);
    }
}

/// Resources that stay until the answer is sent or dropped.
#[derive(Default)]
pub(super) struct UntilSent {
    pub slot: Option<Slot>,
    pub held: HeldTree,
}

pub(super) type Answer = Result<Message, Failure>;

impl Call {
    /// Returns the arguments. Their types were compared with the member's, so only their encoding can be wrong.
    pub fn arguments<T: DeserializeOwned + Type>(&self) -> Result<T, Failure> {
        let body = self.message.body();
        body.deserialize()
            .map_err(|error| Failure::Bus("InvalidArgs", format!("the arguments are malformed: {error}")))
    }

    /// Returns when this caller stops waiting. The operation holds the caller's slot until it has ended.
    pub fn wait(&self, options: &mut Options) -> Result<Wait, Error> {
        let wait = options.wait(self.arrived)?;
        Ok(Wait { hold: Some(Arc::new(self.slot.clone())), ..wait })
    }

    pub fn reply<B: Serialize + DynamicType>(&self, body: &B) -> Answer {
        let answer = reply(&self.message, body)?;
        refuse_too_large(&self.permit.caller().way, answer.data().len()).map_err(Failure::Ours)?;
        Ok(answer)
    }
}

/// The largest answer on the bus. A bus disconnects a sender of more than its own limit, by default 32 MiB.
pub(super) const BUS_BYTES: usize = 16 << 20;

fn refuse_too_large(way: &Way, bytes: usize) -> Result<(), Error> {
    match way {
        Way::Bus { .. } if bytes > BUS_BYTES => {
            Err(Error::invalid(format!("the answer has {bytes} bytes; the limit on the bus is {BUS_BYTES}")))
        }
        _ => Ok(()),
    }
}

pub(super) fn reply<B: Serialize + DynamicType>(message: &Message, body: &B) -> Answer {
    let answer = Message::method_return(&message.header()).build(body);
    answer.map_err(|error| match error {
        // D-Bus' own limit, also on the private socket.
        zbus::Error::ExcessData => {
            Failure::Ours(Error::invalid("the answer exceeds D-Bus' limit of 128 MiB"))
        }
        error => Failure::Ours(Error::internal(format!("the answer cannot be encoded: {error}"))),
    })
}

/// Runs work to its end, even if the caller has gone, and returns its result unless the deadline passes first. Until its end the work
/// counts against the caller's limit.
pub(super) async fn within<T, F>(slot: &Slot, deadline: Option<Instant>, what: &str, work: F) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let slot = slot.clone();
    let work = tokio::spawn(async move {
        let done = work.await;
        drop(slot);
        done
    });
    let ended = match deadline {
        None => work.await,
        Some(deadline) => tokio::time::timeout_at(deadline.into(), work)
            .await
            .map_err(|_| Error::new(Kind::TimedOut, format!("{what} exceeded the deadline and continues")))?,
    };
    ended.unwrap_or_else(|_| Err(Error::internal(format!("{what} ended without an answer; see csid's log"))))
}

/// Waits for a question to a plugin, at most until the deadline. It changes nothing, so it can be dropped then.
pub(super) async fn until<T>(
    deadline: Option<Instant>,
    question: impl Future<Output = Result<T>>,
) -> Result<T> {
    let Some(deadline) = deadline else { return question.await };
    tokio::time::timeout_at(deadline.into(), question)
        .await
        .unwrap_or_else(|_| Err(Error::new(Kind::TimedOut, "the plugin did not answer before the deadline")))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;
    use crate::bus::caller::Caller;
    use crate::bus::limits::{CallClass, Limits};
    use crate::bus::socket::Credentials;

    #[tokio::test]
    async fn work_counts_after_its_caller_timed_out() {
        let limits = Limits::default();
        let caller = Caller::on_socket(&Credentials { uid: 1000, groups: Vec::new() }, None);
        let slot = limits.enter(&caller, CallClass::Operation, 1).ok().unwrap();
        let (finish, finished) = oneshot::channel();
        let soon = Instant::now() + Duration::from_millis(5);
        let timed_out =
            within(
                &slot,
                Some(soon),
                "it",
                async move { finished.await.map_err(|_| Error::internal("dropped")) },
            );
        assert_eq!(timed_out.await.unwrap_err().kind, Kind::TimedOut);
        drop(slot);
        let refused = limits.enter(&caller, CallClass::Operation, 1).err().expect("the work is under way");
        assert_eq!(refused.kind, Kind::RateLimited);
        finish.send(()).unwrap();
        for _ in 0..500 {
            if limits.enter(&caller, CallClass::Operation, 1).is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the work has ended, and its slot is taken");
    }

    #[test]
    fn answer_above_the_bus_limit_is_refused() {
        let root = Credentials { uid: 0, groups: Vec::new() };
        let bus = Caller::on_bus(&root, None, ":1.1".to_owned(), false);
        let socket = Caller::on_socket(&root, None);
        let refused = |caller: &Caller, bytes| refuse_too_large(&caller.way, bytes).is_err();
        assert!(!refused(&bus, BUS_BYTES) && refused(&bus, BUS_BYTES + 1));
        assert!(!refused(&socket, BUS_BYTES + 1));
    }
}
