//! No space is left for the journal, now and then: calls fail, and nothing else comes of it.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use csid_client::{AccessMode, DeregisterOptions, MountFilter};
use csid_tests::ask::*;
use csid_tests::dice::Dice;
use csid_tests::fault::Fault;
use csid_tests::power::record;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, world};
use rustix::mount::MountFlags;

use crate::clients::{CLIENTS, Dues, REFUSED, caller, check, dues};
use crate::rounds;

/// Times that the clients work, in one world.
const SPELLS: usize = 15;

/// A small file system, at `path`.
pub fn small_disk(path: &Path, options: &str) {
    fs::DirBuilder::new().mode(0o700).recursive(true).create(path).expect("a directory");
    let options = std::ffi::CString::new(format!("mode=0700,{options}")).expect("options");
    rustix::mount::mount("tmpfs", path, "tmpfs", MountFlags::empty(), options.as_c_str()).expect("a disk");
}

/// Whatever is written to `disk` from now on finds no space.
pub fn fill(disk: &Path) {
    let mut filler = File::options().create(true).append(true).open(disk.join("filler")).expect("a file");
    for size in [65536, 512] {
        while filler.write_all(&vec![0; size]).is_ok() {}
    }
}

pub fn make_room(disk: &Path) {
    fs::remove_file(disk.join("filler")).expect("the filler");
}

/// The disk fills up and is freed again, until `stop`.
async fn filler(disk: PathBuf, mut dice: Dice, stop: Rc<Cell<bool>>) {
    while !stop.get() {
        tokio::time::sleep(Duration::from_millis(dice.below(30))).await;
        fill(&disk);
        tokio::time::sleep(Duration::from_millis(dice.below(60))).await;
        make_room(&disk);
    }
}

/// Clients work for a random while, with space and without; then csid is left alone, or killed and started again.
async fn work(w: &mut World, dice: &mut Dice) -> usize {
    let local = tokio::task::LocalSet::new();
    let stop = Rc::<Cell<bool>>::default();
    let record = w.path("record");
    let mut callers = Vec::new();
    for number in 0..CLIENTS {
        let (client, dice) = (w.client().await, Dice::new(dice.bits(), number));
        let record = record::open(&record).expect("the record");
        callers.push(local.spawn_local(caller(client, record, format!("c{number}"), dice, stop.clone())));
    }
    let filler = filler(w.path("state/journal"), Dice::new(dice.bits(), 0), stop.clone());
    let filler = local.spawn_local(filler);
    local.run_until(tokio::time::sleep(Duration::from_millis(dice.below(600)))).await;
    if dice.once_in(3) {
        w.kill();
    }
    stop.set(true);
    let mut full = 0;
    for caller in callers {
        full += local.run_until(caller).await.expect("a client");
    }
    local.run_until(filler).await.expect("the filler");
    if w.dead() {
        assert!(w.launch(&[]).await, "csid starts");
    }
    full
}

fn spells(seed: u64) {
    world(async move |w| {
        small_disk(&w.path("state/journal"), "size=16m");
        let refuse = Rule::always("NodePublishVolume", Act::Fail(3)).of(REFUSED);
        w.add_plugin("p").await.rules([refuse]);
        let client = w.start().await;
        healthy(&client, "p").await;
        let mut dice = Dice::new(seed, 1);
        let (mut due, mut full) = (Dues::new(), 0);
        for spell in 0..SPELLS {
            full += work(w, &mut dice).await;
            let client = w.client().await;
            let record = record::read(&w.path("record")).expect("the record");
            fs::remove_file(w.path("record")).expect("the record");
            due = dues(&due, &record);
            check(w, &client, &mut due).await;
            eprintln!("CSID_SEED={seed}: spell {spell} was good");
        }
        let client = w.client().await;
        for row in client.list_mounts(MountFilter::default()).await.expect("the rows") {
            unmount(&client, &row.volume, &row.consumer).await.expect("an unmount");
        }
        w.nothing_left(&client).await;
        assert!(full > 0, "the disk was full");
        count("calls that found no space for the journal", full);
    });
}

#[test]
fn no_space_for_the_journal_is_an_error_and_no_more() {
    rounds().for_each(spells);
}

/// Volumes whose deregistrations use up the room in the journal's own log.
const SPARES: usize = 100;

/// The disk fills up between the commit of an unmount and that of the end of its claim.
#[test]
fn claim_of_an_unmount_ends_when_there_is_space() {
    world(async |w| {
        let journal = w.path("state/journal");
        small_disk(&journal, "size=16m");
        let fault = Fault::of(w);
        w.add_plugin("p").await;
        let client = w.start().await;
        healthy(&client, "p").await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        for n in 0..SPARES {
            registered(&client, &format!("spare{n}"), &[AccessMode::SingleNodeWriter]).await;
        }
        mount_registered(&client, "v", "one").await.expect("a mount");
        fault.arm("claim.held");
        let asking = client.clone();
        let asked = tokio::spawn(async move { unmount(&asking, "v", "one").await });
        fault.reached("claim").await;
        // csid makes room in its own log when a commit finds none. It runs out of that, too.
        for n in 0.. {
            fill(&journal);
            let (spare, options) = (format!("spare{n}"), DeregisterOptions::default());
            if client.deregister_volume(NAMESPACE, &spare, options).await.is_err() {
                break;
            }
        }
        fault.disarm();
        let refused = asked.await.unwrap().unwrap_err();
        assert!(refused.to_string().contains("no space is left"), "{refused}");
        let left = claims(&client).await;
        assert!(left.len() == 1 && !left[0].releasing && rows(&client).await.is_empty(), "{left:?}");
        make_room(&journal);
        eventually("the claim ends", async || claims(&client).await.is_empty()).await;
        mount_registered(&client, "v", "two").await.expect("another consumer's mount");
        unmount(&client, "v", "two").await.expect("an unmount");
        w.nothing_left(&client).await;
    });
}
