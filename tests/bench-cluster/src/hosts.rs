//! Mounts of csid itself: alone, and as a node of the cluster through csid-link. Both have the same plugin, and are in a mount namespace
//! of their own.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use csid_client::{
    AccessMode, AttachmentMode, Capability, ClaimOptions, Client, MountOptions, RegisterVolume,
    UnmountOptions,
};
use serde::{Deserialize, Serialize};

use crate::host::{Host, bus_address};
use crate::load::median;
use crate::parts::{Bench, OWN, change, register};
use crate::process::{command, sibling};
use crate::raw::external_id;

/// Volumes that are held while memory is looked at.
const HELD: usize = 100;
/// The volume whose mounts take their claims, and one that is claimed before.
const FREE: usize = 0;
const CLAIMED: usize = 1;
/// How long csid may take to join.
const JOIN: Duration = Duration::from_secs(60);
const REST: Duration = Duration::from_secs(2);
const PLUGIN: &str = "bench";

/// What the program in the mount namespace is given.
#[derive(Args)]
pub struct HostsArgs {
    /// A directory for both hosts.
    inside: PathBuf,
    /// The directory of csid-link's sockets.
    link: PathBuf,
    rounds: usize,
    milliseconds: u64,
}

/// What it has measured. Times are the medians of mounts in milliseconds, a round each. Memory is in MiB.
#[derive(Serialize, Deserialize)]
struct Seen {
    /// Mounts that take their claims: of csid alone and in the cluster.
    taking: [Vec<f64>; 2],
    /// The same of mounts whose claims are there before.
    held: [Vec<f64>; 2],
    rss_alone: f64,
    rss_clustered: f64,
}

fn volume(n: usize) -> String {
    format!("host-{n:03}")
}

impl Bench {
    /// Measures mounts of csid in the cluster against csid alone.
    pub async fn hosts(&mut self) -> Result<()> {
        self.site.start_servers()?;
        self.fleet.leave();
        let mut operator = self.operator(0)?;
        for n in 0..HELD {
            change(&mut operator, register(&volume(n), PLUGIN, OWN)).await?;
        }
        let (link, sockets) = self.site.start_link("n-csid", &self.of_csid)?;
        let before = self.floor_p50().await?;
        let directory = self.site.path("hosts");
        fs::create_dir_all(&directory)?;
        let seen = command("unshare")
            .args([
                "--mount",
                "--propagation",
                "private",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "--",
            ])
            .arg(std::env::current_exe()?)
            .arg("hosts")
            .args([&directory, &sockets])
            .args([self.args.rounds.to_string(), self.args.milliseconds.to_string()])
            .env("DBUS_SYSTEM_BUS_ADDRESS", bus_address(&directory))
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .context("unshare was not started")?;
        ensure!(seen.status.success(), "the measurement of mounts has failed: {}", seen.status);
        drop(link);
        let Seen { taking, held, rss_alone, rss_clustered } = serde_json::from_slice(&seen.stdout)?;
        let floor = (before + self.floor_p50().await?) / 2.0;
        let keys = ["mount_over", "mount_alone_ms", "mount_clustered_ms"];
        self.add_mounts(keys, &taking, floor);
        let keys = ["held_mount_over", "held_mount_alone_ms", "held_mount_clustered_ms"];
        self.add_mounts(keys, &held, floor);
        self.report.add("csid_rss_alone", rss_alone, "");
        self.report.add("csid_rss_clustered", rss_clustered, "");
        self.report.add("csid_rss_over", rss_clustered - rss_alone, &format!("{HELD} held"));
        Ok(())
    }

    /// Adds mounts of csid alone and in the cluster: what they cost more there, and both times.
    fn add_mounts(&mut self, keys: [&'static str; 3], [alone, clustered]: &[Vec<f64>; 2], floor: f64) {
        for (alone, clustered) in alone.iter().zip(clustered) {
            self.report.add(keys[1], *alone, "");
            self.report.add(keys[2], *clustered, "");
            let of = format!("{clustered:.2} ms less {alone:.2} ms, against {floor:.2} ms");
            self.report.add(keys[0], (clustered - alone) / floor, &of);
        }
    }
}

/// Measures in the mount namespace of this process, and prints what it has seen.
#[tokio::main(worker_threads = 2)]
pub async fn measure(args: &HostsArgs) -> Result<()> {
    let csid = sibling("csid")?;
    let alone = Host::new(&args.inside, &csid)?;
    let clustered = alone.beside("clustered")?;
    let text = format!("node = \"n-csid\"\n[cluster]\nname = \"prod\"\nlink = {:?}\n", args.link);
    fs::write(clustered.path("etc/csid.toml"), text)?;
    let _plugins = [alone.plugin(PLUGIN)?, clustered.plugin(PLUGIN)?];
    let (of_alone, of_clustered) = (alone.start()?, clustered.start()?);
    let clients = [
        alone.client(&alone.private(), PLUGIN).await?,
        clustered.client(&clustered.private(), PLUGIN).await?,
    ];
    for n in 0..HELD {
        clients[0].register_volume("default", &volume(n), spec(n)).await?;
    }
    // A host that has not joined mounts nothing.
    let begun = Instant::now();
    while let Err(error) = mount(&clients[1], FREE).await {
        ensure!(begun.elapsed() < JOIN, "csid has not joined: {error:#}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    unmount(&clients[1], FREE).await?;
    for client in &clients {
        client.claim("default", &volume(CLAIMED), "consumer", ClaimOptions::default()).await?;
    }
    let time = Duration::from_millis(args.milliseconds);
    let (mut taking, mut held) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for _ in 0..args.rounds {
        for (n, client) in clients.iter().enumerate() {
            taking[n].push(cycle(client, FREE, time).await?);
            held[n].push(cycle(client, CLAIMED, time).await?);
        }
    }
    for client in &clients {
        for n in 0..HELD {
            mount(client, n).await?;
        }
    }
    tokio::time::sleep(REST).await;
    let seen = Seen {
        taking,
        held,
        rss_alone: of_alone.rss()? / 1024.0,
        rss_clustered: of_clustered.rss()? / 1024.0,
    };
    println!("{}", serde_json::to_string(&seen)?);
    Ok(())
}

/// Mounts and unmounts a volume for a while. Returns the median of the mounts, in milliseconds.
async fn cycle(client: &Client, n: usize, time: Duration) -> Result<f64> {
    let (begun, mut took) = (Instant::now(), Vec::new());
    while begun.elapsed() < time {
        let begun = Instant::now();
        mount(client, n).await?;
        took.push(begun.elapsed().as_secs_f64() * 1000.0);
        unmount(client, n).await?;
    }
    Ok(median(took))
}

async fn mount(client: &Client, n: usize) -> Result<()> {
    client.mount("default", &volume(n), "consumer", MountOptions::default()).await?;
    Ok(())
}

async fn unmount(client: &Client, n: usize) -> Result<()> {
    Ok(client.unmount("default", &volume(n), "consumer", UnmountOptions::default()).await?)
}

fn spec(n: usize) -> RegisterVolume {
    let capability =
        Capability { access_mode: AccessMode::SingleNodeWriter, attachment_mode: AttachmentMode::FileSystem };
    RegisterVolume {
        plugin: Some(PLUGIN.to_owned()),
        external_id: Some(external_id(&volume(n))),
        capabilities: Some(vec![capability]),
        ..RegisterVolume::default()
    }
}
