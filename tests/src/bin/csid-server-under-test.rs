//! csid-server, built by the tests' own build with feature `fault`.

fn main() -> std::process::ExitCode {
    csid_server::main()
}
