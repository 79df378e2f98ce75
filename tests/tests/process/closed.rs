//! Between the plugin's publish and csid's flags nobody but root gets to what is published.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use csid_client::{Client, Kind};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::older;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};
use rustix::mount::{MountFlags, UnmountFlags};

const NOBODY: u32 = 65534;

/// The volume has a set-uid program that tells as whom it runs.
fn give_program(source: &Path) {
    let program = source.join("id");
    fs::copy("/usr/bin/id", &program).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
}

/// As whom `nobody` runs it; `None`: he does not get there.
fn run_by_nobody(source: &Path) -> Option<u32> {
    let ran = try_by_nobody(source);
    ran.inspect_err(|error| assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}")).ok()
}

fn try_by_nobody(source: &Path) -> io::Result<u32> {
    let ran = Command::new(source.join("id")).arg("-u").uid(NOBODY).gid(NOBODY).current_dir("/").output()?;
    Ok(String::from_utf8(ran.stdout).unwrap().trim().parse().unwrap())
}

/// What is published without csid's flags.
fn in_the_window(w: &World) -> Option<PathBuf> {
    let mounts = kernel::below(&w.path("state/plugins")).unwrap();
    let published = mounts.into_iter().filter(|mount| mount.point.iter().any(|part| part == "publish"));
    published.into_iter().find(|mount| !mount.has("nosuid")).map(|mount| mount.point)
}

async fn window(w: &World) -> PathBuf {
    let mut found = None;
    eventually("the plugin has published", async || {
        found = in_the_window(w);
        found.is_some()
    })
    .await;
    found.unwrap()
}

#[test]
fn a_set_uid_program_of_a_volume_is_never_run_as_root() {
    world(async |w| {
        let client = running(w).await;
        let mut had: Vec<PathBuf> = Vec::new();
        for (consumer, options) in
            [("one", inline("v")), ("two", shared("w")), ("three", shared("w")), ("four", shared("w"))]
        {
            w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(1_000))]);
            let looking = async {
                let source = window(w).await;
                give_program(&source);
                assert_eq!(run_by_nobody(&source), None, "{consumer}");
                assert_eq!(in_the_window(w), Some(source), "he was still in it");
                // What others have is theirs meanwhile.
                assert!(had.iter().all(|source| run_by_nobody(source) == Some(NOBODY)));
            };
            let (source, ()) = tokio::join!(mounted(&client, consumer, options), looking);
            assert_eq!(run_by_nobody(&source), Some(NOBODY), "as himself");
            had.push(source);
        }
        count("windows", had.len());
        for (volume, consumer) in [("v", "one"), ("w", "two"), ("w", "three"), ("w", "four")] {
            unmount(&client, volume, consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
        w.plugin("p").assert_rules();
    });
}

/// csid has ended in the window, then the host has booted: each time it is closed again before the plugin publishes.
#[test]
fn what_csid_left_in_the_window_stays_closed() {
    world(async |w| {
        running(w).await;
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(2_000))]);
        let client = w.client().await;
        let asked = tokio::spawn(async move { mount(&client, "job", inline("v")).await });
        let source = window(w).await;
        give_program(&source);
        w.kill();
        let _lost = asked.await;
        assert_eq!(run_by_nobody(&source), None);
        let client = w.start().await;
        let watching = async {
            for _ in 0..50 {
                // It may be restricted and opened, or removed, between the look and the try.
                assert!(in_the_window(w).is_none_or(|source| try_by_nobody(&source).ok() != Some(0)));
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let (again, ()) = tokio::join!(mounted(&client, "job", inline("v")), watching);
        assert_eq!(run_by_nobody(&again), Some(NOBODY));

        w.reboot().await;
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(1_000))]);
        let client = w.start().await;
        healthy(&client, "p").await;
        let looking = async { assert_eq!(run_by_nobody(&window(w).await), None, "after a boot") };
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

/// What is gone behind csid's back is made again where it was; what is made anew has its own directory.
#[test]
fn a_mount_of_an_older_csid_stays_open_while_another_is_made_again() {
    world(async |w| {
        let (mut client, [one, two]) = of_an_older_csid(w).await;
        let is_had = || assert_eq!(run_by_nobody(&two), Some(NOBODY));
        let gone = || rustix::mount::unmount(&one, UnmountFlags::empty()).unwrap();

        gone();
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(1_000))]);
        let looking = async {
            window(w).await;
            is_had();
        };
        let (again, ()) = tokio::join!(mounted(&client, "one", shared("w")), looking);
        assert_eq!((&again, run_by_nobody(&again)), (&one, Some(NOBODY)));
        is_had();

        // It fails; csid ends in it.
        gone();
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::FailAfter(13))]);
        refusal(mount(&client, "one", shared("w")).await);
        is_had();
        let anew = mounted(&client, "one", shared("w")).await;
        assert_eq!((&anew, run_by_nobody(&anew)), (&one.join("volume"), Some(NOBODY)));
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(2_000))]);
        let asking = w.client().await;
        let asked = tokio::spawn(async move { mount(&asking, "three", shared("w")).await });
        window(w).await;
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
fn what_csid_left_closed_is_opened_for_whoever_comes_next() {
    world(async |w| {
        let (client, [one, two]) = of_an_older_csid(w).await;
        unmount(&client, "w", "two").await.unwrap();
        rustix::mount::unmount(&one, UnmountFlags::empty()).unwrap();
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(2_000))]);
        let asking = w.client().await;
        let asked = tokio::spawn(async move { mount(&asking, "one", shared("w")).await });
        let source = window(w).await;
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
fn what_an_older_csid_left_in_the_window_is_restricted_without_its_plugin() {
    world(async |w| {
        running(w).await;
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::DelayAfter(2_000))]);
        let client = w.client().await;
        let asked = tokio::spawn(async move { mount(&client, "job", inline("v")).await });
        let source = window(w).await;
        give_program(&source);
        w.kill();
        w.plugin("p").kill();
        let _lost = asked.await;
        fs::set_permissions(source.parent().unwrap(), Permissions::from_mode(0o711)).unwrap();
        assert_eq!(run_by_nobody(&source), Some(0), "as it was");
        w.start().await;
        assert_eq!(run_by_nobody(&source), Some(NOBODY));
        w.plugin("p").start().await;
        let client = w.client().await;
        w.nothing_left(&client).await;
    });
}

/// Nothing is published into a mount that is where the mount's own directory is to be, and its mode stays.
#[test]
fn what_is_mounted_at_the_own_directory_is_left_alone() {
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
        w.plugin("p").assert_rules();
    });
}
