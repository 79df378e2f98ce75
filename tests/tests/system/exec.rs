//! Commands in a plugin: where they are, what they are given, and how their end comes back.

use csid_tests::search::Haystack;

use crate::machine::Machine;

const UNIT: &str = "csi-plugin-local-default.service";

/// A machine whose csid runs commands, with the plugin `local` in a network of its own.
fn allowed() -> Machine {
    let m = Machine::with_csid();
    m.run("mkdir -p /etc/systemd/system/csi-plugin-local-.service.d");
    let own = "[Service]\nPrivateNetwork=yes\nEnvironment=DROPPED=in\nCapabilityBoundingSet=~CAP_SYS_BOOT\n\
               NoNewPrivileges=yes\n";
    m.write("/etc/systemd/system/csi-plugin-local-.service.d/own.conf", own);
    m.run("systemctl daemon-reload && csictl wait local && csictl plugin restart local");
    let refused = m.run("csictl plugin exec local -- true 2>&1; echo $?");
    assert!(refused.contains("exec = true") && refused.ends_with("125"), "off by default: {refused}");
    assert!(!m.run("csictl status --json").contains("\"exec\""));
    assert!(!m.run("csictl events").contains("plugin-exec"));
    m.run("sed -i '1i exec = true' /etc/csid/csid.toml && systemctl reload csid");
    assert!(m.run("csictl status --json").contains("\"exec\""));
    m
}

/// The exit code, after what was written.
fn ended(m: &Machine, command: &str) -> String {
    m.run(&format!("csictl plugin exec local {command} 2>&1; echo $?"))
}

#[test]
fn command_runs_in_the_plugin_and_returns_its_status() {
    let m = allowed();
    let pid = m.run(&format!("systemctl show {UNIT} --property MainPID --value"));
    let places = "readlink /proc/self/ns/net /proc/self/ns/mnt; cat /proc/self/cgroup";
    let here = m.run(&format!("csictl plugin exec local -- sh -c '{places}'"));
    let there = m.run(&places.replace("self", &pid));
    assert_eq!(here, there, "the plugin's network, mounts and control groups");
    assert!(here.contains(UNIT), "{here}");
    assert_ne!(here.lines().next(), Some(m.run("readlink /proc/1/ns/net").as_str()));
    let bounds = "grep -E 'CapBnd|NoNewPrivs' /proc/self/status";
    let here = m.run(&format!("csictl plugin exec local -- {bounds}"));
    assert_eq!(here, m.run(&bounds.replace("self", &pid)), "no more than the plugin may gain");
    assert!(here.contains("NoNewPrivs:\t1"), "{here}");
    let environment = m.run("csictl plugin exec -C /etc local -- sh -c 'pwd; id -u; env'");
    assert!(environment.starts_with("/etc\n0\n"), "{environment}");
    assert!(environment.contains("CSI_ENDPOINT=unix:///run/csid/plugins/local/default/csi.sock"));

    assert_eq!(ended(&m, "-- sh -c 'exit 7'"), "7");
    assert_eq!(ended(&m, "-- sh -c 'kill -9 $$'"), "137", "what a `$` means is the command's to say");
    assert!(ended(&m, "-- no-such-program").ends_with("\n127"));
    assert!(ended(&m, "-- /etc/passwd").ends_with("\n126"));
    assert!(ended(&m, "-C /nowhere -- true").ends_with("\n125"));
    assert_eq!(ended(&m, "-- printf '%s' 'two\nlines'"), "two\nlines0");
    m.run("csictl plugin exec local -- sh -c 'echo out; echo err >&2' >/root/out 2>/root/err");
    assert_eq!(m.run("cat /root/out; echo -; cat /root/err"), "out\n-\nerr");
    m.run("head -c 10M /dev/urandom >/root/in && csictl plugin exec local -- cat </root/in >/root/out");
    m.run("cmp /root/in /root/out");

    // Ctrl-C ends the command, not the waiting alone.
    m.run("systemd-run --quiet --unit waits csictl plugin exec local -- sleep 4242");
    m.until("pgrep -f '^sleep 4242'");
    assert!(m.run("csictl operations").contains("exec"));
    m.run("systemctl kill --kill-whom=main --signal INT waits");
    m.until("! pgrep -f '^sleep 4242' && ! systemctl --quiet is-active waits");
    m.run("csictl plugin register ext --socket /run/none.sock");
    assert!(m.run("csictl plugin exec ext -- true 2>&1 || true").contains("NotSupported"));
    m.run("csictl plugin unregister ext");

    // One event each, which names the program and none of its arguments; nothing else does.
    m.run("csictl plugin exec local -- sh -c 'exit 0' c4n4ry-4rgum3nt; journalctl --sync || true");
    let events = m.run("csictl events | grep ' plugin-exec '");
    assert!(events.contains("program=sleep") && events.contains("uid=0"), "{events}");
    let mut haystack = Haystack::default();
    haystack.add("events", m.run("csictl events --json").as_bytes());
    haystack.add("journal", &m.bytes("journalctl --no-pager --merge --output=export"));
    haystack.add("state", &m.bytes("cat /var/lib/csid/journal/*"));
    haystack.add("run", &m.bytes("find /run/csid /run/systemd -type f -exec cat {} + || true"));
    let known = haystack.hits("csi-plugin-local-default");
    assert!(known.contains("journal") && known.contains("run"), "only in {known:?}");
    let found = haystack.hits("c4n4ry-4rgum3nt");
    assert!(found.is_empty(), "an argument in {found:?}");
    assert_eq!(m.run("systemctl list-units --all --plain --no-legend 'csi-exec-*'"), "", "no unit is left");
}

