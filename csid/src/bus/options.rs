//! `a{sv}` arguments. An unknown key or a value of the wrong type is InvalidArgument, before the call starts anything.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use zbus::{OwnedVariant, Variant};

use crate::error::{Error, Kind, Result};
use crate::names::{self, Word};
use crate::volume::Wait;

/// Keys and the D-Bus types of their values.
pub(super) type Keys = &'static [(&'static str, &'static str)];

/// Options of every call.
const COMMON: Keys = &[("deadline-usec", "t"), ("operation-id", "s"), ("secrets", "h"), ("credential", "s")];

pub(super) struct Options(HashMap<String, OwnedVariant>);

impl Options {
    pub fn check(map: HashMap<String, OwnedVariant>, known: Keys) -> Result<Self> {
        Self::check_all(map, &[known])
    }

    /// Checks a map that is not the call's last. Only the last one has the common options.
    pub fn check_spec(map: HashMap<String, OwnedVariant>, known: Keys) -> Result<Self> {
        check_types(&map, known.iter())?;
        Ok(Options(map))
    }

    pub fn check_all(map: HashMap<String, OwnedVariant>, known: &[Keys]) -> Result<Self> {
        check_types(&map, known.iter().copied().flatten().chain(COMMON))?;
        // Checked in every call, even if the method does not use it.
        if let Some(name) = map.get("credential").and_then(|value| value.downcast_ref::<&str>().ok()) {
            names::credential(name)?;
        }
        Ok(Options(map))
    }

    pub fn text(&mut self, key: &str) -> Option<String> {
        self.take(key)
    }

    pub fn flag(&mut self, key: &str) -> bool {
        self.take(key).unwrap_or(false)
    }

    pub fn optional_flag(&mut self, key: &str) -> Option<bool> {
        self.take(key)
    }

    pub fn number(&mut self, key: &str) -> Option<u64> {
        self.take(key)
    }

    pub fn uint(&mut self, key: &str) -> Option<u32> {
        self.take(key)
    }

    pub fn short(&mut self, key: &str) -> Option<u16> {
        self.take(key)
    }

    pub fn texts(&mut self, key: &str) -> Option<Vec<String>> {
        self.take(key)
    }

    pub fn map(&mut self, key: &str) -> Option<BTreeMap<String, String>> {
        self.take(key)
    }

    pub fn text_maps(&mut self, key: &str) -> Option<Vec<BTreeMap<String, String>>> {
        self.take(key)
    }

    pub fn maps(&mut self, key: &str) -> Option<Vec<HashMap<String, OwnedVariant>>> {
        self.take(key)
    }

    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Takes a text that `valid` accepts.
    pub fn checked(
        &mut self,
        key: &str,
        valid: impl FnOnce(&str, &str) -> Result<()>,
    ) -> Result<Option<String>> {
        let text = self.text(key);
        text.as_deref().map_or(Ok(()), |text| valid(key, text))?;
        Ok(text)
    }

    pub fn word<W: Word>(&mut self, key: &str) -> Result<Option<W>> {
        self.text(key).map(|text| W::read(key, &text)).transpose()
    }

    pub fn descriptor(&mut self, key: &str) -> Option<OwnedFd> {
        match self.0.remove(key).map(Variant::from)? {
            Variant::Fd(fd) => OwnedFd::try_from(fd).ok(),
            _ => None,
        }
    }

    /// Takes the deadline and the operation's id. `arrived`: when the call was read.
    pub fn wait(&mut self, arrived: Instant) -> Result<Wait> {
        let operation = self.checked("operation-id", names::name)?;
        let deadline = match self.take::<u64>("deadline-usec") {
            // A deadline beyond the clock's range is none.
            Some(usec) => arrived.checked_add(Duration::from_micros(usec)),
            None => None,
        };
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Err(Error::new(Kind::TimedOut, "deadline exceeded before the operation started"));
        }
        Ok(Wait { arrived: Some(arrived), deadline, operation, hold: None })
    }

    fn take<T: TryFrom<OwnedVariant>>(&mut self, key: &str) -> Option<T> {
        // The value has the right type: all were checked.
        self.0.remove(key).and_then(|value| T::try_from(value).ok())
    }
}

