//! csid shown on real mounts: the harness of the tests.
//!
//! A [`World`] is one thread in a mount namespace of its own, with a tmpfs in it that holds all directories; csid and the
//! test plugins are children of that thread. What always holds: when the thread ends, also by a panic or a kill, its children
//! die, and with the last of them the namespace and every mount in it. Nothing is ever deleted by path.

pub mod ask;
pub mod automount;
pub mod backend;
#[path = "../../server/tests/cluster/certificates.rs"]
#[allow(clippy::new_without_default, reason = "it makes files")]
pub mod certificates;
pub mod clock;
#[path = "../../server/tests/cluster/site.rs"]
pub mod cluster;
pub mod clustered;
pub mod dbus;
pub mod dice;
pub mod elsewhere;
#[path = "../../etcd/tests/etcd/cluster.rs"]
pub mod etcd;
pub mod fault;
pub mod held;
pub mod hung;
pub mod kernel;
pub mod network;
pub mod old_kernel;
pub mod older;
pub mod on_etcd;
pub mod plugin;
pub mod power;
pub mod queries;
pub mod raw;
pub mod relay;
pub mod script;
pub mod search;
pub mod site;
pub mod systemd;
pub mod world;
