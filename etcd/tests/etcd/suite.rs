//! The tests of any registry, on one member and on three.

use csid_etcd::EtcdRegistry;

use crate::cluster::Cluster;
use crate::support::registry;

csid::test_registry!(on_one_member, super::on(1).await);
csid::test_registry!(on_three_members, super::on(3).await);

async fn on(members: usize) -> (Cluster, EtcdRegistry) {
    let cluster = Cluster::start(members, &[]).await;
    let registry = registry(cluster.endpoints());
    (cluster, registry)
}
