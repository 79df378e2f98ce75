//! csid-server of a release that knows the next version of values, for the tests of an upgrade. It is in no package.

use std::process::ExitCode;

fn main() -> ExitCode {
    csid_server::main_knowing(csid_server::Schemas { min: 1, max: 3 })
}
