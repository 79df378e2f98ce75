//! File systems whose server dies under load (bindfs, killed): noticed, reported once, and made again where the volume says so, at
//! the same paths.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use csid_client::{
    AccessMode, AttachmentMode, Capability, Client, Event, Heal, Kind, MountOptions, MountRow,
    RegisterVolume, Restore, UnmountOptions,
};
use csid_tests::ask::*;
use csid_tests::backend::Server;
use csid_tests::kernel;
use csid_tests::script::{Act, Lie, Rule};
use csid_tests::world::{World, count, eventually, refusal, within_time, world};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::{Pid, Signal, kill_process};

/// The time within which csid promises to heal a mount.
const NOTICED: Duration = Duration::from_secs(10);
/// The second healing of a mount waits.
const HEALED_AGAIN: Duration = Duration::from_secs(40);
const MODE: AccessMode = AccessMode::SingleNodeMultiWriter;

fn served() -> Rule {
    Rule::always("NodeStageVolume", Act::Lie(Lie::Served))
}

async fn declared(client: &Client, volume: &str, heal: Heal) {
    let capability = Capability { access_mode: MODE, attachment_mode: AttachmentMode::FileSystem };
    let spec = RegisterVolume {
        plugin: Some("p".to_owned()),
        external_id: Some(volume.to_owned()),
        capabilities: Some(vec![capability]),
        heal: Some(heal),
        ..RegisterVolume::default()
    };
    client.register_volume(NAMESPACE, volume, spec).await.unwrap();
}

/// Of a registered volume.
async fn used(client: &Client, volume: &str, consumer: &str, more: MountOptions) -> PathBuf {
    let options = MountOptions { access_mode: Some(MODE), ..more };
    client.mount(NAMESPACE, volume, consumer, options).await.unwrap().source.into()
}

fn at(target: &Path) -> MountOptions {
    fs::create_dir(target).unwrap();
    MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..MountOptions::default() }
}

fn signal(w: &mut World, volume: &str, signal: Signal) {
    let server: Server = w.plugin("p").backend().get(volume).unwrap().expect("a server");
    kill_process(Pid::from_raw(server.pid).unwrap(), signal).unwrap();
}

fn of<'a>(events: &'a [Event], kind: &str, volume: &str) -> Vec<&'a Event> {
    let subject = format!("{NAMESPACE}/{volume}");
    events.iter().filter(|event| event.kind == kind && event.subject == subject).collect()
}

async fn healed(client: &Client, since: u64, volume: &str, consumer: &str, limit: Duration) -> MountRow {
    within_time(limit, "it is healed", async || {
        let events = events(client, since).await;
        of(&events, "mount-healed", volume).iter().any(|event| detail(event, "consumer") == consumer)
    })
    .await;
    let row = row(client, volume, consumer).await.unwrap();
    assert!(row.healthy && row.error.is_empty() && row.state == "mounted", "{row:?}");
    row
}

/// Appends lines to a file, each synced before it counts, whatever happens to the file system.
struct Writer {
    lines: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<u64>,
}

impl Writer {
    fn start(file: PathBuf) -> Self {
        let (lines, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (written, ends) = (lines.clone(), stop.clone());
        // In this test's mount namespace, as every thread of this one.
        let thread = std::thread::spawn(move || {
            let mut failed = 0;
            let write = |line: u64| {
                let mut log = OpenOptions::new().append(true).create(true).open(&file)?;
                log.write_all(format!("{line}\n").as_bytes())?;
                log.sync_all()
            };
            while !ends.load(Ordering::Relaxed) {
                match write(written.load(Ordering::Relaxed)) {
                    Ok(()) => drop(written.fetch_add(1, Ordering::Relaxed)),
                    Err(_) => {
                        failed += 1;
                        std::thread::yield_now();
                    }
                }
            }
            failed
        });
        Writer { lines, stop, thread }
    }

    async fn goes_on(&self) {
        let before = self.lines.load(Ordering::Relaxed);
        eventually("the writer goes on", async || self.lines.load(Ordering::Relaxed) > before + 20).await;
    }

    /// How many lines it wrote, and how many it could not.
    fn end(self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        let failed = self.thread.join().unwrap();
        (self.lines.load(Ordering::Relaxed), failed)
    }
}

#[test]
fn killed_server_is_healed_at_the_same_paths() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([served()]);
        declared(&client, "v", Heal::Remount).await;
        let target = w.path("targets/db");
        let source = used(&client, "v", "db", at(&target)).await;
        let held = MountOptions { restore: Some(Restore::Hold), ..MountOptions::default() };
        let beside = used(&client, "v", "web", held).await;
        let first = row(&client, "v", "db").await.unwrap();
        fs::write(target.join("before"), "of before").unwrap();
        File::open(target.join("before")).unwrap().sync_all().unwrap();
        // It keeps the dead file system busy to the end.
        let open = File::open(target.join("before")).unwrap();
        let writer = Writer::start(target.join("log"));
        writer.goes_on().await;