#[test]
fn command_on_a_terminal() {
    let m = allowed();
    m.write(
        "/root/inner.sh",
        "test -t 0 && test -t 2 && echo terminal; stty size; touch /root/first\n\
         until [ -e /root/wide ]; do sleep 0.1; done; stty size; touch /root/second\n\
         until [ -e /root/wider ]; do sleep 0.1; done; stty size; exit 5\n",
    );
    m.write(
        "/root/outer.sh",
        "tty >/root/outer; stty rows 30 cols 100; csictl plugin exec --tty local -- sh /root/inner.sh\n\
         code=$?; stty -a | grep -o ' icanon'; exit $code\n",
    );
    m.run(
        "systemd-run --quiet --unit typed --remain-after-exit --property SuccessExitStatus=5 \
         script --quiet --return --command 'sh /root/outer.sh' /root/typescript",
    );
    m.until("[ -e /root/first ]");
    // Followed at once, but not before the signal is.
    m.run("stty -F $(cat /root/outer) rows 44 cols 122");
    let name = "$(csictl operations --json | sed -n 's/.*\"id\": \"\\(csi-exec-.*\\)\".*/\\1/p')";
    let master = m.run(&format!("echo /run/csid/exec/{name}.json"));
    let terminal = m.run(&format!("sed 's/.*\"terminal\":\"\\([^\"]*\\)\".*/\\1/' {master}"));
    m.until(&format!("[ \"$(stty -F {terminal} size)\" = '44 122' ]"));
    m.run("touch /root/wide");
    m.until("[ -e /root/second ]");
    m.run(&format!(
        "busctl call org.csid1 /org/csid1/plugin/local org.csid1.Plugin ResizeExec sqq {name} 55 133"
    ));
    m.run("touch /root/wider");
    m.until("[ $(systemctl show typed --property SubState --value) = exited ]");
    let typed = m.run("tr -d '\\r\\0' </root/typescript");
    assert!(typed.contains("terminal\n30 100\n44 122\n55 133\n icanon\n"), "{typed}");
    assert_eq!(m.run("systemctl show typed --property ExecMainStatus --value"), "5");

    // Whose terminal is gone is hung up.
    m.run(
        "systemd-run --quiet --unit gone script --quiet --command \
         'csictl plugin exec --tty local -- sleep 4242' /dev/null",
    );
    m.until("pgrep -f '^sleep 4242'");
    m.run("pkill -KILL -x csictl");
    m.until("! pgrep -f '^sleep 4242'");
}

