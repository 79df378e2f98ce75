//! A process that is killed or held at one of its named edges (csid/src/fault.rs).

use std::fs;
use std::path::PathBuf;

/// The file by which the test arms an edge of every process that has it in its environment.
pub struct Fault {
    file: PathBuf,
}

impl Fault {
    /// Makes faults, none of them armed. A process that runs already has none.
    pub fn new(file: PathBuf) -> Self {
        Fault { file }
    }

    /// Returns what a process with these faults has in its environment.
    pub fn environment(&self) -> (&'static str, PathBuf) {
        ("CSID_FAULT", self.file.clone())
    }

    /// Arms `EDGE:N` or `EDGE.held` in place of the edge before, which no longer holds the process.
    pub fn arm(&self, edge: &str) {
        let _ = fs::remove_file(self.held());
        // The process reads the file at any time: it finds the old edge or the new one.
        let next = self.file.with_extension("next");
        fs::write(&next, edge).expect("the fault file");
        fs::rename(&next, &self.file).expect("the fault file");
    }

    /// Disarms the edge. Returns the name of the edge at which a process was killed, or the edge that was armed and killed none.
    pub fn disarm(&self) -> String {
        let edge = fs::read_to_string(&self.file).unwrap_or_default();
        self.arm("");
        edge
    }

    /// Whether a process was killed at `edge`, which it writes into the file.
    pub fn killed_at(&self, edge: &str) -> bool {
        fs::read_to_string(&self.file).expect("the fault file") == edge
    }

    /// Whether a process is held at `edge`.
    pub fn holds(&self, edge: &str) -> bool {
        fs::read_to_string(self.held()).is_ok_and(|held| held == edge)
    }

    fn held(&self) -> PathBuf {
        self.file.with_extension("held")
    }
}
