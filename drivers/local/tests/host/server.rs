//! The process: its socket, its command line, many calls at once.

use std::os::unix::fs::PermissionsExt;

use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::*;
use tonic::Code;

use crate::harness::*;

#[tokio::test]
async fn the_socket_is_private_and_a_stale_one_replaced() {
    let mut host = Host::new();
    let mode = |host: &Host| host.path("csi.sock").metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&host), 0o600);
    let second = host.spawn().wait().unwrap();
    assert_eq!(second.code(), Some(1), "one is serving");
    host.identity().await.probe(ProbeRequest {}).await.unwrap();
    host.kill();
    assert!(host.path("csi.sock").exists(), "killed, it leaves its socket");
    host.start();
    assert_eq!(mode(&host), 0o600);
    host.kill();
    std::fs::remove_file(host.path("csi.sock")).unwrap();
    std::fs::write(host.path("csi.sock"), "precious").unwrap();
    assert_eq!(host.spawn().wait().unwrap().code(), Some(1));
    assert_eq!(std::fs::read(host.path("csi.sock")).unwrap(), b"precious");
}

#[tokio::test]
async fn volumes_are_made_and_removed_by_hand() {
    let host = Host::new();
    let cli = |arguments: &[&str]| {
        let output = host.cli(arguments);
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    };
    let ok = |id: &str| (true, format!("{id}\n"), String::new());
    assert_eq!(cli(&["create", "demo", "--size", "16M"]), ok("demo"));
    assert_eq!(cli(&["create", "demo", "--size", "16M", "--fs", "ext4"]), ok("demo"));
    assert_eq!(cli(&["create", "raw", "--size", "4M", "--block"]), ok("raw"));
    assert_eq!(cli(&["create", "big", "--size", "300M", "--fs", "xfs"]), ok("big"));
    let (made, id, _) = cli(&["create", "a/../b", "--size", "8M"]);
    assert!(made && id.starts_with("sha256-"), "{id}");
    assert!(!cli(&["create", "demo", "--size", "17M"]).0);
    assert!(!cli(&["create", "small", "--size", "1M", "--fs", "xfs"]).0);

    let listed = cli(&["list"]).1;
    for line in ["demo ", "raw ", "big ", "sha256-"] {
        assert!(listed.lines().any(|l| l.starts_with(line)), "{listed}");
    }
    let request = ListVolumesRequest { max_entries: 3, ..Default::default() };
    let page = host.controller().await.list_volumes(request).await.unwrap().into_inner();
    let request = ListVolumesRequest { starting_token: page.next_token, ..Default::default() };
    let rest = host.controller().await.list_volumes(request).await.unwrap().into_inner();
    assert_eq!((page.entries.len(), rest.entries.len(), rest.next_token.as_str()), (3, 1, ""));

    let wanted = capability("", Mode::SingleNodeWriter);
    host.stage("demo", &wanted).await.unwrap();
    let (deleted, _, error) = cli(&["delete", "demo"]);
    assert!(!deleted && error.contains("in use"), "{error}");
    host.unstage("demo").await.unwrap();
    for id in ["demo", "raw", "big", id.trim()] {
        assert!(cli(&["delete", id]).0, "{id}");
    }
    assert!(cli(&["delete", "../state"]).0, "nothing of that name");
    assert!(host.path("state/volumes").read_dir().unwrap().next().is_none());
    host.assert_clean();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_calls_at_once() {
    let host = std::sync::Arc::new(Host::new());
    let wanted = capability("ext4", Mode::SingleNodeMultiWriter);
    // Different volumes race for the same free devices; each gets its own.
    let mut tasks = Vec::new();
    for n in 0..12 {
        let (host, wanted) = (host.clone(), wanted.clone());
        tasks.push(tokio::spawn(async move {
            let name = format!("v{n}");
            host.create(&name, "ext4", 8 * MIB).await.unwrap();
            let staging = host.text(&format!("staging-{n}"));
            std::fs::create_dir(&staging).unwrap();
            let mut request = host.stage_request(&name, &wanted);
            request.staging_target_path = staging;
            // And the same call four times at once is one mount.
            let node = host.node().await;
            let calls = (0..4).map(|_| {
                let (mut node, request) = (node.clone(), request.clone());
                tokio::spawn(async move { node.node_stage_volume(request).await.map(drop) })
            });
            for call in calls.collect::<Vec<_>>() {
                call.await.unwrap().unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!((host.loops().len(), host.mounts().len()), (12, 12));
    for n in 0..12 {
        let request = NodeUnstageVolumeRequest {
            volume_id: format!("v{n}"),
            staging_target_path: host.text(&format!("staging-{n}")),
        };
        host.node().await.node_unstage_volume(request).await.unwrap();
    }
    host.assert_clean();
}

#[tokio::test]
async fn arguments_are_checked() {
    let host = Host::new();
    host.create("v", "ext4", 16 * MIB).await.unwrap();
    let wanted = capability("ext4", Mode::SingleNodeWriter);
    for (volume, expected) in [("", Code::InvalidArgument), ("../v", Code::NotFound), ("v/", Code::NotFound)]
    {
        assert_eq!(code(host.stage(volume, &wanted).await), expected, "{volume:?}");
    }
    for fs in ["btrfs", "xfs", "block"] {
        let wrong = capability(fs, Mode::SingleNodeWriter);
        assert_eq!(code(host.stage("v", &wrong).await), Code::InvalidArgument, "{fs}");
    }
    for path in ["", "relative", "/nonexistent/staging"] {
        let mut request = host.stage_request("v", &wanted);
        request.staging_target_path = path.into();
        assert_eq!(
            code(host.node().await.node_stage_volume(request).await),
            Code::InvalidArgument,
            "{path:?}"
        );
    }
    for name in ["", "a\nb", &"x".repeat(129)] {
        assert_eq!(code(host.create(name, "ext4", 16 * MIB).await), Code::InvalidArgument, "{name:?}");
    }
    assert_eq!(host.loops(), Vec::<String>::new());
    let both = ["ext4", "block"].map(|fs| capability(fs, Mode::SingleNodeWriter));
    let request = ValidateVolumeCapabilitiesRequest {
        volume_id: "v".into(),
        volume_capabilities: both.into(),
        ..Default::default()
    };
    let answer = host.controller().await.validate_volume_capabilities(request).await.unwrap().into_inner();
    assert!(answer.confirmed.is_none() && !answer.message.is_empty());
}
