//! Compares the answers about csid's own mounts with mountinfo, in a mount namespace of the test's own.

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, mount_move, unmount,
};

use super::*;

/// The numbers of a question before the last list and read, and of a later one.
const BEFORE: u64 = 1;
const LATER: u64 = 2;

/// Runs `test` in a mount namespace of its own, with two file systems: one at `a`, and one at `b` with a bind of its directory `x`
/// at `c`. Not where the kernel lacks the calls.
fn apart(test: impl FnOnce(&Path, &mut Known) + Send) {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let run = || {
        // SAFETY: only this thread, which ends with the test, is in the new namespace.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        for name in ["a", "b"] {
            std::fs::create_dir(root.join(name)).unwrap();
            mount("tmpfs", root.join(name), "tmpfs", MountFlags::empty(), None).unwrap();
        }
        for name in ["b/x", "b/y", "c", "d"] {
            std::fs::create_dir(root.join(name)).unwrap();
        }
        mount_bind(root.join("b/x"), root.join("c")).unwrap();
        let mut known = Known::default();
        match known.prove() {
            Ok(()) => test(root, &mut known),
            Err(error) => eprintln!("skipped: the kernel does not show each mount by its calls: {error}"),
        }
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap());
}

fn at_paths<'a>(at: &[&'a Path]) -> OwnPaths<'a> {
    paths_of(at, &[])
}

fn paths_of<'a>(at: &[&'a Path], mounted: &[&Path]) -> OwnPaths<'a> {
    let own = |path: &&'a Path| OwnPath { path: path.as_os_str(), is_mounted: mounted.contains(path) };
    OwnPaths { exact: at.iter().map(own).collect(), ..OwnPaths::default() }
}

fn refresh(known: &mut Known) {
    known.refresh(usize::MAX, BEFORE).unwrap();
}

/// Asks for the volume that is mounted at these paths.
fn ask(known: &mut Known, at: &[&Path], mounted: &[&Path], shown: &[Shown]) -> Option<Vec<PathBuf>> {
    refresh(known);
    let found = known.about(&paths_of(at, mounted), shown, LATER, false).unwrap()?;
    let all = table::entries().unwrap();
    for entry in &found {
        assert!(all.iter().any(|one| is_same(one, entry)), "mountinfo shows another one: {entry:?}");
    }
    Some(found.into_iter().map(|entry| entry.path).collect())
}

#[test]
fn mounts_of_the_volume_are_found_alone() {
    apart(|root, known| {
        let [a, b, c] = ["a", "b", "c"].map(|name| root.join(name));
        assert_eq!(ask(known, &[&a], &[&a], &[]), Some(vec![a.clone()]));
        assert_eq!(ask(known, &[&b, &c], &[&b, &c], &[]), Some(vec![b.clone(), c.clone()]));
        assert_eq!(ask(known, &[&c], &[&c], &[]), Some(vec![c]), "the whole is no part of it");
        assert_eq!(ask(known, &[&b], &[&b], &[]), None, "the bind is at a foreign path");
        assert_eq!(ask(known, &[Path::new("/nowhere")], &[], &[]), Some(vec![]));
    });
}

/// Makes more mounts of the second file system than csid asks for one by one.
fn crowd(root: &Path) {
    for number in 0..=OTHERS {
        let [from, to] = ["b", "crowd"].map(|name| root.join(format!("{name}/{number}")));
        std::fs::create_dir_all(&from).unwrap();
        std::fs::create_dir_all(&to).unwrap();
        mount_bind(from, to).unwrap();
    }
}

