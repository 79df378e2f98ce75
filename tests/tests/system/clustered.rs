//! The packages of a cluster in a booted machine: etcd, csid-server, csid-link and csid, each in its own unit.

use crate::machine::Machine;

/// Makes an authority `ca.pem` in a directory, and a certificate for each line `FILE NAMES USAGE`.
const CERTIFICATES: &str = r#"#!/bin/bash
# certificates DIR <LINES
set -euo pipefail
mkdir -p "$1" && cd "$1" && umask 077
key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }
key ca.key
openssl req -x509 -key ca.key -days 30 -subj /CN=authority -out ca.pem \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign
while read -r file names usage; do
    key "$file.key"
    openssl req -new -key "$file.key" -subj /CN=csid-server -out "$file.csr"
    openssl x509 -req -in "$file.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -out "$file.pem" \
        -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=%s\n' "$names" "$usage")
done
"#;

const ETCD: &str = "[Service]\nType=notify\nExecStart=/usr/bin/etcd --name m --data-dir /var/lib/etcd-test \
--listen-client-urls https://127.0.0.1:2379 --advertise-client-urls https://127.0.0.1:2379 \
--listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
--initial-cluster m=http://127.0.0.1:2380 --client-cert-auth --trusted-ca-file /root/etcd/ca.pem \
--cert-file /root/etcd/member.pem --key-file /root/etcd/member.key\n[Install]\nWantedBy=multi-user.target\n";

const SERVER: &str = r#"cluster = "prod"
listen = "127.0.0.1:7443"
address = "localhost:7443"
[etcd]
endpoints = ["https://127.0.0.1:2379"]
[[grant]]
who = "node/*"
namespaces = ["*"]
may = ["join", "mount", "register"]
"#;

/// Installs and starts the servers of a cluster, and makes the machine its node `db-1`.
fn cluster(m: &Machine) {
    for package in ["csid-server", "csid-cluster"] {
        m.install_package(package);
    }
    assert_eq!(m.run("systemctl is-active csid-server csid-link || true"), "inactive\ninactive");
    m.run("systemctl restart csid && systemctl is-active csid");
    m.write_program("/usr/local/bin/certificates", CERTIFICATES);
    m.run(
        "certificates /root/etcd <<'END'\n\
         member IP:127.0.0.1 serverAuth,clientAuth\n\
         client DNS:csid-server clientAuth\nEND",
    );
    m.run(
        "certificates /root/cluster <<'END'\n\
         server DNS:localhost,URI:csid://prod/server/s1 serverAuth\n\
         node URI:csid://prod/node/db-1 clientAuth\nEND",
    );
    m.write("/etc/systemd/system/etcd-test.service", ETCD);
    m.run("systemctl daemon-reload && systemctl enable --now etcd-test");
    m.write("/etc/csid-server/csid-server.toml", SERVER);
    m.run(
        "cd /root/cluster && cp ca.pem server.pem server.key /etc/csid-server/ && \
         cp /root/etcd/ca.pem /etc/csid-server/etcd-ca.pem && cp /root/etcd/client.pem /etc/csid-server/etcd.pem && \
         cp /root/etcd/client.key /etc/csid-server/etcd.key && cp ca.pem node.pem node.key /etc/csid/link/",
    );
    m.run("csid-server check-config && csid-server --credentials /etc/csid-server init");
    m.run("systemctl enable --now csid-server");
    m.write("/etc/csid/link.toml", "cluster = \"prod\"\nservers = [\"localhost:7443\"]\n");
    m.write("/etc/csid/csid.toml", "node = \"db-1\"\n[cluster]\nname = \"prod\"\n");
    m.run("systemctl restart csid");
    joined(m);
    no_network(m);
}

/// Fails unless csid has loopback alone, in a network namespace of its own.
fn no_network(m: &Machine) {
    let pid = m.run("systemctl show csid --property MainPID --value");
    let devices = m.run(&format!("tail -n +3 /proc/{pid}/net/dev | cut -d : -f 1 | tr -d ' '"));
    assert_eq!(devices, "lo", "csid has a network");
    let [own, machines] = [pid.as_str(), "1"].map(|pid| m.run(&format!("readlink /proc/{pid}/ns/net")));
    assert_ne!(own, machines, "csid has the machine's network");
}

fn joined(m: &Machine) {
    m.until("systemctl show csid --property StatusText | grep -F 'cluster prod: joined at localhost:7443'");
}

#[test]
fn clusters_node_mounts_over_restarts_and_a_reboot() {
    let m = Machine::with_csid();
    cluster(&m);
    m.run("csictl wait local");
    let id = m.run("csi-local create data --size 64M");
    m.run(&format!(
        "csictl volume register demo data --plugin local --external-id {id} --access-mode single-node-writer"
    ));
    let path = m.run("csictl mount demo data web");
    m.run(&format!("echo 'written before' >{path}/hello && sync {path}/hello"));
    let claims = || m.run("csictl claims --json");
    assert!(
        claims().contains("\"node\":\"db-1\"") || claims().contains("\"node\": \"db-1\""),
        "{}",
        claims()
    );
    // Each of the units may be restarted or killed. No mount notices.
    for unit in ["csid-link", "csid-server", "csid"] {
        m.run(&format!("systemctl kill --signal KILL {unit}"));
        m.until(&format!("systemctl is-active {unit}"));
        joined(&m);
        assert_eq!(m.run(&format!("cat {path}/hello")), "written before", "{unit} was killed");
    }
    // Without a server an unmount succeeds, and a mount says why it does not.
    m.run("systemctl stop csid-server && csictl unmount demo data web");
    let refused = m.try_run("csictl mount demo data web --deadline 3s");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("Unavailable"), "{said}");
    m.run("systemctl start csid-server");
    m.until("[[ $(csictl claims --json | tr -d '[:space:]') == '[]' ]]");
    assert_eq!(m.run("csictl mount demo data web"), path);
    m.reboot();
    joined(&m);
    m.until(&format!("grep -q 'written before' {path}/hello"));
    m.run("csictl unmount demo data web");
    for unit in ["csid-link", "csid-server"] {
        m.run(&format!("systemd-analyze security --threshold 15 --no-pager {unit} >/dev/null"));
    }
    m.run("dpkg --purge csid-cluster csid-server");
    m.run("systemctl restart csid && systemctl is-active csid");
}
