//! A scheduler that keeps its own claims: it has a volume attached by AttachVolume, uses it, and has it detached.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use csi_proto::cluster::v1::cluster_server::Cluster as Calls;
use csi_proto::cluster::v1::{AttachAsk, ChangeAsk, DetachAsk, VolumeRow, change_ask::What};
use csi_proto::identity::Role;
use tokio::time::{sleep, timeout};
use tonic::Request;

use super::dice::Dice;
use super::node::Servers;
use super::server::identity;
use super::world::World;
use crate::random;

/// The limits of the time in milliseconds that the scheduler waits for an answer. csid waits for 10 s, and its caller may give up earlier.
const CALL: (u64, u64) = (300, 10_000);
/// The node that the scheduler uses. The servers do not know it.
const NODE: &str = "elsewhere";

pub struct Scheduler {
    pub servers: Servers,
    pub world: World,
    pub dice: Dice,
    pub volume: String,
    pub stops: AtomicBool,
    pub has_ended: AtomicBool,
}

impl Scheduler {
    /// Attaches, uses and detaches the volume, again and again.
    pub async fn run(&self) {
        let hold = (self.volume.clone(), NODE.to_owned(), "scheduler".to_owned());
        while !self.stops.load(Ordering::Relaxed) {
            sleep(self.dice.time(100, 5000)).await;
            if let Some(device) = self.attach().await {
                self.world.mount(&hold, &device);
                sleep(self.dice.time(0, 3000)).await;
                self.world.unmount(&hold);
            }
            while !self.detach().await && !self.stops.load(Ordering::Relaxed) {
                sleep(self.dice.time(50, 1000)).await;
            }
        }
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// Returns the device. `None`: the volume is perhaps not attached.
    async fn attach(&self) -> Option<String> {
        let ask = AttachAsk {
            volume: self.volume.clone(),
            node_id: format!("id of {NODE}"),
            call: random::name(),
            ..AttachAsk::default()
        };
        loop {
            if let Some(row) = self.change(What::Attach(ask.clone())).await {
                return Some(row.attached.unwrap_or_default().publish_context["device"].clone());
            }
            // The same call again has the same answer.
            if self.dice.once_in(2) || self.stops.load(Ordering::Relaxed) {
                return None;
            }
        }
    }

    /// Returns whether the volume is detached.
    pub async fn detach(&self) -> bool {
        let (volume, node_id) = (self.volume.clone(), format!("id of {NODE}"));
        let ask = DetachAsk { volume, node_id, ..DetachAsk::default() };
        let Some(found) = self.change(What::Detach(ask.clone())).await else { return false };
        let Some(at) = found.attached else { return true };
        self.change(What::Detach(DetachAsk { id: at.id, ..ask })).await.is_some()
    }

    /// Makes a change at a server. `None`: it is refused, or has no answer.
    async fn change(&self, what: What) -> Option<VolumeRow> {
        let server = {
            let servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
            servers[self.dice.roll(servers.len() as u64) as usize].clone()?
        };
        let mut request = Request::new(ChangeAsk { what: Some(what.clone()) });
        request.extensions_mut().insert(identity(Role::Operator, "all"));
        let of = server.clone();
        let task = server.spawn(async move { of.service.change(request).await });
        let ends = task.abort_handle();
        let answer = timeout(self.dice.time(CALL.0, CALL.1), task).await;
        // A server that does not see that its caller has gone goes on with the call.
        if self.dice.once_in(2) {
            ends.abort();
        }
        self.world.note(|| match &answer {
            Ok(Ok(Ok(_))) => format!("the scheduler is answered: {what:?}"),
            Ok(Ok(Err(status))) => format!("the scheduler is refused {what:?}: {}", status.message()),
            _ => format!("the scheduler gets no answer: {what:?}"),
        });
        match answer {
            // The answer may be lost.
            Ok(Ok(Ok(answer))) if !self.dice.once_in(10) => Some(answer.into_inner()),
            _ => None,
        }
    }
}
