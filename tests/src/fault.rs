//! csid killed or held at one of its named edges (csid/src/fault.rs).

use std::fs;
use std::path::PathBuf;

use crate::world::{World, eventually};

/// The file by which the test arms an edge of every csid that starts in its world.
pub struct Fault {
    file: PathBuf,
}

impl Fault {
    /// Makes faults, none of them armed. A csid that runs already has none.
    pub fn of(w: &mut World) -> Self {
        let file = w.path("fault");
        w.environment.insert("CSID_FAULT".to_owned(), file.to_string_lossy().into_owned());
        Fault { file }
    }

    /// Arms `EDGE:N` or `EDGE.held` in place of the edge before, which no longer holds csid.
    pub fn arm(&self, edge: &str) {
        let _ = fs::remove_file(self.held());
        // csid reads the file at any time: it finds the old edge or the new one.
        let next = self.file.with_extension("next");
        fs::write(&next, edge).expect("the fault file");
        fs::rename(&next, &self.file).expect("the fault file");
    }

    /// Disarms the edge. Returns the name of the edge at which csid was killed, or the edge that was armed and killed no csid.
    pub fn disarm(&self) -> String {
        let edge = fs::read_to_string(&self.file).unwrap_or_default();
        self.arm("");
        edge
    }

    /// Whether csid was killed at `edge`, which it writes into the file.
    pub fn killed_at(&self, edge: &str) -> bool {
        fs::read_to_string(&self.file).expect("the fault file") == edge
    }

    /// Whether csid is held at `edge`.
    pub fn holds(&self, edge: &str) -> bool {
        fs::read_to_string(self.held()).is_ok_and(|held| held == edge)
    }

    pub async fn reached(&self, edge: &str) {
        eventually(&format!("csid is held at {edge}"), async || self.holds(edge)).await;
    }

    fn held(&self) -> PathBuf {
        self.file.with_extension("held")
    }
}
