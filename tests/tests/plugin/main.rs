//! The test plugin itself: a test against a plugin that does nothing would prove nothing.

mod controller;
mod node;

use csi_proto::csi::v1::volume_capability::{self, AccessMode, AccessType, MountVolume, access_mode::Mode};
use csi_proto::csi::v1::*;
use csid_tests::plugin::TestPlugin;
use tonic::transport::{Channel, Endpoint};

async fn connect(plugin: &TestPlugin) -> Channel {
    let socket = format!("unix://{}", plugin.socket().display());
    Endpoint::from_shared(socket).unwrap().connect().await.unwrap()
}

fn capability(mode: Mode, block: bool) -> VolumeCapability {
    let access_type = match block {
        true => AccessType::Block(volume_capability::BlockVolume {}),
        false => AccessType::Mount(MountVolume { fs_type: "ext4".to_owned(), ..Default::default() }),
    };
    VolumeCapability { access_mode: Some(AccessMode { mode: mode.into() }), access_type: Some(access_type) }
}