/// Returns whether csid has to read all directories before it knows the mounts at `at`.
fn reads_first(known: &mut Known, at: &Path) -> bool {
    refresh(known);
    let answer = known.about(&at_paths(&[at]), &[], LATER, false);
    answer.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

fn use_until(known: &mut Known, until: Instant) {
    known.read.as_mut().unwrap().until = until;
}

/// Reads all directories, and uses them for longer than the test takes.
fn read(known: &mut Known) {
    refresh(known);
    known.read_roots(BEFORE).unwrap();
    use_until(known, Instant::now() + END);
}

#[test]
fn new_bind_among_many_mounts_is_found_at_once() {
    apart(|root, known| {
        crowd(root);
        let [b, c, d] = ["b", "c", "d"].map(|name| root.join(name));
        assert!(reads_first(known, &c));
        read(known);
        assert_eq!(ask(known, &[&c], &[&c], &[]), Some(vec![c.clone()]), "none of the others");
        std::fs::create_dir(b.join("x/inside")).unwrap();
        mount_bind(b.join("x/inside"), &d).unwrap();
        assert_eq!(ask(known, &[&c], &[&c], &[]), None, "a bind of it is at a foreign path");
        assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]), Some(vec![c, d.clone()]));
        // Of the whole file system each mount is a part.
        let all = OwnPaths { below: vec![root], ..at_paths(&[&b]) };
        assert!(known.about(&all, &[], LATER, false).unwrap().is_none(), "too many to ask for each");
        for number in 0..4 {
            unmount(root.join(format!("crowd/{number}")), UnmountFlags::empty()).unwrap();
        }
        refresh(known);
        let found = known.about(&all, &[], LATER, false).unwrap().expect("few enough");
        assert_eq!(found.len(), 3 + OTHERS + 1 - 4, "{found:?}");
    });
}

#[test]
fn rename_among_many_mounts_is_found_by_the_next_read() {
    apart(|root, known| {
        crowd(root);
        let [b, c] = ["b", "c"].map(|name| root.join(name));
        read(known);
        // A directory that another mount shows comes into the volume's one.
        std::fs::rename(b.join("0"), b.join("x/0")).unwrap();
        assert_eq!(ask(known, &[&c], &[&c], &[]), Some(vec![c.clone()]), "csid uses what it has read");
        let fresh = OwnPaths { needs_read: true, ..at_paths(&[&c]) };
        assert!(known.about(&fresh, &[], LATER, false).is_err(), "this question does not");
        use_until(known, Instant::now());
        assert!(reads_first(known, &c), "csid has used it for long enough");
        read(known);
        let answer = known.about(&fresh, &[], BEFORE, false).unwrap();
        assert!(answer.is_none(), "the bind is at a foreign path");
        assert!(known.about(&fresh, &[], LATER, false).is_err(), "a later question needs another read");
        assert_eq!(ask(known, &[&c], &[&c], &[]), None, "the bind is at a foreign path");
        // The volume's own directory is renamed: what is known of the others may be older.
        std::fs::rename(b.join("x"), b.join("z")).unwrap();
        assert!(reads_first(known, &c));
        assert!(known.about(&fresh, &[], BEFORE, false).is_err(), "another question's read is older");
        read(known);
        assert!(!reads_first(known, &c));
    });
}

#[test]
fn questions_that_wait_share_a_list() {
    apart(|root, known| {
        let known =
            KnownMounts { known: Arc::new(Mutex::new(std::mem::take(known))), asked: AtomicU64::new(0) };
        let [b, c, d] = ["b", "c", "d"].map(|name| root.join(name));
        let paths = at_paths(&[&c]);
        let ask = async || known.about(&paths, &[]).await.map(|found| found.len());
        let questions = async {
            let busy = known.known.lock().await;
            let (mut first, mut second) = (Box::pin(ask()), Box::pin(ask()));
            assert!(futures_util::poll!(&mut first).is_pending());
            assert!(futures_util::poll!(&mut second).is_pending());
            drop(busy);
            assert_eq!(first.await, Some(1));
            mount_bind(b.join("x"), &d).unwrap();
            assert_eq!(second.await, Some(1), "the bind came after the question");
            assert_eq!(ask().await, None, "the bind is at a foreign path");
        };
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(questions);
    });
}

#[test]
fn list_is_right_until_a_mount_comes_or_goes() {
    apart(|root, known| {
        let [b, d] = ["b", "d"].map(|name| root.join(name));
        refresh(known);
        assert!(!known.is_unchanged(), "the kernel was not asked before that list");
        refresh(known);
        assert!(known.is_unchanged() && known.is_unchanged());
        mount_bind(b.join("x"), &d).unwrap();
        assert!(!known.is_unchanged() && !known.is_unchanged(), "it counts until the next list");
        refresh(known);
        assert!(known.is_unchanged());
        mount_move(&d, root.join("b/y")).unwrap();
        assert!(!known.is_unchanged());
        refresh(known);
        unmount(root.join("b/y"), UnmountFlags::empty()).unwrap();
        assert!(!known.is_unchanged());
        refresh(known);
        assert!(known.is_unchanged());
        assert!(known.refresh(0, BEFORE).is_err(), "the list is longer");
        assert!(!known.is_unchanged(), "the last list failed");
    });
}

