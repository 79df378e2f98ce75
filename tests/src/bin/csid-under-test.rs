//! csid, built by the tests' own build with feature `fault`: what is tested is never an older binary.

fn main() -> std::process::ExitCode {
    csid::daemon::main()
}
