//! Whether a call's caller still waits for the answer.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    /// The call that this thread runs. `None`: it runs none.
    static CALL: RefCell<Option<Call>> = const { RefCell::new(None) };
}

/// Returns whether the caller of the call that this thread runs has gone. The command line has no caller.
pub fn has_gone() -> bool {
    CALL.with_borrow(|call| call.as_ref().is_some_and(|call| call.0.load(Ordering::Relaxed)))
}

/// The side that waits for a call's answer. Its drop says that it has gone.
#[derive(Default)]
pub struct Caller(Arc<AtomicBool>);

/// The call of a [`Caller`].
pub struct Call(Arc<AtomicBool>);

impl Caller {
    pub fn call(&self) -> Call {
        Call(Arc::clone(&self.0))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Call {
    /// Runs the call on this thread.
    pub fn run<T>(self, call: impl FnOnce() -> T) -> T {
        CALL.set(Some(self));
        let answer = call();
        CALL.set(None);
        answer
    }
}
