//! Between the plugin's publish and csid's flags nobody but root gets to what is published.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use csid_client::{Client, Kind, MountOptions};
use csid_tests::ask::*;
use csid_tests::elsewhere::Consumer;
use csid_tests::kernel;
use csid_tests::older;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};
use rustix::mount::{MountFlags, UnmountFlags};

const NOBODY: u32 = 65534;

/// The volume has a set-uid program that prints the uid it runs as.
fn give_program(source: &Path) {
    let program = source.join("id");
    fs::copy("/usr/bin/id", &program).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
}

/// Returns the uid it prints when `nobody` runs it. `None`: `nobody` cannot reach it.
fn run_by_nobody(source: &Path) -> Option<u32> {
    let ran = try_by_nobody(source);
    ran.inspect_err(|error| assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}")).ok()
}

fn try_by_nobody(source: &Path) -> io::Result<u32> {
    let ran = Command::new(source.join("id")).arg("-u").uid(NOBODY).gid(NOBODY).current_dir("/").output()?;
    Ok(String::from_utf8(ran.stdout).unwrap().trim().parse().unwrap())
}

/// The plugins' own mounts.
fn private(w: &World) -> Vec<PathBuf> {
    let mounts = kernel::volumes_below(&w.path("state/plugins")).unwrap().into_iter();
    mounts.map(|mount| mount.point).filter(|point| point.iter().any(|part| part == "private")).collect()
}

/// Waits until the plugin has published one more than `had`, and returns where.
async fn window(w: &World, had: &[PathBuf]) -> PathBuf {
    let mut found = None;
    eventually("the plugin has published", async || {
        found = private(w).into_iter().find(|path| !had.contains(path));
        found.is_some()
    })
    .await;
    found.unwrap()
}