        for (round, limit) in [NOTICED, HEALED_AGAIN].into_iter().enumerate() {
            let before = cursor(&client).await;
            let died = Instant::now();
            signal(w, "v", Signal::KILL);
            let dead = event_within(NOTICED, &client, before, &["mount-dead"], "default/v").await;
            assert!(detail(&dead, "error").contains("not connected"), "{dead:?}");
            count("milliseconds until a dead mount was an event", died.elapsed().as_millis() as usize);
            for consumer in ["db", "web"] {
                let row = healed(&client, before, "v", consumer, limit).await;
                assert_eq!(row.staging, first.staging);
            }
            count("milliseconds until it was healed", died.elapsed().as_millis() as usize);
            writer.goes_on().await;
            for path in [&source, &beside, &target] {
                assert_eq!(fs::read_to_string(path.join("before")).unwrap(), "of before");
                assert_eq!(kernel::stacked(path).unwrap(), 1, "{} in round {round}", path.display());
            }
            assert_eq!(row(&client, "v", "db").await.unwrap().source, first.source);
            let reply = events(&client, before).await;
            assert_eq!(of(&reply, "mount-dead", "v").len(), 2, "once for each: {reply:?}");
            assert_eq!(of(&reply, "mount-healed", "v").len(), 2, "{reply:?}");
        }

        let (written, failed) = writer.end();
        assert!(failed > 0, "it was killed under load");
        count("lines were written, none of them lost", written as usize);
        let log = fs::read_to_string(w.plugin("p").backend().data("v").join("log")).unwrap();
        let kept: std::collections::BTreeSet<u64> =
            log.lines().filter_map(|line| line.parse().ok()).collect();
        assert!((0..written).all(|line| kept.contains(&line)), "a line that was synced is lost");
        drop(open);
        unmount(&client, "v", "db").await.unwrap();
        unmount(&client, "v", "web").await.unwrap();
        assert_eq!(fs::read_dir(&target).unwrap().count(), 0, "written into the directory below the mount");
        w.nothing_left(&client).await;
    });
}

