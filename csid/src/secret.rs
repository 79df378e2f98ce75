//! Secrets of one call: they live in the request's frame and are wiped with it. The type has no Debug, no Display and no
//! Serialize, so that no log line, event or row can hold one by accident.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use zeroize::Zeroizing;

use crate::error::{Error, Result};

/// The largest secret document csid reads (CSI rule 11 bounds a map to 4 KiB; JSON quotes it).
pub const MAX_BYTES: usize = 16 * 1024;

#[derive(Clone)]
pub struct Secrets {
    map: BTreeMap<String, Zeroizing<String>>,
    is_credential: bool,
}

impl Secrets {
    /// Read a JSON object of strings. Keys are `[A-Za-z0-9._-]+` (CSI rule 17).
    pub fn from_json(document: &[u8]) -> Result<Self> {
        if document.len() > MAX_BYTES {
            return Err(Error::invalid(format!("the secrets are larger than {MAX_BYTES} bytes")));
        }
        let map =
            object(document).ok_or_else(|| Error::invalid("the secrets are no JSON object of strings"))?;
        let plain = |key: &String| {
            !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        if !map.keys().all(plain) {
            return Err(Error::invalid("a secret's key is not of [A-Za-z0-9._-]"));
        }
        Ok(Secrets { map, is_credential: false })
    }

    /// Returns secrets of the host, from a systemd credential that any caller may have named.
    pub fn of_credential(document: &[u8]) -> Result<Self> {
        Ok(Secrets { is_credential: true, ..Self::from_json(document)? })
    }

    /// Returns whether the secrets are of a systemd credential, which root has provided, and not the caller's own.
    pub fn is_credential(&self) -> bool {
        self.is_credential
    }

    pub fn values(&self) -> impl Iterator<Item = &str> {
        self.map.values().map(|value| value.as_str())
    }

    /// The map as an RPC carries it. It goes into the request, which is the gRPC library's to drop: nothing wipes that copy, so
    /// this is for a request alone.
    pub fn for_rpc(&self) -> BTreeMap<String, String> {
        self.map.iter().map(|(key, value)| (key.clone(), value.to_string())).collect()
    }
}

/// The shortest value that is withheld where it is not known to be a secret, in bytes.
const SHORTEST: usize = 8;

/// Returns whether a text that nobody has called a secret may be one: it is long enough, and it is no word, number, path or host
/// name of common form, nor a list of such as mount options are.
pub fn may_be_one(text: &str) -> bool {
    text.len() >= SHORTEST && !is_common(text) && !is_list(text)
}

/// Returns whether a value of this name is a secret whatever its form.
pub fn is_named_by(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    key.ends_with("key")
        || ["pass", "pwd", "secret", "token", "cred", "signature"].iter().any(|word| key.contains(word))
}

fn is_common(text: &str) -> bool {
    is_words(text) || is_number(text) || is_path(text) || is_host(text) || is_url(text)
}

/// `a=b,c,d=e`: each value is short or of common form.
fn is_list(text: &str) -> bool {
    let is_short = |value: &str| {
        value.len() < SHORTEST && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"._:/+-%".contains(&b))
    };
    text.split(',').all(|item| match item.split_once('=') {
        Some((key, value)) => is_words(key) && (is_short(value) || is_common(value)),
        None => is_common(item),
    })
}

/// Up to three words in a row: a passphrase has more.
fn is_words(text: &str) -> bool {
    let mut parts = text.split(['-', '_', '.']);
    let is_word = |part: &str| {
        let (letters, digits) =
            part.split_at(part.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(part.len()));
        let (leading, unit) = part.split_at(part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len()));
        let is_named = is_cased(letters) && digits.len() <= 4 && digits.bytes().all(|b| b.is_ascii_digit());
        // `1a` of `us-east-1a`.
        let is_counted = (1..=4).contains(&leading.len())
            && unit.len() <= 2
            && unit.bytes().all(|b| b.is_ascii_alphabetic());
        is_named || is_counted
    };
    parts.clone().count() <= 3 && parts.all(is_word)
}

