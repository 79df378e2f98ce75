use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use csid::host::{Host, Look};
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use crate::{Loop, apart, apart_async, directory, fuse, tmpfs};

const P: &str = "plugin";

#[test]
fn look_reports_what_is_at_a_path() {
    apart_async("look::look_reports_what_is_at_a_path", |root| async move {
        let host = Host::of_threads();
        let look = async |name: &str| {
            let look = host.look(P, &root.join(name)).await;
            assert_eq!(host.look_below(P, &root, &root.join(name)).await, look, "{name}");
            look
        };
        directory(root.join("dir"));
        fs::write(root.join("file"), "").unwrap();
        assert_eq!(look("nothing").await, Look::Missing);
        assert_eq!(look("file/below").await, Look::Missing);
        assert_eq!(look("dir").await, Look::Plain);
        assert_eq!(look("file").await, Look::Plain);

        let mounted = tmpfs(root.join("mounted"));
        let device = std::os::unix::fs::MetadataExt::dev(&fs::metadata(&mounted).unwrap());
        assert_eq!(look("mounted").await, Look::Mounted { device, served: false });
        directory(mounted.join("dir"));
        assert_eq!(look("mounted/dir").await, Look::Plain);
        symlink(&mounted, root.join("link")).unwrap();
        assert_eq!(look("link").await, Look::Dead(libc::ELOOP));
        assert_eq!(look("link/dir").await, Look::Dead(libc::ELOOP));

        fs::write(root.join("bound"), "").unwrap();
        mount_bind(root.join("file"), root.join("bound")).unwrap();
        assert_eq!(look("bound").await, Look::Dead(libc::ENOTDIR));

        let disk = Loop::new(&root.join("image"), &[]);
        let rdev = disk.rdev();
        assert_eq!(host.look(P, &disk.node).await, Look::Device { rdev });
        mount_bind(&disk.node, root.join("file")).unwrap();
        assert_eq!(look("file").await, Look::Device { rdev });
        assert!(!host.block_is_read_only(rdev).unwrap());
        let read_only = Loop::new(&root.join("image2"), &["--read-only"]);
        assert!(host.block_is_read_only(read_only.rdev()).unwrap());
        assert!(host.block_is_read_only(rustix::fs::makedev(7, 1_000_000)).is_err());

        // Removed behind csid's back.
        unmount(&mounted, UnmountFlags::DETACH).unwrap();
        assert_eq!(look("mounted").await, Look::Plain);
    });
}

#[test]
fn a_dead_server() {
    apart_async("look::a_dead_server", |root| async move {
        let host = Host::of_threads();
        let (path, server) = fuse(root.join("fuse"));
        drop(server);
        assert_eq!(host.look(P, &path).await, Look::Dead(libc::ENOTCONN));
        assert!(!host.remove(&root, &path).unwrap(), "something is mounted there");
        assert_eq!(host.mounts_below(&path).unwrap().len(), 1);
        host.detach(P, &path, false).await.unwrap();
        assert_eq!(host.look(P, &path).await, Look::Plain);
        host.detach(P, &path, false).await.unwrap();
        assert!(host.remove(&root, &path).unwrap());
    });
}

#[test]
fn a_hung_server() {
    apart_async("look::a_hung_server", |root| async move {
        let host = Host::of_threads();
        let (path, server) = fuse(root.join("fuse"));
        let fine = tmpfs(root.join("fine"));
        let start = Instant::now();
        // More than there are workers; all are answered at the deadline, and another path is not delayed.
        let hung = (0..200).map(|_| host.look(P, &path));
        let hung = futures_util::future::join_all(hung);
        let other = async {
            // The others hang by then. Nothing shows how many of them wait in the kernel.
            tokio::time::sleep(Duration::from_millis(500)).await;
            let start = Instant::now();
            let look = host.look(P, &fine).await;
            (look, start.elapsed())
        };
        let (hung, (look, took)) = tokio::join!(hung, other);
        assert!(hung.iter().all(|look| *look == Look::Hung));
        assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
        assert!(matches!(look, Look::Mounted { .. }) && took < Duration::from_secs(1), "{look:?} {took:?}");
        // The first look still hangs: the next one there is answered at once.
        let start = Instant::now();
        assert_eq!(host.look("other", &path).await, Look::Hung);
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        // When the kernel returns, the path is looked at again.
        drop(server);
        for _ in 0..100 {
            if host.look(P, &path).await == Look::Dead(libc::ENOTCONN) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("still hung");
    });
}

#[test]
fn mount_table_shows_what_a_walk_finds() {
    apart("look::mount_table_shows_what_a_walk_finds", |root| {
        let host = Host::of_threads();
        let path = tmpfs(root.join("a/b/c"));
        let device = std::os::unix::fs::MetadataExt::dev(&fs::metadata(&path).unwrap());
        let at = |path: &std::path::Path| {
            let table = host.mount_table().unwrap();
            table.at(path).map(|shown| (shown.device, shown.is_served))
        };
        assert_eq!(at(&path), Some((device, false)));
        assert_eq!(at(&root.join("a/b")), None);
        let cover = tmpfs(root.join("a"));
        assert_eq!(at(&path), None, "covered");
        unmount(&cover, UnmountFlags::empty()).unwrap();
        let (served, _server) = fuse(root.join("fuse"));
        assert_eq!(at(&served).map(|(_, is_served)| is_served), Some(true));
        tmpfs(path.clone());
        assert_ne!(at(&path), Some((device, false)), "stacked");
    });
}

#[test]
fn the_table() {
    apart("look::the_table", |root| {
        let host = Host::of_threads();
        let path = tmpfs(root.join("a b\\\n"));
        tmpfs(path.clone());
        tmpfs(path.join("below"));
        tmpfs(root.join("a b"));
        let found: Vec<_> =
            host.mounts_below(&path).unwrap().into_iter().map(|p| (p.path, p.stacked)).collect();
        assert_eq!(found, [(path.clone(), 2), (path.join("below"), 1)]);
    });
}
