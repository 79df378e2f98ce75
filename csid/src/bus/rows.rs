//! The rows of an answer that has many.

use std::cell::Cell;

use serde::ser::{Error, Serialize, Serializer};
use zbus::Type;

use super::contract::Map;

/// Rows of an answer. Each is made when it is written and freed before the next one, because each text of each row has a block of memory.
/// They can be written once.
pub(super) struct Rows<I>(Cell<Option<I>>);

impl<I: Iterator<Item = Map>> Rows<I> {
    pub fn of(rows: I) -> Self {
        Rows(Cell::new(Some(rows)))
    }
}

impl<I: Iterator<Item = Map>> Serialize for Rows<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rows = self.0.take().ok_or_else(|| S::Error::custom("the rows were written before"))?;
        serializer.collect_seq(rows)
    }
}

impl<I> Type for Rows<I> {
    const SIGNATURE: &'static zbus::Signature = <Vec<Map> as Type>::SIGNATURE;
}

#[cfg(test)]
mod tests {
    use zbus::Message;

    use super::*;

    fn encoded<B: Serialize + zbus::DynamicType>(body: &B) -> zbus::Result<Vec<u8>> {
        let message = Message::signal("/", "a.b", "C").build(body)?;
        Ok(message.body().data().to_vec())
    }

    #[test]
    fn rows_are_encoded_as_a_list_of_maps() {
        let rows =
            || (0..3u32).map(|n| Map::from([("n", n.into()), ("text", "t".repeat(n as usize).into())]));
        let list: Vec<Map> = rows().collect();
        assert_eq!(encoded(&(Rows::of(rows()), 7u8)).unwrap(), encoded(&(list, 7u8)).unwrap());
        let none = || rows().take(0);
        assert_eq!(encoded(&(Rows::of(none()),)).unwrap(), encoded(&(Vec::<Map>::new(),)).unwrap());
    }

    #[test]
    fn rows_that_were_written_are_an_error() {
        let rows = (Rows::of(std::iter::once(Map::new())),);
        assert!(encoded(&rows).is_ok() && encoded(&rows).is_err());
    }
}