/// Refuses unknown keys and values of the wrong type. It is used for the maps of an `aa{sv}` option too.
pub(super) fn check_types<'k>(
    map: &HashMap<String, OwnedVariant>,
    known: impl Iterator<Item = &'k (&'static str, &'static str)> + Clone,
) -> Result<()> {
    for (key, value) in map {
        let Some((_, wanted)) = known.clone().find(|(name, _)| name == key) else {
            let mut names: Vec<&str> = known.clone().map(|(name, _)| *name).collect();
            names.sort_unstable();
            let key: String = key.chars().take(64).collect();
            return Err(Error::invalid(format!(
                "unknown option {key:?}; known options: {}",
                names.join(", ")
            )));
        };
        let given = value.value_signature().to_string();
        if given != *wanted {
            return Err(Error::invalid(format!("option {key} is of type {given}; it must be {wanted}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: Keys = &[("flag", "b"), ("text", "s"), ("map", "a{ss}"), ("maps", "aa{sv}"), ("list", "as")];

    fn options(entries: Vec<(&str, Variant<'static>)>) -> Result<Options> {
        let map = entries
            .into_iter()
            .map(|(key, value)| (key.to_owned(), OwnedVariant::try_from(value).unwrap()))
            .collect();
        Options::check(map, KEYS)
    }

    #[test]
    fn values_are_taken_once() {
        let inner: HashMap<String, Variant<'_>> = HashMap::from([("access-mode".into(), Variant::from("x"))]);
        let mut options = options(vec![
            ("flag", true.into()),
            ("text", "t".into()),
            ("map", BTreeMap::from([("k".to_owned(), "v".to_owned())]).into()),
            ("maps", Variant::from(vec![inner])),
            ("list", vec!["a".to_owned(), "b".to_owned()].into()),
        ])
        .unwrap();
        assert!(options.has("flag") && options.flag("flag"));
        assert_eq!(options.text("text").as_deref(), Some("t"));
        assert_eq!(options.map("map").unwrap()["k"], "v");
        assert_eq!(options.texts("list").unwrap(), ["a", "b"]);
        let maps = options.maps("maps").unwrap();
        assert_eq!(<&str>::try_from(&*maps[0]["access-mode"]).unwrap(), "x");
        assert_eq!(options.text("text"), None, "an option is taken once");
    }

    #[test]
    fn unknown_key_is_named_with_the_known_ones() {
        let error = options(vec![("colour\n", "red".into())]).err().unwrap();
        assert_eq!(error.kind, Kind::InvalidArgument);
        assert!(error.message.contains(r#""colour\n""#), "{error}");
        assert!(error.message.contains("deadline-usec") && error.message.contains("maps"), "{error}");
    }

    #[test]
    fn value_of_the_wrong_type_is_refused() {
        for (key, value) in [
            ("flag", Variant::from("true")),
            ("flag", 1u32.into()),
            ("text", true.into()),
            ("map", Vec::<String>::new().into()),
            ("list", "a".into()),
            ("text", Variant::Variant(Box::new("a".into()))),
            ("deadline-usec", 5u32.into()),
            ("deadline-usec", (-5i64).into()),
            ("secrets", "fd".into()),
        ] {
            let error = options(vec![(key, value)]).err().unwrap();
            assert!(error.message.starts_with(&format!("option {key} is of type")), "{error}");
        }
    }

    #[test]
    fn past_deadlines_are_refused() {
        let now = Instant::now();
        let wait = |usec: u64| options(vec![("deadline-usec", usec.into())]).unwrap().wait(now);
        assert_eq!(wait(0).err().map(|error| error.kind), Some(Kind::TimedOut));
        assert_eq!(wait(u64::MAX).unwrap().deadline, now.checked_add(Duration::from_micros(u64::MAX)));
        assert!(wait(60_000_000).unwrap().deadline > Some(now));
        assert_eq!(options(vec![]).unwrap().wait(now).unwrap().deadline, None);
        assert!(options(vec![("operation-id", "".into())]).unwrap().wait(now).is_err());
    }
}