#[test]
fn set_uid_program_of_a_volume_is_never_run_as_root() {
    world(async |w| {
        let client = running(w).await;
        // A service with PrivateTmp= that is there already: the plugin's mounts reach it without csid's flags.
        let service = Consumer::copy("slave");
        let mut had: Vec<PathBuf> = Vec::new();
        for (consumer, options) in
            [("one", inline("v")), ("two", shared("w")), ("three", shared("w")), ("four", shared("w"))]
        {
            w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(1_000))]);
            let (before, sources) = (private(w), &had);
            let looking = async {
                let published = window(w, &before).await;
                give_program(&published);
                assert_eq!(run_by_nobody(&published), None, "{consumer}");
                assert_eq!(service.run_as_nobody(&published), None, "{consumer}, in the service");
                // What others have is theirs meanwhile.
                assert!(sources.iter().all(|source| run_by_nobody(source) == Some(NOBODY)));
                published
            };
            let (source, published) = tokio::join!(mounted(&client, consumer, options), looking);
            for (path, due) in [(&source, Some(NOBODY)), (&published, None)] {
                assert_eq!(run_by_nobody(path), due, "{}", path.display());
                assert_eq!(service.run_as_nobody(path), due, "{}, in the service", path.display());
            }
            let there = service.mounts();
            let line = there.lines().find(|line| line.contains(&format!(" {} ", source.display()))).unwrap();
            assert!(line.contains("nosuid") && line.contains("nodev"), "{line}");
            had.push(source);
        }
        count("publishes", had.len());
        for (volume, consumer) in [("v", "one"), ("w", "two"), ("w", "three"), ("w", "four")] {
            unmount(&client, volume, consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// With a target the consumer finds the volume there alone, whatever is above the target.
#[test]
fn published_path_of_a_target_is_roots() {
    world(async |w| {
        let client = running(w).await;
        let service = Consumer::copy("slave");
        let target = w.path("targets/closed/t");
        fs::create_dir_all(&target).unwrap();
        let above = target.parent().unwrap();
        let target_option = Some(target.to_str().unwrap().to_owned());
        let options = |options| MountOptions { target: target_option.clone(), ..options };
        for (volume, asked) in [("v", inline("v")), ("w", shared("w"))] {
            let source = mounted(&client, volume, options(asked)).await;
            give_program(&source);
            assert_eq!(run_by_nobody(&target), Some(NOBODY));
            fs::set_permissions(above, Permissions::from_mode(0o700)).unwrap();
            for path in [&source, &target] {
                assert_eq!(run_by_nobody(path), None, "{}", path.display());
                assert_eq!(service.run_as_nobody(path), None, "{}, in the service", path.display());
            }
            fs::set_permissions(above, Permissions::from_mode(0o711)).unwrap();
            unmount(&client, volume, volume).await.unwrap();
            // Without a target it is the path of the next one.
            let source =
                mounted(&client, volume, if volume == "v" { inline("v") } else { shared("w") }).await;
            give_program(&source);
            assert_eq!(run_by_nobody(&source), Some(NOBODY));
            unmount(&client, volume, volume).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// csid has ended in the window, then the host has booted: each time it is closed again before the plugin publishes.
#[test]
fn path_left_before_restriction_stays_closed() {
    world(async |w| {
        running(w).await;
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(2_000))]);
        let client = w.client().await;
        let asked = tokio::spawn(async move { mount(&client, "job", inline("v")).await });
        let source = window(w, &[]).await;
        give_program(&source);
        w.kill();
        let _lost = asked.await;
        assert_eq!(run_by_nobody(&source), None);
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(300))]);
        let client = w.start().await;
        let watching = async {
            loop {
                // It may be removed between the look and the try.
                assert!(private(w).iter().all(|path| try_by_nobody(path).is_err()));
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let again = tokio::select! {
            again = mounted(&client, "job", inline("v")) => again,
            _ = watching => unreachable!(),
        };
        assert_eq!(run_by_nobody(&again), Some(NOBODY));

        w.reboot().await;
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(1_000))]);
        let client = w.start().await;
        healthy(&client, "p").await;
        let looking = async { assert_eq!(run_by_nobody(&window(w, &[]).await), None, "after a boot") };
        let (after, ()) = tokio::join!(mounted(&client, "job", inline("v")), looking);
        assert_eq!(run_by_nobody(&after), Some(NOBODY));
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// Of a volume with several users an older csid published everything in one directory.
async fn of_an_older_csid(w: &mut World) -> (Client, [PathBuf; 2]) {
    let client = running(w).await;
    give_program(&mounted(&client, "one", shared("w")).await);
    mounted(&client, "two", shared("w")).await;
    older::published_without_own_directories(w).await;
    let client = w.start().await;
    healthy(&client, "p").await;
    let had = [mounted(&client, "one", shared("w")).await, mounted(&client, "two", shared("w")).await];
    assert_eq!(had[0].parent(), had[1].parent());
    assert!(had.iter().all(|source| run_by_nobody(source) == Some(NOBODY)));
    (client, had)
}

/// csid makes a mount that another process removed again at the same path. A new mount has its own directory.
#[test]
fn older_csids_mount_stays_open_during_a_restore() {
    world(async |w| {
        let (mut client, [one, two]) = of_an_older_csid(w).await;
        let is_had = || assert_eq!(run_by_nobody(&two), Some(NOBODY));
        let gone = || rustix::mount::unmount(&one, UnmountFlags::empty()).unwrap();

        gone();
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(1_000))]);
        let looking = async {
            window(w, &[]).await;
            is_had();
        };
        let (again, ()) = tokio::join!(mounted(&client, "one", shared("w")), looking);
        assert_eq!((&again, run_by_nobody(&again)), (&one, Some(NOBODY)));
        is_had();

        // It fails; csid ends in it.
        gone();
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::FailAfter(3))]);
        refusal(mount(&client, "one", shared("w")).await);
        is_had();
        let anew = mounted(&client, "one", shared("w")).await;
        assert_eq!((&anew, run_by_nobody(&anew)), (&one.join("volume"), Some(NOBODY)));
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(2_000))]);
        let asking = w.client().await;
        let asked = tokio::spawn(async move { mount(&asking, "three", shared("w")).await });
        window(w, &private(w)).await;
        is_had();
        w.kill();
        let _lost = asked.await;
        is_had();
        client = w.start().await;
        healthy(&client, "p").await;
        for consumer in ["one", "two", "three"] {
            let source = mounted(&client, consumer, shared("w")).await;
            assert_eq!(run_by_nobody(&source), Some(NOBODY), "{consumer}");
            is_had();
        }
        for consumer in ["one", "two", "three"] {
            unmount(&client, "w", consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// The directory that all are in is closed by the one that is made again; then csid ends.
#[test]
fn closed_path_is_opened_for_the_next_mount() {
    world(async |w| {
        let (client, [one, two]) = of_an_older_csid(w).await;
        unmount(&client, "w", "two").await.unwrap();
        rustix::mount::unmount(&one, UnmountFlags::empty()).unwrap();
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(2_000))]);
        let asking = w.client().await;
        let asked = tokio::spawn(async move { mount(&asking, "one", shared("w")).await });
        let source = window(w, &[]).await;
        assert_eq!(run_by_nobody(&source), None, "nobody else is in it");
        w.kill();
        let _lost = asked.await;
        assert_eq!(run_by_nobody(&source), None);
        let client = w.start().await;
        healthy(&client, "p").await;
        for (consumer, source) in [("two", two.join("volume")), ("one", one.join("volume"))] {
            assert_eq!(mounted(&client, consumer, shared("w")).await, source);
            assert_eq!(run_by_nobody(&source), Some(NOBODY), "{consumer}");
            unmount(&client, "w", consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// A csid that closed nothing ended before it restricted; its plugin does not come back.
#[test]
fn older_csids_path_is_restricted_without_its_plugin() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        give_program(&source);
        older::half_published(w).await;
        w.plugin("p").kill();
        assert_eq!(run_by_nobody(&source), Some(0), "as it was");
        w.start().await;
        assert_eq!(run_by_nobody(&source), Some(NOBODY));
        w.plugin("p").start().await;
        let client = w.client().await;
        w.nothing_left(&client).await;
    });
}

/// A row of an older csid keeps its one path until its volume is unmounted, and has two when it is mounted again.
#[test]
fn mount_of_an_older_csid_keeps_its_path_and_ends() {
    world(async |w| {
        let (client, [one, two]) = of_an_older_csid(w).await;
        assert!(private(w).is_empty());
        drop(client);
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        assert_eq!(mounted(&client, "one", shared("w")).await, one);
        assert!(private(w).is_empty());
        unmount(&client, "w", "one").await.unwrap();
        assert_eq!(mounted(&client, "one", shared("w")).await, one.join("volume"));
        assert_eq!(private(w).len(), 1);
        assert_eq!(run_by_nobody(&two), Some(NOBODY));
        for consumer in ["one", "two"] {
            unmount(&client, "w", consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// Nothing is published into a mount that is where the mount's own directory is to be, and its mode stays.
#[test]
fn mount_at_the_own_directory_is_left_alone() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "one", shared("w")).await;
        unmount(&client, "w", "one").await.unwrap();
        let own = source.parent().unwrap();
        fs::create_dir_all(own).unwrap();
        rustix::mount::mount("tmpfs", own, "tmpfs", MountFlags::empty(), c"mode=0755").unwrap();
        let (kind, error) = refusal(mount(&client, "one", shared("w")).await);
        assert!(kind == Kind::Busy && error.message.contains(own.to_str().unwrap()), "{error}");
        assert_eq!(fs::metadata(own).unwrap().permissions().mode() & 0o7777, 0o755);
        assert_eq!(fs::read_dir(own).unwrap().count(), 0);
        rustix::mount::unmount(own, UnmountFlags::empty()).unwrap();
        mounted(&client, "one", shared("w")).await;
        unmount(&client, "w", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}
