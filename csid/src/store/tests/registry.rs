//! The tests of any registry, with the one in the journal.

use super::*;

crate::test_registry!(in_journal, super::in_new_journal());

fn in_new_journal() -> (TempDir, Store) {
    let (root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    (root, store)
}