#[test]
fn rename_between_list_and_question_is_seen() {
    among(1, |root, rows, known| {
        // From the second question on the kernel is asked for changes.
        for _ in 0..2 {
            assert_eq!(rows.roots(known, 0, true), only("/x"));
        }
        for path in &rows.paths {
            unmount(path, UnmountFlags::empty()).unwrap();
            mount_bind(root.join("b/x"), path).unwrap();
        }
        let mut dropped = known.known.blocking_lock();
        assert!(!dropped.is_unchanged());
        refresh(&mut dropped);
        drop(dropped);
        std::fs::rename(root.join("b/x"), root.join("b/z")).unwrap();
        assert_eq!(rows.roots(known, 0, true), only("/z"));
    });
}

#[test]
fn bind_gone_since_the_list_needs_the_whole_table() {
    apart(|root, known| {
        let [b, c, d] = ["b", "c", "d"].map(|name| root.join(name));
        for crowded in [false, true] {
            if crowded {
                crowd(root);
            }
            mount_bind(b.join("x"), &d).unwrap();
            read(known);
            unmount(&d, UnmountFlags::empty()).unwrap();
            // Another bind may have come before this one went.
            assert!(known.about(&at_paths(&[&c]), &[], LATER, false).unwrap().is_none());
            assert_eq!(ask(known, &[&c], &[&c], &[]), Some(vec![c.clone()]), "it is not in the next list");
        }
    });
}

#[test]
fn bind_of_a_renamed_directory_is_found() {
    apart(|root, known| {
        let [b, c, d] = ["b", "c", "d"].map(|name| root.join(name));
        mount_bind(b.join("x"), &d).unwrap();
        assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]).unwrap().len(), 2);
        std::fs::rename(b.join("x"), b.join("z")).unwrap();
        assert_eq!(ask(known, &[&c], &[&c], &[]), None, "another bind is at a foreign path");
        assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]).unwrap().len(), 2);
        // A directory comes into the volume's one.
        mount_bind(b.join("y"), root.join("a")).unwrap();
        assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]).unwrap().len(), 2);
        std::fs::rename(b.join("y"), b.join("z/y")).unwrap();
        assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]), None);
    });
}

#[test]
fn moved_mount_needs_the_whole_table() {
    apart(|root, known| {
        let [a, d] = ["a", "d"].map(|name| root.join(name));
        assert_eq!(ask(known, &[&a], &[&a], &[]), Some(vec![a.clone()]));
        mount_move(&a, &d).unwrap();
        assert_eq!(ask(known, &[&d], &[&d], &[]), None);
        unmount(&d, UnmountFlags::empty()).unwrap();
        assert_eq!(ask(known, &[&d], &[], &[]), Some(vec![]));
    });
}

/// Binds `from` below `at`, at a path that is too long for an answer.
fn mount_at_long_path(from: &Path, at: &Path) {
    std::fs::create_dir_all(at).unwrap();
    // Longer than a path may be in one call.
    let below = ["n".repeat(255).as_str()].repeat(14).join("/");
    let mut directory = std::fs::File::open(at).unwrap();
    for _ in 0..4 {
        let link = format!("/proc/self/fd/{}/{below}", directory.as_raw_fd());
        std::fs::create_dir_all(&link).unwrap();
        directory = std::fs::File::open(&link).unwrap();
    }
    mount_bind(from, format!("/proc/self/fd/{}", directory.as_raw_fd())).unwrap();
}

#[test]
fn mount_at_a_long_path_keeps_the_others_known() {
    apart(|root, known| {
        let a = root.join("a");
        mount_at_long_path(&root.join("c"), &a);
        refresh(known);
        let facts = known.mounts.len();
        assert_eq!(ask(known, &[&a], &[&a], &[]), Some(vec![a.clone()]));
        assert_eq!(known.mounts.len(), facts);
        // It may be of this volume, and only mountinfo has its path.
        let c = root.join("c");
        let found = known.about(&at_paths(&[&c]), &[], LATER, false);
        assert!(is_too_long(&found.unwrap_err()));
    });
}

