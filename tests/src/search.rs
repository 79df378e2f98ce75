//! A search through everything that was kept: for a text as it is, in base64 and in hex.

use std::collections::{BTreeMap, BTreeSet};

/// The collected texts, by their places. Searches are for ASCII, so bytes that are not UTF-8 may be lost.
#[derive(Default)]
pub struct Haystack(BTreeMap<String, String>);

impl Haystack {
    pub fn add(&mut self, place: &str, bytes: &[u8]) {
        let kept = self.0.entry(place.to_owned()).or_default();
        kept.push_str(&String::from_utf8_lossy(bytes));
        kept.push('\0');
    }

    pub fn places(&self) -> usize {
        self.0.len()
    }

    pub fn bytes(&self) -> usize {
        self.0.values().map(String::len).sum()
    }

    /// Returns the places of the text, in any of its forms.
    pub fn hits(&self, text: &str) -> BTreeSet<&str> {
        let forms = forms(text);
        let holds = |kept: &str| forms.iter().any(|form| kept.contains(form));
        self.0.iter().filter(|(_, kept)| holds(kept)).map(|(place, _)| place.as_str()).collect()
    }
}

/// As it is, in hex, and in base64 wherever in the encoded bytes it stands, without the digits that also hold its neighbours.
fn forms(text: &str) -> Vec<String> {
    let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    let mut forms = vec![text.to_owned(), hex.to_uppercase(), hex];
    for before in 0..3 {
        let bytes = [&[0; 3][..before], text.as_bytes()].concat();
        let digits = base64(&bytes)[(before * 8).div_ceil(6)..bytes.len() * 8 / 6].to_owned();
        forms.push(digits.replace('+', "-").replace('/', "_"));
        forms.push(digits);
    }
    forms
}

/// Without padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits: Vec<u8> = bytes.iter().flat_map(|byte| (0..8).rev().map(move |n| byte >> n & 1)).collect();
    bits.chunks(6)
        .map(|chunk| {
            let value = (0..6).fold(0, |value, n| value << 1 | chunk.get(n).unwrap_or(&0));
            char::from(DIGITS[usize::from(value)])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_found_in_every_encoding() {
        const TEXT: &str = "c4n4ry>?secret~4242";
        assert_eq!(base64(b"any carnal pleas"), "YW55IGNhcm5hbCBwbGVhcw");
        for before in ["", "x", "xy", "xyz"] {
            for after in ["", "x", "xy", "xyz"] {
                let whole = format!("{before}{TEXT}{after}");
                let hex: String = whole.bytes().map(|byte| format!("{byte:02x}")).collect();
                let url = base64(whole.as_bytes()).replace('+', "-").replace('/', "_");
                for said in [whole.clone(), hex.to_uppercase(), hex, base64(whole.as_bytes()), url] {
                    let mut haystack = Haystack::default();
                    haystack.add("here", &[b"\0\xff\xc3", said.as_bytes(), b"\xf0\n"].concat());
                    haystack.add("there", b"c4n4ry>?secret~424");
                    assert_eq!(haystack.hits(TEXT).into_iter().collect::<Vec<_>>(), ["here"], "{said}");
                }
            }
        }
    }
}
