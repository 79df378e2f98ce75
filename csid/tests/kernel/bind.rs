use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::symlink;
use std::path::Path;

use csid::host::{Bind, Host, HostError, Look, Restrict, Unbind};
use csid::store::rows::Propagation;
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};

use crate::{Loop, apart_async, directory, fuse, lines, number, path, tmpfs};

pub(crate) const P: &str = "plugin";
pub(crate) const SAFE: Bind = Bind {
    replaces_dead: Vec::new(),
    nosuid: true,
    nodev: true,
    read_only: false,
    propagation: Propagation::Private,
};

#[test]
fn there_and_back() {
    apart_async("bind::there_and_back", |root| async move {
        let host = Host::new();
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
        let host = Host::new();
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
        let host = Host::new();
        let (source, target) = (tmpfs(root.join("source")), directory(root.join("target")));
        host.bind(P, &source, &root, &target, Bind { read_only: true, ..SAFE }).await.unwrap();
        assert!(File::create(target.join("x")).is_err() && File::create(source.join("x")).is_ok());
        assert!(
            host.is_read_only(P, &target).await.unwrap() && !host.is_read_only(P, &source).await.unwrap()
        );

        let writer = OpenOptions::new().write(true).open(source.join("x")).unwrap();
        let how = Restrict { nosuid: true, nodev: true, read_only: true };
        match host.restrict(P, &source, how).await {
            Err(HostError::Busy { holders, .. }) => {
                let own = format!("{} ", std::process::id());
                assert!(holders.iter().any(|holder| holder.starts_with(&own)), "{holders:?}");
            }
            other => panic!("{other:?}"),
        }
        drop(writer);
        host.restrict(P, &source, how).await.unwrap();
        assert!(host.is_read_only(P, &source).await.unwrap() && File::create(source.join("y")).is_err());
        assert!(lines(&source)[0].contains(" ro,nosuid,nodev,"));
        let plain = directory(root.join("plain"));
        assert!(matches!(host.restrict(P, &plain, how).await, Ok(Look::Plain)));
    });
}

#[test]
fn refused() {
    apart_async("bind::refused", |root| async move {
        let host = Host::new();
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

        // Another's mount is not unbound: beside, above, or when nothing proves what it is.
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
        let host = Host::new();
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
        let host = Host::new();
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
        let host = Host::new();
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
        let host = Host::new();
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
        let host = Host::new();
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
fn a_dead_one_gives_way() {
    apart_async("bind::a_dead_one_gives_way", |root| async move {
        let host = Host::new();
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
        let host = Host::new();
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
        let host = Host::new();
        let orphan = tmpfs(root.join("publish/orphan"));
        tmpfs(orphan.clone());
        assert!(!host.remove_orphan(&root, &orphan, false).await.unwrap());
        let open = File::create(orphan.join("open")).unwrap();
        let busy = host.remove_orphan(&root, &orphan, true).await;
        assert!(matches!(busy, Err(HostError::Busy { .. })), "{busy:?}");
        assert_eq!(lines(&orphan).len(), 2);
        drop(open);
        assert!(host.remove_orphan(&root, &orphan, true).await.unwrap());
        assert!(!root.join("publish").exists());
        let full = directory(root.join("publish/full"));
        fs::write(full.join("canary"), "alive").unwrap();
        tmpfs(full.clone());
        assert!(!host.remove_orphan(&root, &full, true).await.unwrap());
        assert_eq!(fs::read_to_string(full.join("canary")).unwrap(), "alive");
    });
}
