//! Random names. In the simulation a seed decides them, so that the seed repeats a run.

/// Returns a name of 128 random bits.
pub fn name() -> String {
    #[cfg(test)]
    if let Some(name) = seeded::name() {
        return name;
    }
    csid::random::name()
}

/// Returns a random number from 0 to 1, without 1.
pub fn share() -> f64 {
    #[cfg(test)]
    if let Some(share) = seeded::share() {
        return share;
    }
    csid::random::share()
}

/// Names and numbers of a seed, for tests.
#[cfg(test)]
pub mod seeded {
    use std::cell::Cell;

    thread_local! {
        /// The seed, and how many names it has made. `None`: names are random.
        static NAMES: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
    }

    /// Makes this thread's names of a seed. `None`: they are random again.
    pub fn begin(seed: Option<u64>) {
        NAMES.set(seed.map(|seed| (seed, 0)));
    }

    /// Returns whether a seed decides what is random.
    pub fn is_begun() -> bool {
        NAMES.get().is_some()
    }

    pub(super) fn share() -> Option<f64> {
        let first = u32::from_str_radix(&name()?[..8], 16).unwrap();
        Some(f64::from(first) / (f64::from(u32::MAX) + 1.0))
    }

    pub(super) fn name() -> Option<String> {
        let (seed, made) = NAMES.get()?;
        NAMES.set(Some((seed, made + 1)));
        // Names of one seed are unlike, and are not in the order in which they are made.
        Some(format!("{:016x}{seed:016x}", (made + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }
}
