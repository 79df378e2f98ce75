//! Claims that end with a systemd unit, or with a name on the system bus.

use csid_tests::world::count;

use crate::credentials::test_plugin;
use crate::machine::Machine;

const GRACE: u64 = 3;

/// Claims the volume `later` with a unit of its own, which then runs.
fn claim_later(m: &Machine, more: &str) {
    m.run(&format!("systemctl start later && csictl claim demo later job --bind-unit later.service {more}"));
}

/// Ends the unit of [`claim_later`], and waits until csid has released its claim. systemd signals the end of `later` after what
/// happened to other units before, so by then csid has acted on all that, with the same grace time or a shorter one.
fn later_ends(m: &Machine) {
    m.run("systemctl stop later");
    m.until("! csictl claims --json | grep -q '\"later\"'");
}

fn mount(m: &Machine, consumer: &str, more: &str) -> String {
    m.run(&format!("csictl mount demo v {consumer} --bind-unit db.service {more}"))
}

/// What the claims' events since then say of why: of each that names a reason, the state that it came to.
fn reasons(m: &Machine, bound: &str) -> usize {
    let events = m.run("csictl events --json");
    events.lines().filter(|line| line.contains("claim-changed") && line.contains(bound)).count()
}

#[test]
fn claim_ends_with_its_unit_or_bus_name() {
    let m = Machine::with_csid();
    let _plugin = test_plugin(&m);
    m.run("csictl volume register demo v --plugin p --external-id v --access-mode single-node-multi-writer");
    m.run(
        "csictl volume register demo later --plugin p --external-id later --access-mode single-node-writer",
    );
    for unit in ["db", "later"] {
        let file = format!("/etc/systemd/system/{unit}.service");
        m.write(&file, "[Service]\nExecStart=sleep infinity\nExecReload=/bin/true\n");
    }
    m.run("systemctl daemon-reload");
    let claims = || m.run("csictl claims --json");
    let released = |consumer: &str| m.until(&format!("! csictl claims --json | grep -q '\"{consumer}\"'"));

    // It does not run yet.
    let refused = m.run("csictl mount demo v web --bind-unit db.service 2>&1 && echo mounted || true");
    assert!(refused.contains("does not run"), "{refused}");

    m.run("systemctl start db");
    let path = mount(&m, "web", "");
    claim_later(&m, "");
    m.run("systemctl reload db");
    later_ends(&m);
    assert!(m.run(&format!("mountpoint -q {path}; echo $?")) == "0", "a reload ends nothing");
    m.run("systemctl stop db");
    released("web");
    m.run(&format!("! mountpoint -q {path}"));
    assert!(reasons(&m, "unit:db.service") > 0, "{}", m.run("csictl events --json"));

    // A restart within the grace time, and a failure; csid's own restart in between.
    let longer = format!("--grace {}s", GRACE + 1);
    m.run("systemctl start db");
    let path = mount(&m, "web", &format!("--grace {GRACE}s"));
    claim_later(&m, "");
    m.run("systemctl stop db");
    later_ends(&m);
    m.run("systemctl start db");
    claim_later(&m, &longer);
    later_ends(&m);
    m.run(&format!("mountpoint -q {path}"));
    m.run("systemctl restart csid && csictl wait p");
    claim_later(&m, &longer);
    later_ends(&m);
    m.run(&format!("mountpoint -q {path}"));
    // What is in use is not taken away: csid has tried.
    m.run(&format!("systemd-run --quiet --unit user --working-directory {path} sleep 600"));
    m.run("systemctl kill --signal KILL db");
    m.until("csictl claims --json | grep -q 'is in use'");
    m.run(&format!("mountpoint -q {path}"));
    m.run("systemctl stop user");
    released("web");
    m.run(&format!("! mountpoint -q {path}"));

    // It stopped while csid was away.
    m.run("systemctl reset-failed; systemctl start db");
    mount(&m, "web", "");
    m.run("systemctl stop csid.service csid.socket && systemctl stop db && systemctl start csid");
    released("web");

    // busctl's name is gone when it has its answer.
    m.run(
        "busctl call org.csid1 /org/csid1 org.csid1.Manager Claim 'sssa{sv}' demo v caller 2 bind s caller \
         grace-usec t 3000000",
    );
    assert!(claims().contains("\"caller\""), "within the grace time: {}", claims());
    m.run("systemctl restart csid && csictl wait p");
    released("caller");
    assert!(!claims().contains("db.service"), "{}", claims());
    count("claims ended with what they were bound to", 4);
}

/// Units without a process, which start and end at once.
const UNITS: usize = 100;

#[test]
fn systemd_is_asked_only_about_what_changes() {
    let m = Machine::with_csid();
    let _plugin = test_plugin(&m);
    m.run("csictl volume register demo v --plugin p --external-id v --access-mode single-node-multi-writer");
    m.run(&format!("systemctl start bound{{1..{UNITS}}}.slice"));
    m.run(&format!(
        "for n in {{1..{UNITS}}}; do csictl claim demo v job$n --bind-unit bound$n.slice >/dev/null || exit 1; done"
    ));
    let ends = |n: usize| {
        m.run(&format!("systemctl stop bound{n}.slice"));
        m.until(&format!("! csictl claims --json | grep -q '\"job{n}\"'"));
    };
    ends(1);
    m.run(
        "systemd-run --quiet --unit calls --property StandardOutput=truncate:/root/calls dbus-monitor --system \
         \"type='method_call',destination='org.freedesktop.systemd1'\"",
    );
    m.until("grep -q member=NameAcquired /root/calls || grep -q member /root/calls");
    (2..=6).for_each(ends);
    let asked = m.run("grep member=ListUnitsByNames /root/calls | wc -l");
    let names = m.run("grep -o 'string \"bound[0-9]*.slice\"' /root/calls | wc -l");
    let number = |text: &str| text.trim().parse::<usize>().expect("a number");
    count("calls to PID 1 while five of 100 units end", number(&asked));
    // One for each that has ended; the look at all of them may fall in between.
    assert!((5..=10).contains(&number(&asked)), "{}", m.run("cat /root/calls"));
    assert!(number(&names) <= 10 + UNITS, "{names} names");

    // systemd reads its definitions again, and is executed again: nothing ends by that, and ends are seen afterwards.
    m.run("systemctl daemon-reload");
    ends(7);
    m.run("systemctl daemon-reexec");
    ends(8);
    // A systemd that is executed again may hang up on systemctl, which then has stopped nothing.
    m.run("systemctl daemon-reexec & until systemctl stop bound9.slice; do sleep 0.1; done; wait");
    m.until("! csictl claims --json | grep -q '\"job9\"'");
    let left = m.run("csictl claims --json | grep -o '\"job[0-9]*\"' | sort -u | wc -l");
    assert_eq!(number(&left), UNITS - 9);
    count("units that stay", UNITS - 9);
}
