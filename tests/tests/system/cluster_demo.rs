//! The demonstration of a cluster: six machines, built by docs/cluster.md as it is typed.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use csid_tests::world::count;

/// How long it may take on a busy machine, in seconds. It takes about 40 alone.
const LIMIT: &str = "240";

#[test]
fn cluster_of_the_document_keeps_one_host_out() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let begun = Instant::now();
    let output = Command::new("timeout")
        .args(["--kill-after=60", LIMIT])
        .arg(directory.join("demo-cluster.sh"))
        .arg(directory.join("../target"))
        .output()
        .expect("tests/demo-cluster.sh");
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = || format!("{}\n{said}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", failed());
    // The script compares what it shows. This is that it has come to its end, past both refusals.
    for due in ["by db-1/web", "by db-2/web", "written on db-1", "# Done in"] {
        assert!(said.contains(due), "no `{due}`: {}", failed());
    }
    count("s for the demonstration of a cluster", begun.elapsed().as_secs() as usize);
}
