use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use csid::host::{Bind, Host, HostError, Look, Restrict, Unbind};
use csid::store::rows::Propagation;
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};

use crate::{Loop, apart_async, directory, fuse, lines, number, path, tmpfs};

pub(crate) const P: &str = "plugin";
pub(crate) const SAFE: Bind = Bind {
    uid: 0,
    replaces_dead: Vec::new(),
    nosuid: true,
    nodev: true,
    read_only: false,
    propagation: Propagation::Private,
};

#[test]
fn there_and_back() {
    apart_async("bind::there_and_back", |root| async move {
        let host = Host::of_threads();
        let (source, target) = (tmpfs(root.join("source")), directory(root.join("roots/target")));
        let below = root.join("roots");
        fs::write(source.join("file"), "data").unwrap();
        assert!(!host.is_bound(P, &source, &target).await.unwrap());
        for _ in 0..3 {
            host.bind(P, &source, &below, &target, SAFE).await.unwrap();
            assert!(host.is_bound(P, &source, &target).await.unwrap());
            let mounts = lines(&target);
            assert_eq!(mounts.len(), 1, "never stacked");
            assert!(mounts[0].contains(" rw,nosuid,nodev,"), "{}", mounts[0]);
        }
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "data");
        assert!(!lines(&source)[0].contains("nosuid"), "the published mount keeps its flags");
        for there in [true, false] {
            assert_eq!(host.unbind(P, &source, &target, vec![], Unbind::Unused).await.unwrap(), there);
            assert_eq!(host.look(P, &target).await, Look::Plain);
        }
        for nothing in ["never there", "never/there", "source/file/x"] {
            assert!(
                !host.unbind(P, &source, &root.join(nothing), vec![], Unbind::Unused).await.unwrap(),
                "{nothing}"
            );
        }
        assert!(matches!(host.look(P, &source).await, Look::Mounted { .. }));
        let below_root = host.bind(P, &source, Path::new("/"), &target, SAFE).await;
        below_root.unwrap();
        host.unbind(P, &source, &target, vec![], Unbind::Unused).await.unwrap();
    });
}

#[test]
fn copies() {
    apart_async("bind::copies", |root| async move {
        let host = Host::of_threads();
        let (source, _other) = (tmpfs(root.join("a source")), tmpfs(root.join("other")));
        let target = directory(root.join("task/target"));
        assert!(host.copies(&source).unwrap().is_empty());
        host.bind(P, &source, &root, &target, SAFE).await.unwrap();
        assert_eq!(host.copies(&source).unwrap().as_slice(), std::slice::from_ref(&target));
        assert_eq!(host.copies(&target).unwrap().as_slice(), std::slice::from_ref(&source));
        fs::rename(root.join("task"), root.join("moved")).unwrap();
        let moved = root.join("moved/target");
        assert_eq!(host.copies(&source).unwrap().as_slice(), std::slice::from_ref(&moved));
        // Another directory of the same file system is none.
        let part = directory(source.join("part"));
        rustix::mount::mount_bind(&part, directory(root.join("part"))).unwrap();
        assert_eq!(host.copies(&source).unwrap().as_slice(), std::slice::from_ref(&moved));
        assert_eq!(host.copies(&part).unwrap(), [root.join("part")]);
        assert_eq!(host.copies_and_parts(&source).unwrap(), [moved.clone(), root.join("part")]);
        assert_eq!(host.copies_and_parts(&part).unwrap(), [root.join("part")], "not what is above");
        assert!(host.unbind(P, &source, &moved, vec![], Unbind::Unused).await.unwrap());
        assert!(host.copies(&source).unwrap().is_empty());

        let disk = Loop::new(&root.join("image"), &[]);
        let target = root.join("device");
        fs::write(&target, "").unwrap();
        host.bind(P, &disk.node, &root, &target, SAFE).await.unwrap();
        assert_eq!(host.copies(&disk.node).unwrap(), [target]);
    });
}

#[test]
fn read_only() {
    apart_async("bind::read_only", |root| async move {
        let host = Host::of_threads();
        let (source, target) = (tmpfs(root.join("source")), directory(root.join("target")));
        host.bind(P, &source, &root, &target, Bind { read_only: true, ..SAFE }).await.unwrap();
        assert!(File::create(target.join("x")).is_err() && File::create(source.join("x")).is_ok());
    });
}

