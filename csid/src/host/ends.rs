//! The ends of file systems, by inotify. The kernel gives the number of a file system without a device to the next one, perhaps a
//! container's, as soon as the file system has ended. Then the number proves nothing any more, and neither do type and source:
//! each tmpfs has the same. A watch does not keep its file system from ending.

use std::collections::{HashMap, HashSet};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags, major, makedev, openat, statx};

/// The watches of csid's process. One inotify instance has them all: the kernel allows few instances for each user.
#[derive(Default)]
pub(super) struct Ends(Mutex<State>);

#[derive(Default)]
struct State {
    /// `None`: nothing was watched yet.
    inotify: Option<OwnedFd>,
    /// Requests for watches that are not answered yet.
    requests: usize,
    users: HashMap<i32, usize>,
    /// The watches whose file system has ended, of those that have a user or may be in the answer to a request.
    ended: HashSet<i32>,
}

/// A watch for the end of the file system that has the number `device`.
pub struct EndWatch {
    ends: Arc<Ends>,
    device: u64,
    watch: i32,
}

/// Watches of a volume's file systems.
#[derive(Default)]
pub struct EndWatches(Vec<EndWatch>);

impl EndWatches {
    pub fn add(&mut self, watches: Vec<EndWatch>) {
        self.0.extend(watches);
    }

    /// Returns whether each watched file system with this number has ended. Without a watch it is not known, and the answer is false.
    pub fn have_ended(&self, device: u64) -> bool {
        let mut of_device = self.0.iter().filter(|watch| watch.device == device).peekable();
        of_device.peek().is_some() && of_device.all(EndWatch::has_ended)
    }
}

impl EndWatch {
    fn has_ended(&self) -> bool {
        let mut state = self.ends.state();
        state.read();
        state.ended.contains(&self.watch)
    }
}

impl Drop for EndWatch {
    fn drop(&mut self) {
        let mut state = self.ends.state();
        let left = state.users.get(&self.watch).map_or(0, |users| users - 1);
        if left > 0 {
            state.users.insert(self.watch, left);
            return;
        }
        state.read();
        state.users.remove(&self.watch);
        if !state.ended.contains(&self.watch)
            && let Some(inotify) = &state.inotify
        {
            // A file system that ends meanwhile has removed its watch.
            let _ = inotify::remove_watch(inotify, self.watch);
        } else if state.requests == 0 {
            state.ended.remove(&self.watch);
        }
    }
}

/// A request for watches, until it is answered.
pub(super) struct EndRequest(Arc<Ends>);

impl Ends {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a request for watches. Returns the inotify instance that they are added to.
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
    /// Takes the answer: the numbers of file systems, each with its watch.
    pub(super) fn answered(self, found: Vec<(u64, i32)>) -> Vec<EndWatch> {
        let mut state = self.0.state();
        let mut watch = |(device, watch)| {
            *state.users.entry(watch).or_default() += 1;
            EndWatch { ends: Arc::clone(&self.0), device, watch }
        };
        let watches = found.into_iter().map(&mut watch).collect();
        drop(state);
        watches
    }
}

impl Drop for EndRequest {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.requests -= 1;
        let State { requests, users, ended, .. } = &mut *state;
        if *requests == 0 {
            ended.retain(|watch| users.contains_key(watch));
        }
    }
}

impl State {
    /// Notes the ends until now. An event that the kernel dropped leaves its file system unended.
    fn read(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(inotify, &mut buffer);
        while let Ok(event) = reader.next() {
            let watch = event.wd();
            if event.events().contains(ReadFlags::UNMOUNT)
                && (self.requests > 0 || self.users.contains_key(&watch))
            {
                self.ended.insert(watch);
            }
        }
    }
}

/// Watches the file systems without a device whose roots are mounted at these paths, by the inotify instance. Returns their numbers and
/// watches.
pub(super) fn watch(inotify: impl AsFd, paths: &[PathBuf]) -> Vec<(u64, i32)> {
    paths.iter().filter_map(|path| watch_at(inotify.as_fd(), path)).collect()
}

fn watch_at(inotify: impl AsFd, path: &Path) -> Option<(u64, i32)> {
    let root = openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let found = statx(&root, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    let device = makedev(found.stx_dev_major, found.stx_dev_minor);
    let is_root = found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    if !is_root || major(device) != 0 {
        return None;
    }
    let link = format!("/proc/self/fd/{}", root.as_raw_fd());
    let watch = inotify::add_watch(inotify, link, WatchFlags::DELETE_SELF).ok()?;
    Some((device, watch))
}

#[cfg(test)]
mod tests {
    use rustix::mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
    };

    use super::*;

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

    fn watched(ends: &Arc<Ends>, paths: &[PathBuf]) -> EndWatches {
        let (inotify, request) = ends.request().unwrap();
        EndWatches(request.answered(watch(inotify, paths)))
    }

    fn number(path: &Path) -> u64 {
        rustix::fs::stat(path).unwrap().st_dev
    }

    fn gone(path: &Path) {
        unmount(path, UnmountFlags::empty()).unwrap();
    }

    #[test]
    fn file_system_ends_with_its_last_mount() {
        apart(|root, ends| {
            let [a, b] = ["a", "b"].map(|name| root.join(name));
            let device = number(&a);
            let [first, mut second] = [(); 2].map(|()| watched(ends, std::slice::from_ref(&a)));
            gone(&a);
            assert!(!first.have_ended(device), "another mount has it");
            drop(first);
            gone(&b);
            assert!(second.have_ended(device), "the watch is kept for its other user");
            assert!(!second.have_ended(device + 1), "that one was not watched");
            mount("tmpfs", &a, "tmpfs", MountFlags::empty(), None).unwrap();
            second.add(watched(ends, std::slice::from_ref(&a)).0);
            second.0.iter_mut().for_each(|watch| watch.device = device);
            assert!(!second.have_ended(device), "one of two that had this number has not ended");
            drop(second);
            assert!(ends.state().users.is_empty() && ends.state().ended.is_empty());
        });
    }

    #[test]
    fn end_before_the_answer_counts() {
        apart(|root, ends| {
            let [a, b] = ["a", "b"].map(|name| root.join(name));
            let device = number(&a);
            let others = watched(ends, std::slice::from_ref(&b));
            let (inotify, request) = ends.request().unwrap();
            let found = watch(inotify, std::slice::from_ref(&a));
            gone(&a);
            gone(&b);
            assert!(others.have_ended(device));
            drop(others);
            assert!(EndWatches(request.answered(found)).have_ended(device));
        });
    }

    #[test]
    fn what_is_no_root_without_a_device_is_not_watched() {
        apart(|root, ends| {
            let [inside, plain, nothing] = ["a/inside", "", "nothing"].map(|name| root.join(name));
            assert!(watched(ends, &[inside, plain, nothing]).0.is_empty());
        });
    }
}
