//! A csid that is killed, a plugin with a controller, and a witness between them.

use std::collections::BTreeSet;
use std::time::Duration;

use csid_client::{
    AccessMode, AttachmentMode, CallOptions, Capability, Client, CreateVolume, Kind, PluginService,
    VolumeFilter, VolumeOptions, VolumeRow,
};
use csid_tests::ask::{NAMESPACE, secrets};
use csid_tests::script::{CONTROLLER, Rule};
use csid_tests::world::{World, eventually, refusal};

pub const PASSWORD: &str = "c4n4ry-s3cr3t-4242";

pub struct Site<'w> {
    pub w: &'w mut World,
    pub client: Client,
}

pub fn options() -> VolumeOptions {
    VolumeOptions::default()
}

pub fn with_secrets() -> VolumeOptions {
    VolumeOptions { secrets: Some(secrets(&[("password", PASSWORD)])), ..options() }
}

pub fn uses(modes: &[AccessMode]) -> Vec<Capability> {
    let attachment_mode = AttachmentMode::FileSystem;
    modes.iter().map(|mode| Capability { access_mode: *mode, attachment_mode }).collect()
}

/// A CreateVolume of plugin `p` for a file system of at least a MiB.
pub fn spec() -> CreateVolume {
    CreateVolume {
        plugin: Some("p".to_owned()),
        capabilities: Some(uses(&[AccessMode::SingleNodeWriter])),
        capacity_min: Some(1 << 20),
        ..CreateVolume::default()
    }
}

pub fn within(deadline: Duration, spec: CreateVolume) -> CreateVolume {
    CreateVolume { deadline_usec: Some(deadline.as_micros() as u64), ..spec }
}

impl<'w> Site<'w> {
    pub async fn new(w: &'w mut World) -> Self {
        let plugin = w.add_plugin_and("p", &[], "rpc-deadline = \"1s\"").await;
        plugin.set(|script| script.control(&CONTROLLER));
        let fault = w.path("fault").to_str().expect("UTF-8").to_owned();
        w.environment.insert("CSID_FAULT".to_owned(), fault);
        let client = w.start().await;
        let mut site = Site { w, client };
        site.is_ready().await;
        site
    }

    /// Waits until csid knows its plugin.
    pub async fn is_ready(&mut self) {
        let wait = CallOptions { deadline_usec: Some(15_000_000), ..CallOptions::default() };
        self.client.wait_for_plugin("p", PluginService::Controller, wait).await.expect("a controller");
    }

    pub fn rules(&mut self, rules: impl IntoIterator<Item = Rule>) {
        self.w.plugin("p").rules(rules);
    }

    /// Has csid die at this edge once.
    pub fn arm(&self, edge: &str) {
        std::fs::write(self.w.path("fault"), edge).expect("the fault");
    }

    /// The plugin expands only what nobody has.
    pub async fn expands_offline(&mut self) {
        self.w.plugin("p").set(|script| script.plugin.push("OFFLINE".to_owned()));
        self.w.plugin("p").kill();
        self.w.plugin("p").start().await;
        self.restart().await;
        self.is_ready().await;
    }

    /// Waits until an operation is at this step.
    pub async fn waits(&self, step: &str) {
        eventually(step, async || {
            let operations = self.client.list_operations().await.expect("the operations");
            operations.iter().any(|operation| operation.step == step)
        })
        .await;
    }

    pub async fn restart(&mut self) {
        if !self.w.dead() {
            self.w.kill();
        }
        self.arm("");
        self.client = self.w.start().await;
    }

    /// Waits until csid has died.
    pub async fn died(&mut self) {
        eventually("csid dies", async || self.w.dead()).await;
    }

    pub async fn create(&self, volume: &str, spec: CreateVolume) -> csid_client::Result<VolumeRow> {
        self.client.create_volume(NAMESPACE, volume, spec).await
    }

    pub async fn refused(&self, volume: &str, spec: CreateVolume) -> (Kind, String) {
        let (kind, error) = refusal(self.create(volume, spec).await);
        (kind, error.message)
    }

    pub async fn delete(&self, volume: &str, options: VolumeOptions) -> csid_client::Result<()> {
        self.client.delete_volume(NAMESPACE, volume, options).await
    }

    pub async fn rows(&self) -> Vec<VolumeRow> {
        self.client.list_volumes(VolumeFilter::default()).await.expect("the volumes")
    }

    /// The external ids that rows know, and those that the plugin has, must be these.
    pub async fn has(&mut self, ids: &[&str]) {
        let ids: BTreeSet<String> = ids.iter().map(|id| format!("volume {id}")).collect();
        let rows = self.rows().await.into_iter().map(|row| format!("volume {}", row.external_id));
        assert_eq!(rows.collect::<BTreeSet<_>>(), ids, "the rows");
        let made = self.w.plugin("p").backend().made().expect("the backend");
        assert_eq!(made.into_iter().collect::<BTreeSet<_>>(), ids, "the plugin's volumes");
    }

    /// Checks that no operation, volume or row is left.
    pub async fn nothing_left(mut self) {
        self.has(&[]).await;
        self.w.nothing_left(&self.client).await;
    }
}
