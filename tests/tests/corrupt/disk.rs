//! No space is left for the journal.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;

use csid_client::Kind;
use csid_tests::world::{count, eventually, refusal, world};
use rustix::mount::MountFlags;

use super::*;

/// The journal on a small disk of its own.
fn on_a_small_disk(w: &World) {
    fs::DirBuilder::new().mode(0o700).create(journal(w)).unwrap();
    rustix::mount::mount("tmpfs", journal(w), "tmpfs", MountFlags::empty(), c"mode=0700,size=1m").unwrap();
}

fn fill(w: &World) {
    let filler = journal(w).join("filler");
    let mut filler = File::options().create(true).append(true).open(filler).unwrap();
    while filler.write_all(&[0; 512]).is_ok() {}
}

fn assert_full<T: std::fmt::Debug>(result: csid_client::Result<T>) {
    let (kind, error) = refusal(result);
    assert_eq!((kind, error.details.retryable), (Kind::Internal, Some(true)), "{error}");
    assert!(error.message.contains("no space is left"), "{error}");
}

/// csid starts on a full disk, is to be asked, and goes on when there is room.
#[test]
fn start_on_a_full_disk() {
    world(async |w| {
        on_a_small_disk(w);
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        let (before, live) = (facts(&rows(&client).await), mounts(w));
        // Without a log there is none to be emptied.
        w.stop().await;
        fill(w);
        let client = w.start().await;
        assert!(w.status().contains("no space is left"), "{}", w.status());
        assert_eq!(facts(&rows(&client).await), before);
        assert_eq!(state_of(&client).await, "degraded");
        let calls = w.plugin("p").volume_calls().len();
        assert_full(mount(&client, "job", inline("v")).await);
        assert_full(unmount(&client, "v", "job").await);
        assert_eq!((mounts(w), w.plugin("p").volume_calls().len()), (live, calls));

        fs::remove_file(journal(w).join("filler")).unwrap();
        healthy(&client, "p").await;
        eventually("csid is ready", async || state_of(&client).await == "ready").await;
        assert_eq!(facts(&rows(&client).await), before);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// csid makes room by emptying its log, which may be enough for a call or two more; each time the rest is filled again.
#[test]
fn full_disk_is_an_error_and_changes_nothing() {
    world(async |w| {
        on_a_small_disk(w);
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        fs::write(source.join("file"), "data").unwrap();
        let live = mounts(w);
        let (mut mounts_refused, mut unmounts_refused) = (0, 0);
        for round in 0..4 {
            for attempt in 0..100 {
                assert!(attempt < 99, "it is never full");
                fill(w);
                let (before, there) = (facts(&rows(&client).await), mounts(w));
                let calls = w.plugin("p").volume_calls().len();
                let volume = format!("new-{round}-{attempt}");
                let result = mount(&client, "job", inline(&volume)).await;
                if result.is_err() {
                    assert_full(result);
                    if w.plugin("p").volume_calls().len() == calls {
                        assert_eq!(facts(&rows(&client).await), before);
                        assert_eq!(mounts(w), there, "a mount without a row");
                        mounts_refused += 1;
                    }
                    break;
                }
                let _ = unmount(&client, &volume, "job").await;
            }
            fill(w);
            let result = unmount(&client, "v", "job").await;
            if result.is_err() {
                assert_full(result);
                assert!(rows(&client).await.iter().any(|row| row.volume == "v"), "a mount without a row");
                unmounts_refused += 1;
            }
            fs::remove_file(journal(w).join("filler")).unwrap();
            // What the full disk ended half-way is undone, and the next call works.
            mounted(&client, "job", inline("v")).await;
            for row in rows(&client).await.iter().filter(|row| row.volume != "v") {
                unmount(&client, &row.volume, "job").await.unwrap();
            }
            eventually("only the first mount is left", async || {
                rows(&client).await.iter().all(|row| row.volume == "v" && row.state == "mounted")
            })
            .await;
            assert_eq!(mounts(w).len(), live.len());
        }
        count("mounts refused", mounts_refused);
        count("unmounts refused", unmounts_refused);
        assert!(mounts_refused > 0 && unmounts_refused > 0);
        assert_eq!(state_of(&client).await, "ready");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
