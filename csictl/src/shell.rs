//! Words as a shell reads them.

/// Returns whether a terminal shows something else for the character than it is: it controls the terminal, or the direction of text.
pub fn deceives(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns the character's escape in JSON and in a shell's `$''`. No such character has more than four digits.
pub fn escape(c: char) -> String {
    format!("\\u{:04x}", u32::from(c))
}

/// Returns the word quoted for a shell, so that a hint can be copied. A shell with `$''` reads a word with characters that
/// [deceive](deceives).
pub fn quoted(word: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || "._-/:@%+=,".contains(c);
    if !word.is_empty() && word.chars().all(safe) {
        word.to_owned()
    } else if word.contains(|c| c == '`' || deceives(c)) {
        let escaped = word.chars().map(|c| match c {
            '\\' | '\'' => format!("\\{c}"),
            // Hints have backticks around commands. This one would end them.
            '`' => r"\x60".to_owned(),
            c if deceives(c) => escape(c),
            c => c.to_string(),
        });
        format!("$'{}'", escaped.collect::<String>())
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_can_be_copied_into_a_shell() {
        assert_eq!(quoted("a/b.c"), "a/b.c");
        assert_eq!(quoted("vol[0]"), "'vol[0]'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted(r"a`b'\"), r"$'a\x60b\'\\'");
        // Shown as it is, each of these changes how the line looks.
        assert_eq!(quoted("a\u{202e}b"), r"$'a\u202eb'");
        assert_eq!(quoted("a\u{1b}[2J\n'"), r"$'a\u001b[2J\u000a\''");
    }
}
