//! A plugin that is killed while many clients mount and unmount.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use csid_client::{Client, Error, Kind, Target, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::world::count;

use crate::alone;

const CLIENTS: usize = 32;
const KILLS: usize = 12;
const DEADLINE: Duration = Duration::from_secs(5);
/// No caller waits beyond its deadline, however slow the machine is.
const NO_ANSWER: Duration = Duration::from_secs(30);

/// A client's last answer about its mount; `None`: an error, which says nothing about what is there.
#[derive(Debug)]
struct Life {
    volume: String,
    consumer: String,
    reply: Option<bool>,
    source: PathBuf,
    answers: BTreeMap<String, usize>,
    longest: Duration,
}

/// Mount and unmount until `until`, two clients to a volume.
async fn live(socket: PathBuf, number: usize, until: Instant) -> Life {
    let client = Client::connect(&Target::Socket(socket)).await.expect("csid");
    let mut life = Life {
        volume: format!("v{}", number / 2),
        consumer: format!("c{number}"),
        reply: Some(false),
        source: PathBuf::new(),
        answers: BTreeMap::new(),
        longest: Duration::ZERO,
    };
    let mut mounts = false;
    while Instant::now() < until {
        mounts = !mounts;
        let begun = Instant::now();
        let Ok(answer) = tokio::time::timeout(NO_ANSWER, once(&client, &mut life, mounts)).await else {
            panic!("a call without an answer: {life:?}");
        };
        life.longest = life.longest.max(begun.elapsed());
        let word = match answer {
            Ok(()) => {
                life.reply = Some(mounts);
                "answered".to_owned()
            }
            Err(Error::Csid(error)) => {
                life.reply = None;
                assert_ne!(error.kind, Kind::Internal, "{error}");
                error.kind.name().to_owned()
            }
            Err(other) => panic!("csid itself lives: {other:?}"),
        };
        *life.answers.entry(word).or_default() += 1;
    }
    life
}

async fn once(client: &Client, life: &mut Life, mounts: bool) -> csid_client::Result<()> {
    if mounts {
        life.source =
            mount(client, &life.consumer, within(DEADLINE, shared(&life.volume))).await?.source.into();
        assert!(client.has_mount(life.source.to_str().unwrap()).await?, "answered, and not there: {life:?}");
        return Ok(());
    }
    let deadline_usec = Some(DEADLINE.as_micros() as u64);
    let options = UnmountOptions { deadline_usec, ..UnmountOptions::default() };
    client.unmount(NAMESPACE, &life.volume, &life.consumer, options).await
}

#[test]
fn plugin_killed_under_load_answers_every_caller() {
    alone(async |w| {
        // The witness may learn of the end of a killed call after csid, which then repeats it.
        w.may_excuse(18, "");
        let client = running(w).await;
        let until = Instant::now() + Duration::from_secs(10);
        let lives: Vec<_> = (0..CLIENTS).map(|n| tokio::spawn(live(w.socket(), n, until))).collect();
        for n in 0..KILLS {
            tokio::time::sleep(Duration::from_millis(400)).await;
            w.plugin("p").kill();
            tokio::time::sleep(Duration::from_millis(50 * (n as u64 % 4))).await;
            w.plugin("p").start().await;
        }
        let mut answers = BTreeMap::<String, usize>::new();
        let (mut held, mut longest) = (Vec::new(), Duration::ZERO);
        for life in lives {
            let life = life.await.unwrap();
            for (word, number) in &life.answers {
                *answers.entry(word.clone()).or_default() += number;
            }
            longest = longest.max(life.longest);
            held.push(life);
        }
        healthy(&client, "p").await;
        for life in &held {
            let row = row(&client, &life.volume, &life.consumer).await;
            match life.reply {
                Some(true) => {
                    let row = row.unwrap_or_else(|| panic!("an answered mount is lost: {life:?}"));
                    assert_eq!((row.state.as_str(), row.healthy), ("mounted", true), "{life:?}: {row:?}");
                    assert_eq!(kernel::stacked(&life.source).unwrap(), 1, "{life:?}");
                }
                Some(false) => assert!(row.is_none(), "an answered unmount is not: {row:?}"),
                None => {}
            }
        }
        for life in &held {
            mounted(&client, &life.consumer, shared(&life.volume)).await;
            unmount(&client, &life.volume, &life.consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
        count("kills of the plugin", KILLS);
        for (word, number) in &answers {
            count(&format!("calls: {word}"), *number);
        }
        assert!(answers["answered"] > CLIENTS, "it was load: {answers:?}");
        count("µs the longest call took", longest.as_micros() as usize);
    });
}
