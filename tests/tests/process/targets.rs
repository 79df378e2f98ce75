//! A consumer's own `target` path.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use csid_client::{Kind, MountFilter, MountOptions, Propagation};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::world::{count, refusal, world};
use rustix::mount::{UnmountFlags, unmount as kernel_unmount};

fn at(target: &Path, options: MountOptions) -> MountOptions {
    MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..options }
}

fn options_of(target: &Path) -> kernel::Mount {
    kernel::mounts().unwrap().into_iter().rfind(|m| m.point == target).expect("the target is mounted")
}

#[test]
fn target_is_nosuid_and_nodev_by_default() {
    world(async |w| {
        let client = running(w).await;
        let [plain, open] = ["plain", "open"].map(|name| w.path("targets").join(name));
        for target in [&plain, &open] {
            fs::create_dir(target).unwrap();
        }
        let source = mounted(&client, "one", at(&plain, shared("v"))).await;
        fs::write(source.join("file"), "data").unwrap();
        assert_eq!(fs::read_to_string(plain.join("file")).unwrap(), "data");
        let published = options_of(&source);
        assert!(published.has("nosuid") && published.has("nodev"), "{published:?}");
        let mount = options_of(&plain);
        assert!(mount.has("nosuid") && mount.has("nodev") && mount.has("rw"), "{mount:?}");
        let loose = MountOptions { suid: Some(true), dev: Some(true), ..at(&open, shared("v")) };
        mounted(&client, "two", loose).await;
        let mount = options_of(&open);
        assert!(!mount.has("nosuid") && !mount.has("nodev"), "{mount:?}");
        assert_eq!(row(&client, "v", "one").await.unwrap().target, plain.to_str().unwrap());
        let at = |target: &Path| {
            let target = Some(target.to_str().unwrap().to_owned());
            client.list_mounts(MountFilter { target, ..MountFilter::default() })
        };
        let consumers: Vec<String> = at(&open).await.unwrap().into_iter().map(|row| row.consumer).collect();
        assert_eq!(consumers, ["two"]);
        assert!(at(&w.path("targets")).await.unwrap().is_empty());

        unmount(&client, "v", "one").await.unwrap();
        assert_eq!(kernel::stacked(&plain).unwrap(), 0);
        assert!(plain.is_dir(), "the consumer's own directory stays");
        assert_eq!(fs::read_to_string(open.join("file")).unwrap(), "data");
        unmount(&client, "v", "two").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn read_only_target_is_read_only() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        let options = MountOptions { read_only: Some(true), ..at(&target, inline("v")) };
        mounted(&client, "job", options).await;
        assert!(options_of(&target).has("ro"));
        assert_eq!(
            fs::write(target.join("f"), "").unwrap_err().kind(),
            std::io::ErrorKind::ReadOnlyFilesystem
        );
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn block_target_is_a_node() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "b");
        let client = w.start().await;
        let target = w.path("targets/node");
        fs::write(&target, "").unwrap();
        let options = MountOptions { dev: Some(true), ..at(&target, block("b")) };
        mounted(&client, "job", options).await;
        fs::write(&target, vec![1; 512]).expect("the device, at the target");
        unmount(&client, "b", "job").await.unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"", "the consumer's own file stays");
        w.nothing_left(&client).await;
    });
}

