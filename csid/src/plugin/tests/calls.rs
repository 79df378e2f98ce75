//! The four calls of a mount: what is sent, what comes back, and what a failure means.

use csi_proto::csi::v1;
use tonic::Code;
use v1::volume_capability::{AccessType, access_mode::Mode};

use super::*;
use crate::Kind;
use crate::plugin::{Class, NodeCall};
use crate::secret::Secrets;
use crate::store::rows::{AccessMode, AttachmentMode, Usage};

pub fn usage() -> Usage {
    Usage {
        access_mode: AccessMode::SingleNodeSingleWriter,
        attachment_mode: AttachmentMode::FileSystem,
        fs_type: "ext4".into(),
        mount_flags: vec!["noatime".into(), "pass=opensesame".into()],
        mount_group: "100".into(),
        context: [("share".into(), "ctx-v4lue-1".into())].into(),
        publish_context: [("device".into(), "pub-v4lue-1".into())].into(),
    }
}

pub fn call(usage: &Usage, deadline: Instant) -> NodeCall<'_> {
    NodeCall {
        external_id: "vol-1",
        staging: Some("/srv/root/staging/x"),
        target: "/srv/root/publish/x/y",
        usage,
        read_only: true,
        uid: 0,
        secrets: None,
        secrets_forgotten: false,
        patience: deadline.saturating_duration_since(Instant::now()),
        asked: None,
    }
}

async fn plugin(capabilities: &[i32], spec: impl FnOnce(PluginSpec) -> PluginSpec) -> (Host, Fake, Ready) {
    let host = Host::new();
    let mut fake = host.fake();
    fake.script().node_capabilities = capabilities.to_vec();
    fake.start();
    host.plugins.register("p", spec(external(&fake.socket)), 0).await.unwrap();
    let ready = host.ready().await;
    (host, fake, ready)
}