#[test]
fn report_only_mount_stays_dead_until_its_unmount() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([served()]);
        declared(&client, "v", Heal::Report).await;
        declared(&client, "w", Heal::Report).await;
        let target = w.path("targets/t");
        let source = used(&client, "v", "job", at(&target)).await;
        used(&client, "w", "job", MountOptions::default()).await;
        fs::write(source.join("file"), "data").unwrap();
        let open = File::open(target.join("file")).unwrap();
        let staged = w.plugin("p").count("NodeStageVolume", "");

        // A later probe than the first one's has reported the second.
        let before = cursor(&client).await;
        for volume in ["v", "w"] {
            signal(w, volume, Signal::KILL);
            let subject = format!("default/{volume}");
            event_within(NOTICED, &client, before, &["mount-dead"], &subject).await;
        }
        let reply = events(&client, before).await;
        assert_eq!(of(&reply, "mount-dead", "v").len(), 1, "{reply:?}");
        let dead = row(&client, "v", "job").await.unwrap();
        assert!(!dead.healthy && dead.error.contains("not connected"), "{dead:?}");
        assert_eq!(dead.state, "mounted", "an answered mount ends by Unmount");
        let again = client.mount(
            NAMESPACE,
            "v",
            "job",
            MountOptions { access_mode: Some(MODE), target: Some(dead.target), ..MountOptions::default() },
        );
        let (_, error) = refusal(again.await);
        assert!(error.message.ends_with(" is dead or does not answer"), "{error}");
        assert_eq!(w.plugin("p").count("NodeStageVolume", ""), staged, "nobody asked for it");

        // Somebody has a file of it open.
        let (kind, error) = refusal(unmount(&client, "v", "job").await);
        assert_eq!(kind, Kind::Busy, "{error}");
        let force = UnmountOptions { force: Some(true), ..UnmountOptions::default() };
        client.unmount(NAMESPACE, "v", "job", force).await.unwrap();
        drop(open);
        unmount(&client, "w", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// Who may write above the target renames a directory into its place where somebody else's mount is dead, or a link to it.
#[test]
fn foreign_dead_mount_stays_and_is_reported() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([served()]);
        let (task, other, link) = (w.path("targets/task"), w.path("targets/other"), w.path("targets/link"));
        for directory in [&task, &other] {
            fs::create_dir(directory).unwrap();
        }
        std::os::unix::fs::symlink(&other, &link).unwrap();
        let (target, others) = (task.join("t"), other.join("t"));
        fs::create_dir(&others).unwrap();
        let mut server = Command::new("bindfs").arg("-f").arg(w.path("etc")).arg(&others).spawn().unwrap();
        eventually("it is mounted", async || kernel::stacked(&others).unwrap() == 1).await;
        declared(&client, "v", Heal::Remount).await;
        used(&client, "v", "job", at(&target)).await;
        let swap = |with: &Path| renameat_with(CWD, &task, CWD, with, RenameFlags::EXCHANGE).unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        for (instead, word) in [(&link, "symbolic link"), (&other, "something else is mounted")] {
            let before = cursor(&client).await;
            let published = w.plugin("p").count("NodePublishVolume", "");
            swap(instead);
            signal(w, "v", Signal::KILL);
            event_within(NOTICED, &client, before, &["mount-dead"], "default/v").await;
            within_time(HEALED_AGAIN, "it is published again", async || {
                w.plugin("p").count("NodePublishVolume", "") > published
            })
            .await;
            let force = UnmountOptions { force: Some(true), ..UnmountOptions::default() };
            let (_, error) = refusal(client.unmount(NAMESPACE, "v", "job", force).await);
            assert!(error.message.contains(word), "{error}");
            swap(instead);
            unmount(&client, "v", "job").await.unwrap();
            assert_eq!((kernel::stacked(&others).unwrap(), kernel::stacked(&target).unwrap()), (1, 0));
            let options =
                MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..Default::default() };
            used(&client, "v", "job", options).await;
        }
        let before = cursor(&client).await;
        signal(w, "v", Signal::KILL);
        healed(&client, before, "v", "job", HEALED_AGAIN * 2).await;
        unmount(&client, "v", "job").await.unwrap();
        rustix::mount::unmount(&others, rustix::mount::UnmountFlags::DETACH).unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn hung_server_is_not_dead_and_delays_no_other() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([served()]);
        for volume in ["hangs", "dies", "lives"] {
            declared(&client, volume, Heal::Remount).await;
            used(&client, volume, "job", MountOptions::default()).await;
        }
        let before = cursor(&client).await;
        signal(w, "hangs", Signal::STOP);
        for limit in [NOTICED, HEALED_AGAIN] {
            let since = cursor(&client).await;
            signal(w, "dies", Signal::KILL);
            event_within(NOTICED, &client, since, &["mount-dead"], "default/dies").await;
            let begun = Instant::now();
            unmount(&client, "lives", "job").await.unwrap();
            used(&client, "lives", "job", MountOptions::default()).await;
            assert!(begun.elapsed() < NOTICED / 2, "{:?} while another hangs", begun.elapsed());
            within_time(limit, "it is healed while another hangs", async || {
                !of(&events(&client, since).await, "mount-healed", "dies").is_empty()
            })
            .await;
        }
        let hung = row(&client, "hangs", "job").await.unwrap();
        assert!(!hung.healthy && hung.error.contains("does not answer"), "{hung:?}");
        signal(w, "hangs", Signal::CONT);
        eventually("it answers again", async || row(&client, "hangs", "job").await.unwrap().healthy).await;
        let reply = events(&client, before).await;
        assert!(of(&reply, "mount-dead", "hangs").is_empty(), "it did not die: {reply:?}");
        for volume in ["hangs", "dies", "lives"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn healing_ends_after_a_kill_at_any_edge() {
    const RPCS: [&str; 4] =
        ["NodeUnpublishVolume", "NodeUnstageVolume", "NodeStageVolume", "NodePublishVolume"];
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([served()]);
        declared(&client, "v", Heal::Remount).await;
        let target = w.path("targets/t");
        // Also what does not come back by itself after a boot comes back after its server's death.
        let held = MountOptions { restore: Some(Restore::Hold), ..at(&target) };
        used(&client, "v", "job", held).await;
        fs::write(target.join("file"), "data").unwrap();
        for act in [Act::Delay(3_600_000), Act::DelayAfter(3_600_000)] {
            for rpc in RPCS {
                let before = cursor(&w.client().await).await;
                w.kill();
                signal(w, "v", Signal::KILL);
                w.plugin("p").rules([Rule::once(rpc, act.clone()), served()]);
                let from = w.plugin("p").recorded();
                w.start().await;
                eventually("it is being healed", async || w.plugin("p").begun_since(from, rpc) == 1).await;
                w.kill();
                // The call that hangs goes with it.
                w.plugin("p").rules([served()]);
                let client = w.start().await;
                healed(&client, before, "v", "job", NOTICED * 2).await;
                assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "data", "killed in {rpc}");
                assert_eq!(kernel::stacked(&target).unwrap(), 1);
            }
        }
        let client = w.client().await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn returned_plugin_heals_its_mounts_with_secrets() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(Lie::Fuse))]);
        let secret =
            || MountOptions { secrets: Some(secrets(&[("password", "x")])), ..MountOptions::default() };
        for (volume, more) in [("plain", MountOptions::default()), ("secret", secret())] {
            declared(&client, volume, Heal::Remount).await;
            used(&client, volume, "job", more).await;
        }
        let before = cursor(&client).await;
        w.plugin("p").kill();
        for volume in ["plain", "secret"] {
            let subject = format!("default/{volume}");
            event_within(NOTICED, &client, before, &["mount-dead"], &subject).await;
        }
        event(&client, before, &["secret-required"], "default/secret").await;
        w.plugin("p").start().await;
        healed(&client, before, "plain", "job", HEALED_AGAIN).await;
        let dead = row(&client, "secret", "job").await.unwrap();
        assert!(!dead.healthy && dead.error.contains("secrets"), "{dead:?}");
        used(&client, "secret", "job", secret()).await;
        healed(&client, before, "secret", "job", NOTICED).await;
        let reply = events(&client, before).await;
        assert_eq!(of(&reply, "secret-required", "secret").len(), 1, "{reply:?}");
        for volume in ["plain", "secret"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}
