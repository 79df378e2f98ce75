use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::*;
use crate::store::registry::{RecordFilter, Swap};

/// A child that says what was answered, killed when it has done so this often; its last answer.
fn killed(test: &str, directory: &Path, after: usize) -> (usize, u64) {
    let mut child: Child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", &format!("store::tests::kill::{test}")])
        .env("CSID_TEST_JOURNAL", directory)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (mut answered, mut seen) = ((0, 0), 0);
    while let Some(Ok(line)) = lines.next() {
        let Some(numbers) = line.strip_prefix("answered ") else { continue };
        let (n, sequence) = numbers.split_once(' ').unwrap();
        answered = (n.parse().unwrap(), sequence.parse().unwrap());
        seen += 1;
        if seen == after {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(seen >= after);
    answered
}

/// The child of [`kill_loses_nothing_answered`]: commits for ever, and says what was answered.
#[tokio::test]
#[ignore = "a child process"]
async fn commit_for_ever() {
    let Some(directory) = std::env::var_os("CSID_TEST_JOURNAL") else { return };
    let (store, loaded) = opened(Path::new(&directory)).unwrap();
    for n in loaded.mounts.len().. {
        let durability = if n % 3 == 0 { Durability::Disk } else { Durability::Process };
        let changes = vec![Change::PutMount(mount("v", &format!("{n:06}")).into()), event("e")];
        store.commit(changes, durability).await.unwrap();
        println!("\nanswered {n} {}", store.event_sequence());
    }
}

#[test]
fn kill_loses_nothing_answered() {
    let (_root, directory) = temporary();
    let mut total = 0;
    for round in 1..=5 {
        let answered = killed("commit_for_ever", &directory, 150 * round);
        let (journal, loaded) = open_journal(&directory).unwrap();
        // One commit at most was done and not yet answered.
        assert!((answered.0 + 1..=answered.0 + 2).contains(&loaded.mounts.len()));
        assert!((answered.1..=answered.1 + 1).contains(&journal.counters.sequence));
        assert!(loaded.mounts.iter().enumerate().all(|(n, row)| row.key.consumer == format!("{n:06}")));
        total = loaded.mounts.len();
    }
    assert!(total > 2000);
}

/// The child of [`kill_leaves_no_half_of_a_swap`]: each swap adds a claim, and says so in the registration.
#[tokio::test]
#[ignore = "a child process"]
async fn swap_for_ever() {
    let Some(directory) = std::env::var_os("CSID_TEST_JOURNAL") else { return };
    let (store, _) = opened(Path::new(&directory)).unwrap();
    loop {
        let before = store.record(samples::name("data")).await.unwrap();
        let n = before.claims.len();
        let consumers: Vec<_> = (0..=n).map(|n| format!("{n:06}")).collect();
        let consumers: Vec<_> = consumers.iter().map(String::as_str).collect();
        let mut after = samples::record("data", &consumers);
        after.registration.as_mut().unwrap().capacity = Some(n as u64 + 1);
        let durability = if n % 3 == 0 { Durability::Disk } else { Durability::Process };
        samples::swap_in(&store, Swap { durability, ..samples::swap(&before, after) }).await.unwrap();
        println!("\nanswered {n} {}", store.event_sequence());
    }
}

#[tokio::test]
async fn kill_leaves_no_half_of_a_swap() {
    let (_root, directory) = temporary();
    for round in 1..=4 {
        let answered = killed("swap_for_ever", &directory, 30 * round);
        let (store, _) = opened(&directory).unwrap();
        let (found, _) = store.records(RecordFilter::default()).await.unwrap();
        let claims = found[0].claims.len();
        assert!((answered.0 + 1..=answered.0 + 2).contains(&claims));
        assert_eq!(found[0].registration.as_ref().unwrap().capacity, Some(claims as u64));
        assert_eq!(store.event_sequence(), claims as u64);
        store.close().await.unwrap();
    }
}
