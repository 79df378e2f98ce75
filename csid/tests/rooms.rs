//! Dependencies point one way (ARCHITECTURE.md): each room imports only the rooms it may know.

use std::path::{Path, PathBuf};

/// (room, what it may import of csid beside itself)
const ROOMS: [(&str, &[&str]); 5] = [
    ("bus", &["config", "error", "names", "plugin", "secret", "store", "volume"]),
    ("volume", &["config", "error", "fault", "host", "names", "plugin", "secret", "store"]),
    ("plugin", &["config", "error", "histogram", "host", "secret", "store"]),
    ("store", &["error", "histogram"]),
    ("host", &["config", "error", "store"]),
];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The rooms named after `crate::` in a text; what is defined in lib.rs itself begins with a capital.
fn imports(text: &str) -> impl Iterator<Item = &str> {
    text.split("crate::").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_').unwrap_or(rest.len());
        (end > 0).then_some(&rest[..end])
    })
}

#[test]
fn dependencies_point_one_way() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut files, mut wrong) = (0, Vec::new());
    for (room, allowed) in ROOMS {
        let mut found = Vec::new();
        sources(&src.join(room), &mut found);
        for path in found {
            files += 1;
            // Tests may look further.
            if path.components().any(|part| part.as_os_str().to_string_lossy().contains("test")) {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            for import in imports(text) {
                if import != room && !allowed.contains(&import) {
                    wrong.push(format!("{} imports {import}", path.strip_prefix(&src).unwrap().display()));
                }
            }
        }
    }
    assert!(files > 20, "only {files} files were read");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
