//! Cursors of lists that are read in pages. A row's cursor is its key, and a client may also make one itself.
//!
//! A cursor has the parts of the key in order, with `/` between them. In a part `%` is `%25` and `/` is `%2F`. A cursor stays valid when
//! its row is gone and when csid has restarted.

use super::options::{Keys, Options};
use crate::error::{Error, Result};
use crate::names;

pub(super) const PAGE: Keys = &[("after", "s"), ("max", "u")];

/// Returns the cursor of a row with this key.
pub(super) fn of(key: &[&str]) -> String {
    let parts: Vec<String> = key.iter().map(|part| part.replace('%', "%25").replace('/', "%2F")).collect();
    parts.join("/")
}

/// Returns the key that `after` names. `None`: the option is absent or "".
pub(super) fn after<const N: usize>(options: &mut Options) -> Result<Option<[String; N]>> {
    options.text("after").filter(|text| !text.is_empty()).map(|text| read(&text)).transpose()
}

/// Returns how many rows the caller wants. 0: all.
pub(super) fn most(options: &mut Options) -> usize {
    options.uint("max").unwrap_or(0) as usize
}

fn read<const N: usize>(text: &str) -> Result<[String; N]> {
    let wrong = || Error::invalid("after is not a cursor of this list");
    let parts = text.split('/').map(part).collect::<Option<Vec<String>>>().ok_or_else(wrong)?;
    for part in &parts {
        names::optional_name("after", part)?;
    }
    <[String; N]>::try_from(parts).map_err(|_| wrong())
}

fn part(text: &str) -> Option<String> {
    let mut pieces = text.split('%');
    let mut plain = pieces.next()?.to_owned();
    for piece in pieces {
        let (escaped, rest) = piece.split_at_checked(2)?;
        plain.push(match escaped {
            "25" => '%',
            "2F" => '/',
            _ => return None,
        });
        plain.push_str(rest);
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn invalid_cursors_are_refused() {
        let long = "x".repeat(129);
        for text in
            ["", "a", "a/b/c", "a%/b", "a%2/b", "a%2f/b", "a%41/b", "a\n/b", "a%ä/b", &format!("a/{long}")]
        {
            assert!(read::<2>(text).is_err(), "{text:?}");
        }
        assert_eq!(read::<2>("a%2F%25/").unwrap(), ["a/%".to_owned(), String::new()]);
    }

    proptest! {
        #[test]
        fn keys_have_distinct_cursors(key in prop::array::uniform3("[a/%2F5ä]{0,6}"), other in prop::array::uniform3("[a/%2F5ä]{0,6}")) {
            let cursor = |key: &[String; 3]| of(&key.each_ref().map(String::as_str));
            prop_assert_eq!(read::<3>(&cursor(&key)).unwrap(), key.clone());
            prop_assert_eq!(cursor(&key) == cursor(&other), key == other);
        }
    }
}
