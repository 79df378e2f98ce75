//! A site: a world with one csid, its client, and the edges at which csid is killed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use csid_client::{
    CallOptions, Client, CreateVolume, Error, Kind, MountFilter, PluginService, VolumeFilter, VolumeOptions,
    VolumeRow,
};

use crate::ask::NAMESPACE;
use crate::clustered;
use crate::fault::Fault;
use crate::script::Rule;
use crate::world::{SOON, World, eventually, refusal};

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

    /// Deletes a volume. In a cluster the call is repeated while servers detach the volume: they answer before that.
    pub async fn delete(&self, volume: &str, options: VolumeOptions) -> csid_client::Result<()> {
        let end = Instant::now() + SOON;
        loop {
            let deleted = self.client.delete_volume(NAMESPACE, volume, options.clone()).await;
            let is_detached = match &deleted {
                Err(Error::Csid(error)) => error.kind != Kind::Busy,
                _ => true,
            };
            if is_detached || !clustered::is_used() || Instant::now() > end || self.is_mounted(volume).await {
                return deleted;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn is_mounted(&self, volume: &str) -> bool {
        let filter = MountFilter { volume: Some(volume.to_owned()), ..MountFilter::default() };
        !self.client.list_mounts(filter).await.expect("the mounts").is_empty()
    }

    /// Returns the plugin's ID of a volume. Empty: the volume is not there yet. In a cluster a node knows no volume that is being created.
    pub async fn external_id(&self, volume: &str) -> String {
        match self.client.volume(NAMESPACE, volume).await {
            Err(Error::Csid(error)) if clustered::is_used() && error.kind == Kind::NotFound => String::new(),
            row => row.expect("the volume").external_id,
        }
    }

    /// Returns whether csid explains that a volume waits for a call that failed so.
    pub async fn waits_for_failed(&self, volume: &str, failure: &str) -> bool {
        let Ok(reply) = self.client.explain(NAMESPACE, volume, CallOptions::default()).await else {
            return false;
        };
        // Servers name the failure with what they wait for.
        let last_error = if clustered::is_used() { &reply.waiting_for } else { &reply.last_error };
        last_error.contains(failure)
    }

    /// Returns the rows of the registered volumes. In a cluster they are those that this node has claimed.
    pub async fn volumes(&self) -> Vec<VolumeRow> {
        self.client.list_volumes(VolumeFilter::default()).await.expect("the volumes")
    }

    /// Checks that csid and plugin `p` have the volumes of these external ids, and no other. In a cluster the servers have the rows.
    pub async fn has(&mut self, ids: &[&str]) {
        let ids: BTreeSet<String> = ids.iter().map(|id| format!("volume {id}")).collect();
        let rows = self.volumes().await.into_iter().map(|row| format!("volume {}", row.external_id));
        let rows = rows.collect::<BTreeSet<_>>();
        assert!(rows == ids || (clustered::is_used() && rows.is_empty()), "the rows: {rows:?}");
        let mut made = BTreeSet::new();
        let mut is_so = async || {
            made = self.w.plugin("p").backend().made().expect("the backend").into_iter().collect();
            made == ids
        };
        match clustered::is_used() {
            // Servers answer before they have a volume detached.
            true => eventually("the plugin's volumes are these", is_so).await,
            false => drop(is_so().await),
        }
        assert_eq!(made, ids, "the plugin's volumes");
    }

    /// Checks that no volume, mount or operation is left.
    pub async fn nothing_left(mut self) {
        self.has(&[]).await;
        self.w.nothing_left(&self.client).await;
    }
}
