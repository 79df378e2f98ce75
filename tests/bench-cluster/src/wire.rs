//! etcd's messages and clients, made of etcd/proto/etcd.proto.
#![allow(clippy::all, dead_code, unused_qualifications, reason = "generated")]

tonic::include_proto!("etcdserverpb");
