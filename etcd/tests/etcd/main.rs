//! The registry on a real etcd of Debian: the tests that each registry passes, and tests of what only etcd has.

#[allow(dead_code, reason = "the histories use more of it")]
mod cluster;
mod double;
mod failures;
mod limits;
mod outcomes;
mod proxy;
mod rows;
mod slow;
mod suite;
mod support;
mod values;
