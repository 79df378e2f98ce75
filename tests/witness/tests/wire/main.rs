//! A CO and a plugin over real sockets, with the witness between them.

mod forwarded;
mod plugin;
mod world;
