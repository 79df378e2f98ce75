//! What is measured of a plugin that csid runs, and the metrics' socket as systemd makes it.

use crate::machine::Machine;

/// Debian's own perl asks; there may be no curl.
const ASK: &str = r#"use IO::Socket::UNIX;
my $s = IO::Socket::UNIX->new(Peer => "/run/csid/metrics.sock") or die "connect: $!\n";
print $s "GET /metrics HTTP/1.0\r\n\r\n"; print while <$s>;"#;

#[test]
fn metrics_are_for_root_and_group_csid() {
    let m = Machine::boot();
    // Control groups of version 1 are read-only in a container, until they are remounted; then systemd has to read them again.
    m.run(
        "if [ ! -e /sys/fs/cgroup/cgroup.controllers ]; then
             awk '$3 == \"cgroup\" { print $2 }' /proc/mounts | xargs -n 1 mount -o remount,bind,rw &&
                 systemctl daemon-reexec
         fi",
    );
    m.install();
    m.run("csictl wait local");
    let unit = "csi-plugin-local-default.service";
    let id = m.run("csi-local create data --size 16M");
    m.run(&format!("csictl mount demo data web --plugin local --external-id {id}"));

    // csid reports what systemd counts, and nothing else.
    let stats: serde_json::Value = serde_json::from_str(&m.run("csictl plugin stats local --json")).unwrap();
    let instance = &stats["instances"][0];
    assert_eq!(instance["unit"], unit, "{stats}");
    let mut answer = 0;
    for (key, property) in [
        ("cpu-usage-nsec", "CPUUsageNSec"),
        ("memory-current", "MemoryCurrent"),
        ("tasks-current", "TasksCurrent"),
    ] {
        let systemd = m.run(&format!("systemctl show {unit} --property {property} --value"));
        match systemd.parse::<u64>() {
            Ok(counted) => {
                let csid = instance[key].as_u64().unwrap_or_else(|| panic!("{key}: {stats}"));
                assert!(csid > 0 && csid <= counted * 2 && counted <= csid * 2, "{key}: {csid}, {counted}");
                answer += 1;
            }
            Err(_) => assert!(instance[key].is_null(), "{key} is {systemd} and reported: {stats}"),
        }
    }
    assert!(answer > 0, "nothing is counted on this host: {stats}");
    let staged =
        stats["rpcs"].as_array().unwrap().iter().find(|rpc| rpc["rpc"] == "NodeStageVolume").unwrap();
    assert_eq!((&staged["code"], &staged["count"]), (&"OK".into(), &1.into()), "{stats}");
    let top = m.run("csictl plugin top");
    assert!(top.lines().count() == 2 && top.contains("local"), "once, where there is no terminal: {top}");

    // The socket is systemd's, and comes and goes with csid.
    assert_eq!(m.run("stat -c '%U %G %a' /run/csid/metrics.sock"), "root csid 660");
    m.write("/root/ask.pl", ASK);
    let metrics = m.run("perl /root/ask.pl");
    assert!(
        metrics.contains("\ncsid_mounts{state=\"mounted\"} 1\n") && metrics.ends_with("# EOF"),
        "{metrics}"
    );
    m.run("cp /root/ask.pl /tmp/ask.pl && chmod 644 /tmp/ask.pl");
    m.run("runuser -u nobody -g csid -- perl /tmp/ask.pl");
    m.run("! runuser -u nobody -- perl /tmp/ask.pl");
    m.run("systemctl stop csid.service csid.socket && [ ! -e /run/csid/metrics.sock ]");

    // TCP too, by a drop-in; csid still has no network.
    m.run("mkdir -p /etc/systemd/system/csid-metrics.socket.d && ip link set lo up 2>/dev/null || true");
    m.write("/etc/systemd/system/csid-metrics.socket.d/tcp.conf", "[Socket]\nListenStream=127.0.0.1:9810\n");
    m.run("systemctl daemon-reload && systemctl start csid && systemctl restart csid && csictl wait local");
    let ask = r"exec 3<>/dev/tcp/127.0.0.1/9810 && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3 && cat <&3";
    assert!(m.run(ask).ends_with("# EOF"));
    assert!(m.run("perl /root/ask.pl").ends_with("# EOF"), "and the Unix socket as before");
    m.run("csictl unmount demo data web");

    // A call under way when its plugin is stopped has an error of that name. It is sent while the plugin is frozen; one that
    // comes too late for that waits for the next process, and the plugin is frozen once more.
    m.run(&format!("mkdir -p /etc/systemd/system/{unit}.d"));
    m.write(&format!("/etc/systemd/system/{unit}.d/kill.conf"), "[Service]\nKillSignal=SIGKILL\n");
    m.run("systemctl daemon-reload");
    m.write(
        "/root/stop.sh",
        &format!(
            "for i in {{1..20}}; do
                 kill -STOP $(systemctl show {unit} --property MainPID --value)
                 csictl plugin volumes local --json >/root/said 2>&1 & call=$!
                 csictl status >/dev/null; csictl status >/dev/null
                 csictl plugin restart local
                 wait $call || {{ cat /root/said; exit 0; }}
             done
             exit 1"
        ),
    );
    let said = m.run("bash /root/stop.sh");
    assert!(said.contains("PluginShutdown") && said.contains("before it had answered"), "{said}");
}
