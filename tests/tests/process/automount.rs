//! A target that is an automount point: csid mounts for the automount's daemon, while everybody who walks there waits for that mount.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use csid_client::{Kind, MountOptions, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::automount::{Asked, Automount, reader};
use csid_tests::fault::Fault;
use csid_tests::kernel;
use csid_tests::world::{World, eventually, refusal, world};
use rustix::fs::{CWD, Mode, OFlags};

/// Far below the deadline of a call of the kernel's that hangs.
const AT_ONCE: Duration = Duration::from_secs(3);

fn text(path: &Path) -> Option<String> {
    Some(path.to_str().unwrap().to_owned())
}

fn at(target: &Path) -> MountOptions {
    MountOptions { target: text(target), ..within(Duration::from_secs(20), inline("v")) }
}

fn with(fd: OwnedFd, options: MountOptions) -> MountOptions {
    MountOptions { target_fd: Some(fd.into()), ..options }
}

fn uncovered(target: &Path, fd: OwnedFd) -> UnmountOptions {
    UnmountOptions {
        target: text(target),
        target_fd: Some(fd.into()),
        deadline_usec: Some(20_000_000),
        ..UnmountOptions::default()
    }
}

fn target_of(w: &World) -> std::path::PathBuf {
    let target = w.path("targets/t");
    fs::create_dir(&target).unwrap();
    target
}

