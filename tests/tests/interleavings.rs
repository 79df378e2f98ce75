//! Orders of events that once gave a wrong answer, each by a running csid: what must never happen again.

use csid_client::{Error, MountFilter, MountOptions, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{eventually, world};
use std::time::Duration;

fn umount(path: &std::path::Path) {
    rustix::mount::unmount(path, rustix::mount::UnmountFlags::empty()).unwrap();
}
fn is_mounted(path: &std::path::Path) -> bool {
    kernel::stacked(path).unwrap_or(0) > 0
}
async fn sleep(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await
}

#[test]
fn a_mount_is_answered_only_when_it_is_there() {
    world(async |w| {
        let client = running(w).await;
        let a = mounted(&client, "a", shared("v")).await;
        let b = mounted(&client, "b", shared("v")).await;
        drop(client);
        w.kill();
        umount(&a);
        umount(&b);
        let client = w.start().await;
        healthy(&client, "p").await;
        println!("states {} {}", state(&client, "v", "a").await, state(&client, "v", "b").await);
        let answer = mount(&client, "a", shared("v")).await;
        println!("answer {answer:?}");
        println!("mounted now: {}  state {}", is_mounted(&a), state(&client, "v", "a").await);
        answer.unwrap();
        assert!(is_mounted(&a), "answered, and nothing is mounted");
    });
}

#[test]
fn an_unmount_whose_caller_left_goes_on() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "a", shared("v")).await;
        w.plugin("p").kill();
        sleep(300).await;
        let (un, mo) = tokio::join!(
            client.unmount(
                NAMESPACE,
                "v",
                "a",
                UnmountOptions { deadline_usec: Some(500_000), ..Default::default() }
            ),
            async {
                sleep(100).await;
                mount(&client, "b", within(Duration::from_secs(2), shared("v"))).await
            }
        );
        println!("{un:?}\n{mo:?}");
        sleep(200).await;
        println!("state {}", state(&client, "v", "a").await);
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        sleep(4000).await;
        assert_eq!(state(&client, "v", "a").await, "none", "the Unmount goes on");
    });
}

#[test]
fn an_unmount_ends_what_was_queued_before_it() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "a", shared("v")).await;
        w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::Delay(1500))]);
        let (u1, m1, u2) = tokio::join!(
            unmount(&client, "v", "a"),
            async {
                sleep(300).await;
                mount(&client, "a", shared("v")).await
            },
            async {
                sleep(700).await;
                unmount(&client, "v", "a").await
            }
        );
        println!("{u1:?} {m1:?} {u2:?}");
        assert!(u2.is_ok());
        assert_eq!(state(&client, "v", "a").await, "none", "the last call was Unmount and it was answered");
    });
}

#[test]
fn an_answered_mount_stays_when_its_target_cannot_be_bound() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        std::fs::create_dir(&target).unwrap();
        let options = || MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..shared("v") };
        let source = mounted(&client, "a", options()).await;
        // The consumer's directory is renamed with the bind on it.. here: unbound and removed.
        umount(&target);
        std::fs::remove_dir(&target).unwrap();
        let again = mount(&client, "a", options()).await;
        println!("{again:?}");
        sleep(300).await;
        let p = w.plugin("p");
        println!(
            "unpublish {} unstage {} mounted {} state {}",
            p.count("NodeUnpublishVolume", "v"),
            p.count("NodeUnstageVolume", "v"),
            is_mounted(&source),
            state(&client, "v", "a").await
        );
        assert!(is_mounted(&source), "nobody asked for its end");
    });
}

#[test]
fn co_rule_22_nothing_is_unstaged_under_a_mount() {
    world(async |w| {
        let client = running(w).await;
        let a = mounted(&client, "a", shared("v")).await;
        drop(client);
        w.stop().await;
        std::fs::remove_dir_all(w.path("state/journal")).unwrap();
        let client = w.start().await;
        healthy(&client, "p").await;
        let again = mount(&client, "a", shared("v")).await;
        println!("{again:?}");
        let unstaged = w.plugin("p").count("NodeUnstageVolume", "v");
        println!("unstaged {unstaged} still mounted {}", is_mounted(&a));
        assert!(unstaged == 0 || !is_mounted(&a), "rule 22: unstaged while published");
    });
}