/// The paths of a volume's rows below a tmpfs of csid's: those of the consumers, then those of the plugin.
struct Rows {
    plugin: PathBuf,
    paths: Vec<PathBuf>,
    count: usize,
    /// Where one of the consumers wants its mount.
    target: PathBuf,
    homes: [PathBuf; 2],
}

impl Rows {
    /// Mounts the directory `x` of the second file system at both paths of so many rows.
    fn new(root: &Path, count: usize) -> Self {
        let plugin = root.join("plugin");
        let live = plugin.join("live");
        std::fs::create_dir_all(&live).unwrap();
        mount("tmpfs", &live, "tmpfs", MountFlags::empty(), None).unwrap();
        let path = |number: usize| match number < count {
            true => live.join(format!("publish/V/{number}/volume")),
            false => live.join(format!("private/V/{}", number - count)),
        };
        let paths = (0..2 * count).map(path).collect();
        let homes = ["publish", "private"].map(|kind| live.join(kind).join("V"));
        let rows = Rows { plugin, paths, count, target: root.join("target"), homes };
        std::fs::create_dir(&rows.target).unwrap();
        for path in &rows.paths {
            std::fs::create_dir_all(path).unwrap();
            mount_bind(root.join("b/x"), path).unwrap();
        }
        rows
    }

    fn published(&self, row: usize) -> &Path {
        &self.paths[row]
    }

    fn private(&self, row: usize) -> &Path {
        &self.paths[self.count + row]
    }

    /// Returns the paths for a question about one row. `mounted`: whether it has its mounts for certain.
    fn question(&self, row: usize, mounted: bool) -> OwnPaths<'_> {
        let own = |path, is_mounted| OwnPath { path: Path::as_os_str(path), is_mounted };
        OwnPaths {
            exact: self.paths.iter().chain([&self.target]).map(|path| own(path, false)).collect(),
            asked: vec![own(self.published(row), mounted), own(self.private(row), mounted)],
            homes: self.homes.iter().map(PathBuf::as_path).collect(),
            apart: vec![self.target.as_os_str()],
            below: vec![&self.plugin],
            ..OwnPaths::default()
        }
    }

    /// Asks what there is of the volume.
    fn ask(&self, known: &KnownMounts, row: usize, mounted: bool) -> Option<Vec<MountEntry>> {
        self.answer(known, &self.question(row, mounted))
    }

    fn answer(&self, known: &KnownMounts, paths: &OwnPaths<'_>) -> Option<Vec<MountEntry>> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let found = runtime.block_on(known.about(paths, &[]))?;
        let all = table::entries().unwrap();
        for entry in &found {
            assert!(all.iter().any(|one| is_same(one, entry)), "mountinfo shows another one: {entry:?}");
        }
        Some(found)
    }

    /// Returns the directories that the volume's mounts show.
    fn roots(&self, known: &KnownMounts, row: usize, mounted: bool) -> Option<BTreeSet<PathBuf>> {
        Some(self.ask(known, row, mounted)?.into_iter().map(|entry| entry.root).collect())
    }
}

/// Runs `test` as [`apart`] does, with a volume of so many rows.
fn among(count: usize, test: impl FnOnce(&Path, &Rows, &KnownMounts) + Send) {
    apart(|root, known| {
        let known = Arc::new(Mutex::new(std::mem::take(known)));
        // The bind of the directory would be a foreign one.
        unmount(root.join("c"), UnmountFlags::empty()).unwrap();
        test(root, &Rows::new(root, count), &KnownMounts { known, asked: AtomicU64::new(0) });
    });
}

fn only(root: &str) -> Option<BTreeSet<PathBuf>> {
    Some(BTreeSet::from([PathBuf::from(root)]))
}

