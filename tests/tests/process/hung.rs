//! With mounts whose server reads a request and does not answer it: csid's end and start, its other mounts, and what ends
//! such a mount.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csid_client::{CallOptions, Client, Kind, MountFilter, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::hung::{FILE, LOOKS, Op, TEXT};
use csid_tests::kernel;
use csid_tests::raw::{
    self, GROUP, MANAGER, MANAGER_PATH, MEMBER, ROOT, call, dict, group_csid, text, value,
};
use csid_tests::world::{World, count, eventually, refusal, world};
use futures_util::future::join_all;
use rustix::mount::{MountFlags, UnmountFlags, mount as kernel_mount, unmount as kernel_unmount};

const HUNG: usize = 20;
/// The time that hung mounts may add to a start of csid.
const START: Duration = Duration::from_secs(1);
const STOP: Duration = Duration::from_secs(5);
/// Nothing hangs: the plugin's calls and csid's looks take milliseconds.
const AT_ONCE: Duration = Duration::from_secs(5);

/// A volume whose file system hangs on request; the next volume's does not. Its published path.
async fn able_to_hang(w: &mut World, client: &Client, volume: &str) -> PathBuf {
    w.hang("p", "NodeStageVolume");
    let source = mounted(client, "job", inline(volume)).await;
    w.plugin("p").honest();
    source
}

/// The processes that have a file of the journal open, and whether one of their threads waits in the kernel.
pub fn holders(journal: &Path) -> Vec<(u32, bool)> {
    let numbers = |directory: &Path| -> Vec<u32> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    };
    let mut holders = Vec::new();
    for process in numbers(Path::new("/proc")) {
        let threads = PathBuf::from(format!("/proc/{process}/task"));
        // A thread that is left of a killed process has the files that the process had.
        let threads: Vec<_> =
            numbers(&threads).iter().map(|thread| threads.join(thread.to_string())).collect();
        let holds = |thread: &PathBuf| {
            let open = fs::read_dir(thread.join("fd")).into_iter().flatten().flatten();
            open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|file| file.starts_with(journal))
        };
        if threads.iter().any(holds) {
            let waits = |thread: &PathBuf| {
                let stat = fs::read_to_string(thread.join("stat")).unwrap_or_default();
                stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('D'))
            };
            holders.push((process, threads.iter().any(waits)));
        }
    }
    holders
}

/// How long csid takes from its exec to the answer of a Mount.
async fn serves_again(w: &mut World, volume: &str) -> (Client, Duration) {
    let begun = Instant::now();
    let client = w.start().await;
    mounted(&client, "job", inline(volume)).await;
    (client, begun.elapsed())
}

