//! OpenMount with a user namespace that maps the owners of files.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::{Child, Command};

use csid_client::{Client, Kind, OpenOptions, Result};
use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy};
use csid_tests::kernel;
use csid_tests::raw::{
    self, GROUP, MANAGER, MANAGER_PATH, MEMBER, ROOT, call, dict, group_csid, text, value,
};
use csid_tests::world::{World, eventually, refusal, world};
use rustix::fs::{AtFlags, Mode, OFlags, StatVfsMountFlags};

/// The uid and gid outside that root of the user namespace has.
const OUTSIDE: u32 = 100_000;

/// A process in a user namespace of its own, which ends when it is dropped.
struct Contained(Child);

impl Contained {
    async fn start() -> Contained {
        let contained =
            Contained(Command::new("unshare").args(["--user", "sleep", "600"]).spawn().expect("unshare"));
        let link = |path: PathBuf| fs::read_link(path).unwrap();
        let own = link("/proc/self/ns/user".into());
        eventually("unshare has made a user namespace", async || link(contained.proc("ns/user")) != own)
            .await;
        for map in ["uid_map", "gid_map"] {
            fs::write(contained.proc(map), format!("0 {OUTSIDE} 1000")).unwrap();
        }
        contained
    }

    fn proc(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.0.id()))
    }

    fn userns(&self) -> OwnedFd {
        File::open(self.proc("ns/user")).unwrap().into()
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn opened(client: &Client, volume: &str, userns: OwnedFd) -> Result<OwnedFd> {
    let options = OpenOptions { userns: Some(userns.into()), ..OpenOptions::default() };
    client.open_mount(NAMESPACE, volume, "job", options).await
}

/// Counts csid's descriptors but for sockets: connections to workers of the helper stay.
fn descriptors(w: &World) -> usize {
    let files = fs::read_dir(format!("/proc/{}/fd", w.csid_pid())).unwrap().flatten();
    let links = files.filter_map(|file| fs::read_link(file.path()).ok());
    links.filter(|link| !link.to_string_lossy().starts_with("socket:")).count()
}

fn open(path: impl Into<PathBuf>, flags: OFlags) -> OwnedFd {
    rustix::fs::open(path.into(), flags | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

#[test]
fn file_of_root_is_the_containers_own() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        fs::write(source.join("file"), "data").unwrap();
        let contained = Contained::start().await;
        // Workers of the helper stay connected: the first calls make them.
        for _ in 0..4 {
            opened(&client, "v", contained.userns()).await.unwrap();
        }
        let (before, mounts) = (descriptors(w), kernel::mounts().unwrap());
        for _ in 0..50 {
            let tree = opened(&client, "v", contained.userns()).await.unwrap();
            let file = rustix::fs::statat(&tree, c"file", AtFlags::empty()).unwrap();
            assert_eq!((file.st_uid, file.st_gid), (OUTSIDE, OUTSIDE));
            let flags = rustix::fs::fstatvfs(&tree).unwrap().f_flag;
            assert!(flags.contains(StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV), "{flags:?}");
        }
        eventually("csid has closed its descriptors", async || descriptors(w) <= before).await;
        assert_eq!(kernel::mounts().unwrap(), mounts, "the clones are detached");
        // Without the option owners are as they are.
        let tree = client.open_mount(NAMESPACE, "v", "job", OpenOptions::default()).await.unwrap();
        assert_eq!(rustix::fs::statat(&tree, c"file", AtFlags::empty()).unwrap().st_uid, 0);
        drop(tree);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn wrong_descriptor_is_invalid_and_changes_nothing() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        fs::write(source.join("file"), "data").unwrap();
        let contained = Contained::start().await;
        let wrong = || {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(writer);
            [
                open("/etc/passwd", OFlags::RDONLY),
                open(source.join("file"), OFlags::RDONLY),
                open("/proc/self/ns/pid", OFlags::RDONLY),
                open("/proc/self/ns/user", OFlags::RDONLY),
                open(contained.proc("ns/user"), OFlags::PATH),
                reader.into(),
            ]
        };
        for fd in wrong() {
            refusal(opened(&client, "v", fd).await);
        }
        let (before, mounts) = (descriptors(w), kernel::mounts().unwrap());
        for _ in 0..5 {
            for fd in wrong() {
                let (kind, error) = refusal(opened(&client, "v", fd).await);
                assert_eq!(kind, Kind::InvalidArgument, "{error}");
                assert!(error.message.contains("userns"), "{error}");
            }
        }
        eventually("csid has closed its descriptors", async || descriptors(w) <= before).await;
        assert_eq!(kernel::mounts().unwrap(), mounts);
        assert_eq!(state(&client, "v", "job").await, "mounted");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn block_device_has_no_mapped_owner() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "b");
        let client = w.start().await;
        healthy(&client, "p").await;
        mounted(&client, "job", block("b")).await;
        let contained = Contained::start().await;
        let (kind, error) = refusal(opened(&client, "b", contained.userns()).await);
        assert!(kind == Kind::InvalidArgument && error.message.contains("block-device"), "{error}");
        unmount(&client, "b", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn only_root_maps_owners() {
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Shipped).await;
        let client = running(w).await;
        bus.has_csid().await;
        let root = bus.connect(ROOT).await;
        let capability = vec![std::collections::HashMap::from([
            ("access-mode".to_owned(), text("single-node-multi-writer")),
            ("attachment-mode".to_owned(), text("file-system")),
        ])];
        let spec = dict(vec![
            ("plugin", text("p")),
            ("external-id", text("v")),
            ("capabilities", capability.into()),
            ("suid", true.into()),
            ("dev", true.into()),
        ]);
        let register = vec![text(NAMESPACE), text("v"), spec];
        call(&root, MANAGER_PATH, MANAGER, "RegisterVolume", register).await.expect("a volume");
        chown(w.socket(), None, Some(GROUP)).unwrap();
        let member = raw::peer(MEMBER, &w.socket()).await.unwrap();
        let values = |options| vec![text(NAMESPACE), text("v"), text("job"), options];
        call(&member, MANAGER_PATH, MANAGER, "Mount", values(value("a{sv}"))).await.expect("a mount");
        let contained = Contained::start().await;
        let mapped = || {
            let fd = zbus::OwnedFd::from(contained.userns());
            dict(vec![("userns", zbus::Variant::Fd(fd.into()))])
        };
        call(&member, MANAGER_PATH, MANAGER, "OpenMount", values(value("a{sv}"))).await.expect("its tree");
        let refused = call(&member, MANAGER_PATH, MANAGER, "OpenMount", values(mapped())).await;
        let (name, why) = refused.unwrap_err();
        assert!(name == "org.csid1.Error.NotAuthorized" && why.contains("userns requires root"), "{why}");
        // Root may, also on the bus, where the helper receives descriptors.
        let answer = call(&root, MANAGER_PATH, MANAGER, "OpenMount", values(mapped())).await;
        let tree: zbus::OwnedFd = answer.expect("a tree").body().deserialize().unwrap();
        assert_eq!(rustix::fs::fstat(&tree).unwrap().st_uid, OUTSIDE);
        drop(tree);
        call(&member, MANAGER_PATH, MANAGER, "Unmount", values(value("a{sv}"))).await.expect("an unmount");
        w.nothing_left(&client).await;
    });
}
