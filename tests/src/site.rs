//! A site: a world with one csid, its client, and the edges at which csid is killed.

use std::collections::BTreeSet;

use csid_client::{
    CallOptions, Client, CreateVolume, Kind, PluginService, VolumeFilter, VolumeOptions, VolumeRow,
};

use crate::ask::NAMESPACE;
use crate::fault::Fault;
use crate::script::Rule;
use crate::world::{World, eventually, refusal};

pub struct Site<'w> {
    pub w: &'w mut World,
    /// The client of the csid that runs, or of the last one.
    pub client: Client,
    pub fault: Fault,
}

impl<'w> Site<'w> {
    /// Starts csid in a world whose plugins the test has added.
    pub async fn start(w: &'w mut World) -> Self {
        let fault = Fault::of(w);
        let client = w.start().await;
        Site { w, client, fault }
    }

    /// Sets the rules of plugin `p`.
    pub fn rules(&mut self, rules: impl IntoIterator<Item = Rule>) {
        self.w.plugin("p").rules(rules);
    }

    /// Waits until csid knows the controller of plugin `p`.
    pub async fn is_ready(&mut self) {
        let wait = CallOptions { deadline_usec: Some(15_000_000), ..CallOptions::default() };
        self.client.wait_for_plugin("p", PluginService::Controller, wait).await.expect("a controller");
    }

    /// Waits until an operation is at this step.
    pub async fn waits(&self, step: &str) {
        eventually(step, async || {
            let operations = self.client.list_operations().await.expect("the operations");
            operations.iter().any(|operation| operation.step == step)
        })
        .await;
    }

    /// Waits until csid has died.
    pub async fn died(&mut self) {
        eventually("csid dies", async || self.w.dead()).await;
    }

    /// Kills csid, if it runs, and starts the next one, which no edge kills.
    pub async fn restart(&mut self) {
        if !self.w.dead() {
            self.w.kill();
        }
        self.fault.disarm();
        self.client = self.w.start().await;
    }

    pub async fn create(&self, volume: &str, spec: CreateVolume) -> csid_client::Result<VolumeRow> {
        self.client.create_volume(NAMESPACE, volume, spec).await
    }

    /// Creates a volume, which has to fail. Returns the kind of the error and its message.
    pub async fn refused(&self, volume: &str, spec: CreateVolume) -> (Kind, String) {
        let (kind, error) = refusal(self.create(volume, spec).await);
        (kind, error.message)
    }

    pub async fn delete(&self, volume: &str, options: VolumeOptions) -> csid_client::Result<()> {
        self.client.delete_volume(NAMESPACE, volume, options).await
    }

    /// Returns the rows of the registered volumes.
    pub async fn volumes(&self) -> Vec<VolumeRow> {
        self.client.list_volumes(VolumeFilter::default()).await.expect("the volumes")
    }

    /// Checks that csid and plugin `p` have the volumes of these external ids, and no other.
    pub async fn has(&mut self, ids: &[&str]) {
        let ids: BTreeSet<String> = ids.iter().map(|id| format!("volume {id}")).collect();
        let rows = self.volumes().await.into_iter().map(|row| format!("volume {}", row.external_id));
        assert_eq!(rows.collect::<BTreeSet<_>>(), ids, "the rows");
        let made = self.w.plugin("p").backend().made().expect("the backend");
        assert_eq!(made.into_iter().collect::<BTreeSet<_>>(), ids, "the plugin's volumes");
    }

    /// Checks that no volume, mount or operation is left.
    pub async fn nothing_left(mut self) {
        self.has(&[]).await;
        self.w.nothing_left(&self.client).await;
    }
}
