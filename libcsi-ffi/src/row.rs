//! `csi_row`: an answer of csid's as C reads it. Borrowed: it lives as long as what it came from.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::ptr;

use serde::Serialize;
use serde_json::Value;

use crate::arguments::{csi_map, csi_pair};
use crate::border::plain;

/// A record of names and values: a result, a line of a list, an event. The names are those of org.csid1.xml,
/// and more may come. A name that is absent or has another type reads as NULL, 0 or false. Borrowed: a row
/// lives as long as the object it was read from. One thread at a time.
#[derive(Default)]
pub struct csi_row {
    fields: BTreeMap<CString, Field>,
    names: Vec<*const c_char>,
    /// The texts again, as C's map.
    pairs: Vec<csi_pair>,
}

enum Field {
    Text(CString),
    Number(u64),
    Flag(bool),
    Texts(Vec<CString>),
    Rows(Vec<csi_row>),
}

// SAFETY: the pointers are into `fields`, which nothing changes once the row is made.
unsafe impl Send for csi_row {}
// SAFETY: as above.
unsafe impl Sync for csi_row {}

/// Makes a C string. A NUL, which only a plugin's text or a path may have, becomes U+FFFD.
pub fn cstring(text: impl Into<String>) -> CString {
    CString::new(text.into().replace('\0', "\u{fffd}")).unwrap_or_default()
}

impl csi_row {
    /// From what serializes as a struct or a map.
    pub fn of(value: &impl Serialize) -> Self {
        match serde_json::to_value(value) {
            Ok(Value::Object(object)) => {
                Self::new(object.into_iter().map(|(key, value)| (cstring(key), Field::of(value))).collect())
            }
            _ => Self::default(),
        }
    }

    /// Makes a row of one name and one value.
    pub fn one(name: &str, value: impl Into<Value>) -> Self {
        Self::new(BTreeMap::from([(cstring(name), Field::of(value.into()))]))
    }

    fn new(fields: BTreeMap<CString, Field>) -> Self {
        let names = fields.keys().map(|name| name.as_ptr()).collect();
        let pair = |(name, field): (&CString, &Field)| match field {
            Field::Text(text) => Some(csi_pair { key: name.as_ptr(), value: text.as_ptr() }),
            _ => None,
        };
        // A row's texts do not move when the row does: CString keeps them on the heap.
        let pairs = fields.iter().filter_map(pair).collect();
        Self { fields, names, pairs }
    }

    /// Returns the texts as C's map. The items of an empty one are at the address of the row: a `Vec` without items names an address
    /// without memory, and Go ends a program that holds such an address on a stack.
    fn map(&self) -> csi_map {
        let items = if self.pairs.is_empty() { ptr::from_ref(self).cast() } else { self.pairs.as_ptr() };
        csi_map { items, len: self.pairs.len() }
    }

    pub fn text(&self, name: &str) -> Option<&CStr> {
        match self.fields.get(cstring(name).as_c_str())? {
            Field::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl Field {
    fn of(value: Value) -> Self {
        match value {
            Value::String(text) => Self::Text(cstring(text)),
            Value::Bool(flag) => Self::Flag(flag),
            // csid has no negative numbers to tell.
            Value::Number(number) => Self::Number(number.as_u64().unwrap_or_default()),
            Value::Array(items) if items.iter().all(Value::is_string) => {
                Self::Texts(items.iter().filter_map(Value::as_str).map(cstring).collect())
            }
            Value::Array(items) => Self::Rows(items.iter().map(csi_row::of).collect()),
            object @ Value::Object(_) => Self::Rows(vec![csi_row::of(&object)]),
            Value::Null => Self::Texts(Vec::new()),
        }
    }
}

/// # Safety
/// `row` is NULL or a row, `name` NULL or a text that ends with a NUL.
unsafe fn field<'a>(row: *const csi_row, name: *const c_char) -> Option<&'a Field> {
    // SAFETY: the caller's promise.
    let (row, name) =
        unsafe { (row.as_ref()?, if name.is_null() { None } else { Some(CStr::from_ptr(name)) }) };
    row.fields.get(name?)
}

fn at<T>(items: &[T], index: usize) -> *const T {
    items.get(index).map_or(ptr::null(), ptr::from_ref)
}

/// Returns the number of names in a row.
///
/// @param row  The row. May be NULL.
/// @return 0 for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_size(row: *const csi_row) -> usize {
    // SAFETY: as csi.h says of every argument.
    plain("csi_row_size", 0, || unsafe { row.as_ref() }.map_or(0, |row| row.names.len()))
}

/// Returns a name of a row, in alphabetical order.
///
/// @param row  The row. May be NULL.
/// @param index  Counted from 0.
/// @return A text that lives as long as the row; NULL beyond the last name, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_name(row: *const csi_row, index: usize) -> *const c_char {
    plain("csi_row_name", ptr::null(), || {
        // SAFETY: as csi.h says of every argument.
        let row = unsafe { row.as_ref() };
        row.and_then(|row| row.names.get(index)).copied().unwrap_or(ptr::null())
    })
}

/// Returns the text under a name.
///
/// @param row  The row. May be NULL.
/// @param name  The name. May be NULL.
/// @return A text that lives as long as the row; NULL if there is no text of that name, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_text(row: *const csi_row, name: *const c_char) -> *const c_char {
    // SAFETY: as csi.h says of every argument.
    plain("csi_row_text", ptr::null(), || match unsafe { field(row, name) } {
        Some(Field::Text(text)) => text.as_ptr(),
        _ => ptr::null(),
    })
}