#[test]
fn csids_own_looks_make_nothing_busy() {
    world(async |w| {
        let client = running(w).await;
        let other = w.client().await;
        let target = w.path("targets/t");
        std::fs::create_dir(&target).unwrap();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let told = stop.clone();
        let list = tokio::spawn(async move {
            while !told.load(std::sync::atomic::Ordering::Relaxed) {
                let all = (0..8).map(|_| other.list_mounts(MountFilter::default()));
                futures_util::future::join_all(all).await;
            }
        });
        let (mut busy, mut other_errors, mut notes) = (0, 0, Vec::new());
        for _ in 0..150 {
            let options = MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..shared("v") };
            if let Err(error) = mount(&client, "a", options).await {
                other_errors += 1;
                notes.push(format!("M {error:?}"));
            }
            if let Err(error) = unmount(&client, "v", "a").await {
                let text = format!("{error:?}");
                if text.contains("Busy") {
                    busy += 1
                } else {
                    other_errors += 1
                }
                notes.push(format!("U {text}"));
                sleep(1500).await;
                notes.push(format!("then {}", state(&client, "v", "a").await));
                let _ = unmount(&client, "v", "a").await;
            }
            if busy > 5 {
                break;
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        list.await.unwrap();
        println!("busy {busy} other {other_errors}");
        for n in notes.iter().take(8) {
            println!("{}", &n[..n.len().min(260)]);
        }
        assert_eq!(busy, 0);
    });
}

#[test]
fn a_row_that_cannot_be_settled_keeps_no_other_waiting() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        std::fs::create_dir(&target).unwrap();
        let options = MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..shared("v") };
        mounted(&client, "a", options).await;
        mounted(&client, "b", shared("v")).await;
        // Somebody mounts over the target: a's Unmount cannot be ended.
        rustix::mount::mount("none", &target, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
        println!("a: {:?}", unmount(&client, "v", "a").await.map_err(|e| e.to_string()));
        println!("a is {}", state(&client, "v", "a").await);
        w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::Fail(9))]);
        println!("b: {:?}", unmount(&client, "v", "b").await.map_err(|e| e.to_string()));
        println!("b is {}", state(&client, "v", "b").await);
        sleep(20_000).await;
        println!("a {} b {}", state(&client, "v", "a").await, state(&client, "v", "b").await);
        let b = state(&client, "v", "b").await;
        let _ = rustix::mount::unmount(&target, rustix::mount::UnmountFlags::empty());
        assert_eq!(b, "none", "b's Unmount is retried, too");
    });
}

#[test]
fn two_mounts_gone_while_csid_runs() {
    world(async |w| {
        let client = running(w).await;
        let a = mounted(&client, "a", shared("v")).await;
        let b = mounted(&client, "b", shared("v")).await;
        let staging = row(&client, "v", "a").await.unwrap().staging;
        println!("staging mounted: {}", is_mounted(std::path::Path::new(&staging)));
        umount(&a);
        umount(&b);
        if is_mounted(std::path::Path::new(&staging)) {
            umount(std::path::Path::new(&staging));
        }
        let answer = mount(&client, "a", shared("v")).await;
        let p = w.plugin("p");
        println!(
            "{answer:?} stages {} unstages {} a mounted {} staging mounted {}",
            p.count("NodeStageVolume", "v"),
            p.count("NodeUnstageVolume", "v"),
            is_mounted(&a),
            is_mounted(std::path::Path::new(&staging))
        );
        answer.unwrap();
        assert_eq!(p.count("NodeStageVolume", "v"), 2, "published from a staging that is gone");
        assert!(is_mounted(&a));
    });
}

