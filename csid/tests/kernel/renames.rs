//! What somebody who may write in the directories above a target renames there, at the worst moments.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

use csid::host::{Bind, Host, HostError, Look, Unbind};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::mount::{UnmountFlags, unmount};

use crate::bind::{P, SAFE};
use crate::{apart_async, directory, ext4, fuse, lines, number, path, tmpfs};

/// security.md, row 1: the owner of the target's parent swaps it for a link to elsewhere, and moves it out,
/// all the time.
#[test]
fn no_escape_by_renaming() {
    apart_async("renames::no_escape_by_renaming", |root| async move {
        let host = Host::of_threads();
        let source = tmpfs(root.join("source"));
        let (below, outside) = (directory(root.join("roots")), directory(root.join("outside")));
        let target = directory(below.join("task")).join("target");
        directory(target.clone());
        directory(outside.join("target"));
        fs::write(outside.join("canary"), "alive").unwrap();
        symlink(&outside, below.join("link")).unwrap();

        static STOP: AtomicBool = AtomicBool::new(false);
        let (task, link, away) = (below.join("task"), below.join("link"), root.join("away"));
        let attacker = std::thread::spawn(move || {
            while !STOP.load(Ordering::Relaxed) {
                for _ in 0..2 {
                    renameat_with(CWD, &task, CWD, &link, RenameFlags::EXCHANGE).unwrap();
                }
                renameat_with(CWD, &task, CWD, &away, RenameFlags::NOREPLACE).unwrap();
                renameat_with(CWD, &away, CWD, &task, RenameFlags::NOREPLACE).unwrap();
            }
        });
        let (mut done, mut refused, mut escaped, mut left) = (0, 0, 0, 0);
        for _ in 0..3000 {
            match host.bind(P, &source, &below, &target, SAFE).await {
                Ok(()) => done += 1,
                Err(_) => {
                    refused += 1;
                    left += host.mounts_below(&root).unwrap().len() - 2;
                }
            }
            if !lines(&outside.join("target")).is_empty() {
                escaped += 1;
            }
            // Until it comes off, which the attacker delays as well; the table shows it under whichever name.
            while host.mounts_below(&root).unwrap().len() > 2 {
                let _again = host.unbind(P, &source, &target, vec![], Unbind::Unused).await;
            }
        }
        STOP.store(true, Ordering::Relaxed);
        attacker.join().unwrap();
        println!("{done} bound, {refused} refused, {escaped} escaped, {left} left behind");
        assert_eq!((escaped, left), (0, 0));
        assert!(done > 0 && refused > 0, "the race was run: {done} bound, {refused} refused");
        assert_eq!(fs::read_to_string(outside.join("canary")).unwrap(), "alive");
        assert_eq!(fs::read_dir(outside.join("target")).unwrap().count(), 0);
    });
}

/// Who owns a directory above the target puts another tree in its place between the look and the unmount:
/// what is mounted there stays.
#[test]
fn no_other_by_renaming() {
    apart_async("renames::no_other_by_renaming", |root| async move {
        let host = Host::of_threads();
        let source = tmpfs(root.join("source"));
        let target = directory(root.join("task/target"));
        let other = tmpfs(root.join("other/target"));
        fs::write(other.join("canary"), "alive").unwrap();

        static STOP: AtomicBool = AtomicBool::new(false);
        let (task, swapped) = (root.join("task"), root.join("other"));
        let attacker = std::thread::spawn(move || {
            while !STOP.load(Ordering::Relaxed) {
                for _ in 0..2 {
                    renameat_with(CWD, &task, CWD, &swapped, RenameFlags::EXCHANGE).unwrap();
                }
            }
        });
        // Not the paths, which change while the table is read.
        let mounts = || host.mounts_below(&root).unwrap().iter().map(|point| point.stacked).sum::<usize>();
        let (mut done, mut refused) = (0, 0);
        for _ in 0..500 {
            // The attacker's tree may be in the way.
            while host.bind(P, &source, &root, &target, SAFE).await.is_err() {}
            while !matches!(host.unbind(P, &source, &target, vec![], Unbind::Unused).await, Ok(true)) {
                refused += 1;
            }
            done += 1;
            assert_eq!(mounts(), 3, "after {done} unbound, {refused} refused");
        }
        STOP.store(true, Ordering::Relaxed);
        attacker.join().unwrap();
        println!("{done} unbound, {refused} refused");
        assert!(done > 0 && refused > 0, "the race was run: {done} unbound, {refused} refused");
        assert_eq!(fs::read_to_string(other.join("canary")).unwrap(), "alive");
    });
}