#[test]
fn foreign_bind_among_1000_own_mounts_is_found() {
    among(1_000, |root, rows, known| {
        let found = rows.ask(known, 7, true).expect("no mount is foreign");
        let paths: Vec<_> = found.iter().map(|entry| &*entry.path).collect();
        assert_eq!(
            paths,
            [rows.published(0), rows.published(7), rows.private(7)],
            "one stands for the others"
        );
        std::fs::create_dir(root.join("b/x/inside")).unwrap();
        mount_bind(root.join("b/x/inside"), root.join("d")).unwrap();
        assert!(rows.ask(known, 7, true).is_none(), "the bind is at a foreign path");
        unmount(root.join("d"), UnmountFlags::empty()).unwrap();
        assert!(rows.ask(known, 7, true).is_some());
    });
}

#[test]
fn rename_of_the_directory_of_many_is_noticed() {
    among(50, |root, rows, known| {
        assert_eq!(rows.roots(known, 7, true), only("/x"));
        std::fs::rename(root.join("b/x"), root.join("b/z")).unwrap();
        // One row has another directory of that name.
        std::fs::create_dir(root.join("b/x")).unwrap();
        unmount(rows.private(9), UnmountFlags::empty()).unwrap();
        mount_bind(root.join("b/x"), rows.private(9)).unwrap();
        assert_eq!(rows.roots(known, 7, true), Some(["/x", "/z"].map(PathBuf::from).into()));
        mount_bind(root.join("b/x"), root.join("d")).unwrap();
        assert!(rows.ask(known, 7, true).is_none(), "the bind of its directory is at a foreign path");
    });
}

/// `reads`: csid reads mountinfo to find it.
fn directory_that_had_the_name_of_another_is_shown(rows: usize, reads: bool) {
    among(rows, |root, rows, known| {
        let [x, old, bad] = ["x", "old", "bad"].map(|name| root.join("b").join(name));
        assert_eq!(rows.roots(known, 7, true), only("/x"));
        std::fs::rename(&x, &old).unwrap();
        std::fs::create_dir(&x).unwrap();
        unmount(rows.private(9), UnmountFlags::empty()).unwrap();
        mount_bind(&x, rows.private(9)).unwrap();
        refresh(&mut known.known.blocking_lock());
        std::fs::rename(&x, &bad).unwrap();
        std::fs::rename(&old, &x).unwrap();
        mount_bind(&bad, root.join("d")).unwrap();
        let paths = OwnPaths { needs_read: true, ..rows.question(7, true) };
        assert!(rows.answer(known, &paths).is_none(), "the bind of it is at a foreign path");
        assert_eq!(known.known.blocking_lock().read.is_some(), reads);
    });
}

#[test]
fn directory_with_the_name_of_another_is_shown_by_few() {
    directory_that_had_the_name_of_another_is_shown(50, false);
}

#[test]
fn directory_with_the_name_of_another_is_shown_by_many() {
    directory_that_had_the_name_of_another_is_shown(FEW, true);
}

#[test]
fn rename_that_a_publish_has_seen_ends_the_last_read() {
    among(20, |root, rows, known| {
        let [x, z] = ["x", "z"].map(|name| root.join("b").join(name));
        std::fs::create_dir(x.join("inside")).unwrap();
        mount_bind(x.join("inside"), root.join("d")).unwrap();
        assert!(rows.ask(known, 7, true).is_none(), "the bind is at a foreign path");
        // As if another question had read mountinfo.
        let until = Instant::now() + Duration::from_secs(60);
        known.known.blocking_lock().read = Some(RootsRead { read_for: 0, until });
        std::fs::rename(&x, &z).unwrap();
        let publish = OwnPaths { needs_read: true, ..rows.question(7, true) };
        assert!(rows.answer(known, &publish).is_none(), "the bind is at a foreign path");
        for number in 0..=OTHERS {
            let other = root.join(format!("other-{number}"));
            std::fs::create_dir(&other).unwrap();
            mount_bind(root.join("b/y"), &other).unwrap();
        }
        assert!(rows.ask(known, 7, true).is_none(), "csid does not use what it read before the rename");
    });
}

#[test]
fn mount_moved_from_csids_tmpfs_is_foreign() {
    among(50, |root, rows, known| {
        assert!(rows.ask(known, 7, true).is_some());
        mount_move(rows.published(9), root.join("d")).unwrap();
        assert!(rows.ask(known, 7, true).is_none());
        mount_move(root.join("d"), rows.published(9)).unwrap();
        assert!(rows.ask(known, 7, true).is_some());
    });
}

