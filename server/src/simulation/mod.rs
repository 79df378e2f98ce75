//! The simulation: real servers over an etcd in memory, nodes that behave as csid does, and a storage that remembers what was done to it. A seed
//! decides everything: which messages are late, lost or doubled, who dies when, and how the plugin answers. It all runs on one thread and on
//! tokio's paused clock, so a seed does the same each time.
//!
//! `scene` sets up a cluster and breaks it, `server` is a server of it, `node` a host, `scheduler` has volumes attached by call, `operator` blocks
//! nodes, `client` is how both ask the servers, `world` is the storage and the judge, `history` the judge of etcd, `modes` what the volumes are used
//! for, `network` what is between them, `faults` counts what goes wrong. Always true: nodes and servers share no state but by messages, and nothing
//! but the judge sees both.
//!
//! `CSID_SIM_SEED` repeats one seed, `CSID_SIM_SEEDS` is how many are tried, `CSID_SIM_FIRST` is the first of them, `CSID_SIM_LOG` shows what happens.

mod breaks;
mod client;
mod dice;
mod faults;
mod history;
mod modes;
mod network;
mod node;
// csid's own: which late calls a controller's node refuses.
mod operator;
#[path = "../../../csid/src/cluster/orders.rs"]
#[allow(dead_code, reason = "no node of a scene is asked a question")]
mod orders;
mod scene;
mod scheduler;
mod server;
mod tests;
mod world;