#[test]
fn killed_csid_serves_again_with_hung_mounts() {
    world(async |w| {
        let client = running(w).await;
        for n in 0..HUNG {
            able_to_hang(w, &client, &format!("hung-{n}")).await;
        }
        let kept = mounted(&client, "job", inline("kept")).await;
        fs::write(kept.join("file"), "kept").unwrap();
        let mut open = File::open(kept.join("file")).unwrap();
        w.kill();
        let (client, usual) = serves_again(w, "before").await;
        let before = kernel::volumes_below(&w.dir).unwrap();

        w.hung().hold(&LOOKS);
        let asking = client.clone();
        let listing = tokio::spawn(async move { asking.list_mounts(MountFilter::default()).await });
        w.hung().holds(1).await;
        w.kill();
        assert_eq!(holders(&w.path("state/journal")), [], "of a killed csid");
        drop(listing);
        let (client, took) = serves_again(w, "after").await;
        count("ms until a killed csid serves again", usual.as_millis() as usize);
        count("ms until it does with 20 hung mounts", took.as_millis() as usize);
        assert!(took < usual + START, "{took:?}, without hung ones {usual:?}");
        assert_eq!(holders(&w.path("state/journal")), [(w.csid_pid(), false)]);
        unmount(&client, "after", "job").await.unwrap();
        assert_eq!(kernel::volumes_below(&w.dir).unwrap(), before, "every other mount is as it was");
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        assert_eq!(text, "kept");

        w.hung().holds(1).await;
        let begun = Instant::now();
        w.stop().await;
        assert!(begun.elapsed() < STOP, "{:?} for a stop with hung mounts", begun.elapsed());
        assert_eq!(holders(&w.path("state/journal")), []);
        w.hung().release();
        let client = w.start().await;
        settled(&client).await;
        drop(open);
        for volume in (0..HUNG).map(|n| format!("hung-{n}")).chain(["kept".into(), "before".into()]) {
            unmount(&client, &volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn hung_mount_leaves_a_block_device_alone() {
    world(async |w| {
        let client = running(w).await;
        w.add_device("p", "disk");
        able_to_hang(w, &client, "hung").await;
        mounted(&client, "job", block("disk")).await;
        drop(client);
        w.kill();
        w.hung().hold(&LOOKS);
        let client = w.start().await;
        healthy(&client, "p").await;
        mounted(&client, "job", block("disk")).await;
        for rpc in ["NodeUnpublishVolume", "NodeUnstageVolume"] {
            assert_eq!(w.plugin("p").count(rpc, "disk"), 0, "{rpc}");
        }
        w.hung().release();
        for volume in ["hung", "disk"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// The device at the path differs from the row's, so csid has to probe the path when it starts.
#[test]
fn hung_mount_over_another_leaves_a_block_device_alone() {
    world(async |w| {
        let client = running(w).await;
        // Mounts are observed in the order of their names.
        w.add_device("p", "zblock");
        let covered = mounted(&client, "job", inline("covered")).await;
        mounted(&client, "job", block("zblock")).await;
        drop(client);
        w.kill();
        // A server that reads no request.
        let server = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        let options = CString::new(options).unwrap();
        kernel_mount("none", &covered, "fuse", MountFlags::empty(), Some(options.as_c_str())).unwrap();
        let client = w.start().await;
        healthy(&client, "p").await;
        mounted(&client, "job", block("zblock")).await;
        for rpc in ["NodeUnpublishVolume", "NodeUnstageVolume"] {
            assert_eq!(w.plugin("p").count(rpc, "zblock"), 0, "{rpc}");
        }
        // The end of the server ends every request.
        drop(server);
        kernel_unmount(&covered, UnmountFlags::DETACH).unwrap();
        for volume in ["covered", "zblock"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn lists_with_a_hung_mount_cost_no_other_volume() {
    world(async |w| {
        let client = running(w).await;
        able_to_hang(w, &client, "hung").await;
        w.hung().hold(&LOOKS);
        let lists = (0..HUNG).map(|_| client.list_mounts(MountFilter::default()));
        for rows in join_all(lists).await {
            assert_eq!(rows.unwrap().len(), 1);
        }
        w.hung().holds(1).await;
        let begun = Instant::now();
        for n in 0..HUNG {
            let volume = format!("other-{n}");
            mounted(&client, "job", within(AT_ONCE, inline(&volume))).await;
            unmount(&client, &volume, "job").await.unwrap();
        }
        count("ms for 20 mounts and unmounts with a hung one", begun.elapsed().as_millis() as usize);
        w.hung().release();
        eventually("it is healthy again", async || row(&client, "hung", "job").await.unwrap().healthy).await;
        unmount(&client, "hung", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

fn by_force() -> UnmountOptions {
    UnmountOptions { force: Some(true), ..UnmountOptions::default() }
}

#[test]
fn force_refuses_a_mount_that_hangs() {
    world(async |w| {
        let client = running(w).await;
        let source = able_to_hang(w, &client, "v").await;
        let staging = row(&client, "v", "job").await.unwrap().staging;
        let mut open = File::open(source.join(FILE)).unwrap();
        w.hung().hold(&[Op::StatFs]);
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "job", by_force()).await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert_eq!([&source, Path::new(&staging)].map(|path| kernel::stacked(path).unwrap()), [1, 1]);
        assert_eq!(w.plugin("p").count("NodeUnpublishVolume", ""), 0, "nothing is begun");
        assert_eq!(state(&client, "v", "job").await, "mounted");
        w.hung().release();
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        assert_eq!(text, TEXT);
        eventually("it is healthy again", async || row(&client, "v", "job").await.unwrap().healthy).await;

        // A dead mount is detached, also while it is open.
        w.hung().end("v");
        client.unmount(NAMESPACE, "v", "job", by_force()).await.unwrap();
        drop(open);
        w.nothing_left(&client).await;
    });
}

/// SMB answers EHOSTDOWN while it connects again, and a soft NFS mount ETIMEDOUT. Its consumer may write again later.
#[test]
fn force_refuses_a_mount_that_answers_an_error() {
    world(async |w| {
        let client = running(w).await;
        let source = able_to_hang(w, &client, "v").await;
        let open = File::open(source.join(FILE)).unwrap();
        w.hung().fail(&[Op::StatFs]);
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "job", by_force()).await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert!(error.message.contains("answers with an error"), "{error}");
        assert_eq!(kernel::stacked(&source).unwrap(), 1);
        assert_eq!(w.plugin("p").count("NodeUnpublishVolume", ""), 0, "nothing is begun");
        w.hung().fail(&[]);
        eventually("it is healthy again", async || row(&client, "v", "job").await.unwrap().healthy).await;

        // Root asks for it by name.
        w.hung().fail(&[Op::StatFs]);
        let by_name = UnmountOptions { force_hung: Some(true), ..UnmountOptions::default() };
        client.unmount(NAMESPACE, "v", "job", by_name).await.unwrap();
        assert_eq!(kernel::stacked(&source).unwrap(), 0);
        drop(open);
        w.nothing_left(&client).await;
    });
}

#[test]
fn force_hung_detaches_a_mount_that_hangs() {
    world(async |w| {
        let client = running(w).await;
        let source = able_to_hang(w, &client, "v").await;
        let open = File::open(source.join(FILE)).unwrap();
        let by_force = || UnmountOptions { force_hung: Some(true), ..UnmountOptions::default() };
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "job", by_force()).await);
        assert_eq!(kind, Kind::Busy, "what answers is no hung mount: {error}");
        assert_eq!(kernel::stacked(&source).unwrap(), 1);
        w.hung().hold(&[Op::StatFs]);
        client.unmount(NAMESPACE, "v", "job", by_force()).await.unwrap();
        assert_eq!(kernel::stacked(&source).unwrap(), 0);
        w.nothing_left(&client).await;
        w.hung().release();
        drop(open);
        mounted(&client, "job", inline("v")).await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// Mounts volume `v` for group csid's member at `target`; the error's name and text.
async fn mount_for_member(w: &World, target: &Path) -> Result<(), (String, String)> {
    std::os::unix::fs::chown(w.socket(), None, Some(GROUP)).unwrap();
    let member = raw::peer(MEMBER, &w.socket()).await.unwrap();
    let options = dict(vec![("target", text(target.to_str().unwrap()))]);
    let values = vec![text(NAMESPACE), text("v"), text("members"), options];
    call(&member, MANAGER_PATH, MANAGER, "Mount", values).await.map(drop)
}

async fn unmount_for_member(w: &World) {
    let member = raw::peer(MEMBER, &w.socket()).await.unwrap();
    let values = vec![text(NAMESPACE), text("v"), text("members"), value("a{sv}")];
    call(&member, MANAGER_PATH, MANAGER, "Unmount", values).await.expect("an unmount by its caller");
}

#[test]
fn hung_target_root_costs_its_own_mounts_alone() {
    world(async |w| {
        group_csid(w);
        running(w).await;
        let root = raw::peer(ROOT, &w.socket()).await.unwrap();
        let capability = vec![std::collections::HashMap::from([
            ("access-mode".to_owned(), text("single-node-multi-writer")),
            ("attachment-mode".to_owned(), text("file-system")),
        ])];
        let spec =
            vec![("plugin", text("p")), ("external-id", text("v")), ("capabilities", capability.into())];
        let values = vec![text(NAMESPACE), text("v"), dict(spec)];
        call(&root, MANAGER_PATH, MANAGER, "RegisterVolume", values).await.expect("a volume");
        w.kill();
        let (_, usual) = serves_again(w, "before").await;
        w.kill();

        // Whatever walks to the second root asks its server first.
        w.hang("p", "NodeStageVolume");
        w.plugin("p").honest();
        let hung = w.path("hung");
        fs::create_dir(&hung).unwrap();
        w.hung().mount("root", &hung);
        w.hung().hold_of("root", &[Op::Lookup]);
        let roots = [hung.join("below"), w.path("targets")];
        fs::write(w.path("etc/csid.toml"), format!("target-roots = {roots:?}\n")).unwrap();
        let (client, took) = serves_again(w, "after").await;
        count("ms until csid serves with a hung target root", took.as_millis() as usize);
        assert!(took < usual + START, "{took:?}, without a hung one {usual:?}");
        w.hung().hangs("root").await;

        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        let begun = Instant::now();
        mount_for_member(w, &target).await.expect("below the other root");
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        unmount_for_member(w).await;
        let (name, why) = mount_for_member(w, &roots[0].join("t")).await.unwrap_err();
        assert_eq!(name, "org.csid1.Error.Internal", "{why}");
        assert!(why.contains(roots[0].to_str().unwrap()) && why.contains("in time"), "{why}");
        client.reload(CallOptions::default()).await.expect("a hung root holds up no reload");
        mount_for_member(w, &target).await.expect("below the other root");
        unmount_for_member(w).await;
        eventually("an event says so", async || {
            let (all, _) = client.get_events(0, 1000).await.unwrap();
            all.iter().any(|event| event.kind == "target-root" && Path::new(&event.subject) == roots[0])
        })
        .await;
        assert!(fs::read_to_string(w.path("csid.log")).unwrap().contains("a target root cannot be used"));
        assert_eq!(holders(&w.path("state/journal")), [(w.csid_pid(), false)]);
        w.kill();
        assert_eq!(holders(&w.path("state/journal")), [], "of a killed csid");
        let client = w.start().await;

        // It is asked for again, and is not there.
        w.hung().release();
        let (name, why) = mount_for_member(w, &roots[0].join("t")).await.unwrap_err();
        assert_eq!(name, "org.csid1.Error.InvalidArgument", "{why}");
        for volume in ["before", "after"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        kernel_unmount(&hung, UnmountFlags::DETACH).unwrap();
        w.nothing_left(&client).await;
    });
}