#[test]
fn mount_moved_to_a_path_of_another_row_counts() {
    among(50, |root, rows, known| {
        mount_bind(root.join("b/y"), root.join("d")).unwrap();
        assert_eq!(rows.roots(known, 7, true), only("/x"), "it is not of the volume");
        mount_move(root.join("d"), rows.published(9)).unwrap();
        assert_eq!(rows.roots(known, 7, true), Some(["/x", "/y"].map(PathBuf::from).into()));
    });
}

#[test]
fn mount_moved_from_a_like_directory_counts() {
    among(50, |root, rows, known| {
        let like = root.join("private/V/9");
        std::fs::create_dir_all(&like).unwrap();
        mount_bind(root.join("b/y"), &like).unwrap();
        assert_eq!(rows.roots(known, 7, true), only("/x"), "it is not of the volume");
        mount_move(&like, rows.private(9)).unwrap();
        assert_eq!(rows.roots(known, 7, true), Some(["/x", "/y"].map(PathBuf::from).into()));
    });
}

#[test]
fn mount_below_the_tmpfs_at_a_long_path_is_left() {
    among(50, |root, rows, known| {
        let at = rows.plugin.join("live/private/V/long");
        mount_at_long_path(&root.join("a"), &at);
        assert_eq!(rows.roots(known, 7, true), only("/x"), "it is of another file system");
        mount_at_long_path(&root.join("b/x"), &at);
        assert!(rows.ask(known, 7, true).is_none(), "only mountinfo has its path");
    });
}

#[test]
fn mount_moved_within_the_tmpfs_is_missed_by_its_row() {
    among(50, |_, rows, known| {
        assert!(rows.ask(known, 7, true).is_some());
        let other = rows.plugin.join("live/publish/V/other");
        std::fs::create_dir(&other).unwrap();
        mount_move(rows.published(9), &other).unwrap();
        assert_eq!(rows.roots(known, 7, true), only("/x"), "it is at no foreign path");
        assert!(rows.ask(known, 9, true).is_none(), "the row has no mount there");
    });
}

#[test]
fn mount_over_a_path_of_another_row_counts() {
    among(50, |root, rows, known| {
        assert_eq!(rows.roots(known, 7, true), only("/x"));
        mount("tmpfs", rows.private(9), "tmpfs", MountFlags::empty(), None).unwrap();
        assert_eq!(rows.roots(known, 7, true), Some(["/", "/x"].map(PathBuf::from).into()));
        mount_bind(rows.private(9), root.join("d")).unwrap();
        assert!(rows.ask(known, 7, true).is_none(), "a bind of it is at a foreign path");
    });
}

#[test]
fn own_mount_unmounted_by_hand_is_missed_by_its_row() {
    among(50, |_, rows, known| {
        assert!(rows.ask(known, 7, true).is_some());
        unmount(rows.published(9), UnmountFlags::empty()).unwrap();
        assert_eq!(rows.roots(known, 7, true), only("/x"), "the others have theirs");
        assert!(rows.ask(known, 9, true).is_none(), "the row has none");
        assert_eq!(rows.ask(known, 9, false).unwrap().len(), 2, "one of its two, and one of the others");
    });
}

#[test]
fn plugin_that_mounts_again_is_seen() {
    among(50, |root, rows, known| {
        assert_eq!(rows.roots(known, 7, true), only("/x"));
        for row in 0..50 {
            unmount(rows.private(row), UnmountFlags::empty()).unwrap();
            mount_bind(root.join("b/y"), rows.private(row)).unwrap();
        }
        assert_eq!(rows.roots(known, 7, true), Some(["/x", "/y"].map(PathBuf::from).into()));
        mount_bind(root.join("b/y"), root.join("d")).unwrap();
        assert!(rows.ask(known, 7, true).is_none(), "a bind of its new directory is at a foreign path");
    });
}

