//! OpenMount: a mount for another mount namespace.

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use csid_client::{Client, Kind, MountOptions, OpenOptions, Result, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy};
use csid_tests::kernel;
use csid_tests::raw::{
    self, GROUP, MANAGER, MANAGER_PATH, MEMBER, OTHER, ROOT, call, dict, group_csid, text, value,
};
use csid_tests::script::{Act, Lie, Rule};
use csid_tests::world::{count, refusal, world};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags, mount as mount_fs, mount_change,
    move_mount, unmount as unmount_fs,
};
use rustix::thread::UnshareFlags;

async fn opened(client: &Client, volume: &str, options: OpenOptions) -> Result<OwnedFd> {
    let tree = client.open_mount(NAMESPACE, volume, "job", options).await?;
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", tree.as_raw_fd())).unwrap();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).expect("its flags");
    let flags = i32::from_str_radix(flags.trim(), 8).expect("octal");
    assert_ne!(
        flags & rustix::fs::OFlags::CLOEXEC.bits() as i32,
        0,
        "a program started meanwhile has it too: {info}"
    );
    Ok(tree)
}

fn at(subpath: &str) -> OpenOptions {
    OpenOptions { subpath: Some(subpath.to_owned()), ..OpenOptions::default() }
}

fn read_only() -> OpenOptions {
    OpenOptions { read_only: Some(true), ..OpenOptions::default() }
}

/// Do something in a mount namespace of its own, where the tree is mounted at `target`.
fn elsewhere<T: Send>(tree: &OwnedFd, target: &Path, work: impl FnOnce() -> T + Send) -> T {
    let work = || {
        // SAFETY: the thread was made for this, and ends with it.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        move_mount(tree, c"", rustix::fs::CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(work).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn mount_at(target: &Path) -> kernel::Mount {
    kernel::mounts().unwrap().into_iter().rfind(|m| m.point == target).expect("the tree is mounted")
}

#[test]
fn opened_tree_outlives_its_unmount() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        fs::write(source.join("file"), "data").unwrap();
        let before = kernel::mounts().unwrap();
        let tree = opened(&client, "v", OpenOptions::default()).await.unwrap();
        assert_eq!(kernel::mounts().unwrap(), before, "it is nowhere to be seen");
        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        let there = target.clone();
        let mount = elsewhere(&tree, &target, move || {
            assert_eq!(fs::read_to_string(there.join("file")).unwrap(), "data");
            fs::write(there.join("theirs"), "more").unwrap();
            mount_at(&there)
        });
        assert!(mount.has("rw") && mount.has("nosuid") && mount.has("nodev"), "{mount:?}");
        assert_eq!(mount.propagation, "", "private");
        assert_eq!(kernel::stacked(&target).unwrap(), 0, "not in this namespace");
        assert_eq!(fs::read_to_string(source.join("theirs")).unwrap(), "more");
        // The answer changes nothing in csid, and csid keeps nothing.
        assert_eq!(state(&client, "v", "job").await, "mounted");
        let again = opened(&client, "v", OpenOptions::default()).await.unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
        let file = rustix::fs::openat(&again, c"file", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty());
        assert!(file.is_ok(), "its holder has the file system: {file:?}");
        drop((tree, again, file));
    });
}