/// Who owns the target's parent exchanges the target itself for a link. The kernel lets no mount point be renamed, but asks only
/// when a rename begins: what is bound meanwhile would go along. On a file system whose renames take their time.
#[test]
fn bind_survives_concurrent_rename() {
    apart_async("renames::bind_survives_concurrent_rename", |root| async move {
        let host = Host::of_threads();
        let source = tmpfs(root.join("source"));
        let below = ext4(&root.join("image"), root.join("roots"));
        let (target, outside) = (directory(below.join("target")), directory(root.join("outside")));
        let link = below.join("link");
        symlink(&outside, &link).unwrap();

        static STOP: AtomicBool = AtomicBool::new(false);
        let (here, there) = (target.clone(), link.clone());
        let attacker = std::thread::spawn(move || {
            while !STOP.load(Ordering::Relaxed) {
                let _busy = renameat_with(CWD, &here, CWD, &there, RenameFlags::EXCHANGE);
                std::thread::yield_now();
            }
        });
        let (mut done, mut refused, mut moved) = (0, 0, 0);
        for _ in 0..6000 {
            match host.bind(P, &source, &below, &target, SAFE).await {
                Err(_) => refused += 1,
                Ok(()) => {
                    done += 1;
                    std::thread::sleep(std::time::Duration::from_micros(100));
                    if !matches!(host.unbind(P, &source, &target, vec![], Unbind::Unused).await, Ok(true)) {
                        moved += 1;
                        let _gone = unmount(&link, UnmountFlags::DETACH);
                    }
                }
            }
            assert!(lines(&target).is_empty() && lines(&link).is_empty() && lines(&outside).is_empty());
        }
        STOP.store(true, Ordering::Relaxed);
        attacker.join().unwrap();
        println!("{done} bound, {refused} refused, {moved} moved afterwards");
        assert!(done > 0 && refused > 0, "the race was run: {done} bound, {refused} refused");
        assert_eq!(moved, 0, "of {done} that were bound");
    });
}

/// Who owns a directory above the target puts another in its place, where somebody else's mount is dead, too, or a link to it: that
/// one stays, for every request.
#[test]
fn dead_mount_of_others_stays() {
    apart_async("renames::dead_mount_of_others_stays", |root| async move {
        let host = Host::of_threads();
        let (source, server) = fuse(root.join("source"));
        let again = tmpfs(root.join("again"));
        let below = root.join("roots");
        let target = directory(below.join("task/target"));
        let (others, others_server) = fuse(below.join("other/target"));
        host.bind(P, &source, &below, &target, SAFE).await.unwrap();
        let own = number(&source);
        let replacing = Bind { replaces_dead: vec![own], ..SAFE };
        drop((server, others_server));
        assert_eq!(host.look(P, &others).await, Look::Dead(libc::ENOTCONN));

        let (task, other, link) = (below.join("task"), below.join("other"), below.join("link"));
        symlink(&other, &link).unwrap();
        for instead in [&other, &link] {
            renameat_with(CWD, &task, CWD, instead, RenameFlags::EXCHANGE).unwrap();
            let healed = host.bind(P, &again, &below, &target, replacing.clone()).await;
            assert!(matches!(healed, Err(HostError::Occupied(_) | HostError::Link(_))), "{healed:?}");
            for how in [Unbind::Unused, Unbind::Dead, Unbind::Forced] {
                for source in [&again, &source, &root.join("nothing")] {
                    let unbound = host.unbind(P, source, &target, vec![own], how).await;
                    assert!(
                        matches!(unbound, Err(HostError::Occupied(_) | HostError::Link(_))),
                        "{unbound:?}"
                    );
                }
            }
            renameat_with(CWD, &task, CWD, instead, RenameFlags::EXCHANGE).unwrap();
            assert_eq!((lines(&others).len(), lines(&target).len()), (1, 1));
        }

        host.bind(P, &again, &below, &target, replacing).await.unwrap();
        assert!(host.is_bound(P, &again, &target).await.unwrap(), "its own is healed all the same");
        assert_eq!((lines(&others).len(), lines(&target).len()), (1, 1));
        host.unbind(P, &again, &target, vec![own], Unbind::Unused).await.unwrap();

        // And its own is unmounted by force, whatever is at the source now.
        for source_now in ["source", "again", "nothing"] {
            let (source, server) = fuse(root.join("source-").join(source_now));
            host.bind(P, &source, &below, &target, SAFE).await.unwrap();
            let own = vec![number(&source)];
            drop(server);
            let _held = path(&target);
            assert!(host.unbind(P, &root.join(source_now), &target, own, Unbind::Forced).await.unwrap());
            assert_eq!((lines(&others).len(), lines(&target).len()), (1, 0));
        }
    });
}
