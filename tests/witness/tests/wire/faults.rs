//! Each fault of a script, as the CO sees it and as the plugin does.

use std::collections::BTreeMap;

use csi_proto::csi::v1::identity_client::IdentityClient;
use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::{
    GetPluginInfoRequest, NodeGetCapabilitiesRequest, NodeStageVolumeRequest, node_service_capability,
};
use csi_witness::{Script, ScriptError};
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::world::{AGES, World, probe};

async fn stage(co: &Channel) -> Result<(), Status> {
    let request = NodeStageVolumeRequest { volume_id: "v".into(), ..Default::default() };
    NodeClient::new(co.clone()).node_stage_volume(request).await.map(drop)
}

impl World {
    fn staged(&self) -> usize {
        self.plugin.staged.lock().unwrap().len()
    }
}

#[tokio::test]
async fn nth_call_gets_a_code_and_the_plugin_no_call() {
    let world = World::new(
        r#"
        [[fault]]
        rpc = "NodeStageVolume"
        nth = 2
        do = { code = "RESOURCE_EXHAUSTED" }
        "#,
    );
    let co = world.co().await;
    stage(&co).await.unwrap();
    assert_eq!(stage(&co).await.unwrap_err().code(), Code::ResourceExhausted);
    // Counted over all connections.
    stage(&world.co().await).await.unwrap();
    assert_eq!(world.staged(), 2);
    assert!(world.log().contains("\"code\":\"RESOURCE_EXHAUSTED\""), "{}", world.log());
}

#[tokio::test]
async fn code_after_the_real_call_hides_that_it_was_done() {
    let world = World::new(
        r#"
        [[fault]]
        rpc = "NodeStageVolume"
        after = true
        do = { code = "INTERNAL" }
        "#,
    );
    assert_eq!(stage(&world.co().await).await.unwrap_err().code(), Code::Internal);
    assert_eq!(world.staged(), 1);
}

#[tokio::test]
async fn delay_is_only_a_delay() {
    let world = World::new(
        r#"
        [[fault]]
        rpc = "Probe"
        do = { delay-ms = 50 }
        "#,
    );
    let start = std::time::Instant::now();
    probe(&world.co().await).await.unwrap();
    assert!(start.elapsed().as_millis() >= 50);
}

#[tokio::test]
async fn hang_holds_one_call_and_no_other() {
    let world = World::new(
        r#"
        [[fault]]
        rpc = "NodeStageVolume"
        do = "hang"
        "#,
    );
    let co = world.co().await;
    let hung = tokio::spawn({
        let co = co.clone();
        async move { stage(&co).await }
    });
    world.until_log("NodeStageVolume").await;
    probe(&co).await.unwrap();
    assert!(!hung.is_finished());
    hung.abort();
    // The CO gave up: the call ended without a code.
    world.until_log(r#""event":"ended","call":1,"fault":"Hang""#).await;
    assert_eq!(world.staged(), 0);
}

#[tokio::test]
async fn dropped_connection_breaks_only_its_own_calls() {
    let world = World::new(
        r#"
        [[fault]]
        rpc = "NodeStageVolume"
        nth = 1
        after = true
        do = "drop"
        "#,
    );
    let co = world.co().await;
    let error = timeout(AGES, stage(&co)).await.expect("the call ends").unwrap_err();
    assert!(std::error::Error::source(&error).is_some(), "no plugin said this: {error:?}");
    assert_eq!(world.staged(), 1);
    stage(&world.co().await).await.unwrap();
    world.until_log(r#""event":"closed","connection":1"#).await;
}

#[tokio::test]
async fn answers_are_altered() {
    let world = World::new(
        r#"
        [[fault]]
        rpc = "GetPluginInfo"
        nth = 1
        do = { alter = "empty-strings" }

        [[fault]]
        rpc = "GetPluginInfo"
        nth = 2
        do = { alter = "long-strings" }

        [[fault]]
        rpc = "NodeGetCapabilities"
        do = { alter = "unknown-enums" }
        "#,
    );
    let co = world.co().await;
    let info = async || {
        let request = GetPluginInfoRequest {};
        IdentityClient::new(co.clone()).get_plugin_info(request).await.unwrap().into_inner()
    };
    assert_eq!(info().await.name, "");
    assert_eq!(info().await.name.len(), 64 * 1024);
    let third = info().await;
    assert_eq!((third.name.as_str(), third.vendor_version.as_str()), ("yes.example", "1"));
    assert_eq!(third.manifest, BTreeMap::from([("a".to_owned(), "b".to_owned())]));

    let request = NodeGetCapabilitiesRequest {};
    let answer = NodeClient::new(co).node_get_capabilities(request).await.unwrap().into_inner();
    assert!(!answer.capabilities.is_empty());
    for capability in answer.capabilities {
        let Some(node_service_capability::Type::Rpc(rpc)) = capability.r#type else { panic!("no rpc") };
        assert_eq!(rpc.r#type, 9999);
    }
}

#[test]
fn invalid_script_is_refused() {
    let script = |rpc: &str, act: &str| Script::parse(&format!("[[fault]]\nrpc = {rpc:?}\ndo = {act}"));
    assert!(script("Probe", r#""hang""#).is_ok());
    assert!(matches!(script("Prob", r#""hang""#), Err(ScriptError::UnknownRpc(_))));
    assert!(matches!(script("GetMetadataDelta", r#""hang""#), Err(ScriptError::UnknownRpc(_))));
    assert!(matches!(script("Probe", r#"{ code = "NO" }"#), Err(ScriptError::Parse(_))));
    assert!(matches!(Script::parse("[[fault]]\nrpc = \"Probe\""), Err(ScriptError::Parse(_))));
}
