//! A CO and a plugin over real sockets, with the witness between them.

mod broken;
mod faults;
mod forwarded;
mod plugin;
mod session;
mod streamed;
mod world;