#[test]
fn mounts_that_timed_out_do_not_stay() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "a", shared("warm")).await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(2))]);
        let mut timed = 0;
        let mut names = Vec::new();
        for n in 0..400_u64 {
            let volume = format!("v{n}");
            let deadline = Duration::from_micros(300 + (n % 80) * 150);
            if let Err(error) = mount(&client, "a", within(deadline, shared(&volume))).await
                && format!("{error:?}").contains("TimedOut")
            {
                timed += 1;
                names.push((volume, format!("{error}")));
            }
        }
        sleep(4000).await;
        let mut stayed = Vec::new();
        for (volume, error) in &names {
            let now = state(&client, volume, "a").await;
            if now != "none" {
                stayed.push(format!("{volume} {now}: {error}"));
            }
        }
        println!(
            "timed out {timed}, stayed {}: {:?}",
            stayed.len(),
            stayed.iter().take(4).collect::<Vec<_>>()
        );
        assert!(timed > 0, "no deadline was met on the way: nothing was tried");
        assert!(stayed.is_empty());
    });
}

/// csid may be killed while a mount is being written, and find it in the journal then: nobody can have been told that it is undone.
#[test]
fn nobody_leaves_a_mount_that_is_being_written() {
    world(async |w| {
        let fault = w.path("fault");
        w.environment.insert("CSID_FAULT".to_owned(), fault.to_str().unwrap().to_owned());
        let arm = |edge: &str| std::fs::write(&fault, edge).unwrap();
        let mut client = running(w).await;
        for (leaves, killed) in
            ["deadline", "cancel", "unmount"].into_iter().flat_map(|leaves| [(leaves, true), (leaves, false)])
        {
            let volume = format!("{leaves}-{killed}");
            arm("outcome.held");
            let options = MountOptions {
                operation_id: Some("mount".to_owned()),
                deadline_usec: (leaves == "deadline").then_some(500_000),
                ..inline(&volume)
            };
            let asking = client.clone();
            let asked = tokio::spawn(async move { mount(&asking, "a", options).await });
            eventually("it is published", async || w.plugin("p").count("NodePublishVolume", &volume) == 1)
                .await;
            sleep(100).await;
            let (leaving, of) = (client.clone(), volume.clone());
            let left = tokio::spawn(async move {
                match leaves {
                    "cancel" => leaving.cancel_operation("mount").await,
                    "unmount" => unmount(&leaving, &of, "a").await,
                    _ => Ok(()),
                }
            });
            sleep(600).await;
            arm(if killed { "answer.before:1" } else { "" });
            let told = asked.await.unwrap();
            println!("{volume}: {told:?}");
            if killed {
                eventually("csid is killed", async || w.dead()).await;
                arm("");
                client = w.start().await;
                healthy(&client, "p").await;
                let refused = matches!(told, Err(Error::Csid(_)));
                assert!(
                    !refused || state(&client, &volume, "a").await == "none",
                    "{told:?}, and it is there"
                );
            } else {
                told.unwrap();
                left.await.unwrap().unwrap();
                let now = if leaves == "unmount" { "none" } else { "mounted" };
                assert_eq!(state(&client, &volume, "a").await, now);
            }
            unmount(&client, &volume, "a").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn force_takes_only_what_is_dead() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        std::fs::create_dir(&target).unwrap();
        let options = MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..shared("v") };
        mounted(&client, "a", options).await;
        let file = std::fs::File::create(target.join("data")).unwrap();
        println!("plain: {:?}", unmount(&client, "v", "a").await.map_err(|e| e.to_string()));
        let forced = client
            .unmount(NAMESPACE, "v", "a", UnmountOptions { force: Some(true), ..Default::default() })
            .await;
        println!("force: {forced:?}, unstaged {}", w.plugin("p").count("NodeUnstageVolume", "v"));
        drop(file);
        assert!(forced.is_err(), "force detaches what is dead, not what is in use");
    });
}

