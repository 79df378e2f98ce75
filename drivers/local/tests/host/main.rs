//! csi-local as a process, on real loop devices and mounts, in a mount namespace of each test's own. Needs root.

mod attach;
mod block;
mod copies;
mod crash;
mod filesystem;
mod harness;
mod server;