#[test]
fn command_outlives_csid_but_not_its_plugin() {
    let m = allowed();
    let begin = |unit: &str, script: &str| {
        m.write(&format!("/root/{unit}.sh"), script);
        m.run(&format!(
            "systemd-run --quiet --unit {unit} --remain-after-exit --property SuccessExitStatus='3 9' \
             csictl plugin exec local -- sh /root/{unit}.sh"
        ));
        m.until(&format!("[ -e /root/{unit}.runs ]"));
    };
    let code = |unit: &str| {
        m.until(&format!("[ $(systemctl show {unit} --property SubState --value) = exited ]"));
        m.run(&format!("systemctl show {unit} --property ExecMainStatus --value"))
    };
    begin("stays", "touch /root/stays.runs; until [ -e /root/go ]; do sleep 0.1; done; exit 9\n");
    m.run("systemctl restart csid && systemctl kill --signal KILL csid && touch /root/go");
    assert_eq!(code("stays"), "9", "also one that ended while csid was away");
    m.until("csictl wait local");

    begin("goes", "trap 'exit 3' TERM; touch /root/goes.runs; while :; do sleep 0.1; done\n");
    m.run("csictl plugin restart local");
    assert_eq!(code("goes"), "3");
    assert_eq!(m.run("csictl operations 2>&1"), "No operations.");

    // They are few.
    m.run(
        "for i in {1..16}; do systemd-run --quiet --unit many-$i csictl plugin exec local -- sleep 4242; done",
    );
    m.until("[ $(pgrep -fc '^sleep 4242') = 16 ]");
    let refused = ended(&m, "-- true");
    assert!(refused.contains("RateLimited"), "{refused}");
    m.run("systemctl stop csi-plugin-local-default.service");
    m.until("! pgrep -f '^sleep 4242'");
}

#[test]
fn uid_but_root_runs_four_commands_at_once() {
    let m = allowed();
    let rule = "polkit.addRule(function(action, subject) {
        if (subject.user == 'runner' && action.id == 'org.csid1.plugin-exec') return polkit.Result.YES;
    });";
    m.write("/etc/polkit-1/rules.d/10-runner.rules", rule);
    m.run(
        "chmod 644 /etc/polkit-1/rules.d/10-runner.rules; useradd --system runner; systemctl restart polkit",
    );
    let theirs = || m.run("runuser -u runner -- csictl plugin exec local -- true 2>&1; echo $?");
    assert_eq!(theirs(), "0", "polkit allows it");
    m.run(
        "for i in {1..4}; do systemd-run --quiet --uid runner --unit many-$i csictl plugin exec local -- sleep 4242; done",
    );
    m.until("[ $(pgrep -fc '^sleep 4242') = 4 ]");
    let refused = theirs();
    let answer = ["RateLimited", "4 commands of uid", "csictl operations"];
    assert!(answer.iter().all(|text| refused.contains(text)) && refused.ends_with("125"), "{refused}");
    assert_eq!(ended(&m, "-- true"), "0", "there is room for others");
    m.run("csictl cancel $(csictl operations --json | sed -n 's/.*\"id\": \"\\(csi-exec-.*\\)\".*/\\1/p' | head -n 1)");
    assert_eq!(theirs(), "0");
}

/// A csid that is killed on the way leaves a record with arguments, and no unit that would take them.
#[test]
fn arguments_of_an_unstarted_command_are_removed() {
    let m = allowed();
    m.run("systemd-run --quiet --unit runs csictl plugin exec local -- sleep 4242");
    m.until("pgrep -f '^sleep 4242'");
    let record = r#"{"plugin": "local", "uid": 0, "terminal": null, "end": null, "request": {"unit": "u.service", "pid": 1,
                     "argv": ["sh", "c4n4ry-4rgum3nt"], "environment": {}, "directory": null}}"#;
    m.write("/root/record", record);
    m.run("cp /root/record /run/csid/exec/csi-exec-00000000000000000000000000000000.json");
    m.run("systemctl kill --signal KILL csid");
    m.until("csictl status");
    m.until("! grep -r c4n4ry-4rgum3nt /run/csid");
    assert!(m.run("csictl operations").contains("exec"), "what runs is known");
}

