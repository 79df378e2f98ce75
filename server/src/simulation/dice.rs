//! Numbers of a seed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A generator of numbers. Copies share it.
#[derive(Clone)]
pub struct Dice(Arc<Mutex<u64>>);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(Arc::new(Mutex::new(seed)))
    }

    /// Returns a number below `sides`.
    pub fn roll(&self, sides: u64) -> u64 {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // SplitMix64: near seeds give unlike numbers.
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = *state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % sides.max(1)
    }

    /// Returns `true` once in `times`. 0: never.
    pub fn once_in(&self, times: u64) -> bool {
        times > 0 && self.roll(times) == 0
    }

    /// Returns a time between two numbers of milliseconds.
    pub fn time(&self, least: u64, most: u64) -> Duration {
        Duration::from_millis(least + self.roll(most - least + 1))
    }
}