/// Returns the number under a name.
///
/// @param row  The row. May be NULL.
/// @param name  The name. May be NULL.
/// @return 0 if there is no number of that name, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_number(row: *const csi_row, name: *const c_char) -> u64 {
    // SAFETY: as csi.h says of every argument.
    plain("csi_row_number", 0, || match unsafe { field(row, name) } {
        Some(Field::Number(number)) => *number,
        _ => 0,
    })
}

/// Returns the boolean under a name.
///
/// @param row  The row. May be NULL.
/// @param name  The name. May be NULL.
/// @return false if there is no boolean of that name, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_flag(row: *const csi_row, name: *const c_char) -> bool {
    // SAFETY: as csi.h says of every argument.
    plain("csi_row_flag", false, || matches!(unsafe { field(row, name) }, Some(Field::Flag(true))))
}

/// Returns a map of texts, such as publish-context.
///
/// @param row  The row. May be NULL.
/// @param name  The name. May be NULL.
/// @return A map that lives as long as the row. Its items are NULL if there is no map of that name, and not
///   NULL if the map is empty.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_map(row: *const csi_row, name: *const c_char) -> csi_map {
    let none = csi_map { items: ptr::null(), len: 0 };
    // SAFETY: as csi.h says of every argument.
    plain("csi_row_map", none, || match unsafe { field(row, name) } {
        Some(Field::Rows(rows)) if rows.len() == 1 => rows[0].map(),
        _ => none,
    })
}

/// Returns the number of texts or rows in the list under a name.
///
/// @param row  The row. May be NULL.
/// @param name  The name. May be NULL.
/// @return 0 if there is no list of that name, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_len(row: *const csi_row, name: *const c_char) -> usize {
    // SAFETY: as csi.h says of every argument.
    plain("csi_row_len", 0, || match unsafe { field(row, name) } {
        Some(Field::Texts(texts)) => texts.len(),
        Some(Field::Rows(rows)) => rows.len(),
        _ => 0,
    })
}

/// Returns a text of a list.
///
/// @param row  The row. May be NULL.
/// @param name  The name. May be NULL.
/// @param index  Counted from 0.
/// @return A text that lives as long as the row; NULL beyond the last one, if there is no list of texts of that
///   name, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_item(
    row: *const csi_row,
    name: *const c_char,
    index: usize,
) -> *const c_char {
    // SAFETY: as csi.h says of every argument.
    plain("csi_row_item", ptr::null(), || match unsafe { field(row, name) } {
        Some(Field::Texts(texts)) => texts.get(index).map_or(ptr::null(), |text| text.as_ptr()),
        _ => ptr::null(),
    })
}

/// Returns whether a list has a text, such as a plugin's capability or a feature of csid.
///
/// @param row  The row. May be NULL.
/// @param name  The name of the list. May be NULL.
/// @param text  The text to look for. May be NULL.
/// @return false if there is no list of texts of that name, and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_contains(
    row: *const csi_row,
    name: *const c_char,
    text: *const c_char,
) -> bool {
    plain("csi_row_contains", false, || {
        // SAFETY: as csi.h says of every argument.
        let (field, text) = unsafe { (field(row, name), (!text.is_null()).then(|| CStr::from_ptr(text))) };
        matches!((field, text), (Some(Field::Texts(texts)), Some(text)) if texts.iter().any(|t| t.as_c_str() == text))
    })
}

/// Returns a row inside a row: one of a list of rows, or at index 0 a map, such as an event's details.
///
/// @param row  The row. May be NULL.
/// @param name  The name. May be NULL.
/// @param index  Counted from 0.
/// @return A row that lives as long as the outer row; NULL beyond the last one, if there are none of that name,
///   and for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_row_row(
    row: *const csi_row,
    name: *const c_char,
    index: usize,
) -> *const csi_row {
    // SAFETY: as csi.h says of every argument.
    plain("csi_row_row", ptr::null(), || match unsafe { field(row, name) } {
        Some(Field::Rows(rows)) => at(rows, index),
        _ => ptr::null(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn items_of_an_empty_map_are_in_memory() {
        let row = csi_row::of(&json!({"empty": {}, "full": {"a": "b"}}));
        // SAFETY: the row and the names live through the calls.
        let map = |name: &CStr| unsafe { csi_row_map(&raw const row, name.as_ptr()) };
        let Some(Field::Rows(inner)) = row.fields.get(c"empty") else { panic!("no map") };
        assert_eq!((map(c"empty").items.cast(), map(c"empty").len), (inner.as_ptr(), 0));
        assert!(!map(c"full").items.is_null() && map(c"full").len == 1);
        assert!(map(c"none").items.is_null());
    }
}