#[tokio::test]
async fn mount_is_two_calls_with_all_required_fields() {
    let (_host, fake, ready) = plugin(&[1, 5, 6], |spec| PluginSpec {
        plugin_root: Some("/srv/root".into()),
        plugin_view: Some("/csi".into()),
        ..spec
    })
    .await;
    assert_eq!(ready.host_root(), Path::new("/srv/root"));
    let before = fake.script().calls.len();
    let usage = usage();
    let secrets = Secrets::from_json(br#"{"key":"hunter2"}"#).unwrap();
    let with = || NodeCall { secrets: Some(&secrets), ..call(&usage, soon(LONG)) };
    ready.stage(with()).await.unwrap();
    ready.publish(with()).await.unwrap();
    assert_eq!(fake.script().calls[before..], ["NodeStageVolume", "NodePublishVolume"]);
    ready.unpublish(with()).await.unwrap();
    ready.unstage(with()).await.unwrap();

    let stage: v1::NodeStageVolumeRequest = fake.got();
    let publish: v1::NodePublishVolumeRequest = fake.got();
    // Rule 30: paths are as the plugin sees them.
    assert_eq!((stage.volume_id.as_str(), stage.staging_target_path.as_str()), ("vol-1", "/csi/staging/x"));
    assert_eq!(publish.staging_target_path, "/csi/staging/x");
    assert_eq!(publish.target_path, "/csi/publish/x/y");
    assert!(publish.readonly);
    for (context, publish_context, sent, capability) in [
        (&stage.volume_context, &stage.publish_context, &stage.secrets, &stage.volume_capability),
        (&publish.volume_context, &publish.publish_context, &publish.secrets, &publish.volume_capability),
    ] {
        assert_eq!((context, publish_context), (&usage.context, &usage.publish_context));
        assert_eq!(sent, &BTreeMap::from([("key".to_owned(), "hunter2".to_owned())]));
        let capability = capability.as_ref().unwrap();
        assert_eq!(capability.access_mode.unwrap().mode(), Mode::SingleNodeSingleWriter);
        let Some(AccessType::Mount(mount)) = &capability.access_type else { panic!("{capability:?}") };
        assert_eq!((mount.fs_type.as_str(), mount.volume_mount_group.as_str()), ("ext4", "100"));
        assert_eq!(mount.mount_flags, usage.mount_flags);
    }
    let unpublish: v1::NodeUnpublishVolumeRequest = fake.got();
    let unstage: v1::NodeUnstageVolumeRequest = fake.got();
    assert_eq!((unpublish.volume_id.as_str(), unpublish.target_path.as_str()), ("vol-1", "/csi/publish/x/y"));
    assert_eq!(
        (unstage.volume_id.as_str(), unstage.staging_target_path.as_str()),
        ("vol-1", "/csi/staging/x")
    );
}

#[tokio::test]
async fn co_rule_19_unsupported_node_rpc_is_not_sent() {
    let (_host, fake, ready) = plugin(&[], |spec| spec).await;
    assert!(!ready.stages() && !ready.single_node_multi_writer() && !ready.mount_group());
    let usage = Usage { attachment_mode: AttachmentMode::FileSystem, ..usage() };
    ready.publish(call(&usage, soon(LONG))).await.unwrap();
    let publish: v1::NodePublishVolumeRequest = fake.got();
    assert_eq!(publish.staging_target_path, "");
    let capability = publish.volume_capability.unwrap();
    assert_eq!(capability.access_mode.unwrap().mode(), Mode::SingleNodeWriter);
    let Some(AccessType::Mount(mount)) = &capability.access_type else { panic!("{capability:?}") };
    assert_eq!(mount.volume_mount_group, "");
    let block = Usage {
        attachment_mode: AttachmentMode::BlockDevice,
        access_mode: AccessMode::MultiNodeReaderOnly,
        ..usage.clone()
    };
    ready.publish(call(&block, soon(LONG))).await.unwrap();
    let capability = fake.got::<v1::NodePublishVolumeRequest>().volume_capability.unwrap();
    assert!(matches!(capability.access_type, Some(AccessType::Block(_))));
    assert_eq!(capability.access_mode.unwrap().mode(), Mode::MultiNodeReaderOnly);
}

#[tokio::test]
async fn co_rule_36_codes_classes_and_errors() {
    let (_host, fake, ready) = plugin(&[1], |spec| spec).await;
    let usage = usage();
    let table = [
        (Code::Unavailable, Class::Transient, true),
        (Code::Aborted, Class::Transient, true),
        (Code::ResourceExhausted, Class::Transient, true),
        (Code::Internal, Class::Unknown, true),
        (Code::DeadlineExceeded, Class::Unknown, true),
        (Code::FailedPrecondition, Class::Refused, false),
        (Code::NotFound, Class::Refused, false),
        (Code::Unauthenticated, Class::Refused, false),
        (Code::Unimplemented, Class::Unimplemented, false),
    ];
    for (code, class, retryable) in table {
        fake.script().answer = Some(Err((code, "why".into())));
        let error = ready.stage(call(&usage, soon(LONG))).await.unwrap_err();
        assert_eq!((error.code, error.class), (code, class));
        let name = crate::plugin::code_name(code);
        let error = error.into_error();
        assert_eq!(
            (error.kind, error.message.clone()),
            (Kind::PluginError, format!("NodeStageVolume: {name}: why"))
        );
        let details = error.details;
        assert_eq!((details.rpc, details.grpc_code), (Some("NodeStageVolume"), Some(code as u32)));
        assert_eq!((details.plugin_message.as_deref(), details.plugin.as_deref()), (Some("why"), Some("p")));
        assert_eq!(details.retryable, retryable, "{code:?}");
    }
    // There is nothing left to take away.
    fake.script().answer = Some(Err((Code::NotFound, "gone".into())));
    ready.unpublish(call(&usage, soon(LONG))).await.unwrap();
    ready.unstage(call(&usage, soon(LONG))).await.unwrap();
    assert_eq!(ready.publish(call(&usage, soon(LONG))).await.unwrap_err().class, Class::Refused);
}

#[tokio::test]
async fn co_rule_17_plugin_message_hides_secrets() {
    let (_host, fake, ready) = plugin(&[1], |spec| spec).await;
    let text = "mount -o noatime,pass=opensesame ctx-v4lue-1 pub-v4lue-1: hunter2\0 opensesame".to_owned();
    fake.script().answer = Some(Err((Code::Internal, text)));
    let usage = usage();
    let secrets = Secrets::from_json(br#"{"key":"hunter2"}"#).unwrap();
    let error =
        ready.publish(NodeCall { secrets: Some(&secrets), ..call(&usage, soon(LONG)) }).await.unwrap_err();
    let hidden = "[redacted]";
    assert_eq!(
        error.message,
        format!("mount -o noatime,pass={hidden} {hidden} {hidden}: {hidden}  {hidden}")
    );
    // The undoing of the same mount has no secrets, but the same context.
    let error = ready.unstage(call(&usage, soon(LONG))).await.unwrap_err();
    for word in ["opensesame", "ctx-v4lue-1", "pub-v4lue-1"] {
        assert!(!error.message.contains(word), "{error}");
    }
    // Of a mount whose secrets are not at hand nothing is repeated.
    let error =
        ready.unstage(NodeCall { secrets_forgotten: true, ..call(&usage, soon(LONG)) }).await.unwrap_err();
    assert!(error.message.starts_with("[the plugin's words may repeat"), "{error}");
    fake.script().answer = Some(Err((Code::Internal, "x".repeat(6000))));
    assert!(ready.stage(call(&usage, soon(LONG))).await.unwrap_err().message.len() < 2100);
}

#[tokio::test]
async fn secrets_go_to_plugins_of_root_or_of_the_user() {
    let usage = usage();
    let secrets = Secrets::from_json(br#"{"key":"hunter2"}"#).unwrap();
    let own = rustix::process::geteuid().as_raw();
    for (owner, uid, may) in [(0, 0, true), (0, 1000, true), (OTHER, OTHER, true), (OTHER, 0, false)] {
        let host = Host::new();
        let mut fake = host.fake();
        fake.start_as(if owner == 0 { own } else { owner });
        host.plugins.register("p", external(&fake.socket), owner).await.unwrap();
        let ready = host.ready().await;
        assert_eq!(ready.owner(), owner);
        let with = || NodeCall { uid, secrets: Some(&secrets), ..call(&usage, soon(LONG)) };
        for (rpc, sent) in [
            ("NodeStageVolume", ready.stage(with()).await),
            ("NodePublishVolume", ready.publish(with()).await),
        ] {
            assert_eq!((sent.is_ok(), fake.calls(rpc)), (may, usize::from(may)), "{rpc} {owner} {uid}");
            if let Err(error) = sent {
                assert_eq!(error.class, Class::Forbidden);
                assert_eq!(error.into_error().kind, Kind::NotAuthorized);
            }
        }
        ready.stage(NodeCall { uid, ..call(&usage, soon(LONG)) }).await.expect("without secrets it may");
        ready.unstage(with()).await.expect("which are not sent here");
    }
}

async fn cancelled(fake: &Fake) {
    let cancelled = async {
        while fake.script().cancelled.is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LONG, cancelled).await.expect("the plugin saw no cancellation");
}

#[tokio::test]
async fn dropped_call_is_cancelled_at_the_plugin() {
    let (_host, fake, ready) = plugin(&[1], |spec| spec).await;
    fake.script().answer = None;
    let usage = usage();
    let dropped =
        tokio::time::timeout(Duration::from_millis(200), ready.stage(call(&usage, soon(LONG)))).await;
    assert!(dropped.is_err());
    assert_eq!(fake.calls("NodeStageVolume"), 1);
    cancelled(&fake).await;
    assert_eq!(fake.script().cancelled, ["NodeStageVolume"]);
    // The connection is the same, and works.
    fake.script().answer = Some(Ok(()));
    ready.stage(call(&usage, soon(LONG))).await.unwrap();
}

#[tokio::test]
async fn deadline_leaves_effect_unknown_and_reaches_plugin() {
    let (_host, fake, ready) =
        plugin(&[1], |spec| PluginSpec { rpc_deadline: Some("400ms".into()), ..spec }).await;
    fake.script().answer = None;
    fake.script().timeouts.clear();
    let usage = usage();
    for (deadline, at_most) in [(soon(Duration::from_millis(150)), 150), (soon(LONG), 400)] {
        let start = Instant::now();
        let error = ready.stage(call(&usage, deadline)).await.unwrap_err();
        assert_eq!((error.class, error.code), (Class::Unknown, Code::DeadlineExceeded), "{error}");
        let took = start.elapsed();
        assert!(took < Duration::from_millis(at_most) + LONG / 2, "{took:?}");
    }
    cancelled(&fake).await;
    // tonic writes a time this long in microseconds.
    let micros = |text: &String| text.strip_suffix('u').map(|text| text.parse::<u64>().unwrap() / 1000);
    let sent: Vec<u64> = fake.script().timeouts.iter().filter_map(micros).collect();
    assert!(sent.iter().any(|ms| *ms <= 150) && sent.iter().all(|ms| *ms <= 400), "{sent:?}");
    // One that is over already is not sent.
    let calls = fake.calls("NodeStageVolume");
    let error = ready.stage(call(&usage, Instant::now())).await.unwrap_err();
    assert_eq!((error.class, fake.calls("NodeStageVolume")), (Class::NotSent, calls));
}

#[tokio::test]
async fn death_in_a_call_leaves_effect_unknown() {
    let (host, mut fake, ready) = plugin(&[1], |spec| spec).await;
    fake.script().answer = None;
    let usage = usage();
    let staging = ready.stage(call(&usage, soon(LONG)));
    let killing = async {
        while fake.calls("NodeStageVolume") == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        fake.kill();
    };
    let (staged, ()) = tokio::join!(staging, killing);
    assert_eq!(staged.unwrap_err().class, Class::Unknown);
    host.state(&["unhealthy"]).await;
    // The socket's file is still there, then it is not.
    for _ in 0..2 {
        let error = ready.publish(call(&usage, soon(LONG))).await.unwrap_err();
        assert_eq!(error.class, Class::NotSent, "{error}");
        assert_eq!(error.into_error().kind, Kind::PluginUnavailable);
        let _ = std::fs::remove_file(&fake.socket);
    }
}

#[tokio::test]
async fn stopping_plugin_has_one_error() {
    let (_host, mut fake, ready) = plugin(&[1], |spec| spec).await;
    let usage = usage();
    let stage = || ready.stage(call(&usage, soon(LONG)));
    let stops = &ready.0.peer.stops;
    let shutdown = |error: crate::plugin::RpcError, class| {
        assert_eq!(error.class, class, "{error}");
        let error = error.into_error();
        assert_eq!((error.kind, error.details.retryable), (Kind::PluginShutdown, true), "{error}");
        assert!(error.message.contains("the plugin "), "{error}");
    };

    // Under way when the stop begins: what it did is as unknown as ever.
    fake.script().answer = None;
    let stopped = async {
        until(|| fake.calls("NodeStageVolume") == 1).await;
        stops.begin();
        fake.kill();
        // Another process has begun before the call has heard of it.
        stops.end();
    };
    let (under_way, ()) = tokio::join!(stage(), stopped);
    shutdown(under_way.unwrap_err(), Class::Unknown);

    // Nothing is sent meanwhile, and what it refuses it has refused.
    fake.script().answer = Some(Err((Code::InvalidArgument, "no".into())));
    fake.start();
    stops.begin();
    stops.begin();
    shutdown(stage().await.unwrap_err(), Class::NotSent);
    assert_eq!(fake.calls("NodeStageVolume"), 1);
    stops.end();
    stops.end();
    assert_eq!(stage().await.unwrap_err().into_error().kind, Kind::PluginError);

    // One that ends by itself is not being stopped.
    fake.script().answer = None;
    let (broken, ()) = tokio::join!(stage(), async {
        until(|| fake.calls("NodeStageVolume") == 3).await;
        fake.kill();
    });
    let error = broken.unwrap_err();
    assert_eq!((error.class, error.into_error().kind), (Class::Unknown, Kind::PluginError));
}
