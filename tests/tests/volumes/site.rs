//! A site whose plugin creates volumes, and the calls of these tests.

use std::time::Duration;

use csid_client::{AccessMode, CreateVolume, VolumeOptions};
use csid_tests::ask::{capabilities, secrets};
use csid_tests::script::CONTROLLER;
pub use csid_tests::site::Site;
use csid_tests::world::World;

/// Why tests are skipped on a node of a cluster.
pub const SECRETS: &str = "servers take no secrets of a caller";
pub const GIVEN_UP: &str = "servers give up no creation and no deletion";
/// The controller calls of a node's own journal.
pub const OPERATIONS: &str = "a node has no operation of what servers have done";

pub const PASSWORD: &str = "c4n4ry-s3cr3t-4242";

pub fn options() -> VolumeOptions {
    VolumeOptions::default()
}

pub fn with_secrets() -> VolumeOptions {
    VolumeOptions { secrets: Some(secrets(&[("password", PASSWORD)])), ..options() }
}

/// A CreateVolume of plugin `p` for a file system of at least a MiB.
pub fn spec() -> CreateVolume {
    CreateVolume {
        plugin: Some("p".to_owned()),
        capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
        capacity_min: Some(1 << 20),
        ..CreateVolume::default()
    }
}

pub fn within(deadline: Duration, spec: CreateVolume) -> CreateVolume {
    CreateVolume { deadline_usec: Some(deadline.as_micros() as u64), ..spec }
}

/// Starts csid with plugin `p`, whose controller creates volumes.
pub async fn creating(w: &mut World) -> Site<'_> {
    let plugin = w.add_plugin_and("p", &[], "rpc-deadline = \"1s\"").await;
    plugin.set(|script| script.control(&CONTROLLER));
    let mut site = Site::start(w).await;
    site.is_ready().await;
    site
}

/// Makes the plugin one that expands only volumes that are not in use.
pub async fn expands_offline(site: &mut Site<'_>) {
    let plugin = site.w.plugin("p");
    plugin.set(|script| script.plugin.push("OFFLINE".to_owned()));
    plugin.kill();
    plugin.start().await;
    site.restart().await;
    site.is_ready().await;
}