/// Its main process may be a container's manager, which is on the host.
#[test]
fn foreign_units_plugin_runs_no_command_on_the_host() {
    let m = allowed();
    let unit = |more: &str| {
        let driver = "[Service]\nRuntimeDirectory=driver\nEnvironment=CSI_ENDPOINT=unix:///run/driver/csi.sock\n\
                      ExecStart=/usr/sbin/csi-local serve\n";
        m.write("/etc/systemd/system/driver.service", &format!("{driver}{more}"));
        m.run("systemctl daemon-reload");
    };
    let exec = "csictl plugin exec adopted -- readlink /proc/self/ns/mnt 2>&1; echo $?";
    unit("");
    m.run("csictl plugin register adopted --unit driver.service --socket /run/driver/csi.sock && csictl wait adopted");
    let refused = m.run(exec);
    let answer = ["NotSupported", "driver.service", "on the host", "podman exec"];
    assert!(answer.iter().all(|text| refused.contains(text)) && refused.ends_with("125"), "{refused}");
    assert!(m.run("csictl events | grep plugin-exec").contains("NotSupported"));
    unit("PrivateTmp=yes\n");
    m.run("systemctl restart driver");
    m.until("csictl plugin exec adopted -- true");
    let there = m.run("readlink /proc/$(systemctl show driver --property MainPID --value)/ns/mnt");
    assert_eq!(m.run(exec), format!("{there}\n0"));
}

/// Says which file it runs from as soon as it is loaded, and whether that can be opened for writing.
const LOADED: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

__attribute__((constructor)) static void loaded(void) {
    struct stat own;
    char target[256] = {0};
    if (stat("/proc/self/exe", &own) || readlink("/proc/self/exe", target, sizeof target - 1) < 0) return;
    int fd = open("/proc/self/exe", O_WRONLY);
    int wrote = fd >= 0 && write(fd, "x", 1) == 1;
    dprintf(2, "runs from %s %ju:%ju wrote %d\n", target, (uintmax_t)own.st_dev, (uintmax_t)own.st_ino, wrote);
}
"#;

#[test]
fn plugin_cannot_reach_csids_own_program() {
    let m = allowed();
    m.write("/root/loaded.c", LOADED);
    m.run("cc -include stdint.h -shared -fPIC -o /usr/local/lib/loaded.so /root/loaded.c");
    let argv = r#"argv = ["/usr/sbin/csi-local", "serve"]"#;
    m.write(
        "/etc/csid/plugins.d/local.toml",
        &format!("supervision = \"managed\"\n{argv}\nprofile = \"node-block\"\nenvironment = {{ LD_PRELOAD = \"/usr/local/lib/loaded.so\" }}\n"),
    );
    m.run("systemctl reload csid && csictl wait local");
    let program = m.run("stat --format %d:%i /usr/sbin/csid; sha256sum /usr/sbin/csid");
    let host = program.lines().next().expect("its number").to_owned();

    // The helper is the parent of the command.
    let parent = m.run("csictl plugin exec local -- sh -c 'readlink /proc/$PPID/exe; stat -L -c %d:%i /proc/$PPID/exe' 2>/dev/null");
    assert!(!parent.is_empty() && !parent.contains(&host), "{parent}");
    // A script for the program that the command's process runs from before it is the command.
    m.write_program("/root/script", "#!/proc/self/exe\n");
    let script = m.run("csictl plugin exec local -- /root/script 2>&1 || true");
    assert!(script.contains("runs from /") && script.contains("memfd:csid"), "{script}");
    assert!(!script.contains(&host) && !script.contains("wrote 1"), "{script}");
    // Where the kernel executes no file in memory, it is the program in a read-only mount.
    let noexec = m.run("sysctl --write vm.memfd_noexec=2 >&2 && echo set || true");
    if noexec == "set" {
        let script = m.run(
            "csictl plugin exec local -- /root/script 2>&1; sysctl --write vm.memfd_noexec=0 >&2 || true",
        );
        assert!(script.contains("runs from /") && !script.contains("wrote 1"), "{script}");
    }
    assert_eq!(m.run("stat --format %d:%i /usr/sbin/csid; sha256sum /usr/sbin/csid"), program);
}
