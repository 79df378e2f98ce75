//! A search of the mount namespaces that closes the last reference to one: the kernel then unmounts what that namespace had, and a
//! file system's server holds that up.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use csid_client::{Client, Kind};
use csid_tests::ask::*;
use csid_tests::elsewhere::Consumer;
use csid_tests::held::SearchBy;
use csid_tests::hung::Op;
use csid_tests::kernel::{self, Loop};
use csid_tests::world::{SOON, World, eventually, refusal, world};
use rustix::mount::{UnmountFlags, unmount as kernel_unmount};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinHandle;

use crate::hung::holders;

/// A start of csid, and an Unmount that no search holds up.
const AT_ONCE: Duration = Duration::from_secs(10);
/// The searches that csid's helper keeps a worker for.
const SEARCHES: usize = 4;

fn signal(process: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Returns the state of a process or thread. `None`: it has ended.
fn kernel_state(thread: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    Some(stat.rsplit(") ").next()?.split(' ').next()?.to_owned())
}

/// Makes a namespace that alone has a file system on a block device. One process is in it.
fn keeper(w: &World, name: &str, disk: &Loop) -> Consumer {
    let at = w.path(name);
    fs::create_dir_all(&at).unwrap();
    w.hung().mount_disk(name, &disk.device, &at);
    let consumer = Consumer::copy("private");
    // To remove the directory would unmount what the consumer has there.
    kernel_unmount(&at, UnmountFlags::DETACH).unwrap();
    consumer
}

/// A search of an Unmount that hangs.
struct HungSearch {
    /// The thread that searches.
    thread: u32,
    unmounting: JoinHandle<csid_client::Result<()>>,
    /// A copy of the volume in a namespace that the search mostly comes to after the one in which it hangs.
    next: Consumer,
    disk: Loop,
}

/// Has a search of an Unmount close the last reference to a namespace whose file system's server does not answer.
async fn hang_a_search(w: &World, client: &Client, name: &str) -> HungSearch {
    for tried in 0.. {
        let disk = disk(w, &format!("image-{name}-{tried}"));
        let keeper = keeper(w, name, &disk);
        let next = Consumer::copy("private");
        let call = w.held().hold(keeper.pid()).unwrap();
        let asking = client.clone();
        let unmounting = tokio::spawn(async move { unmount(&asking, "v", "job").await });
        let call = tokio::task::spawn_blocking(move || call.recv_timeout(SOON)).await.unwrap().unwrap();
        // Not earlier: the process would wait at its own end if the test failed meanwhile.
        w.hung().hold_of(name, &[Op::Destroy]);
        keeper.end();
        let thread = call.thread;
        call.go_on();
        w.hung().hangs(name).await;
        eventually("the thread waits in a close, or has searched", async || {
            is_closing(thread) || unmounting.is_finished()
        })
        .await;
        if !unmounting.is_finished() {
            return HungSearch { thread, unmounting, next, disk };
        }
        // Another test's search had the namespace in that moment, too, and hangs now.
        w.hung().hold_of(name, &[]);
        assert!(tried < 3, "other searches hang: {:?}", unmounting.await);
    }
    unreachable!()
}

/// Whether a thread waits in the kernel in `close`.
fn is_closing(thread: u32) -> bool {
    let call = fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap_or_default();
    call.split(' ').next().is_some_and(|number| number.parse() == Ok(libc::SYS_close))
}

fn disk(w: &World, image: &str) -> Loop {
    let image = w.path(image);
    File::create(&image).and_then(|file| file.set_len(1 << 20)).unwrap();
    Loop::attach(&image, false).unwrap()
}

async fn is_busy(client: &Client, holder: &Consumer) {
    let begun = Instant::now();
    let (kind, error) = refusal(unmount(client, "v", "job").await);
    assert_eq!(kind, Kind::Busy, "{error}");
    assert!(error.message.contains(&holder.pid().to_string()), "{error}");
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
}

/// csid with a mount and a copy of it, whose process a search looks for in the tables of all processes.
async fn with_copy(w: &mut World, by: SearchBy) -> (Client, Consumer) {
    w.hold_calls(by);
    let client = running(w).await;
    w.hang("p", "NodeStageVolume");
    w.plugin("p").honest();
    mounted(&client, "job", inline("v")).await;
    let copy = Consumer::copy("private");
    is_busy(&client, &copy).await;
    (client, copy)
}

/// A search has one namespace while it closes the file of another one. So what one of these tests has hang holds up the others.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills csid while a search hangs, starts it, and has it unmount all.
async fn restart_while_hung(w: &mut World, client: Client, copy: Consumer, search: HungSearch) {
    drop(client);
    w.kill();
    assert_eq!(holders(&w.path("state/journal")), [], "of a killed csid");
    let begun = Instant::now();
    let client = w.start().await;
    is_busy(&client, &copy).await;
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    // A process that waits in the kernel shows that after its first signal.
    signal(search.thread, Signal::KILL);
    let survives = async || kernel_state(search.thread).unwrap() == "D";
    eventually("the worker survives SIGKILL", survives).await;
    // It keeps no namespace.
    copy.end();
    search.next.end();
    for volume in ["v", "other"] {
        unmount(&client, volume, "job").await.unwrap();
    }
    assert_eq!(w.hung().held_of("disk"), [Op::Destroy]);
    w.hung().release();
    eventually("the worker ends", async || kernel_state(search.thread).is_none()).await;
    drop(search.disk);
    w.nothing_left(&client).await;
}

#[test]
fn csid_ends_and_serves_while_a_search_hangs() {
    let _alone = alone();
    world(async |w| {
        let (client, copy) = with_copy(w, SearchBy::Tables).await;
        let mut search = hang_a_search(w, &client, "disk").await;
        // Meanwhile another volume is served, and csid does not take the missing answer for one.
        mounted(&client, "job", inline("other")).await;
        let (kind, error) = refusal((&mut search.unmounting).await.unwrap());
        assert_eq!(kind, Kind::Internal, "{error}");
        assert!(error.message.contains("did not answer in time"), "{error}");
        assert_eq!(state(&client, "v", "job").await, "mounted");
        is_busy(&client, &copy).await;
        restart_while_hung(w, client, copy, search).await;
    });
}

#[test]
fn search_that_hangs_keeps_no_other_namespace() {
    let _alone = alone();
    world(async |w| {
        let (client, copy) = with_copy(w, SearchBy::Kernel).await;
        let search = hang_a_search(w, &client, "disk").await;
        mounted(&client, "job", inline("other")).await;
        restart_while_hung(w, client, copy, search).await;
    });
}

/// Any user may mount at a directory above the consumers' path, in a namespace of its own. The kernel unmounts that with the directory.
#[test]
fn users_mount_at_csids_path_holds_up_no_csid() {
    foreign_mount_holds_up_no_csid(|source| source.parent().unwrap().to_owned());
}

/// A plugin in a container may do the same at the paths that only root reaches.
#[test]
fn plugins_mount_at_its_path_holds_up_no_csid() {
    foreign_mount_holds_up_no_csid(|source| {
        let published = source.to_str().unwrap().replacen("/publish/", "/private/", 1);
        Path::new(&published).parent().unwrap().to_owned()
    });
}

fn foreign_mount_holds_up_no_csid(of_source: fn(&Path) -> PathBuf) {
    let _alone = alone();
    world(async move |w| {
        let client = running(w).await;
        w.hang("p", "NodeStageVolume");
        w.plugin("p").honest();
        let source = mounted(&client, "job", inline("v")).await;
        let (disk, at) = (disk(w, "image"), w.path("disk"));
        fs::create_dir(&at).unwrap();
        w.hung().mount_disk("disk", &disk.device, &at);
        let _user = Consumer::bind(&at, &of_source(&source), "private");
        kernel_unmount(&at, UnmountFlags::DETACH).unwrap();
        w.hung().hold_of("disk", &[Op::Destroy]);

        let begun = Instant::now();
        unmount(&client, "v", "job").await.unwrap();
        w.hung().hangs("disk").await;
        assert!(!of_source(&source).exists());
        mounted(&client, "job", inline("other")).await;
        assert_eq!(mounted(&client, "job", inline("v")).await, source, "the path does not hang");
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        drop(client);
        w.kill();
        assert_eq!(holders(&w.path("state/journal")), [], "of a killed csid");
        let client = w.start().await;
        for volume in ["v", "other"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        assert_eq!(w.hung().held_of("disk"), [Op::Destroy]);
        w.hung().release();
        drop(disk);
        eventually("the disk is free", async || {
            let image = w.path("image").display().to_string();
            !kernel::loops().unwrap().iter().any(|line| line.contains(&image))
        })
        .await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn hung_searches_are_bounded_over_restarts() {
    let _alone = alone();
    world(async |w| {
        let (mut client, copy) = with_copy(w, SearchBy::Kernel).await;
        let mut searches = Vec::new();
        for number in 0..SEARCHES {
            let HungSearch { thread, unmounting, next, disk } =
                hang_a_search(w, &client, &format!("disk-{number}")).await;
            searches.push((thread, next, disk));
            drop(client);
            w.kill();
            assert!(unmounting.await.unwrap().is_err(), "csid was killed");
            client = w.start().await;
            healthy(&client, "p").await;
        }
        let begun = Instant::now();
        let (kind, error) = refusal(unmount(&client, "v", "job").await);
        assert_eq!(kind, Kind::Internal, "{error}");
        let is_named = |(thread, ..): &(u32, _, _)| error.message.contains(&thread.to_string());
        assert!(error.message.contains("have not ended") && searches.iter().all(is_named), "{error}");
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        assert_eq!(state(&client, "v", "job").await, "mounted");
        // A new helper serves while all four hang.
        w.replace_helper();
        is_busy(&client, &copy).await;
        assert!(searches.iter().all(|(thread, ..)| kernel_state(*thread).is_some()));
        w.hung().hold_of("disk-0", &[]);
        eventually("a worker ends", async || kernel_state(searches[0].0).is_none()).await;
        copy.end();
        let (threads, disks): (Vec<u32>, Vec<Loop>) =
            searches.into_iter().map(|(thread, _next, disk)| (thread, disk)).unzip();
        unmount(&client, "v", "job").await.unwrap();
        w.hung().release();
        for thread in threads {
            eventually("the worker ends", async || kernel_state(thread).is_none()).await;
        }
        drop(disks);
        w.nothing_left(&client).await;
    });
}