/// `word`, `WORD`, `camelCase`, as a person writes; a random text changes its case more often.
fn is_cased(letters: &str) -> bool {
    let is_lower = |letter: &u8| letter.is_ascii_lowercase();
    let is_camel = || {
        let bytes = letters.as_bytes();
        let starts = (1..bytes.len()).filter(|at| bytes[*at].is_ascii_uppercase());
        let humps: Vec<usize> = [0].into_iter().chain(starts).chain([bytes.len()]).collect();
        humps
            .windows(2)
            .all(|hump| hump[1] - hump[0] >= 3 && bytes[hump[0] + 1..hump[1]].iter().all(is_lower))
    };
    (1..=24).contains(&letters.len())
        && (letters.bytes().all(|b| b.is_ascii_lowercase())
            || letters.bytes().all(|b| b.is_ascii_uppercase())
            || is_camel())
}

fn is_number(text: &str) -> bool {
    let text = text.strip_prefix(['-', '+']).unwrap_or(text);
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || "._".contains(c));
    text.starts_with(|c: char| c.is_ascii_digit())
        && unit.len() <= 3
        && unit.bytes().all(|b| b.is_ascii_alphabetic())
}

fn is_path(text: &str) -> bool {
    let is_name = |name: &str| {
        let has = |what: fn(&u8) -> bool| name.as_bytes().iter().any(what);
        let is_random = has(u8::is_ascii_lowercase) && has(u8::is_ascii_uppercase) && has(u8::is_ascii_digit);
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"._:@-".contains(&b);
        name.len() <= 64 && name.bytes().all(is_plain) && !is_random
    };
    text.strip_prefix('/').is_some_and(|rest| rest.split('/').all(is_name))
}

/// A host's name or address, with or without a port or a path behind a colon.
fn is_host(text: &str) -> bool {
    let is_label = |label: &str| {
        let is_random = label.len() > 24 && label.bytes().any(|b| b.is_ascii_digit());
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !is_random
    };
    let is_name = |host: &str| {
        let top = host.rsplit_once('.').map_or("", |(_, top)| top);
        let is_top = (2..=12).contains(&top.len()) && top.bytes().all(|b| b.is_ascii_lowercase());
        (is_top && host.split('.').all(is_label)) || host.parse::<std::net::IpAddr>().is_ok()
    };
    match text.split_once(':') {
        _ if is_name(text) => true,
        Some((host, rest)) => {
            let is_port = (1..=5).contains(&rest.len()) && rest.bytes().all(|b| b.is_ascii_digit());
            (is_name(host) || is_words(host)) && (is_port || is_path(rest))
        }
        None => false,
    }
}

/// Without a user, a password or a query.
fn is_url(text: &str) -> bool {
    let Some((scheme, rest)) = text.split_once("://") else { return false };
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    is_words(scheme) && (is_host(host) || is_words(host)) && (path.is_empty() || is_path(path))
}

/// serde_json finds the values and is not let read them: it would leave them behind where it takes escapes out of a string, and
/// in its errors.
fn object(document: &[u8]) -> Option<BTreeMap<String, Zeroizing<String>>> {
    let text = std::str::from_utf8(document).ok()?;
    if !text.trim_start().starts_with('{') {
        return None;
    }
    let quoted: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
    quoted.into_iter().map(|(key, value)| Some((key, unquoted(value.get())?))).collect()
}

/// The string that a piece of valid JSON is, if it is one.
fn unquoted(json: &str) -> Option<Zeroizing<String>> {
    let mut rest = json.strip_prefix('"')?.strip_suffix('"')?;
    // The buffer never grows: no escape is shorter than its character.
    let mut value = Zeroizing::new(String::with_capacity(rest.len()));
    while let Some((plain, escape)) = rest.split_once('\\') {
        let (character, length) = unescaped(escape)?;
        value.push_str(plain);
        value.push(character);
        rest = escape.get(length..)?;
    }
    value.push_str(rest);
    Some(value)
}

/// Returns the character of the escape after a backslash, and the escape's length.
fn unescaped(escape: &str) -> Option<(char, usize)> {
    let simple = match escape.chars().next()? {
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'u' => {
            let unit = |hex: &str| u16::from_str_radix(hex.get(..4)?, 16).ok();
            let second = escape.get(5..).and_then(|next| unit(next.strip_prefix("\\u")?));
            let units = [Some(unit(&escape[1..])?), second].into_iter().flatten();
            let character = char::decode_utf16(units).next()?.ok()?;
            return Some((character, if character.len_utf16() == 2 { 11 } else { 5 }));
        }
        itself => itself,
    };
    Some((simple, 1))
}

