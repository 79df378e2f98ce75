//! What a document has its reader type. The tests take it from the document, so that the two cannot differ.

use csid_tests::world::count;

use crate::machine::Machine;

const CONSUMERS: &str = include_str!("../../../docs/consumers.md");

/// A block of a document, without its fences: its language and its text.
type Block = (String, String);

/// Returns the blocks of the section of docs/consumers.md with this heading, up to the next heading.
fn blocks(heading: &str) -> Vec<Block> {
    let mut lines = CONSUMERS.lines().skip_while(|line| *line != heading).skip(1);
    let mut found = Vec::new();
    while let Some(line) = lines.next() {
        if line.starts_with('#') {
            break;
        }
        if let Some(language) = line.strip_prefix("```") {
            let text: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            found.push((language.to_owned(), text.join("\n") + "\n"));
        }
    }
    found
}

/// Returns the commands of a console, which begin with a prompt. A command that ends with a backslash goes on in the next line.
fn commands(console: &str) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    for line in console.lines() {
        match (line.strip_prefix("# "), commands.last_mut()) {
            (Some(command), _) => commands.push(command.to_owned()),
            (None, Some(last)) if last.ends_with('\\') => {
                last.push('\n');
                last.push_str(line);
            }
            (None, _) => panic!("no command, and tests do not compare output: {line}"),
        }
    }
    commands
}

/// Types a section: runs the commands of each console as one shell in /root, writes the files, whose first line is their path, and adds
/// the lines for fstab. A file's directory has to be there, as for a reader.
pub fn type_section(m: &Machine, heading: &str) {
    let blocks = blocks(heading);
    assert!(!blocks.is_empty(), "docs/consumers.md has no section `{heading}` with blocks");
    let mut typed = 0;
    for (language, text) in &blocks {
        match language.as_str() {
            "console" => {
                let commands = commands(text);
                typed += commands.len();
                m.run(&format!("cd && set -eux\n{}", commands.join("\n")));
            }
            "fstab" => m.write("/etc/fstab", &format!("{}\n{text}", m.run("cat /etc/fstab"))),
            "ini" | "yaml" => {
                let path = text.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap_or_default();
                assert!(path.starts_with('/'), "the first line is the file's path: {text}");
                m.write(path, text);
            }
            other => panic!("a block of `{other}` in `{heading}`: {text}"),
        }
    }
    count("commands typed from docs/consumers.md", typed);
}
