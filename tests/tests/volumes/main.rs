//! Registered volumes: created and deleted at the plugin, declared by files, killed and lost answers included. A witness stands
//! before the plugin.

mod creating;
mod declared;
mod expanding;
mod given_up;
mod inventory;
mod local;
mod rules;
mod site;
