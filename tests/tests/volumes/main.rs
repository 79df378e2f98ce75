//! Registered volumes: created and deleted at the plugin, declared by files, killed and lost answers included.

mod creating;
mod declared;
mod expanding;
mod site;
