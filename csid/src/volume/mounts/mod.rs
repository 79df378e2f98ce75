//! Mounts of this node: making, unmounting, adopting, forgetting and opening them.

pub(in crate::volume) mod adopt;
pub(in crate::volume) mod claimed_mount;
pub(in crate::volume) mod effect_failure;
pub(in crate::volume) mod effects;
pub(in crate::volume) mod forget;
pub(in crate::volume) mod mount;
pub(in crate::volume) mod node_id;
pub(in crate::volume) mod open_tree;
mod own_namespace;
mod own_tmpfs;
mod removals;
mod site;
pub(in crate::volume) mod system_stop;
pub(in crate::volume) mod targets;
mod unmount;
mod until_done;
