//! The registry on a real etcd of Debian: the tests that each registry passes, and tests of what only etcd has.

mod cluster;
mod double;
mod failures;
mod limits;
mod outcomes;
mod proxy;
mod rows;
mod suite;
mod support;
mod values;
