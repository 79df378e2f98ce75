//! Short forms of the tests' calls to csid. The namespace is `default`, the volume's name is its external id, and the plugin is `p`,
//! unless an argument says otherwise.

use std::path::{Path, PathBuf};
use std::time::Duration;

use csid_client::{
    AccessMode, AttachmentMode, Capability, ClaimFilter, ClaimOptions, ClaimRow, Claimed, Client, Event,
    MountFilter, MountOptions, MountRow, Mounted, OwnedVariant, RegisterVolume, ReleaseOptions, Result,
    Secrets, UnmountOptions, VolumeRow,
};

use crate::world::{SOON, World, child, eventually, program, within_time};

pub const NAMESPACE: &str = "default";

/// A file-system volume for one consumer.
pub fn inline(external_id: &str) -> MountOptions {
    of_plugin("p", external_id)
}

pub fn of_plugin(plugin: &str, external_id: &str) -> MountOptions {
    MountOptions {
        plugin: Some(plugin.to_owned()),
        external_id: Some(external_id.to_owned()),
        access_mode: Some(AccessMode::SingleNodeWriter),
        attachment_mode: Some(AttachmentMode::FileSystem),
        ..MountOptions::default()
    }
}

/// A file-system volume for several consumers.
pub fn shared(external_id: &str) -> MountOptions {
    MountOptions { access_mode: Some(AccessMode::SingleNodeMultiWriter), ..inline(external_id) }
}

pub fn block(external_id: &str) -> MountOptions {
    MountOptions { attachment_mode: Some(AttachmentMode::BlockDevice), ..inline(external_id) }
}

pub fn within(deadline: Duration, options: MountOptions) -> MountOptions {
    MountOptions { deadline_usec: Some(deadline.as_micros() as u64), ..options }
}

pub fn secrets(pairs: &[(&str, &str)]) -> csid_client::SealedSecrets {
    let mut secrets = Secrets::new();
    for (name, value) in pairs {
        secrets.insert((*name).to_owned(), (*value).to_owned().into());
    }
    secrets.seal().expect("a sealed memfd")
}

/// Returns where the plugin publishes what is found at `source`: csid says it to nobody.
pub fn private(source: &Path) -> PathBuf {
    let own = if source.ends_with("volume") { source.parent().expect("its directory") } else { source };
    let [volume, root] = [1, 3].map(|above| own.ancestors().nth(above).expect("a path of csid's"));
    let [volume, own] = [volume, own].map(|path| path.file_name().expect("a name"));
    root.join("private").join(volume).join(own)
}

/// Returns the capabilities of a file-system volume that has these access modes.
pub fn capabilities(access_modes: &[AccessMode]) -> Vec<Capability> {
    let attachment_mode = AttachmentMode::FileSystem;
    access_modes.iter().map(|mode| Capability { access_mode: *mode, attachment_mode }).collect()
}

/// Registers a volume of plugin `p`.
pub async fn registered(client: &Client, volume: &str, access_modes: &[AccessMode]) -> VolumeRow {
    let spec = RegisterVolume {
        plugin: Some("p".to_owned()),
        external_id: Some(volume.to_owned()),
        capabilities: Some(capabilities(access_modes)),
        ..RegisterVolume::default()
    };
    client.register_volume(NAMESPACE, volume, spec).await.expect("a registered volume")
}

pub async fn claim(client: &Client, volume: &str, consumer: &str) -> Result<Claimed> {
    client.claim(NAMESPACE, volume, consumer, ClaimOptions::default()).await
}

pub async fn release(client: &Client, volume: &str, consumer: &str) -> Result<()> {
    client.release(NAMESPACE, volume, consumer, ReleaseOptions::default()).await
}

/// Returns the rows of the claims.
pub async fn claims(client: &Client) -> Vec<ClaimRow> {
    client.list_claims(ClaimFilter::default()).await.expect("the claims")
}

/// Mounts a registered volume.
pub async fn mount_registered(client: &Client, volume: &str, consumer: &str) -> Result<Mounted> {
    client.mount(NAMESPACE, volume, consumer, MountOptions::default()).await
}

