//! Managed plugins are upgraded under a writer that syncs each write, by a call and by a reload: no write fails, whichever version
//! is left in the end, and one is left.

use csid_tests::world::count;

use crate::machine::Machine;

const SERVE: &str = "/usr/sbin/csi-local --state-dir /var/lib/csi-disk serve";

/// The units of a plugin that run, by their instances.
fn running(m: &Machine, plugin: &str) -> String {
    m.run(&format!(
        "systemctl list-units --all --plain --no-legend 'csi-plugin-{plugin}-*' \
         | sed -E 's/^csi-plugin-{plugin}-([a-z0-9]+)[.]service +loaded +([a-z]+).*/\\1 \\2/' | xargs"
    ))
}

fn instances(plugin: &str) -> String {
    format!("csictl plugin show {plugin} | awk '$1 == \"instances:\" {{ $1 = \"\"; print }}' | xargs")
}

#[test]
fn no_write_fails_while_a_plugin_is_upgraded() {
    let m = Machine::with_csid();
    m.run("csictl wait local");
    m.run(&format!("csictl plugin register disk -- {SERVE} && csictl wait disk"));
    let mut paths = Vec::new();
    for (plugin, state) in [("disk", "/var/lib/csi-disk"), ("local", "/var/lib/csi-local")] {
        let id = m.run(&format!("csi-local --state-dir {state} create data --size 64M"));
        let path = m.run(&format!("csictl mount demo {plugin} db --plugin {plugin} --external-id {id}"));
        m.write(
            &format!("/root/{plugin}.sh"),
            &format!(
                "n=0\nwhile :; do\n  n=$((n + 1))\n  echo $n | dd of={path}/file conv=notrunc,fsync status=none \
                 || echo $n >>/root/failed\n  echo $n >>/root/{plugin}.count\ndone\n"
            ),
        );
        m.run(&format!("systemd-run --quiet --unit writer-{plugin} bash /root/{plugin}.sh"));
        m.until(&format!("test -s /root/{plugin}.count"));
        paths.push(path);
    }
    let written =
        |plugin: &str| m.run(&format!("tail -n 1 /root/{plugin}.count")).parse::<usize>().expect("a number");
    let goes_on = |plugin: &str| {
        let before = written(plugin);
        m.until(&format!("[ $(tail -n 1 /root/{plugin}.count) -gt {} ]", before + 20));
        assert_eq!(m.run("cat /root/failed 2>/dev/null || true"), "", "writes that failed");
    };
    goes_on("disk");

    // By a call.
    assert_eq!(m.run(&format!("csictl plugin upgrade disk -- {SERVE} --node-id $(hostname)")), "i2");
    assert_eq!((running(&m, "disk"), m.run(&instances("disk"))), ("i2 active".to_owned(), "i2".to_owned()));
    goes_on("disk");
    // The mount is the new one's, and so is the next.
    let id = m.run("csi-local --state-dir /var/lib/csi-disk create more --size 16M");
    m.run(&format!("csictl mount demo more job --plugin disk --external-id {id}"));
    m.run("csictl unmount demo more job");

    // The same command is another program where its package was upgraded.
    assert_eq!(m.run("csictl plugin upgrade disk"), "i3");
    goes_on("disk");

    // One that ends at once, and one that is another plugin.
    let refused = m.run("csictl plugin upgrade disk -- /bin/false 2>&1 && echo it was taken || true");
    for part in ["instance `i4` did not become healthy", "status 1", "instance `i3` goes on as before"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    let elsewhere =
        format!("csictl plugin upgrade disk -- {SERVE} --node-id elsewhere 2>&1 && echo taken || true");
    let refused = m.run(&elsewhere);
    assert!(refused.contains("calls this node \"elsewhere\""), "{refused}");
    assert_eq!((running(&m, "disk"), m.run(&instances("disk"))), ("i3 active".to_owned(), "i3".to_owned()));
    goes_on("disk");

    // csid is killed while the new one is tried.
    m.write_program("/usr/local/sbin/slow-driver", "#!/bin/bash\nsleep 4\nexec \"$@\"\n");
    m.run(&format!("systemd-run --quiet --unit upgrader csictl plugin upgrade disk -- /usr/local/sbin/slow-driver {SERVE}"));
    m.until("systemctl is-active csi-plugin-disk-i4");
    assert_eq!(m.run(&instances("disk")), "i3 i4");
    let pid = m.run("systemctl show csi-plugin-disk-i4 --property MainPID --value");
    m.run("kill -9 $(systemctl show csid --property MainPID --value)");
    m.until(&format!("[ \"$({})\" = i4 ]", instances("disk")));
    m.until("! systemctl is-active csi-plugin-disk-i3");
    assert_eq!(running(&m, "disk"), "i4 active");
    assert_eq!(
        m.run("systemctl show csi-plugin-disk-i4 --property MainPID --value"),
        pid,
        "the same process"
    );
    goes_on("disk");

    // By a reload: next to each other, and by the file's own name or another.
    let define = |argv: &str, more: &str| {
        let text = format!("supervision = \"managed\"\nargv = [{argv}]\nprofile = \"node-block\"\n{more}");
        m.write("/etc/csid/plugins.d/local.toml", &text);
        m.run("csictl reload");
    };
    let serve = "\"/usr/sbin/csi-local\", \"serve\"";
    define(serve, "environment = { TZ = \"UTC\" }\n");
    assert_eq!((running(&m, "local"), m.run(&instances("local"))), ("i1 active".to_owned(), "i1".to_owned()));
    let pid = || m.run("systemctl show csi-plugin-local-i1 --property MainPID --value");
    let before = pid();
    m.run("systemctl restart csid && csictl wait local && csictl reload");
    assert_eq!(
        (running(&m, "local"), pid()),
        ("i1 active".to_owned(), before.clone()),
        "csid knows its name"
    );
    // What does not run leaves the one that does, until the file is mended.
    let text = "supervision = \"managed\"\nargv = [\"/bin/false\"]\nprofile = \"node-block\"\n";
    m.write("/etc/csid/plugins.d/local.toml", text);
    let answer = m.run("csictl reload 2>&1 || true");
    assert!(answer.contains("go on as before: local: instance `default` did not become healthy"), "{answer}");
    assert_eq!((running(&m, "local"), pid()), ("i1 active".to_owned(), before));
    let answer = m.run("csictl events | grep plugin-upgraded | tail -n 1");
    assert!(answer.contains("success=false") && answer.contains("did not become healthy"), "{answer}");
    define(serve, "");
    assert_eq!(m.run(&instances("local")), "default");
    assert_eq!(running(&m, "local"), "default active");
    // systemd does not lose its patience with a reload that goes on, as it does with any other.
    let brief = "/etc/systemd/system/csid.service.d/brief.conf";
    m.run("mkdir -p /etc/systemd/system/csid.service.d");
    m.write(brief, "[Service]\nTimeoutStartSec=2s\nExecReload=\nExecReload=/usr/bin/sleep 4\n");
    m.run("systemctl daemon-reload && ! systemctl reload csid");
    m.write(brief, "[Service]\nTimeoutStartSec=2s\n");
    m.write(
        "/etc/csid/plugins.d/local.toml",
        &format!("supervision = \"managed\"\nargv = [\"/usr/local/sbin/slow-driver\", {serve}]\nprofile = \"node-block\"\n"),
    );
    m.run("systemctl daemon-reload && systemctl reload csid");
    assert_eq!(running(&m, "local"), "i1 active");
    m.run(&format!("rm {brief} && systemctl daemon-reload"));
    goes_on("local");
    // Two cannot listen at one socket: one after the other.
    let endpoint = "environment = { CSI_ENDPOINT = \"unix:///run/local.sock\" }\n";
    define(serve, endpoint);
    m.run("csictl wait local");
    define("\"/usr/sbin/csi-local\", \"serve\", \"--node-id\", \"here\"", endpoint);
    m.run("csictl wait local");
    goes_on("local");

    for plugin in ["disk", "local"] {
        count(&format!("synced writes to a volume of {plugin}, none failed"), written(plugin));
        m.run(&format!("systemctl stop writer-{plugin}"));
    }
    // Then it is drained, and may go.
    m.run("! csictl plugin unregister disk");
    let drained = m.run("csictl plugin drain disk --yes disk");
    assert_eq!(drained, "unmounted: demo/disk db");
    m.run("csictl plugin unregister disk");
    assert_eq!(running(&m, "disk"), "");
    assert_eq!(m.run(&format!("mountpoint -q {} && echo mounted || echo not", paths[0])), "not");
    m.run("csictl unmount demo local db");
    assert_eq!(m.loops(), "", "no loop device");
}
