//! A search through everything that was kept: for a text as it is, in base64, in hex, percent-encoded, and in the headers of HTTP/2.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use crate::kernel;
use crate::world::World;

/// The collected texts, by their places. Searches are for ASCII, so bytes that are not UTF-8 may be lost.
#[derive(Default)]
pub struct Haystack {
    texts: BTreeMap<String, String>,
    /// What connections of HTTP/2 carried.
    carried: BTreeMap<String, Vec<u8>>,
}

impl Haystack {
    pub fn add(&mut self, place: &str, bytes: &[u8]) {
        let kept = self.texts.entry(place.to_owned()).or_default();
        kept.push_str(&String::from_utf8_lossy(bytes));
        kept.push('\0');
    }

    /// Adds what connections of HTTP/2 carried. Their headers have the message of an error, in Huffman's code.
    pub fn add_http2(&mut self, place: &str, bytes: &[u8]) {
        self.add(place, bytes);
        self.carried.entry(place.to_owned()).or_default().extend(bytes);
    }

    /// Adds everything that a csid wrote: its log, its journal and the other files below its directories. A place is the file's name, with
    /// this before it.
    pub fn add_written(&mut self, before: &str, w: &World) {
        self.add(&format!("{before}log"), &fs::read(w.path("csid.log")).unwrap());
        for directory in ["state", "run", "etc", "targets"] {
            for path in kernel::tree(&w.path(directory)).unwrap() {
                self.add(&format!("{before}paths"), path.as_os_str().as_encoded_bytes());
                if path.is_file() {
                    let name = path.file_name().unwrap().to_str().unwrap();
                    self.add(&format!("{before}{name}"), &fs::read(&path).unwrap());
                }
            }
        }
    }

    pub fn places(&self) -> usize {
        self.texts.len()
    }

    pub fn bytes(&self) -> usize {
        self.texts.values().map(String::len).sum()
    }

    /// Returns the places of the text, in any of its forms.
    pub fn hits(&self, text: &str) -> BTreeSet<&str> {
        let forms = forms(text);
        // By their first bytes: one walk finds any of them.
        let mut coded = vec![Vec::new(); 256];
        for form in forms.iter().flat_map(|form| (0..8).filter_map(|before| huffman(form, before))) {
            coded[usize::from(form[0])].push(form);
        }
        let holds = |kept: &str| forms.iter().any(|form| kept.contains(form));
        let begins = |bytes: &[u8]| coded[usize::from(bytes[0])].iter().any(|form| bytes.starts_with(form));
        let carries = |bytes: &[u8]| (0..bytes.len()).any(|at| begins(&bytes[at..]));
        let texts = self.texts.iter().filter(|(_, kept)| holds(kept)).map(|(place, _)| place.as_str());
        let carried =
            self.carried.iter().filter(|(_, bytes)| carries(bytes)).map(|(place, _)| place.as_str());
        texts.chain(carried).collect()
    }
}

/// As it is, percent-encoded as gRPC does, in hex, and in base64 wherever in the encoded bytes it stands, without the digits that also hold its
/// neighbours.
fn forms(text: &str) -> Vec<String> {
    let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    let mut forms = vec![text.to_owned(), percent(text), hex.to_uppercase(), hex];
    for before in 0..3 {
        let bytes = [&[0; 3][..before], text.as_bytes()].concat();
        let digits = base64(&bytes)[(before * 8).div_ceil(6)..bytes.len() * 8 / 6].to_owned();
        forms.push(digits.replace('+', "-").replace('/', "_"));
        forms.push(digits);
    }
    forms
}

/// As tonic encodes the message of an error.
fn percent(text: &str) -> String {
    let escapes = |byte: u8| !(b'!'..=b'~').contains(&byte) || b"\"#%<>?`{}".contains(&byte);
    let encoded = |byte: u8| match escapes(byte) {
        true => format!("%{byte:02X}"),
        false => char::from(byte).to_string(),
    };
    text.bytes().map(encoded).collect()
}

/// The code of HTTP/2's headers (RFC 7541): the characters whose codes have so many bits, in the order of their codes. A code is the next number
/// after the one before it.
const CODES: [(u32, &str); 10] = [
    (5, "012aceiost"),
    (6, " %-./3456789=A_bdfghlmnpru"),
    (7, ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, "&*,;XZ"),
    (10, "!\"()?"),
    (11, "'+|"),
    (12, "#>"),
    (13, "\0$@[]~"),
    (14, "^}"),
    (15, "<`{"),
];

/// Returns the bytes that a text surely has in a header in which so many bits of a byte are before it. `None`: the table lacks a character.
fn huffman(text: &str, before: usize) -> Option<Vec<u8>> {
    let mut bits = vec![false; before];
    for character in text.chars() {
        let (mut code, mut length) = (0_u32, 0);
        let mut found = None;
        for (bits, characters) in CODES {
            code <<= bits - length;
            length = bits;
            match characters.find(character) {
                Some(at) => {
                    found = Some(code + at as u32);
                    break;
                }
                None => code += characters.len() as u32,
            }
        }
        let found = found?;
        bits.extend((0..length).rev().map(|bit| found >> bit & 1 == 1));
    }
    let whole = bits[before.div_ceil(8) * 8..].chunks_exact(8);
    Some(whole.map(|byte| byte.iter().fold(0, |byte, bit| byte << 1 | u8::from(*bit))).collect())
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
                let base64 = base64(whole.as_bytes());
                for said in [whole.clone(), percent(&whole), hex.to_uppercase(), hex, base64, url] {
                    let mut haystack = Haystack::default();
                    haystack.add("here", &[b"\0\xff\xc3", said.as_bytes(), b"\xf0\n"].concat());
                    haystack.add("there", b"c4n4ry>?secret~424");
                    assert_eq!(haystack.hits(TEXT).into_iter().collect::<Vec<_>>(), ["here"], "{said}");
                    let header = [b"\0\xff", &huffman(&said, 0).unwrap()[..], b"\xf0"].concat();
                    let mut haystack = Haystack::default();
                    haystack.add_http2("here", &header);
                    haystack.add("there", &header);
                    assert_eq!(haystack.hits(TEXT).into_iter().collect::<Vec<_>>(), ["here"], "{said}");
                }
            }
        }
    }

    /// The examples of RFC 7541, C.4 and C.6, without the bits after the last whole byte.
    #[test]
    fn header_has_the_code_of_the_rfc() {
        for (text, coded) in [
            ("www.example.com", "f1e3c2e5f23a6ba0ab90f4"),
            ("no-cache", "a8eb10649c"),
            ("custom-value", "25a849e95bb8e8b4"),
            ("Mon, 21 Oct 2013 20:13:21 GMT", "d07abe941054d444a8200595040b8166e082a62d1b"),
        ] {
            let hex: String = huffman(text, 0).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, coded, "{text}");
        }
        assert_eq!(huffman("\u{e9}", 0), None);
    }
}
