//! A server of a cluster: nodes and operators ask it for claims of volumes, and etcd keeps them.
//!
//! `gate` is before all calls: `places` bounds those of one caller. `service` takes calls of nodes and operators, `admin` those of operators
//! alone. `access` says who calls and what the grants allow, and `certificates` verifies callers. `stream` sends answers in pages.
//! `metrics` counts, and `scrape` serves what is counted. `claims` and `volumes` change records by csid's rules (`csid::volume::rules`); `records` is what both share,
//! `lists` shows them, and `explain` says what they wait for. Claims of one volume wait in a line of `turns`, and `folding` writes them together. `drive` has controllers called, on the nodes that `controllers` knows, in a task for each volume, which `tasks` counts; `planning` decides which call is next for the claims, and `forward` is such a call. `changes` begins
//! creations, expansions and deletions, `provisioning` drives them, and `volume_calls` are their calls. `expansions` has the nodes' parts. `snapshots` are begun
//! as volumes' changes are, and `sources` checks what a volume is created from. `attachments` begins what AttachVolume and DetachVolume ask for, `by_call` has its states, and `attaching` drives it; `node_ids` finds nodes by the plugins' names. `questions` asks controllers what changes nothing. `queue` has the claims that wait, and `used` counts the volumes of nodes.
//! `nodes` and `servers` have what operators see of the cluster itself, and change; `fence` ends the claims of a node that is off,
//! `fence_command` switches it off, and `away` does both after a time. `drain` keeps what a node reports of its drain. `audit` finds what does not fit
//! in etcd, `status` counts, and `upgrade` raises the version of the values. `recovery` begins and ends a recovery from a backup of etcd, `held`
//! takes over what nodes hold, `heard` keeps who has said it and what was not taken over, `names` finds names of nodes that two have, and `excluded` knows what nodes have brought back, and waits for an operator. `join` and `sessions` know the nodes that are there, and `joins` those whose join has no outcome. `presence` is this server in
//! etcd. `cluster` has what they share. `edges` has the points at which tests kill a server. Decisions 0007 and 0009 say what is built.
//!
//! State: in memory the cache of etcd's volumes, rows that were read, and sessions. Always true:
//! - A write compares the cluster's row and this server's. What grants compares the node's row, too. So nothing is granted by a
//!   server whose lease is gone, or to a node that was fenced.
//! - No grant, no call. A node is believed about its own claims alone.
//! - One caller never takes the places of another.
//! - Without etcd for 10 s this server serves nothing, and ends its sessions.

mod access;
mod admin;
mod asks;
mod attaching;
mod attachments;
mod audit;
mod away;
mod by_call;
mod certificates;
mod changes;
mod claims;
mod cluster;
mod config;
mod controllers;
mod drain;
mod drive;
mod edges;
mod excluded;
mod expansions;
mod explain;
mod failure;
mod fence;
mod fence_command;
mod folding;
mod forward;
mod gate;
mod grants;
mod heard;
mod held;
mod join;
mod joins;
mod listen;
mod lists;
mod metrics;
mod names;
mod node_ids;
mod node_rules;
mod nodes;
mod pace;
mod places;
mod planning;
mod presence;
mod program;
mod provisioning;
mod questions;
mod queue;
mod random;
mod records;
mod recovery;
mod rows;
mod scrape;
mod servers;
mod service;
mod sessions;
#[cfg(test)]
mod simulation;
mod snapshots;
mod sources;
mod status;
mod stream;
mod tasks;
mod time;
mod tries;
mod turns;
mod upgrade;
mod used;
mod view;
mod volume_calls;
mod volumes;
mod wanted;

pub use edges::points;
pub use program::{main, main_knowing};
pub use rows::Schemas;
