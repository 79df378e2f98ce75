use std::process::ExitCode;

fn main() -> ExitCode {
    csid_server::main()
}
