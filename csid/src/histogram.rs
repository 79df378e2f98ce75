//! How long something took, each time: counted without a lock, in a memory that does not grow.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The upper bounds of the buckets in microseconds. A bucket counts durations above the bound before it.
pub const BOUNDS_USEC: [u64; 19] = [
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
];

#[derive(Debug, Default)]
pub struct Histogram {
    /// The last one counts what is above every bound.
    buckets: [AtomicU64; BOUNDS_USEC.len() + 1],
    total_usec: AtomicU64,
    longest_usec: AtomicU64,
}

impl Histogram {
    pub fn record(&self, took: Duration) {
        let usec = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_USEC.partition_point(|bound| *bound < usec);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.total_usec.fetch_add(usec, Ordering::Relaxed);
        self.longest_usec.fetch_max(usec, Ordering::Relaxed);
    }

    /// As it is now; what is recorded meanwhile may be in a part of it.
    pub fn read(&self) -> Durations {
        Durations {
            buckets: self.buckets.each_ref().map(|count| count.load(Ordering::Relaxed)),
            total_usec: self.total_usec.load(Ordering::Relaxed),
            longest_usec: self.longest_usec.load(Ordering::Relaxed),
        }
    }
}

/// The counts of a [`Histogram`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durations {
    pub buckets: [u64; BOUNDS_USEC.len() + 1],
    pub total_usec: u64,
    pub longest_usec: u64,
}

impl Durations {
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the duration that `percent` in a hundred did not exceed, as exactly as the buckets allow. It is never above the longest.
    pub fn quantile_usec(&self, percent: u64) -> u64 {
        let rank = (self.count() * percent).div_ceil(100);
        let mut seen = 0;
        let reached = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        let bound = reached.and_then(|bucket| BOUNDS_USEC.get(bucket));
        bound.map_or(self.longest_usec, |bound| self.longest_usec.min(*bound))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(micros: &[u64]) -> Durations {
        let histogram = Histogram::default();
        micros.iter().for_each(|usec| histogram.record(Duration::from_micros(*usec)));
        histogram.read()
    }

    #[test]
    fn a_bound_belongs_to_its_own_bucket() {
        let counted = of(&[0, 100, 101, 100_000_000, 100_000_001]);
        assert_eq!((counted.buckets[0], counted.buckets[1]), (2, 1));
        assert_eq!((counted.buckets[18], counted.buckets[19]), (1, 1));
        assert_eq!((counted.count(), counted.longest_usec), (5, 100_000_001));
        assert_eq!(counted.total_usec, 200_000_202);
    }

    #[test]
    fn quantile_is_its_bucket_bound_or_the_maximum() {
        assert_eq!(of(&[]).quantile_usec(50), 0);
        assert_eq!(of(&[150]).quantile_usec(50), 150);
        let many = of(&[[150; 98].as_slice(), &[3_000, 200_000_000]].concat());
        assert_eq!(many.quantile_usec(50), 200);
        assert_eq!(many.quantile_usec(99), 5_000);
        assert_eq!(many.quantile_usec(100), 200_000_000);
    }
}
