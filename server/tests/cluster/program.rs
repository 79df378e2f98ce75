//! The commands of csid-server, csid-link's socket, and etcd with TLS.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};

use crate::certificates::Purpose;
use crate::site::{Site, link_program, through};

#[tokio::test]
async fn init_is_done_once_for_a_cluster() {
    let site = Site::start(1).await;
    let (made, said) = site.run_server(0, &["init"]);
    assert!(
        !made && said.contains("etcd has the cluster prod below /csid/ already, in generation 1"),
        "{said}"
    );
    // A configuration that names another cluster is refused before anything is written.
    let config = site.path("s0.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"prod\"", "\"test\"")).unwrap();
    for command in [&["init"][..], &[]] {
        let (done, said) = site.run_server(0, command);
        assert!(!done && said.contains("csid://test/server/NAME"), "{said}");
    }
}

#[tokio::test]
async fn check_config_names_the_wrong_line() {
    let site = Site::start(1).await;
    let (good, said) = site.run_server(0, &["check-config"]);
    assert!(good && said.is_empty(), "{said}");
    let config = site.path("s0.toml");
    let text = fs::read_to_string(&config).unwrap();
    for (from, to, due) in [
        ("\"release-others\"", "\"releases\"", "unknown word: Some(\"releases\")"),
        ("who = \"node/joins\"", "who = \"joins\"", "neither node/NAME nor operator/NAME: \"joins\""),
        ("cluster = \"prod\"", "cluster = \"prod\"\nmetric = \"x\"", "unknown field `metric`"),
    ] {
        fs::write(&config, text.replacen(from, to, 1)).unwrap();
        let (good, said) = site.run_server(0, &["check-config"]);
        assert!(!good && said.contains(due), "{said}");
    }
}

/// The authority of etcd is another one than the cluster's.
#[tokio::test]
async fn etcd_is_reached_with_a_certificate() {
    let site = Site::start(1).await;
    let authority = crate::certificates::Authority::new();
    let member = authority.issue("etcd", "IP:127.0.0.1", Purpose::Both, 30);
    let client = authority.issue("client", "", Purpose::Client, 30);
    let ca = authority.certificate();
    let file = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let [of_clients, of_peers] = crate::site::free_ports();
    let url = format!("https://127.0.0.1:{of_clients}");
    let mut etcd = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "etcd", "--name", "m", "--data-dir"])
        .arg(site.path("etcd"))
        .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
        .args(["--listen-peer-urls", &format!("http://127.0.0.1:{of_peers}")])
        .args(["--initial-advertise-peer-urls", &format!("http://127.0.0.1:{of_peers}")])
        .args(["--initial-cluster", &format!("m=http://127.0.0.1:{of_peers}")])
        .args(["--client-cert-auth", "--trusted-ca-file", &file(&ca)])
        .args(["--cert-file", &file(&member.certificate), "--key-file", &file(&member.key)])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let config = site.path("s0.toml");
    let text = fs::read_to_string(&config).unwrap();
    let plain = format!("{:?}", site.etcd.endpoints());
    assert!(text.contains(&plain));
    fs::write(&config, text.replace(&plain, &format!("[{url:?}]"))).unwrap();
    let (_, said) = site.run_server(0, &["init"]);
    assert!(said.contains("etcd-ca.pem"), "{said}");
    for (from, to) in [(&ca, "etcd-ca.pem"), (&client.certificate, "etcd.pem"), (&client.key, "etcd.key")] {
        fs::copy(from, site.path("s0").join(to)).unwrap();
    }
    let (made, said) = site.run_server(0, &["init"]);
    assert!(made, "{said}");
    // etcd does not take the cluster's certificates.
    fs::copy(site.authority.certificate(), site.path("s0/etcd-ca.pem")).unwrap();
    let (made, said) = site.run_server(0, &["init"]);
    assert!(!made && said.contains("etcd gave no answer"), "{said}");
    etcd.kill().unwrap();
    etcd.wait().unwrap();
}

#[tokio::test]
async fn socket_of_a_link_is_roots_alone() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    let _session = node.join(0).await;
    let socket = site.path("n1.run").join(&site.addresses[0]);
    let metadata = fs::metadata(&socket).unwrap();
    assert_eq!((metadata.permissions().mode() & 0o777, metadata.uid()), (0o600, 0));
    // The mode does not decide alone: the link asks the kernel who connects.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    for path in [site.path(""), site.path("n1.run")] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    // Prints how many bytes come before the end of the connection.
    let read = "my $s = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die $!; my $n = sysread($s, my $b, 1); \
                print defined $n ? $n : 'error'";
    let said = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "timeout", "10"])
        .args(["perl", "-MIO::Socket::UNIX", "-e", read])
        .arg(&socket)
        .output()
        .unwrap();
    let text = String::from_utf8(said.stdout).unwrap();
    assert_eq!(text, "0", "{}", String::from_utf8_lossy(&said.stderr));
    assert!(node.link.text().contains("a caller other than root was refused"), "{}", node.link.text());
    through(&socket).volumes(csi_proto::cluster::v1::ListAsk::default()).await.unwrap();
}

#[tokio::test]
async fn link_with_a_servers_certificate_does_not_start() {
    let site = Site::start(1).await;
    let pair = site.client_pair("csid://prod/operator/all");
    let keys = site.credentials("wrong", "node", &pair);
    fs::write(site.path("wrong.toml"), "cluster = \"prod\"\nservers = [\"s1:1\"]\n").unwrap();
    let output = Command::new(link_program())
        .arg("--config")
        .arg(site.path("wrong.toml"))
        .args(["--check-config", "--runtime-dir", "/nonexistent", "--credentials"])
        .arg(&keys)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("csid://prod/node/NAME"), "{said}");
}
