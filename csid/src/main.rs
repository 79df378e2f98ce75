use std::process::ExitCode;

fn main() -> ExitCode {
    csid::daemon::main()
}
