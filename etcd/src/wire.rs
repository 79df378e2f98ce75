//! etcd's messages and clients, made of proto/etcd.proto.
#![allow(clippy::all, unused_qualifications, reason = "generated")]

tonic::include_proto!("etcdserverpb");
