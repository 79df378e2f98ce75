//! Between the plugin's publish and csid's flags nobody but root gets to what is published.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, world};

const NOBODY: u32 = 65534;

/// The volume has a set-uid program that tells as whom it runs.
fn give_program(source: &Path) {
    let program = source.join("id");
    fs::copy("/usr/bin/id", &program).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
}

/// As whom `nobody` runs it; `None`: he does not get there.
fn run_by_nobody(source: &Path) -> Option<u32> {
    match Command::new(source.join("id")).arg("-u").uid(NOBODY).gid(NOBODY).current_dir("/").output() {
        Ok(ran) => Some(String::from_utf8(ran.stdout).unwrap().trim().parse().unwrap()),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
            None
        }
    }
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
                assert!(in_the_window(w).is_none_or(|source| run_by_nobody(&source).is_none()));
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