#[test]
fn pending_automount_gets_its_mount_by_descriptor() {
    world(async |w| {
        let client = running(w).await;
        let target = target_of(w);
        let mut automount = Automount::at(&target);
        let waiting = reader(&target.join("file"));
        let request = automount.request();
        assert_eq!(request.asked, Asked::ToMount);

        // The fault: without a descriptor the walk waits for the mount that it is to make.
        let begun = Instant::now();
        let (kind, error) = refusal(mount(&client, "job", at(&target)).await);
        assert_eq!(kind, Kind::InvalidArgument, "{error}");
        assert!(error.message.contains("is an automount point"), "{error}");
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        assert_eq!(w.plugin("p").calls().iter().filter(|call| !call.call.volume.is_empty()).count(), 0);

        let source = mounted(&client, "job", with(automount.target_fd(), at(&target))).await;
        fs::write(source.join("file"), "data").unwrap();
        assert_eq!(kernel::stacked(&target).unwrap(), 2, "the automount and the volume");
        let is_healthy = async |client| row(client, "v", "job").await.unwrap().healthy;
        assert!(is_healthy(&client).await);
        mounted(&client, "job", with(automount.target_fd(), at(&target))).await;

        w.kill();
        let client = w.start().await;
        settled(&client).await;
        assert_eq!(state(&client, "v", "job").await, "mounted");
        assert!(is_healthy(&client).await, "the mount table shows it");
        mounted(&client, "job", with(automount.target_fd(), at(&target))).await;
        assert!(begun.elapsed() < Duration::from_secs(15), "nothing waits: {:?}", begun.elapsed());

        automount.answer(request);
        let read = waiting.wait_with_output().unwrap();
        assert_eq!(String::from_utf8(read.stdout).unwrap(), "data");
        // The automount has ended: csid walks to the target.
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(kernel::stacked(&target).unwrap(), 1, "the automount stays");
        drop(automount);
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_of_a_pending_automount_is_undone() {
    world(async |w| {
        let fault = Fault::of(w);
        let client = running(w).await;
        let target = target_of(w);
        let mut automount = Automount::at(&target);
        let waiting = reader(&target.join("file"));
        let request = automount.request();
        fault.arm("bind.held");
        let options = MountOptions {
            operation_id: Some("of-the-helper".to_owned()),
            ..with(automount.target_fd(), at(&target))
        };
        let (mounted, ()) = tokio::join!(mount(&client, "job", options), async {
            fault.reached("bind").await;
            client.cancel_operation("of-the-helper").await.unwrap();
            fault.arm("unbind.after:1");
        });
        assert_eq!(refusal(mounted).0, Kind::Cancelled);
        eventually("what was bound is unbound, and csid killed", async || w.dead()).await;
        assert!(fault.killed_at("unbind.after"));
        assert_eq!(kernel::stacked(&target).unwrap(), 1, "the automount is still pending, and bare");
        fault.disarm();
        let client = w.start().await;
        eventually("no row is left", async || state(&client, "v", "job").await == "none").await;
        automount.fail(request);
        let read = waiting.wait_with_output().unwrap();
        assert!(!read.status.success());
        drop(automount);
        w.nothing_left(&client).await;
    });
}

#[test]
fn bind_of_a_killed_csid_is_undone_after_the_pending() {
    world(async |w| {
        let fault = Fault::of(w);
        let client = running(w).await;
        let target = target_of(w);
        let mut automount = Automount::at(&target);
        let waiting = reader(&target.join("file"));
        let request = automount.request();
        fault.arm("bind.after:1");
        assert!(mount(&client, "job", with(automount.target_fd(), at(&target))).await.is_err());
        eventually("csid is killed", async || w.dead()).await;
        assert_eq!(kernel::stacked(&target).unwrap(), 2);
        fault.disarm();

        // Nothing but the daemon's group can go there: csid says so, and does not wait.
        let client = w.start().await;
        settled(&client).await;
        let begun = Instant::now();
        let (kind, error) = refusal(mount(&client, "job", with(automount.target_fd(), at(&target))).await);
        assert!(error.message.contains("an automount is under way"), "{kind:?} {error}");
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        assert_eq!(kernel::stacked(&target).unwrap(), 2);

        automount.answer(request);
        assert!(!waiting.wait_with_output().unwrap().status.success(), "there is no such file");
        eventually("csid walks to the target again", async || kernel::stacked(&target).unwrap() == 1).await;
        mounted(&client, "job", with(automount.target_fd(), at(&target))).await;
        unmount(&client, "v", "job").await.unwrap();
        drop(automount);
        w.nothing_left(&client).await;
    });
}

#[test]
fn expired_automount_is_unmounted_by_its_daemon() {
    world(async |w| {
        let client = running(w).await;
        let target = target_of(w);
        let mut automount = Automount::at(&target);
        let source = {
            let waiting = reader(&target.join("file"));
            let request = automount.request();
            let source = mounted(&client, "job", with(automount.target_fd(), at(&target))).await;
            fs::write(source.join("file"), "data").unwrap();
            automount.answer(request);
            assert!(waiting.wait_with_output().unwrap().status.success());
            source
        };
        // csid's copies of the descriptors are closed by another process.
        let expiry = automount.expire();
        let request = automount.request();
        assert_eq!(request.asked, Asked::ToUnmount);

        let begun = Instant::now();
        let asked = UnmountOptions { deadline_usec: Some(20_000_000), ..UnmountOptions::default() };
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "job", asked).await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert!(error.message.contains("an automount is under way"), "{error}");
        let still = uncovered(&target, automount.target_fd());
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "job", still).await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert_eq!(error.details.obstacle.as_deref(), Some("bound-target"), "{error}");
        assert_eq!(state(&client, "v", "job").await, "mounted");
        assert_eq!(fs::read_to_string(source.join("file")).unwrap(), "data");

        automount.unmount();
        let gone = uncovered(&target, automount.target_fd());
        client.unmount(NAMESPACE, "v", "job", gone).await.unwrap();
        assert!(begun.elapsed() < AT_ONCE, "nothing waits: {:?}", begun.elapsed());
        assert_eq!(state(&client, "v", "job").await, "none");
        automount.answer(request);
        expiry.join().unwrap();
        drop(automount);
        w.nothing_left(&client).await;
    });
}

#[test]
fn descriptor_of_another_place_changes_nothing() {
    world(async |w| {
        let client = running(w).await;
        let target = target_of(w);
        let other = w.path("targets/other");
        fs::create_dir(&other).unwrap();
        let open = |path: &Path, flags| rustix::fs::openat(CWD, path, flags, Mode::empty()).unwrap();
        let covered = open(&other, OFlags::PATH);
        kernel_tmpfs(&other);
        let gone = w.path("targets/gone");
        fs::create_dir(&gone).unwrap();
        let removed = open(&gone, OFlags::PATH);
        fs::remove_dir(&gone).unwrap();
        let wrong = [
            (&target, open(&other, OFlags::PATH), "another directory"),
            (&target, open(&target, OFlags::RDONLY), "no O_PATH"),
            (&other, covered, "below what is mounted there"),
            (&gone, removed, "removed"),
            (&target, rustix::pipe::pipe().unwrap().0, "a pipe"),
        ];
        for (target, fd, what) in wrong {
            let (kind, error) = refusal(mount(&client, "job", with(fd, at(target))).await);
            assert_eq!(kind, Kind::InvalidArgument, "{what}: {error}");
            assert!(error.message.contains("target-fd is no descriptor of"), "{what}: {error}");
        }
        let without = MountOptions { target: None, ..with(open(&target, OFlags::PATH), at(&target)) };
        assert_eq!(refusal(mount(&client, "job", without).await).0, Kind::InvalidArgument);
        let (kind, error) =
            refusal(mount(&client, "job", with(open(&other, OFlags::PATH), at(&other))).await);
        assert_eq!(kind, Kind::Busy, "something else is mounted there: {error}");
        assert_eq!(kernel::stacked(&target).unwrap(), 0);
        // Another process closes csid's copy of the descriptor.
        rustix::mount::unmount(&other, rustix::mount::UnmountFlags::DETACH).unwrap();

        // A target without an automount may be given so, too.
        mounted(&client, "job", with(open(&target, OFlags::PATH), at(&target))).await;
        assert_eq!(kernel::stacked(&target).unwrap(), 1);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

fn kernel_tmpfs(path: &Path) {
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("test", path, "tmpfs", flags, c"").unwrap();
}
