//! What faults do to etcd itself.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use csid_etcd::api::kv_client::KvClient;
use csid_etcd::api::lease_client::LeaseClient;
use csid_etcd::api::request_op::Request;
use csid_etcd::api::{LeaseRevokeRequest, PutRequest, RequestOp, TxnRequest};
use csid_tests::world::eventually;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::site::Site;

/// The bytes of a value that is written while a disk is full.
const FILLER: usize = 256 << 10;

/// Fills a disk by a file.
pub fn fill(file: &Path, disk: &Path) {
    let file = File::create(file).expect("a file");
    let mut length = 0;
    loop {
        let free = rustix::fs::statvfs(disk).expect("a disk");
        let free = free.f_bavail * free.f_frsize;
        if free == 0 {
            return;
        }
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), length, free) {
            Ok(()) => length += free,
            // The member may take some of it first.
            Err(Errno::NOSPC | Errno::INTR) => {}
            Err(error) => panic!("{}: {error}", disk.display()),
        }
    }
}

/// Writes values to etcd until a member without room for a new page has ended. After a compaction a member has free pages first.
pub async fn write_until_it_ends(site: &mut Site, member: usize) {
    let other = (member + 1) % site.etcd.members.len();
    let endpoint = Endpoint::from_shared(site.etcd.endpoints().remove(other)).expect("an endpoint");
    let mut kv = KvClient::new(endpoint.timeout(Duration::from_secs(1)).connect_lazy());
    eventually("the member ends", async || {
        let put = PutRequest { key: b"/filler".to_vec(), value: vec![0; FILLER], ..PutRequest::default() };
        let success = vec![RequestOp { request: Some(Request::RequestPut(put)) }];
        // It has no answer while the leader changes.
        let _ = kv.txn(TxnRequest { success, ..TxnRequest::default() }).await;
        site.etcd.members[member].has_ended()
    })
    .await;
}

/// Ends a lease, and with it the rows that have it.
pub async fn revoke(site: &Site, id: i64) {
    let mut leases = LeaseClient::new(member(site));
    eventually("the lease has ended", async || {
        let revoked = leases.lease_revoke(LeaseRevokeRequest { id }).await;
        revoked.map_or_else(|status| status.code() == Code::NotFound, |_| true)
    })
    .await;
}

/// Returns a connection to a member of etcd. It refuses calls while its leader changes.
fn member(site: &Site) -> Channel {
    let endpoint = Endpoint::from_shared(site.etcd.endpoints().remove(0)).expect("an endpoint");
    endpoint.timeout(Duration::from_secs(5)).connect_lazy()
}