/// Searches the memory that a test frees for a secret.
#[cfg(test)]
pub mod freed {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::cell::Cell;

    pub const SECRET: &str = "c4n4ry-n3v3r-l3ft-b3h1nd";

    thread_local! {
        /// How many blocks with the secret this thread has freed; absent: it does not look.
        static FOUND: Cell<Option<usize>> = const { Cell::new(None) };
    }

    struct Searching;

    #[global_allocator]
    static SEARCHING: Searching = Searching;

    // SAFETY: System does it all; a block is read before it is freed, and a thread that has ended reads none.
    unsafe impl GlobalAlloc for Searching {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            // SAFETY: the caller's promise. Blocks begin as zeroes, so that each byte of one may be read.
            unsafe { System.alloc_zeroed(layout) }
        }

        unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
            let _ = FOUND.try_with(|found| {
                let Some(count) = found.get() else { return };
                // SAFETY: the block is of this layout, was zeroes at first, and is nobody else's any more.
                let bytes = unsafe { std::slice::from_raw_parts(block, layout.size()) };
                let is_found = bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes());
                found.set(Some(count + usize::from(is_found)));
            });
            // SAFETY: the caller's promise.
            unsafe { System.dealloc(block, layout) }
        }
    }

    /// How many blocks with the secret in them `work` freed.
    pub fn with_the_secret(work: impl FnOnce()) -> usize {
        FOUND.set(Some(0));
        work();
        FOUND.take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use proptest::prelude::*;

    use super::freed::SECRET;
    use super::*;

    #[test]
    fn refused_secret_leaves_no_copy() {
        assert_eq!(
            freed::with_the_secret(|| drop(black_box(SECRET.to_owned()))),
            1,
            "it is found where it is left"
        );
        for (document, is_taken) in [
            (format!("{{\"a\":\"{SECRET}\",\"b\":\"{SECRET}\\n{SECRET}\\u00e4\"}}"), true),
            (format!("{{\"a\":\"{SECRET}\",\"a\":\"x\\\"{SECRET}\"}}"), true),
            (format!("{{\"a\":\"{SECRET}\",\"b\":1}}"), false),
            (format!("{{\"a\":\"\\t{SECRET}\""), false),
            (format!("{{\"a\":\"{SECRET}\",\" \":\"\"}}"), false),
            (format!("{{\"a\":[\"{SECRET}\"]}}"), false),
            (format!("\"{SECRET}\""), false),
        ] {
            let found = freed::with_the_secret(|| {
                let secrets = Secrets::from_json(document.as_bytes());
                assert_eq!(secrets.is_ok(), is_taken, "{document}");
                secrets.iter().for_each(|secrets| drop(Secrets::clone(secrets)));
            });
            assert_eq!(found, 0, "{document}");
        }
    }

    #[test]
    fn escapes_are_taken_out_as_json_has_them() {
        for json in
            [r#""\"\\\/\b\f\n\r\t""#, r#""\u00e4\uD83D\uDE00x""#, r#""\u0041\u0042""#, r#""\\u0041""#, "\"\""]
        {
            let plain: String = serde_json::from_str(json).unwrap();
            assert_eq!(unquoted(json).as_deref(), Some(&plain), "{json}");
        }
        for lone in
            [r#"{"a":"\ud83d"}"#, r#"{"a":"\ud83dx"}"#, r#"{"a":"\ude00\ud83d"}"#, r#"{"a":"\ud83d\n"}"#]
        {
            assert!(Secrets::from_json(lone.as_bytes()).is_err(), "{lone}");
        }
    }

    proptest! {
        #[test]
        fn written_secrets_parse_back(value in any::<String>()) {
            let document = serde_json::json!({ "key": value }).to_string();
            let secrets = Secrets::from_json(document.as_bytes()).unwrap();
            prop_assert_eq!(secrets.values().collect::<Vec<_>>(), [value]);
        }
    }

    #[test]
    fn invalid_secrets_are_refused_without_quoting() {
        for wrong in
            [&b"hunter2"[..], b"[\"hunter2\"]", b"{\"a\":{\"hunter2\":1}}", b"{\"hunter2 \":\"x\"}", b"\xff"]
        {
            let error = Secrets::from_json(wrong).err().unwrap();
            assert!(!error.message.contains("hunter2"), "{error}");
        }
    }
}
