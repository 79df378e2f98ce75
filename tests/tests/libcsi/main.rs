//! libcsi as C programs use it: linked with the shared library, and with the static one under AddressSanitizer and under
//! valgrind, against a csid on real mounts. The programs are in libcsi-ffi/tests/c.

mod programs;

use std::process::Command;

use csid_client::{AccessMode, DeregisterOptions};
use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy};
use csid_tests::script::{self, Act, Rule};
use csid_tests::world::{World, child, count, eventually, world};
use programs::{As, Program, built};

#[test]
fn library_exports_its_entries_and_nothing_else() {
    let library = built().join("lib/libcsi.so.1");
    let text = |program: &str, arguments: &[&str]| {
        let done = Command::new(program).args(arguments).arg(&library).output().unwrap();
        assert!(done.status.success());
        String::from_utf8(done.stdout).unwrap()
    };
    let symbols = text("nm", &["--dynamic", "--defined-only", "--with-symbol-versions"]);
    let mut exported = 0;
    for line in symbols.lines().filter(|line| !line.ends_with(" LIBCSI_1.0")) {
        let name = line.split(' ').next_back().unwrap();
        assert!(name.starts_with("csi_") && name.ends_with("@@LIBCSI_1.0"), "{line}");
        exported += 1;
    }
    assert_eq!(exported, entries().len(), "as many as the header has");
    assert!(text("readelf", &["--dynamic"]).contains("Library soname: [libcsi.so.1]"));
    count("entries", exported);
}

/// Returns the entries of the header.
fn entries() -> Vec<String> {
    let header = std::fs::read_to_string(built().join("include/csi.h")).unwrap();
    let name = |line: &str| {
        let before = line.split_once('(')?.0;
        let name = before.rsplit([' ', '*']).next().filter(|name| name.starts_with("csi_"))?;
        Some(name.to_owned())
    };
    header
        .lines()
        .filter(|line| !line.starts_with("//") && !line.starts_with(" *"))
        .filter_map(name)
        .collect()
}

/// Runs one of the programs in all ways, each time in a world of its own.
fn in_all_ways<F>(name: &'static str, run: F)
where
    F: for<'w> AsyncFn(&'w mut World, As) + Clone + Send + 'static,
{
    for way in [As::Shared, As::Sanitized, As::Valgrind] {
        eprintln!("{name} {way:?}");
        let run = run.clone();
        world(async move |w| run(w, way).await);
    }
}