#[test]
fn a_hung_neighbour_takes_no_block_device() {
    use std::os::fd::AsRawFd;
    world(async |w| {
        let client = running(w).await;
        w.add_device("p", "zblock");
        let a = mounted(&client, "a", shared("afs")).await;
        mounted(&client, "z", block("zblock")).await;
        println!("before {}", state(&client, "zblock", "z").await);
        drop(client);
        w.kill();
        // A FUSE file system that never answers stands at the other volume's path.
        let fuse = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let data =
            std::ffi::CString::new(format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.as_raw_fd()))
                .unwrap();
        rustix::mount::mount("none", &a, "fuse", rustix::mount::MountFlags::empty(), Some(data.as_c_str()))
            .unwrap();
        let client = w.start().await;
        healthy(&client, "p").await;
        println!("after the start: z {}", state(&client, "zblock", "z").await);
        let again = tokio::time::timeout(Duration::from_secs(30), mount(&client, "z", block("zblock"))).await;
        let p = w.plugin("p");
        let (un, st) = (p.count("NodeUnpublishVolume", "zblock"), p.count("NodeUnstageVolume", "zblock"));
        println!("again {again:?}; unpublish {un} unstage {st}");
        drop(fuse);
        let _ = rustix::mount::unmount(&a, rustix::mount::UnmountFlags::DETACH);
        assert_eq!((un, st), (0, 0), "a healthy block device was taken down");
    });
}

#[test]
fn a_target_that_was_moved_with_its_directory_is_not_forgotten() {
    world(async |w| {
        let client = running(w).await;
        let (above, moved) = (w.dir.join("above"), w.dir.join("moved"));
        std::fs::create_dir_all(above.join("target")).unwrap();
        let target = above.join("target").to_str().unwrap().to_owned();
        mounted(&client, "a", MountOptions { target: Some(target), ..inline("v") }).await;
        std::fs::rename(&above, &moved).unwrap();
        let error = unmount(&client, "v", "a").await.unwrap_err();
        assert!(format!("{error:?}").contains("Busy"), "{error:?}");
        assert!(is_mounted(&moved.join("target")), "the consumer still has it, and is not told otherwise");
        umount(&moved.join("target"));
        unmount(&client, "v", "a").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn one_target_shows_one_mount() {
    world(async |w| {
        let client = running(w).await;
        let target = w.dir.join("target");
        std::fs::create_dir_all(&target).unwrap();
        let at = |options: MountOptions| MountOptions {
            target: Some(target.to_str().unwrap().to_owned()),
            ..options
        };
        mounted(&client, "a", at(shared("v"))).await;
        for (volume, consumer) in [("v", "b"), ("other", "a")] {
            let error = client.mount(NAMESPACE, volume, consumer, at(shared(volume))).await.unwrap_err();
            assert!(format!("{error:?}").contains("ClaimConflict"), "{error:?}");
        }
        assert!(is_mounted(&target));
        unmount(&client, "v", "a").await.unwrap();
        client.mount(NAMESPACE, "v", "b", at(shared("v"))).await.unwrap();
        unmount(&client, "v", "b").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn a_plugin_is_not_unregistered_under_a_mount_that_has_begun() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::once("NodeStageVolume", Act::Delay(1500))]);
        let (mounted, refused) = tokio::join!(mount(&client, "a", inline("v")), async {
            sleep(500).await;
            client.unregister_plugin("p", Default::default()).await
        });
        assert!(format!("{refused:?}").contains("Busy"), "{refused:?}");
        mounted.unwrap();
        unmount(&client, "v", "a").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn a_target_is_free_again_although_its_volume_is_not_at_rest() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        std::fs::create_dir(&target).unwrap();
        let at = |options: MountOptions| MountOptions {
            target: Some(target.to_str().unwrap().to_owned()),
            ..options
        };
        mounted(&client, "stuck", shared("v")).await;
        mounted(&client, "a", at(shared("v"))).await;
        // A row that cannot be settled keeps the volume's task; what the other consumer had is free all the same.
        w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::Fail(9))]);
        unmount(&client, "v", "stuck").await.unwrap_err();
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Fail(9)).of("none")]);
        unmount(&client, "v", "a").await.unwrap();
        mounted(&client, "a", at(inline("other"))).await;
        unmount(&client, "other", "a").await.unwrap();
    });
}
