//! The book of the documents: docs/SUMMARY.md names each of them, and what a document links to is there.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the documents of a folder of the repository, as paths in the repository.
fn documents(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(repository().join(folder)).unwrap();
    let files = entries.map(|entry| Path::new(folder).join(entry.unwrap().file_name()));
    let mut documents: Vec<_> =
        files.filter(|file| file.extension().is_some_and(|end| end == "md")).collect();
    documents.sort();
    documents
}

/// Returns the lines of a document that are no code.
fn prose(text: &str) -> Vec<&str> {
    let mut in_block = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        if !in_block && !is_fence {
            lines.push(line);
        }
    }
    lines
}

/// Returns the anchor that a heading has on a page: small letters, and dashes for blanks.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

/// Returns the anchors of a document. A heading that comes again has a number.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let headings = prose(text).into_iter().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let name = anchor(line.trim_start_matches('#'));
            let count = seen.entry(name.clone()).or_insert(0);
            *count += 1;
            if *count == 1 { name } else { format!("{name}-{}", *count - 1) }
        })
        .collect()
}

/// Returns the targets of a document's links, without code between backticks.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in prose(text) {
        let plain: Vec<&str> = line.split('`').step_by(2).collect();
        for part in plain.join("`").split("](").skip(1) {
            found.extend(part.split_once(')').map(|(target, _)| target.to_owned()));
        }
    }
    found
}

/// Returns `path` without `..`.
fn resolved(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => assert!(parts.pop(), "{} leaves the repository", path.display()),
            part => parts.push(part),
        }
    }
    parts
}

/// Returns what is wrong with a document's links.
fn broken(document: &Path, text: &str) -> Vec<String> {
    let mut broken = Vec::new();
    for link in links(text) {
        if link.is_empty() || link.contains("://") {
            continue;
        }
        let (path, fragment) = link.split_once('#').unwrap_or((&link, ""));
        let folder = document.parent().unwrap();
        let target = if path.is_empty() { document.to_owned() } else { resolved(&folder.join(path)) };
        let file = repository().join(&target);
        if !file.exists() {
            broken.push(format!("{}: `{link}` names no file", document.display()));
        } else if !fragment.is_empty() && !anchors(&read(&file)).contains(fragment) {
            broken.push(format!("{}: `{link}` names no heading", document.display()));
        }
    }
    broken
}

#[test]
fn links_and_anchors_of_documents_resolve() {
    let all = [".", "docs", "docs/decisions", "tests/witness"].map(documents).concat();
    let all: Vec<_> = all.into_iter().map(|document| resolved_name(&document)).collect();
    let mut count = 0;
    let mut wrong = Vec::new();
    for document in &all {
        let text = read(&repository().join(document));
        count += links(&text).len();
        wrong.extend(broken(document, &text));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(all.len() > 15 && count > 50, "{count} links in {} documents", all.len());
}

fn resolved_name(document: &Path) -> PathBuf {
    document.strip_prefix("./").unwrap_or(document).to_owned()
}

#[test]
fn links_that_do_not_resolve_are_found() {
    let document = Path::new("docs/consumers.md");
    let text = "[a](volumes.md) [b](none.md) [c](#here) [d](volumes.md#none)\n# Not there\n```\n[e](no.md)\n```\n`[f](no.md)`\n";
    let wrong = broken(document, text);
    assert_eq!(wrong.len(), 3, "none.md, #here and #none: {wrong:?}");
    assert_eq!(anchors("# A `b` c: d\n## A b c d\n"), BTreeSet::from(["a-b-c-d".into(), "a-b-c-d-1".into()]));
}

#[test]
fn summary_names_every_document_once() {
    let summary = read(&repository().join("docs/SUMMARY.md"));
    let named: Vec<PathBuf> = links(&summary)
        .iter()
        .filter(|link| !link.is_empty())
        .map(|link| resolved(&Path::new("docs").join(link)))
        .collect();
    for document in ["docs", "docs/decisions"].map(documents).concat() {
        let times = named.iter().filter(|name| **name == document).count();
        let expected = usize::from(document != Path::new("docs/SUMMARY.md"));
        assert_eq!(times, expected, "docs/SUMMARY.md names {} {times} times", document.display());
    }
    for name in ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"] {
        assert!(named.contains(&PathBuf::from(name)), "docs/SUMMARY.md does not name {name}");
    }
}
