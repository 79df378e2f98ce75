//! The parts of a run. Each has its own csid and leaves no mount.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use csid_client::{Client, MountFilter, Target};

use crate::host::Host;
use crate::load;
use crate::neighbours;
use crate::paths::{self, Floor, Rows, Way};
use crate::report::{CALLERS, HERE, LEAST, Report, WAYS};

/// Callers who fill csid with mounts.
const MANY: u32 = 64;
/// A part that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(60);

/// Mount and unmount, all ways that are chosen in turn.
pub async fn cycles(
    host: &Host,
    report: &mut Report,
    rounds: usize,
    time: Duration,
    chosen: impl Fn(&str, u32) -> bool,
) -> Result<()> {
    let _plugin = host.plugin("bench")?;
    let _bus = host.bus()?;
    let csid = host.start()?;
    let floor = Floor::new(&host.socket("bench"), &host.path("floor"));
    floor.prepare(MANY)?;
    let rows = Rows::open(&host.path("journal/floor.db"))?;
    let (least, least_client) = host.least("bench", MANY).await?;
    let ways: [Way; HERE] = [
        Way::Floor(floor.clone()),
        Way::FloorCommit(floor, rows),
        Way::Csid(least_client),
        Way::Csid(host.client(&host.private(), "bench").await?),
        Way::Csid(host.client(&Target::SystemBus, "bench").await?),
    ];
    for round in 0..rounds {
        for callers in CALLERS {
            for turn in 0..WAYS.len() {
                // Another one is first in each round.
                let place = (turn + round) % WAYS.len();
                let way = WAYS[place].0;
                if !chosen(way, callers) {
                    continue;
                }
                let cpu = || if way == LEAST { least.cpu() } else { csid.cpu() };
                let before = cpu()?;
                let seen = match ways.get(place) {
                    Some(way) => load::cycle(way, callers, time).await?,
                    None => load::program(way, &host.path("run/csid.sock"), callers, time)?,
                };
                report.add_round(way, callers, seen);
                if let (Some(Way::Csid(_)), MANY) = (ways.get(place), callers) {
                    // The cycles before those that count are a tenth.
                    let cycles = seen.cycles_per_s * time.as_secs_f64() * 1.1;
                    let used = (cpu()? - before).as_micros() as f64 / cycles;
                    let whose = if way == LEAST { "cpu_us" } else { "csid_cpu_us" };
                    report.add(&format!("{way}.{whose}"), used);
                }
            }
        }
    }
    drop(csid);
    host.forget_state()
}

/// What a claim costs, and a mount that takes one, against a mount alone.
pub async fn claims(host: &Host, report: &mut Report, rounds: usize, time: Duration) -> Result<()> {
    let _plugin = host.plugin("bench")?;
    let csid = host.start()?;
    let client = host.client(&host.private(), "bench").await?;
    paths::register(&client, MANY).await?;
    let ways = [Way::Csid(client.clone()), Way::Registered(client.clone()), Way::Claim(client)];
    for round in 0..rounds {
        for callers in [1, MANY] {
            let mut seen = [None; 3];
            for turn in 0..ways.len() {
                // Another one is first in each round.
                let place = (turn + round) % ways.len();
                seen[place] = Some(load::cycle(&ways[place], callers, time).await?);
            }
            let [Some(alone), Some(registered), Some(claim)] = seen else { continue };
            let ratio = registered.mount_p50_us / alone.mount_p50_us;
            report.add(&format!("claimed_mount_p50_ratio.{callers}"), ratio);
            let ratio = registered.cycles_per_s / alone.cycles_per_s;
            report.add(&format!("claimed_mount_cycles_ratio.{callers}"), ratio);
            report.add(&format!("claims_per_s.{callers}"), claim.cycles_per_s);
        }
    }
    drop(csid);
    host.forget_state()
}

/// What a start costs with nothing in the journal.
pub async fn start(host: &Host, report: &mut Report, rounds: usize) -> Result<()> {
    let _plugin = host.plugin("bench")?;
    for _ in 0..rounds {
        let csid = host.start()?;
        report.add("ready_ms", milliseconds(csid.ready));
        host.client(&host.private(), "bench").await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        report.add("rss_idle_kib", csid.rss()?);
        drop(csid);
        host.forget_state()?;
    }
    Ok(())
}

/// After this time without a call csid has given freed memory back to the host.
const AT_REST: Duration = Duration::from_secs(3);

/// Mounts that are there when csid is started again.
pub async fn adopt(host: &Host, report: &mut Report, rounds: usize) -> Result<()> {
    let _plugin = host.plugin("bench")?;
    for count in [1_000, 10_000] {
        let csid = host.start()?;
        let client = host.client(&host.private(), "bench").await?;
        load::all(&Way::Csid(client), count, MANY, true).await?;
        tokio::time::sleep(AT_REST).await;
        let mut rss = vec![csid.rss()?];
        drop(csid);
        for _ in 0..rounds {
            let csid = host.start()?;
            report.add(&format!("adopt_{count}_ms"), milliseconds(csid.ready));
            let client = host.client(&host.private(), "bench").await?;
            // Before they are listed: a list of ten thousand is a burst.
            tokio::time::sleep(AT_REST).await;
            rss.push(csid.rss()?);
            let adopted = mounted(&client).await?;
            ensure!(adopted == count as usize, "{adopted} of {count} mounts were adopted");
        }
        if count == 10_000 {
            // The one that mounted them, or one that adopted them: whichever needs more.
            report.add("rss_10000_kib", rss.into_iter().fold(0.0, f64::max));
        }
        host.forget_state()?;
    }
    Ok(())
}

