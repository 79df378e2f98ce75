//! Secrets that a volume names instead of giving them: systemd's credentials, as they are when they are used.

use std::os::unix::net::UnixListener;

use csid_tests::plugin::TestPlugin;
use csid_tests::search::Haystack;
use csid_tests::world::count;

use crate::machine::Machine;

const NAME: &str = "csid.demo.key";
const MOUNT: &str = "csictl mount demo v web --plugin p --external-id v --credential csid.demo.key";

/// The test plugin in the machine, known to csid, with its volume `v`; it writes down what secrets it is given.
pub fn test_plugin(m: &Machine) -> TestPlugin {
    let program = m.path("/usr/local/sbin/test-plugin");
    std::fs::copy(env!("CARGO_BIN_EXE_test-plugin"), program).expect("the plugin's program");
    let plugin = TestPlugin::new(m.path("/var/lib/p"));
    plugin.provision("v");
    m.run("systemd-run --quiet --unit p /usr/local/sbin/test-plugin /var/lib/p");
    m.write("/etc/csid/plugins.d/p.toml", "supervision = \"external\"\nsocket = \"/var/lib/p/csi.sock\"\n");
    m.run("systemctl reload csid && csictl wait p");
    plugin
}

fn document(value: &str) -> String {
    format!(r#"{{"password":"{value}"}}"#)
}

/// Mount and unmount; what the plugin was given.
fn given(m: &Machine, plugin: &TestPlugin) -> String {
    m.run(&format!("{MOUNT} && csictl unmount demo v web"));
    let calls = plugin.volume_calls();
    let staged = calls.iter().rfind(|call| call.call.rpc == "NodeStageVolume").expect("a stage");
    staged.call.secrets.iter().map(|(_, value)| value.clone()).collect()
}

#[test]
fn credential_is_loaded_at_each_use_and_not_kept() {
    const VALUES: [&str; 5] = ["c4n4ry-0ne", "c4n4ry-tw0", "c4n4ry-thr33", "c4n4ry-f0ur", "c4n4ry-f1ve"];
    let [one, two, three, four, five] = VALUES;
    let m = Machine::with_csid();
    let plugin = test_plugin(&m);
    m.run("systemctl mask --now --quiet systemd-coredump.socket 2>/dev/null; mkdir -m 0700 /etc/credstore /etc/credstore.encrypted");
    let pid = m.run("systemctl show csid --property MainPID --value");

    let refused = m.run(&format!("{MOUNT} 2>&1 && echo mounted || true"));
    assert!(refused.contains("/etc/credstore/csid.demo.key"), "it says what to do: {refused}");

    let store = format!("/etc/credstore/{NAME}");
    m.write(&store, &document(one));
    assert_eq!(given(&m, &plugin), one);
    m.write(&store, &document(two));
    assert_eq!(given(&m, &plugin), two, "a changed one is seen");

    // Encrypted, of the same name.
    m.write("/root/plain", &document(three));
    m.run(&format!(
        "systemd-creds --quiet encrypt --name={NAME} /root/plain /etc/credstore.encrypted/{NAME} && rm /root/plain {store}"
    ));
    assert_eq!(given(&m, &plugin), three, "an encrypted one, too");

    // Where csid's unit says that it is, without a restart; and no other then.
    m.write("/root/elsewhere", &document(four));
    m.run("mkdir -p /etc/systemd/system/csid.service.d");
    m.write(
        "/etc/systemd/system/csid.service.d/key.conf",
        &format!("[Service]\nLoadCredential={NAME}:/root/elsewhere\n"),
    );
    m.run("systemctl daemon-reload");
    assert_eq!(given(&m, &plugin), four);
    m.write("/root/elsewhere", &document(five));
    assert_eq!(given(&m, &plugin), five);
    m.run("rm /root/elsewhere");
    let refused = m.run(&format!("{MOUNT} 2>&1 && echo mounted || true"));
    assert!(refused.contains("csid.service says where") && !refused.contains("/root/elsewhere"), "{refused}");
    m.run("journalctl --sync || true; journalctl --no-pager --unit csid | grep --quiet /root/elsewhere");
    assert_eq!(m.run("systemctl show csid --property MainPID --value"), pid, "csid was not restarted");

    assert_eq!(
        m.run("systemctl list-units --all --plain --no-legend 'csid-credential-*'"),
        "",
        "no unit is left"
    );
    assert_eq!(m.run("ls /run/credentials | grep csid-credential || true"), "");
    m.run("journalctl --sync || true");
    let mut haystack = Haystack::default();
    haystack.add("journal", &m.bytes("journalctl --no-pager --merge --output=export"));
    haystack.add("state", &m.bytes("cat /var/lib/csid/journal/*"));
    let files = "find /run/csid /run/systemd /run/credentials /etc/systemd /var/lib/systemd -type f -exec cat {} + || true";
    haystack.add("systemd", &m.bytes(files));
    haystack.add("answer", m.run("csictl events --json; csictl mounts --json").as_bytes());
    // What is no secret is found.
    for (place, known) in
        [("journal", "csid.service"), ("state", "demo"), ("systemd", NAME), ("answer", "demo")]
    {
        assert!(haystack.hits(known).contains(&place), "{known} is not in {place}");
    }
    for value in VALUES {
        assert!(haystack.hits(value).is_empty(), "{value} in {:?}", haystack.hits(value));
    }
    count("credentials loaded afresh", VALUES.len());
}

/// systemd reads a credential from a socket, too, and waits for its server.
#[test]
fn abandoned_credential_load_is_stopped() {
    const ASKED: usize = 10;
    let m = Machine::with_csid();
    test_plugin(&m);
    let _silent = UnixListener::bind(m.path("/root/silent.sock")).expect("a socket");
    m.run("mkdir -p /etc/systemd/system/csid.service.d");
    m.write(
        "/etc/systemd/system/csid.service.d/key.conf",
        &format!("[Service]\nLoadCredential={NAME}:/root/silent.sock\n"),
    );
    m.run("systemctl daemon-reload && csictl volume register demo v --plugin p --external-id v --access-mode single-node-writer");
    let units = "systemctl list-units --plain --no-legend 'csid-credential-*' | wc --lines";
    // Each is given up before the one after it asks; systemd gives up after ten seconds.
    let counts = m.run(&format!(
        "for i in {{1..{ASKED}}}; do
           csictl volume snapshot demo v s$i --credential {NAME} --deadline 300ms 2>&1 | grep --quiet 'before systemd handed' || exit 1
           {units}
         done"
    ));
    let most = counts.lines().map(|count| count.parse::<usize>().expect("a number")).max();
    assert!(most <= Some(4), "units at once: {counts}");
    m.until(&format!("(( $({units}) == 0 ))"));
    count("credentials that nobody waited for", ASKED);
}
