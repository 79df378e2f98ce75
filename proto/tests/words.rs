//! The banned words of docs/contributing.md, counted in comments, string literals and documents. Each top-level folder has a number in
//! words.txt, which may only fall.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The paragraph of docs/contributing.md that lists the words.
const LIST: &str = "Banned words: ";
/// How many hits a failure shows of a folder: those in the files that were changed last.
const SHOWN: usize = 20;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The lines of the paragraph with the list, and the words in it, each between backticks.
fn banned(contributing: &str) -> (std::ops::Range<usize>, Vec<String>) {
    let lines: Vec<&str> = contributing.lines().collect();
    let from = lines.iter().position(|line| line.starts_with(LIST)).expect(LIST);
    let to = from + lines[from..].iter().position(|line| line.is_empty()).unwrap_or(lines.len() - from);
    let words: String = lines[from..to].join(" ");
    (from..to, words.split('`').skip(1).step_by(2).map(str::to_lowercase).collect())
}

#[derive(Clone, Copy, PartialEq)]
enum Language {
    Rust,
    Go,
    C,
    Markup,
    Document,
}

fn language(path: &Path) -> Option<Language> {
    match path.extension()?.to_str()? {
        "rs" => Some(Language::Rust),
        "go" => Some(Language::Go),
        "h" | "c" => Some(Language::C),
        "xml" => Some(Language::Markup),
        "md" => Some(Language::Document),
        section if section.len() == 1 && section.as_bytes()[0].is_ascii_digit() => Some(Language::Document),
        _ => None,
    }
}

/// The files below `folder`, without what is built.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') || name == "target" {
            continue;
        }
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            files(&entry.path(), found);
        } else if kind.is_file() && language(&entry.path()).is_some() {
            found.push(entry.path());
        }
    }
}

/// The text with everything but comments and string literals blanked out; lines stay.
fn prose(text: &str, language: Language) -> String {
    let bytes = text.as_bytes();
    let is = |at: usize, what: &str| bytes[at..].starts_with(what.as_bytes());
    let mut kept: Vec<u8> = bytes.iter().map(|byte| if *byte == b'\n' { b'\n' } else { b' ' }).collect();
    let mut at = 0;
    while at < bytes.len() {
        let end = match language {
            Language::Document => bytes.len(),
            Language::Markup if is(at, "<!--") => after(text, at + 4, "-->"),
            Language::Markup => at,
            _ if is(at, "//") => after(text, at, "\n"),
            _ if is(at, "/*") => after_block(bytes, at, language == Language::Rust),
            Language::Go if is(at, "`") => after(text, at + 1, "`"),
            Language::Rust if bytes[at] == b'r' && !follows_a_word(bytes, at) => {
                raw_string(text, at).unwrap_or(at)
            }
            _ if is(at, "\"") => after_quoted(bytes, at, b'"'),
            // A character; a lifetime has no quote behind its first letter.
            _ if is(at, "'\\") || (is(at, "'") && bytes.get(at + 2) == Some(&b'\'')) => {
                at = after_quoted(bytes, at, b'\'');
                continue;
            }
            _ => at,
        };
        kept[at..end].copy_from_slice(&bytes[at..end]);
        at = end.max(at + 1);
    }
    String::from_utf8_lossy(&kept).into_owned()
}

fn follows_a_word(bytes: &[u8], at: usize) -> bool {
    // `br"…"` is a string too.
    at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_') && bytes[at - 1] != b'b'
}

/// Behind the next `end` from there, or the end of the text.
fn after(text: &str, from: usize, end: &str) -> usize {
    let found = text.as_bytes()[from..].windows(end.len()).position(|part| part == end.as_bytes());
    found.map_or(text.len(), |place| from + place + end.len())
}

fn after_block(bytes: &[u8], from: usize, nests: bool) -> usize {
    let (mut at, mut open) = (from, 0);
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" if nests || open == 0 => (open, at) = (open + 1, at + 2),
            b"*/" => (open, at) = (open - 1, at + 2),
            _ => at += 1,
        }
        if open == 0 {
            return at;
        }
    }
    bytes.len()
}

fn after_quoted(bytes: &[u8], from: usize, quote: u8) -> usize {
    let mut at = from + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The end of the raw string that begins with the `r` at `from`, if one does.
fn raw_string(text: &str, from: usize) -> Option<usize> {
    let hashes = text.as_bytes()[from + 1..].iter().take_while(|byte| **byte == b'#').count();
    let open = from + 1 + hashes;
    (text.as_bytes().get(open) == Some(&b'"'))
        .then(|| after(text, open + 1, &format!("\"{}", "#".repeat(hashes))))
}

/// Whether a word goes on with these characters. `file_name`, `kebab-case` and `nobody's` are one word each; a quote or a dash
/// next to a word belongs to the sentence.
fn goes_on(mut rest: impl Iterator<Item = char>) -> bool {
    match rest.next() {
        Some('\'' | '-') => rest.next().is_some_and(char::is_alphanumeric),
        next => next.is_some_and(|c| c.is_alphanumeric() || c == '_'),
    }
}

/// The banned words of a line, each as often as it stands there as a word of its own.
fn hits<'w>(line: &str, words: &'w [String]) -> Vec<&'w str> {
    let line = line.to_lowercase().replace('’', "'");
    let mut found = Vec::new();
    for word in words {
        for (place, _) in line.match_indices(word.as_str()) {
            let behind = line[place + word.len()..].chars();
            if !goes_on(line[..place].chars().rev()) && !goes_on(behind) {
                found.push(word.as_str());
            }
        }
    }
    found
}

