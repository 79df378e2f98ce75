//! File systems whose server does not answer, with the real units: systemd kills, stops and starts csid.

use std::time::{Duration, Instant};

use csid_tests::hung::{self, Ask, LOOKS, Op};
use csid_tests::script::{Act, Lie, Rule};
use csid_tests::world::count;

use crate::machine::Machine;
use crate::settings::{TEST_PLUGIN, define, install_test_plugin, ready};

const HUNG: usize = 20;
const SOCKET: &str = "/var/lib/p/hung.sock";
/// The number of kills. The quickest restart counts, because other tests use the machine too.
const KILLS: usize = 3;
/// The limit in ms from SIGKILL until csid can call a plugin. RestartSec= is 500 ms of it.
const RESTART: usize = 1000;
/// The limit for `systemctl stop csid`.
const STOP: Duration = Duration::from_secs(5);
/// The time in which csid probes each of its mounts.
const PROBES: Duration = Duration::from_secs(60);

fn ask(m: &Machine, ask: &Ask) -> hung::Answer {
    hung::ask(&m.path(SOCKET), ask).expect("an answer of the file systems' server")
}

fn hold(m: &Machine, ops: &[Op]) {
    ask(m, &Ask::Hold { name: None, ops: ops.to_vec() });
}

/// Returns the number of file systems with a call that hangs.
fn hanging(m: &Machine) -> usize {
    let mut names: Vec<String> = ask(m, &Ask::State).held.into_iter().map(|(name, _)| name).collect();
    names.sort();
    names.dedup();
    names.len()
}

/// Returns the pids of the processes with a thread that has a file of the journal open.
fn holders(m: &Machine) -> String {
    m.run(
        "find /proc/[0-9]*/task/*/fd -lname '/var/lib/csid/journal*' 2>/dev/null | cut -d / -f 3 | sort -u | xargs",
    )
}

#[test]
fn csid_is_killed_and_stopped_with_hung_mounts() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    let mut plugin = install_test_plugin(&m);
    let server = m.path("/usr/local/sbin/hung-server");
    std::fs::copy(env!("CARGO_BIN_EXE_hung-server"), server).expect("the server's program");
    plugin.set(|script| {
        script.hung = SOCKET.into();
        script.rules = vec![Rule::always("NodeStageVolume", Act::Lie(Lie::Hung))];
    });
    m.run(&format!("systemd-run --quiet --unit hung /usr/local/sbin/hung-server {SOCKET}"));
    m.until(&format!("test -S {SOCKET}"));
    define(&m, "p", &[TEST_PLUGIN]);
    ready(&m, "p");
    let bare = m.inventory();
    for n in 0..HUNG {
        plugin.provision(&format!("v{n}"));
        m.run(&format!("csictl mount demo v{n} web --plugin p --external-id v{n}"));
    }
    let id = m.run("csi-local create data --size 16M");
    let kept = m.run(&format!("csictl mount demo data web --plugin local --external-id {id}"));
    m.run(&format!("echo here >{kept}/file"));
    // The id of a mount in the table is never another mount's while that one is there.
    let other_mounts = || m.run("grep -v csid-hung /proc/self/mountinfo");
    let mounts = other_mounts();
    assert!(mounts.contains(&kept), "{mounts}");
    let pid = || m.run("systemctl show csid --property MainPID --value");

    hold(&m, &LOOKS);
    let end = Instant::now() + PROBES;
    while hanging(&m) < HUNG {
        assert!(Instant::now() < end, "csid probed {} of {HUNG} mounts", hanging(&m));
        std::thread::sleep(Duration::from_millis(50));
    }
    let restarts = (0..KILLS).map(|_| {
        let before = pid();
        let took = m.run(
            "begun=$(date +%s%3N)
             systemctl kill --kill-whom main --signal KILL csid && csictl wait local --deadline 30s >/dev/null
             echo $(($(date +%s%3N) - begun))",
        );
        assert_ne!(pid(), before);
        took.parse().expect("a number")
    });
    let quickest: usize = restarts.min().expect("a kill");
    count("ms until a killed csid can call a plugin, with 20 hung mounts", quickest);
    assert!(quickest < RESTART, "{quickest} ms");
    assert_eq!(holders(&m), pid(), "the new csid alone has the journal open");
    assert_eq!(other_mounts(), mounts);
    assert_eq!(m.run(&format!("cat {kept}/file")), "here");
    let other = m.run("csi-local create other --size 16M");
    m.run(&format!("csictl mount demo other web --plugin local --external-id {other}"));
    m.run(&format!("csictl unmount demo other web && csi-local delete {other}"));

    assert_eq!(hanging(&m), HUNG, "before csid is stopped");
    let begun = Instant::now();
    m.run("systemctl stop csid.socket csid.service");
    let took = begun.elapsed();
    count("ms until csid has stopped, with 20 hung mounts", took.as_millis() as usize);
    assert!(took < STOP, "{took:?}");
    assert_eq!(m.run("systemctl show csid --property Result --value"), "success");
    assert_eq!(hanging(&m), HUNG, "while csid is stopped");
    assert_eq!(holders(&m), "", "no process has the journal open");
    assert_eq!(other_mounts(), mounts);
    m.run("systemctl start csid && csictl wait local && csictl wait p");
    assert_eq!(other_mounts(), mounts);

    hold(&m, &[]);
    for n in 0..HUNG {
        m.run(&format!("csictl unmount demo v{n} web"));
    }
    m.run(&format!("csictl unmount demo data web && csi-local delete {id}"));
    // systemd reads a table that changes often at most once in a second.
    m.until("! systemctl list-units --plain --no-legend --type mount '*csid*' | grep -v -e '-live.mount ' | grep -q .");
    assert_eq!(m.inventory(), bare, "nothing is left");
    assert_eq!(m.loops(), "", "no loop device");
}
