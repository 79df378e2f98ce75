//! csid under load: many callers, many volumes, plugins that hang and die, a client that floods. Each test prints its figures.
//! What is compared is measured in one run, alternately; nothing is held against a clock but what must not take for ever.

mod beside;
mod floods;
mod hung;
mod killed;
mod large;
mod many;

use std::sync::{Mutex, PoisonError};

use csid_tests::world::{World, world};

/// A world without another of these tests at the same time: they would be each other's load.
fn alone<F>(test: F)
where
    F: for<'w> AsyncFnOnce(&'w mut World) + Send + 'static,
{
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    world(test);
}
