use std::fs::{self, File};
use std::io::pipe;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use csid::host::{Host, HostError, Restrict, Tree};
use rustix::fs::{AtFlags, Mode, OFlags, StatVfsMountFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::bind::P;
use crate::{apart_async, directory, ext4, tmpfs};

/// The uid and gid outside that root of the user namespace has.
const ROOT: u32 = 100_000;

/// A process in a user namespace of its own, which ends when it is dropped.
struct Namespace(Child);

impl Namespace {
    fn new() -> Namespace {
        let child = Command::new("unshare").args(["--user", "sleep", "600"]).spawn().unwrap();
        let namespace = Namespace(child);
        let number = |path: PathBuf| fs::metadata(path).unwrap().ino();
        let own = number("/proc/self/ns/user".into());
        for _ in 0..1000 {
            if number(namespace.proc("ns/user")) != own {
                return namespace;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("unshare made no user namespace");
    }

    fn mapped() -> Namespace {
        let namespace = Namespace::new();
        for map in ["uid_map", "gid_map"] {
            fs::write(namespace.proc(map), format!("0 {ROOT} 1000")).unwrap();
        }
        namespace
    }

    fn proc(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.0.id()))
    }

    fn open(&self) -> OwnedFd {
        File::open(self.proc("ns/user")).unwrap().into()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn opened(
    host: &Host,
    source: &Path,
    how: Restrict,
    userns: OwnedFd,
) -> Result<Option<(Tree, bool)>, HostError> {
    let shown = host.look(P, source).await;
    host.open_tree(P, source, shown, None, how, Some(host.keep(userns))).await
}

/// Counts the descriptors of this process.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn xfs(image: &Path, path: PathBuf) -> PathBuf {
    let path = directory(path);
    File::create(image).unwrap().set_len(320 << 20).unwrap();
    let made = Command::new("mkfs.xfs").arg("-q").arg(image).status().unwrap();
    let mounted = Command::new("mount").args(["-o", "loop"]).arg(image).arg(&path).status().unwrap();
    assert!(made.success() && mounted.success());
    path
}

#[test]
fn owners_are_mapped_and_flags_stay() {
    apart_async("idmap::owners_are_mapped_and_flags_stay", |root| async move {
        let host = Host::of_threads();
        let namespace = Namespace::mapped();
        let images = tempfile::tempdir_in("/var/tmp").unwrap();
        let ext4 = ext4(&images.path().join("ext4"), root.join("ext4"));
        let xfs = xfs(&images.path().join("xfs"), root.join("xfs"));
        for source in [ext4.clone(), xfs.clone(), tmpfs(root.join("tmpfs"))] {
            fs::write(source.join("file"), "data").unwrap();
            for read_only in [false, true] {
                let how = Restrict { nosuid: true, nodev: true, read_only };
                let (tree, is_bound) = opened(&host, &source, how, namespace.open()).await.unwrap().unwrap();
                assert!(is_bound);
                let file = rustix::fs::statat(&tree, c"file", AtFlags::empty()).unwrap();
                assert_eq!((file.st_uid, file.st_gid), (ROOT, ROOT), "{}", source.display());
                let flags = rustix::fs::fstatvfs(&tree).unwrap().f_flag;
                assert!(flags.contains(StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV), "{flags:?}");
                assert_eq!(flags.contains(StatVfsMountFlags::RDONLY), read_only);
                // Root outside has no id in the mapping, so the kernel lets it create nothing.
                let made = rustix::fs::openat(&tree, c"new", OFlags::CREATE | OFlags::RDWR, Mode::RUSR);
                assert!(made.is_err());
            }
            assert_eq!(fs::metadata(source.join("file")).unwrap().uid(), 0, "the volume itself is as it was");
        }
        for source in [ext4, xfs] {
            unmount(&source, UnmountFlags::DETACH).unwrap();
        }
    });
}

#[test]
fn file_system_without_mappings_is_named() {
    apart_async("idmap::file_system_without_mappings_is_named", |root| async move {
        let host = Host::of_threads();
        let namespace = Namespace::mapped();
        let [lower, upper, work, merged] =
            ["lower", "upper", "work", "merged"].map(|name| directory(root.join(name)));
        let options =
            format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        let options = std::ffi::CString::new(options).unwrap();
        mount("overlay", &merged, "overlay", MountFlags::empty(), Some(options.as_c_str())).unwrap();
        let proc = directory(root.join("proc"));
        mount("proc", &proc, "proc", MountFlags::empty(), None).unwrap();
        let before = descriptors();
        for source in [&merged, &proc] {
            for _ in 0..20 {
                let answer = opened(&host, source, Restrict::default(), namespace.open()).await;
                let error = answer.map(drop).unwrap_err();
                assert!(matches!(&error, HostError::NotIdMapped(path) if path == source), "{error}");
            }
        }
        // A namespace that maps nothing has the same error.
        let empty = Namespace::new();
        let tmpfs = tmpfs(root.join("tmpfs"));
        let error = opened(&host, &tmpfs, Restrict::default(), empty.open()).await.map(drop).unwrap_err();
        assert!(matches!(error, HostError::NotIdMapped(_)), "{error}");
        assert!(error.to_string().contains("maps no uid or no gid"), "{error}");
        // Workers stay connected: a leak would be one descriptor or more for each call.
        assert!(descriptors() < before + 20, "{before} before, {} after", descriptors());
    });
}

#[test]
fn other_descriptor_maps_nothing() {
    apart_async("idmap::other_descriptor_maps_nothing", |root| async move {
        let host = Host::of_threads();
        let source = tmpfs(root.join("source"));
        let open =
            |path: &str, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let (reader, writer) = pipe().unwrap();
        drop(writer);
        let namespace = Namespace::mapped();
        let path = namespace.proc("ns/user");
        for fd in [
            open("/etc/passwd", OFlags::RDONLY),
            open("/proc/self/ns/pid", OFlags::RDONLY),
            open("/proc/self/ns/mnt", OFlags::RDONLY),
            open("/proc/self/ns/user", OFlags::RDONLY),
            open(path.to_str().unwrap(), OFlags::PATH),
            reader.into(),
        ] {
            let name = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
            let error = opened(&host, &source, Restrict::default(), fd).await.map(drop).unwrap_err();
            assert!(matches!(error, HostError::NotUserNamespace { .. }), "{}: {error}", name.display());
        }
        // A mount that has mapped owners already.
        let (tree, _) = opened(&host, &source, Restrict::default(), namespace.open()).await.unwrap().unwrap();
        let mapped = directory(root.join("mapped"));
        let flags = rustix::mount::MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&tree, c"", rustix::fs::CWD, &mapped, flags).unwrap();
        let error =
            opened(&host, &mapped, Restrict::default(), namespace.open()).await.map(drop).unwrap_err();
        assert!(matches!(error, HostError::NotIdMappable(_)), "{error}");
    });
}
