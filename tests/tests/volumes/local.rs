//! What csid asks of csi-local, the driver that comes with it.

use csid_client::{
    CallOptions, CapacityOptions, Client, CreateVolume, SnapshotFilter, SnapshotOptions, SnapshotRow,
    VolumeOptions,
};
use csid_tests::ask::{NAMESPACE, running_local};
use csid_tests::world::world;

use crate::site::spec;

const SIZE: u64 = 16 << 20;

async fn create(client: &Client, volume: &str, snapshot: Option<String>) -> String {
    let spec =
        CreateVolume { plugin: Some("local".to_owned()), capacity_min: Some(SIZE), snapshot, ..spec() };
    client.create_volume(NAMESPACE, volume, spec).await.expect("a volume").external_id
}

async fn snapshots(client: &Client) -> Vec<SnapshotRow> {
    client.list_snapshots("local", SnapshotFilter::default()).await.expect("the snapshots").0
}

#[test]
fn csi_locals_volumes_snapshots_and_capacity() {
    world(async |w| {
        let (mut served, client) = running_local(w).await;
        let free = client.capacity("local", CapacityOptions::default()).await.unwrap();
        let first = create(&client, "a", None).await;
        let taken = client.create_snapshot(NAMESPACE, "a", "s", SnapshotOptions::default()).await.unwrap();
        let second = create(&client, "b", Some(taken.id.clone())).await;

        let listed = snapshots(&client).await;
        assert_eq!(listed, [taken]);
        let of = &listed[0];
        assert_eq!((of.external_id.as_str(), of.size, of.ready), (first.as_str(), SIZE, true));
        let (mut volumes, next) = client.list_external_volumes("local", "", 1).await.unwrap();
        volumes.extend(client.list_external_volumes("local", &next, 1).await.unwrap().0);
        let mut ids: Vec<_> = volumes.iter().map(|row| (row.external_id.as_str(), row.capacity)).collect();
        let mut made = [(first.as_str(), SIZE), (second.as_str(), SIZE)];
        ids.sort();
        made.sort();
        assert_eq!(ids, made);
        let left = client.capacity("local", CapacityOptions::default()).await.unwrap();
        assert!(left + 2 * SIZE <= free, "{left} of {free}");

        for _ in 0..2 {
            client.delete_snapshot("local", &of.id, CallOptions::default()).await.unwrap();
        }
        assert_eq!(snapshots(&client).await, []);
        for volume in ["a", "b"] {
            client.delete_volume(NAMESPACE, volume, VolumeOptions::default()).await.unwrap();
        }
        assert_eq!(client.list_external_volumes("local", "", 0).await.unwrap().0, []);
        w.nothing_left(&client).await;
        served.kill().and_then(|()| served.wait()).expect("csi-local ends");
    });
}
