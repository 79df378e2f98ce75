//! A cluster of real processes: etcd, servers, and nodes that reach them through csid-link. The nodes' side of the protocol is the test.

mod access;
mod attach;
mod attach_failures;
mod attach_lies;
mod attach_random;
mod attach_waits;
mod audit;
mod brought_back;
mod by_call;
mod by_call_failures;
mod certificates;
mod claims;
mod creation_failures;
mod creations;
mod credentials;
mod descriptors;
mod drain;
mod edges;
#[path = "../../../etcd/tests/etcd/cluster.rs"]
#[allow(dead_code, reason = "the tests of the registry use more of it")]
mod etcd;
mod excluded_claims;
mod expansions;
mod explain;
mod failures;
mod far_end;
#[path = "../../../tests/src/fault.rs"]
#[allow(dead_code, reason = "the tests of csid use more of it")]
mod fault;
mod fence;
mod fields;
mod full;
mod granted_lies;
mod joins;
mod late;
mod lies;
mod limits;
mod lists;
mod metrics;
mod operator_failures;
mod operators;
mod program;
#[path = "../../../etcd/tests/etcd/proxy.rs"]
#[allow(dead_code, reason = "the tests of the registry use more of it")]
mod proxy;
#[path = "../../../tests/src/queries.rs"]
mod queries;
mod questions;
mod queue;
mod recoveries;
mod recovery;
mod refused_claims;
mod reload;
mod restored_attachments;
mod site;
mod snapshots;
mod sources;
mod status;
mod together;
mod upgrade;
mod used;
mod whose;
