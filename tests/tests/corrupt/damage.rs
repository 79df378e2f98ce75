//! Damage by chance: cuts and flipped bytes anywhere in the file and in its log. `CSID_SEED` repeats a run.

use csid_client::Kind;
use csid_tests::dice::Dice;
use csid_tests::world::{count, refusal, world};

use super::*;

const ROUNDS: usize = 60;
/// Where SQLite keeps `PRAGMA user_version`.
pub const SCHEMA_VERSION: std::ops::Range<usize> = 60..64;

/// Damage one of the files, and say how.
fn damage(good: &Files, dice: &mut Dice) -> (String, Files) {
    let names: Vec<&String> =
        good.iter().filter(|(_, bytes)| !bytes.is_empty()).map(|(name, _)| name).collect();
    let name = dice.of(&names).clone();
    let mut files = good.clone();
    let bytes = files.get_mut(&name).expect("the file");
    let length = bytes.len();
    let place = dice.below(length as u64) as usize;
    let what = match dice.below(4) {
        0 => {
            bytes.truncate(place);
            format!("{name} cut to {place} of {length}")
        }
        1 => {
            let end = length.min(place + 1 + dice.below(512) as usize);
            bytes[place..end].fill(0);
            format!("{name} zeroed from {place} to {end}")
        }
        _ => {
            // The schema's version stands there: with another bit in it the journal is a newer csid's, which does not start.
            let place = if name == "csid.db" && SCHEMA_VERSION.contains(&place) { 0 } else { place };
            let bit = dice.below(8);
            bytes[place] ^= 1 << bit;
            format!("{name}: bit {bit} of byte {place} flipped")
        }
    };
    (what, files)
}

/// Each time either everything is as it was, or csid says that it does not know and what is mounted.
async fn survive(w: &mut World, good: &Files, before: &[MountRow], seed: u64) {
    let live = mounts(w);
    let mark = fs::read(w.path("run/journal-seen")).unwrap();
    let calls = w.plugin("p").volume_calls().len();
    let (mut sound, mut refused) = (0, 0);
    let mut dice = Dice::new(seed, 0);
    eprintln!("CSID_SEED={seed}");
    for _ in 0..ROUNDS {
        let (what, damaged) = damage(good, &mut dice);
        put(&journal(w), &damaged);
        fs::write(w.path("run/journal-seen"), &mark).unwrap();
        let client = w.start().await;
        let shown = rows(&client).await;
        if w.status().contains("damaged") {
            refused += 1;
            assert_eq!(state_of(&client).await, "degraded", "{what}");
            for row in before {
                let same = shown.iter().filter(|shown| shown.source == row.source);
                assert_eq!(same.count(), 1, "{what}: {} in {shown:#?}", row.source);
            }
            let (kind, error) = refusal(unmount(&client, "v", "job").await);
            assert_eq!(kind, Kind::StateCorrupt, "{what}: {error}");
            w.kill();
            assert_untouched(w, &damaged, &what);
        } else {
            sound += 1;
            assert_eq!(facts(&shown), facts(before), "{what}");
            w.kill();
        }
        assert_eq!(mounts(w), live, "{what}");
        assert_eq!(w.plugin("p").volume_calls().len(), calls, "{what}: no plugin was asked for anything");
    }
    count("damaged journals that were refused", refused);
    count("damages that hit nothing in use", sound);
    assert!(refused > 0);
}

#[test]
fn log_of_a_csid_that_was_killed() {
    world(async |w| {
        let client = populated(w).await;
        let before = rows(&client).await;
        w.kill();
        let good = files(&journal(w));
        assert!(good["csid.db-wal"].len() > good["csid.db"].len());
        survive(w, &good, &before, Dice::seed()).await;
    });
}

#[test]
fn file_of_a_csid_that_was_stopped() {
    world(async |w| {
        let client = populated(w).await;
        let before = rows(&client).await;
        w.stop().await;
        let good = files(&journal(w));
        assert_eq!(good.len(), 1, "{:?}", good.keys());
        survive(w, &good, &before, Dice::seed()).await;
    });
}