pub async fn mount(client: &Client, consumer: &str, options: MountOptions) -> Result<Mounted> {
    let volume = options.external_id.clone().expect("an inline volume");
    client.mount(NAMESPACE, &volume, consumer, options).await
}

/// Mounts a volume, which has to succeed. Returns the mount's path.
pub async fn mounted(client: &Client, consumer: &str, options: MountOptions) -> PathBuf {
    mount(client, consumer, options).await.expect("a mount").source.into()
}

pub async fn unmount(client: &Client, volume: &str, consumer: &str) -> Result<()> {
    client.unmount(NAMESPACE, volume, consumer, UnmountOptions::default()).await
}

/// Returns the rows of the mounts.
pub async fn rows(client: &Client) -> Vec<MountRow> {
    client.list_mounts(MountFilter::default()).await.expect("the rows")
}

/// Returns the row of the mount of a volume's consumer.
pub async fn row(client: &Client, volume: &str, consumer: &str) -> Option<MountRow> {
    let filter = MountFilter {
        namespace: Some(NAMESPACE.to_owned()),
        volume: Some(volume.to_owned()),
        consumer: Some(consumer.to_owned()),
        ..MountFilter::default()
    };
    client.list_mounts(filter).await.expect("the rows").pop()
}

pub async fn state(client: &Client, volume: &str, consumer: &str) -> String {
    row(client, volume, consumer).await.map_or_else(|| "none".to_owned(), |row| row.state)
}

/// Waits until csid has done what it does at a start.
pub async fn settled(client: &Client) {
    eventually("csid is ready or degraded", async || {
        ["ready", "degraded"].contains(&client.manager().await.expect("the properties").state.as_str())
    })
    .await;
}

/// Returns the events after `since`.
pub async fn events(client: &Client, since: u64) -> Vec<Event> {
    let mut all = Vec::new();
    loop {
        let since = all.last().map_or(since, |event: &Event| event.sequence);
        let (mut page, _) = client.get_events(since, 1000).await.expect("the events");
        if page.is_empty() {
            return all;
        }
        all.append(&mut page);
    }
}

pub async fn cursor(client: &Client) -> u64 {
    client.manager().await.expect("the properties").event_sequence
}

/// Waits for an event of one of these types about `subject`.
pub async fn event(client: &Client, since: u64, kinds: &[&str], subject: &str) -> Event {
    event_within(SOON, client, since, kinds, subject).await
}

pub async fn event_within(
    limit: Duration,
    client: &Client,
    since: u64,
    kinds: &[&str],
    subject: &str,
) -> Event {
    let mut found = None;
    within_time(limit, &format!("an event {kinds:?} of {subject}"), async || {
        found = events(client, since)
            .await
            .into_iter()
            .find(|event| kinds.contains(&event.kind.as_str()) && event.subject == subject);
        found.is_some()
    })
    .await;
    found.expect("the event")
}

/// Returns a string among an event's details, or "" if it has none of this name.
pub fn detail(event: &Event, key: &str) -> String {
    let value: Option<&OwnedVariant> = event.details.get(key);
    value.and_then(|v| v.downcast_ref::<&str>().ok()).unwrap_or_default().to_owned()
}

/// Starts csid with plugin `p`.
pub async fn running(w: &mut World) -> Client {
    w.add_plugin("p").await;
    let client = w.start().await;
    healthy(&client, "p").await;
    client
}

/// Starts csid with csi-local as plugin `local`, whose volumes are in the directory `volumes`.
pub async fn running_local(w: &mut World) -> (std::process::Child, Client) {
    let socket = w.path("local.sock");
    w.configure_plugin("local", &socket, "");
    let mut command = child(&program("csi-local"));
    command.arg("--state-dir").arg(w.path("volumes")).args(["serve", "--endpoint"]);
    let log = std::fs::File::create(w.path("csi-local.log")).expect("a log");
    let served = command.arg(format!("unix://{}", socket.display())).stderr(log).spawn();
    let client = w.start().await;
    healthy(&client, "local").await;
    (served.expect("csi-local starts"), client)
}

pub async fn healthy(client: &Client, plugin: &str) {
    eventually("the plugin is healthy", async || client.plugin(plugin).await.is_ok_and(|p| p.healthy)).await;
}
