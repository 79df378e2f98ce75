//! The double that hangs is as unkind as the world, and nothing is left of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use csid_tests::hung::{CONTROL, FILE, Hung, LOOKS, Op, TEXT, server};
use csid_tests::kernel;
use csid_tests::world::{child, eventually, world};

/// A program that asks the file system and waits for the answer.
fn asks(command: &str) -> Child {
    let mut program = child(Path::new("/bin/sh"));
    program.args(["-c", command]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// The state of a process and whether it has a SIGKILL that it did not die of.
fn waits_though_killed(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
    let pending = u64::from_str_radix(field("SigPnd:"), 16).unwrap_or_default();
    field("State:").starts_with('D') && pending & 1 << 8 != 0
}

async fn ended(asking: &mut Child) {
    eventually("it ends", async || asking.try_wait().unwrap().is_some()).await;
}

fn mounted(hung: &Hung, at: PathBuf) -> PathBuf {
    fs::create_dir(&at).unwrap();
    hung.mount("one", &at);
    at
}

#[test]
fn held_requests_survive_kills_and_end_with_release() {
    world(async |w| {
        let hung = Hung::start(w.path("hung.sock"));
        let root = mounted(&hung, w.path("hung"));
        let (root, file) = (root.display(), root.join(FILE));
        let file = file.display();
        for (op, command) in [
            (Op::StatFs, format!("exec stat -f {root}")),
            (Op::GetAttr, format!("exec stat {root}")),
            (Op::Lookup, format!("exec cat {file}")),
            (Op::OpenDir, format!("exec ls {root}")),
            (Op::ReadDir, format!("exec ls {root}")),
            (Op::Open, format!("exec cat {file}")),
            (Op::Read, format!("exec cat {file}")),
            (Op::Create, format!("exec touch {root}/{op:?}", op = Op::Create)),
            (Op::Write, format!("exec dd if=/dev/zero of={file} bs=1 count=1 conv=notrunc")),
            (Op::Fsync, format!("exec sync {file}")),
            (Op::Flush, format!("exec 3<{file}; exec 3<&-")),
        ] {
            hung.hold(&[op]);
            let mut asking = asks(&command);
            hung.hangs("one").await;
            assert_eq!(hung.held_of("one"), [op], "{command}");
            asking.kill().unwrap();
            eventually("it waits in the kernel", async || waits_though_killed(asking.id())).await;
            assert_eq!(asking.try_wait().unwrap(), None, "{command}");
            assert_eq!(hung.held(), 1, "{command}");
            hung.release();
            ended(&mut asking).await;
            assert_eq!(hung.held(), 0);
        }
    });
}

#[test]
fn unheld_requests_are_answered() {
    world(async |w| {
        let hung = Hung::start(w.path("hung.sock"));
        let root = mounted(&hung, w.path("hung"));
        hung.hold(&[Op::StatFs]);
        let mut asking = asks(&format!("exec stat -f {}", root.display()));
        hung.hangs("one").await;
        assert_eq!(fs::read_to_string(root.join(FILE)).unwrap(), TEXT);
        let text = "x".repeat(100_000);
        fs::write(root.join("more"), &text).unwrap();
        fs::File::open(root.join("more")).unwrap().sync_all().unwrap();
        assert_eq!(fs::read_to_string(root.join("more")).unwrap(), text);
        fs::write(root.join("more"), "less").unwrap();
        assert_eq!(fs::read_to_string(root.join("more")).unwrap(), "less");
        let names: Vec<_> = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [FILE, "more"]);
        fs::remove_file(root.join("more")).unwrap();
        assert!(!root.join("more").exists());
        // Holding others answers it.
        hung.hold_of("one", &[Op::Fsync]);
        ended(&mut asking).await;
        hung.end("one");
        let dead = fs::read_dir(&root).unwrap_err();
        assert_eq!(dead.kind(), std::io::ErrorKind::NotConnected);
    });
}

/// State before the handle of the hung servers was dropped.
#[derive(Default)]
struct Before {
    server: u32,
    asking: Vec<u32>,
    connections: Vec<PathBuf>,
}

/// Starts three servers that hang and do not die.
async fn three_hang(hung: &Hung, at: &dyn Fn(&str) -> PathBuf) -> (Vec<Child>, Before) {
    hung.hold(&LOOKS);
    let roots: Vec<_> = ["a", "b", "c"].map(|name| mounted(hung, at(name))).to_vec();
    let mut asking: Vec<_> =
        roots.iter().map(|root| asks(&format!("exec stat -f {}", root.display()))).collect();
    hung.holds(3).await;
    for one in &mut asking {
        one.kill().unwrap();
        eventually("it waits in the kernel", async || waits_though_killed(one.id())).await;
    }
    let own = kernel::mounts().unwrap().into_iter().filter(|mount| mount.fs_type == server::TYPE);
    let number = |mount: kernel::Mount| mount.device.rsplit(':').next().unwrap().to_owned();
    let connections: Vec<_> = own.map(|mount| Path::new(CONTROL).join(number(mount))).collect();
    assert_eq!(connections.len(), 3);
    assert!(connections.iter().all(|connection| connection.exists()));
    let pids = asking.iter().map(Child::id).collect();
    (asking, Before { server: hung.pid(), asking: pids, connections })
}

#[test]
fn nothing_is_left_after_drop() {
    world(async |w| {
        let hung = Hung::start(w.path("hung.sock"));
        let (mut asking, before) = three_hang(&hung, &|name| w.path(name)).await;
        drop(hung);
        for one in &mut asking {
            ended(one).await;
        }
        assert!(!kernel::mounts().unwrap().iter().any(|mount| mount.fs_type == server::TYPE));
        // The kernel forgets a connection when the last who waited for it is gone.
        eventually("no connection is left", async || !before.connections.iter().any(|c| c.exists())).await;
        assert!(!Path::new(&format!("/proc/{}", before.server)).exists());
    });
}

#[test]
fn nothing_is_left_after_a_panic_in_a_world() {
    let seen = Arc::<Mutex<Before>>::default();
    let answer = Arc::clone(&seen);
    let panicked = std::panic::catch_unwind(move || {
        world(async move |w| {
            w.add_plugin("p").await;
            let dir = w.dir.clone();
            let hung = w.hang("p", "NodeStageVolume");
            let (asking, before) = three_hang(hung, &|name| dir.join(name)).await;
            *answer.lock().unwrap() = before;
            drop(asking);
            panic!("as a test that fails");
        });
    });
    assert!(panicked.is_err());
    let before = seen.lock().unwrap();
    assert!(!Path::new(&format!("/proc/{}", before.server)).exists());
    assert_eq!(before.asking.len(), 3);
    // They are this process' children, and dead; some may not be reaped.
    let ended = |pid: &u32| match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.contains(") Z"),
        Err(_) => true,
    };
    let end = std::time::Instant::now() + csid_tests::world::SOON;
    while !before.asking.iter().all(ended) {
        assert!(std::time::Instant::now() < end, "one hangs still");
        std::thread::yield_now();
    }
}

#[test]
fn requests_end_with_a_killed_server() {
    world(async |w| {
        let hung = Hung::start(w.path("hung.sock"));
        let (mut asking, before) = three_hang(&hung, &|name| w.path(name)).await;
        let server = rustix::process::Pid::from_raw(before.server.cast_signed()).unwrap();
        rustix::process::kill_process(server, rustix::process::Signal::KILL).unwrap();
        for one in &mut asking {
            ended(one).await;
        }
        drop(hung);
        assert!(!kernel::mounts().unwrap().iter().any(|mount| mount.fs_type == server::TYPE));
    });
}
