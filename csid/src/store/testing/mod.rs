//! The tests of the trait [`Registry`](crate::store::registry::Registry), and their records. Each implementation runs them, also
//! one of another crate, which takes the feature `testing`.

pub mod samples;
pub mod suite;
