//! How what a call costs grows with what csid has besides: volumes, waiters, consumers, bound units. A csid for each size runs
//! at the same time, each with a plugin of its own, and is measured in turn.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use csid_client::{
    AccessMode, AttachmentMode, Capability, ClaimOptions, Client, MountOptions, RegisterVolume,
    ReleaseOptions, UnmountOptions, VolumeFilter,
};
use futures_util::future::try_join_all;
use tokio::task::JoinHandle;

use crate::host::{Csid, Host, Running};
use crate::load::median;
use crate::report::Report;
use crate::units::Units;

/// Calls that fill a csid, at a time.
const FILLERS: usize = 32;
/// Calls that wait on one connection.
const OF_CONNECTION: usize = 16;
/// Volumes in the list that is measured.
const PAGE: usize = 1_000;
const NAMESPACE: &str = "curves";
/// The volume that is measured.
const MEASURED: &str = "measured";
const NOBODY_WAITS_SO_LONG: Duration = Duration::from_secs(3_600);
const LIMIT: Duration = Duration::from_secs(120);

/// What there is more of in each csid of a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// Volumes of a plugin that takes so many at most, registered and claimed.
    Volumes,
    /// Claims that wait because their plugin takes no more volumes.
    Places,
    /// Claims that wait for the volume that is measured, which has one consumer at most.
    Queue,
    /// Mounts of the volume that is measured.
    Consumers,
    /// Claims of as many volumes, each bound to a systemd unit of its own.
    Units,
}

pub const CURVES: [(&str, Of, [usize; 3]); 5] = [
    ("registered volumes", Of::Volumes, [100, 1_000, 10_000]),
    ("waiters at a plugin's limit", Of::Places, [1, 100, 1_000]),
    ("waiters for one volume", Of::Queue, [1, 100, 1_000]),
    ("consumers of one volume", Of::Consumers, [1, 100, 1_000]),
    ("bound units", Of::Units, [1, 100, 1_000]),
];

pub const CALLS: [&str; 4] = ["claim", "mount", "unmount", "list"];

/// One csid with so many of something.
struct World {
    of: Of,
    size: usize,
    client: Client,
    waiters: Vec<JoinHandle<()>>,
    _csid: Csid,
    _plugin: Running,
    _bus: Option<(Running, Units)>,
    host: Host,
}

/// Measures the rows of [`CURVES`] that are chosen by name; each call for `time` in each round.
pub async fn curves(
    host: &Host,
    report: &mut Report,
    rounds: usize,
    time: Duration,
    chosen: impl Fn(&str) -> bool,
) -> Result<()> {
    for (name, of, sizes) in CURVES.into_iter().filter(|(name, ..)| chosen(name)) {
        let mut worlds = Vec::new();
        for size in sizes {
            let begun = Instant::now();
            worlds.push(World::new(host, of, size).await.with_context(|| format!("{size} {name}"))?);
            ensure!(begun.elapsed() < LIMIT, "{size} {name} take too long to be there");
        }
        for round in 0..rounds {
            for call in CALLS {
                let mut costs = BTreeMap::new();
                for turn in 0..worlds.len() {
                    // Another one is first in each round.
                    let world = &worlds[(turn + round) % sizes.len()];
                    costs.insert(world.size, world.cost(call, time).await?);
                }
                for (size, cost) in &costs {
                    report.add(&format!("curve.{name}.{call}.{size}"), *cost);
                    report.add(&format!("curve_ratio.{name}.{call}.{size}"), cost / costs[&sizes[0]]);
                }
            }
        }
        for world in worlds {
            world.end()?;
        }
    }
    Ok(())
}

impl World {
    async fn new(host: &Host, of: Of, size: usize) -> Result<Self> {
        let host = host.beside(&format!("curves-{size}"))?;
        let (most, mode) = match of {
            Of::Volumes => (1_000_000, AccessMode::MultiNodeMultiWriter),
            // The volume that is measured has the one place.
            Of::Places => (1, AccessMode::MultiNodeMultiWriter),
            Of::Queue => (0, AccessMode::SingleNodeWriter),
            Of::Consumers | Of::Units => (0, AccessMode::MultiNodeMultiWriter),
        };
        let bus = match of {
            Of::Units => {
                let bus = host.bus()?;
                let units = Units::start(&host.bus_address()).await?;
                Some((bus, units))
            }
            _ => None,
        };
        let plugin = host.plugin_with("bench", most)?;
        let csid = host.start()?;
        let client = host.client(&host.private(), "bench").await?;
        let mut world =
            World { of, size, client, waiters: Vec::new(), _csid: csid, _plugin: plugin, _bus: bus, host };
        world.register(&[MEASURED.to_owned()], mode).await?;
        let page: Vec<String> = (0..PAGE).map(|n| format!("page-{n:03}")).collect();
        world.register(&page, mode).await?;
        world.client.claim(NAMESPACE, MEASURED, "holder", ClaimOptions::default()).await?;
        world.fill(mode).await?;
        Ok(world)
    }

    async fn fill(&mut self, mode: AccessMode) -> Result<()> {
        let others: Vec<String> = (0..self.size).map(|n| format!("other-{n}")).collect();
        match self.of {
            Of::Volumes => {
                self.register(&others, mode).await?;
                self.claim(&others, |_| ClaimOptions::default()).await
            }
            Of::Units => {
                self.register(&others, mode).await?;
                let bind = |n: usize| Some(format!("unit:u{n}.service"));
                self.claim(&others, |n| ClaimOptions { bind: bind(n), ..ClaimOptions::default() }).await
            }
            Of::Places => {
                self.register(&others, mode).await?;
                self.wait(|n| (format!("other-{n}"), "waiter".to_owned())).await
            }
            Of::Queue => self.wait(|n| (MEASURED.to_owned(), format!("waiter-{n}"))).await,
            Of::Consumers => {
                let consumers: Vec<usize> = (0..self.size).collect();
                self.each(&consumers, |client, n| async move {
                    let consumer = format!("consumer-{n}");
                    client.mount(NAMESPACE, MEASURED, &consumer, MountOptions::default()).await.map(drop)
                })
                .await
            }
        }
    }

