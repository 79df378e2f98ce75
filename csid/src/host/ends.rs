//! The ends of file systems, by inotify. The kernel gives the number of a file system without a device to the next one, perhaps a
//! container's, as soon as the file system has ended. Then the number proves nothing any more, and neither do type and source:
//! each tmpfs has the same. A watch does not keep its file system from ending.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags, major, makedev, openat, statx};

use crate::host::caller::WaitingCaller;

/// The watches of csid's process. One inotify instance has them all: the kernel allows few instances for each user.
#[derive(Default)]
pub(super) struct Ends(Mutex<State>);

#[derive(Default)]
struct State {
    /// `None`: nothing was watched yet.
    inotify: Option<OwnedFd>,
    /// Requests for watches that are not answered yet.
    requests: usize,
    watches: HashMap<i32, Watch>,
}

#[derive(Default)]
struct Watch {
    /// 0: a request may have it in its answer.
    users: usize,
    has_ended: bool,
}

/// A watch for the end of one file system.
pub struct EndWatch {
    ends: Arc<Ends>,
    watch: i32,
}

/// What is known of the ends of a volume's file systems, by their numbers.
#[derive(Default)]
pub struct KnownEnds(HashMap<u64, Vec<Option<EndWatch>>>);

impl KnownEnds {
    /// Notes that a file system with this number was mounted, with its watch. `None`: its end will not be known.
    pub fn note(&mut self, device: u64, watch: Option<EndWatch>) {
        let of_device = self.0.entry(device).or_default();
        let is_same = |known: &Option<EndWatch>| {
            known.as_ref().map(|known| known.watch) == watch.as_ref().map(|new| new.watch)
        };
        if !of_device.iter().any(is_same) {
            of_device.push(watch);
        }
    }

    /// Returns whether each noted file system with this number has ended. Where that is not known, the answer is false.
    pub fn have_ended(&self, device: u64) -> bool {
        let Some(of_device) = self.0.get(&device) else { return false };
        of_device.iter().all(|watch| watch.as_ref().is_some_and(EndWatch::has_ended))
    }
}

impl EndWatch {
    fn has_ended(&self) -> bool {
        let mut state = self.ends.state();
        state.read();
        state.watches.get(&self.watch).is_some_and(|watch| watch.has_ended)
    }
}

impl Drop for EndWatch {
    fn drop(&mut self) {
        let mut state = self.ends.state();
        let Some(watch) = state.watches.get_mut(&self.watch) else { return };
        watch.users -= 1;
        if watch.users == 0 {
            state.tidy();
        }
    }
}

/// A request for a watch, until it is answered.
pub(super) struct EndRequest(Arc<Ends>);

impl Ends {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a request for a watch. Returns the inotify instance that the watch is added to.
    pub(super) fn request(self: &Arc<Self>) -> rustix::io::Result<(OwnedFd, EndRequest)> {
        let mut state = self.state();
        let inotify = match state.inotify.take() {
            Some(inotify) => inotify,
            None => inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
        };
        let copy = rustix::io::fcntl_dupfd_cloexec(&inotify, 0);
        state.inotify = Some(inotify);
        let copy = copy?;
        state.requests += 1;
        Ok((copy, EndRequest(Arc::clone(self))))
    }
}

impl EndRequest {
    /// Takes the answer.
    pub(super) fn answered(self, watch: i32) -> EndWatch {
        self.0.state().watches.entry(watch).or_default().users += 1;
        EndWatch { ends: Arc::clone(&self.0), watch }
    }
}

impl Drop for EndRequest {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.requests -= 1;
        state.tidy();
    }
}

impl State {
    /// Notes the ends until now. An event that the kernel dropped leaves its file system unended.
    fn read(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(inotify, &mut buffer);
        while let Ok(event) = reader.next() {
            if !event.events().contains(ReadFlags::UNMOUNT) {
                continue;
            }
            if let Some(watch) = self.watches.get_mut(&event.wd()) {
                watch.has_ended = true;
            } else if self.requests > 0 {
                self.watches.insert(event.wd(), Watch { users: 0, has_ended: true });
            }
        }
    }

    /// Removes the watches without a user, unless a request may have one of them in its answer.
    fn tidy(&mut self) {
        if self.requests > 0 {
            return;
        }
        self.read();
        let Some(inotify) = &self.inotify else { return };
        for (id, _) in self.watches.extract_if(|_, watch| watch.users == 0) {
            // A file system that has ended has removed its watch.
            let _ = inotify::remove_watch(inotify, id);
        }
    }
}