#[test]
fn delivered_mount_has_its_flags_everywhere() {
    apart_async("bind::delivered_mount_has_its_flags_everywhere", |root| async move {
        let host = Host::of_threads();
        let root = tmpfs(root.join("shared"));
        mount_change(&root, MountPropagationFlags::SHARED).unwrap();
        let (published, found) = (tmpfs(root.join("private")), directory(root.join("found")));
        // Another namespace that is there already: what propagates to it is what csid attaches.
        let mut other = Command::new("unshare")
            .args([
                "--mount",
                "--propagation",
                "slave",
                "sh",
                "-c",
                "echo ready; read line; cat /proc/self/mountinfo",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(other.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let how = Restrict { nosuid: true, nodev: true, read_only: true };
        for _ in 0..2 {
            let look = host.deliver(P, &published, &found, how).await.unwrap();
            assert!(matches!(look, Look::Mounted { .. }), "{look:?}");
        }
        assert_eq!(lines(&found).len(), 1, "the second time changes nothing");
        assert!(lines(&found)[0].contains(" ro,nosuid,nodev,"));
        assert!(!lines(&published)[0].contains("nosuid") && File::create(published.join("x")).is_ok());
        other.stdin.take().unwrap().write_all(b"\n").unwrap();
        let seen: Vec<String> = said.lines().map(Result::unwrap).collect();
        assert!(other.wait().unwrap().success());
        let there: Vec<&String> =
            seen.iter().filter(|line| line.contains(&format!(" {} ", found.display()))).collect();
        assert!(there.len() == 1 && there[0].contains(" ro,nosuid,nodev,"), "{there:?}");

        // What a consumer mounts in it does not reach the plugin's mount.
        fs::create_dir(published.join("in")).unwrap();
        tmpfs(found.join("in"));
        assert!(lines(&published.join("in")).is_empty());
        unmount(found.join("in"), UnmountFlags::empty()).unwrap();

        let (plain, missing) = (directory(root.join("plain")), root.join("missing"));
        assert_eq!(host.deliver(P, &plain, &found, how).await.unwrap(), Look::Plain);
        assert_eq!(host.deliver(P, &missing, &found, how).await.unwrap(), Look::Missing);
        let other = tmpfs(root.join("other"));
        match host.deliver(P, &other, &found, how).await {
            Err(HostError::Occupied(path)) => assert_eq!(path, found),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_device_is_delivered_on_a_file() {
    apart_async("bind::a_device_is_delivered_on_a_file", |root| async move {
        let host = Host::of_threads();
        let disk = Loop::new(&root.join("image"), &[]);
        let found = root.join("found");
        for _ in 0..2 {
            host.make_file(&root, Path::new("found")).unwrap();
        }
        let how = Restrict { nosuid: true, nodev: false, read_only: false };
        let look = host.deliver(P, &disk.node, &found, how).await.unwrap();
        assert_eq!(look, Look::Device { rdev: disk.rdev() });
        assert_eq!(host.look(P, &found).await, look);
        File::open(&found).unwrap();
        assert!(host.unbind(P, &disk.node, &found, vec![], Unbind::Unused).await.unwrap());
        assert!(host.remove(&root, &found).unwrap() && !found.exists());
    });
}

#[test]
fn target_and_its_parents_belong_to_caller_or_root() {
    const OWN: u32 = 4001;
    const OTHER: u32 = 4002;
    apart_async("bind::target_and_its_parents_belong_to_caller_or_root", |root| async move {
        let host = Host::of_threads();
        let source = tmpfs(root.join("source"));
        let below = directory(root.join("roots"));
        // Whose, and with which mode, the directory on the way and the target are; the way to root's target is not checked.
        let place = |name: &str, way: (u32, u32), target: (u32, u32)| {
            let path = directory(below.join(name).join("target"));
            for (path, (uid, mode)) in [(below.join(name), way), (path.clone(), target)] {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
                chown(path, Some(uid), None).unwrap();
            }
            path
        };
        let own = Bind { uid: OWN, ..SAFE };
        let refused = [
            (place("anothers-way", (OTHER, 0o755), (OWN, 0o700)), "anothers-way belongs to uid 4002"),
            (place("anothers", (0, 0o755), (OTHER, 0o755)), "target belongs to uid 4002"),
            (place("open-way", (0, 0o777), (OWN, 0o700)), "open-way can be written by others"),
            (place("groups-way", (OWN, 0o770), (OWN, 0o700)), "groups-way can be written by others"),
            (place("open", (OWN, 0o755), (OWN, 0o757)), "target can be written by others"),
            (place("shared", (0, 0o755), (0, 0o1777)), "target can be written by others"),
        ];
        for (target, said) in &refused {
            let bound = host.bind(P, &source, &below, target, own.clone()).await.unwrap_err();
            let checked = host.check_target(P, &below, target, OWN).await.unwrap_err();
            assert_eq!(bound.to_string(), checked.to_string());
            assert!(bound.to_string().contains(said), "{bound}");
            let error = csid::error::Error::from(bound);
            assert_eq!(error.kind, csid::error::Kind::NotAuthorized);
            assert_eq!(host.look(P, target).await, Look::Plain);
            host.check_target(P, &below, target, 0).await.unwrap();
        }
        let allowed = [
            place("own", (OWN, 0o755), (OWN, 0o700)),
            place("roots", (0, 0o755), (0, 0o755)),
            place("sticky-way", (0, 0o1777), (OWN, 0o700)),
            place("sticky", (0, 0o755), (OWN, 0o1777)),
        ];
        for target in &allowed {
            host.check_target(P, &below, target, OWN).await.unwrap();
            // Again, although the target then shows the volume's root, which is anybody's to write in.
            fs::set_permissions(&source, fs::Permissions::from_mode(0o777)).unwrap();
            for _ in 0..2 {
                host.bind(P, &source, &below, target, own.clone()).await.unwrap();
            }
            assert!(host.unbind(P, &source, target, vec![], Unbind::Unused).await.unwrap());
        }
        let missing = host.check_target(P, &below, &below.join("own/none"), OWN).await.unwrap_err();
        assert_eq!(missing.errno(), Some(libc::ENOENT));
        assert!(matches!(host.check_target(P, &below, &below, OWN).await, Err(HostError::Outside { .. })));
    });
}

#[test]
fn automount_waiting_for_csid_is_refused() {
    use std::os::fd::AsRawFd;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    apart_async("bind::automount_waiting_for_csid_is_refused", |root| async move {
        let host = Host::of_threads();
        let (source, target) = (tmpfs(root.join("source")), directory(root.join("target")));
        // Its server is another process group, and never answers what it is asked by the pipe.
        let mut server = Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        let (asked, ask) = rustix::pipe::pipe().unwrap();
        let options = format!("fd={},pgrp={},minproto=5,maxproto=5,direct", ask.as_raw_fd(), server.id());
        let options = std::ffi::CString::new(options).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("kernel-test", &target, "autofs", flags, options.as_c_str()).unwrap();
        drop(ask);
        let mut opener = Command::new("ls").arg(&target).stdout(Stdio::null()).spawn().unwrap();
        let mut request = [0_u8; 1];
        rustix::io::read(&asked, &mut request).expect("the kernel asks for what is to be mounted there");

        for uid in [0, 4001] {
            let bound = host.bind(P, &source, Path::new("/"), &target, Bind { uid, ..SAFE }).await;
            assert!(matches!(bound, Err(HostError::Automount(_))), "{bound:?}");
        }
        let there = host.bind(P, &source, &root, &directory(root.join("other")), SAFE).await;
        there.expect("no other target is meant");
        for process in [&mut opener, &mut server] {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        unmount(&target, UnmountFlags::DETACH).unwrap();
    });
}

#[test]
fn refused() {
    apart_async("bind::refused", |root| async move {
        let host = Host::of_threads();
        let source = tmpfs(root.join("source"));
        let below = directory(root.join("roots"));
        let bind = async |target: &Path| host.bind(P, &source, &below, target, SAFE).await.unwrap_err();

        fs::write(below.join("file"), "").unwrap();
        assert!(matches!(bind(&below.join("file")).await, HostError::WrongKind { .. }));
        assert_eq!(bind(&below.join("missing")).await.errno(), Some(libc::ENOENT));
        let other = tmpfs(below.join("other"));
        assert!(matches!(bind(&other).await, HostError::Occupied(_)));
        let outside = directory(root.join("outside"));
        symlink(&outside, below.join("link")).unwrap();
        directory(outside.join("target"));
        assert!(matches!(bind(&below.join("link")).await, HostError::Link(_)));
        assert!(matches!(bind(&below.join("link/target")).await, HostError::Link(_)));
        assert!(matches!(bind(&below.join("../outside")).await, HostError::Outside { .. }));
        assert!(matches!(bind(&outside).await, HostError::Outside { .. }));
        assert!(matches!(bind(&below).await, HostError::Outside { .. }));
        let target = directory(below.join("target"));
        let plain = host.bind(P, &outside, &below, &target, SAFE).await;
        assert!(matches!(plain, Err(HostError::WrongKind { .. })), "a plain directory is nothing published");
        assert!(host.mounts_below(&below).unwrap().iter().all(|point| point.path == other));

        // Another's mount is not unbound: next to it, above, or when nothing proves what it is.
        let unbind = async |target: &Path, how| host.unbind(P, &source, target, vec![], how).await;
        assert!(matches!(unbind(&other, Unbind::Unused).await, Err(HostError::Occupied(_))));
        assert!(matches!(unbind(&other, Unbind::Forced).await, Err(HostError::Occupied(_))));
        host.bind(P, &source, &below, &target, SAFE).await.unwrap();
        tmpfs(target.clone());
        assert!(matches!(unbind(&target, Unbind::Forced).await, Err(HostError::Occupied(_))));
        assert!(!host.is_bound(P, &source, &target).await.unwrap());
        unmount(&target, UnmountFlags::empty()).unwrap();
        unmount(&source, UnmountFlags::empty()).unwrap();
        assert!(matches!(unbind(&target, Unbind::Unused).await, Err(HostError::Unproven { .. })));
        assert_eq!(lines(&target).len(), 1);
        unbind(&target, Unbind::Forced).await.unwrap();
        assert_eq!(lines(&target).len(), 0);
    });
}

#[test]
fn by_the_number_that_was_there() {
    apart_async("bind::by_the_number_that_was_there", |root| async move {
        let host = Host::of_threads();
        let (source, target) = (tmpfs(root.join("source")), directory(root.join("target")));
        host.bind(P, &source, &root, &target, SAFE).await.unwrap();
        let Look::Mounted { device, .. } = host.look(P, &source).await else { panic!("nothing mounted") };
        unmount(&source, UnmountFlags::empty()).unwrap();
        let wrong = host.unbind(P, &source, &target, vec![device + 1], Unbind::Unused).await;
        assert!(matches!(wrong, Err(HostError::Occupied(_))));
        let wrong = host.unbind(P, &source, &target, vec![device + 1], Unbind::Forced).await;
        assert!(matches!(wrong, Err(HostError::Occupied(_))), "it is known to be another's");
        assert_eq!(lines(&target).len(), 1);
        host.unbind(P, &source, &target, vec![device], Unbind::Unused).await.unwrap();
        assert!(lines(&target).is_empty());
    });
}

#[test]
fn busy() {
    apart_async("bind::busy", |root| async move {
        let host = Host::of_threads();
        let (source, target) = (tmpfs(root.join("source")), directory(root.join("target")));
        host.bind(P, &source, &root, &target, SAFE).await.unwrap();
        let open = File::create(target.join("open")).unwrap();
        // Names are anybody's: they stay on their line, and say nothing to a terminal.
        fs::write("/proc/self/comm", "a\nb\x1b[31m").unwrap();
        let own = format!("{} a b [31m", std::process::id());
        match host.unbind(P, &source, &target, vec![], Unbind::Unused).await {
            Err(HostError::Busy { holders, .. }) => {
                assert_eq!(holders.as_slice(), std::slice::from_ref(&own));
            }
            other => panic!("{other:?}"),
        }
        assert!(
            host.holders(&source).await.is_empty(),
            "another mount of the same file system is not in use"
        );
        drop(open);
        let nested = tmpfs(target.join("nes\nted"));
        match host.unbind(P, &source, &target, vec![], Unbind::Unused).await {
            Err(HostError::Busy { holders, .. }) => {
                assert_eq!(holders, [format!("mount {}/nes ted", target.display())]);
            }
            other => panic!("{other:?}"),
        }
        host.unbind(P, &source, &target, vec![], Unbind::Forced).await.unwrap();
        assert!(lines(&target).is_empty() && lines(&nested).is_empty());
        host.unbind(P, &source, &target, vec![], Unbind::Unused).await.unwrap();
    });
}

#[test]
fn device() {
    apart_async("bind::device", |root| async move {
        let host = Host::of_threads();
        let disk = Loop::new(&root.join("image"), &[]);
        let (target, wrong) = (root.join("target"), directory(root.join("wrong")));
        fs::write(&target, "").unwrap();
        for _ in 0..2 {
            host.bind(P, &disk.node, &root, &target, SAFE).await.unwrap();
        }
        assert_eq!(
            (host.look(P, &target).await, lines(&target).len()),
            (Look::Device { rdev: disk.rdev() }, 1)
        );
        File::open(&target).expect("nodev would forbid it");
        let other = Loop::new(&root.join("image2"), &[]);
        let bound = host.bind(P, &other.node, &root, &target, SAFE).await;
        assert!(matches!(bound, Err(HostError::Occupied(_))));
        assert!(matches!(
            host.unbind(P, &other.node, &target, vec![], Unbind::Unused).await,
            Err(HostError::Occupied(_))
        ));
        let bound = host.bind(P, &disk.node, &root, &wrong, SAFE).await;
        assert!(matches!(bound, Err(HostError::WrongKind { .. })));
        host.unbind(P, &disk.node, &target, vec![], Unbind::Unused).await.unwrap();
        assert_eq!(host.look(P, &target).await, Look::Plain);
    });
}

#[test]
fn propagation() {
    apart_async("bind::propagation", |root| async move {
        let host = Host::of_threads();
        // As on a systemd host: all is shared.
        mount_change(&root, MountPropagationFlags::SHARED).unwrap();
        let (source, target) = (tmpfs(root.join("source")), directory(root.join("target")));
        for (propagation, tags) in [
            (Propagation::Private, [false, false]),
            (Propagation::HostToTask, [false, true]),
            (Propagation::Bidirectional, [true, false]),
        ] {
            host.bind(P, &source, &root, &target, Bind { propagation, ..SAFE }).await.unwrap();
            let line = lines(&target).remove(0);
            let (tagged, _) = line.split_once(" - ").unwrap();
            assert_eq!(
                [tagged.contains(" shared:"), tagged.contains(" master:")],
                tags,
                "{propagation:?}: {line}"
            );
            let nested = tmpfs(source.join("nested"));
            let reached = !lines(&target.join("nested")).is_empty();
            assert_eq!(reached, propagation != Propagation::Private);
            unmount(&nested, UnmountFlags::empty()).unwrap();
            host.unbind(P, &source, &target, vec![], Unbind::Unused).await.unwrap();
        }
    });
}

#[test]
fn of_a_dead_server() {
    apart_async("bind::of_a_dead_server", |root| async move {
        let host = Host::of_threads();
        let (source, server) = fuse(root.join("source"));
        let target = directory(root.join("target"));
        host.bind(P, &source, &root, &target, SAFE).await.unwrap();
        drop(server);
        assert!(host.is_bound(P, &source, &target).await.unwrap());
        assert_eq!(host.look(P, &target).await, Look::Dead(libc::ENOTCONN));
        host.unbind(P, &source, &target, vec![], Unbind::Unused).await.unwrap();
        assert_eq!(host.look(P, &target).await, Look::Plain);
    });
}

#[test]
fn dead_mount_is_replaced() {
    apart_async("bind::dead_mount_is_replaced", |root| async move {
        let host = Host::of_threads();
        let (source, server) = fuse(root.join("source"));
        let (again, target) = (tmpfs(root.join("again")), directory(root.join("target")));
        let alive = tmpfs(root.join("alive"));
        let numbers = [&source, &alive].map(|path| number(path)).to_vec();
        let replacing = Bind { replaces_dead: numbers, ..SAFE };
        host.bind(P, &alive, &root, &target, SAFE).await.unwrap();
        let occupied = host.bind(P, &again, &root, &target, replacing.clone()).await;
        assert!(matches!(occupied, Err(HostError::Occupied(_))), "it lives");
        let occupied = host.unbind(P, &again, &target, vec![number(&alive)], Unbind::Dead).await;
        assert!(matches!(occupied, Err(HostError::Occupied(_))), "and is another's");
        host.unbind(P, &alive, &target, vec![], Unbind::Unused).await.unwrap();
        host.bind(P, &source, &root, &target, SAFE).await.unwrap();
        let _busy = path(&target);
        drop(server);
        let kept = host.bind(P, &again, &root, &target, SAFE).await;
        assert!(matches!(kept, Err(HostError::Occupied(_))), "only what is being healed");
        host.bind(P, &again, &root, &target, replacing).await.unwrap();
        assert!(host.is_bound(P, &again, &target).await.unwrap());
        assert_eq!(lines(&target).len(), 1, "and nothing is left beneath it");
        assert!(lines(&target)[0].contains("nosuid"));
        host.unbind(P, &again, &target, vec![], Unbind::Unused).await.unwrap();

        // The dead one is the bind also when another is at the source, if it has the number that was there.
        let (source, server) = fuse(root.join("source-2"));
        host.bind(P, &source, &root, &target, SAFE).await.unwrap();
        let were = vec![number(&source)];
        drop(server);
        let occupied = host.unbind(P, &again, &target, were.clone(), Unbind::Unused).await;
        assert!(matches!(occupied, Err(HostError::Occupied(_))), "{occupied:?}");
        assert!(host.unbind(P, &again, &target, were, Unbind::Dead).await.unwrap());
        assert!(lines(&target).is_empty());
    });
}

/// Asking changes nothing, however often: the kernel's answer comes by way of an unmount that does not
/// happen.
#[test]
fn in_use() {
    apart_async("bind::in_use", |root| async move {
        let host = Host::of_threads();
        let (source, target) = (tmpfs(root.join("source")), directory(root.join("target")));
        host.bind(P, &source, &root, &target, SAFE).await.unwrap();
        let open = File::create(target.join("open")).unwrap();
        for _ in 0..50 {
            assert!(host.in_use(P, &target).await.unwrap());
            assert!(!host.in_use(P, &source).await.unwrap(), "only the other mount of it is used");
        }
        drop(open);
        for _ in 0..50 {
            assert!(!host.in_use(P, &target).await.unwrap());
            assert!(host.is_bound(P, &source, &target).await.unwrap());
        }
        for nothing in ["nothing", ""] {
            assert!(!host.in_use(P, &directory(root.join("plain")).join(nothing)).await.unwrap());
        }
    });
}

#[test]
fn orphans() {
    apart_async("bind::orphans", |root| async move {
        let host = Host::of_threads();
        let orphan = tmpfs(root.join("publish/orphan"));
        tmpfs(orphan.clone());
        assert!(!host.remove_orphan("p", &root, &orphan, false).await.unwrap());
        let open = File::create(orphan.join("open")).unwrap();
        let busy = host.remove_orphan("p", &root, &orphan, true).await;
        assert!(matches!(busy, Err(HostError::Busy { .. })), "{busy:?}");
        assert_eq!(lines(&orphan).len(), 2);
        drop(open);
        assert!(host.remove_orphan("p", &root, &orphan, true).await.unwrap());
        assert!(!root.join("publish").exists());
        let full = directory(root.join("publish/full"));
        fs::write(full.join("canary"), "alive").unwrap();
        tmpfs(full.clone());
        assert!(!host.remove_orphan("p", &root, &full, true).await.unwrap());
        assert_eq!(fs::read_to_string(full.join("canary")).unwrap(), "alive");
    });
}
