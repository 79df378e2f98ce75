//! `nobody` on the real system bus, with the real polkitd and without, and with every outer defence taken away.

use csid_tests::raw::{self, MANAGER, MemberKind, PLUGIN};
use csid_tests::world::count;

use crate::machine::Machine;

/// busctl's words for a harmless value.
fn words(method: &str, argument: &str, of: &str) -> String {
    let value = match (method, argument, of) {
        ("WaitForPlugin", "service", _) => "node",
        ("WaitForPlugin", "id", _) => "local",
        ("Mount", "options", _) => "2 plugin s local external-id s x",
        ("RegisterPlugin", "spec", _) => "2 supervision s external socket s /run/x.sock",
        (_, _, "s") => "x",
        (_, _, "b") => "false",
        (_, _, "o") => "/",
        (_, _, "as" | "a{sv}" | "a{ss}" | "aa{sv}" | "aa{ss}") => "0",
        _ => "1",
    };
    value.to_owned()
}

/// A script that calls everything the contract has as nobody, one line of answer per call.
fn script(address: &str) -> (String, usize) {
    let mut lines = vec!["exec 2>&1".to_owned()];
    let mut calls = 0;
    let mut add = |member: &str, path: &str, rest: &str| {
        calls += 1;
        lines.push(format!(
            "echo \"{member} $(timeout 60 busctl {address} call org.csid1 {path} {rest} 2>&1)\""
        ));
    };
    for member in raw::members(csi_proto::DBUS_INTERFACE_XML) {
        let path = if member.interface == PLUGIN { "/org/csid1/plugin/local" } else { "/org/csid1" };
        match &member.kind {
            MemberKind::Signal => {}
            MemberKind::Property => add(
                &member.name,
                path,
                &format!("org.freedesktop.DBus.Properties Get ss {} {}", member.interface, member.name),
            ),
            MemberKind::Method(arguments) => {
                let signature: String = arguments.iter().map(|(_, of)| of.as_str()).collect();
                let values: Vec<_> =
                    arguments.iter().map(|(name, of)| words(&member.name, name, of)).collect();
                let rest = format!("{} {} {signature} {}", member.interface, member.name, values.join(" "));
                add(&member.name, path, rest.trim());
            }
        }
    }
    for (path, interface) in [("/org/csid1", MANAGER), ("/org/csid1/plugin/local", PLUGIN)] {
        add("GetAll", path, &format!("org.freedesktop.DBus.Properties GetAll s {interface}"));
    }
    add("GetManagedObjects", "/org/csid1", "org.freedesktop.DBus.ObjectManager GetManagedObjects");
    (lines.join("\n"), calls)
}

/// All of it is refused, by csid's own words.
fn refused(m: &Machine, address: &str, how: &str) {
    let (script, calls) = script(address);
    m.write("/root/calls.sh", &script);
    m.run("cp /root/calls.sh /tmp/calls.sh && chmod 644 /tmp/calls.sh");
    let answers = m.run("runuser -u nobody -- bash /tmp/calls.sh");
    let lines: Vec<_> = answers.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.len(), calls, "one answer per call: {answers}");
    let (mut by_csid, mut unserved) = (0, 0);
    for line in lines {
        if line.contains("may not do org.csid1.") {
            by_csid += 1;
        } else {
            assert!(line.contains("has no method"), "{how}: {line}");
            unserved += 1;
        }
    }
    assert!(by_csid >= 40, "{how}: {by_csid} refused of {calls}");
    count(&format!("calls of nobody refused {how}"), by_csid);
    count("members that are not served", unserved);
}

#[test]
fn unprivileged_user_is_refused_by_csid() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    m.run("systemctl start polkit");
    let plugins = m.run("csictl plugin list --json");
    refused(&m, "--system", "with polkitd");

    m.run("systemctl mask --now polkit");
    m.run("mv /usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service /root/ && systemctl reload dbus");
    refused(&m, "--system", "without polkitd");

    // A policy that allows everything, and a socket that anybody can open.
    let open = r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><policy context="mandatory"><allow send_destination="*"/><allow receive_sender="*"/></policy></busconfig>"#;
    m.write("/etc/dbus-1/system.d/everything.conf", open);
    m.run("systemctl reload dbus && chmod 0666 /run/csid/csid.sock");
    refused(&m, "--system", "with a policy that allows everything");
    let peer = m.try_run(
        "runuser -u nobody -- busctl --address=unix:path=/run/csid/csid.sock call org.csid1 /org/csid1 \
         org.csid1.Manager ListPlugins",
    );
    assert!(!peer.status.success(), "{peer:?}");
    assert_eq!(m.run("csictl plugin list --json"), plugins, "nothing changed");
}

