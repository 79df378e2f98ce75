//! A cluster of six machines, built by docs/cluster-install.md as it is typed: its demonstration, and the runbooks of docs/cluster-operations.md.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use csid_tests::world::count;

/// Runs a script of this directory, which compares what it shows, and checks that it has come to its end. `limit`: how many seconds it may take
/// on a busy machine.
fn typed(script: &str, limit: u32, due: &[&str]) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let begun = Instant::now();
    let output = Command::new("timeout")
        .args(["--kill-after=60", &limit.to_string()])
        .arg(directory.join(script))
        .arg(directory.join("../target"))
        .output()
        .expect(script);
    let said = String::from_utf8_lossy(&output.stdout);
    // The reason is on the standard error, and comes first: a listing of what failed has the first lines alone.
    let failed =
        || format!("{}\n{}\n{said}", output.status, String::from_utf8_lossy(&output.stderr).trim_end());
    assert!(output.status.success(), "{}", failed());
    for due in due.iter().chain(&["# Done in"]) {
        assert!(said.contains(due), "no `{due}`: {}", failed());
    }
    count(&format!("s for {script}"), begun.elapsed().as_secs() as usize);
}

/// It takes about 40 s alone.
#[test]
fn cluster_of_the_document_keeps_one_host_out() {
    typed("demo-cluster.sh", 240, &["by db-1/web", "by db-2/web", "written on db-1"]);
}

/// It took 344 s on a busy machine.
#[test]
fn runbooks_of_the_document_do_what_they_say() {
    typed("runbooks.sh", 600, &["# Restore etcd", "db-2 has the volume mounted", "# db-3 is sold"]);
}
