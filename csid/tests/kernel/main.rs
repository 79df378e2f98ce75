//! `host` and `store` on the real kernel: tmpfs, loop devices and FUSE, mounted in a mount namespace of the
//! test's own, which takes all of them along when it ends. Needs root.

#![allow(clippy::disallowed_types, reason = "unshare, mkfs and losetup are programs")]

mod bind;
mod directories;
mod full_disk;
mod idmap;
mod live;
mod look;
mod renames;

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount};

const INSIDE: &str = "CSID_TEST_NAMESPACE";

/// Run a test in its own process and mount namespace, with a fresh tmpfs to work in.
fn apart(test: &str, body: impl FnOnce(&Path)) {
    if let Some(root) = std::env::var_os(INSIDE) {
        let root = csid::host::resolve(Path::new(&root)).unwrap();
        // 0755, as a volume's directories are reached by others.
        mount("kernel-test", &root, "tmpfs", MountFlags::empty(), Some(c"mode=755,size=64m")).unwrap();
        return body(&root);
    }
    assert!(rustix::process::geteuid().is_root(), "this test mounts: run it as root");
    let root = tempfile::tempdir().unwrap();
    let status = Command::new("unshare")
        .args(["--mount", "--propagation", "private"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, root.path())
        .status()
        .expect("unshare (util-linux) runs");
    assert!(status.success(), "{test} failed in its namespace; see above");
}

/// The same for a test that awaits.
fn apart_async<F: Future<Output = ()>>(test: &str, body: impl FnOnce(PathBuf) -> F) {
    apart(test, |root| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(body(root.to_owned()));
        // A thread that hangs in the kernel must not hold the test up.
        runtime.shutdown_background();
    });
}

fn directory(path: PathBuf) -> PathBuf {
    fs::create_dir_all(&path).unwrap();
    path
}

fn tmpfs(path: PathBuf) -> PathBuf {
    let path = directory(path);
    mount("kernel-test", &path, "tmpfs", MountFlags::empty(), Some(c"mode=755")).unwrap();
    path
}

/// A small one in a file.
fn ext4(image: &Path, path: PathBuf) -> PathBuf {
    let path = directory(path);
    File::create(image).unwrap().set_len(16 << 20).unwrap();
    for (program, more) in [("mkfs.ext4", vec!["-q"]), ("mount", vec!["-o", "loop"])] {
        let at = Some(&path).filter(|_| program == "mount");
        let status = Command::new(program).args(more).arg(image).args(at).status().unwrap();
        assert!(status.success(), "{program} failed");
    }
    path
}

/// A FUSE mount whose server is this test: it never answers, and is dead once the descriptor is closed.
fn fuse(path: PathBuf) -> (PathBuf, OwnedFd) {
    let path = directory(path);
    let server = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&server);
    let options = std::ffi::CString::new(format!("fd={fd},rootmode=40000,user_id=0,group_id=0")).unwrap();
    mount("kernel-test", &path, "fuse", MountFlags::empty(), Some(options.as_c_str())).unwrap();
    (path, server)
}

/// A loop device over a new file, detached when dropped.
struct Loop {
    node: PathBuf,
}

impl Loop {
    fn new(file: &Path, more: &[&str]) -> Loop {
        File::create(file).unwrap().set_len(4 << 20).unwrap();
        // Somebody else may take the free one meanwhile.
        for _ in 0..20 {
            let made =
                Command::new("losetup").args(["--find", "--show"]).args(more).arg(file).output().unwrap();
            if made.status.success() {
                return Loop { node: PathBuf::from(String::from_utf8(made.stdout).unwrap().trim()) };
            }
        }
        panic!("no free loop device");
    }

    fn rdev(&self) -> u64 {
        std::os::unix::fs::MetadataExt::rdev(&fs::metadata(&self.node).unwrap())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _status = Command::new("losetup").arg("--detach").arg(&self.node).status();
    }
}

/// The device number of what is mounted there; its server is not asked.
fn number(path: &Path) -> u64 {
    let line = lines(path).pop().expect("a mount");
    let (major, minor) = line.split(' ').nth(2).unwrap().split_once(':').unwrap();
    rustix::fs::makedev(major.parse().unwrap(), minor.parse().unwrap())
}

/// Held open, and not asked.
fn path(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// A line of mountinfo for each mount at `path`.
fn lines(path: &Path) -> Vec<String> {
    let point = format!(" {} ", path.display());
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().filter(|line| line.contains(&point)).map(str::to_owned).collect()
}
