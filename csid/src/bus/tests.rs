//! The bus against real connections: peers of a private socket, and a dbus-daemon of the test's own.

mod harness;
mod intake;
mod lost;
mod members;
mod on_bus;
mod pages;
mod plugins;
mod signals;
mod strangers;