    /// Makes a call for each of `items`, so many at a time.
    async fn each<T, F>(&self, items: &[T], call: impl Fn(Client, T) -> F) -> Result<()>
    where
        T: Clone,
        F: Future<Output = csid_client::Result<()>>,
    {
        for items in items.chunks(FILLERS) {
            try_join_all(items.iter().map(|item| call(self.client.clone(), item.clone()))).await?;
        }
        Ok(())
    }

    async fn register(&self, volumes: &[String], access_mode: AccessMode) -> Result<()> {
        self.each(volumes, |client, volume| async move {
            let spec = RegisterVolume {
                plugin: Some("bench".to_owned()),
                external_id: Some(volume.clone()),
                capabilities: Some(vec![Capability {
                    access_mode,
                    attachment_mode: AttachmentMode::FileSystem,
                }]),
                ..RegisterVolume::default()
            };
            client.register_volume(NAMESPACE, &volume, spec).await.map(drop)
        })
        .await
    }

    async fn claim(&self, volumes: &[String], options: impl Fn(usize) -> ClaimOptions) -> Result<()> {
        let numbered: Vec<(usize, String)> = volumes.iter().cloned().enumerate().collect();
        self.each(&numbered, |client, (n, volume)| {
            let options = options(n);
            async move { client.claim(NAMESPACE, &volume, "holder", options).await.map(drop) }
        })
        .await
    }

    /// Has as many claims wait, each of the volume and for the consumer that `of` says.
    async fn wait(&mut self, of: impl Fn(usize) -> (String, String)) -> Result<()> {
        let mut client = self.client.clone();
        for n in 0..self.size {
            if n % OF_CONNECTION == 0 {
                client = Client::connect(&self.host.private()).await?;
            }
            let ((volume, consumer), client) = (of(n), client.clone());
            let wait_usec = Some(NOBODY_WAITS_SO_LONG.as_micros() as u64);
            let options = ClaimOptions { wait_usec, deadline_usec: wait_usec, ..ClaimOptions::default() };
            self.waiters.push(tokio::spawn(async move {
                let _ = client.claim(NAMESPACE, &volume, &consumer, options).await;
            }));
        }
        let begun = Instant::now();
        loop {
            let waiting = self.client.list_operations().await?;
            if waiting.iter().filter(|row| row.step.contains("waiting")).count() >= self.size {
                return Ok(());
            }
            ensure!(begun.elapsed() < LIMIT, "not all wait: {} calls", waiting.len());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The median of a call, µs.
    async fn cost(&self, call: &str, time: Duration) -> Result<f64> {
        let begun = Instant::now();
        let mut costs = Vec::new();
        while costs.is_empty() || begun.elapsed() < time {
            let one = Instant::now();
            let cost = match call {
                "claim" => self.claim_once(one).await?,
                "mount" => self.mount_once(one).await?,
                "unmount" => self.unmount_once().await?,
                _ => self.list_once(one).await?,
            };
            costs.push(cost.as_nanos() as f64 / 1000.0);
        }
        Ok(median(costs))
    }

    /// The other consumers; where only one may have the volume, the one that has it.
    fn consumer(&self) -> &'static str {
        if self.of == Of::Queue { "holder" } else { "one-more" }
    }

    async fn claim_once(&self, begun: Instant) -> Result<Duration> {
        let consumer = self.consumer();
        self.client.claim(NAMESPACE, MEASURED, consumer, ClaimOptions::default()).await?;
        let took = begun.elapsed();
        if self.of != Of::Queue {
            self.client.release(NAMESPACE, MEASURED, consumer, ReleaseOptions::default()).await?;
        }
        Ok(took)
    }

    async fn mount_once(&self, begun: Instant) -> Result<Duration> {
        let consumer = self.consumer();
        self.client.mount(NAMESPACE, MEASURED, consumer, MountOptions::default()).await?;
        let took = begun.elapsed();
        self.client.unmount(NAMESPACE, MEASURED, consumer, UnmountOptions::default()).await?;
        Ok(took)
    }

    async fn unmount_once(&self) -> Result<Duration> {
        let consumer = self.consumer();
        self.client.mount(NAMESPACE, MEASURED, consumer, MountOptions::default()).await?;
        let begun = Instant::now();
        self.client.unmount(NAMESPACE, MEASURED, consumer, UnmountOptions::default()).await?;
        Ok(begun.elapsed())
    }

    async fn list_once(&self, begun: Instant) -> Result<Duration> {
        let (namespace, prefix) = (Some(NAMESPACE.to_owned()), Some("page-".to_owned()));
        let filter = VolumeFilter { namespace, prefix, ..VolumeFilter::default() };
        let rows = self.client.list_volumes(filter).await?;
        ensure!(rows.len() == PAGE, "{} volumes in the list", rows.len());
        Ok(begun.elapsed())
    }

    fn end(self) -> Result<()> {
        self.waiters.iter().for_each(JoinHandle::abort);
        let World { host, client, _csid, _plugin, _bus, .. } = self;
        drop((client, _csid, _plugin, _bus));
        host.forget_state()
    }
}