#[test]
fn subpath_is_opened() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        fs::create_dir_all(source.join("a/b")).unwrap();
        fs::write(source.join("a/b/file"), "data").unwrap();
        let [directory, file] = ["directory", "file"].map(|name| w.path("targets").join(name));
        fs::create_dir(&directory).unwrap();
        fs::write(&file, "").unwrap();
        let tree = opened(&client, "v", at("a/b")).await.unwrap();
        elsewhere(&tree, &directory, || {
            let names: Vec<_> = fs::read_dir(&directory).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert_eq!(names, ["file"]);
            assert!(mount_at(&directory).has("nosuid") && mount_at(&directory).has("nodev"));
        });
        let tree = opened(&client, "v", at("a/b/file")).await.unwrap();
        elsewhere(&tree, &file, || assert_eq!(fs::read_to_string(&file).unwrap(), "data"));
        drop(tree);

        // What leads elsewhere, or is nothing to be mounted.
        symlink("b", source.join("a/link")).unwrap();
        symlink("/etc", source.join("a/out")).unwrap();
        fs::create_dir(source.join("a/other")).unwrap();
        mount_fs("tmpfs", source.join("a/other"), "tmpfs", MountFlags::empty(), None).unwrap();
        fs::create_dir(source.join("a/other/inner")).unwrap();
        let fifo = source.join("a/fifo");
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let wrong = [
            "a/link",
            "a/link/file",
            "a/out",
            "a/out/passwd",
            "..",
            "../v",
            "a/../a/b",
            "a/./b",
            "a//b",
            "/a/b",
            "",
            ".",
            "a/missing",
            "a/b/file/x",
            "a/other",
            "a/other/inner",
            "a/fifo",
            "a\nb",
            &"x".repeat(300),
            &"x".repeat(5000),
        ];
        for subpath in wrong {
            let (kind, error) = refusal(opened(&client, "v", at(subpath)).await);
            assert_eq!(kind, Kind::InvalidArgument, "{subpath}: {error}");
        }
        count("subpaths refused", wrong.len());
        unmount_fs(source.join("a/other"), UnmountFlags::empty()).unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A writer of the volume swaps a directory and a link to one outside.
