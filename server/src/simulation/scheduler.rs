//! A scheduler that keeps its own claims: it has a volume attached by AttachVolume, uses it, and has it detached.

use std::sync::atomic::{AtomicBool, Ordering};

use csi_proto::cluster::v1::cluster_server::Cluster as Calls;
use csi_proto::cluster::v1::{AttachAsk, ChangeAsk, DetachAsk, VolumeRow, change_ask::What};
use tokio::time::sleep;

use super::client::Client;
use crate::random;

/// The node that the scheduler uses. The servers do not know it.
const NODE: &str = "elsewhere";

pub struct Scheduler {
    pub client: Client,
    pub volume: String,
    pub stops: AtomicBool,
    pub has_ended: AtomicBool,
}

impl Scheduler {
    /// Attaches, uses and detaches the volume, again and again.
    pub async fn run(&self) {
        let hold = (self.volume.clone(), NODE.to_owned(), "scheduler".to_owned());
        while !self.stops.load(Ordering::Relaxed) {
            sleep(self.client.dice.time(100, 5000)).await;
            if let Some(device) = self.attach().await {
                self.client.world.mount(&hold, &device);
                sleep(self.client.dice.time(0, 3000)).await;
                self.client.world.unmount(&hold);
            }
            while !self.detach().await && !self.stops.load(Ordering::Relaxed) {
                sleep(self.client.dice.time(50, 1000)).await;
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
            if self.client.dice.once_in(2) || self.stops.load(Ordering::Relaxed) {
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
        let ask = ChangeAsk { what: Some(what) };
        self.client.ask(ask, |service, request| async move { service.change(request).await }).await
    }
}