/// Watches the file system without a device whose root is mounted at `path`, by the inotify instance. Returns its number and the watch.
/// `None`: there is none, or it cannot be watched, or the caller waits no more.
pub(super) fn watch(inotify: impl AsFd, path: &Path, caller: &WaitingCaller<'_>) -> Option<(u64, i32)> {
    let root = openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let found = statx(&root, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    let device = makedev(found.stx_dev_major, found.stx_dev_minor);
    let is_root = found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    if !is_root || major(device) != 0 || caller.check(path).is_err() {
        return None;
    }
    let link = format!("/proc/self/fd/{}", root.as_raw_fd());
    Some((device, inotify::add_watch(inotify, link, WatchFlags::DELETE_SELF).ok()?))
}

#[cfg(test)]
mod tests {
    use rustix::mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
    };

    use super::*;

    /// Stands for the number of a file system.
    const DEVICE: u64 = 5;

    /// Runs `test` in a mount namespace of its own, with a tmpfs at `a` and its directory bound at `b`.
    fn apart(test: impl FnOnce(&Path, &Arc<Ends>) + Send) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let run = || {
            // SAFETY: only this thread, which ends with the test, is in the new namespace.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            for name in ["a", "b"] {
                std::fs::create_dir(root.join(name)).unwrap();
            }
            mount("tmpfs", root.join("a"), "tmpfs", MountFlags::empty(), None).unwrap();
            std::fs::create_dir(root.join("a/inside")).unwrap();
            mount_bind(root.join("a"), root.join("b")).unwrap();
            test(root, &Arc::default());
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap());
    }

    /// Watches as a worker of the helper does. `None`: the worker has not watched.
    fn watched(ends: &Arc<Ends>, path: &Path) -> Option<EndWatch> {
        let (inotify, request) = ends.request().unwrap();
        let (_here, there) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let (device, found) = watch(inotify, path, &WaitingCaller::new(there.as_fd()))?;
        assert_eq!(device, number(path));
        Some(request.answered(found))
    }

    fn known(watches: impl IntoIterator<Item = Option<EndWatch>>) -> KnownEnds {
        let mut known = KnownEnds::default();
        watches.into_iter().for_each(|watch| known.note(DEVICE, watch));
        known
    }

    fn number(path: &Path) -> u64 {
        rustix::fs::stat(path).unwrap().st_dev
    }

    fn mounted(path: &Path) {
        mount("tmpfs", path, "tmpfs", MountFlags::empty(), None).unwrap();
    }

    fn gone(path: &Path) {
        unmount(path, UnmountFlags::empty()).unwrap();
    }

    #[test]
    fn file_system_ends_with_its_last_mount() {
        apart(|root, ends| {
            let [a, b] = ["a", "b"].map(|name| root.join(name));
            let [first, second] = [(); 2].map(|()| known([watched(ends, &a)]));
            gone(&a);
            assert!(!first.have_ended(DEVICE), "another mount has it");
            drop(first);
            gone(&b);
            assert!(second.have_ended(DEVICE), "the watch is kept for its other user");
            assert!(!second.have_ended(DEVICE + 1), "that one was not watched");
            drop(second);
            assert!(ends.state().watches.is_empty());
        });
    }

    #[test]
    fn end_counts_for_all_that_had_the_number() {
        apart(|root, ends| {
            let [a, b] = ["a", "b"].map(|name| root.join(name));
            let mut ended = known([watched(ends, &a), watched(ends, &b)]);
            assert_eq!(ended.0[&DEVICE].len(), 1, "both are one file system");
            gone(&a);
            gone(&b);
            assert!(ended.have_ended(DEVICE));
            mounted(&a);
            ended.note(DEVICE, watched(ends, &a));
            assert!(!ended.have_ended(DEVICE), "the next one is mounted");
            gone(&a);
            assert!(ended.have_ended(DEVICE));
            ended.note(DEVICE, None);
            assert!(!ended.have_ended(DEVICE), "the end of one of them will not be known");
        });
    }

    /// The answer of a request may have the watch of another volume, which gives its watch up meanwhile.
    #[test]
    fn watch_is_kept_while_an_answer_may_have_it() {
        for has_ended in [true, false] {
            apart(|root, ends| {
                let other = watched(ends, &root.join("a")).unwrap();
                let (_inotify, request) = ends.request().unwrap();
                let found = other.watch;
                let end = || ["a", "b"].map(|name| gone(&root.join(name)));
                if has_ended {
                    end();
                }
                drop(other);
                let watch = request.answered(found);
                if !has_ended {
                    end();
                }
                assert!(watch.has_ended());
                drop(watch);
                assert!(ends.state().watches.is_empty());
            });
        }
    }

    #[test]
    fn what_is_no_root_without_a_device_is_not_watched() {
        apart(|root, ends| {
            for name in ["a/inside", "", "nothing"] {
                assert!(watched(ends, &root.join(name)).is_none(), "{name}");
            }
            let _used = watched(ends, &root.join("a"));
            assert_eq!(ends.state().requests, 0);
        });
    }
}