#[test]
fn mount_at_the_target_of_another_row_counts() {
    among(50, |root, rows, known| {
        mount_bind(root.join("b/x"), &rows.target).unwrap();
        assert_eq!(rows.roots(known, 7, true), only("/x"), "it is at no foreign path");
        mount("tmpfs", &rows.target, "tmpfs", MountFlags::empty(), None).unwrap();
        assert_eq!(rows.roots(known, 7, true), Some(["/", "/x"].map(PathBuf::from).into()));
    });
}

#[test]
fn mounts_of_a_moved_tmpfs_need_the_whole_table() {
    among(7, |root, rows, known| {
        assert!(rows.ask(known, 5, false).is_some());
        mount_move(rows.plugin.join("live"), root.join("d")).unwrap();
        assert!(rows.ask(known, 5, false).is_none(), "they are at foreign paths");
    });
}

/// Asks two questions at once, and makes a foreign bind between their answers. Returns whether the second answer lacks the bind.
fn share_a_list(known: &KnownMounts, questions: [OwnPaths<'_>; 2], from: &Path, to: &Path) -> bool {
    let answers = async {
        let busy = known.known.lock().await;
        let [mut first, mut second] =
            questions.each_ref().map(|question| Box::pin(known.about(question, &[])));
        assert!(futures_util::poll!(&mut first).is_pending());
        assert!(futures_util::poll!(&mut second).is_pending());
        drop(busy);
        assert!(first.await.is_some(), "no mount is foreign");
        mount_bind(from, to).unwrap();
        second.await.is_some()
    };
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(answers)
}

#[test]
fn questions_without_a_tmpfs_share_a_list() {
    among(4, |root, rows, known| {
        // The paths are then none below a single mount.
        mount_bind(rows.plugin.join("live"), root.join("a")).unwrap();
        mount_move(root.join("a"), rows.plugin.join("live")).unwrap();
        let questions = [rows.question(2, false), rows.question(3, false)];
        assert!(share_a_list(known, questions, &root.join("b/x"), &root.join("d")));
    });
}

#[test]
fn questions_of_two_plugins_share_a_list() {
    among(50, |root, rows, known| {
        let live = root.join("other/live");
        std::fs::create_dir_all(&live).unwrap();
        mount("tmpfs", &live, "tmpfs", MountFlags::empty(), None).unwrap();
        let (path, home) = (live.join("publish/V/0/volume"), live.join("publish/V"));
        let shown = root.join("a/x");
        std::fs::create_dir_all(&path).unwrap();
        std::fs::create_dir(&shown).unwrap();
        mount_bind(&shown, &path).unwrap();
        let other = OwnPaths { homes: vec![&home], ..at_paths(&[&path]) };
        assert!(share_a_list(known, [rows.question(7, true), other], &shown, &root.join("d")));
    });
}

#[test]
fn each_of_many_directories_is_shown() {
    among(50, |root, rows, known| {
        let mut due = BTreeSet::from([PathBuf::from("/x")]);
        for row in 0..=OTHERS {
            let name = format!("directory-{row}");
            std::fs::create_dir(root.join("b").join(&name)).unwrap();
            unmount(rows.private(row), UnmountFlags::empty()).unwrap();
            mount_bind(root.join("b").join(&name), rows.private(row)).unwrap();
            due.insert(Path::new("/").join(name));
            assert_eq!(rows.roots(known, 7, false).as_ref(), Some(&due));
        }
    });
}

#[test]
fn many_mounts_that_no_row_has_need_the_whole_table() {
    among(50, |root, rows, known| {
        for number in 0..OTHERS {
            let left = rows.plugin.join(format!("live/private/V/left-{number}"));
            std::fs::create_dir(&left).unwrap();
            mount_bind(root.join("b/y"), &left).unwrap();
        }
        unmount(rows.private(9), UnmountFlags::empty()).unwrap();
        mount_bind(root.join("b/y"), rows.private(9)).unwrap();
        assert!(rows.ask(known, 7, true).is_none(), "one of them may be of a row");
    });
}

#[test]
fn mount_that_no_row_has_stands_for_none() {
    among(50, |root, rows, known| {
        let left = rows.plugin.join("live/private/V/left");
        std::fs::create_dir(&left).unwrap();
        mount_bind(root.join("a"), &left).unwrap();
        assert_eq!(rows.roots(known, 7, true), only("/x"));
    });
}