#[test]
fn volume_is_mounted_and_unmounted() {
    in_all_ways("path", async |w: &mut World, way| {
        // The scheduler's own: the program registers it with csid.
        w.add_plugin("p").await;
        std::fs::remove_file(w.path("etc/plugins.d/p.toml")).unwrap();
        let client = w.start().await;
        let socket = w.plugin("p").witnessed_socket();
        Program::start(w, "path", way, &[("PLUGIN_SOCKET", socket.as_os_str())]).ends().await;
        let calls = w.plugin("p").volume_calls();
        assert_eq!(calls.len(), 3, "staged once, published twice");
        for call in calls {
            assert_eq!(call.call.secrets, [("password".to_owned(), "c4n4ry-s3cr3t-4242".to_owned())]);
        }
        // csid is another one, and so is the program.
        w.kill();
        let client = {
            drop(client);
            w.start().await
        };
        healthy(&client, "p").await;
        Program::start(w, "again", way, &[]).ends().await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_is_opened_as_a_descriptor() {
    in_all_ways("opening", async |w: &mut World, way| plain(w, "opening", way).await);
}

async fn plain(w: &mut World, name: &'static str, way: As) {
    let client = running(w).await;
    Program::start(w, name, way, &[]).ends().await;
    w.nothing_left(&client).await;
}

#[test]
fn wrong_arguments_are_reported() {
    in_all_ways("arguments", async |w: &mut World, way| plain(w, "arguments", way).await);
}

#[test]
fn many_threads_use_one_client() {
    in_all_ways("threads", async |w: &mut World, way| plain(w, "threads", way).await);
}

#[test]
fn forked_child_gets_an_error() {
    // Not under valgrind, to which what the child must leave alone is lost.
    for way in [As::Shared, As::Sanitized] {
        world(async move |w| plain(w, "forked", way).await);
    }
}

#[test]
fn no_panic_gets_out() {
    world(async |w| {
        let client = running(w).await;
        let said = Program::start(w, "panics", As::Shared, &[]).ends().await;
        assert_eq!(said.trim(), format!("{} entries", entries().len()), "every entry was tried");
        w.nothing_left(&client).await;
    });
}

/// Less than a minute in all. `CSID_SEED` says which arguments; a run of another seed tries others.
#[test]
fn arguments_at_random_break_nothing() {
    let program = std::fs::read_to_string(programs::source("fuzz.c")).unwrap();
    let unnamed: Vec<_> =
        entries().into_iter().filter(|entry| !program.contains(&format!("{entry}("))).collect();
    // Those that begin an operation are named without their arguments.
    let missing: Vec<_> = unnamed.iter().filter(|entry| !program.contains(&format!("({entry}, "))).collect();
    assert!(missing.is_empty(), "fuzz.c does not call {missing:?}");
    let seed = std::env::var("CSID_SEED").unwrap_or_else(|_| std::process::id().to_string());
    for (way, seconds) in [(As::Shared, "8"), (As::Sanitized, "20"), (As::Valgrind, "15")] {
        eprintln!("{way:?} FUZZ_SEED={seed}");
        let seed = seed.clone();
        world(async move |w| {
            let client = running(w).await;
            let environment = [("FUZZ_SEED", seed.as_ref()), ("FUZZ_SECONDS", seconds.as_ref())];
            let inputs = Program::start(w, "fuzz", way, &environment).ends().await;
            count(&format!("inputs of 400 bytes, {way:?}"), inputs.trim().parse().unwrap());
            client.manager().await.expect("csid is none the worse");
        });
    }
}

#[test]
fn plugin_error_is_returned_in_full() {
    in_all_ways("errors", async |w: &mut World, way| {
        let client = running(w).await;
        let code = 9; // FAILED_PRECONDITION
        let says = Act::Say(code, "the shelf is empty".to_owned());
        w.plugin("p").rules([Rule::always("NodeStageVolume", says).of("refused")]);
        Program::start(w, "errors", way, &[]).ends().await;
        w.nothing_left(&client).await;
    });
}

fn slow() -> Rule {
    Rule::always("NodeStageVolume", Act::Delay(3_600_000)).of("slow")
}

#[test]
fn cancellation_ends_the_call_here_and_in_csid() {
    in_all_ways("cancel", async |w: &mut World, way| {
        let client = running(w).await;
        w.plugin("p").rules([slow()]);
        Program::start(w, "cancel", way, &[]).ends().await;
        w.plugin("p").honest();
        w.nothing_left(&client).await;
    });
}

#[test]
fn closed_client_ends_nothing_in_csid() {
    in_all_ways("closing", async |w: &mut World, way| {
        let client = running(w).await;
        w.plugin("p").rules([slow()]);
        Program::start(w, "closing", way, &[]).ends().await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn deadline_holds_whatever_csid_does() {
    in_all_ways("deadline", async |w: &mut World, way| {
        let client = running(w).await;
        w.plugin("p").rules([slow(), Rule::always("NodeStageVolume", Act::Delay(300)).of("v")]);
        // A host with registered volumes looks for a volume's record before it begins the operation.
        registered(&client, "other", &[AccessMode::SingleNodeWriter]).await;
        let mut program = Program::start(w, "deadline", way, &[]);
        let csid = rustix::process::Pid::from_raw(w.csid_pid().cast_signed()).unwrap();
        program.asks("stop csid").await;
        rustix::process::kill_process(csid, rustix::process::Signal::STOP).unwrap();
        program.answer();
        program.asks("go on").await;
        rustix::process::kill_process(csid, rustix::process::Signal::CONT).unwrap();
        program.answer();
        program.ends().await;
        w.plugin("p").honest();
        client.deregister_volume(NAMESPACE, "other", DeregisterOptions::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn calls_outlive_a_killed_csid() {
    in_all_ways("restart", async |w: &mut World, way| {
        running(w).await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(200))]);
        let mut program = Program::start(w, "restart", way, &[]);
        for _ in 0..3 {
            program.asks("kill csid").await;
            w.kill();
            program.answer();
            program.asks("start csid").await;
            w.launch(&[]).await;
            program.answer();
        }
        program.asks("kill csid").await;
        w.kill();
        program.answer();
        program.ends().await;
        let client = w.start().await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn events_are_delivered_in_order_with_gaps() {
    in_all_ways("events", async |w: &mut World, way| {
        running(w).await;
        let mut program = Program::start(w, "events", way, &[]);
        program.asks("kill csid").await;
        w.kill();
        program.answer();
        program.asks("start csid").await;
        w.launch(&[]).await;
        program.answer();
        program.ends().await;
    });
}

#[test]
fn new_journal_is_a_gap_on_the_bus() {
    in_all_ways("journal", async |w: &mut World, way| {
        let bus = Bus::start(w, Policy::Everything).await;
        running(w).await;
        bus.has_csid().await;
        let address = format!("unix:path={}", bus.socket.display());
        let environment = [("DBUS_SYSTEM_BUS_ADDRESS", address.as_ref())];
        let mut program = Program::start(w, "journal", way, &environment);
        program.asks("new journal").await;
        healthy(&w.begin_new_journal().await, "p").await;
        bus.has_csid().await;
        program.answer();
        program.ends().await;
    });
}

#[test]
fn controller_and_claims() {
    in_all_ways("volumes", async |w: &mut World, way| {
        w.add_plugin("p").await;
        w.plugin("p").set(|script| {
            script.control(&script::CONTROLLER);
            script.capabilities.extend(["GET_VOLUME_STATS", "EXPAND_VOLUME"].map(str::to_owned));
        });
        let client = w.start().await;
        healthy(&client, "p").await;
        Program::start(w, "volumes", way, &[]).ends().await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn example_outlives_csid_and_itself() {
    world(async |w| {
        running(w).await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(500))]);
        let scheduler = |w: &World| {
            let mut command = child(&built().join("mini_scheduler"));
            command.args(["p", "a", "b", "c"]);
            Program::spawn(w, "mini_scheduler", command)
        };
        let mut first = scheduler(w);
        eventually("it mounts", async || w.plugin("p").begun_since(0, "NodeStageVolume") == 3).await;
        w.kill();
        w.launch(&[]).await;
        let mut sources = Vec::new();
        for _ in 0..3 {
            sources.push(first.says().await);
        }
        first.kill();
        // Another one finds what the first has mounted.
        let staged = w.plugin("p").volume_calls().len();
        let mut second = scheduler(w);
        for _ in 0..3 {
            let source = second.says().await;
            assert!(sources.contains(&source), "{source} is none of {sources:?}");
        }
        assert_eq!(w.plugin("p").volume_calls().len(), staged, "nothing was mounted again");
        second.close();
        assert_eq!(second.ends().await, "unmounted".repeat(3));
        let client = w.client().await;
        w.nothing_left(&client).await;
    });
}
