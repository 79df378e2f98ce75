//! Several mount.csi at one target at once.

use std::fs;
use std::path::Path;

use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{count, eventually, world};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use crate::fstab::{Host, OPTIONS, noted, only_row};

/// Starts a helper. Not by setpriv, whose process is the helper's only after exec.
fn helper(target: &str) -> Child {
    let mut helper = Command::new("/sbin/mount.csi");
    helper.args(["default/v", target, "-o", OPTIONS]).env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/run/no-bus");
    helper.stderr(std::process::Stdio::piped()).kill_on_drop(true).spawn().unwrap()
}

fn kill(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
    kill_process(pid, signal).unwrap();
}

async fn ended(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().await.unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Returns whether the process has a connection to csid, or a lock.
fn has_begun(child: &Child) -> bool {
    let Ok(files) = fs::read_dir(format!("/proc/{}/fd", child.id().unwrap())) else { return false };
    let links = files.flatten().filter_map(|file| fs::read_link(file.path()).ok());
    links.filter(|link| link.starts_with("/run/csid/mounting")).count() > 0
}

/// The second helper is stopped while the first one mounts, and interrupted as soon as it goes on.
#[test]
fn interrupted_mount_leaves_anothers_in_place() {
    const ROUNDS: usize = 8;
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        let mut cancelled = 0;
        for round in 0..ROUNDS {
            w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Hold)]);
            let first = helper(&target);
            eventually("the plugin is asked", async || !rows(&client).await.is_empty()).await;
            let second = helper(&target);
            eventually("the second helper has begun", async || has_begun(&second)).await;
            kill(&second, Signal::STOP);
            w.honest();
            assert_eq!(ended(first).await, (Some(0), String::new()), "round {round}");
            kill(&second, if round % 2 == 0 { Signal::TERM } else { Signal::INT });
            kill(&second, Signal::CONT);
            let (code, text) = ended(second).await;
            assert!(matches!(code, Some(0 | 8)), "round {round}: {code:?} {text}");
            cancelled += usize::from(code == Some(8));
            let row = only_row(&client).await;
            assert_eq!(
                (row.state.as_str(), kernel::stacked(Path::new(&target)).unwrap()),
                ("mounted", 1),
                "{text}"
            );
            assert_eq!(noted(), 1);
            host.succeeds(&["umount", &target]).await;
        }
        count("helpers interrupted while another one mounted", cancelled);
        assert!(cancelled > 0);
        assert_eq!(fs::read_dir("/run/csid/mounting").unwrap().count(), 0, "no lock is left");
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_after_an_interrupted_one_succeeds() {
    world(async |w| {
        let client = running(w).await;
        let host = Host::new(w);
        let target = host.target("t");
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Hold)]);
        let first = helper(&target);
        eventually("the plugin is asked", async || !rows(&client).await.is_empty()).await;
        let second = helper(&target);
        eventually("the second helper has begun", async || has_begun(&second)).await;
        kill(&first, Signal::TERM);
        let (code, text) = ended(first).await;
        assert_eq!((code, text.as_str()), (Some(8), "mount.csi: cancelled; nothing is mounted\n"));
        w.honest();
        assert_eq!(ended(second).await, (Some(0), String::new()));
        assert_eq!(only_row(&client).await.state, "mounted");
        host.succeeds(&["umount", &target]).await;
        // A helper that is killed keeps no lock.
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Hold)]);
        let killed = helper(&target);
        eventually("the plugin is asked", async || !rows(&client).await.is_empty()).await;
        kill(&killed, Signal::KILL);
        ended(killed).await;
        let next = helper(&target);
        eventually("the next helper has begun", async || has_begun(&next)).await;
        w.honest();
        assert_eq!(ended(next).await, (Some(0), String::new()));
        host.succeeds(&["umount", &target]).await;
        w.nothing_left(&client).await;
    });
}