#[test]
fn swapped_subpath_never_leads_outside() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let outside = w.path("outside");
        for (directory, name) in [(source.join("here"), "inside"), (outside.clone(), "outside")] {
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join(name), "").unwrap();
        }
        symlink(&outside, source.join("link")).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let renamer = {
            let (stop, here, link) = (stop.clone(), source.join("here"), source.join("link"));
            std::thread::spawn(move || {
                use rustix::fs::{CWD, RenameFlags, renameat_with};
                let mut swaps = 0;
                while !stop.load(Ordering::Relaxed) {
                    renameat_with(CWD, &here, CWD, &link, RenameFlags::EXCHANGE).unwrap();
                    swaps += 1;
                    std::thread::yield_now();
                }
                swaps
            })
        };
        let (mut made, mut refused) = (0, 0);
        for _ in 0..400 {
            match opened(&client, "v", at("here")).await {
                Ok(tree) => {
                    let inside = rustix::fs::statat(&tree, c"inside", rustix::fs::AtFlags::empty());
                    inside.expect("an escape");
                    made += 1;
                }
                Err(error) => {
                    let (kind, _) = refusal::<()>(Err(error));
                    assert_eq!(kind, Kind::InvalidArgument);
                    refused += 1;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        count("swaps of a directory and a symlink", renamer.join().unwrap());
        count("trees opened meanwhile", made);
        count("refused meanwhile", refused);
        assert!(made > 0 && refused > 0, "the race was run");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn read_only_tree_is_read_only() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        let source = mounted(&client, "job", shared("v")).await;
        let tagged = MountOptions { read_only: Some(true), tag: Some("ro".to_owned()), ..shared("v") };
        mounted(&client, "job", tagged).await;
        let of_reader = OpenOptions { tag: Some("ro".to_owned()), ..OpenOptions::default() };
        for (options, writable) in [(OpenOptions::default(), true), (read_only(), false), (of_reader, false)]
        {
            let tree = opened(&client, "v", options).await.unwrap();
            let written = elsewhere(&tree, &target, || fs::write(target.join("file"), "x"));
            match writable {
                true => written.unwrap(),
                false => assert_eq!(written.unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem),
            }
        }
        fs::write(source.join("file"), "the mount itself is as it was").unwrap();
        for tag in [None, Some("ro".to_owned())] {
            client
                .unmount(NAMESPACE, "v", "job", UnmountOptions { tag, ..Default::default() })
                .await
                .unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn block_device_is_its_node() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "b");
        let client = w.start().await;
        healthy(&client, "p").await;
        mounted(&client, "job", block("b")).await;
        let target = w.path("targets/node");
        fs::write(&target, "").unwrap();
        let tree = opened(&client, "b", OpenOptions::default()).await.unwrap();
        elsewhere(&tree, &target, || {
            assert!(fs::metadata(&target).unwrap().file_type().is_block_device());
            fs::write(&target, vec![1; 512]).expect("the device, at the target");
        });
        for (options, why) in [(at("a"), "subpath"), (read_only(), "read-only")] {
            let (kind, error) = refusal(opened(&client, "b", options).await);
            assert!(kind == Kind::InvalidArgument && error.message.contains(why), "{error}");
        }
        drop(tree);
        unmount(&client, "b", "job").await.unwrap();
        mounted(&client, "job", MountOptions { read_only: Some(true), ..block("b") }).await;
        let tree = opened(&client, "b", read_only()).await.unwrap();
        elsewhere(&tree, &target, || fs::write(&target, vec![1; 512]).expect_err("a read-only device"));
        drop(tree);
        unmount(&client, "b", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn unmounted_volume_is_not_found() {
    world(async |w| {
        let client = running(w).await;
        let not_found = async |client: &Client| {
            let (kind, error) = refusal(opened(client, "v", OpenOptions::default()).await);
            assert_eq!(kind, Kind::NotFound, "{error}");
            error.message
        };
        not_found(&client).await;
        let source = mounted(&client, "job", inline("v")).await;
        let other = OpenOptions { tag: Some("other".to_owned()), ..OpenOptions::default() };
        assert_eq!(refusal(opened(&client, "v", other).await).0, Kind::NotFound);
        // Behind csid's back: nothing is there, then something else is.
        unmount_fs(&source, UnmountFlags::DETACH).unwrap();
        not_found(&client).await;
        mount_fs("tmpfs", &source, "tmpfs", MountFlags::empty(), None).unwrap();
        not_found(&client).await;
        unmount_fs(&source, UnmountFlags::empty()).unwrap();
        unmount(&client, "v", "job").await.unwrap();
        not_found(&client).await;
        // A row that waits for its consumer.
        mounted(&client, "job", MountOptions { restore: Some(csid_client::Restore::Hold), ..inline("v") })
            .await;
        drop(client);
        w.reboot().await;
        let client = w.start().await;
        settled(&client).await;
        let reply = not_found(&client).await;
        assert!(reply.contains("lost"), "{reply}");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A mount is opened by its owner and by root. What the kernel lets its holder take off is not handed out to anybody else than
/// root.
#[test]
fn owner_opens_a_tree_without_restricting_flags() {
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Shipped).await;
        let client = running(w).await;
        w.add_device("p", "disk");
        bus.has_csid().await;
        let root = bus.connect(ROOT).await;
        let register = async |volume: &str, attachment: &str, open: bool| {
            let capability = vec![HashMap::from([
                ("access-mode".to_owned(), text("single-node-multi-writer")),
                ("attachment-mode".to_owned(), text(attachment)),
            ])];
            let spec = dict(vec![
                ("plugin", text("p")),
                ("external-id", text(volume)),
                ("capabilities", capability.into()),
                ("suid", zbus::Variant::from(open)),
                ("dev", zbus::Variant::from(open)),
            ]);
            let values = vec![text(NAMESPACE), text(volume), spec];
            call(&root, MANAGER_PATH, MANAGER, "RegisterVolume", values).await.expect("a volume");
        };
        register("plain", "file-system", false).await;
        register("open", "file-system", true).await;
        register("disk", "block-device", false).await;
        std::os::unix::fs::chown(w.socket(), None, Some(GROUP)).unwrap();
        let member = raw::peer(MEMBER, &w.socket()).await.unwrap();
        let values = |volume: &str, options| vec![text(NAMESPACE), text(volume), text("members"), options];
        for volume in ["plain", "open", "disk"] {
            call(&member, MANAGER_PATH, MANAGER, "Mount", values(volume, value("a{sv}")))
                .await
                .expect("a call by its owner");
        }
        let read_only = || dict(vec![("read-only", zbus::Variant::from(true))]);
        let open = async |connection: &zbus::Connection, volume: &str, options| {
            let answer = call(connection, MANAGER_PATH, MANAGER, "OpenMount", values(volume, options)).await;
            answer.map(|message| drop(message.body().deserialize::<zbus::OwnedFd>().unwrap()))
        };
        for (volume, options, may) in [
            ("plain", value("a{sv}"), false),
            ("open", value("a{sv}"), true),
            ("open", read_only(), false),
            ("disk", value("a{sv}"), true),
        ] {
            let answer = open(&member, volume, options.clone()).await;
            match may {
                true => answer.unwrap_or_else(|error| panic!("{volume}: {error:?}")),
                false => {
                    let (name, why) = answer.unwrap_err();
                    assert!(
                        name == "org.csid1.Error.NotAuthorized" && why.contains("would not hold"),
                        "{volume}: {why}"
                    );
                }
            }
            open(&root, volume, options).await.expect("root may");
        }
        // Another's, and root's.
        let other =
            raw::peer(raw::User { uid: OTHER.uid, groups: MEMBER.groups }, &w.socket()).await.unwrap();
        call(&other, MANAGER_PATH, MANAGER, "ListPlugins", Vec::new()).await.expect("a member, too");
        let (name, why) = open(&other, "open", value("a{sv}")).await.unwrap_err();
        assert!(name == "org.csid1.Error.NotAuthorized" && why.contains("requires root"), "{why}");
        for volume in ["plain", "open", "disk"] {
            call(&member, MANAGER_PATH, MANAGER, "Unmount", values(volume, value("a{sv}")))
                .await
                .expect("a call by its owner");
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn connection_without_descriptors_gets_an_error() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        let mut stream = raw::connect_as(ROOT, &w.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(b"\0AUTH EXTERNAL 30\r\nBEGIN\r\n").unwrap();
        let call = zbus::Message::method_call(MANAGER_PATH, "OpenMount").interface(MANAGER);
        let call = call.build(&(NAMESPACE, "v", "job", HashMap::<&str, zbus::Variant<'_>>::new())).unwrap();
        stream.write_all(call.data()).unwrap();
        let mut answer = Vec::new();
        while !String::from_utf8_lossy(&answer).contains("org.csid1.Error.NotSupported") {
            let mut buffer = [0; 4096];
            let n = stream.read(&mut buffer).expect("an answer");
            assert!(n > 0, "{}", String::from_utf8_lossy(&answer));
            answer.extend_from_slice(&buffer[..n]);
        }
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn hung_file_system_delays_its_plugin_alone() {
    world(async |w| {
        w.add_plugin("q").await;
        let client = running(w).await;
        healthy(&client, "q").await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(Lie::Fuse))]);
        mounted(&client, "job", inline("v")).await;
        mounted(&client, "job", of_plugin("q", "w")).await;
        w.plugin("p").pause();
        let begun = Instant::now();
        let soon = OpenOptions { deadline_usec: Some(500_000), ..OpenOptions::default() };
        assert_eq!(refusal(opened(&client, "v", soon).await).0, Kind::TimedOut);
        let (hung, other) = tokio::join!(opened(&client, "v", OpenOptions::default()), async {
            opened(&client, "w", OpenOptions::default()).await.unwrap();
            begun.elapsed()
        });
        assert!(other < Duration::from_secs(4), "{other:?}");
        let (kind, error) = refusal(hung);
        assert!(kind == Kind::Internal && error.message.contains("in time"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(30));
        w.plugin("p").resume();
        for volume in ["v", "w"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}
