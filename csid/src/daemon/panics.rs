//! A panic ends csid. A task that has panicked answers nobody and watches nothing any more, and the others do not know it.
//! systemd starts csid again, and the journal is as after a kill.
//!
//! A hook does it, not `panic = "abort"`: libcsi, of the same profile, catches panics at its border. The hook runs on the thread
//! that panics, before anything is unwound, so it covers tasks, the pool of blocking threads and threads alike.

use std::io::Write;
use std::panic::PanicHookInfo;

/// From here on a panic of any thread is logged and ends the process by SIGABRT.
pub(super) fn end_csid() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // First in the words that a test, a terminal and a debugger know, with a backtrace where one is wanted.
        print(info);
        tell(info);
        // Neither log is buffered: the journal has a socket, standard error is written at once.
        let _ = std::io::stderr().flush();
        std::process::abort();
    }));
}

fn tell(info: &PanicHookInfo<'_>) {
    let at = info.location().map(ToString::to_string).unwrap_or_default();
    let why = info.payload_as_str().unwrap_or("a panic without words");
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("unnamed");
    tracing::error!(at, thread, "csid ends, for it panicked at {at}: {why}; systemd starts it again");
}
