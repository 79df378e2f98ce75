//! csid, built by the tests' own build with feature `fault`: what is tested is never an older binary. `CSID_RECORD` names
//! the file that gets a record of what it does to its journal, `CSID_TEST_HOLD` the socket of a test that holds its calls, and with
//! `CSID_TEST_OLD_KERNEL` the kernel lacks calls. `CSID_TEST_ETCD` has its registry on etcd.

fn main() -> std::process::ExitCode {
    if let Some(record) = std::env::var_os("CSID_RECORD") {
        csid_tests::power::vfs::record(record.as_ref()).expect("the record of a power cut's test");
    }
    if let Some(socket) = std::env::var_os(csid_tests::held::SOCKET) {
        csid_tests::held::hand_over(socket.as_ref()).expect("a test that holds calls");
    }
    if std::env::var_os(csid_tests::old_kernel::VARIABLE).is_some() {
        csid_tests::old_kernel::begin().expect("a filter of system calls");
    }
    match std::env::var(csid_tests::on_etcd::ENDPOINTS) {
        Ok(endpoints) => csid::daemon::main_with(&*csid_tests::on_etcd::open(endpoints)),
        Err(_) => csid::daemon::main(),
    }
}
