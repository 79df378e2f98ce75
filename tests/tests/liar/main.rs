//! csid against a plugin that lies, hangs, dies and returns every gRPC code.

mod codes;
mod dead;
mod forgotten;
mod hung;
mod lies;
