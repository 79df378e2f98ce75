//! The disk under csid: power cuts, no space left, damaged files. `CSID_SEED` repeats a run, `CSID_ROUNDS` makes it longer. Needs
//! csi-local to be built, as a test of the workspace has it.

mod clients;
mod damage;
mod full;
mod power;
mod volume;

use csid_tests::dice::Dice;

/// The seed of each round, printed.
fn rounds() -> impl Iterator<Item = u64> {
    let rounds =
        std::env::var("CSID_ROUNDS").map_or(1, |text| text.parse().expect("CSID_ROUNDS is a number"));
    let first = Dice::seed();
    (first..first + rounds).inspect(|seed| eprintln!("CSID_SEED={seed}"))
}
