//! Rules of a volume: pure functions over its rows, its record and the observed state. They use no I/O, no clock, and no other
//! room but the store's types.

pub mod admission;
pub mod adopt;
pub mod call_name;
pub mod claim;
pub mod observed;
pub mod paths;
pub mod step;
pub mod subject;
pub mod volume;
pub mod write_ahead;