/// A thousand mounts after a reboot, and by the bare client.
pub async fn remount(host: &Host, report: &mut Report, rounds: usize) -> Result<()> {
    const COUNT: u32 = 1_000;
    let _plugin = host.plugin("bench")?;
    let floor = Floor::new(&host.socket("bench"), &host.path("floor"));
    floor.prepare(COUNT)?;
    let floor = Way::Floor(floor);
    for _ in 0..rounds {
        let took = load::all(&floor, COUNT, MANY, true).await?;
        report.add("floor_1000_per_s", f64::from(COUNT) / took.as_secs_f64());
        load::all(&floor, COUNT, MANY, false).await?;

        let csid = host.start()?;
        let client = host.client(&host.private(), "bench").await?;
        load::all(&Way::Csid(client), COUNT, MANY, true).await?;
        let all = host.mounts("state")?;
        drop(csid);
        host.reboot()?;
        let begun = Instant::now();
        let csid = host.start()?;
        while host.mounts("state")? < all {
            ensure!(begun.elapsed() < LIMIT, "the mounts do not come back");
            // Each look reads the whole mount table.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // They are there; now the journal has to say so.
        let client = host.client(&host.private(), "bench").await?;
        while mounted(&client).await? < COUNT as usize {
            ensure!(begun.elapsed() < LIMIT, "not all mounts come back");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        report.add("remount_1000_per_s", f64::from(COUNT) / begun.elapsed().as_secs_f64());
        drop(csid);
        host.forget_state()?;
    }
    Ok(())
}

/// What a mount costs on a host with many mounts of others.
pub async fn foreign(host: &Host, report: &mut Report, rounds: usize, time: Duration) -> Result<()> {
    let _plugin = host.plugin("bench")?;
    let csid = host.start()?;
    let floor = Floor::new(&host.socket("bench"), &host.path("floor"));
    floor.prepare(1)?;
    // The floor shows what of it is the kernel's own: one more mount among many.
    let ways = [
        ("foreign", Way::Csid(host.client(&host.private(), "bench").await?)),
        ("foreign_floor", Way::Floor(floor)),
    ];
    for _ in 0..rounds {
        let mut alone = [0.0; 2];
        for count in [0, 10, 1_000, 5_000] {
            host.foreign(count)?;
            for ((name, way), alone) in ways.iter().zip(&mut alone) {
                let cost = load::cycle(way, 1, time).await?.mount_p50_us;
                if count == 0 {
                    *alone = cost;
                } else {
                    report.add(&format!("{name}_{count}_ratio"), cost / *alone);
                }
            }
        }
        host.foreign(0)?;
    }
    drop(csid);
    host.forget_state()
}

/// The cost of an unmount by the number of processes and mount namespaces that it searches.
pub async fn elsewhere(host: &Host, report: &mut Report, rounds: usize) -> Result<()> {
    const UNMOUNTS: u32 = 10;
    let _plugin = host.plugin("bench")?;
    let csid = host.start()?;
    let way = Way::Csid(host.client(&host.private(), "bench").await?);
    let beside = [("alone", [0, 0, 0]), ("600_processes", [600, 0, 0]), ("50_namespaces", [0, 50, 3000])];
    for _ in 0..rounds {
        for (name, [processes, namespaces, mounts]) in beside {
            let _others = neighbours::start(&host.path("neighbours"), processes, namespaces, mounts)?;
            let mut times = Vec::new();
            for _ in 0..UNMOUNTS {
                way.mount(0).await?;
                let begun = Instant::now();
                way.unmount(0).await?;
                times.push(begun.elapsed().as_secs_f64() * 1000.0);
            }
            report.add(&format!("unmount_{name}_ms"), load::median(times));
        }
    }
    drop(csid);
    host.forget_state()
}

/// What csid costs when nobody asks for anything.
pub async fn idle(host: &Host, report: &mut Report) -> Result<()> {
    const LONG: Duration = Duration::from_secs(60);
    let ids: Vec<String> = (0..10).map(|n| format!("idle-{n}")).collect();
    let _plugins: Vec<_> = ids.iter().map(|id| host.plugin(id)).collect::<Result<_>>()?;
    let csid = host.start()?;
    for id in &ids {
        host.client(&host.private(), id).await?;
    }
    let before = csid.cpu()?;
    tokio::time::sleep(LONG).await;
    let used = csid.cpu()? - before;
    report.add("cpu_idle_percent", 100.0 * used.as_secs_f64() / LONG.as_secs_f64());
    Ok(())
}

/// How many are mounted by what the journal and the kernel say.
async fn mounted(client: &Client) -> Result<usize> {
    let rows = client.list_mounts(MountFilter::default()).await?;
    Ok(rows.iter().filter(|row| row.healthy).count())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
