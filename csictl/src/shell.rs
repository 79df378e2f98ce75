//! Words as a shell reads them.

/// Returns the word quoted for a shell, so that a hint can be copied.
pub fn quoted(word: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || "._-/:@%+=,".contains(c);
    if !word.is_empty() && word.chars().all(safe) {
        word.to_owned()
    } else if word.contains('`') {
        // Hints have backticks around commands. This one would end them.
        format!("$'{}'", word.replace('\\', r"\\").replace('\'', r"\'").replace('`', r"\x60"))
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
    }
}
