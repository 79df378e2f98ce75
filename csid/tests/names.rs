//! One name for one thing: a search for a public type's name in its crate finds one definition. A name of an edge is in one of the lists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use csid::fault::{edges_of, points, points_of_cluster};

/// Directories of crates, from the repository's root.
const CRATES: [&str; 6] = ["csid", "csictl", "client", "libcsi-ffi", "etcd", "server"];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        match (path.is_dir(), name.as_str()) {
            // Tests may have helpers of the same names.
            (_, "tests") => {}
            (true, _) => sources(&path, found),
            (false, _) if path.extension().is_some_and(|extension| extension == "rs") => found.push(path),
            _ => {}
        }
    }
}

/// Returns the name of the public type that a line defines. `None`: it defines none, or a macro names it.
fn defined(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(visibility) => visibility.split_once(')')?.1,
        None => rest,
    };
    let (kind, rest) = rest.trim_start().split_once(' ')?;
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
    ["struct", "enum", "trait", "type", "union"]
        .contains(&kind)
        .then_some(&rest[..end])
        .filter(|name| !name.is_empty())
}

#[test]
fn public_type_name_is_defined_once() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for name in CRATES {
        let mut files = Vec::new();
        sources(&repository.join(name).join("src"), &mut files);
        let mut defining: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for path in files {
            let text = std::fs::read_to_string(&path).unwrap();
            for found in text.lines().filter_map(defined) {
                defining.entry(found.to_owned()).or_default().push(path.clone());
            }
        }
        assert!(defining.len() > 5, "{name}: only {} types were read", defining.len());
        let twice: Vec<_> = defining.into_iter().filter(|(_, paths)| paths.len() > 1).collect();
        assert!(twice.is_empty(), "{name}: {twice:#?}");
    }
}

#[test]
fn definition_is_read_with_any_visibility() {
    for (line, name) in [
        ("pub struct A;", Some("A")),
        ("    pub(super) enum Bc<T> {", Some("Bc")),
        ("pub(in crate::volume) type D = E;", Some("D")),
        ("pub fn f() {}", None),
        ("struct G;", None),
        ("pub struct $name {", None),
    ] {
        assert_eq!(defined(line), name, "{line}");
    }
}

/// An edge that is in no list has no test. One of the list of a cluster has its name in the code.
#[test]
fn each_named_edge_of_csid_is_in_a_list() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let mut named = BTreeSet::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for call in text.split("fault::around(").skip(1) {
            // Some names are values: an action's, an RPC's.
            let name = call.trim_start().strip_prefix('"').and_then(|rest| rest.split_once('"'));
            named.extend(name.into_iter().flat_map(|(name, _)| edges_of(name)));
        }
    }
    let of_cluster = BTreeSet::from_iter(points_of_cluster());
    let listed: BTreeSet<_> = points([]).into_iter().chain(of_cluster.clone()).collect();
    let unlisted: Vec<_> = named.difference(&listed).collect();
    assert!(unlisted.is_empty(), "edges of no list: {unlisted:?}");
    let gone: Vec<_> = of_cluster.difference(&named).collect();
    assert!(gone.is_empty(), "edges that csid does not have: {gone:?}");
}
