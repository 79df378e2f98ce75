//! Random choices that a seed repeats.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// `stream` distinguishes the dice of one seed.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut dice = Dice(seed);
        Dice(dice.bits() ^ Dice(!stream).bits())
    }

    /// `$CSID_SEED`, which repeats a run, or another one each time.
    pub fn seed() -> u64 {
        match std::env::var("CSID_SEED") {
            Ok(text) => text.parse().expect("CSID_SEED is a number"),
            Err(_) => {
                let now = std::time::UNIX_EPOCH.elapsed().expect("a time after 1970");
                Dice(now.as_nanos() as u64).bits() >> 32
            }
        }
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for last in (1..all.len()).rev() {
            all.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}
