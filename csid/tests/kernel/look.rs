use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use csid::host::{Host, Look};
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, unmount};

use crate::{Loop, apart, apart_async, directory, fuse, tmpfs};

const P: &str = "plugin";

#[test]
fn what_is_there() {
    apart_async("look::what_is_there", |root| async move {
        let host = Host::new();
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
        let host = Host::new();
        let (path, server) = fuse(root.join("fuse"));
        drop(server);
        assert_eq!(host.look(P, &path).await, Look::Dead(libc::ENOTCONN));
        let paths = vec![root.clone(), path.clone(), root.join("nothing")];
        let looks = host.looks(P, paths).await;
        assert!(
            matches!(looks[..], [Look::Mounted { .. }, Look::Dead(libc::ENOTCONN), Look::Missing]),
            "{looks:?}"
        );
        assert!(!host.remove(&root, &path).unwrap(), "something is mounted there");
        assert_eq!(host.mounts_below(&path).unwrap().len(), 1);
        host.detach(P, &path).await.unwrap();
        assert_eq!(host.look(P, &path).await, Look::Plain);
        host.detach(P, &path).await.unwrap();
        assert!(host.remove(&root, &path).unwrap());
    });
}

#[test]
fn a_hung_server() {
    apart_async("look::a_hung_server", |root| async move {
        let host = Host::new();
        let (path, server) = fuse(root.join("fuse"));
        let fine = tmpfs(root.join("fine"));
        let start = Instant::now();
        // More than may hang at once; all are answered at the deadline, and another plugin's is not delayed.
        let hung = (0..40).map(|_| host.look(P, &path));
        let hung = futures_util::future::join_all(hung);
        let other = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let start = Instant::now();
            let look = host.look("other", &fine).await;
            (look, start.elapsed())
        };
        let many = host.looks("third", vec![fine.clone(), path.clone(), fine.clone(), fine.clone()]);
        let (hung, (look, took), many) = tokio::join!(hung, other, many);
        assert!(hung.iter().all(|look| *look == Look::Hung));
        assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
        assert!(matches!(look, Look::Mounted { .. }) && took < Duration::from_secs(1), "{look:?} {took:?}");
        assert!(matches!(many[..], [Look::Mounted { .. }, Look::Hung, Look::Hung, Look::Hung]), "{many:?}");
        let threads = fs::read_dir("/proc/self/task").unwrap().count();
        assert!(threads < 40, "{threads} threads: the hung ones are bounded");

        // When the kernel lets go the plugin's gate is open again.
        drop(server);
        for _ in 0..100 {
            if host.look(P, &path).await == Look::Dead(libc::ENOTCONN) {
                return;
            }
        }
        panic!("still hung");
    });
}

#[test]
fn ten_thousand_at_start() {
    apart_async("look::ten_thousand_at_start", |root| async move {
        let host = Host::new();
        let mut paths = Vec::new();
        for n in 0..10_000 {
            paths.push(directory(root.join(format!("plugins/local/publish/{n}"))));
        }
        for path in &paths[..1000] {
            rustix::mount::mount("x", path, "tmpfs", MountFlags::empty(), None).unwrap();
        }
        let start = Instant::now();
        let looks = host.looks(P, paths).await;
        println!("10,000 looks in {:?}", start.elapsed());
        assert!(looks[..1000].iter().all(|look| matches!(look, Look::Mounted { .. })));
        assert!(looks[1000..].iter().all(|look| *look == Look::Plain));
        let start = Instant::now();
        assert_eq!(host.mounts_below(&root.join("plugins")).unwrap().len(), 1000);
        println!("the whole table in {:?}", start.elapsed());
    });
}

#[test]
fn the_table() {
    apart("look::the_table", |root| {
        let host = Host::new();
        let path = tmpfs(root.join("a b\\\n"));
        tmpfs(path.clone());
        tmpfs(path.join("below"));
        tmpfs(root.join("a b"));
        let found: Vec<_> =
            host.mounts_below(&path).unwrap().into_iter().map(|p| (p.path, p.stacked)).collect();
        assert_eq!(found, [(path.clone(), 2), (path.join("below"), 1)]);
    });
}
