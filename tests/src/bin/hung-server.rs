//! `hung-server SOCKET [KEPT]`: file systems that hang when a test says so (`csid_tests::hung`). What is written to them is
//! written to the directory KEPT when they are unmounted.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let socket = arguments.next().ok_or_else(|| std::io::Error::other("usage: hung-server SOCKET [KEPT]"))?;
    csid_tests::hung::server::run(&socket, arguments.next())
}