#[test]
fn signals_and_the_group() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    m.run("systemctl start polkit; useradd --system --groups csid member");
    // nobody listens while things happen; so does a member of the group. Both hear a signal of root's own before and after it.
    let listens = |who: &str| {
        m.run(&format!(
            "systemd-run --quiet --uid {who} --property StandardOutput=truncate:/root/heard.{who} \
             dbus-monitor --system \"type='signal',path_namespace='/org/csid1'\""
        ));
    };
    let hear = |mark: &str| {
        m.until(&format!(
            "dbus-send --system --type=signal /org/csid1 org.test.{mark}; \
             grep -q member={mark} /root/heard.nobody && grep -q member={mark} /root/heard.member"
        ));
    };
    ["nobody", "member"].into_iter().for_each(listens);
    hear("Begin");
    m.run(
        "id=$(csi-local create data --size 64M) && \
         csictl mount demo data web --plugin local --external-id $id && csictl unmount demo data web && \
         csi-local delete $id",
    );
    m.until("grep -q 'string \"unmount\"' /root/heard.member");
    hear("End");
    let heard = m.run("for who in nobody member; do grep 'path=/org/csid1' /root/heard.$who | grep -vc 'interface=org.test;'; done; true");
    let heard: Vec<usize> = heard.lines().map(|line| line.parse().expect("a number")).collect();
    assert_eq!(heard[0], 0, "nobody hears nothing");
    assert!(heard[1] >= 2, "the group hears of it: {heard:?}");
    count("signals the group heard and nobody did not", heard[1]);
    assert_eq!(m.run("stat -c '%a %U %G' /run/csid/csid.sock"), "660 root csid");
    // What the group may: read, and no inline mount.
    m.run("runuser -u member -- csictl mounts");
    m.run("runuser -u member -- csictl plugin list");
    let inline = m.try_run("runuser -u member -- csictl mount demo x y --plugin local --external-id x");
    let said = String::from_utf8_lossy(&inline.stderr).into_owned();
    assert!(!inline.status.success() && said.contains("org.csid1.inline"), "{said}");
    for command in ["csictl reload", "csictl reconcile", "csictl plugin unregister local"] {
        let output = m.try_run(&format!("runuser -u member -- {command}"));
        assert!(!output.status.success(), "{command}: {output:?}");
    }
    let nobody = m.try_run("runuser -u nobody -- csictl mounts");
    assert!(!nobody.status.success());
}

/// A socket unit of an administrator's, or a mistake, gives csid a socket that is neither of its own.
#[test]
fn only_csids_own_socket_is_the_private_one() {
    let m = Machine::with_csid();
    m.run("mkdir -p /etc/systemd/system/csid.socket.d");
    m.write("/etc/systemd/system/a.socket", "[Socket]\nListenStream=127.0.0.1:4242\nService=csid.service\n");
    m.write(
        "/etc/systemd/system/csid.socket.d/a.conf",
        "[Socket]\nListenStream=\nListenStream=127.0.0.1:4243\nListenStream=/run/csid/csid.sock\n",
    );
    m.run("systemctl daemon-reload && systemctl stop csid.service csid.socket");
    m.run("systemctl start a.socket csid.socket csid.service");
    m.run("CSID_SOCKET=/run/csid/csid.sock csictl status");
    m.run("journalctl --sync || true");
    let reply = m.run("journalctl --unit csid --grep 'systemd passes is closed'");
    assert_eq!(reply.lines().count(), 2, "{reply}");
}

/// As docs/polkit.md shows it: a rule that uses the call's details.
#[test]
fn polkit_rule_allows_one_namespace_alone() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    let rule = r#"polkit.addRule(function (action, subject) {
        var granted = ["org.csid1.mount", "org.csid1.unmount"];
        if (granted.indexOf(action.id) >= 0 && subject.user == "batch" && action.lookup("namespace") == "batch") {
            return polkit.Result.YES;
        }
    });"#;
    m.write("/etc/polkit-1/rules.d/50-batch.rules", rule);
    m.run("chmod 644 /etc/polkit-1/rules.d/50-batch.rules; useradd --system batch; systemctl restart polkit");
    for namespace in ["batch", "other"] {
        let id = m.run(&format!("csi-local create {namespace} --size 64M"));
        m.run(&format!(
            "csictl volume register {namespace} data --plugin local --external-id {id} --access-mode single-node-writer"
        ));
    }
    let by = |user: &str, command: &str| {
        let output = m.try_run(&format!("runuser -u {user} -- csictl {command}"));
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (mounted, said) = by("batch", "mount batch data job");
    assert!(mounted, "the rule allows it: {said}");
    for (user, command) in [
        ("batch", "mount other data job"),
        ("batch", "unmount other data job"),
        ("nobody", "mount batch data other"),
        ("batch", "volume deregister batch data"),
    ] {
        let (done, said) = by(user, command);
        assert!(!done && said.contains("may not do org.csid1."), "{user} {command}: {said}");
    }
    assert!(m.run("csictl mounts").contains("mounted"));
    let (unmounted, said) = by("batch", "unmount batch data job");
    assert!(unmounted, "the rule allows it: {said}");
    // A rule that allows everything gives no option of root's.
    let everything = "polkit.addRule(function (action, subject) {
        return subject.user == \"batch\" ? polkit.Result.YES : polkit.Result.NOT_HANDLED;
    });";
    m.write("/etc/polkit-1/rules.d/40-everything.rules", everything);
    m.run("chmod 644 /etc/polkit-1/rules.d/40-everything.rules; systemctl restart polkit");
    let (forgotten, said) = by("batch", "volume deregister --forget --yes batch/none batch none");
    assert!(!forgotten && said.contains("forget requires root"), "{said}");
    let (done, said) = by("batch", "volume deregister batch none");
    assert!(done, "the rule allows it: {said}");
    m.run("rm /etc/polkit-1/rules.d/40-everything.rules");
    // Without the rule nothing is allowed.
    m.run("rm /etc/polkit-1/rules.d/50-batch.rules; systemctl restart polkit");
    let (mounted, said) = by("batch", "mount batch data job");
    assert!(!mounted && said.contains("may not do org.csid1.mount"), "{said}");
}
