//! Text for a terminal: tables, facts, times.

use std::{
    io::{self, Write},
    time::Duration,
};

use comfy_table::{Table, presets};
use serde::Serialize;
use serde_json::Value;

use crate::shell::{deceives, escape};

/// Prints to standard output. A closed pipe (`csictl mounts | head`) is not an error.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let newline = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    match write!(out, "{text}{newline}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => other,
    }
}

pub fn print_json(value: &impl Serialize) -> io::Result<()> {
    print(&json_text(value)?)
}

/// Returns the value as JSON whose strings escape all characters that [deceive](deceives).
fn json_text(value: &impl Serialize) -> io::Result<String> {
    Ok(escaped(&serde_json::to_string_pretty(value)?))
}

/// Returns JSON on a line, escaped likewise.
pub fn json_line(value: &Value) -> String {
    escaped(&value.to_string())
}

/// `json` has these characters in strings alone, but for line breaks.
fn escaped(json: &str) -> String {
    json.chars().map(|c| if c != '\n' && deceives(c) { escape(c) } else { c.to_string() }).collect()
}

/// Returns a plugin's or a caller's text without characters that control a terminal. Those that change the direction of text are
/// escaped.
pub fn plain(text: &str) -> String {
    let shown = |c: char| match c {
        c if c.is_control() => '\u{fffd}'.to_string(),
        c if deceives(c) => escape(c),
        c => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// Returns the same of each line of a message.
pub fn lines(text: &str) -> String {
    text.trim().lines().map(plain).collect::<Vec<_>>().join("\n")
}

/// Returns the text with at most `limit` characters. The last one shows that there were more.
pub fn cut(text: &str, limit: usize) -> String {
    match text.chars().nth(limit) {
        None => text.to_owned(),
        Some(_) => text.chars().take(limit - 1).chain(['…']).collect(),
    }
}

pub fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for row in rows {
        table.add_row(row.map(|cell| if cell.is_empty() { "-".to_owned() } else { plain(&cell) }));
    }
    let last = N - 1;
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, if index == last { 0 } else { 2 }));
    }
    table.trim_fmt()
}

/// Returns lines `KEY: value` with the keys aligned right, as systemctl status has them. Empty values have no line.
pub fn facts<const N: usize>(facts: [(&str, String); N]) -> String {
    let width = facts.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    facts
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(key, value)| format!("{key:>width$}: {}\n", plain(&value)))
        .collect()
}

pub fn seconds(usec: u64) -> String {
    format!("{:.1}s", Duration::from_micros(usec).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direction_of_text_is_not_changed() {
        for c in ['\u{202a}', '\u{202e}', '\u{2066}', '\u{2069}', '\u{200f}', '\u{61c}'] {
            let (name, escape) = (format!("a{c}b"), format!("a\\u{:04x}b", u32::from(c)));
            assert_eq!(plain(&name), escape);
            assert_eq!(lines(&format!("{name}\n{name}")), format!("{escape}\n{escape}"));
            assert!(table(["NAME"], [[name.clone()]]).contains(&escape));
            assert!(facts([("name", name.clone())]).contains(&escape));
            assert_eq!(json_text(&[&name]).unwrap(), format!("[\n  \"{escape}\"\n]"));
        }
        let text = json_text(&"a\u{9b}2J\u{7f}").unwrap();
        assert_eq!(text, r#""a\u009b2J\u007f""#);
        assert_eq!(plain("ä ש \t"), "ä ש \u{fffd}");
    }
}