#[test]
fn banned_words_never_increase() {
    let root = repository();
    let contributing = root.join("docs/contributing.md");
    let (list, words) = banned(&read(&contributing));
    assert!(words.len() >= 15, "{words:?}");
    let mut found = Vec::new();
    files(&root, &mut found);
    assert!(found.len() > 400, "only {} files were read", found.len());
    let changed = |path: &PathBuf| path.metadata().and_then(|metadata| metadata.modified()).ok();
    found.sort_by_cached_key(|path| Reverse(changed(path)));
    let mut now: BTreeMap<String, Vec<String>> = BTreeMap::new();
    // This file's own examples are no prose.
    for path in found.iter().filter(|path| !path.ends_with("proto/tests/words.rs")) {
        let name = path.strip_prefix(&root).unwrap();
        let folder = if name.components().count() == 1 {
            Path::new(".")
        } else {
            name.iter().next().unwrap().as_ref()
        };
        let of_folder = now.entry(folder.display().to_string()).or_default();
        let text = prose(&read(path), language(path).unwrap());
        for (number, line) in text.lines().enumerate() {
            if *path == contributing && list.contains(&number) {
                continue;
            }
            for word in hits(line, &words) {
                of_folder.push(format!("{}:{}: {word}", name.display(), number + 1));
            }
        }
    }
    let table = root.join("proto/tests/words.txt");
    let kept: BTreeMap<String, usize> = read(&table)
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_once(' ').expect("FOLDER COUNT"))
        .map(|(folder, count)| (folder.to_owned(), count.trim().parse().expect("a number")))
        .collect();
    let (mut risen, mut fallen, mut new) = (String::new(), false, String::new());
    for (folder, hits) in &now {
        let (kept, count) = (kept.get(folder).copied().unwrap_or(0), hits.len());
        writeln!(new, "{folder} {}", count.min(kept)).unwrap();
        fallen |= count < kept;
        if count > kept {
            writeln!(risen, "{folder}: {count} banned words, {kept} before").unwrap();
            hits.iter().take(SHOWN).for_each(|hit| writeln!(risen, "  {hit}").unwrap());
        }
    }
    fallen |= kept.keys().any(|folder| !now.contains_key(folder));
    if fallen && std::env::var_os("RENEW").is_some() {
        let head: String = read(&table)
            .lines()
            .filter(|line| line.starts_with('#'))
            .map(|line| format!("{line}\n"))
            .collect();
        std::fs::write(&table, head + &new).unwrap();
        fallen = false;
    }
    assert!(risen.is_empty(), "docs/contributing.md says what to write instead:\n{risen}");
    assert!(
        !fallen,
        "there are fewer banned words: keep it so with RENEW=1 cargo test -p csi-proto --test words\n{new}"
    );
}

#[test]
fn only_comments_and_strings_are_read() {
    let rust = "let till = 'x'; // till a\nlet s = \"till \\\" b\"; fn till<'a>(c: char) {} /* till /* c */ till */ let t = r#\"till\"#;\n";
    let words = ["till".to_owned()];
    let count = |text: &str, language| -> Vec<usize> {
        prose(text, language).lines().map(|line| hits(line, &words).len()).collect()
    };
    assert_eq!(count(rust, Language::Rust), [1, 4]);
    assert_eq!(count("till := `till` + \"till\" // till\n", Language::Go), [3]);
    assert_eq!(count("int till; /* till\n till */ char c = '\"'; int till;\n", Language::C), [1, 1]);
    assert_eq!(count("<till a=\"till\"/><!-- till\ntill -->till\n", Language::Markup), [1, 1]);
    assert_eq!(count("# till\n", Language::Document), [1]);
}

#[test]
fn a_word_is_a_whole_word() {
    let words = ["till", "nobody's", "let go"].map(str::to_owned);
    for (line, count) in [
        ("wait till then", 1),
        ("Till then, till.", 2),
        ("until still tiller till_x x-till till-x", 0),
        ("'till' and till- and till:", 3),
        ("nobody’s nobody", 1),
        ("they let go, and let going", 1),
    ] {
        assert_eq!(hits(line, &words).len(), count, "{line}");
    }
}
