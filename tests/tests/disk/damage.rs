//! The journal's files are damaged at random while csid is down, with mounts live and calls cut off. Either all rows are
//! right, or csid says that they are not: nothing is changed until a new journal is begun, and that goes on with what is
//! mounted.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use csid_client::{Client, Error, Kind, ReconcileOptions, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::dice::Dice;
use csid_tests::kernel::{self, Mount};
use csid_tests::plugin::Recorded;
use csid_tests::power::record;
use csid_tests::world::{World, count, eventually, refusal, world};

use crate::clients::{CLIENTS, Dues, REFUSED, VOLUMES, caller, check, dues};
use crate::rounds;

/// Times that the journal is damaged, in one world.
const DAMAGES: usize = 12;

/// Returns the mounts of csid's consumers.
fn mounts(w: &World) -> Vec<Mount> {
    kernel::volumes_below(&w.path("state/plugins")).expect("the mount table")
}

fn published(mounts: &[Mount]) -> BTreeSet<PathBuf> {
    let points = mounts.iter().map(|mount| mount.point.clone());
    points.filter(|point| point.iter().any(|part| part == "publish")).collect()
}

/// Lets clients work for a random time, and then kills csid.
async fn work(w: &mut World, dice: &mut Dice) {
    let local = tokio::task::LocalSet::new();
    let stop = Rc::<Cell<bool>>::default();
    let mut callers = Vec::new();
    for number in 0..CLIENTS {
        let (client, dice) = (w.client().await, Dice::new(dice.bits(), number));
        let record = record::open(&w.path("record")).expect("the record");
        callers.push(local.spawn_local(caller(client, record, format!("c{number}"), dice, stop.clone())));
    }
    local.run_until(tokio::time::sleep(Duration::from_millis(dice.below(200)))).await;
    match dice.below(3) {
        0 => w.kill(),
        1 => local.run_until(w.stop()).await,
        _ => stop.set(true),
    }
    for caller in callers {
        assert_eq!(local.run_until(caller).await.expect("a client"), 0, "there is space");
    }
    if !w.dead() {
        w.kill();
    }
    let ended = |call: &Recorded| call.code.is_some() || call.cancelled;
    eventually("the plugin has done what it was asked", async || w.plugin("p").calls().iter().all(ended))
        .await;
}

/// Cut, zero or flip something in a file of the journal; what was done.
fn damage(w: &World, dice: &mut Dice) -> String {
    let mut files = ["csid.db", "csid.db-wal"].map(|name| w.path("state/journal").join(name)).to_vec();
    files.retain(|file| fs::metadata(file).is_ok_and(|metadata| metadata.len() > 0));
    let file = &files[dice.below(files.len() as u64) as usize];
    let mut bytes = fs::read(file).expect("its bytes");
    let place = dice.below(bytes.len() as u64) as usize;
    let what = match dice.below(3) {
        0 => {
            bytes.truncate(place);
            "cut at"
        }
        1 => {
            let end = bytes.len().min(place + 4096);
            bytes[place..end].fill(0);
            "zeroed from"
        }
        _ => {
            bytes[place] ^= 1 << dice.below(8);
            "a bit flipped at"
        }
    };
    fs::write(file, bytes).expect("it is damaged");
    format!("{}: {what} {place}", file.display())
}

/// Nothing is unmounted or forgotten, and nothing is changed.
async fn refuses(w: &mut World, client: &Client, live: &[Mount], what: &str) {
    let calls = w.plugin("p").volume_calls().len();
    let shown: BTreeSet<_> = rows(client).await.into_iter().map(|row| PathBuf::from(row.source)).collect();
    let hidden: Vec<_> = published(live).difference(&shown).cloned().collect();
    assert!(hidden.is_empty(), "{what}: {hidden:?} are mounted and not shown");
    assert_eq!(refusal(mount(client, "new", inline("new")).await).0, Kind::StateCorrupt, "{what}");
    assert_eq!(refusal(unmount(client, "v0", "c0").await).0, Kind::StateCorrupt, "{what}");
    assert_eq!(mounts(w), live, "{what}");
    assert_eq!(w.plugin("p").volume_calls().len(), calls, "{what}: the plugin was asked");
}

/// A new journal has what is mounted, and all of it can be unmounted.
async fn goes_on(w: &mut World, client: &Client, live: &[Mount], what: &str) {
    let anew = ReconcileOptions { new_journal: Some(true), ..ReconcileOptions::default() };
    client.reconcile(anew).await.expect("a new journal");
    let client = w.client().await;
    settled(&client).await;
    healthy(&client, "p").await;
    assert_eq!(mounts(w), live, "{what}");
    let recorded: BTreeSet<_> = rows(&client)
        .await
        .into_iter()
        .filter(|row| row.state == "mounted")
        .map(|row| {
            assert_eq!(row.consumer, "unknown", "{what}: {row:?}");
            PathBuf::from(row.source)
        })
        .collect();
    assert_eq!(recorded, published(live), "{what}");
    // Directories of calls that were cut off, which no row explains any more.
    let orphans = ReconcileOptions { remove_orphans: Some(true), ..ReconcileOptions::default() };
    client.reconcile(orphans).await.expect("a report");
    // A volume whose id could not be read gets it back from who names it.
    for volume in (0..VOLUMES).map(|number| format!("v{number}")).chain([REFUSED.to_owned()]) {
        match mount(&client, "c0", shared(&volume)).await {
            Ok(_) => {}
            Err(Error::Csid(error)) if error.kind == Kind::ClaimConflict => {}
            Err(other) => panic!("{what}: {volume}: {other:?}"),
        }
    }
    eventually("every row is unmounted", async || {
        for row in rows(&client).await {
            let options = UnmountOptions { tag: Some(row.tag), ..UnmountOptions::default() };
            let result = client.unmount(&row.namespace, &row.volume, &row.consumer, options).await;
            result.unwrap_or_else(|error| panic!("{what}: {} {}: {error:?}", row.volume, row.source));
        }
        rows(&client).await.is_empty()
    })
    .await;
    w.nothing_left(&client).await;
}

fn damages(seed: u64) {
    world(async move |w| {
        w.add_plugin("p").await;
        // A publish that csid's end cut off has made no mount. Its row may be lost with the journal, and nothing else explains it.
        w.may_excuse(22, "NodeUnstageVolume of a volume that is not known to be gone from ");
        let mut client = w.start().await;
        let mut dice = Dice::new(seed, 2);
        let (mut due, mut refused) = (Dues::new(), 0);
        for _ in 0..DAMAGES {
            healthy(&client, "p").await;
            work(w, &mut dice).await;
            let live = mounts(w);
            let what = damage(w, &mut dice);
            client = w.start().await;
            due = dues(&due, &record::read(&w.path("record")).expect("the record"));
            fs::remove_file(w.path("record")).expect("the record");
            if w.status().contains("damaged") {
                eprintln!("CSID_SEED={seed}: {what}: refused");
                refuses(w, &client, &live, &what).await;
                goes_on(w, &client, &live, &what).await;
                client = w.client().await;
                due.clear();
                refused += 1;
            } else {
                eprintln!("CSID_SEED={seed}: {what}: nothing that was in use");
                check(w, &client, &mut due).await;
            }
        }
        count("damaged journals that were refused and replaced", refused);
        count("damages that hit nothing in use", DAMAGES - refused);
        assert!(refused > 0);
    });
}

#[test]
fn damage_is_reported_and_a_new_journal_works() {
    rounds().for_each(damages);
}