#[test]
fn target_that_leads_elsewhere_is_refused() {
    world(async |w| {
        let client = running(w).await;
        let targets = w.path("targets");
        let outside = w.path("outside");
        fs::create_dir_all(outside.join("sub")).unwrap();
        fs::create_dir(targets.join("real")).unwrap();
        fs::write(targets.join("file"), "a regular file").unwrap();
        symlink(&outside, targets.join("link")).unwrap();
        symlink(targets.join("real"), targets.join("last")).unwrap();
        let wrong = [
            targets.join("link/sub"),
            targets.join("last"),
            targets.join("real/../../outside"),
            targets.join("missing"),
            targets.join("file"),
            "relative/path".into(),
            "".into(),
            "/proc/self/root".into(),
        ];
        for target in &wrong {
            let (kind, error) = refusal(mount(&client, "job", at(target, inline("v"))).await);
            assert_eq!(kind, Kind::InvalidArgument, "{}: {error}", target.display());
            assert_eq!(w.leftovers(), Vec::<String>::new(), "{}", target.display());
        }
        count("targets refused", wrong.len());
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_stays_when_its_target_cannot_be_bound_again() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        let source = mounted(&client, "job", at(&target, shared("v"))).await;
        kernel_unmount(&target, UnmountFlags::empty()).unwrap();
        fs::remove_dir(&target).unwrap();
        let (kind, error) = refusal(mount(&client, "job", at(&target, shared("v"))).await);
        assert_eq!((kind, error.details.step.as_deref()), (Kind::InvalidArgument, Some("bind")), "{error}");
        // The next call for the volume comes after all that the refused one did.
        mounted(&client, "other", shared("v")).await;
        assert_eq!(state(&client, "v", "job").await, "mounted");
        assert_eq!(kernel::stacked(&source).unwrap(), 1, "its end was not asked for");
        for rpc in ["NodeUnpublishVolume", "NodeUnstageVolume"] {
            assert_eq!(w.plugin("p").count(rpc, "v"), 0, "{rpc}");
        }
        for consumer in ["job", "other"] {
            unmount(&client, "v", consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn target_moved_with_its_directory_keeps_the_mount() {
    world(async |w| {
        let client = running(w).await;
        let (above, moved) = (w.path("above"), w.path("moved"));
        fs::create_dir_all(above.join("target")).unwrap();
        mounted(&client, "job", at(&above.join("target"), inline("v"))).await;
        fs::rename(&above, &moved).unwrap();
        assert_eq!(refusal(unmount(&client, "v", "job").await).0, Kind::Busy);
        let target = moved.join("target");
        assert_eq!(kernel::stacked(&target).unwrap(), 1, "the consumer still has it");
        kernel_unmount(&target, UnmountFlags::empty()).unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn target_has_one_mount_at_a_time() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        mounted(&client, "a", at(&target, shared("v"))).await;
        for (volume, consumer) in [("v", "b"), ("other", "a")] {
            let (kind, error) = refusal(mount(&client, consumer, at(&target, shared(volume))).await);
            assert_eq!(kind, Kind::ClaimConflict, "{error}");
        }
        assert_eq!(kernel::stacked(&target).unwrap(), 1);
        unmount(&client, "v", "a").await.unwrap();
        mounted(&client, "b", at(&target, shared("v"))).await;
        unmount(&client, "v", "b").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn swapped_target_never_leads_outside() {
    world(async |w| {
        let client = running(w).await;
        let [here, outside] = ["targets/t", "outside"].map(|name| w.path(name));
        for directory in [&here, &outside] {
            fs::create_dir(directory).unwrap();
        }
        let link = w.path("targets/link");
        symlink(&outside, &link).unwrap();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let renamer = {
            let (stop, here, link) = (stop.clone(), here.clone(), link.clone());
            std::thread::spawn(move || {
                use rustix::fs::{CWD, RenameFlags, renameat_with};
                let mut swaps = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    // Refused while something is mounted on the directory; then again.
                    swaps +=
                        usize::from(renameat_with(CWD, &here, CWD, &link, RenameFlags::EXCHANGE).is_ok());
                    std::thread::yield_now();
                }
                swaps
            })
        };
        let (mut made, mut refused) = (0, 0);
        for _ in 0..60 {
            match mount(&client, "job", at(&here, inline("v"))).await {
                Ok(_) => made += 1,
                Err(csid_client::Error::Csid(_)) => refused += 1,
                Err(other) => panic!("{other:?}"),
            }
            assert_eq!(kernel::stacked(&outside).unwrap(), 0, "an escape");
            unmount(&client, "v", "job").await.unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        count("swaps of a directory and a symlink", renamer.join().unwrap());
        count("mounts made meanwhile", made);
        count("mounts refused meanwhile", refused);
        w.nothing_left(&client).await;
    });
}

#[test]
fn mounts_inside_a_target_reach_the_host_as_asked() {
    world(async |w| {
        let client = running(w).await;
        for (word, shared, slave) in [
            (Propagation::Private, false, false),
            (Propagation::HostToTask, false, true),
            (Propagation::Bidirectional, true, false),
        ] {
            let target = w.path("targets").join(word.as_str());
            fs::create_dir(&target).unwrap();
            let options = MountOptions { propagation: Some(word), ..at(&target, inline("v")) };
            mounted(&client, "job", options).await;
            let mount = options_of(&target);
            let is = (mount.propagation.contains("shared:"), mount.propagation.contains("master:"));
            assert_eq!(is, (shared, slave), "{}: {mount:?}", word.as_str());
            unmount(&client, "v", "job").await.unwrap();
            w.nothing_left(&client).await;
        }
    });
}
