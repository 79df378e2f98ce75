//! The escapes of fstab, mountinfo and utab.

use std::{ffi::OsString, os::unix::ffi::OsStringExt};

/// Returns the field with each `\` and three octal digits replaced by the byte that they name.
pub fn unescaped(field: &str) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.filter(|_| *first == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[3..] } else { tail };
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_escapes_are_bytes() {
        for (field, text) in [
            (r"/srv/a\040b", "/srv/a b"),
            (r"\134040", r"\040"),
            (r"a\04", r"a\04"),
            (r"\303\244", "ä"),
            (r"\999", r"\999"),
            ("", ""),
        ] {
            assert_eq!(unescaped(field), text, "{field}");
        }
    }
}
