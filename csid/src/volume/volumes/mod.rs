//! The calls on registered volumes, and the volumes that files declare.

mod calls;
pub mod clustered;
mod create;
mod declared;
mod delete;
pub mod forwarded;
mod register;
pub mod volumes_d;
