//! Registered volumes: created and deleted at the plugin, killed and lost answers included.

mod creating;
mod expanding;
mod site;
